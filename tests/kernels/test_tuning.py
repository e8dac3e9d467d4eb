"""Block sizes: the table first, then the cost model; and what is said when nothing fits."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from pallas_kernels.devices import DEVICES, device_of_kind
from pallas_kernels.tuning import TABLES, Estimate, choose, distance, read_table, require_fit, write_entry

V6E = DEVICES["v6e"]
SHAPE = {"N": 32, "K": 8, "dtype": "bfloat16"}


@dataclass(frozen=True, kw_only=True)
class Blocks:
    pages: int
    rows: int = 8


CANDIDATES = [Blocks(pages=pages) for pages in (1, 2, 4, 8, 16)]


def larger_is_better(config: Blocks) -> Estimate:
    """A megabyte a page and row; fixed cost falls with the block."""
    size = config.pages * config.rows << 20
    return Estimate(hbm_bytes=1e6, flops=1e6, block_bytes=size, fixed_seconds=1 / config.pages)


def test_the_cheapest_that_fits():
    assert choose("k", SHAPE, CANDIDATES, larger_is_better, V6E) == Blocks(pages=16)
    assert choose("k", SHAPE, CANDIDATES, larger_is_better, DEVICES["v7x"]) == Blocks(pages=8), "64 MiB of VMEM"


def test_equal_cost_takes_the_first():
    flat = Estimate(hbm_bytes=1.0, flops=1.0, block_bytes=1)
    assert choose("k", SHAPE, CANDIDATES, lambda _: flat, V6E) == CANDIDATES[0]


def test_the_slowest_of_what_overlaps_counts():
    def seconds(**costs: float) -> float:
        return Estimate(**{"hbm_bytes": 0, "flops": 0, "block_bytes": 0, **costs}).seconds(V6E)

    assert seconds(hbm_bytes=1.64e12) == pytest.approx(1.0)
    assert seconds(hbm_bytes=1.64e12, flops=1836e12) == pytest.approx(2.0)
    assert seconds(cycles=3.5e9, fixed_seconds=1) == pytest.approx(3.0)


def test_nothing_fits():
    with pytest.raises(ValueError, match=r"pages=1, rows=512, needs 536,870,912 bytes") as raised:
        choose("k", SHAPE, [Blocks(pages=2, rows=512), Blocks(pages=1, rows=512)], larger_is_better, V6E)
    assert "134,217,728 bytes of VMEM" in str(raised.value) and "N=32 K=8 dtype=bfloat16" in str(raised.value)
    with pytest.raises(ValueError, match="232,448 bytes of shared memory"):
        choose("k", SHAPE, CANDIDATES, larger_is_better, DEVICES["h200"])


def test_a_config_that_does_not_fit_names_the_nearest_that_does():
    require_fit("k", Blocks(pages=16), CANDIDATES, larger_is_better, V6E)
    with pytest.raises(ValueError, match=r"pages=16, rows=16 needs 268,435,456.*nearest that fits is pages=16, rows=8"):
        require_fit("k", Blocks(pages=16, rows=16), CANDIDATES, larger_is_better, V6E)
    assert distance(Blocks(pages=1, rows=8), Blocks(pages=4, rows=4)) == 3


def test_a_measured_entry_wins(tmp_path: Path):
    path = write_entry("k", SHAPE, V6E, Blocks(pages=2), microseconds=12.345, jax_version="0.12.0", date="2026-01-01",
                       tables=tmp_path)
    write_entry("k", {"N": 1}, V6E, Blocks(pages=1), microseconds=1, jax_version="0.12.0", date="2026-01-01",
                tables=tmp_path)
    assert path == tmp_path / "v6e.json"
    assert json.loads(path.read_text())["entries"]["k"]["N=32 K=8 dtype=bfloat16"] == {
        "config": {"pages": 2, "rows": 8}, "microseconds": 12.35, "jax": "0.12.0", "date": "2026-01-01"}

    def pick(shape: dict, device: str = "v6e") -> Blocks:
        return choose("k", shape, CANDIDATES, larger_is_better, DEVICES[device], tables=tmp_path)

    assert pick(SHAPE) == Blocks(pages=2)
    assert pick({**SHAPE, "N": 64}) == Blocks(pages=16), "another shape"
    assert pick(SHAPE, "v7x") == Blocks(pages=8), "another chip"


def test_a_measured_entry_that_no_longer_fits_is_passed_over(tmp_path: Path):
    write_entry("k", SHAPE, V6E, Blocks(pages=16, rows=64), microseconds=1, jax_version="", date="", tables=tmp_path)
    assert choose("k", SHAPE, CANDIDATES, larger_is_better, V6E, tables=tmp_path) == Blocks(pages=16)


def test_damaged_tables_are_refused_by_name(tmp_path: Path):
    path = write_entry("k", SHAPE, V6E, Blocks(pages=2), microseconds=1, jax_version="", date="", tables=tmp_path)
    table = json.loads(path.read_text())
    table["entries"]["k"]["N=32 K=8 dtype=bfloat16"]["config"] = {"page": 2}
    (tmp_path / "v6e.json").write_text(json.dumps(table))
    with pytest.raises(ValueError, match=r"v6e\.json: the entry 'k'.*is not a Blocks.*page"):
        other = tmp_path / "other"
        other.mkdir()
        (other / "v6e.json").write_text(json.dumps(table))
        choose("k", SHAPE, CANDIDATES, larger_is_better, V6E, tables=other)
    (tmp_path / "v5e.json").write_text(json.dumps(table))
    with pytest.raises(ValueError, match=r"v5e\.json: expected the fields device \('v5e'\)"):
        read_table(DEVICES["v5e"], tables=tmp_path)


def test_the_tables_in_the_repository_are_of_known_devices():
    for path in TABLES.glob("*.json"):
        read_table(DEVICES[path.stem])


def test_devices():
    assert device_of_kind("TPU v6 lite") is V6E and device_of_kind("v6e") is V6E
    with pytest.raises(KeyError, match=r"'TPU v99'.*v6e \(TPU v6 lite\)"):
        device_of_kind("TPU v99")
    kinds = [kind for device in DEVICES.values() for kind in device.kinds]
    assert len(kinds) == len(set(kinds))
    for device in DEVICES.values():
        assert (device.vmem_bytes > 0) == (device.platform == "tpu")
        assert dataclasses.asdict(device)["smem_bytes"] > 0 and device.block_memory_bytes >= device.smem_bytes
        assert 100 < device.bf16_flops / device.hbm_bandwidth < 700, "operations a byte: no chip is far from it"


def test_dma_time_in_bundles():
    # A token's K and V of Llama-3-8B: 4 KiB at 1.64 TB/s is 2.5 ns, 4.4 bundles at 1.75 GHz.
    assert V6E.dma_cycles(4096) == pytest.approx(4.37, abs=0.01)
