"""Prometheus metrics under vLLM's names, in a registry of their own.

Gauges and counters are read from the engine's books (`EngineStats`) when somebody scrapes; histograms are observed by
the generation pipeline as tokens arrive. `pageloom:` names are our own. What is told of each data group carries its
index as `engine`; all else, the one queue too, carries the first.
"""

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serving.expert_metrics import expert_metrics
from serving.request import EngineInfo, EngineRequest, EngineStats, GroupStats, TokenEvent

LABELS = ("model_name", "engine")
SHORT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20,
                 40, 80)
LONG_SECONDS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
N_VALUES = (1, 2, 5, 10, 20, 50, 100)

HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("From arrival to the first token", SHORT_SECONDS),
    "inter_token_latency_seconds": ("Between a sequence's successive tokens", SHORT_SECONDS),
    "request_time_per_output_token_seconds": ("A request's mean time between tokens", SHORT_SECONDS),
    "e2e_request_latency_seconds": ("From arrival to the last token", LONG_SECONDS),
    "request_queue_time_seconds": ("From arrival to the first step", LONG_SECONDS),
    "request_prefill_time_seconds": ("From the first step to the first token", LONG_SECONDS),
    "request_decode_time_seconds": ("From the first token to the last", LONG_SECONDS),
    "request_inference_time_seconds": ("From the first step to the last token", LONG_SECONDS),
    "request_prompt_tokens": ("Prompt tokens of a request", TOKENS),
    "request_generation_tokens": ("Output tokens of a request", TOKENS),
    "request_params_n": ("The n of a request", N_VALUES),
    "request_params_max_tokens": ("The max_tokens of a request", TOKENS),
    "iteration_tokens_total": ("Tokens in an engine step", STEP_TOKENS),
}

GROUP_GAUGES: dict[str, tuple[str, Callable[[GroupStats], float]]] = {
    "vllm:num_requests_running": ("Sequences in the running batch", lambda g: g.num_running),
    "vllm:kv_cache_usage_perc": ("Share of KV pages that are held, 0 to 1", lambda g: g.kv_cache_usage),
}

GAUGES: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "vllm:num_requests_waiting": ("Sequences waiting to be scheduled", lambda s: s.num_waiting),
    "pageloom:spec_decode_draft_length": ("Drafts that a sequence may have in a step; 0: no speculation now",
                                          lambda s: s.draft_length),
    "pageloom:prefix_cache_hit_rate": ("Share of prompt tokens found in the prefix cache, 0 to 1",
                                       lambda s: _share(s.prefix_cache_hits, s.prefix_cache_queries)),
    "pageloom:batch_padding_share": ("Padding tokens among all tokens in steps, 0 to 1",
                                     lambda s: _share(s.batch_padding, s.batch_tokens + s.batch_padding)),
}

COUNTERS: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "vllm:prefix_cache_queries": ("Prompt tokens looked up in the prefix cache", lambda s: s.prefix_cache_queries),
    "vllm:prefix_cache_hits": ("Prompt tokens found in the prefix cache", lambda s: s.prefix_cache_hits),
    "vllm:num_preemptions": ("Sequences that lost their pages and will be recomputed", lambda s: s.num_preemptions),
    "vllm:prompt_tokens": ("Prompt tokens processed", lambda s: s.prompt_tokens),
    "vllm:prompt_tokens_cached": ("Prompt tokens taken from the prefix cache", lambda s: s.prompt_tokens_cached),
    "vllm:generation_tokens": ("Tokens generated", lambda s: s.generation_tokens),
    "vllm:spec_decode_num_drafts": ("Times that drafts of a sequence were verified", lambda s: s.num_drafts),
    "vllm:spec_decode_num_draft_tokens": ("Draft tokens verified", lambda s: s.draft_tokens),
    "vllm:spec_decode_num_accepted_tokens": ("Draft tokens accepted", lambda s: s.accepted_tokens),
    "pageloom:compile_misses": ("Steps that had to compile while serving; must stay 0", lambda s: s.compile_misses),
    "pageloom:forced_tokens": ("Output tokens that a grammar forced, appended unsampled", lambda s: s.forced_tokens),
    "pageloom:grammar_seconds": ("Time that grammars take in the engine's thread", lambda s: s.grammar_seconds),
    "pageloom:steps": ("Engine steps", lambda s: s.steps),
    "pageloom:batch_tokens": ("Real tokens in steps", lambda s: s.batch_tokens),
    "pageloom:batch_padding_tokens": ("Padding tokens in steps", lambda s: s.batch_padding),
}


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


class EngineCollector(Collector):
    """Turns the newest `EngineStats` into metrics at scrape time."""

    def __init__(self, labels: tuple[str, str], info: EngineInfo, stats: Callable[[], EngineStats]):
        self._labels, self._info, self._stats = labels, info, stats

    def collect(self) -> Iterator[Metric]:
        stats, info = self._stats(), self._info
        groups = stats.groups or [GroupStats()] * info.num_groups
        for name, (help_text, read) in GROUP_GAUGES.items():
            gauge = GaugeMetricFamily(name, help_text, labels=LABELS)
            for index, group in enumerate(groups):
                gauge.add_metric(self._group_labels(index), read(group))
            yield gauge
        for name, (help_text, read) in GAUGES.items():
            yield self._gauge(name, help_text, read(stats))
        for name, (help_text, read) in COUNTERS.items():
            counter = CounterMetricFamily(name, help_text, labels=LABELS)
            counter.add_metric(self._labels, read(stats))
            yield counter
        seconds = CounterMetricFamily("pageloom:step_seconds", "Time of engine steps by part", labels=(*LABELS, "part"))
        for part, value in stats.step_seconds.items():
            seconds.add_metric((*self._labels, part), value)
        yield seconds
        accepted = CounterMetricFamily("vllm:spec_decode_num_accepted_tokens_per_pos",
                                       "Draft tokens accepted at a position; in a tree, at a depth",
                                       labels=(*LABELS, "position"))
        for position, count in enumerate(stats.accepted_per_position):
            accepted.add_metric((*self._labels, str(position)), count)
        yield accepted
        if stats.experts is not None:
            yield from expert_metrics(stats.experts, LABELS, self._labels)
        cache = GaugeMetricFamily("vllm:cache_config_info", "The KV cache's size",
                                  labels=(*LABELS, "block_size", "num_gpu_blocks"))
        for index in range(info.num_groups):
            cache.add_metric((*self._group_labels(index), str(info.page_size), str(info.num_pages)), 1)
        yield cache
        # Gateways read it at every scrape, and log that it is missing.
        lora = GaugeMetricFamily("vllm:lora_requests_info", "LoRA adapters at work: there are none",
                                 labels=(*LABELS, "max_lora", "running_lora_adapters", "waiting_lora_adapters"))
        lora.add_metric((*self._labels, "0", "", ""), 0)
        yield lora

    def _group_labels(self, index: int) -> tuple[str, str]:
        return self._labels[0], str(index)

    def _gauge(self, name: str, help_text: str, value: float) -> GaugeMetricFamily:
        gauge = GaugeMetricFamily(name, help_text, labels=LABELS)
        gauge.add_metric(self._labels, value)
        return gauge


class Metrics:
    """The metrics of one front end. `stats` returns the engine's newest books."""

    def __init__(self, model_name: str, info: EngineInfo, stats: Callable[[], EngineStats]):
        self.registry = CollectorRegistry()
        self._labels = (model_name, "0")
        self._stats = stats
        self.registry.register(EngineCollector(self._labels, info, stats))
        self._observe: dict[str, Callable[[float], None]] = {}
        for name, (help_text, buckets) in HISTOGRAMS.items():
            histogram = Histogram(f"vllm:{name}", help_text, LABELS, buckets=buckets, registry=self.registry)
            self._observe[name] = histogram.labels(*self._labels).observe
        self._finished = Counter("vllm:request_success", "Finished sequences by reason", (*LABELS, "finished_reason"),
                                 registry=self.registry)
        for reason in ("stop", "length", "abort", "error"):
            self._finished.labels(*self._labels, reason)
        self._rejections = Counter("vllm:admission_rejections", "Requests refused by an admission limit",
                                   (*LABELS, "reason"), registry=self.registry)
        self._rejections.labels(*self._labels, "queue_full")
        seen = stats()
        self._seen_steps, self._seen_tokens = seen.steps, seen.batch_tokens

    def request(self, n: int, max_tokens: int, prompt_tokens: int) -> None:
        """One prompt was admitted, to be completed n times."""
        self._observe["request_params_n"](n)
        self._observe["request_params_max_tokens"](max_tokens)
        self._observe["request_prompt_tokens"](prompt_tokens)

    def rejected(self) -> None:
        self._rejections.labels(*self._labels, "queue_full").inc()

    def sequence(self, request: EngineRequest) -> "SequenceTimer":
        return SequenceTimer(self, request.arrival_time)

    def step(self) -> None:
        """Accounts for the steps since the last call; of steps that brought no news only the mean size is known."""
        stats = self._stats()
        steps = stats.steps - self._seen_steps
        if steps <= 0:
            return
        mean = (stats.batch_tokens - self._seen_tokens) / steps
        self._seen_steps, self._seen_tokens = stats.steps, stats.batch_tokens
        for _ in range(min(steps, 1000)):
            self._observe["iteration_tokens_total"](mean)

    def observe(self, name: str, value: float) -> None:
        self._observe[name](max(0.0, value))

    def finished(self, reason: str) -> None:
        self._finished.labels(*self._labels, reason).inc()

    def render(self) -> bytes:
        return generate_latest(self.registry)


class SequenceTimer:
    """Times one sequence and reports when it ends."""

    __slots__ = ("_arrival", "_first", "_last", "_metrics", "_queue", "_tokens")

    def __init__(self, metrics: Metrics, arrival: float):
        self._metrics, self._arrival = metrics, arrival
        self._queue = 0.0
        self._first = self._last = 0.0
        self._tokens = 0

    def event(self, event: TokenEvent) -> None:
        metrics, count = self._metrics, len(event.new_token_ids)
        metrics.step()
        if not count:
            return
        now = time.time()
        if self._tokens:
            interval = (now - self._last) / count
            for _ in range(count):
                metrics.observe("inter_token_latency_seconds", interval)
        else:
            self._first, self._queue = now, event.queue_time
            metrics.observe("time_to_first_token_seconds", now - self._arrival)
        self._last = now
        self._tokens += count

    def end(self, reason: str) -> None:
        metrics, tokens = self._metrics, self._tokens
        metrics.finished(reason)
        metrics.observe("e2e_request_latency_seconds", time.time() - self._arrival)
        metrics.observe("request_generation_tokens", tokens)
        if not tokens:
            return
        started = self._arrival + self._queue
        metrics.observe("request_queue_time_seconds", self._queue)
        metrics.observe("request_prefill_time_seconds", self._first - started)
        metrics.observe("request_decode_time_seconds", self._last - self._first)
        metrics.observe("request_inference_time_seconds", self._last - started)
        if tokens > 1:
            metrics.observe("request_time_per_output_token_seconds", (self._last - self._first) / (tokens - 1))
