"""Grammars to matchers, in threads of their own.

llguidance works without the interpreter's lock, so the engine's steps go on beside a compile, whose thread yields to
them where cores are few. It bounds its own work (`LIMITS`); a compile that takes too long all the same is refused when
its time is over, and its thread left to finish. Threads are many, so that slow grammars do not hold up quick ones.
"""

import logging
import os
import re
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor

from llguidance import LLMatcher, LLParserLimits

from serving.decoding.grammar.explain import explain
from serving.decoding.grammar.matcher import GrammarMatcher
from serving.decoding.grammar.tokens import Vocabulary
from serving.errors import InvalidRequest, Overloaded

log = logging.getLogger(__name__)

# 2 kB a lexer state; 20,000 items are what the first of 5,000 optional properties needs.
LIMITS = LLParserLimits(max_lexer_states=50_000, max_items_in_row=20_000, verbose_errors=False)
STACK_BYTES = 256 << 20  # used as far as needed: llguidance recurses from $ref to $ref and from rule to rule
NICENESS = 10  # of the threads: one tenth of a core that the engine wants
PARAM = "structured_outputs"
# Options of Lark rules with which llguidance cannot go back by a token.
_KEEPS_COUNT = re.compile(r"\b(?:stop|max_tokens)\s*=")
# More than can run, for slow compiles not to hold up quick ones; few enough for each to be done in time.
THREADS = max(4, min(2 * (os.cpu_count() or 1), 16))


class Base(Future[LLMatcher]):
    """What the matchers of equal grammars are copies of."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[Future[GrammarMatcher]] = []  # for it to be begun


class Compiler:
    """Made once for a model; any thread may call it.

    make_vocabulary: called in the pool, before the first compile (it takes tenths of a second). fast_forward: whether
    matchers tell what is forced, beside the end. timeout: in seconds, of a compile and of its wait for a thread.
    """

    def __init__(self, make_vocabulary: Callable[[], Vocabulary], *, fast_forward: bool = True, threads: int = THREADS,
                 timeout: float = 30.0, cache_size: int = 128):
        self._make_vocabulary, self._fast_forward = make_vocabulary, fast_forward
        self._timeout, self._cache_size = timeout, cache_size
        self._vocabulary: Vocabulary | None = None
        self._vocabulary_lock = threading.Lock()
        self._pool = ThreadPoolExecutor(threads, "grammar", initializer=_yield_to_others)
        self._changed = threading.Condition()  # guards what follows
        self._compiled: OrderedDict[str, Base] = OrderedDict()
        self._deadlines: deque[tuple[float, bool, str, Base]] = deque()
        self._watcher: threading.Thread | None = None  # of the deadlines, while there are any
        self._last_done = 0.0  # when a compile ended

    def compile(self, grammar: str) -> Future[GrammarMatcher]:
        """A matcher of its own for each call; of equal grammars the first is compiled, the others are copies. The
        future fails with InvalidRequest for a grammar that is bad, matches nothing or takes too long, with Overloaded
        where no thread was free in time. What is cancelled by all who wait for it is not begun."""
        made: Future[GrammarMatcher] = Future()
        with self._changed:
            known = self._compiled.get(grammar)
            base = known or self._compiled.setdefault(grammar, Base())
            if not base.running() and not base.done():
                base.waiting.append(made)
            self._compiled.move_to_end(grammar)
            while len(self._compiled) > self._cache_size:
                self._compiled.popitem(last=False)
            if known is None:
                base.add_done_callback(self._wake)
                self._watch(grammar, base)
                self._submit(grammar, base)
        base.add_done_callback(lambda done: self._hand_out(grammar, done, made))
        return made

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _hand_out(self, grammar: str, base: Future[LLMatcher], made: Future[GrammarMatcher]) -> None:
        if not made.set_running_or_notify_cancel():  # nobody waits for it any more
            return
        if error := base.exception():
            made.set_exception(error)
            return
        try:
            copy = base.result().deep_copy()
            vocabulary = self._vocabulary
            assert vocabulary is not None
            rolls_back = _KEEPS_COUNT.search(grammar) is None
            made.set_result(GrammarMatcher(copy, vocabulary, fast_forward=self._fast_forward, rolls_back=rolls_back))
        except Exception as error:  # a callback's exception would only be logged, and the request wait for ever
            made.set_exception(error)

    def _submit(self, grammar: str, base: Base) -> None:
        before = threading.stack_size(STACK_BYTES)  # of the threads that the pool starts now
        try:
            self._pool.submit(self._run, grammar, base)
        finally:
            threading.stack_size(before)

    def _run(self, grammar: str, base: Base) -> None:
        with self._changed:
            if base.done():  # its time was over before a thread was free
                return
            if all(made.cancelled() for made in base.waiting):
                self._forget(grammar, base)
                base.cancel()
                return
            base.set_running_or_notify_cancel()
            base.waiting.clear()
            self._watch(grammar, base)
        try:
            result = self._build(grammar)
        except Exception as error:
            _settle(base, error=error)
        else:
            _settle(base, result)
        finally:
            with self._changed:
                self._last_done = time.monotonic()

    def _build(self, grammar: str) -> LLMatcher:
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = self._make_vocabulary()
        matcher = LLMatcher(self._vocabulary.tokenizer, grammar, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # finds what matches nothing, and warms the lexer: copies are as warm
        if matcher.is_error():
            raise InvalidRequest(explain(grammar, matcher.get_error(), LIMITS), PARAM)
        return matcher

    def _watch(self, grammar: str, base: Base) -> None:
        """Its time begins: to wait, or to be compiled."""
        self._deadlines.append((time.monotonic() + self._timeout, base.running(), grammar, base))
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._expire, name="grammar-timeouts", daemon=True)
            self._watcher.start()

    def _forget(self, grammar: str, base: Base) -> None:
        if self._compiled.get(grammar) is base:
            del self._compiled[grammar]

    def _wake(self, _: Future[LLMatcher]) -> None:
        with self._changed:
            self._changed.notify()

    def _expire(self) -> None:
        with self._changed:
            while self._deadlines:
                deadline, began, grammar, base = self._deadlines[0]
                left, over = deadline - time.monotonic(), base.done() or base.running() != began
                if not over and left > 0:
                    self._changed.wait(left)
                    continue
                self._deadlines.popleft()
                if not over:
                    self._give_up(grammar, base)
            self._watcher = None

    def _give_up(self, grammar: str, base: Base) -> None:
        waits = not base.running()
        if waits and self._last_done > time.monotonic() - self._timeout:
            self._watch(grammar, base)  # its turn will come
            return
        self._forget(grammar, base)  # another try may be luckier
        if waits:
            _settle(base, error=Overloaded(f"no other grammar was compiled within {self._timeout:g} seconds, and no "
                                           "thread was free for this one"))  # fmt: skip
            return
        log.warning("a grammar of %d characters was not compiled in %g s", len(grammar), self._timeout)
        _settle(base, error=InvalidRequest(
            f"the grammar was not compiled within {self._timeout:g} seconds, make it smaller", PARAM))  # fmt: skip


def _yield_to_others() -> None:
    if sys.platform == "linux":  # where threads have priorities of their own
        os.nice(NICENESS)


def _settle(future: Future[LLMatcher], result: LLMatcher | None = None, error: Exception | None = None) -> None:
    """The first of the compile's end and its timeout counts."""
    try:
        if error is not None:
            future.set_exception(error)
        elif result is not None:
            future.set_result(result)
    except InvalidStateError:
        pass
