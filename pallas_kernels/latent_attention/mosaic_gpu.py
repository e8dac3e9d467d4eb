"""Not written yet."""


def unsupported(spec, device_kind: str | None) -> str | None:
    return "not written yet"


def layout(**fields):
    raise NotImplementedError


def latent_attention(*args, interpret: bool = False, **options):
    raise NotImplementedError
