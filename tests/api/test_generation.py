"""Events to deltas: stop strings, held-back text, UTF-8, what counts as the end."""

from collections.abc import Sequence

import pytest

from serving.api.generation import Delta, SequenceOutput
from serving.request import EngineRequest, SamplingParams, TokenEvent
from serving.tokenizer.tokenizer import Tokenizer
from tests.api.fakes import fake_logprob


def run(tokenizer: Tokenizer, ids: Sequence[int], *, per_step: int = 1, interval: int | None = 1,
        finish: str = "length", **sampling: object) -> list[Delta]:
    """All deltas of a sequence whose engine sends `ids`."""
    request = EngineRequest(request_id="r", prompt_token_ids=[64], sampling=SamplingParams(logprobs=1, **sampling))
    output = SequenceOutput(tokenizer, request, 0, interval)
    deltas = []
    for start in range(0, len(ids), per_step):
        new = list(ids[start : start + per_step])
        event = TokenEvent(request_id="r", new_token_ids=new, logprobs=[fake_logprob(i, 1) for i in new])
        if start + per_step >= len(ids):
            event.finish_reason = finish  # type: ignore[assignment]
        if (delta := output.add(event)) is not None:
            deltas.append(delta)
            if delta.finish_reason is not None:
                break
    return deltas


def spell(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def joined(deltas: list[Delta]) -> tuple[str, list[int]]:
    for delta in deltas:
        assert len(delta.token_ids) == len(delta.token_texts) == len(delta.logprobs)
        assert [entry.token_id for entry in delta.logprobs] == delta.token_ids
    text = "".join(delta.text for delta in deltas)
    assert "".join(text for delta in deltas for text in delta.token_texts) == text
    return text, [token_id for delta in deltas for token_id in delta.token_ids]


@pytest.mark.parametrize("per_step", [1, 2, 5, 100])
@pytest.mark.parametrize("interval", [1, 3, None])
def test_text_ids_and_logprobs_end_at_the_stop_string(tokenizer: Tokenizer, per_step: int,
                                                      interval: int | None) -> None:
    ids = spell(tokenizer, "alphabet: ABCDEFGHIJKL")
    deltas = run(tokenizer, ids, per_step=per_step, interval=interval, stop=("DEFGHIJ",))
    text, kept = joined(deltas)
    assert text == "alphabet: ABC" and kept == ids[:13]
    assert deltas[-1].finish_reason == "stop" and deltas[-1].stop_reason == "DEFGHIJ"
    assert kept + (deltas[-1].stop_ids or []) == ids[:20], "ids through the one that completes the stop string"


def test_no_part_of_a_stop_string_is_ever_shown(tokenizer: Tokenizer) -> None:
    deltas = run(tokenizer, spell(tokenizer, "ABC DEFGHIx DEFGHIJ"), stop=("DEFGHIJ",))
    shown = ""
    for delta in deltas:
        shown += delta.text
        assert "ABC DEFGHIx ".startswith(shown) and not shown.endswith(("D", "DE", "DEFGH"))
    assert shown == "ABC DEFGHIx "


def test_a_stop_string_inside_a_token_cuts_the_token(tokenizer: Tokenizer) -> None:
    hello, world = spell(tokenizer, "Hello world")
    text, ids = joined(run(tokenizer, [hello, world, world], stop=("o w",)))
    assert text == "Hell" and ids == [hello]
    text, ids = joined(run(tokenizer, [hello, world, world], stop=("o w",), include_stop_str_in_output=True))
    assert text == "Hello w" and ids == [hello, world]


def test_held_text_is_released_at_the_end(tokenizer: Tokenizer) -> None:
    ids = spell(tokenizer, "abc DEF")
    assert joined(run(tokenizer, ids, stop=("DEFGHIJ",))) == ("abc DEF", ids)


def test_a_stop_string_counts_only_after_min_tokens(tokenizer: Tokenizer) -> None:
    ids = spell(tokenizer, "xaxaxaxa")
    assert joined(run(tokenizer, ids, stop=("a",), min_tokens=4))[0] == "xaxax"
    assert joined(run(tokenizer, ids, stop=("ax",), min_tokens=3))[0] == "xax", "a match does not begin before"


def test_the_token_that_ended_it_is_not_text(tokenizer: Tokenizer) -> None:
    eos = tokenizer.eos_ids[0]
    for skip in (True, False):
        text, ids = joined(run(tokenizer, [*spell(tokenizer, "ab"), eos], finish="stop", skip_special_tokens=skip))
        assert text == "ab" and ids[-1] == eos
    deltas = run(tokenizer, [*spell(tokenizer, "ab"), eos], finish="stop", skip_special_tokens=False,
                 include_stop_str_in_output=True)
    assert joined(deltas)[0] == "ab<|im_end|>"


def test_characters_are_never_split(tokenizer: Tokenizer) -> None:
    ids = spell(tokenizer, "a€😀z")
    deltas = run(tokenizer, ids)
    assert joined(deltas) == ("a€😀z", ids)
    assert [delta.text for delta in deltas] == ["a", "", "", "€", "", "", "", "😀", "z"]


def test_endless_incomplete_utf8_keeps_flowing(tokenizer: Tokenizer) -> None:
    lead = next(i for i in range(256) if tokenizer.token_bytes(i) == b"\xf0")
    deltas = run(tokenizer, [lead] * 2000)
    text, ids = joined(deltas)
    assert text == "\ufffd" * 2000 and len(ids) == 2000
    assert sum(len(delta.text) for delta in deltas[:1000]) >= 998, "shown as they come"


@pytest.mark.parametrize("interval, sizes", [(1, [1] * 7), (3, [1, 3, 3]), (None, [7])])
def test_interval_between_deltas(tokenizer: Tokenizer, interval: int | None, sizes: list[int]) -> None:
    deltas = run(tokenizer, spell(tokenizer, "abcdefg"), interval=interval)
    assert [len(delta.token_ids) for delta in deltas] == sizes
