"""The service `vllm.grpc.engine.VllmEngine`, as gateways expect it from an engine."""

import asyncio
import hashlib
import io
import time
import zipfile
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any, NoReturn

import grpc
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from serving.api.grpc.generate import prepare, responses
from serving.api.keys import admin_keys, check_authorization
from serving.api.service import Service
from serving.errors import EngineDead, InvalidRequest, PageloomError

TOKENIZER_CHUNK_BYTES = 64 * 1024
FLUSH_POLL_SECONDS = 0.05


async def _fail(context: grpc.aio.ServicerContext, error: PageloomError) -> NoReturn:
    await context.abort(grpc.StatusCode[error.grpc_code], str(error))
    raise AssertionError("abort returned")


class Throughput:
    """Tokens a second between two looks at a counter."""

    def __init__(self) -> None:
        self._time, self._tokens = time.monotonic(), 0

    def update(self, tokens: int) -> float:
        now = time.monotonic()
        rate = (tokens - self._tokens) / max(now - self._time, 1e-3)
        self._time, self._tokens = now, tokens
        return rate


async def _unimplemented(self: object, request: Any, context: grpc.aio.ServicerContext) -> NoReturn:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"not served by this version: {type(request).__name__}")
    raise AssertionError("abort returned")


class VllmEngineServicer(vllm_engine_pb2_grpc.VllmEngineServicer):
    Embed = StartProfile = StopProfile = SubscribeKvEvents = _unimplemented

    def __init__(self, service: Service):
        self._service = service
        self._live: dict[str, set[str]] = defaultdict(set)  # the caller's id -> ids in the engine
        self._throughput = Throughput()
        self._last_receive = 0.0

    async def _authorize(self, context: grpc.aio.ServicerContext, keys: Sequence[str] | None = None) -> None:
        metadata = dict(context.invocation_metadata() or ())
        try:
            check_authorization(str(metadata.get("authorization", "")), keys or self._service.config.api_keys)
        except PageloomError as error:
            await _fail(context, error)

    async def Generate(self, request: pb.GenerateRequest,
                       context: grpc.aio.ServicerContext) -> AsyncGenerator[pb.GenerateResponse]:
        """A stream that the client leaves is cancelled by grpc, which closes this generator and aborts the work."""
        await self._authorize(context)
        self._last_receive = time.time()
        ids: set[str] = set()
        try:
            requests = await prepare(self._service, request)
            ids = {one.request_id for one in requests}
            self._live[request.request_id] |= ids
            async with aclosing(responses(self._service, requests, request.stream)) as messages:
                async for message in messages:
                    yield message
        except PageloomError as error:
            await _fail(context, error)
        finally:
            live = self._live[request.request_id]
            live -= ids
            if not live:
                del self._live[request.request_id]

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        """Unknown ids are fine: gateways abort every stream they drop, also finished ones."""
        await self._authorize(context)
        for request_id in request.request_ids:
            for engine_id in tuple(self._live.get(request_id, ())):
                await self._service.engine.abort(engine_id)
        return pb.AbortResponse()

    async def HealthCheck(self, request: pb.HealthCheckRequest,
                          context: grpc.aio.ServicerContext) -> pb.HealthCheckResponse:
        try:
            self._service.check_admission()
        except EngineDead as error:
            return pb.HealthCheckResponse(healthy=False, message=str(error))
        return pb.HealthCheckResponse(healthy=True, message="healthy")

    async def GetModelInfo(self, request: pb.GetModelInfoRequest,
                           context: grpc.aio.ServicerContext) -> pb.GetModelInfoResponse:
        await self._authorize(context)
        service, info = self._service, self._service.engine.info
        config = service.config.engine
        return pb.GetModelInfoResponse(
            model_path=config.model or service.model_name, is_generation=True, max_context_length=info.max_model_len,
            vocab_size=info.vocab_size, served_model_name=service.model_name,
            tokenizer_path=config.tokenizer or config.model, model_type=info.model_family,
            eos_token_ids=service.tokenizer.eos_ids, bos_token_id=service.tokenizer.bos_id or 0,
            max_req_input_len=info.max_model_len - 1,
        )  # fmt: skip

    async def GetServerInfo(self, request: pb.GetServerInfoRequest,
                            context: grpc.aio.ServicerContext) -> pb.GetServerInfoResponse:
        await self._authorize(context)
        service, info = self._service, self._service.engine.info
        return pb.GetServerInfoResponse(
            active_requests=service.lifecycle.live, is_paused=service.lifecycle.draining,
            last_receive_timestamp=self._last_receive, uptime_seconds=time.time() - service.start_time,
            server_type="vllm-grpc", data_parallel_size=1, kv_cache_dtype=info.kv_cache_dtype,
            block_size=info.page_size, attention_backend=info.attention_backend, model_dtype=info.dtype,
            max_num_seqs=info.max_num_seqs * info.num_groups, constrained_decoding_start="first_token",
        )  # fmt: skip

    async def GetLoads(self, request: pb.GetLoadsRequest, context: grpc.aio.ServicerContext) -> pb.GetLoadsResponse:
        await self._authorize(context)
        if request.HasField("dp_rank") and request.dp_rank != 0:
            await _fail(context, InvalidRequest(f"dp_rank is {request.dp_rank}, must be 0: there is one rank"))
        stats, info = self._service.engine.stats, self._service.engine.info
        # The engine balances its data groups by itself: to the outside it is one rank.
        capacity, max_num_seqs = info.num_groups * info.num_pages * info.page_size, info.num_groups * info.max_num_seqs
        queries = stats.prefix_cache_queries
        load = pb.SchedulerLoad(
            num_running_reqs=stats.num_running, num_waiting_reqs=stats.num_waiting,
            num_total_reqs=stats.num_running + stats.num_waiting, token_usage=stats.kv_cache_usage,
            num_used_tokens=round(stats.kv_cache_usage * capacity), max_total_num_tokens=capacity,
            gen_throughput=self._throughput.update(stats.generation_tokens),
            cache_hit_rate=stats.prefix_cache_hits / queries if queries else 0.0,
            utilization=stats.num_running / max_num_seqs, max_running_requests=max_num_seqs,
        )  # fmt: skip
        return pb.GetLoadsResponse(timestamp=datetime.now(UTC).isoformat(), version=self._service.version,
                                   dp_rank_count=1, loads=[load])

    async def GetTokenizer(self, request: common_pb2.GetTokenizerRequest,
                           context: grpc.aio.ServicerContext) -> AsyncGenerator[common_pb2.GetTokenizerChunk]:
        """The tokenizer's files as a zip archive in pieces; the last piece carries the archive's SHA-256."""
        await self._authorize(context)
        data = await asyncio.to_thread(self._zip_tokenizer)
        digest = hashlib.sha256(data).hexdigest()
        for start in range(0, len(data), TOKENIZER_CHUNK_BYTES):
            piece = data[start : start + TOKENIZER_CHUNK_BYTES]
            is_last = start + len(piece) == len(data)
            yield common_pb2.GetTokenizerChunk(data=piece, sha256=digest if is_last else "")

    def _zip_tokenizer(self) -> bytes:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in sorted(self._service.tokenizer.tokenizer_files().items()):
                archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)  # no dates: same bytes each time
        return buffer.getvalue()

    async def FlushCache(self, request: common_pb2.FlushCacheRequest,
                         context: grpc.aio.ServicerContext) -> common_pb2.FlushCacheResponse:
        """Drops the cached pages; with `timeout_s` waits that long for the live requests to end first."""
        await self._authorize(context, admin_keys(self._service.config))
        deadline = time.monotonic() + request.timeout_s
        while self._service.lifecycle.live and time.monotonic() < deadline:
            await asyncio.sleep(FLUSH_POLL_SECONDS)
        try:
            self._service.engine.check_health()
            done = await self._service.engine.flush_cache()
        except PageloomError as error:
            await _fail(context, error)
        message = "the prefix cache is empty" if done else "live requests hold some of the prefix cache"
        return common_pb2.FlushCacheResponse(success=done, message=message)
