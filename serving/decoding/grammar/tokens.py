"""A model's vocabulary as llguidance sees it."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tokenizers
from llguidance import LLTokenizer

from serving.errors import InvalidRequest
from serving.tokenizer.tokenizer import Tokenizer


class _Spelling:
    """What `LLTokenizer` asks of a tokenizer of another library (its `TokenizerWrapper`)."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, size: int, eos_id: int):
        self._backend = middle_of_text(tokenizer.backend)
        self.tokens = [tokenizer.token_bytes(i) for i in range(size)]
        self.special_token_ids = sorted(tokenizer.special_ids)
        self.bos_token_id = tokenizer.bos_id
        self.eos_token_id = eos_id

    def __call__(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids


def middle_of_text(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A copy that spells text as it stands in the middle of an output: without the space that SentencePiece puts before
    a text, and with no special token for what only reads like one."""
    state = json.loads(backend.to_str())
    state["normalizer"] = _without_prefix(state["normalizer"])
    state["pre_tokenizer"] = _without_prefix(state["pre_tokenizer"])
    copy = tokenizers.Tokenizer.from_str(json.dumps(state))
    copy.encode_special_tokens = True
    copy.no_padding()
    copy.no_truncation()
    return copy


def _without_prefix(step: dict[str, Any] | None) -> dict[str, Any] | None:
    if step is None or step["type"] == "Prepend":
        return None
    step = dict(step)
    for name in ("normalizers", "pretokenizers"):
        if name in step:
            step[name] = [kept for one in step[name] if (kept := _without_prefix(one)) is not None]
    if "prepend_scheme" in step:
        step["prepend_scheme"] = "never"
    if "add_prefix_space" in step:
        step["add_prefix_space"] = False
    return step


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """`size` ids, the model's, of which those without a token are never allowed. Rows are int32 bits of ids."""

    tokenizer: LLTokenizer
    size: int
    eos_ids: tuple[int, ...]
    eos_row: np.ndarray
    known_row: np.ndarray  # all of the model's: its tokenizer may have more


def vocabulary(tokenizer: Tokenizer, size: int, eos_ids: Sequence[int] | None = None) -> Vocabulary:
    """eos_ids: the first is the one that is forced; None: the tokenizer's. Takes some tenths of a second.

    Raises InvalidRequest for a model without an end-of-sequence token: nothing could end the output."""
    eos_ids = tuple(i for i in (tokenizer.eos_ids if eos_ids is None else eos_ids) if i < size)
    if not eos_ids:
        raise InvalidRequest("structured output needs a model with an end-of-sequence token, this one has none",
                             "structured_outputs")
    whole = max(size, tokenizer.vocab_size)
    spelling: Any = _Spelling(tokenizer, whole, eos_ids[0])
    return Vocabulary(
        tokenizer=LLTokenizer(spelling, n_vocab=whole, eos_token=list(eos_ids)),
        size=size,
        eos_ids=eos_ids,
        eos_row=_row(eos_ids, size),
        known_row=_row(range(size), size),
    )


def _row(ids: Iterable[int], size: int) -> np.ndarray:
    flags = np.zeros(-(-size // 32) * 32, bool)
    flags[list(ids)] = True
    return np.packbits(flags, bitorder="little").view(np.int32)
