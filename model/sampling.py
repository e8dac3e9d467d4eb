"""Sampling on the device: every option of a request, each paid for only in steps where some row uses it.

A branch of one compiled step (`lax.cond`), not a compiled variant, holds each option, so the set of shapes stays small.
Nothing depends on the other rows of a batch: a row's random number comes from its seed and output index alone.
Nor does it depend on how many devices hold the vocabulary: each works on its slice of logits, and only what a row is
reduced to is exchanged (`Vocabulary`). The flags must be the same on all devices: their branches have collectives.

A row is sampled after its last known token and after each of its drafts (`model.verification`); `model.next_tokens`
puts both together.

Axis letters: S rows, K drafts, J = K + 1 positions of a row that are sampled, R = S J of all; V vocab, v tokens of this
device's slice of it (all, on one device), w: v in lanes; W words of 32 tokens; U slots.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from model.verification import Positions, allowed_tokens
from model.vocabulary import Vocabulary

BANNED = -1e30  # added to a logit: finite, so that no arithmetic on it gives NaN
MASKED = -2e38  # a logit that a grammar forbids: below all that is banned, for the grammar wins
_LANES = 128
_DIGIT_BITS = {True: 1, False: 4}  # of a threshold found at once. Is the vocabulary whole? Then fewer passes are faster


class SamplingRows(NamedTuple):
    """What each row asks for."""

    slot: Int[Array, " S"]
    samples: Bool[Array, " S"]  # false: the row's prompt goes on, its token is ignored
    masked: Bool[Array, " S"]  # only the tokens in its slot's mask are allowed
    output_index: Int[Array, " S"]  # of the first sampled token
    seed: Int[Array, "S 2"]  # high and low word
    temperature: Float[Array, " S"]  # 0: greedy
    top_k: Int[Array, " S"]  # 0: off
    top_p: Float[Array, " S"]
    min_p: Float[Array, " S"]
    repetition_penalty: Float[Array, " S"]
    frequency_penalty: Float[Array, " S"]
    presence_penalty: Float[Array, " S"]


class SamplingFlags(NamedTuple):
    """Whether any row of the step needs a branch."""

    random: Bool[Array, ""]
    top_k: Bool[Array, ""]
    top_p: Bool[Array, ""]
    biased: Bool[Array, ""]
    penalized: Bool[Array, ""]
    masked: Bool[Array, ""]
    logprobs: Bool[Array, ""]
    target_logprobs: Bool[Array, ""]


class SamplingState(NamedTuple):
    """Per slot, on the device. A branch reads the rows of all slots in its step, so a slot whose owner uses no option
    must be neutral: the scheduler sends an update that cleans it before a new owner runs."""

    bias: Float[Array, "U v"]  # logit_bias, allowed and banned tokens
    prompt_seen: Bool[Array, "U v"]
    output_counts: Int[Array, "U v"]
    mask: Int[Array, "U J W"]  # which tokens a grammar allows at each position of the row: bit i % 32 of word i // 32


class TokenLogprobs(NamedTuple):
    """Of the raw distribution, before any option."""

    logprob: Float[Array, " R"]  # the chosen token's
    rank: Int[Array, " R"]  # 1: the most likely
    top_ids: Int[Array, "R n"]
    top_logprobs: Float[Array, "R n"]


def at_positions(rows: SamplingRows, positions: Positions) -> SamplingRows:
    """[R]: each position with what its row asks for, and with the output index of what is sampled there."""
    num_sampled = positions.token.shape[1]
    if num_sampled == 1:
        return rows
    every = SamplingRows(*(jnp.repeat(x, num_sampled, axis=0) for x in rows))
    return every._replace(output_index=every.output_index + positions.depth.reshape(-1))


def shaped_logits(
    logits: Float[Array, "R v"], rows: SamplingRows, positions: Positions, flags: SamplingFlags, state: SamplingState,
    vocabulary: Vocabulary,
) -> Float[Array, "R v"]:  # fmt: skip
    """After biases, penalties and the grammar's mask. rows: at positions."""
    num_sampled = positions.token.shape[1]
    shaped = lax.cond(flags.biased, lambda x: x + _lines(state.bias, rows, num_sampled), lambda x: x, logits)
    shaped = lax.cond(flags.penalized, lambda x: _penalize(x, rows, positions, state, vocabulary), lambda x: x, shaped)
    return lax.cond(flags.masked, lambda x: _mask(x, rows, num_sampled, state, vocabulary), lambda x: x, shaped)


def token_logprobs(
    logits: Float[Array, "R v"], token: Int[Array, " R"], *, num_logprobs: int, vocabulary: Vocabulary
) -> TokenLogprobs:
    """Three collectives: the maximum, the sum with the chosen one's, the best with the rank."""
    shifted = logits - vocabulary.max(logits.max(-1))[:, None]
    total, chosen = vocabulary.sum(jnp.stack([jnp.exp(shifted).sum(-1), vocabulary.pick(shifted, token)]))
    log_total = jnp.log(total)
    logprobs, chosen = shifted - log_total[:, None], chosen - log_total
    better = (logprobs > chosen[:, None]).sum(-1, dtype=jnp.int32)
    top, ids, better = vocabulary.top_k(logprobs, num_logprobs, better)
    return TokenLogprobs(chosen, 1 + better, ids, top)


def target_logprobs(
    hidden: Float[Array, "T D"], targets: Int[Array, " T"], wanted: Bool[Array, ""],
    project: Callable[[Float[Array, "S D"]], Float[Array, "S v"]], *, num_logprobs: int, vocabulary: Vocabulary,
) -> TokenLogprobs:  # fmt: skip
    """Log-probabilities of every token's known successor, a few tokens at a time: [T, v] logits never exist at once."""
    num_tokens = hidden.shape[0]
    chunk = min(16, num_tokens)
    more = -num_tokens % chunk

    def some(inputs):
        return token_logprobs(project(inputs[0]), inputs[1], num_logprobs=num_logprobs, vocabulary=vocabulary)

    def every() -> TokenLogprobs:
        whole = jnp.pad(hidden, ((0, more), (0, 0))), jnp.pad(targets, (0, more))
        parts = lax.map(some, jax.tree.map(lambda x: x.reshape(-1, chunk, *x.shape[1:]), whole))
        return TokenLogprobs(*(part.reshape(-1, *part.shape[2:])[:num_tokens] for part in parts))

    return lax.cond(wanted, every, lambda: no_logprobs(num_tokens, num_logprobs))


def no_logprobs(rows: int, num_logprobs: int) -> TokenLogprobs:
    wide = (rows, num_logprobs)
    return TokenLogprobs(jnp.zeros(rows), jnp.zeros(rows, jnp.int32), jnp.zeros(wide, jnp.int32), jnp.zeros(wide))


def count_tokens(
    counts: Int[Array, "U v"], tokens: Int[Array, "S J"], counted: Bool[Array, "S J"], slots: Int[Array, " S"],
    vocabulary: Vocabulary,
) -> Int[Array, "U v"]:  # fmt: skip
    place, mine = vocabulary.here(tokens)
    return counts.at[slots[:, None], place].add((counted & mine).astype(counts.dtype))


def _penalize(logits, rows: SamplingRows, positions: Positions, state: SamplingState, vocabulary: Vocabulary):
    """Repetition (Keskar et al. 2019: divides positive logits, multiplies negative ones), frequency and presence. The
    drafts before a position count, as they would had they been sampled."""
    num_sampled = positions.token.shape[1]
    counts = _lines(state.output_counts, rows, num_sampled)
    if positions.drafts.shape[1]:
        before = positions.ancestors.reshape(len(logits), -1)
        drafts = jnp.repeat(positions.drafts, num_sampled, axis=0)  # [R, K]
        place, mine = vocabulary.here(drafts)
        counts = counts.at[jnp.arange(len(logits))[:, None], place].add((before & mine).astype(counts.dtype))
    seen = _lines(state.prompt_seen, rows, num_sampled) | (counts > 0)
    repetition = rows.repetition_penalty[:, None]
    logits = jnp.where(seen, jnp.where(logits > 0, logits / repetition, logits * repetition), logits)
    logits -= rows.frequency_penalty[:, None] * counts
    return logits - rows.presence_penalty[:, None] * (counts > 0)


def _lines(of_slots: Array, rows: SamplingRows, num_sampled: int) -> Array:
    """[U, v] to [R, v]. Each row's is gathered once: for a gather of R lines XLA for TPUs has not enough VMEM."""
    return jnp.repeat(of_slots[rows.slot[::num_sampled]], num_sampled, axis=0)


def _mask(logits, rows: SamplingRows, num_sampled: int, state: SamplingState, vocabulary: Vocabulary):
    words = state.mask[rows.slot, jnp.arange(len(logits)) % num_sampled]
    allowed = allowed_tokens(words, vocabulary.first, logits.shape[1])
    return jnp.where(rows.masked[:, None] & ~allowed, MASKED, logits)


def shaped_weights(logits: Float[Array, "S v"], most: Float[Array, " S"], rows: SamplingRows, flags: SamplingFlags,
                   vocabulary: Vocabulary) -> Float[Array, "S w 128"]:  # fmt: skip
    """What softmax(logits / temperature), filtered by min_p, top_k and top_p, is proportional to; the best token, whose
    logit is `most`, weighs 1. w: v in lanes, with zeros behind.

    The filters look for a threshold, digit by digit of the distance to the best logit: exact, without a sort, and ties
    at the threshold stay in.
    """
    distance = in_lanes(most[:, None] - logits, fill=jnp.inf)  # [S, v / 128, 128], >= 0
    temperature = jnp.where(rows.temperature > 0, rows.temperature, 1.0)[:, None, None]
    weight = jnp.exp(-distance / temperature)  # the best token weighs 1
    weight = jnp.where(weight >= rows.min_p[:, None, None], weight, 0.0)

    def top_k(weight):
        wanted = jnp.where(rows.top_k > 0, rows.top_k, vocabulary.size).astype(jnp.float32)
        return _keep_nearest(weight, distance, jnp.ones_like(weight), wanted, vocabulary)

    def top_p(weight):
        wanted = jnp.where(rows.top_p < 1, rows.top_p * vocabulary.sum(_row_sum(weight)), jnp.inf)
        return _keep_nearest(weight, distance, weight, wanted, vocabulary)

    weight = lax.cond(flags.top_k, top_k, lambda w: w, weight)
    return lax.cond(flags.top_p, top_p, lambda w: w, weight)


def _keep_nearest(weight, distance, amount, wanted, vocabulary: Vocabulary):
    """Zeroes the weights beyond the smallest distance within which `amount` sums to at least `wanted`.

    Distances are not negative, so their bits have their order. A digit of the limit's bits is how many of the numbers
    that end a digit's range, the rest being ones, are not enough. A collective a digit.
    """
    width = _DIGIT_BITS[vocabulary.axis is None]
    bits = lax.bitcast_convert_type(distance, jnp.uint32)
    ends = jnp.arange(1, 1 << width, dtype=jnp.uint32)[:, None]  # [digits, 1]

    def add_digit(place, limit):
        unit = jnp.uint32(1) << (32 - width - place * width).astype(jnp.uint32)
        at_most = limit + ends * unit - 1  # [digits, S]
        sums = _row_sum(jnp.where(bits <= at_most[:, :, None, None], amount, 0.0))
        return limit + (vocabulary.sum(sums) < wanted).sum(0, dtype=jnp.uint32) * unit

    limit = lax.fori_loop(0, 32 // width, add_digit, jnp.zeros(len(weight), jnp.uint32))
    return jnp.where(bits <= limit[:, None, None], weight, 0.0)


def race(weight: Float[Array, "S w 128"], rows: SamplingRows, vocabulary: Vocabulary) -> Int[Array, " S"]:
    """A token a row with probability weight / sum(weight): the least of V exponential variables with these rates.

    This is the Gumbel trick without its first logarithm. It flips only where two tokens tie, so the tiny differences of
    logits between step shapes do not change what a seed gives; inverting a cumulative sum over 50,000 tokens did,
    in half a percent of draws.
    """
    place = jnp.arange(weight[0].size, dtype=jnp.uint32).reshape(weight.shape[1:])
    chance = chances(rows, place + jnp.uint32(vocabulary.first))
    # A chance that rounds to 1 comes last, but before what was filtered out.
    arrival = jnp.minimum(-jnp.log1p(-chance) / weight, jnp.finfo(jnp.float32).max)
    arrival = jnp.where(weight > 0, arrival, jnp.inf)
    return vocabulary.best(-arrival.reshape(weight.shape[0], -1))[1]


def chances(rows: SamplingRows, place: Int[Array, "..."]) -> Float[Array, "S ..."]:
    """Numbers in (0, 1] [S, *place], from each row's seed and output index and the place alone.

    Two keys a row from threefry; a place is mixed with them by the finalizer of MurmurHash3 (Appleby 2008), twice:
    a full generator for every token would cost more than the rest of sampling.
    """

    def keys(seed, index):
        key = jax.random.wrap_key_data(lax.bitcast_convert_type(seed, jnp.uint32), impl="threefry2x32")
        return jax.random.bits(jax.random.fold_in(key, index), (2,))

    def mix(x):
        x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
        x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
        return x ^ (x >> 16)

    first, second = jnp.moveaxis(jax.vmap(keys)(rows.seed, rows.output_index), 1, 0).reshape(2, -1, *[1] * place.ndim)
    bits = mix(mix(place + first) ^ second)
    return (bits.astype(jnp.float32) + 0.5) * jnp.float32(2**-32)  # small ones, which win, keep all their bits


def in_lanes(x, *, fill):
    """[S, v] to [S, v / 128, 128]: sums over the middle axis vectorize, and have one order whatever S is."""
    padding = -x.shape[-1] % _LANES
    return jnp.pad(x, ((0, 0), (0, padding)), constant_values=fill).reshape(x.shape[0], -1, _LANES)


def _row_sum(x):
    return x.sum(-2).sum(-1)
