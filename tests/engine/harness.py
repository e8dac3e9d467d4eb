"""Drives a scheduler as the core does, against the fake runner, and checks after every call what must always hold."""

from dataclasses import dataclass, field, replace
from random import Random

from serving.config import EngineConfig
from serving.engine.group import Group
from serving.engine.scheduler import Scheduler
from serving.engine.scheduler_config import SchedulerConfig
from serving.engine.speculating import SpeculationParts
from serving.engine.step import Step
from serving.request import EngineRequest, SamplingParams, TokenEvent
from tests.engine.fake_grammar import FakeMatcher
from tests.engine.fake_runner import EOS, VOCAB, FakeRunner, Language, expected_outputs


@dataclass
class Live:
    request: EngineRequest
    outputs: list[int] = field(default_factory=list)
    events: int = 0


class Harness:
    """`overlap` False: every step is fetched before the next is planned. speculation: instead of the config's."""

    def __init__(self, runner: FakeRunner | None = None, *, overlap: bool = True,
                 speculation: SpeculationParts | None = None, **config):  # fmt: skip
        self.runner = runner or FakeRunner()
        limits = SchedulerConfig.of(self.runner, EOS, EngineConfig(**config))
        if speculation is not None:
            limits = replace(limits, speculation=speculation)
        self.scheduler = Scheduler(limits, clock=lambda: 7.0)
        self._available: dict[Group, int] = {}  # pages when the step was planned, before duplicates were freed
        for group in self.scheduler.groups:
            self._watch(group)
        self.overlap = overlap
        self.live: dict[str, Live] = {}
        self.finished: dict[str, TokenEvent] = {}
        self.outputs: dict[str, list[int]] = {}
        self.first_events: dict[str, TokenEvent] = {}
        self.drafts = self.accepted = 0  # as events told
        self.plans: list[Step] = []
        self._in_flight: tuple[Step, object] | None = None

    def add(self, request: EngineRequest, language: Language | None = None, fast_forward: bool = True) -> None:
        self.scheduler.check_room()
        self.scheduler.add(request, None if language is None else FakeMatcher(language, fast_forward))
        self.runner.register(request, language)
        self.live[request.request_id] = Live(request)
        self.scheduler.check_integrity()

    def abort(self, request_id: str) -> None:
        event = self.scheduler.abort(request_id)
        assert event is not None and event.finish_reason == "abort" and not event.new_token_ids
        self._take(event)
        self.scheduler.check_integrity()

    @property
    def busy(self) -> bool:
        return self.scheduler.has_work or self._in_flight is not None

    def step(self) -> Step | None:
        """One turn of the core's loop."""
        if not self.overlap or self.scheduler.waits_for_result:
            self._fetch()
        step = self._schedule()
        handle = self.runner.dispatch(step.plan) if step is not None else None
        assert step is not None or self._in_flight is not None or not self.scheduler.has_work, "stuck"
        self._fetch()
        if step is not None:
            self.plans.append(step)
            self._in_flight = step, handle
        return step

    def run(self, limit: int = 10_000) -> None:
        """Until everything has ended; then nothing may be held."""
        for _ in range(limit):
            if not self.busy:
                break
            self.step()
        assert not self.busy, f"not done after {limit} steps"
        assert not self.live
        stats = self.scheduler.stats
        assert (self.drafts, self.accepted) == (stats.draft_tokens, stats.accepted_tokens)
        assert all(group.kv.num_held == 0 for group in self.scheduler.groups)
        if not self.scheduler.config.enable_prefix_caching:
            assert all(group.kv.tree.num_pages == 0 for group in self.scheduler.groups), "pages stayed behind"
        assert self.scheduler.flush()
        assert all(group.kv.pool.num_free == group.kv.pool.num_usable for group in self.scheduler.groups)
        self.scheduler.check_integrity()

    def _watch(self, group: Group) -> None:
        publish = group.publish_prefilled

        def watched() -> None:
            self._available[group] = group.kv.num_available
            publish()

        group.publish_prefilled = watched

    def _schedule(self) -> Step | None:
        ready = {
            group: [
                seq
                for seq in group.running
                if seq.total - seq.num_computed == 1
                and seq.num_computed < seq.end
                and not (seq.num_pending and seq.needs_newest)
            ]
            for group in self.scheduler.groups
        }
        step = self.scheduler.schedule()
        if self.scheduler.speculation.is_on:
            ready = {group: [seq for seq in seqs if not seq.num_pending] for group, seqs in ready.items()}
        self.scheduler.check_integrity()
        planned = set(step.sequences) if step else set()
        for group, seqs in ready.items():
            skipped = [seq for seq in seqs if seq not in planned and seq.slot >= 0]
            if skipped:  # only the last in rank, and only for want of a page
                assert skipped == [group.running[-1]] and not self._available[group]
        threshold = self.scheduler.config.long_prefill_token_threshold
        if step is not None and threshold:
            prefills = [
                row for seq, row in zip(step.sequences, step.plan.rows, strict=True) if row.start < seq.prefill_end
            ]
            assert all(row.num_tokens - row.num_drafts <= threshold for row in prefills)
        return step

    def _fetch(self) -> None:
        if self._in_flight is not None:
            step, handle = self._in_flight
            self._in_flight = None
            for event in self.scheduler.update(step, self.runner.fetch(handle)):
                self._take(event)
            self.scheduler.check_integrity()

    def _take(self, event: TokenEvent) -> None:
        live = self.live[event.request_id]
        request, language = live.request, self.runner.languages.get(event.request_id)
        if event.logprobs is not None:
            self._check_logprobs(live, event)
        live.events += 1
        self.drafts, self.accepted = self.drafts + event.draft_tokens, self.accepted + event.accepted_tokens
        live.outputs += event.new_token_ids
        if live.events == 1:
            self.first_events[event.request_id] = event
        if live.events == 1 and event.finish_reason != "abort":
            self._check_prompt_logprobs(request, event)
        else:
            assert event.prompt_logprobs is None
        assert (event.logprobs is not None) == (request.sampling.logprobs is not None and bool(event.new_token_ids))
        if event.finish_reason is None:
            return
        outputs, reason, stop_token = expected_outputs(request, self.runner.max_model_len, language)
        if event.finish_reason == "abort":
            assert live.outputs == outputs[: len(live.outputs)]
        else:
            assert live.outputs == outputs
            assert (event.finish_reason, event.stop_token_id) == (reason, stop_token)
        self.finished[event.request_id], self.outputs[event.request_id] = event, live.outputs
        del self.live[event.request_id]

    def _check_logprobs(self, live: Live, event: TokenEvent) -> None:
        """The runner's are -1 of a sampled token, -position of one that a grammar forced."""
        assert event.logprobs is not None and [entry.token_id for entry in event.logprobs] == event.new_token_ids
        may_force, first = event.request_id in self.runner.languages, len(live.request.prompt_token_ids)
        for i, entry in enumerate(event.logprobs, first + len(live.outputs)):
            assert entry.logprob == -1 or (may_force and entry.logprob == -i)

    def _check_prompt_logprobs(self, request: EngineRequest, event: TokenEvent) -> None:
        if request.sampling.prompt_logprobs is None:
            assert event.prompt_logprobs is None
            return
        assert event.prompt_logprobs is not None and event.prompt_logprobs[0] is None
        got = [(entry.token_id, entry.logprob) for entry in event.prompt_logprobs[1:] if entry is not None]
        prompt = request.prompt_token_ids
        assert got == [(prompt[i], -float(i)) for i in range(1, len(prompt))]


def make_request(name: str, prompt: list[int], *, group_id="", cache_salt="", priority=0, bad_words=(), **sampling):
    return EngineRequest(
        request_id=name,
        prompt_token_ids=prompt,
        sampling=SamplingParams(**{"max_tokens": 4, "seed": 0, "ignore_eos": True} | sampling),
        bad_words_token_ids=bad_words,
        group_id=group_id,
        cache_salt=cache_salt,
        priority=priority,
    )


def random_requests(rng: Random, name: str, bases: list[list[int]], max_len: int) -> list[EngineRequest]:
    """One request, or a group of n, with a prompt that often shares a prefix with others'."""
    prompt = rng.choice(bases)[: rng.randrange(0, rng.choice([8, max_len // 2, max_len]))] + random_tokens(
        rng, rng.randrange(0, 6)
    )
    prompt = (prompt or [3])[: max_len - 1]
    fields: dict = {
        "max_tokens": rng.choice([None, None, 0, 1, 5, 20, 60]),
        "ignore_eos": rng.random() < 0.7,
        "stop_token_ids": tuple(random_tokens(rng, 2)) if rng.random() < 0.3 else (),
        "min_tokens": rng.choice([0, 0, 0, 3, 7]),
        "presence_penalty": rng.choice([0, 0, 0, 0.5]),
        "logit_bias": rng.choice([{}, {}, {}, {2: 1.0}]),
        "allowed_token_ids": rng.choice([None, None, None, tuple(range(0, VOCAB, 2))]),
        "logprobs": rng.choice([None, None, 0]),
        "prompt_logprobs": rng.choice([None, None, None, 0]),
    }
    words = tuple(tuple(random_tokens(rng, rng.choice([1, 2]))) for _ in range(rng.choice([0, 0, 0, 3])))
    n, salt, priority = rng.choice([1, 1, 1, 3]), rng.choice(["", "", "tenant"]), rng.randrange(3)
    return [
        make_request(
            f"{name}-{i}",
            prompt,
            group_id=name if n > 1 else "",
            cache_salt=salt,
            priority=priority,
            bad_words=words,
            **(
                fields | {"seed": rng.randrange(1000), "prompt_logprobs": fields["prompt_logprobs"] if i == 0 else None}
            ),
        )
        for i in range(n)
    ]


def random_tokens(rng: Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(count)]
