"""The device-side description of one ragged step.

Axis letters: T tokens, S rows, M pages of the longest row.
"""

from typing import NamedTuple

from jaxtyping import Array, Int


class StepBatch(NamedTuple):
    """T tokens of S rows; row s owns tokens cu_q_lens[s] .. cu_q_lens[s+1]-1, the newest of its kv_lens[s].

    `positions` feeds RoPE; a token's index in the KV cache follows from kv_lens and cu_q_lens. The two differ once a
    cache was compacted. distribution: see `pallas_kernels.ragged_paged_attention.api`.
    """

    tokens: Int[Array, " T"]
    positions: Int[Array, " T"]
    page_table: Int[Array, "S M"]
    kv_lens: Int[Array, " S"]
    cu_q_lens: Int[Array, " S+1"]
    distribution: Int[Array, " 3"]
