"""Between the messages of `vllm.grpc.engine` and our own types."""

from collections.abc import Sequence
from typing import Any

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from serving.errors import InvalidRequest
from serving.request import Logprobs, SamplingParams, StructuredOutputs


def _refuse_unsupported(request: pb.GenerateRequest) -> None:
    """Fields of later features, by the name under which they came."""
    for name in ("kv_transfer_params", "kv_transfer_params_json", "mm_inputs", "media_refs"):
        if request.HasField(name):
            raise InvalidRequest(f"{name} is not supported", name)
    if request.extra_mm_inputs:
        raise InvalidRequest("extra_mm_inputs is not supported", "extra_mm_inputs")
    if request.HasField("data_parallel_rank") and request.data_parallel_rank != 0:
        raise InvalidRequest(f"data_parallel_rank is {request.data_parallel_rank}, must be 0: there is one rank",
                             "data_parallel_rank")


def _structured_outputs(params: pb.SamplingParams) -> StructuredOutputs | None:
    """`grammar_from_first_token` changes nothing: nothing holds a grammar back here."""
    constraint = params.WhichOneof("constraint")
    if constraint is None:
        return None
    value: Any = getattr(params, constraint)
    name = "json" if constraint == "json_schema" else constraint
    given: dict[str, Any] = {name: tuple(value.choices) if constraint == "choice" else value}
    return StructuredOutputs(**given, source=constraint)


def sampling_from(request: pb.GenerateRequest) -> SamplingParams:
    """proto3 cannot tell an unset number from zero: where zero makes no sense (top_p, repetition_penalty, n) it means
    the default. Raises `InvalidRequest` for what is not supported."""
    _refuse_unsupported(request)
    if not request.HasField("sampling_params"):
        return SamplingParams()
    params = request.sampling_params

    def optional(name: str) -> int | None:
        return getattr(params, name) if params.HasField(name) else None

    return SamplingParams(
        n=params.n or 1,
        max_tokens=optional("max_tokens"),
        min_tokens=params.min_tokens,
        temperature=params.temperature if params.HasField("temperature") else 1.0,
        top_p=params.top_p or 1.0,
        top_k=params.top_k,
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty or 1.0,
        seed=optional("seed"),
        stop=tuple(params.stop),
        stop_token_ids=tuple(params.stop_token_ids),
        include_stop_str_in_output=params.include_stop_str_in_output,
        ignore_eos=params.ignore_eos,
        logit_bias=dict(params.logit_bias),
        logprobs=optional("logprobs"),
        prompt_logprobs=optional("prompt_logprobs"),
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=params.spaces_between_special_tokens,
        truncate_prompt_tokens=optional("truncate_prompt_tokens"),
        structured_outputs=_structured_outputs(params),
    )


def _top(entry: Logprobs | None) -> pb.TopLogProbs:
    if entry is None:
        return pb.TopLogProbs()
    return pb.TopLogProbs(values=entry.top_logprobs, token_ids=entry.top_ids)


def output_logprobs(entries: Sequence[Logprobs]) -> pb.OutputLogProbs:
    return pb.OutputLogProbs(
        token_logprobs=[entry.logprob for entry in entries],
        token_ids=[entry.token_id for entry in entries],
        top_logprobs=[_top(entry) for entry in entries] if any(entry.top_ids for entry in entries) else [],
    )


def input_logprobs(prompt_token_ids: Sequence[int], entries: Sequence[Logprobs | None]) -> pb.InputLogProbs:
    """The first prompt token has no log-probability: its value is unset."""
    return pb.InputLogProbs(
        token_logprobs=[pb.InputTokenLogProb(value=None if entry is None else entry.logprob) for entry in entries],
        token_ids=prompt_token_ids,
        top_logprobs=[_top(entry) for entry in entries] if any(entry and entry.top_ids for entry in entries) else [],
    )
