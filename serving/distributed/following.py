"""A follower's side: finds host 0, says who it is, and takes what comes."""

import queue
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from serving.config import HostPlan
from serving.distributed.connection import LOST_AFTER_SECONDS, Connection, Gone
from serving.distributed.hosts import Hosts, describe_error
from serving.distributed.messages import (
    Agreed,
    Failed,
    FromLeader,
    Goodbye,
    Hello,
    Mine,
    Refused,
    Step,
    Welcome,
)
from serving.errors import ConfigError, EngineDead

RETRY_SECONDS = 0.3
REPORT_SECONDS = 60.0


class FollowerHosts(Hosts):
    """Made by `join_leader`."""

    def __init__(self, plan: HostPlan, connection: Connection):
        super().__init__(plan)
        self._connection = connection
        self._inbox: queue.SimpleQueue[Agreed | Step | Refused | Goodbye] = queue.SimpleQueue()
        connection.start(self._receive, self._gone)

    def agree(self, name: str, mine: Any, choose: Callable[[Sequence[Any]], Any]) -> Any:
        try:
            self._connection.send(Mine(name, mine))
        except Gone:
            pass  # what comes next says more
        message = self._next()
        assert isinstance(message, Agreed) and message.name == name, f"{message} came, not an answer to {name}"
        return message.value

    def fail(self, error: Exception) -> None:
        self.leave()
        try:
            self._connection.send(Failed(self.plan.rank, describe_error(error)))
        except Gone:
            pass
        self._connection.close()

    def next_step(self) -> Step | None:
        """None: the service ends as it should, and so does this host. Raises EngineDead if it ends otherwise."""
        message = self._next()
        if isinstance(message, Goodbye):
            self.leave()
            self._connection.close()
            return None
        assert isinstance(message, Step), f"{type(message).__name__} came, not a step"
        return message

    def _next(self) -> Agreed | Step | Goodbye:
        message = self._inbox.get()
        if isinstance(message, Refused):
            raise ConfigError(message.message)
        if isinstance(message, Goodbye) and message.message:
            raise EngineDead(message.message)
        return message

    def _tell(self, message: str) -> None:
        self._inbox.put(Goodbye(message))

    def _receive(self, message: Any) -> None:
        self._inbox.put(message)
        if isinstance(message, Goodbye | Refused) and message.message:
            self.end(message.message)  # the main thread may be where it sees no message any more

    def _gone(self, why: str) -> None:
        self.end(f"{self.plan.name(0)} is gone ({why}); this host ends too")


def join_leader(plan: HostPlan, fingerprint: Mapping[str, str]) -> FollowerHosts:
    """Raises ConfigError if host 0 does not answer within the plan's timeout, or refuses this host; EngineDead if it is
    gone before all hosts are there."""
    end = time.monotonic() + plan.timeout_seconds
    connection = _connect(plan, end)
    try:
        connection.send(Hello(plan.rank, dict(fingerprint)))
        answer = connection.receive(end + LOST_AFTER_SECONDS - time.monotonic())
    except Gone as error:
        connection.close()
        raise EngineDead(f"{plan.name(0)} is gone before the service has started: {error}") from error
    if isinstance(answer, Refused):
        connection.close()
        raise ConfigError(answer.message)
    assert isinstance(answer, Welcome)
    return FollowerHosts(plan, connection)


def report_failure(plan: HostPlan, message: str) -> None:
    """Instead of joining: host 0 need not wait for a host that cannot start. Returns once it knows, or is not there
    after REPORT_SECONDS."""
    try:
        connection = _connect(plan, time.monotonic() + min(plan.timeout_seconds, REPORT_SECONDS))
    except ConfigError:
        return
    try:
        connection.send(Failed(plan.rank, message))
        connection.receive(LOST_AFTER_SECONDS)  # a refusal
    except Gone:
        pass
    connection.close()


def _connect(plan: HostPlan, end: float) -> Connection:
    reason = ""
    while (left := end - time.monotonic()) > 0:
        try:
            return Connection(socket.create_connection((plan.leader, plan.channel_port), min(left, 10)), FromLeader)
        except OSError as error:  # not there yet, or its name is not known yet
            reason = error.strerror or str(error)
            time.sleep(min(RETRY_SECONDS, max(left, 0)))
    raise ConfigError(f"{plan.name(0)} did not answer on port {plan.channel_port} within {plan.timeout_seconds:g} s "
                      f"(--distributed-timeout-seconds): {reason}")
