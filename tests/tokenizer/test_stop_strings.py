"""Stop strings against a naive search over the whole text."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.tokenizer.stop_strings import StopStringMatcher, failure_links

LETTERS = st.text(alphabet="ab", max_size=30)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4)


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Text before the stop string that ends first (of several, the longest), and that string."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


def run(pieces: list[str], matcher: StopStringMatcher) -> list[str]:
    shown = []
    for piece in pieces:
        shown.append(matcher.add(piece))
        if matcher.stop is not None:
            return shown
    return [*shown, matcher.finish()]


@given(text=LETTERS, stops=STOPS, include=st.booleans(), cuts=st.lists(st.integers(0, 30), max_size=6))
def test_any_cutting_gives_what_a_search_of_the_whole_text_gives(text, stops, include, cuts):
    bounds = sorted({0, len(text), *(min(c, len(text)) for c in cuts)})
    pieces = [text[a:b] for a, b in pairwise(bounds)]
    matcher = StopStringMatcher(stops, include)
    shown = "".join(run(pieces, matcher))
    before, stop = naive(text, stops)
    assert (shown, matcher.stop) == (before + (stop or "" if include else ""), stop)
    assert matcher.length == len(shown)


@given(text=LETTERS, stops=STOPS)
def test_no_part_of_a_stop_string_is_shown_and_nothing_more_is_held(text, stops):
    matcher = StopStringMatcher(stops)
    fed = shown = ""
    for letter in text:
        fed += letter
        shown += matcher.add(letter)
        if matcher.stop is not None:
            break
        held = max((n for stop in stops for n in range(len(stop)) if fed.endswith(stop[:n])), default=0)
        assert shown == fed[: len(fed) - held]


def test_possible_prefixes_wait():
    matcher = StopStringMatcher(["DEFGHIJ"])
    assert run(["alphabet: ABC", "DEF", "GH", "x"], matcher) == ["alphabet: ABC", "", "", "DEFGHx", ""]
    matcher = StopStringMatcher(["DEFGHIJ"])
    assert run(["alphabet: ABC", "DEF", "GHIJKL"], matcher) == ["alphabet: ABC", "", ""]
    assert (matcher.stop, matcher.length) == ("DEFGHIJ", 13)


def test_held_text_is_shown_at_the_end():
    assert run(["one\n"], StopStringMatcher(["\n\n"])) == ["one", "\n"]


def test_text_passed_by_does_not_count():
    matcher = StopStringMatcher(["ab"])
    assert matcher.pass_by("ab a") == "ab a"
    assert run(["b", "ab"], matcher) == ["b", ""]
    assert (matcher.stop, matcher.length) == ("ab", 5)


def test_held_text_passes_by_too():
    matcher = StopStringMatcher(["ab"])
    assert matcher.add("xa") == "x"
    assert matcher.pass_by("b") == "ab"


def test_links_by_hand():
    assert failure_links("ababc") == [0, 0, 0, 1, 2, 0]
    assert failure_links("aaa") == [0, 0, 1, 2]


def test_work_is_linear():
    """The automaton moves at most twice a character, on the input that is worst for a naive search."""
    matcher = StopStringMatcher(["a" * 50 + "b"])
    compared = 0

    class Counting(str):
        def __getitem__(self, index):
            nonlocal compared
            compared += 1
            return str.__getitem__(self, index)

    matcher._stops = [Counting(stop) for stop in matcher._stops]
    for _ in range(1000):
        matcher.add("a" * 10)
    assert compared < 3 * 10_000


def test_empty_stop_strings_are_a_bug():
    with pytest.raises(AssertionError):
        StopStringMatcher([""])
