"""A step's outputs, from the devices to the host."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np

from model.sampling import TokenLogprobs
from serving.engine.plan import Draft, StepPlan, StepResult
from serving.request import ExpertStats, Logprobs
from serving.runner.shapes import StepShape
from serving.runner.step import StepOutputs


@dataclass(frozen=True)
class InFlight:
    plan: StepPlan
    shape: StepShape
    outputs: StepOutputs

    @property
    def places(self) -> list[int]:
        """Of each row of the plan, in the outputs of rows."""
        per_group, groups = self.shape.num_rows, enumerate(self.plan.groups)
        return [index * per_group + row for index, group in groups for row in range(len(group.rows))]


def read_result(handle: InFlight, news: Callable[[], ExpertStats | None] | None) -> StepResult:
    """Waits for the step. news: of its experts, asked once it is done."""
    plan, outputs, places = handle.plan, handle.outputs, handle.places
    started = time.perf_counter()
    outputs.sampled.block_until_ready()
    ready = time.perf_counter()
    sampled = np.asarray(outputs.sampled)[places].tolist()
    token_ids = [tokens[: accepted + 1] if row.samples else []
                 for row, (accepted, _, *tokens) in zip(plan.rows, sampled, strict=True)]  # fmt: skip
    return StepResult(
        token_ids=token_ids, logprobs=_sampled_logprobs(handle, token_ids), target_logprobs=_target_logprobs(handle),
        num_kept=[kept for _, kept, *_ in sampled], drafts=_drafts(handle),
        device_seconds=ready - started, fetch_seconds=time.perf_counter() - ready,
        experts=None if news is None else news(),
    )  # fmt: skip


def _sampled_logprobs(handle: InFlight, token_ids: list[list[int]]) -> list[list[Logprobs] | None]:
    """For each row that asked, one entry for each of its tokens."""
    rows = handle.plan.rows
    wanted = [row.sampling.logprobs if row.samples else None for row in rows]
    if all(count is None for count in wanted):
        return [None] * len(rows)
    host = jax.device_get(handle.outputs.logprobs)
    result: list[list[Logprobs] | None] = []
    for count, place, tokens in zip(wanted, handle.places, token_ids, strict=True):
        if count is None:
            result.append(None)
        else:
            of_row = TokenLogprobs(*(x[place] for x in host))
            result.append([_logprobs(of_row, i, token, count) for i, token in enumerate(tokens)])
    return result


def _logprobs(host: TokenLogprobs, index: int, token_id: int, count: int) -> Logprobs:
    return Logprobs(
        token_id, float(host.logprob[index]), int(host.rank[index]),
        host.top_ids[index, :count].tolist(), host.top_logprobs[index, :count].tolist(),
    )  # fmt: skip


def _target_logprobs(handle: InFlight) -> list[list[Logprobs] | None]:
    """For each row that has targets, one entry for each."""
    if all(row.targets is None for row in handle.plan.rows):
        return [None] * len(handle.plan.rows)
    host = jax.device_get(handle.outputs.target_logprobs)
    result: list[list[Logprobs] | None] = []
    for index, group in enumerate(handle.plan.groups):
        at = index * handle.shape.num_tokens
        for row in group.rows:
            if row.targets is None:
                result.append(None)
            else:
                count = max(row.sampling.prompt_logprobs or 0, row.sampling.logprobs or 0)
                result.append([_logprobs(host, at + i, int(t), count) for i, t in enumerate(row.targets)])
            at += row.num_tokens
    return result


def _drafts(handle: InFlight) -> list[Draft | None]:
    """What the device proposes to each row that has sampled."""
    if handle.outputs.drafts is None:
        return [None] * len(handle.plan.rows)
    tokens, parents, _ = jax.device_get(handle.outputs.drafts)
    return [Draft(tokens[place], None if parents is None else parents[place]) if row.samples else None
            for row, place in zip(handle.plan.rows, handle.places, strict=True)]  # fmt: skip
