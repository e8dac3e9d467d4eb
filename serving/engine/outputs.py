"""What a step's results mean for its sequences: tokens taken in, told and shared, and why a sequence ends.

Tokens that a grammar leaves no choice about are appended here, unsampled. They are told with the next one that is
sampled or, where log-probabilities are asked for, once a row has computed those.
"""

from collections.abc import Callable

from serving.engine.plan import RowPlan, StepResult
from serving.engine.scheduler_config import SchedulerConfig
from serving.engine.sequence import Sequence
from serving.request import EngineStats, FinishReason, Logprobs, TokenEvent


class Outputs:
    """finish: frees what a sequence holds, and says in the event that it has ended."""

    def __init__(self, config: SchedulerConfig, stats: EngineStats,
                 finish: Callable[[Sequence, FinishReason, TokenEvent], TokenEvent]):  # fmt: skip
        self._config, self._stats, self._finish = config, stats, finish
        self._rejects = config.speculation is not None and config.speculation.rejects

    def take(self, seq: Sequence, row: RowPlan, result: StepResult, index: int) -> TokenEvent | None:
        """What a row's result means for its sequence; None: nothing to tell."""
        tokens, event = result.token_ids[index], TokenEvent(request_id=row.request_id)
        scored = result.target_logprobs[index] or []
        if row.targets is not None and row.start + 1 < seq.prompt_len and seq.prompt_logprobs is not None:
            count, of_prompt = seq.request.sampling.prompt_logprobs, scored[: seq.prompt_len - row.start - 1]
            seq.store_prompt_logprobs(row.start + 1, [_cut(one, count) for one in of_prompt])
        if row.samples or seq.num_unscored:  # no event before the prompt is computed
            self._tell_forced(seq, event, row.start + 1, scored)
        if row.samples:
            seq.num_pending -= 1
            if seq.group is not None:
                seq.num_computed += result.num_kept[index]
            seq.verifying, seq.draft = False, result.drafts[index]
            self._append(seq, event, tokens, result.logprobs[index])
        elif row.start + row.num_tokens == seq.max_len:  # max_tokens is 0
            self._finish(seq, "length", event)
        if not event.new_token_ids and event.finish_reason is None:
            return None
        return seq.told(event)

    def _tell_forced(self, seq: Sequence, event: TokenEvent, first: int, scored: list[Logprobs]) -> None:
        """Adds forced tokens to the event: all, or those whose log-probabilities have come. scored: of the tokens
        from the index `first` on."""
        if not seq.num_untold:
            return
        untold = seq.num_tokens - seq.num_untold
        count = seq.num_untold
        if seq.num_unscored:
            ready = scored[max(untold - first, 0) :] if untold >= first else []
            count = min(count, len(ready))
            event.logprobs = [_cut(one, seq.request.sampling.logprobs) for one in ready[:count]]
        event.new_token_ids += seq.tokens[untold : untold + count].tolist()
        seq.num_untold -= count

    def _append(self, seq: Sequence, event: TokenEvent, tokens: list[int], logprobs: list[Logprobs] | None) -> None:
        """Takes in sampled tokens, and what the grammar forces after them. Those after an end are dropped."""
        for i, token in enumerate(tokens):
            seq.append(token)
            event.new_token_ids.append(token)
            if logprobs is not None:
                event.logprobs = [*(event.logprobs or []), logprobs[i]]
            reason = self._end_of(seq, token)
            if reason is not None:
                self._stats.generation_tokens += i + 1
                self._end(seq, event, reason, token)
                return
        self._stats.generation_tokens += len(tokens)
        if seq.matcher is not None:
            seq.matcher.accept(tokens)
            ending = self.force(seq, may_end=seq.request.sampling.logprobs is None)
            if seq.request.sampling.logprobs is None:
                self._tell_forced(seq, event, 0, [])
            if ending is not None:
                self._end(seq, event, *ending)
                return
        self._publish(seq)

    def force(self, seq: Sequence, may_end: bool = False) -> tuple[FinishReason, int] | None:
        """Appends the tokens that the grammar leaves no choice about, untold. One that ends the sequence only if
        `may_end`, and then says so; otherwise it is sampled, from nothing else."""
        if seq.matcher is None:
            return None
        forced = seq.matcher.forced()
        end: tuple[FinishReason, int] | None = None
        for count, token in enumerate(forced):
            reason = self._end_of(seq, token, seq.num_tokens + count + 1)
            if reason is not None and not may_end:
                forced = forced[:count]
                break
            if reason is not None:
                end = reason, token
                forced = forced[: count + 1]
                break
        for token in forced:
            seq.append(token)
        seq.num_untold += len(forced)
        self._stats.forced_tokens += len(forced)
        self._stats.generation_tokens += len(forced)
        if forced and end is None:
            seq.matcher.accept(forced)
            if seq.sampling_state is not None:
                seq.sampling_state.counts_anew()
            if seq.draft is not None:  # the device knows the distributions of drawn ones by their places
                seq.draft = None if self._rejects else seq.draft.after(forced)
        return end

    def _end_of(self, seq: Sequence, token: int, num_tokens: int | None = None) -> FinishReason | None:
        """Why the sequence ends with this token, if it does. num_tokens: with it, if it is not appended yet."""
        sampling = seq.request.sampling
        if token in self._config.eos_token_ids and (not sampling.ignore_eos or seq.matcher is not None):
            return "stop"
        if token in sampling.stop_token_ids:
            return "stop"
        return "length" if (num_tokens or seq.num_tokens) >= seq.max_len else None

    def _end(self, seq: Sequence, event: TokenEvent, reason: FinishReason, token: int) -> None:
        if reason == "stop" and token in seq.request.sampling.stop_token_ids and not self._is_eos(seq, token):
            event.stop_token_id = token
        if seq.matcher is not None and seq.matcher.error:
            reason, event.error = "error", f"the grammar cannot go on: {seq.matcher.error}"
            event.error_param = seq.request.grammar_source or "structured_outputs"
        self._finish(seq, reason, event)

    def _is_eos(self, seq: Sequence, token: int) -> bool:
        return token in self._config.eos_token_ids and not seq.request.sampling.ignore_eos

    def _publish(self, seq: Sequence) -> None:
        """Shares pages that are full of known tokens by now."""
        known = min(seq.num_computed, seq.num_tokens)
        if seq.group is not None and known >= (seq.table.num_shared + 1) * self._config.page_size:
            seq.group.kv.publish(seq.table, seq.tokens, known)


def _cut(logprobs: Logprobs, count: int | None) -> Logprobs:
    """With the `count` most likely tokens."""
    top = count or 0
    return Logprobs(logprobs.token_id, logprobs.logprob, logprobs.rank, logprobs.top_ids[:top],
                    logprobs.top_logprobs[:top])  # fmt: skip
