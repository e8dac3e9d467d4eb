"""One thing to compile or run: a function, its arguments, and where they sit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np


@dataclass(frozen=True, kw_only=True)
class Program:
    """fn(*inputs()). inputs uses jax.numpy: traced for shapes alone, or run on a device. donate: indices of arguments.

    mesh: None is one device; else every argument is split over the mesh's one axis by its first dimension.
    kv_bytes, layer_bytes: of the KV cache on a device, and of one layer of its smallest array; 0 without one.
    block_bytes: shared memory of a GPU kernel, where its config says it.
    """

    fn: Callable
    inputs: Callable[[], tuple]
    donate: tuple[int, ...] = ()
    mesh: Any = None
    kv_bytes: int = 0
    layer_bytes: int = 0
    block_bytes: int | None = None

    @property
    def shapes(self) -> tuple:
        return jax.eval_shape(self.inputs)

    def on(self, devices: Sequence[Any]) -> tuple[Any, Any, tuple]:
        """(mesh, jitted function, arguments as ShapeDtypeStruct with shardings)."""
        mesh = self.mesh
        if mesh is None:
            mesh = jax.sharding.Mesh(np.array(devices[:1]), ("one",))
        spec = jax.sharding.PartitionSpec(*(mesh.axis_names if self.mesh is not None else ()))
        sharding = jax.sharding.NamedSharding(mesh, spec)

        def place(leaf: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        return mesh, jax.jit(self.fn, donate_argnums=self.donate), jax.tree.map(place, self.shapes)


@dataclass(frozen=True, kw_only=True)
class Case:
    """platform: "tpu" or "gpu". build(devices): the program for jax devices; picklable. quick: in the subset for CI."""

    kernel: str
    shape: str
    step: str
    platform: str
    build: Callable[[Sequence[Any]], Program]
    quick: bool = False

    @property
    def name(self) -> str:
        return f"{self.kernel} {self.shape} {self.step}".rstrip()
