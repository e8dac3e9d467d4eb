"""How many pages fit, from bytes."""

import pytest

from serving.errors import ConfigError
from serving.runner import memory
from serving.runner.memory import MemoryPlan


def pages(free: int) -> int:
    return MemoryPlan(limit=2 * (free + 70), share=0.5, fixed=40, temporary=30, page=1).num_pages


def test_pages_are_rounded_down_to_a_thirty_second():
    assert [pages(free) for free in (2, 3, 31, 63, 64, 100, 1000)] == [2, 3, 31, 63, 64, 100, 992]


def test_more_pages_than_a_device_has_room_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "device_memory", lambda device: 10_000)
    memory.check_pool(100, 10_000, None)
    with pytest.raises(ConfigError, match="--num-pages 200: .* at most 100 would fit"):
        memory.check_pool(200, 20_000, None)


def test_fewer_than_two_pages_are_none():
    with pytest.raises(ConfigError, match="does not fit"):
        pages(1)
