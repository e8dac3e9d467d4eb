"""How far back a token sees."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax


class Reach(NamedTuple):
    """Fixed when a kernel is built. Both None: back to the first token."""

    window: int | None = None  # tokens, itself among them
    chunk: int | None = None  # tokens, of which it sees its own

    @property
    def ends(self) -> bool:
        return self.window is not None or self.chunk is not None

    def oldest(self, position, base=0):
        """The first cache index that the token at cache index `position` sees, counted from index `base`, at least 0.
        Never less for a later token."""
        if not self.ends:
            return 0
        oldest = base
        if self.window is not None:
            oldest = jnp.maximum(position - self.window + 1, oldest)
        if self.chunk is not None:
            oldest = jnp.maximum(lax.div(position, self.chunk) * self.chunk, oldest)
        return oldest - base


WHOLE = Reach()  # no limit but the first token
