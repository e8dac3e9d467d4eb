"""The hosts of one service, seen from one of them: what they agree on while starting, and how they end together.

Once one host is gone the rest cannot go on: a collective would wait for it for ever, in a runtime that no exception can
interrupt. So the thread that notices sets `over`, which every wait here looks at, and ends this process by itself if
the main thread has not done so after GRACE_SECONDS.
"""

import os
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, TypeVar

from serving.config import HostPlan
from serving.errors import ConfigError, EngineDead, PageloomError

GRACE_SECONDS = 2.0
T = TypeVar("T")


class Hosts(ABC):
    """`plan.rank` is this host's. `over` is done when another host is gone, with the line that says so."""

    def __init__(self, plan: HostPlan):
        self.plan = plan
        self.over: Future[str] = Future()
        self._lock = threading.Lock()
        self._leaving = False

    # Agreeing, in the same order on all hosts. All raise ConfigError or EngineDead.

    @abstractmethod
    def agree(self, name: str, mine: Any, choose: Callable[[Sequence[Any]], Any]) -> Any:
        """What host 0 chooses from the values of all, by rank."""

    def as_leader(self, name: str, mine: Any) -> Any:
        return self.agree(name, mine, lambda values: values[0])

    def least(self, name: str, mine: int) -> int:
        return self.agree(name, mine, min)

    def check_same(self, what: str, mine: Mapping[str, str]) -> None:
        """Raises on all hosts, naming the field, if they differ."""

        def same(values: Sequence[Mapping[str, str]]) -> bool:
            for rank, other in enumerate(values):
                if difference := describe_difference(values[0], other):
                    raise ConfigError(f"{self.plan.name(rank)} differs from host 0 in {difference}")
            return True

        self.agree(what, dict(mine), same)

    @abstractmethod
    def fail(self, error: Exception) -> None:
        """Tells the others why this host cannot go on. The caller ends this process."""

    # Ending

    def wait(self, work: Future[T]) -> T:
        """The result of `work`. Raises EngineDead if another host is gone first, or is why `work` fails."""
        either: set[Future[Any]] = {work, self.over}
        wait(either, return_when=FIRST_COMPLETED)
        if work.done():
            error = work.exception()
            if error is None:
                return work.result()
            if not self.is_over(within=GRACE_SECONDS):  # a collective may notice before the connection does
                raise error
        raise EngineDead(self.over.result())

    def is_over(self, within: float) -> bool:
        """Waits for it, `within` seconds."""
        return bool(wait((self.over,), timeout=within).done)

    def check(self) -> None:
        """Raises EngineDead if another host is gone."""
        if self.over.done():
            raise EngineDead(self.over.result())

    def end(self, message: str) -> None:
        """Called by the thread that notices; further calls say nothing new."""
        with self._lock:
            if self._leaving or self.over.done():
                return
            self.over.set_result(message)
        timer = threading.Timer(GRACE_SECONDS, self._exit, args=(message,))
        timer.daemon = True
        timer.start()
        self._tell(message)  # may wait for a host that does not read

    @abstractmethod
    def _tell(self, message: str) -> None:
        """Lets other hosts know why, and wakes whoever waits here."""

    def _exit(self, message: str) -> None:
        with self._lock:
            if self._leaving:
                return
        print(f"pageloom: {message}", file=sys.stderr, flush=True)
        os._exit(1)

    def leave(self) -> None:
        """From now on, what other hosts do is no matter."""
        with self._lock:
            self._leaving = True


class Alone(Hosts):
    """The only host."""

    def __init__(self) -> None:
        super().__init__(HostPlan(count=1, rank=0, addresses=("",)))

    def agree(self, name: str, mine: Any, choose: Callable[[Sequence[Any]], Any]) -> Any:
        return choose([mine])

    def fail(self, error: Exception) -> None:
        pass

    def _tell(self, message: str) -> None:
        pass


def describe_error(error: Exception) -> str:
    """As one line; what is not meant for users says what it is."""
    return str(error) if isinstance(error, PageloomError) else repr(error).partition("\n")[0]


def describe_difference(first: Mapping[str, str], second: Mapping[str, str]) -> str:
    """The first field in which they differ, and both values; empty if they are the same."""
    for name in dict.fromkeys((*first, *second)):
        ours, theirs = first.get(name, "nothing"), second.get(name, "nothing")
        if ours != theirs:
            return f"{name}: {theirs} there, {ours} on host 0"
    return ""

