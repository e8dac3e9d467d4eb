"""How busy experts are: counters of the device, read now and then, and how even they leave the devices.

The device counts, for each layer that has experts, the tokens that chose each of them, and wraps at 2^32. The numbers
of a step are read two steps later, when they have long been computed: nothing waits for them. When they are read
depends on the number of the step alone, so that all hosts of a mesh read the same.

Axis letters: Lm layers with experts, E experts, P places.
"""

from collections import deque

import jax
import numpy as np
from jaxtyping import Int

_READS_PER_WINDOW = 8  # the window slides in eighths


class ExpertLoad:
    """window_size, step_interval: in steps. A reading is due where the window slides, and every `step_interval`."""

    def __init__(self, window_size: int, step_interval: int):
        self._every, self._interval = max(1, window_size // _READS_PER_WINDOW), step_interval
        self._step = 0
        self._unread: deque[tuple[int, jax.Array]] = deque()
        self._last: np.ndarray | None = None  # the counters as they were read last, uint32
        self._totals: deque[np.ndarray] = deque(maxlen=window_size // self._every + 1)

    def after_step(self, counters: Int[jax.Array, "Lm E"]) -> None:
        """Of the step that was dispatched just now."""
        self._step += 1
        if self._step % self._every == 0 or self._step % self._interval == 0:
            counters.copy_to_host_async()
            self._unread.append((self._step, counters))

    def read(self) -> list[int]:
        """Takes in what is two steps old or older. The numbers of the steps whose counters were read."""
        steps = []
        while self._unread and self._unread[0][0] < self._step:
            step, counters = self._unread.popleft()
            self.add(np.asarray(counters))
            steps.append(step)
        return steps

    def add(self, counters: Int[np.ndarray, "Lm E"]) -> None:
        """counters: uint32, since the device began."""
        before = np.zeros_like(counters) if self._last is None else self._last
        total = self._totals[-1] if self._totals else np.zeros(counters.shape, np.int64)
        if not self._totals:
            self._totals.append(total)
        self._totals.append(total + (counters - before))  # wraps as the device does
        self._last = counters

    @property
    def total(self) -> Int[np.ndarray, "Lm E"] | None:
        """Tokens since the start; None before anything was read."""
        return self._totals[-1] if self._totals else None

    @property
    def recent(self) -> Int[np.ndarray, "Lm E"] | None:
        """Tokens within the window."""
        return self._totals[-1] - self._totals[0] if self._totals else None
