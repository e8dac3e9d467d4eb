"""The benchmark of speculation, with engines that only count."""

from io import StringIO
from random import Random
from types import SimpleNamespace

import pytest
from rich.console import Console

from scripts import bench_speculation
from scripts.bench_lib.speculation_prompts import WORKLOADS
from serving.request import EngineStats


class Engine:
    """Answers each conversation with 10 tokens, after `seconds` on the benchmark's clock."""

    def __init__(self, clock: list[float], seconds: float, accepted: int):
        self._clock, self._seconds, self._accepted = clock, seconds, accepted
        self.service = SimpleNamespace(engine=SimpleNamespace(stats=EngineStats()))

    def chat(self, conversations, sampling, use_tqdm):
        self._clock[0] += self._seconds
        stats = self.service.engine.stats
        drafts = 2 * len(conversations) if self._accepted else 0
        self.service.engine.stats = EngineStats(
            num_drafts=stats.num_drafts + drafts, accepted_tokens=stats.accepted_tokens + drafts * self._accepted
        )
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=list(range(10)))]) for _ in conversations]


def test_rates_ratios_and_what_was_accepted(monkeypatch: pytest.MonkeyPatch, tmp_path):
    clock = [0.0]
    monkeypatch.setattr(bench_speculation.time, "perf_counter", lambda: clock[0])
    engines = {"off": Engine(clock, 2.0, 0), "ngram": Engine(clock, 0.8, 3)}
    bench = bench_speculation.Bench(list(engines), max_tokens=10, temperature=0)
    bench.round(engines, "chat", 1, seed=0, count=False)  # type: ignore[arg-type]
    for seed in (1, 2, 3):
        bench.round(engines, "chat", 1, seed=seed)  # type: ignore[arg-type]
    off, ngram = rows = bench.rows("chat", 1)
    assert (off["tokens_per_second"], off["ratio"], off["accepted_per_draft"]) == (20.0, 1.0, None)
    assert (ngram["tokens_per_second"], ngram["ratio"], ngram["accepted_per_draft"]) == (50.0, 2.5, 3.0)
    assert ngram["accepted_share"] == 0.6 and ngram["by_round"] == [50.0] * 3
    assert (bench.outputs, bench.outputs_differ) == (16, 0)
    console = Console(width=120, record=True, file=StringIO())
    bench_speculation.show(console, rows, list(engines))
    assert "50.0 (2.50x; 3.00, 60%)" in console.export_text()
    bench_speculation.draw(tmp_path / "picture.png", rows, list(engines))
    assert (tmp_path / "picture.png").stat().st_size > 5000


@pytest.mark.parametrize("workload", WORKLOADS)
def test_prompts_are_new_in_every_round(workload: str):
    first, again, second = (WORKLOADS[workload](Random(seed), 32) for seed in (1, 1, 2))
    assert first == again != second and len(first) == 32
    assert all(len(one) == 1 and one[0]["role"] == "user" for one in first)
