"""The Generate call: engine requests in, chunks and completes out."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from serving.api.generation import Delta, generate
from serving.api.grpc.convert import input_logprobs, output_logprobs, sampling_from
from serving.api.service import Service
from serving.errors import InvalidRequest
from serving.request import EngineRequest, Logprobs
from serving.validation import to_engine_requests


async def prepare(service: Service, request: pb.GenerateRequest) -> list[EngineRequest]:
    """Raises `InvalidRequest`."""
    kind = request.WhichOneof("input")
    if kind is None:
        raise InvalidRequest("input is not set, must be tokenized or text", "input")
    sampling = sampling_from(request)
    ids = list(request.tokenized.input_ids) if kind == "tokenized" else await service.encode(request.text, True)
    return to_engine_requests(ids, sampling, service.limits, service.tokenizer, request_id=request.request_id)


@dataclass
class _Output:
    """What one sequence has brought so far."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)


def _news(delta: Delta) -> tuple[list[int], list[Logprobs]]:
    """Ids are all that leaves here, so those that spell the stop string belong to them: the client cuts the text."""
    return delta.token_ids + (delta.stop_ids or []), delta.logprobs + (delta.stop_logprobs or [])


async def responses(service: Service, requests: Sequence[EngineRequest],
                    stream: bool) -> AsyncGenerator[pb.GenerateResponse]:
    """With `stream` a chunk for each delta; always a complete for each sequence, with all its ids. Log-probabilities
    come once: in the chunks, or without `stream` in the complete."""
    prompt_tokens = len(requests[0].prompt_token_ids)
    outputs = [_Output() for _ in requests]
    prompt: pb.InputLogProbs | None = None
    held: list[Delta] = []  # without `stream`: to be sent when sequence 0 has brought the prompt's log-probabilities

    def complete(delta: Delta) -> pb.GenerateResponse:
        output = outputs[delta.sequence]
        message = pb.GenerateComplete(
            output_ids=output.ids, finish_reason=delta.finish_reason or "", prompt_tokens=prompt_tokens,
            completion_tokens=len(output.ids), cached_tokens=delta.num_cached_tokens, index=delta.sequence,
            spec_draft_tokens=delta.num_drafts, spec_accepted_tokens=delta.num_accepted,
        )  # fmt: skip
        if not stream:
            if output.logprobs:
                message.output_logprobs.CopyFrom(output_logprobs(output.logprobs))
            if prompt is not None:
                message.input_logprobs.CopyFrom(prompt)
        if isinstance(delta.stop_reason, str):
            message.matched_stop_str = delta.stop_reason
        elif delta.stop_reason is not None:
            message.matched_token_id = delta.stop_reason
        return pb.GenerateResponse(complete=message)

    def chunk(delta: Delta, ids: list[int], logprobs: list[Logprobs],
              news: pb.InputLogProbs | None) -> pb.GenerateResponse:
        return pb.GenerateResponse(chunk=pb.GenerateStreamChunk(
            token_ids=ids, prompt_tokens=prompt_tokens, completion_tokens=len(ids),
            cached_tokens=delta.num_cached_tokens, index=delta.sequence, input_logprobs=news,
            output_logprobs=output_logprobs(logprobs) if logprobs else None,
        ))  # fmt: skip

    async with aclosing(generate(service, requests, service.config.stream_interval if stream else None)) as deltas:
        async for delta in deltas:
            ids, logprobs = _news(delta)
            outputs[delta.sequence].ids += ids
            news = None
            if delta.prompt_logprobs is not None:
                prompt = news = input_logprobs(requests[0].prompt_token_ids, delta.prompt_logprobs)
            if stream:
                yield chunk(delta, ids, logprobs, news)
                if delta.finish_reason is not None:
                    yield complete(delta)
                continue
            outputs[delta.sequence].logprobs += logprobs
            held.append(delta)
    for delta in sorted(held, key=lambda delta: delta.sequence):
        yield complete(delta)
