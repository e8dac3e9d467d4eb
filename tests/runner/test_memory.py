"""How many pages fit, from bytes."""

import ctypes
import os
from pathlib import Path

import jax
import psutil
import pytest

from serving.errors import ConfigError
from serving.runner import memory
from serving.runner.compiler import return_freed_memory
from serving.runner.memory import MemoryPlan
from sharding.mesh import make_mesh, parse_mesh


def pages(free: int) -> int:
    return MemoryPlan(limit=2 * (free + 70), share=0.5, fixed=40, temporary=30, page=1).num_pages


def test_pages_are_rounded_down_to_a_thirty_second():
    assert [pages(free) for free in (2, 3, 31, 63, 64, 100, 1000)] == [2, 3, 31, 63, 64, 100, 992]


@pytest.mark.parametrize(("mesh", "sharing"), [("1x1", 1), ("2x1", 2), ("2x4", 8)])
def test_simulated_devices_of_a_mesh_share_the_hosts_memory(mesh: str, sharing: int):
    assert jax.local_device_count() == 8, "those that the mesh leaves idle take no memory"
    assert memory.device_memory(make_mesh(parse_mesh(mesh))) == memory.host_memory() // sharing


def test_a_container_has_less_memory_than_its_host(tmp_path: Path):
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit, other = tmp_path / "memory.max", tmp_path / "none"
    for text, want in (("max\n", whole), (f"{1 << 62}\n", whole), ("1000000\n", 1_000_000)):
        limit.write_text(text)
        assert memory.host_memory((other, limit)) == want


def test_more_pages_than_a_device_has_room_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "device_memory", lambda mesh: 10_000)
    memory.check_pool(100, 10_000, None)
    with pytest.raises(ConfigError, match="--num-pages 200: .* at most 100 would fit"):
        memory.check_pool(200, 20_000, None)


def test_fewer_than_two_pages_are_none():
    with pytest.raises(ConfigError, match="does not fit"):
        pages(1)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc's")
def test_memory_that_compilers_freed_goes_back_to_the_system():
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    size = 1 << 16
    blocks = [libc.malloc(size) for _ in range(2000)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    pin = max(blocks)  # keeps the allocator from giving back those before it
    for block in blocks:
        if block != pin:
            libc.free(block)
    before = psutil.Process().memory_info().rss
    return_freed_memory()
    assert before - psutil.Process().memory_info().rss > 1500 * size
    libc.free(pin)
