"""What a kernel must know about a chip: memory beside the compute units, bandwidth, peak rate, clock.

All numbers are for one JAX device: a TPU v7x chip has two TensorCores, and each is a device of its own.
To add a chip, add an entry to DEVICES with the source of its numbers; `python -m scripts.tune` then writes its table.
"""

from dataclasses import dataclass
from typing import Literal

KiB, MiB = 1 << 10, 1 << 20


@dataclass(frozen=True, kw_only=True)
class Device:
    """name: short name, used for tuned tables and targets. kinds: what `jax.Device.device_kind` says.

    vmem_bytes: vector memory of a TensorCore (0 on a GPU). smem_bytes: a TPU's scalar memory, where page tables and
    lengths live; on a GPU the shared memory that one block may ask for. cores: streaming multiprocessors; 1 on a TPU.
    hbm_bandwidth in bytes/s, bf16_flops in dense operations/s, clock_hz: bundles/s on a TPU, cycles/s on a GPU.
    """

    name: str
    platform: Literal["tpu", "gpu"]
    kinds: tuple[str, ...]
    cores: int = 1
    vmem_bytes: int = 0
    smem_bytes: int
    hbm_bytes: int
    hbm_bandwidth: float
    bf16_flops: float
    clock_hz: float

    @property
    def block_memory_bytes(self) -> int:
        """The memory that a kernel's blocks must fit in: VMEM on a TPU, shared memory on a GPU."""
        return self.vmem_bytes if self.platform == "tpu" else self.smem_bytes

    def dma_seconds(self, num_bytes: float) -> float:
        return num_bytes / self.hbm_bandwidth

    def dma_cycles(self, num_bytes: float) -> float:
        """How many bundles (cycles) pass while this many bytes come from HBM at full bandwidth."""
        return self.dma_seconds(num_bytes) * self.clock_hz


# TPU capacities, bandwidth and rates: jax's own table (jax/_src/tpu_info.py), per TensorCore; Google's documentation
# pages of v5e, v5p, v6e and TPU7x agree within rounding. Clocks are not published for all; they follow from
# rate = 2 x multiply-accumulators x clock. v5e, v5p: 4 x 128^2 MACs a core -> 1.50, 1.75 GHz. v6e, v7x: 2 units of
# 256^2, which take two rows a cycle -> 1.75, 2.2 GHz (one row a cycle would mean 3.5 and 4.4 GHz).
# GPUs: NVIDIA's H100 and H200 SXM data sheets; shared memory from the CUDA programming guide, compute capability 9.0
# (227 KiB of 228 for one block); 1.83 GHz is the clock that the data sheet's 989 Tflop/s means: 132 x 4096 x clock.
DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device(
            name="v5e", platform="tpu", kinds=("TPU v5 lite", "TPU v5e"), vmem_bytes=128 * MiB, smem_bytes=MiB,
            hbm_bytes=17_200_000_000, hbm_bandwidth=0.82e12, bf16_flops=197e12, clock_hz=1.5e9,
        ),
        Device(
            name="v5p", platform="tpu", kinds=("TPU v5", "TPU v5p"), vmem_bytes=64 * MiB, smem_bytes=MiB,
            hbm_bytes=51_500_000_000, hbm_bandwidth=1.23e12, bf16_flops=229.5e12, clock_hz=1.75e9,
        ),
        Device(
            name="v6e", platform="tpu", kinds=("TPU v6 lite", "TPU v6e"), vmem_bytes=128 * MiB, smem_bytes=MiB,
            hbm_bytes=34_400_000_000, hbm_bandwidth=1.64e12, bf16_flops=918e12, clock_hz=1.75e9,
        ),
        Device(
            name="v7x", platform="tpu", kinds=("TPU7x",), vmem_bytes=64 * MiB, smem_bytes=MiB,
            hbm_bytes=103_000_000_000, hbm_bandwidth=3.7e12, bf16_flops=1153.5e12, clock_hz=2.2e9,
        ),
        Device(
            name="h100", platform="gpu", kinds=("NVIDIA H100",), cores=132, smem_bytes=227 * KiB,
            hbm_bytes=80_000_000_000, hbm_bandwidth=3.35e12, bf16_flops=989e12, clock_hz=1.83e9,
        ),
        Device(
            name="h200", platform="gpu", kinds=("NVIDIA H200",), cores=132, smem_bytes=227 * KiB,
            hbm_bytes=141_000_000_000, hbm_bandwidth=4.8e12, bf16_flops=989e12, clock_hz=1.83e9,
        ),
    )
}


def device_of_kind(kind: str) -> Device:
    """The entry for `jax.Device.device_kind`, or for a name of DEVICES. KeyError names those that exist.

    Boards of one GPU (SXM, PCIe, NVL) share an entry: what follows the GPU's name does not count.
    """
    for device in DEVICES.values():
        if kind == device.name or kind in device.kinds:
            return device
        if device.platform == "gpu" and any(kind.startswith(f"{known} ") for known in device.kinds):
            return device
    known = ", ".join(f"{device.name} ({device.kinds[0]})" for device in DEVICES.values())
    raise KeyError(f"no numbers for the device kind {kind!r}; pallas_kernels/devices.py has {known}")
