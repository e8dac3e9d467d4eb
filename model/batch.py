"""The device-side description of one ragged step.

Axis letters: T tokens, S rows, M pages of the longest row; of all data groups, or on a device of its own.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Int, UInt32

from sharding.rules import Axes


class StepBatch(NamedTuple):
    """T tokens of S rows; row s owns tokens cu_q_lens[s] .. cu_q_lens[s+1]-1, the newest of its kv_lens[s].

    With G data groups every array holds one after the other: T and S are G times those of a group, and cu_q_lens
    [G (S/G + 1)], distribution [G 3] and the pages count within each. `AxisRules.map_over_shards` gives a device one
    group, which then looks as if there were no others.

    `positions` feeds RoPE; a token's index in the KV cache follows from kv_lens and cu_q_lens. The two differ once a
    cache was compacted. distribution: see `pallas_kernels.ragged_paged_attention.api`.
    """

    tokens: Int[Array, " T"]
    positions: Int[Array, " T"]
    page_table: Int[Array, "S M"]
    kv_lens: Int[Array, " S"]
    cu_q_lens: Int[Array, " S+G"]
    distribution: Int[Array, " 3G"]
    real: Bool[Array, " T"] | None = None  # which tokens are a row's; None: of each group the first ones
    plans: Mapping[int, Any] | None = None  # of `model.context`, where the mesh has such an axis
    # Which of its row's tokens each token sees, where rows may end in trees; as of ragged paged attention.
    tree_mask: UInt32[Array, "T C"] | None = None

    @property
    def of_rows(self) -> tuple[Array, Array, Array, Array]:
        """What attention wants to know, with the axes below."""
        return self.page_table, self.kv_lens, self.cu_q_lens, self.distribution


ROW_AXES: tuple[Axes, ...] = (("rows", None), ("rows",), ("groups",), ("groups",))  # of `StepBatch.of_rows`
