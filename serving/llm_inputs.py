"""What a script hands to `LLM`, checked: prompts, conversations and sampling parameters. No schema has seen it before,
so types are looked at as well. Every refusal is an `InvalidRequest`."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import msgspec

from serving.errors import InvalidRequest
from serving.request import SamplingParams, StructuredOutputs
from serving.tokenizer.tokenizer import Tokenizer


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]


class TextPrompt(TypedDict):
    prompt: str


Prompt = str | list[int] | TokensPrompt | TextPrompt
Message = Mapping[str, Any]


def list_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list."""
    if isinstance(prompts, str | bytes | Mapping):
        return [prompts]  # type: ignore[list-item]
    try:
        listed: list[Any] = list(prompts)
    except TypeError as error:
        raise _no_prompt(prompts) from error
    return [listed] if listed and hasattr(listed[0], "__index__") else listed


def read_prompt(prompt: Prompt, tokenizer: Tokenizer) -> tuple[str | None, list[int]]:
    """Its text, where it has one, and its tokens."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else prompt
    if isinstance(text, str) and (ids is None or ids is prompt):
        return text, tokenizer.encode(text)
    if isinstance(ids, bytes):  # its numbers would pass for tokens
        raise _no_prompt(prompt)
    try:
        return text if isinstance(text, str) else None, [operator.index(one) for one in ids]  # type: ignore[union-attr]
    except TypeError as error:
        raise _no_prompt(prompt) from error


def _no_prompt(prompt: object) -> InvalidRequest:
    return InvalidRequest(f"{repr(prompt)[:100]} is neither text, nor token ids, nor a dict with 'prompt' or "
                          "'prompt_token_ids'")


def list_sampling(given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """One for each prompt, with values of the types that they have to be."""
    if given is None or isinstance(given, SamplingParams):
        return [_typed(given or SamplingParams())] * count
    if not isinstance(given, Sequence) or not all(isinstance(one, SamplingParams) for one in given):
        raise InvalidRequest(f"sampling_params are {given!r}, must be SamplingParams, one or a list of them")
    if len(given) != count:
        raise InvalidRequest(f"{len(given)} sampling_params for {count} prompts: give one, or one each")
    return [_typed(one) for one in given]


def _typed(sampling: SamplingParams) -> SamplingParams:
    # numpy's numbers and arrays are as good as Python's
    values = {name: value.tolist() if hasattr(value, "tolist") else value
              for name, value in msgspec.structs.asdict(sampling).items()}  # fmt: skip
    if isinstance(outputs := values["structured_outputs"], StructuredOutputs):
        values["structured_outputs"] = msgspec.structs.asdict(outputs)
    try:
        return msgspec.convert(values, SamplingParams)
    except msgspec.ValidationError as error:  # Expected `float`, got `str` - at `$.temperature`
        what, _, where = str(error).partition(" - at ")
        raise InvalidRequest(f"sampling_params{where.rpartition('$')[2].rstrip('`')}: {what}") from error


def list_conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[list[Message]]:
    """One conversation or several, as lists of messages with text."""
    given: Any = messages
    is_batch = isinstance(given, list | tuple) and all(isinstance(one, list | tuple) for one in given)
    several = given if is_batch else [given]
    for conversation in several:
        if not isinstance(conversation, list | tuple) or not all(isinstance(one, Mapping) for one in conversation):
            raise InvalidRequest(f"{conversation!r} is no conversation: it must be a list of messages, as "
                                 '{"role": "user", "content": "Hello!"}')  # fmt: skip
        for number, message in enumerate(conversation):
            parts = message.get("content")
            for part in parts if isinstance(parts, list) else ():
                if not isinstance(part, Mapping) or part.get("type") != "text":
                    raise InvalidRequest(f"messages[{number}].content has {part!r}; parts may only be text, as "
                                         '{"type": "text", "text": "Hello!"}')  # fmt: skip
    return [list(conversation) for conversation in several]
