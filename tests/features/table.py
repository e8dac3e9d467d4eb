"""What may be asked of the engine, and docs/features.md's table of it: any two at once."""

from itertools import combinations

# What a request asks for.
REQUESTED = ("n > 1", "logprobs", "prompt logprobs", "penalties", "bias, bans", "stop strings", "seed", "grammar",
             "fast-forward")  # fmt: skip
# What happens to a request on its way.
HAPPENING = ("chunked prefill", "prefix cache", "preemption", "overlap")
DRAFTERS = ("ngram", "suffix", "draft_model", "medusa", "eagle", "eagle3", "mtp", "dflash")
DIVIDED = ("tensor", "data")
FEATURES = (*HAPPENING, *REQUESTED, *DRAFTERS, *DIVIDED)
CELLS = tuple(combinations(FEATURES, 2))

RUNS, REFUSED = "✓", "refused"


def state(first: str, second: str) -> str:
    """An engine has one drafter; everything else goes together."""
    return REFUSED if first in DRAFTERS and second in DRAFTERS else RUNS


def table() -> str:
    """In Markdown, the half under the diagonal."""
    head = ["", *(str(number) for number in range(1, len(FEATURES)))]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row, name in enumerate(FEATURES):
        cells = [state(FEATURES[column], name) if column < row else "" for column in range(len(FEATURES) - 1)]
        lines.append("| " + " | ".join([f"{row + 1} {name}", *cells]) + " |")
    return "\n".join(lines)
