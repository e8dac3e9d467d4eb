"""What the scheduler costs a step, without a device: python -m scripts.bench_scheduler --rows 256 --groups 1 8

`schedule` and `update` together, CPU time of the median step, at three workloads for each number of data groups:
- decoding: `rows` sequences in all, nothing else to do;
- full server: every step ends some sequences and admits others, whose prompts begin with one of 16 prefixes;
- conversations: short answers to 400 long prompts that come again and again, each with a new end.
"""

import argparse
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from random import Random

from serving.engine.plan import StepResult
from serving.engine.scheduler import Scheduler
from serving.engine.scheduler_config import SchedulerConfig
from serving.engine.step import Step
from serving.request import EngineRequest, SamplingParams

PAGE_SIZE, MAX_LEN, BUDGET = 16, 4096, 4096


@dataclass(frozen=True)
class Workload:
    num_prefixes: int
    prefix_len: int
    tail_len: int
    max_tokens: tuple[int, int]  # drawn from this range
    num_waiting: int | None = None  # the queue is kept at this length; None: one request for each row, then no more

    def requests(self, rng: Random) -> Iterator[EngineRequest]:
        prefixes = [_tokens(rng, self.prefix_len) for _ in range(self.num_prefixes)]
        for index in count():
            sampling = SamplingParams(max_tokens=rng.randrange(*self.max_tokens), ignore_eos=True)
            prompt = rng.choice(prefixes) + _tokens(rng, self.tail_len)
            yield EngineRequest(request_id=str(index), prompt_token_ids=prompt, sampling=sampling)


WORKLOADS = {
    "decoding": Workload(16, 1024, 32, (1900, 1901)),
    "full server": Workload(16, 1024, 32, (50, 150), num_waiting=512),
    "conversations": Workload(400, 3000, 200, (8, 9), num_waiting=256),
}


def _tokens(rng: Random, length: int) -> list[int]:
    return rng.choices(range(1000), k=length)


def make_scheduler(rows: int, num_groups: int) -> Scheduler:
    """Slots for `rows` sequences and pages for 600 of full length, over all groups."""
    num_seqs = -(-rows // num_groups)
    return Scheduler(SchedulerConfig(
        num_groups=num_groups, max_num_seqs=num_seqs, max_num_batched_tokens=max(BUDGET // num_groups, num_seqs),
        max_model_len=MAX_LEN, num_pages=1 + 600 * MAX_LEN // PAGE_SIZE // num_groups, page_size=PAGE_SIZE,
        eos_token_ids=(),
    ))  # fmt: skip


def step_seconds(scheduler: Scheduler, workload: Workload, rows: int, num_steps: int) -> list[float]:
    """Drives it as the core does, one step ahead of the results."""
    source = workload.requests(Random(0))
    if workload.num_waiting is None:
        for _ in range(rows):
            scheduler.add(next(source))
    times: list[float] = []
    in_flight: deque[Step] = deque()
    for _ in range(num_steps):
        for _ in range((workload.num_waiting or 0) - scheduler.snapshot().num_waiting):
            scheduler.add(next(source))
        began = time.thread_time()
        step = scheduler.schedule()
        if step is not None:
            in_flight.append(step)
        if len(in_flight) > 1 or step is None:
            done = in_flight.popleft()
            scheduler.update(done, result_of(len(done.plan.rows)))
        times.append(time.thread_time() - began)
    return times


def result_of(num_rows: int) -> StepResult:
    return StepResult(token_ids=[[7]] * num_rows, logprobs=[None] * num_rows, target_logprobs=[None] * num_rows,
                      num_kept=[0] * num_rows, drafts=[None] * num_rows)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256, help="sequences that run at once, over all groups")
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 8], help="numbers of data groups")
    args = parser.parse_args()
    for name, workload in WORKLOADS.items():
        for num_groups in args.groups:
            scheduler = make_scheduler(args.rows, num_groups)
            times = sorted(step_seconds(scheduler, workload, args.rows, 1500)[-700:])
            stats = scheduler.snapshot()
            cached = stats.prompt_tokens_cached / stats.prompt_tokens
            print(f"{name}, groups: {num_groups}: median {times[350] * 1e3:.2f} ms, 99% {times[693] * 1e3:.2f} ms; "
                  f"{stats.num_running} running, {cached:.1%} of prompt tokens cached")  # fmt: skip


if __name__ == "__main__":
    main()
