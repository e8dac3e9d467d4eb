"""Requests whose grammar is being compiled, elsewhere: the engine goes on meanwhile."""

from collections.abc import Callable
from concurrent.futures import Future

from serving.decoding.matcher import Matcher
from serving.errors import InvalidRequest, PageloomError
from serving.request import EngineRequest

POLL_SECONDS = 0.002  # of an engine that has nothing else to do

Compile = Callable[[str], Future]  # a grammar to its Matcher, InvalidRequest or Overloaded; may be cancelled


class Compiling:
    def __init__(self, compile_grammar: Compile | None):
        self._compile = compile_grammar
        self._requests: dict[str, tuple[EngineRequest, Future]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: EngineRequest) -> None:
        """Its id is that of no live request."""
        if self._compile is None:
            raise InvalidRequest("this engine compiles no grammars", "structured_outputs")
        self._requests[request.request_id] = request, self._compile(request.grammar)

    def ready(self) -> list[tuple[EngineRequest, Matcher | PageloomError]]:
        """Those that are compiled by now, in the order they came, each with what came of it."""
        done = [(request, future) for request, future in self._requests.values() if future.done()]
        for request, _ in done:
            del self._requests[request.request_id]
        return [(request, _outcome(request, future)) for request, future in done]

    def abort(self, request_id: str) -> bool:
        """Whether it was here. What nobody waits for any more need not be compiled."""
        request, future = self._requests.pop(request_id, (None, Future()))
        future.cancel()
        return request is not None

    def abort_all(self) -> list[str]:
        return [request_id for request_id in list(self._requests) if self.abort(request_id)]


def _outcome(request: EngineRequest, future: Future) -> Matcher | PageloomError:
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, PageloomError) and not isinstance(error, InvalidRequest):
        return error
    what = str(error) if isinstance(error, InvalidRequest) else f"the grammar failed: {error!r}"
    return InvalidRequest(what, request.grammar_source or "structured_outputs")
