"""Streaming detokenization: exact, never half a character, bounded."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.tokenizer.detokenizer import IncrementalDetokenizer
from serving.tokenizer.tokenizer import Tokenizer

# SmolLM2's vocabulary lacks some control characters and the bytes of unassigned planes. Special tokens start with "<".
UNICODE = st.text(
    alphabet=st.characters(
        min_codepoint=0x1E, max_codepoint=0x1FFFF, exclude_categories=["Cs"], exclude_characters="<"
    ) | st.sampled_from("\n\t\r"),
    max_size=60,
)  # fmt: skip


def stream(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None, **options) -> tuple[str, list[str]]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt or [], **options)
    pieces = [detokenizer.add([i]) for i in ids]
    return "".join(pieces) + detokenizer.finish(), pieces


@pytest.fixture(params=["smollm2", "llama"])
def tokenizer(request) -> Tokenizer:
    return request.getfixturevalue(request.param)


def byte_token(tokenizer: Tokenizer, byte: int) -> int:
    return next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == bytes([byte]))


@given(text=UNICODE, data=st.data())
def test_text_comes_back_in_whole_characters(smollm2: Tokenizer, llama: Tokenizer, text: str, data: st.DataObject):
    for tokenizer in (smollm2, llama):
        ids = tokenizer.encode(text, add_special_tokens=False)
        streamed, pieces = stream(tokenizer, ids, skip_special_tokens=False)
        assert streamed == tokenizer.decode(ids, skip_special_tokens=False)
        assert "".join(pieces) == text
        cut = data.draw(st.integers(0, len(ids)))
        detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
        assert detokenizer.add(ids[:cut]) + detokenizer.add(ids[cut:]) == "".join(pieces)


@given(seed=st.integers(0, 1 << 32), skip=st.booleans())
def test_any_ids_stream_as_they_decode(smollm2: Tokenizer, llama: Tokenizer, seed: int, skip: bool):
    rng = random.Random(seed)
    for tokenizer in (smollm2, llama):
        single_bytes = [i for i in range(480) if len(tokenizer.token_bytes(i)) == 1]
        ids = [rng.choice(single_bytes) if rng.random() < 0.7 else rng.randrange(tokenizer.vocab_size + 5)
               for _ in range(40)]  # fmt: skip
        assert stream(tokenizer, ids, skip_special_tokens=skip)[0] == tokenizer.decode(ids, skip_special_tokens=skip)


def test_a_character_of_several_tokens_appears_once_whole(tokenizer: Tokenizer):
    ids = [byte_token(tokenizer, b) for b in "😀é".encode()]
    assert stream(tokenizer, ids)[1] == ["", "", "", "😀", "", "é"]


def test_endless_incomplete_bytes_flow(tokenizer: Tokenizer):
    """Every byte that starts a character anew turns the one before it into U+FFFD."""
    lead = byte_token(tokenizer, 0xE4)
    text, pieces = stream(tokenizer, [lead] * 1000)
    assert text == "\ufffd" * 1000
    assert pieces[0] == "" and set(pieces[1:]) == {"\ufffd"}


def test_work_per_token_is_its_own(tokenizer: Tokenizer, monkeypatch):
    """No token is looked at twice, and none of the prompt beyond its last bytes."""
    looked_at: list[int] = []
    plain = tokenizer.token_bytes
    monkeypatch.setattr(tokenizer, "token_bytes", lambda i: looked_at.append(i) or plain(i))
    lead = byte_token(tokenizer, 0xE4)
    looked_at.clear()
    detokenizer = IncrementalDetokenizer(tokenizer, [lead] * 10_000)
    assert len(looked_at) == 3
    for _ in range(1000):
        detokenizer.add([lead])
    assert len(looked_at) == 1003


def test_a_prompt_can_end_inside_a_character(tokenizer: Tokenizer):
    first, *rest = [byte_token(tokenizer, b) for b in "😀".encode()]
    prompt = [*tokenizer.encode("Hi "), first, rest[0]]
    assert stream(tokenizer, rest[1:], prompt) == ("😀", ["", "😀"])


def test_leading_space_is_dropped_only_at_the_start(llama: Tokenizer):
    ids = llama.encode("the lamp", add_special_tokens=False)
    assert llama.token_bytes(ids[0]).startswith(b" ")
    assert stream(llama, ids)[0] == "the lamp"
    assert stream(llama, ids, [1])[0] == "the lamp"  # a hidden BOS is no text
    assert stream(llama, ids, llama.encode("see"))[0] == " the lamp"


def test_special_tokens_show_on_request(smollm2: Tokenizer):
    ids = [2, *smollm2.encode("ok"), 2]
    assert stream(smollm2, ids) == ("ok", ["", "ok", ""])
    assert stream(smollm2, ids, skip_special_tokens=False)[0] == "<|im_end|>ok<|im_end|>"


def test_pieces_are_one_a_token(smollm2: Tokenizer):
    text = "\n1. Carol has 20 🎉"
    ids = smollm2.encode(text)
    pieces = IncrementalDetokenizer(smollm2).add_tokens(ids)
    assert len(pieces) == len(ids) and "".join(pieces) == text
