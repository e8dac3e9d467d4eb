"""The engine core: one thread that keeps the device busy.

    drain commands -> schedule step n+1 -> dispatch it -> fetch step n -> update -> one message to each front end

Step n+1 is dispatched before the results of step n are read, so that the device never waits for the host; where many
sequences need those results to go on, they are read first. Without work the core blocks on its inbox. An error of the
runner is final: what the device holds is unknown afterwards. All requests end with finish_reason "error", and `run`
raises.
"""

import math
import time
from typing import Protocol

import msgspec

from serving.decoding.matcher import Matcher
from serving.engine.compiling import POLL_SECONDS, Compile, Compiling
from serving.engine.messages import (
    Abort,
    Add,
    CacheFlushed,
    Command,
    FlushCache,
    Goodbye,
    Hello,
    Ready,
    Refused,
    Reply,
    Shutdown,
)
from serving.engine.plan import Runner, StepResult
from serving.engine.scheduler import Scheduler
from serving.engine.step import Step
from serving.errors import EngineDead, InvalidRequest, PageloomError
from serving.request import EngineInfo, EngineRequest, EngineStats, FinishReason, StepOutput, TokenEvent

PAUSE_SECONDS = 0.01  # without work, after which the next step's time counts from its dispatch

ClientId = bytes


class Port(Protocol):
    """The core's end of the line to its front ends."""

    def receive(self, timeout: float) -> list[tuple[ClientId, Command]]:
        """All commands that have arrived. If none has, waits for one, at most `timeout` seconds (may be infinite)."""
        ...

    def send(self, client: ClientId, reply: Reply) -> bool:
        """Never blocks. False: the client is gone."""
        ...


class EngineCore:
    def __init__(
        self, runner: Runner, scheduler: Scheduler, info: EngineInfo, port: Port, *,
        compile_grammar: Compile | None = None, check_integrity: bool = False,
    ):  # fmt: skip
        self._runner = runner
        self._scheduler = scheduler
        self._info = info
        self._port = port
        self._check_integrity = check_integrity
        self._compiling = Compiling(compile_grammar)
        self._last_result = 0.0  # when the last step's result came, or the device was given work after a pause
        self._owners: dict[str, ClientId] = {}  # of live requests
        self._clients: set[ClientId] = set()
        self._in_flight: tuple[Step, object] | None = None
        self._stop_at: float | None = None  # set: no more requests are accepted, and live ones end by then

    def run(self) -> None:
        """Serves until `Shutdown`. Raises whatever the runner raised."""
        try:
            while not self._is_over():
                self._serve_commands()
                self._step()
        except Exception as error:  # of any kind: the requests must hear of it, and it goes on up
            why = str(error) if isinstance(error, PageloomError) else f"the engine failed: {error!r}"
            self._publish([*self._scheduler.abort_all("error", why), *self._drop_compiling("error", why)])
            raise

    def _is_over(self) -> bool:
        if self._stop_at is None:
            return False
        if time.monotonic() >= self._stop_at:
            self._publish([*self._scheduler.abort_all("abort"), *self._drop_compiling("abort")])
        return not self._scheduler.has_work and not self._compiling

    def _step(self) -> None:
        if self._in_flight is not None and self._scheduler.waits_for_result:
            before, self._in_flight = self._in_flight, None
            self._finish(before[0], self._runner.fetch(before[1]))
        began = time.perf_counter()
        step = self._scheduler.schedule()
        self._add_seconds("schedule", time.perf_counter() - began)
        before, self._in_flight = self._in_flight, None
        if step is not None:
            if before is None and began - self._last_result > PAUSE_SECONDS:
                self._last_result = began
            self._in_flight = step, self._runner.dispatch(step.plan)
        elif before is None and self._scheduler.has_work:
            raise RuntimeError("requests are live, but none can run and none is running")
        if before is not None:
            self._finish(before[0], self._runner.fetch(before[1]))
        if self._check_integrity:
            self._scheduler.check_integrity()

    def _finish(self, step: Step, result: StepResult) -> None:
        began = time.perf_counter()
        # Tokens of a tree that are accepted out of place are fed again: a decoding row may have some more.
        if all(row.num_tokens - row.num_drafts <= 1 + step.plan.draft_length for row in step.plan.rows):
            self._scheduler.speculation.observe_step(step.plan, began - self._last_result)
        self._last_result = began
        events = self._scheduler.update(step, result)
        self._count(step, result)
        self._publish(events)
        self._add_seconds("schedule", time.perf_counter() - began)  # the next message tells it

    def _count(self, step: Step, result: StepResult) -> None:
        stats, runner = self._scheduler.stats, self._runner.stats()
        stats.steps += 1
        stats.iteration_tokens = step.plan.num_tokens
        stats.batch_tokens += stats.iteration_tokens
        stats.batch_padding = int(runner["padding_tokens"])
        stats.compile_misses = int(runner["compile_misses"])
        stats.experts = result.experts or stats.experts
        stats.step_seconds["pack"] = runner["pack_seconds"]
        stats.step_seconds["dispatch"] = runner["dispatch_seconds"]
        self._add_seconds("device", result.device_seconds)
        self._add_seconds("fetch", result.fetch_seconds)

    def _add_seconds(self, part: str, seconds: float) -> None:
        self._scheduler.stats.step_seconds[part] = self._scheduler.stats.step_seconds.get(part, 0.0) + seconds

    def _publish(self, events: list[TokenEvent]) -> None:
        """Sends each front end its events. All get the newest books, and one that is gone is noticed."""
        by_client: dict[ClientId, list[TokenEvent]] = {client: [] for client in self._clients}
        for event in events:
            owner = self._owners.get(event.request_id)
            if event.finish_reason is not None:
                self._owners.pop(event.request_id, None)
            if owner in by_client:
                by_client[owner].append(event)
        stats = self._stats()
        for client, its_events in by_client.items():
            if not self._port.send(client, StepOutput(events=its_events, stats=stats)):
                self._detach(client)

    def _stats(self) -> EngineStats:
        """A copy, for the scheduler keeps writing in its own."""
        stats = self._scheduler.snapshot()
        num_waiting = stats.num_waiting + len(self._compiling)
        return msgspec.structs.replace(stats, num_waiting=num_waiting, step_seconds=dict(stats.step_seconds))

    def _serve_commands(self) -> None:
        idle, before = self._in_flight is None and not self._scheduler.has_work, len(self._compiling)
        timeout = math.inf if idle and self._stop_at is None else 0.0
        if idle and self._compiling:
            timeout = POLL_SECONDS
        for client, command in self._port.receive(timeout):
            self._serve(client, command)
        for request, outcome in self._compiling.ready() if self._compiling else ():
            if isinstance(outcome, PageloomError):
                self._refuse(request.request_id, outcome)
            else:
                self._add(request, outcome)
        if idle and len(self._compiling) != before:  # no step will tell it
            self._publish([])

    def _add(self, request: EngineRequest, matcher: Matcher | None = None) -> None:
        try:
            self._scheduler.add(request, matcher)
        except PageloomError as error:
            self._refuse(request.request_id, error)

    def _refuse(self, request_id: str, error: PageloomError) -> None:
        owner = self._owners.pop(request_id, None)
        if owner is not None:
            self._port.send(owner, Refused.of(request_id, error))

    def _drop_compiling(self, reason: FinishReason, error: str = "") -> list[TokenEvent]:
        return [TokenEvent(request_id=request_id, finish_reason=reason, error=error)
                for request_id in self._compiling.abort_all()]  # fmt: skip

    def _serve(self, client: ClientId, command: Command) -> None:
        match command:
            case Hello():
                self._clients.add(client)
                self._port.send(client, Ready(self._info))
            case Add(request):
                try:
                    if self._stop_at is not None:
                        raise EngineDead("the engine is shutting down")
                    if request.request_id in self._owners:
                        raise InvalidRequest(f"a request with id {request.request_id!r} is already live", "request_id")
                    self._scheduler.check_room(len(self._compiling))
                    if request.grammar:
                        self._compiling.add(request)
                    else:
                        self._scheduler.add(request)
                    self._owners[request.request_id] = client
                except PageloomError as error:
                    self._port.send(client, Refused.of(request.request_id, error))
            case Abort(request_id):
                if self._owners.get(request_id) == client:
                    self._abort([request_id])
            case FlushCache():
                self._port.send(client, CacheFlushed(self._scheduler.flush()))
            case Goodbye():
                self._detach(client)
            case Shutdown(grace_seconds):
                self._stop_at = time.monotonic() + grace_seconds

    def _abort(self, request_ids: list[str]) -> None:
        events = [
            TokenEvent(request_id=request_id, finish_reason="abort") if self._compiling.abort(request_id)
            else self._scheduler.abort(request_id)
            for request_id in request_ids
        ]  # fmt: skip
        self._publish([event for event in events if event is not None])

    def _detach(self, client: ClientId) -> None:
        self._clients.discard(client)
        self._abort([request_id for request_id, owner in self._owners.items() if owner == client])
