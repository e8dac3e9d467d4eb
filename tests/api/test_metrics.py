from collections.abc import AsyncGenerator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from serving.api.service import Service
from serving.errors import InvalidRequest
from serving.request import EngineRequest, EngineStats, GroupStats, TokenEvent
from tests.api.conftest import Serve, client_of

pytestmark = pytest.mark.anyio
LABELS = {"model_name": "tiny", "engine": "0"}


def scrape(service: Service) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Sample name -> labels beside the common two -> value."""
    samples: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(service.metrics.render().decode()):
        for sample in family.samples:
            if sample.name.endswith("_created"):
                continue
            assert LABELS.items() <= sample.labels.items()
            rest = tuple(sorted((k, v) for k, v in sample.labels.items() if k not in LABELS))
            samples.setdefault(sample.name, {})[rest] = sample.value
    return samples


def test_the_engines_books(serve: Serve) -> None:
    service = serve()
    service.engine.stats = EngineStats(
        groups=[GroupStats(num_running=3, kv_cache_usage=0.25)], num_waiting=2,
        prefix_cache_queries=10, prefix_cache_hits=4, num_preemptions=1, prompt_tokens=100, prompt_tokens_cached=40,
        generation_tokens=50, compile_misses=0,
        step_seconds={"schedule": 0.5, "device": 2.0}, steps=7, batch_tokens=90, batch_padding=10,
        forced_tokens=21, grammar_seconds=0.5,
        num_drafts=9, draft_tokens=27, accepted_tokens=12, accepted_per_position=[8, 4], draft_length=3,
    )  # fmt: skip
    samples = scrape(service)
    expected = {
        "vllm:num_requests_running": 3, "vllm:num_requests_waiting": 2, "vllm:kv_cache_usage_perc": 0.25,
        "vllm:prefix_cache_queries_total": 10, "vllm:prefix_cache_hits_total": 4, "vllm:num_preemptions_total": 1,
        "vllm:prompt_tokens_total": 100, "vllm:prompt_tokens_cached_total": 40, "vllm:generation_tokens_total": 50,
        "pageloom:compile_misses_total": 0, "pageloom:batch_padding_share": 0.1, "pageloom:prefix_cache_hit_rate": 0.4,
        "pageloom:steps_total": 7,
        "pageloom:forced_tokens_total": 21, "pageloom:grammar_seconds_total": 0.5,
        "vllm:spec_decode_num_drafts_total": 9, "vllm:spec_decode_num_draft_tokens_total": 27,
        "vllm:spec_decode_num_accepted_tokens_total": 12, "pageloom:spec_decode_draft_length": 3,
    }  # fmt: skip
    assert {name: samples[name][()] for name in expected} == expected
    assert samples["pageloom:step_seconds_total"][(("part", "device"),)] == 2.0
    by_position = samples["vllm:spec_decode_num_accepted_tokens_per_pos_total"]
    assert by_position == {(("position", "0"),): 8, (("position", "1"),): 4}
    assert samples["vllm:cache_config_info"] == {(("block_size", "16"), ("num_gpu_blocks", "100")): 1}
    [lora] = samples["vllm:lora_requests_info"]
    assert dict(lora) == {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}


def test_a_data_group_is_an_engine(serve: Serve) -> None:
    service = serve()
    service.engine.info.num_groups = 2
    for groups, running in (([], [0, 0]), ([GroupStats(num_running=3), GroupStats(num_running=1)], [3, 1])):
        service.engine.stats = EngineStats(groups=groups, num_waiting=2)
        lines = service.metrics.render().decode().splitlines()
        for engine, count in enumerate(running):
            labels = f'{{engine="{engine}",model_name="tiny"}}'
            assert f"vllm:num_requests_running{labels} {count}.0" in lines
            assert f"vllm:kv_cache_usage_perc{labels} 0.0" in lines
        assert [line for line in lines if line.startswith("vllm:num_requests_waiting")] == [
            'vllm:num_requests_waiting{engine="0",model_name="tiny"} 2.0'
        ]


async def refuse(request: EngineRequest) -> AsyncGenerator[TokenEvent]:
    raise InvalidRequest("no such grammar", "response_format")
    yield


async def test_histograms_and_counts_of_requests(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    service = serve("abcdefg")
    async with client_of(service) as client:
        await client.post("/v1/completions", json={"prompt": "Hello", "n": 2})
        await client.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 3})
        await client.post("/v1/completions", json={"prompt": "Hello", "stop": "c"})
        service.engine.room = 0
        await client.post("/v1/completions", json={"prompt": "Hello"})
        monkeypatch.setattr(service.engine, "generate", refuse)
        assert (await client.post("/v1/completions", json={"prompt": "Hello"})).status_code == 400
        text = (await client.get("/metrics")).text
    assert "# TYPE vllm:time_to_first_token_seconds histogram" in text
    samples = scrape(service)
    finished = {labels[0][1]: value for labels, value in samples["vllm:request_success_total"].items()}
    assert finished == {"stop": 3, "length": 1, "abort": 0, "error": 0}
    assert samples["vllm:admission_rejections_total"] == {(("reason", "queue_full"),): 1}
    assert samples["vllm:time_to_first_token_seconds_count"][()] == 4
    assert samples["vllm:inter_token_latency_seconds_count"][()] == 7 + 7 + 2 + 2
    assert samples["vllm:request_generation_tokens_sum"][()] == 8 + 8 + 3 + 3
    assert samples["vllm:request_params_n_sum"][()] == 2 + 1 + 1 + 1 + 1
    assert samples["vllm:iteration_tokens_total_count"][()] == service.engine.stats.steps
    for name in ("e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time",
                 "request_inference_time", "request_time_per_output_token"):
        assert samples[f"vllm:{name}_seconds_count"][()] == 4
