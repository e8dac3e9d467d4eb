"""Log-probabilities in the three forms that clients know."""

from collections.abc import Sequence

from serving.api.http.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from serving.request import Logprobs
from serving.tokenizer.tokenizer import Tokenizer

FLOOR = -9999.0  # JSON has no -inf


def _finite(logprob: float) -> float:
    return max(logprob, FLOOR)


def completion_logprobs(tokenizer: Tokenizer, texts: Sequence[str], logprobs: Sequence[Logprobs | None],
                        offset: int) -> CompletionLogprobs:
    """`texts` is what each token adds to the text, of which `offset` characters came before. A position without a
    log-probability (the first of the prompt) has null in its place."""
    tops: list[dict[str, float] | None] = []
    offsets = []
    for text, entry in zip(texts, logprobs, strict=True):
        offsets.append(offset)
        offset += len(text)
        if entry is None:
            tops.append(None)
            continue
        top: dict[str, float] = {}
        for token_id, logprob in zip((*entry.top_ids, entry.token_id), (*entry.top_logprobs, entry.logprob),
                                     strict=True):
            top.setdefault(tokenizer.token_text(token_id), _finite(logprob))  # best first: of two alike the best stays
        tops.append(top)
    return CompletionLogprobs(
        tokens=list(texts),
        token_logprobs=[None if entry is None else _finite(entry.logprob) for entry in logprobs],
        top_logprobs=tops,
        text_offset=offsets,
    )


def chat_logprobs(tokenizer: Tokenizer, logprobs: Sequence[Logprobs]) -> ChatLogprobs:
    def spelled(token_id: int) -> tuple[str, list[int]]:
        return tokenizer.token_text(token_id), list(tokenizer.token_bytes(token_id))

    content = []
    for entry in logprobs:
        text, raw = spelled(entry.token_id)
        tops = []
        for token_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True):
            top_text, top_raw = spelled(token_id)
            tops.append(TopLogprob(top_text, _finite(logprob), top_raw))
        content.append(TokenLogprob(text, _finite(entry.logprob), raw, tops))
    return ChatLogprobs(content)


def prompt_logprobs(tokenizer: Tokenizer, logprobs: Sequence[Logprobs | None]) -> PromptLogprobs:
    """vLLM's form: token id -> log-probability, rank and text; the top ones and the prompt's own."""
    result: PromptLogprobs = []
    for entry in logprobs:
        if entry is None:
            result.append(None)
            continue
        tokens = {
            str(token_id): PromptLogprob(_finite(logprob), rank, tokenizer.token_text(token_id))
            for rank, (token_id, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), start=1)
        }
        tokens[str(entry.token_id)] = PromptLogprob(_finite(entry.logprob), entry.rank,
                                                    tokenizer.token_text(entry.token_id))
        result.append(tokens)
    return result
