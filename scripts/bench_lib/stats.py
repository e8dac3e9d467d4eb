"""Numbers of one concurrency level, from the timings of its requests."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from scripts.bench_lib.client import Timing

PERCENTILES = (50, 95, 99)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """In ms, by linear interpolation between the two nearest ranks."""
    if not values:
        return {}
    found = np.percentile(values, PERCENTILES).tolist()
    return {f"p{percent}": round(value * 1e3, 3) for percent, value in zip(PERCENTILES, found, strict=True)}


@dataclass(frozen=True, kw_only=True)
class Level:
    """Throughputs are medians over rounds, latencies (ms) percentiles over all requests of all rounds."""

    concurrency: int
    requests_per_second: float
    input_tokens_per_second: float
    output_tokens_per_second: float
    output_tokens_per_second_by_round: list[float]
    ttft_ms: dict[str, float]
    tpot_ms: dict[str, float]
    itl_ms: dict[str, float]
    client_cpu_share: float  # of one core, spent by the client itself
    engine: dict[str, float]  # the server's own split of a step, where its /metrics has one

    def to_json(self) -> dict:
        return asdict(self)


def summarize(concurrency: int, rounds: list[tuple[float, list[Timing]]], client_cpu_share: float,
              engine: dict[str, float]) -> Level:
    """`rounds` holds (seconds, timings) of each measured round."""
    timings = [timing for _, round_timings in rounds for timing in round_timings]
    output_rates = [sum(t.output_tokens for t in ts) / seconds for seconds, ts in rounds]
    return Level(
        concurrency=concurrency,
        requests_per_second=round(statistics.median(len(ts) / seconds for seconds, ts in rounds), 3),
        input_tokens_per_second=round(
            statistics.median(sum(t.input_tokens for t in ts) / seconds for seconds, ts in rounds), 1),
        output_tokens_per_second=round(statistics.median(output_rates), 1),
        output_tokens_per_second_by_round=[round(rate, 1) for rate in output_rates],
        ttft_ms=percentiles([t.ttft for t in timings]),
        tpot_ms=percentiles([t.tpot for t in timings if t.tpot is not None]),
        itl_ms=percentiles([gap for t in timings for gap in t.itls]),
        client_cpu_share=round(client_cpu_share, 3),
        engine=engine,
    )
