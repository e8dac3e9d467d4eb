"""What the step asks of a drafter that runs on the device, at its end.

Axis letters: T tokens, S rows, of one data group; K drafts a row, V vocab, F features, of the target's hidden states.
"""

from typing import Any, NamedTuple, Protocol

import jax
from jaxtyping import Array, Bool, Float, Int

from model.batch import StepBatch
from model.sampling import SamplingRows


class Settled(NamedTuple):
    """What a step has settled: its rows' tokens without the rejected drafts. Within a row the settled tokens come first
    and in order (of a tree, the accepted path); the places after them, and after all rows, hold anything. Of several
    data groups: one after the other, and places in T count within each."""

    features: Float[Array, "T F"]
    next_tokens: Int[Array, " T"]  # the token that follows each one: known, or sampled just now
    last: Int[Array, " S"]  # where in T a row's last settled token is
    lens: Int[Array, " S"]  # settled tokens of the whole sequence: the cache index of `token`, which is not fed yet
    token: Int[Array, " S"]  # the newest one, sampled after the last settled token
    samples: Bool[Array, " S"]  # false: the row's prompt goes on, no drafts are wanted


class Drafts(NamedTuple):
    tokens: Int[Array, "S K"]
    parents: Int[Array, "S K"] | None = None  # as of `serving.engine.plan.Draft`; None: chains
    # Of a chain, the distribution that each token was drawn from. None: the tokens were not drawn but chosen.
    probabilities: Float[Array, "S K V"] | None = None


class DeviceDrafter(Protocol):
    """An nnx module. It may keep K/V of its own, in pages with the ids of the target's: what is computed, shared,
    evicted and lost is the same."""

    taps: tuple[int, ...]  # layers whose inputs (the residual stream) make the features; (): the normed final states
    probabilistic: bool  # it gives probabilities
    max_drafts: int  # K at most

    def state_shapes(self, num_pages: int) -> Any:
        """A pytree of ShapeDtypeStructs with shardings. num_pages: of all data groups."""
        ...

    def propose(self, state: Any, settled: Settled, batch: StepBatch, rows: SamplingRows, num_drafts: int,
                embedding: jax.Array, output_matrix: jax.Array) -> tuple[Drafts, Any]:  # fmt: skip
        """Takes in the settled tokens and guesses what follows `settled.token`.

        batch: of the target's step, with its lengths (rejected drafts counted) and page tables. rows: as of the step,
        but output_index is that of the first draft. num_drafts: K, static.
        embedding, output_matrix: the target's, [V D]. Called outside `map_over_shards`, as the target's layers are.
        """
        ...
