import asyncio
import contextlib
import hashlib
import io
import json
import zipfile
from collections.abc import Callable

import grpc
import pytest
import tokenizers
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from serving.api.grpc.convert import sampling_from
from serving.api.service import Service
from serving.errors import InvalidRequest
from serving.request import SamplingParams, StructuredOutputs
from tests.api.conftest import SECONDS, Serve, engine_stub, listening

pytestmark = pytest.mark.anyio
PORTS = {"port": 0, "grpc_port": 0}


def request(stream: bool = False, **params: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(request_id="r", tokenized=pb.TokenizedInput(input_ids=[64, 65]), stream=stream,
                              sampling_params=pb.SamplingParams(**params))


async def call(service: Service, message: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    async with listening(service) as ports, engine_stub(ports) as stub:
        return [response async for response in stub.Generate(message)]


def test_zero_means_default_where_zero_makes_no_sense() -> None:
    sampling = sampling_from(request())
    expected = SamplingParams(skip_special_tokens=False, spaces_between_special_tokens=False)
    assert sampling == expected and sampling.temperature == 1.0 and sampling.max_tokens is None
    assert sampling_from(pb.GenerateRequest()) == SamplingParams()
    explicit = sampling_from(request(temperature=0.0, max_tokens=0, logprobs=0, seed=0))
    assert (explicit.temperature, explicit.max_tokens, explicit.logprobs, explicit.seed) == (0.0, 0, 0, 0)


def test_every_sampling_field_is_the_one_of_its_name() -> None:
    given = dict(n=2, max_tokens=3, min_tokens=1, temperature=0.5, top_p=0.25, top_k=7, min_p=0.125,
                 frequency_penalty=1.5, presence_penalty=-0.5, repetition_penalty=1.25, seed=9, stop=["x", "y"],
                 stop_token_ids=[4, 5], include_stop_str_in_output=True, ignore_eos=True, logit_bias={6: -2.0, 8: 0.75},
                 logprobs=10, prompt_logprobs=11, skip_special_tokens=True, spaces_between_special_tokens=True,
                 truncate_prompt_tokens=12)  # fmt: skip
    expected = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    assert sampling_from(request(**given)) == SamplingParams(**expected)


@pytest.mark.parametrize(
    "given, expected",
    [
        ({"json_schema": '{"type": "null"}'}, {"json": '{"type": "null"}'}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
        ({"json_object": True}, {"json_object": True}),
        ({"structural_tag": "{}"}, {"structural_tag": "{}"}),
        ({"choice": pb.ChoiceConstraint(choices=["a", "b"])}, {"choice": ("a", "b")}),
    ],
)
def test_constraints(given: dict, expected: dict) -> None:
    assert sampling_from(request(**given)).structured_outputs == StructuredOutputs(**expected, source=next(iter(given)))


@pytest.mark.parametrize(
    "field, change",
    [
        ("kv_transfer_params_json", lambda m: setattr(m, "kv_transfer_params_json", "{}")),
        ("kv_transfer_params", lambda m: setattr(m.kv_transfer_params, "remote_host", "h")),
        ("mm_inputs", lambda m: m.mm_inputs.mm_hashes.append("h")),
        ("media_refs", lambda m: m.media_refs.items.add()),
        ("extra_mm_inputs", lambda m: m.extra_mm_inputs.add()),
        ("data_parallel_rank", lambda m: setattr(m, "data_parallel_rank", 1)),
    ],
)
def test_later_features_are_refused_by_name(field: str, change: Callable[[pb.GenerateRequest], object]) -> None:
    message = request()
    change(message)
    with pytest.raises(InvalidRequest, match=field):
        sampling_from(message)


async def test_whole_answers(serve: Serve) -> None:
    service = serve("Hello world", config=PORTS)
    first, second = [m.complete for m in await call(service, request(n=2, logprobs=1, prompt_logprobs=1))]
    assert (first.index, second.index) == (0, 1)
    assert list(first.output_ids) == [259, 264, service.tokenizer.eos_ids[0]] == list(second.output_ids)
    assert (first.prompt_tokens, first.completion_tokens, first.cached_tokens) == (2, 3, 4)
    assert first.finish_reason == "stop" and first.WhichOneof("matched_stop") is None
    assert list(first.output_logprobs.token_ids) == list(first.output_ids)
    assert list(first.output_logprobs.token_logprobs) == [-0.5] * 3 and len(first.output_logprobs.top_logprobs) == 3
    assert [lp.HasField("value") for lp in first.input_logprobs.token_logprobs] == [False, True]
    assert list(second.input_logprobs.token_ids) == [64, 65]


async def test_streams(serve: Serve) -> None:
    service = serve("Hello world", config=PORTS)
    messages = await call(service, request(stream=True, n=2, logprobs=0, prompt_logprobs=0))
    for index in (0, 1):
        chunks = [m.chunk for m in messages if m.WhichOneof("response") == "chunk" and m.chunk.index == index]
        [done] = [m.complete for m in messages if m.WhichOneof("response") == "complete" and m.complete.index == index]
        assert [i for c in chunks for i in c.token_ids] == list(done.output_ids)
        assert [i for c in chunks for i in c.output_logprobs.token_ids] == list(done.output_ids)
        assert [c.HasField("input_logprobs") for c in chunks] == [index == 0] + [False] * (len(chunks) - 1)
        assert done.completion_tokens == 3 == sum(c.completion_tokens for c in chunks)


async def test_drafts_are_counted(serve: Serve) -> None:
    """Hello world and the end: in steps of two tokens at most."""
    for stream in (False, True):
        [*_, last] = await call(serve("Hello world", config=PORTS, per_step=2), request(stream=stream))
        assert (last.complete.spec_draft_tokens, last.complete.spec_accepted_tokens) == (2, 1)


async def test_matched_stop(serve: Serve) -> None:
    service = serve("ab STOP and on", config=PORTS)
    [text] = await call(service, request(stop=["STOP"]))
    assert text.complete.matched_stop_str == "STOP" and text.complete.finish_reason == "stop"
    assert service.tokenizer.decode(text.complete.output_ids) == "ab STOP", "the client cuts the text"
    eos = service.tokenizer.eos_ids[0]
    [token] = await call(serve("ab", config=PORTS), request(stop_token_ids=[eos]))
    assert token.complete.matched_token_id == eos


@pytest.mark.parametrize(
    "message, word",
    [
        (pb.GenerateRequest(request_id="r"), "input"),
        (pb.GenerateRequest(text=""), "no tokens"),
        (request(logprobs=-1), "logprobs"),
        (request(temperature=3.0), "temperature"),
        (request(max_tokens=0), "max_tokens"),
        (request(top_k=4_000_000_000), "top_k"),
        (request(json_schema="{"), "json_schema is not JSON"),
        (request(choice=pb.ChoiceConstraint()), "choice must be"),
        (pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[99999])), "99999"),
        (pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[1] * 300)), "300 tokens"),
    ],
)
async def test_invalid_requests(serve: Serve, message: pb.GenerateRequest, word: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(serve(config=PORTS), message)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and word in (caught.value.details() or "")


async def test_overload_and_death(serve: Serve) -> None:
    for engine, code in (({"room": 0}, "RESOURCE_EXHAUSTED"), ({}, "UNAVAILABLE")):
        service = serve(config=PORTS, **engine)
        async with listening(service) as ports, engine_stub(ports) as stub:
            service.lifecycle.draining = not engine
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Generate(request()).read()
            assert caught.value.code() is grpc.StatusCode[code]
            assert (await stub.HealthCheck(pb.HealthCheckRequest())).healthy is bool(engine)


async def test_what_gateways_ask(serve: Serve) -> None:
    service = serve(config=PORTS)
    async with listening(service) as ports, engine_stub(ports) as stub:
        model = await stub.GetModelInfo(pb.GetModelInfoRequest())
        assert model.is_generation and model.served_model_name == "tiny" and model.max_context_length == 256
        assert list(model.eos_token_ids) == list(service.tokenizer.eos_ids)
        server = await stub.GetServerInfo(pb.GetServerInfoRequest())
        assert server.data_parallel_size == 1 and server.max_num_seqs == 8 and server.block_size == 16
        assert server.constrained_decoding_start == "first_token"
        service.engine.stats.num_running, service.engine.stats.kv_cache_usage = 4, 0.5
        [load] = (await stub.GetLoads(pb.GetLoadsRequest())).loads
        assert load.num_running_reqs == 4 and load.token_usage == 0.5 and load.num_used_tokens == 800
        assert (await stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=0.1))).success
        assert service.engine.flushed == 1


async def test_the_tokenizer_comes_as_a_zip(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.api.grpc.servicer.TOKENIZER_CHUNK_BYTES", 500)
    async with listening(serve(config=PORTS)) as ports, engine_stub(ports) as stub:
        chunks = [chunk async for chunk in stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
    data = b"".join(chunk.data for chunk in chunks)
    assert len(chunks) > 1 and [chunk.sha256 for chunk in chunks[:-1]] == [""] * (len(chunks) - 1)
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        backend = tokenizers.Tokenizer.from_str(archive.read("tokenizer.json").decode())
        assert backend.encode("Hello world", add_special_tokens=False).ids == [259, 264]
        assert "im_start" in json.loads(archive.read("tokenizer_config.json"))["chat_template"]


async def test_calls_of_later_features_are_unimplemented(serve: Serve) -> None:
    async with listening(serve(config=PORTS)) as ports, engine_stub(ports) as stub:
        for answer in (stub.Embed(pb.EmbedRequest()), stub.StartProfile(common_pb2.StartProfileRequest()),
                       stub.StopProfile(common_pb2.StopProfileRequest()),
                       stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())):
            assert await answer.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_api_key_in_the_metadata(serve: Serve) -> None:
    service = serve(config={**PORTS, "api_keys": ("key",), "admin_api_key": "root"})
    async with listening(service) as ports, engine_stub(ports) as stub:
        assert (await stub.HealthCheck(pb.HealthCheckRequest())).healthy
        for metadata, code in (((), "UNAUTHENTICATED"), ((("authorization", "Bearer no"),), "UNAUTHENTICATED"),
                               ((("authorization", "Bearer key"),), "OK")):
            generating = stub.Generate(request(), metadata=metadata)
            with contextlib.suppress(grpc.aio.AioRpcError):
                assert len([message async for message in generating]) == 1
            assert await generating.code() is grpc.StatusCode[code]
            assert await stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=metadata).code() is grpc.StatusCode[code]
        flush = stub.FlushCache(common_pb2.FlushCacheRequest(), metadata=(("authorization", "Bearer key"),))
        assert await flush.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_health_and_reflection(serve: Serve) -> None:
    service = serve(config=PORTS)
    async with listening(service) as ports, grpc.aio.insecure_channel(f"127.0.0.1:{ports.grpc_port}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        name = "vllm.grpc.engine.VllmEngine"
        for known in ("", name):
            assert (await health.Check(health_pb2.HealthCheckRequest(service=known))).status == 1
        assert await health.Check(health_pb2.HealthCheckRequest(service="x")).code() is grpc.StatusCode.NOT_FOUND
        watch = health.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == 1
        service.lifecycle.draining = True
        assert (await asyncio.wait_for(watch.read(), SECONDS)).status == 2
        watch.cancel()
        reflect = reflection_pb2_grpc.ServerReflectionStub(channel)
        ask = reflect.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        answer = await anext(aiter(ask))
        assert name in [one.name for one in answer.list_services_response.service]
