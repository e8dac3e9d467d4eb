"""Grouped matmul, the products of a mixture of experts: one contract, and the choice of a backend.

The rows of a step are sorted by expert: expert e owns the group_sizes[e] rows after those of the experts before it.

    experts = choose_backend("auto", ExpertsSpec(...), device)
    tiles = experts.tiles(group_sizes, num_rows)              # once for a layer's three products
    gate, up = (experts.matmul(x, w, group_sizes, tiles=tiles) for w in (w_gate, w_up))
    out = experts.matmul(silu(gate) * up, w_down, group_sizes, tiles=tiles)

Axis letters: M rows, D contracted, F columns, E experts held by this device, A experts of all devices.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.backends import choose
from pallas_kernels.devices import DEVICES, Device, device_of_kind
from pallas_kernels.grouped_matmul import config, mosaic_gpu, mosaic_tpu, xla
from pallas_kernels.grouped_matmul.config import GpuBlocks, TpuBlocks
from pallas_kernels.grouped_matmul.spec import ExpertsSpec, Problem
from pallas_kernels.grouped_matmul.tiles import GroupTiles, group_tiles
from quant.experts import QuantizedExperts

__all__ = ["Backend", "ExpertsSpec", "GpuBlocks", "GroupTiles", "GroupedMatmulFn", "TpuBlocks", "choose_backend"]


class GroupedMatmulFn(Protocol):
    def __call__(
        self,
        lhs: Float[Array, "M D"],
        rhs: Float[Array, "E D F"] | QuantizedExperts,
        group_sizes: Int[Array, " A"],
        *,
        group_offset: Int[Array, ""] | int = 0,
        layer: Int[Array, ""] | None = None,
        tiles: GroupTiles | None = None,
        preferred_element_type: Any = None,
        blocks: Any = None,
    ) -> Float[Array, "M F"]:
        """Each row times its expert's weights, summed in float32, in preferred_element_type (default: lhs's dtype).

        group_sizes: of every expert, not negative, together at most M. rhs: of the experts group_offset ..
        group_offset + E - 1. Rows of other experts and rows past the sum come out as zeros, whatever is in them, NaN
        included. Weights of experts without rows are not read (but see `xla.ragged_dot`).
        Quantized weights are widened beside the compute units, never in HBM (but see `xla.ragged_dot`).
        layer: rhs holds all layers, [L, E, D, F], and this one's count: a kernel reads them where they lie, while a
        slice of them would be copied for it.
        tiles: of `Backend.tiles` for the same sizes and rows; computed when not given.
        blocks: TpuBlocks or GpuBlocks instead of the chosen ones. ValueError when they do not fit, with the numbers.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One implementation, fitted to a spec. `matmul` is a GroupedMatmulFn."""

    name: str
    spec: ExpertsSpec
    device: Device | None  # what blocks are chosen for; None: nothing to choose
    native: bool  # xla on a GPU or TPU: jax.lax.ragged_dot
    simulated: bool  # runs in Pallas' interpret mode on a CPU: exact and slow
    fallback: str | None  # why the device's own kernel was not taken, where "auto" could not take it

    def tiles(
        self, group_sizes: Int[Array, " A"], num_rows: int, group_offset: Int[Array, ""] | int = 0
    ) -> GroupTiles | None:
        """The visits of a step: the same for every product of a layer, whatever its D and F. None: not needed."""
        if self.native:
            return None
        experts = self.spec.num_experts
        if self.name == "mosaic_tpu":
            rows = align = config.tpu_tile_rows(num_rows)
        elif self.name == "mosaic_gpu":
            rows, align = config.gpu_tile_rows(num_rows, experts), mosaic_gpu.ALIGN
        else:
            rows, align = xla.tile_rows(num_rows, experts), 1
        return group_tiles(group_sizes, num_rows=num_rows, tile_rows=rows, align=align, num_experts=experts,
                           group_offset=group_offset)  # fmt: skip

    def matmul(
        self, lhs, rhs, group_sizes, *, group_offset: jax.Array | int = 0, layer: jax.Array | None = None,
        tiles: GroupTiles | None = None, preferred_element_type: Any = None, blocks: Any = None,
    ) -> jax.Array:  # fmt: skip
        """See GroupedMatmulFn."""
        out_dtype = jnp.dtype(preferred_element_type or lhs.dtype)
        of_layer = rhs if layer is None else jax.eval_shape(partial(_layer_of, layer=0), rhs)
        problem = self._problem(lhs, of_layer, out_dtype)
        if blocks is not None and not isinstance(blocks, {"mosaic_tpu": TpuBlocks, "mosaic_gpu": GpuBlocks}.get(
            self.name, ()
        )):  # fmt: skip
            raise ValueError(f"{type(blocks).__name__} are not blocks of the backend {self.name!r}")
        if self.native:
            one = rhs if layer is None else _layer_of(rhs, layer)
            return xla.ragged_dot(lhs, one, group_sizes, out_dtype=out_dtype, group_offset=group_offset)
        if tiles is None:
            tiles = self._tiles_for(blocks, group_sizes, lhs.shape[0], group_offset)
        assert tiles is not None
        self._check(tiles, blocks, lhs.shape[0])
        if layer is not None:  # all layers' experts in one row, and the tiles name this layer's
            rhs = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), rhs)
            tiles = replace(tiles, expert=tiles.expert + jnp.asarray(layer, jnp.int32) * self.spec.num_experts)
        if self.name == "xla":
            return xla.grouped_matmul(lhs, rhs, tiles, out_dtype=out_dtype)
        assert self.device is not None
        if self.name == "mosaic_tpu":
            if blocks is None:
                blocks = config.tpu_blocks(problem, tiles.tile_rows, self.device)
            config.require_tpu_fit(blocks, problem, self.device)
            vmem_bytes = config.tpu_estimate(blocks, problem, self.device).block_bytes
            return mosaic_tpu.grouped_matmul(
                lhs, rhs, tiles, out_dtype=out_dtype, blocks=blocks, vmem_bytes=vmem_bytes, interpret=self.simulated
            )
        if blocks is None:
            blocks = config.gpu_blocks(problem, tiles.tile_rows, self.device)
        config.require_gpu_fit(blocks, problem, self.device)
        sms = 2 if self.simulated else self.device.cores
        return mosaic_gpu.grouped_matmul(
            lhs, rhs, tiles, out_dtype=out_dtype, blocks=blocks, sms=sms, interpret=self.simulated
        )

    def _problem(self, lhs, rhs, out_dtype) -> Problem:
        """ValueError when the operands are not of the spec or do not fit each other."""
        spec, quantized = self.spec, isinstance(rhs, QuantizedExperts)
        values = rhs.values if quantized else rhs
        (rows, depth), (experts, contracted, columns) = lhs.shape, values.shape
        if contracted != depth or experts != spec.num_experts:
            raise ValueError(f"rhs of {values.shape} must be [E={spec.num_experts}, D={depth}, F]")
        if (lhs.dtype, values.dtype) != (spec.dtype, spec.weight_dtype):
            raise ValueError(f"{lhs.dtype} rows and {values.dtype} weights, for a spec of {spec.dtype} and "
                             f"{spec.weight_dtype}")  # fmt: skip
        if quantized != spec.quantized:
            raise ValueError(f"weights of {values.dtype} must {'' if spec.quantized else 'not '}come as "
                             f"QuantizedExperts")  # fmt: skip
        group = rhs.group_size if quantized else 0
        if quantized and rhs.scales.shape != (experts, depth // group, columns):
            raise ValueError(f"scales of {rhs.scales.shape} must be [E, D // G, F] for values of {values.shape}")
        if quantized and group != (spec.scale_group or depth):
            raise ValueError(f"scales of {group} elements, for a spec of {spec.scale_group or depth}")
        return Problem(rows=rows, depth=depth, columns=columns, experts=experts, dtype=str(lhs.dtype),
                       weight_dtype=str(values.dtype), out_dtype=str(out_dtype), group=group)  # fmt: skip

    def _tiles_for(self, blocks, group_sizes, num_rows: int, group_offset) -> GroupTiles | None:
        if blocks is None:
            return self.tiles(group_sizes, num_rows, group_offset)
        align = blocks.tile_rows if self.name == "mosaic_tpu" else mosaic_gpu.ALIGN
        return group_tiles(group_sizes, num_rows=num_rows, tile_rows=blocks.tile_rows, align=align,
                           num_experts=self.spec.num_experts, group_offset=group_offset)  # fmt: skip

    def _check(self, tiles: GroupTiles, blocks, num_rows: int) -> None:
        if (tiles.num_rows, tiles.num_experts) != (num_rows, self.spec.num_experts):
            raise ValueError(f"tiles for {tiles.num_rows} rows of {tiles.num_experts} experts, not {num_rows} of "
                             f"{self.spec.num_experts}")  # fmt: skip
        align = {"mosaic_tpu": tiles.tile_rows, "mosaic_gpu": mosaic_gpu.ALIGN}.get(self.name, tiles.align)
        if tiles.align != align:
            raise ValueError(f"tiles that start at multiples of {tiles.align}; the backend {self.name!r} needs {align}")
        if blocks is not None and blocks.tile_rows != tiles.tile_rows:
            raise ValueError(f"tiles of {tiles.tile_rows} rows, blocks of {blocks.tile_rows}")


def _layer_of(rhs, layer):
    return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, layer, keepdims=False), rhs)


_KERNELS = {"mosaic_tpu": mosaic_tpu, "mosaic_gpu": mosaic_gpu}
_SIMULATED = {"mosaic_tpu": DEVICES["v6e"], "mosaic_gpu": DEVICES["h200"]}  # what a simulated kernel is fitted to


def choose_backend(name: str, spec: ExpertsSpec, device: Any) -> Backend:
    """See `pallas_kernels.backends.choose`. Raises ValueError with what is missing."""
    backends = {name: partial(_missing, module) for name, module in _KERNELS.items()} | {"xla": lambda spec, kind: None}
    choice = choose("grouped matmul", name, backends, spec, device)
    fitted = None
    if choice.name in _KERNELS:
        fitted = _SIMULATED[choice.name] if choice.simulated else device_of_kind(device.device_kind)
    native = choice.name == "xla" and device.platform != "cpu"
    return Backend(name=choice.name, spec=spec, device=fitted, native=native, simulated=choice.simulated,
                   fallback=choice.fallback)  # fmt: skip


def _missing(kernel: Any, spec: ExpertsSpec, kind: str | None) -> str | None:
    """kind: None for a simulated device."""
    try:
        if kind is not None:
            device_of_kind(kind)
    except KeyError as error:
        return str(error.args[0])
    return kernel.unsupported(spec)
