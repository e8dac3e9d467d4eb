"""The one rule by which every kernel's backend is chosen."""

from types import SimpleNamespace

import jax
import pytest

from pallas_kernels.backends import choose

CPU, TPU, GPU = (SimpleNamespace(platform=p, device_kind=f"some {p}") for p in ("cpu", "tpu", "gpu"))


def anything(spec, device_kind):
    return None


def no_odd_numbers(spec, device_kind):
    return f"{spec} is odd" if spec % 2 else None


BACKENDS = {"mosaic_tpu": no_odd_numbers, "mosaic_gpu": no_odd_numbers, "xla": anything}


@pytest.mark.parametrize("device, spec, name, fallback", [
    (CPU, 1, "xla", None), (TPU, 2, "mosaic_tpu", None), (TPU, 1, "xla", "mosaic_tpu: 1 is odd"),
    (GPU, 1, "xla", "mosaic_gpu: 1 is odd"),
])  # fmt: skip
def test_auto(monkeypatch, device, spec, name, fallback):
    monkeypatch.setattr(jax, "__version_info__", (0, 12, 0))
    choice = choose("attention", "auto", BACKENDS, spec, device)
    assert (choice.name, choice.fallback, choice.simulated) == (name, fallback, False)


def test_a_kernel_asked_for_on_a_cpu_is_simulated():
    assert choose("attention", "mosaic_tpu", BACKENDS, 2, CPU).simulated
    assert not choose("attention", "xla", BACKENDS, 2, CPU).simulated


@pytest.mark.parametrize("name, spec, device, message", [
    ("cuda", 2, CPU, "attention backend 'cuda' is not one of auto, mosaic_tpu, mosaic_gpu, xla"),
    ("mosaic_tpu", 2, GPU, "attention backend 'mosaic_tpu' runs on tpu \\(simulated on cpu\\), not on gpu"),
    ("mosaic_tpu", 1, TPU, "attention backend 'mosaic_tpu': 1 is odd"),
    ("mosaic_tpu", 1, CPU, "attention backend 'mosaic_tpu': 1 is odd"),
])  # fmt: skip
def test_what_cannot_be_is_named(name, spec, device, message):
    with pytest.raises(ValueError, match=message):
        choose("attention", name, BACKENDS, spec, device)


def test_an_old_jax_has_no_gpu_kernels(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    with pytest.raises(ValueError, match="Mosaic GPU kernels need jax 0.12 or newer"):
        choose("attention", "mosaic_gpu", BACKENDS, 2, GPU)
    assert choose("attention", "auto", BACKENDS, 2, GPU).name == "xla"


def test_a_gpu_is_not_simulated_where_it_would_hang(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 12, 0))
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    with pytest.raises(ValueError, match="needs XLA_FLAGS=--xla_force_host_platform_device_count=8"):
        choose("attention", "mosaic_gpu", BACKENDS, 2, CPU)
