"""In which order sequences run. A policy ranks: lower ranks are admitted first and preempted last."""

from typing import Protocol

from serving.engine.sequence import Sequence


class Policy(Protocol):
    def rank(self, seq: Sequence) -> tuple[int, ...]:
        """Unique among live sequences, and fixed while one lives."""
        ...


class FirstComeFirstServed:
    def rank(self, seq: Sequence) -> tuple[int, ...]:
        return (seq.arrival,)


class Priority:
    """By the request's priority, then by arrival."""

    def rank(self, seq: Sequence) -> tuple[int, ...]:
        return (seq.request.priority, seq.arrival)


POLICIES: dict[str, type[Policy]] = {"fcfs": FirstComeFirstServed, "priority": Priority}
