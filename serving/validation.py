"""The rules a generation request must keep, checked once for every front end, and its split into sequences.

The ranges are OpenAI's and vLLM's. HTTP states the same limits in its schema; gRPC and the `LLM` class rely on this
module alone. Every refusal is an `InvalidRequest` that names the field, the value and the rule.
"""

import math
import secrets
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import msgspec

from serving.config import MAX_LOGPROBS, StructuredOutputsConfig
from serving.decoding.grammar.build import grammar_of, source_of
from serving.decoding.parts import Frame
from serving.errors import InvalidRequest
from serving.request import EngineRequest, SamplingParams, StructuredOutputs

MAX_N = 128
MAX_SEQUENCES = 4096  # prompts of one request, times n
MAX_ID_CHARS = 256  # of a request: it travels with every token
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256
INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1
INT32_MAX = (1 << 31) - 1


class Encoder(Protocol):
    """The part of a tokenizer that bad words and grammars need."""

    @property
    def special_token_ids(self) -> Mapping[str, int]: ...

    @property
    def eos_ids(self) -> Sequence[int]: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """What this engine can do, as far as requests depend on it."""

    max_model_len: int
    vocab_size: int
    max_logprobs: int = MAX_LOGPROBS
    priority_policy: bool = False  # whether the scheduler looks at `priority`
    structured_outputs: StructuredOutputsConfig = StructuredOutputsConfig()  # where a request does not say


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _refuse(field: str, value: object, rule: str) -> InvalidRequest:
    return InvalidRequest(f"{field} is {_show(value)}, must be {rule}", field)


def _check_range(field: str, value: float | int | None, low: float, high: float) -> None:
    """Closed interval; None passes, NaN does not."""
    if value is not None and not low <= value <= high:
        if high == math.inf:
            raise _refuse(field, value, f"at least {low}")
        raise _refuse(field, value, f"between {low} and {high}")


def _check_texts(field: str, texts: Sequence[str], most: int, most_chars: int) -> None:
    if isinstance(texts, str):  # its letters would count as entries
        raise _refuse(field, texts, "a sequence of strings")
    if len(texts) > most:
        raise InvalidRequest(f"{field} has {len(texts)} entries, at most {most} are allowed", field)
    for text in texts:
        if not text:
            raise InvalidRequest(f"{field} has an empty string, every entry must have a character", field)
        if len(text) > most_chars:
            raise InvalidRequest(f"{field} has a string of {len(text)} characters, at most {most_chars} are allowed",
                                 field)


def _check_ids(field: str, ids: Iterable[int], vocab_size: int) -> None:
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(f"{field} has token id {token_id}, must be in the vocabulary: 0 to {vocab_size - 1}",
                                 field)


def validate(sampling: SamplingParams, limits: RequestLimits) -> None:
    """Raises `InvalidRequest` for the first field that breaks a rule of its own, apart from the prompt."""
    s = sampling
    _check_range("n", s.n, 1, MAX_N)
    _check_range("max_tokens", s.max_tokens, 1, INT32_MAX)
    _check_range("min_tokens", s.min_tokens, 0, INT32_MAX)
    if s.max_tokens is not None and s.min_tokens > s.max_tokens:
        raise _refuse("min_tokens", s.min_tokens, f"at most max_tokens, {s.max_tokens}")
    _check_range("temperature", s.temperature, 0, 2)
    if not 0 < s.top_p <= 1:
        raise _refuse("top_p", s.top_p, "above 0 and at most 1")
    _check_range("top_k", s.top_k, -1, INT32_MAX)
    _check_range("min_p", s.min_p, 0, 1)
    _check_range("frequency_penalty", s.frequency_penalty, -2, 2)
    _check_range("presence_penalty", s.presence_penalty, -2, 2)
    if not 0 < s.repetition_penalty < math.inf:
        raise _refuse("repetition_penalty", s.repetition_penalty, "a finite number above 0")
    _check_range("seed", s.seed, INT64_MIN, INT64_MAX)
    _check_range("logprobs", s.logprobs, 0, limits.max_logprobs)
    _check_range("prompt_logprobs", s.prompt_logprobs, 0, limits.max_logprobs)
    _check_texts("stop", s.stop, MAX_STOP_STRINGS, MAX_STOP_STRING_CHARS)
    _check_texts("bad_words", s.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARS)
    if len(s.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(f"stop_token_ids has {len(s.stop_token_ids)} entries, at most {MAX_STOP_TOKEN_IDS} "
                             "are allowed", "stop_token_ids")
    _check_ids("stop_token_ids", s.stop_token_ids, limits.vocab_size)
    _check_ids("logit_bias", s.logit_bias, limits.vocab_size)
    for token_id, bias in s.logit_bias.items():
        if not -100 <= bias <= 100:
            raise InvalidRequest(f"logit_bias of token {token_id} is {bias}, must be between -100 and 100",
                                 "logit_bias")
    if s.allowed_token_ids is not None:
        if not s.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids is empty, must allow at least one token", "allowed_token_ids")
        _check_ids("allowed_token_ids", s.allowed_token_ids, limits.vocab_size)
    truncate = s.truncate_prompt_tokens
    if truncate is not None and truncate != -1 and not 1 <= truncate <= INT32_MAX:
        raise _refuse("truncate_prompt_tokens", truncate, "-1 or at least 1")


def fit_prompt(prompt_token_ids: list[int], sampling: SamplingParams, limits: RequestLimits,
               default_max_tokens: int | None = None) -> tuple[list[int], int]:
    """The prompt after `truncate_prompt_tokens`, and the number of tokens that may be generated: `max_tokens` or, as
    far as there is room, the default (None: all the room).

    Raises `InvalidRequest` when the prompt is empty, holds ids out of the vocabulary, or does not fit the context.
    """
    truncate = sampling.truncate_prompt_tokens
    if truncate == -1:  # as much as leaves room for the output
        truncate = max(1, limits.max_model_len - (sampling.max_tokens or default_max_tokens or 1))
    ids = prompt_token_ids if truncate is None else prompt_token_ids[-truncate:]
    if not ids:
        raise InvalidRequest("prompt has no tokens, must have at least 1", "prompt")
    if min(ids) < 0 or max(ids) >= limits.vocab_size:
        _check_ids("prompt", ids, limits.vocab_size)
    room = limits.max_model_len - len(ids)
    why = f"the prompt has {len(ids)} tokens and the context length is {limits.max_model_len}"
    if room < 1:
        raise InvalidRequest(f"the prompt must leave room for 1 output token: {why}", "prompt")
    if sampling.max_tokens is None:
        if sampling.min_tokens > room:
            raise _refuse("min_tokens", sampling.min_tokens, f"at most {room}: {why}")
        return ids, room if default_max_tokens is None else min(room, max(default_max_tokens, sampling.min_tokens))
    if sampling.max_tokens > room:
        raise _refuse("max_tokens", sampling.max_tokens, f"at most {room}: {why}")
    return ids, sampling.max_tokens


@lru_cache(maxsize=8)  # the prompts of one request share them
def bad_words_token_ids(bad_words: tuple[str, ...], tokenizer: Encoder) -> tuple[tuple[int, ...], ...]:
    """Each word as it is spelled at the start of a text and, where that takes as many tokens, after a space (vLLM's
    rule: a word in mid-sentence is usually one token that begins with the space)."""
    sequences: list[tuple[int, ...]] = []
    for word in bad_words:
        bare = word.lstrip()
        plain = tuple(tokenizer.encode(bare, add_special_tokens=False))
        spaced = tuple(tokenizer.encode(" " + bare, add_special_tokens=False))
        if plain:
            sequences.append(plain)
        if spaced and (not plain or (spaced[0] != plain[0] and len(spaced) == len(plain))):
            sequences.append(spaced)
    return tuple(sequences)


def _with_defaults(outputs: StructuredOutputs | None, config: StructuredOutputsConfig) -> StructuredOutputs | None:
    if outputs is None:
        return None
    given = {}
    if outputs.disable_any_whitespace is None and outputs.whitespace_pattern is None:
        given["disable_any_whitespace"] = config.disable_any_whitespace
    if outputs.disable_additional_properties is None:
        given["disable_additional_properties"] = config.disable_additional_properties
    return msgspec.structs.replace(outputs, **given)


def _grammar(outputs: StructuredOutputs | None, tokenizer: Encoder,
             after: Frame | None) -> tuple[str, str]:
    """The grammar, and the field it came as."""
    if outputs is None:
        return "", ""
    try:
        encoded = msgspec.json.encode(outputs)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"structured_outputs is not JSON: {error}", "structured_outputs") from error
    return _written_grammar(encoded, tokenizer, after), source_of(outputs)


@lru_cache(maxsize=8)  # the prompts of one request share it
def _written_grammar(outputs: bytes, tokenizer: Encoder, after: Frame | None) -> str:
    return grammar_of(msgspec.json.decode(outputs, type=StructuredOutputs), tokenizer.special_token_ids,
                      tokenizer.eos_ids, after=after)


def to_engine_requests(
    prompt_token_ids: list[int],
    sampling: SamplingParams,
    limits: RequestLimits,
    tokenizer: Encoder,
    *,
    request_id: str = "",
    priority: int = 0,
    cache_salt: str = "",
    default_max_tokens: int | None = None,
    grammar_after: Frame | None = None,
) -> list[EngineRequest]:
    """Validates a request and splits it into `sampling.n` sequences, whose ids are unique whatever `request_id` is.
    grammar_after: `structured_outputs` hold only after the model's reasoning, of which this is the frame.

    Sequence i samples with seed + i, so one of n equals a request of its own with that seed. Only sequence 0 computes
    prompt_logprobs: they are the same for all.
    """
    validate(sampling, limits)
    if len(request_id) > MAX_ID_CHARS:
        raise InvalidRequest(f"request_id has {len(request_id)} characters, at most {MAX_ID_CHARS} are allowed",
                             "request_id")
    if priority and not limits.priority_policy:
        raise InvalidRequest(f"priority is {priority}, must be 0 unless the server runs --scheduling-policy priority",
                             "priority")
    ids, max_tokens = fit_prompt(prompt_token_ids, sampling, limits, default_max_tokens)
    # A tokenizer may know more tokens than the model, which never makes those.
    bad_words = tuple(word for word in bad_words_token_ids(tuple(sampling.bad_words), tokenizer)
                      if max(word) < limits.vocab_size)  # fmt: skip
    outputs = _with_defaults(sampling.structured_outputs, limits.structured_outputs)
    grammar, source = _grammar(outputs, tokenizer, grammar_after)
    seed = sampling.seed if sampling.seed is not None else secrets.randbits(63)
    group = f"{request_id or 'req'}-{uuid.uuid4().hex[:12]}"
    now = time.time()
    one = msgspec.structs.replace(sampling, n=1, max_tokens=max_tokens, truncate_prompt_tokens=None,
                                  structured_outputs=None)
    return [
        EngineRequest(
            request_id=f"{group}-{index}",
            prompt_token_ids=ids,
            sampling=msgspec.structs.replace(
                one,
                seed=(seed + index - INT64_MIN) % (1 << 64) + INT64_MIN,
                prompt_logprobs=sampling.prompt_logprobs if index == 0 else None,
            ),
            bad_words_token_ids=bad_words,
            grammar=grammar,
            grammar_source=source,
            priority=priority,
            cache_salt=cache_salt,
            group_id=group,
            arrival_time=now,
        )
        for index in range(sampling.n)
    ]
