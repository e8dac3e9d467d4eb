"""The runner of host 0: sends each packed step to the followers, then runs it like them.

Everything that may wait for a device runs in a thread of its own, for a device waits for ever once another host is
gone; the caller gets EngineDead then.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from serving.distributed.leading import LeaderHosts
from serving.distributed.steps import to_message
from serving.engine.plan import StepPlan, StepResult
from serving.runner.runner import ModelRunner

T = TypeVar("T")


class LeadingRunner:
    """See `serving.engine.plan.Runner`, which this implements."""

    def __init__(self, inner: ModelRunner, hosts: LeaderHosts):
        self._inner, self._hosts = inner, hosts
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="leading-runner")
        self.num_groups, self.page_size, self.num_pages = inner.num_groups, inner.page_size, inner.num_pages
        self.max_num_seqs, self.max_num_batched_tokens = inner.max_num_seqs, inner.max_num_batched_tokens
        self.max_model_len, self.vocab_size = inner.max_model_len, inner.vocab_size
        self.drafts_on_device, self.decode_seconds = inner.drafts_on_device, inner.decode_seconds

    def dispatch(self, plan: StepPlan) -> Any:
        return self._do(self._dispatch, plan)

    def fetch(self, handle: Any) -> StepResult:
        return self._do(self._inner.fetch, handle)

    def stats(self) -> dict[str, float]:
        return self._inner.stats()

    def close(self, reason: str = "") -> None:
        self._hosts.goodbye(reason)

    def _dispatch(self, plan: StepPlan) -> Any:
        step = self._inner.pack(plan)
        self._hosts.send(to_message(step))
        return self._inner.start(plan, step)

    def _do(self, work: Callable[..., T], *args: Any) -> T:
        self._hosts.check()
        return self._hosts.wait(self._thread.submit(work, *args))
