"""Compiling beside the engine: shared, bounded in time and memory, and alone to blame for its delays."""

import gc
import json
import os
import sys
import threading
import time
import weakref

import pytest

from serving.decoding.grammar.compiler import NICENESS, THREADS, Compiler
from serving.decoding.grammar.matcher import GrammarMatcher
from serving.decoding.grammar.tokens import vocabulary
from serving.engine.compiling import Compiling
from serving.errors import InvalidRequest, Overloaded
from serving.request import EngineRequest, SamplingParams
from tests.decoding.grammar.toy import PADDING, toy_tokenizer

TOY = toy_tokenizer()
GRAMMAR = '{"grammars": [{"lark_grammar": "start: /[ab]{3}/"}]}'
SLOW = "slow"
SECONDS = 300  # for what takes milliseconds, of threads that yield to everything else on a busy machine


class Counting(Compiler):
    """Counts what it builds; `SLOW` waits for `gate`."""

    def __init__(self, **options: object):
        super().__init__(lambda: vocabulary(TOY, TOY.vocab_size + PADDING), **options)  # type: ignore[arg-type]
        self.built: list[str] = []
        self.gate = threading.Event()

    def _build(self, grammar: str):
        self.built.append(grammar)
        if grammar.startswith(SLOW):
            assert self.gate.wait(SECONDS)
            grammar = GRAMMAR
        return super()._build(grammar)


@pytest.fixture
def unyielding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that get their share of a busy machine, for tests of short timeouts."""
    monkeypatch.setattr("serving.decoding.grammar.compiler.NICENESS", 0)


def test_equal_grammars_are_compiled_once_and_move_apart() -> None:
    compiler = Counting()
    one, two = (compiler.compile(GRAMMAR) for _ in range(2))
    matchers = [one.result(SECONDS), two.result(SECONDS), compiler.compile(GRAMMAR).result(SECONDS)]
    assert compiler.built == [GRAMMAR] and len(set(map(id, matchers))) == 3
    matchers[0].accept(TOY.encode("aba"))
    assert matchers[0].forced() == [TOY.eos_ids[0]] and matchers[1].forced() == []
    compiler.close()


def test_long_chains_do_not_overflow_the_stack() -> None:
    """Which would end the process."""
    compiler = Counting(timeout=SECONDS)
    links = {f"r{i}": {"$ref": f"#/$defs/r{i + 1}"} for i in range(6000)} | {"r6000": {"const": 1}}
    rules = ["start: r0", *(f"r{i}: r{i + 1}" for i in range(4500)), 'r4500: "a"']
    for part in ({"json_schema": {"$ref": "#/$defs/r0", "$defs": links}}, {"lark_grammar": "\n".join(rules)}):
        assert compiler.compile(json.dumps({"grammars": [part]})).result(SECONDS).forced()
    compiler.close()


def test_the_least_used_is_forgotten() -> None:
    compiler = Counting(cache_size=2)
    grammars = [f'{{"grammars": [{{"lark_grammar": "start: /[ab]{{{n}}}/"}}]}}' for n in (1, 2, 3)]
    for grammar in (*grammars[:2], grammars[0], grammars[2], grammars[0], grammars[1]):
        compiler.compile(grammar).result(SECONDS)
    assert compiler.built == [*grammars, grammars[1]]
    compiler.close()


def test_a_slow_grammar_delays_only_its_request_and_is_refused_in_time(unyielding: None) -> None:
    compiler = Counting(timeout=1.5)
    compiler.compile(GRAMMAR).result(SECONDS)
    slow, began = compiler.compile(SLOW), time.monotonic()
    other = compiler.compile(GRAMMAR.replace("3", "4"))
    assert isinstance(other.result(SECONDS), GrammarMatcher) and not slow.done()
    with pytest.raises(InvalidRequest, match="not compiled within 1.5 seconds"):
        slow.result(SECONDS)
    assert time.monotonic() - began > 1.4
    compiler.gate.set()
    assert isinstance(compiler.compile(SLOW).result(SECONDS), GrammarMatcher), "another try is not refused unseen"
    compiler.close()


def test_many_slow_grammars_do_not_hold_up_a_quick_one() -> None:
    compiler = Counting()
    slow = [compiler.compile(f"{SLOW}{n}") for n in range(THREADS - 1)]
    assert isinstance(compiler.compile(GRAMMAR).result(SECONDS), GrammarMatcher)
    assert not any(future.done() for future in slow)
    compiler.gate.set()
    assert all(isinstance(future.result(SECONDS), GrammarMatcher) for future in slow)
    compiler.close()


def test_a_wait_for_a_thread_is_bounded_and_not_counted_as_compiling(unyielding: None) -> None:
    compiler = Counting(threads=1, timeout=2.0)
    first, began = compiler.compile(SLOW), time.monotonic()
    time.sleep(0.5)
    behind = compiler.compile(f"{SLOW} too")
    with pytest.raises(InvalidRequest, match="not compiled within 2 seconds"):
        first.result(SECONDS)
    with pytest.raises(Overloaded, match="no thread was free"):  # the first's is still at work
        behind.result(SECONDS)
    assert time.monotonic() - began > 2.4
    waited = compiler.compile(GRAMMAR)
    time.sleep(0.3)
    compiler.gate.set()
    assert isinstance(waited.result(SECONDS), GrammarMatcher)
    assert f"{SLOW} too" not in compiler.built, "what nobody waits for any more is not begun"
    compiler.close()


def test_what_nobody_waits_for_any_more_is_not_begun(caplog: pytest.LogCaptureFixture) -> None:
    compiler = Counting(threads=1)
    requests = Compiling(compiler.compile)

    def add(name: str, grammar: str) -> None:
        requests.add(EngineRequest(request_id=name, prompt_token_ids=[3], sampling=SamplingParams(), grammar=grammar))

    add("begun", SLOW)
    while not compiler.built:
        time.sleep(0.001)
    shared, revived, dropped = (GRAMMAR.replace("3", str(n)) for n in (4, 5, 6))
    for name, grammar in (("a", shared), ("b", shared), ("c", revived), ("d", dropped)):
        add(name, grammar)
    for name in ("begun", "a", "c", "d"):
        assert requests.abort(name)
    add("e", revived)
    add("f", GRAMMAR)
    compiler.gate.set()
    while len(requests):
        assert all(isinstance(matcher, GrammarMatcher) for _, matcher in requests.ready())
    assert compiler.built == [SLOW, shared, revived, GRAMMAR]
    assert isinstance(compiler.compile(dropped).result(SECONDS), GrammarMatcher)
    assert not caplog.records, "a callback failed"
    compiler.close()


def test_a_queue_that_moves_is_waited_for(unyielding: None) -> None:
    class Steady(Counting):
        def _build(self, grammar: str):
            time.sleep(0.2)
            return super()._build(grammar)

    compiler = Steady(threads=1, timeout=1.5)
    grammars = [f'{{"grammars": [{{"lark_grammar": "start: /[ab]{{{n}}}/"}}]}}' for n in range(1, 13)]
    waiting = [compiler.compile(grammar) for grammar in grammars]
    assert all(isinstance(future.result(SECONDS), GrammarMatcher) for future in waiting)
    compiler.close()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere only whole processes have a priority")
def test_compiles_yield_to_the_engine() -> None:
    class Asking(Counting):
        def _build(self, grammar: str):
            self.priority = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
            return super()._build(grammar)

    compiler, usual = Asking(), os.getpriority(os.PRIO_PROCESS, 0)
    compiler.compile(GRAMMAR).result(SECONDS)
    assert compiler.priority == min(usual + NICENESS, 19) and os.getpriority(os.PRIO_PROCESS, 0) == usual
    compiler.close()


def test_a_tokenizer_that_cannot_be_used_is_each_requests_error() -> None:
    def broken() -> None:
        raise InvalidRequest("no end-of-sequence token", "structured_outputs")

    compiler = Compiler(broken)  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="no end-of-sequence"):
            compiler.compile(GRAMMAR).result(SECONDS)
    compiler.close()


@pytest.mark.parametrize("fast_forward", [True, False])
def test_a_matcher_may_leave_forcing_out(fast_forward: bool) -> None:
    compiler = Counting(fast_forward=fast_forward)
    text = TOY.encode("abab")
    matcher = compiler.compile('{"grammars": [{"lark_grammar": "start: \\"abab\\""}]}').result(SECONDS)
    assert matcher.forced() == (text if fast_forward else [])
    matcher.accept(text)
    assert matcher.forced() == [TOY.eos_ids[0]], "the end comes by itself"
    compiler.close()


def test_nothing_stays_behind() -> None:
    compiler = Counting(timeout=60)
    compiler.compile(GRAMMAR).result(SECONDS)
    compiler.close()
    gone = weakref.ref(compiler)
    del compiler
    deadline = time.monotonic() + 30
    while gone() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
        gc.collect()
    assert gone() is None, "no thread holds on to it until a deadline that does not matter any more"
