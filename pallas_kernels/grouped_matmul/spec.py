"""What a model's experts ask of a grouped matmul; a backend says from it whether it can serve."""

from dataclasses import dataclass

import jax.numpy as jnp

from pallas_kernels.backends import require_positive


@dataclass(frozen=True, kw_only=True)
class ExpertsSpec:
    """num_experts: held by one device. dtype: of rows and results; weight_dtype: of the stored weights.

    scale_group: contracted elements that share a scale; None: one scale a column, or weights that are not quantized.
    sizes: every D and F of the products, as far as they are known when the backend is chosen.
    """

    num_experts: int
    dtype: jnp.dtype
    weight_dtype: jnp.dtype
    scale_group: int | None = None
    sizes: tuple[int, ...] = ()

    def __post_init__(self):
        if self.scale_group is not None and not self.quantized:
            raise ValueError(f"scale_group={self.scale_group} is for 8-bit weights, not {self.weight_dtype}")
        require_positive(self, "num_experts", "scale_group")

    @property
    def quantized(self) -> bool:
        return jnp.dtype(self.weight_dtype).itemsize == 1


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One matmul: M rows (sorted by expert) of D numbers, E experts held here, F columns.

    group: G, contracted elements that share a scale; 0: weights that are not quantized. The dtypes are names.
    """

    rows: int
    depth: int
    columns: int
    experts: int
    dtype: str = "bfloat16"
    weight_dtype: str = "bfloat16"
    out_dtype: str = "bfloat16"
    group: int = 0

    @property
    def active(self) -> int:
        """Experts that may have rows."""
        return max(1, min(self.experts, self.rows))

    @property
    def weight_bytes(self) -> int:
        """Of one expert, scales included."""
        scales = 4 * self.depth // self.group if self.group else 0
        return self.columns * (self.depth * jnp.dtype(self.weight_dtype).itemsize + scales)

    @property
    def shape(self) -> dict[str, int | str]:
        """The key of the tuned table."""
        return {"M": self.rows, "D": self.depth, "F": self.columns, "E": self.experts, "G": self.group,
                "dtype": self.dtype, "weights": self.weight_dtype}  # fmt: skip
