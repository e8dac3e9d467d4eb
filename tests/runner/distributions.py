"""What each option makes of a distribution, by its documentation, and whether many drawn tokens are like theirs."""

from collections.abc import Sequence

import numpy as np
from scipy import stats

from serving.llm import SamplingParams


def chances(logits: np.ndarray, prompt: Sequence[int], outputs: Sequence[int], of: SamplingParams) -> np.ndarray:
    """Of each token after these. A bad word is token ids with spaces between."""
    size, banned = len(logits), set()
    logits = logits.astype(np.float64)
    for token, bias in of.logit_bias.items():
        logits[token] += bias
    if of.allowed_token_ids is not None:
        banned |= set(range(size)) - set(of.allowed_token_ids)
    if len(outputs) < of.min_tokens:
        banned |= set(of.stop_token_ids)
    for word in of.bad_words:
        *before, last = map(int, word.split())
        banned |= {last} if list(outputs[max(len(outputs) - len(before), 0) :]) == before else set()
    counts = np.bincount(np.array(outputs, int), minlength=size)
    seen = (counts > 0) | np.isin(np.arange(size), prompt)
    repetition = np.where(logits > 0, 1 / of.repetition_penalty, of.repetition_penalty)
    logits = np.where(seen, logits * repetition, logits)
    logits -= of.frequency_penalty * counts + of.presence_penalty * (counts > 0)
    logits[list(banned)] = -np.inf
    p = np.exp((logits - logits.max()) / of.temperature)
    p[p < of.min_p] = 0
    if of.top_k:
        p[p < np.sort(p)[-of.top_k]] = 0
    falling = np.argsort(-p)
    before = np.cumsum(p[falling]) - p[falling]
    p[falling[before >= of.top_p * p.sum()]] = 0
    return p / p.sum()


def likelihood(found: np.ndarray, p: np.ndarray, groups: np.ndarray) -> float:
    """The chance that tokens drawn from p [tokens, V] are as unlike them as `found`, or more: by chi-square of how
    often each came within each group. The draws are not alike, so a group's covariance is the sum of theirs."""
    total, degrees = 0.0, 0
    for group in np.unique(groups):
        of_group = p[groups == group]
        off = np.bincount(found[groups == group], minlength=p.shape[1]) - of_group.sum(0)
        covariance = np.diag(of_group.sum(0)) - of_group.T @ of_group
        often = np.flatnonzero(np.diag(covariance) > 3)
        off, covariance = off[often], covariance[np.ix_(often, often)]
        if len(often):
            total += off @ np.linalg.pinv(covariance, rcond=1e-9, hermitian=True) @ off
            degrees += np.linalg.matrix_rank(covariance, rtol=1e-9, hermitian=True)
    return float(stats.chi2.sf(total, degrees))
