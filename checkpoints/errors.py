"""What goes wrong with a checkpoint. The builder turns it into a start-up error."""


class CheckpointError(Exception):
    """`str(error)` is one line that names the file, the tensor or key, the rule it breaks, and what to do."""


def some(names: list[str], limit: int = 4) -> str:
    """`a, b, c, d and 12 more`"""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
