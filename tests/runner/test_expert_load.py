"""Counters of the device on the host, and where a moved expert is fetched from."""

import numpy as np
import pytest

from serving.runner.expert_load import ExpertLoad
from serving.runner.rebalance import sources_of


class Counters:
    """What a step returns, before it is read."""

    def __init__(self, value: int):
        self.value, self.asked = value, False

    def copy_to_host_async(self) -> None:
        self.asked = True

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        assert self.asked
        return np.full((1, 2), self.value % 2**32, np.uint32)


def test_readings_come_late_and_count_on_past_a_wrap():
    load, read = ExpertLoad(window_size=16, step_interval=5), []
    start = 2**32 - 30
    load.add(np.full((1, 2), start, np.uint32))
    for step in range(1, 26):
        read += load.read()
        assert not read or read[-1] <= step - 2, "nothing of a step that may still run"
        load.after_step(Counters(start + 10 * step))  # type: ignore[arg-type]
    assert read == [2, 4, 5, 6, 8, 10, 12, 14, 15, 16, 18, 20, 22]
    load.read()
    assert load.total is not None and load.recent is not None
    assert load.total.tolist() == [[start + 240] * 2]
    assert load.recent.tolist() == [[10 * (24 - 10)] * 2], "nine readings: 10, 12, 14, 15, 16, 18, 20, 22, 24"


def test_a_window_shorter_than_its_parts():
    load = ExpertLoad(window_size=3, step_interval=100)
    for total in (1, 5, 20, 60):
        load.add(np.full((1, 2), total, np.uint32))
    assert load.recent is not None and load.recent.tolist() == [[59, 59]], "three steps"
    assert ExpertLoad(10, 10).recent is None


@pytest.mark.parametrize("old, new, want", [
    ([0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]),
    ([0, 1, 0, 2], [0, 2, 2, 1], [0, 3, 3, 1]),
    ([0, 1, 2, 0], [1, 0, 0, 2], [1, 0, 3, 2]),  # each from its own device
    ([0, 0, 1, 0], [0, 0, 0, 1], [0, 1, 3, 2]),
])  # fmt: skip
def test_weights_come_from_near(old: list[int], new: list[int], want: list[int]):
    got = sources_of(np.array(old), np.array(new), 2)
    assert got.tolist() == want
    assert [old[place] for place in got] == new
