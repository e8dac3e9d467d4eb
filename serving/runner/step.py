"""The jitted step: packed inputs in, sampled tokens out, all state on the device and donated.

Axis letters: G data groups; T tokens, S rows, U slots (one of a group is spare, for padding rows) of all groups, or on
a device of its own; K drafts, J = K + 1 positions of a row that are sampled; V vocab, W words of 32 tokens, n top
log-probabilities, Lm layers with experts, E experts.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from model.batch import StepBatch
from model.context import WaysBack, spread_model, spread_step
from model.next_tokens import Sampled, sample
from model.sampling import SamplingFlags, SamplingRows, SamplingState, TokenLogprobs, target_logprobs
from model.speculative.drafter import DeviceDrafter, Drafts, Settled
from model.transformer import Transformer
from model.typical_acceptance import Typical
from model.verification import DraftRows, Positions, following_tokens, positions_of, settled_order, tree_mask
from serving.runner.packing import StepInputs, unpack
from serving.runner.shapes import StepShape
from sharding.rules import Axes, AxisRules


class DeviceState(NamedTuple):
    kv_pages: jax.Array
    last_token: Int[Array, " U"]
    sampling: SamplingState
    # Tokens that chose each expert since the start, uint32. None for a model without experts.
    expert_load: Int[Array, "Lm E"] | None = None
    drafter: Any = None  # what a drafter on the device keeps
    drawn_from: Float[Array, "U K V"] | None = None  # the distributions of its last drafts, where it has them


class StepOutputs(NamedTuple):
    # How many drafts each row accepts, how many of them it keeps, then those drafts and the token after them; what
    # follows means nothing. One array: the data groups exchange it, and the host fetches it, at once.
    sampled: Int[Array, "S 2+J"]
    logprobs: TokenLogprobs  # [S, J]
    target_logprobs: TokenLogprobs  # [T]
    expert_load: Int[Array, "Lm E"] | None = None  # as in the state, which the next step takes away
    drafts: Drafts | None = None  # [S, K], for the next step


_PACKED: Axes = ("packed_tokens",)
_OF_VOCAB: Axes = ("slots", "vocab")  # of the sampling state but for its mask
_MASK: Axes = ("slots", None, None)
_DRAWN_FROM: Axes = ("slots", None, "vocab")


def state_shapes(rules: AxisRules, kv_pages: Any, max_num_seqs: int, vocab_size: int,
                 experts: tuple[int, int] | None = None, num_drafts: int = 0, *, keeps_drawn: bool = False
                 ) -> DeviceState:  # fmt: skip
    """Each with the sharding that its logical axes ask for. kv_pages: of all groups. max_num_seqs: of one group.
    experts: (Lm, E), if there are any. num_drafts: the most that a row may have. keeps_drawn: their distributions, too.
    """
    slots = rules.num_groups * (max_num_seqs + 1)

    def shape(axes: Axes, size: tuple[int, ...], dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(size, dtype, sharding=rules.sharding(axes, size))

    of_vocab = (shape(_OF_VOCAB, (slots, vocab_size), dtype) for dtype in (jnp.float32, bool, jnp.int32))
    return DeviceState(
        kv_pages=kv_pages,
        last_token=shape(("slots",), (slots,), jnp.int32),
        sampling=SamplingState(*of_vocab, mask=shape(_MASK, (slots, num_drafts + 1, -(-vocab_size // 32)), jnp.int32)),
        expert_load=None if experts is None else shape((None, None), experts, jnp.uint32),
        drawn_from=shape(_DRAWN_FROM, (slots, num_drafts, vocab_size), jnp.float32) if keeps_drawn else None,
    )


def run_step(
    model: Transformer, state: DeviceState, packed: Int[Array, "G size"], shape: StepShape, row_pages: int,
    num_logprobs: int, drafter: DeviceDrafter | None = None, typical: Typical | None = None,
) -> tuple[DeviceState, StepOutputs]:
    """One ragged step: forward pass, sampling, and the tokens stored for the next step to pick up. A drafter then
    proposes what may follow, as many tokens a row as the shape has drafts. typical: see `model.next_tokens.sample`."""
    rules, inputs = model.rules, unpack(packed, shape, row_pages)
    batch, targets, ways_back = _fed(rules, inputs, state.last_token, shape), inputs.targets, None
    of_model = batch
    if shape.context > 1:
        (of_model, targets, ways_back), model = spread_step(rules, batch, targets), spread_model(model)
    drafting = drafter is not None and shape.num_drafts > 0
    hidden, features, kv_pages, load = model.with_features(state.kv_pages, of_model, drafter.taps if drafter else ())
    vocabulary, mask = model.vocabulary, state.sampling.mask

    def finish(hidden, matrix, tokens, cu_q_lens, kv_lens, drafts: DraftRows | None, ways_back: WaysBack | None,
               rows: SamplingRows, flags, targets, last_token, of_vocab, mask, drawn_from, features):  # fmt: skip
        """On each device: its group's rows, its part of the vocabulary."""
        enabled, project = SamplingFlags(*flags[0]), partial(model.project, matrix)
        positions = positions_of(drafts, tokens, cu_q_lens, shape.num_drafts)
        at = positions.token.reshape(-1)
        logits = project(hidden[at] if ways_back is None else ways_back.hidden_at(hidden, at))
        of_drafts = None if drawn_from is None else drawn_from[rows.slot, : shape.num_drafts]
        sampled, sampling = sample(logits, rows, positions, enabled, SamplingState(*of_vocab, mask=mask), of_drafts,
                                   typical=typical, num_logprobs=num_logprobs, vocabulary=vocabulary)  # fmt: skip
        of_targets = target_logprobs(hidden, targets, enabled.target_logprobs, project, num_logprobs=num_logprobs,
                                     vocabulary=vocabulary)
        accepted = sampled.accepted
        newest = jnp.take_along_axis(sampled.tokens, accepted.number[:, None], axis=1)[:, 0]
        last_token = last_token.at[rows.slot].set(jnp.where(rows.samples, newest, last_token[rows.slot]))
        outputs = StepOutputs(
            gather_groups(rules, jnp.column_stack([accepted.number, accepted.kept, sampled.tokens])),
            _where_wanted(rules, enabled.logprobs, sampled.logprobs),
            _where_wanted(rules, enabled.target_logprobs, of_targets, ways_back),
        )
        of_tokens = of_rows = ()
        if drafts is not None and drafting:
            settled = _settle(tokens, cu_q_lens, kv_lens, drafts, positions, sampled, newest, rows.samples, features)
            of_tokens, of_rows = settled[:2], settled[2:]
        return outputs, last_token, sampling[:3], of_tokens, of_rows

    outputs, last_token, of_vocab, of_tokens, of_rows = model.rules.map_over_shards(
        finish,
        (hidden, model.output_matrix, batch.tokens, batch.cu_q_lens, batch.kv_lens, inputs.drafts, ways_back,
         inputs.rows, inputs.flags, targets, state.last_token, state.sampling[:3], mask,
         state.drawn_from if shape.num_drafts else None, features if drafting else None),
        (("tokens",), ("vocab", "embed"), _PACKED, ("groups",), ("rows",), ("rows",), ("groups", None), ("rows",),
         ("groups",), ("tokens",), ("slots",), _OF_VOCAB, ("slots",), _DRAWN_FROM, ("tokens",)),
        ((), ("slots",), _OF_VOCAB, ("tokens",), ("rows",)),
        ((), state.last_token.shape, state.sampling.bias.shape, batch.tokens.shape, batch.kv_lens.shape),
    )  # fmt: skip
    if state.expert_load is not None and load is not None:
        load = state.expert_load + load.sum(1).astype(jnp.uint32)  # of all groups
    sampling = SamplingState(*of_vocab, mask=mask)
    state = DeviceState(kv_pages, last_token, sampling, load, state.drafter, state.drawn_from)
    outputs = outputs._replace(expert_load=load)
    if drafter is None or not drafting:
        return state, outputs
    next_rows = inputs.rows._replace(output_index=inputs.rows.output_index + outputs.sampled[:, 0] + 1)
    drafts, kept = drafter.propose(state.drafter, Settled(*of_tokens, *of_rows), batch, next_rows, shape.num_drafts,
                                   model.embedding[...], model.output_matrix)  # fmt: skip
    drafts, drawn_from = _publish_drafts(rules, drafts, state.drawn_from, inputs.rows.slot)
    return state._replace(drafter=kept, drawn_from=drawn_from), outputs._replace(drafts=drafts)


def _fed(rules: AxisRules, inputs: StepInputs, last_token: Int[Array, " U"], shape: StepShape) -> StepBatch:
    """The batch with the tokens that only the device knows and, where rows may end in trees, what each token sees."""
    batch = inputs.batch

    def local(tokens, from_device, slots, last_token, positions, cu_q_lens, drafts: DraftRows | None):
        tokens = _feed(tokens, from_device, slots, last_token)
        if drafts is None or not shape.tree_words:
            return tokens, positions, ()
        family = positions_of(drafts, tokens, cu_q_lens, shape.num_drafts)
        seen, positions = tree_mask(family, drafts, cu_q_lens, positions, shape.tree_words)
        return tokens, positions, seen

    tokens, positions, seen = rules.map_over_shards(
        local, (batch.tokens, inputs.from_device, inputs.rows.slot, last_token, batch.positions, batch.cu_q_lens,
                inputs.drafts),
        (_PACKED, _PACKED, ("rows",), ("slots",), _PACKED, ("groups",), ("rows",)), (_PACKED, _PACKED, _PACKED),
        (batch.tokens.shape,) * 3,
    )  # fmt: skip
    return batch._replace(tokens=tokens, positions=positions, tree_mask=seen if shape.tree_words else None)


def _settle(tokens, cu_q_lens, kv_lens, drafts: DraftRows, positions: Positions, sampled: Sampled, newest, samples,
            features) -> Settled:  # fmt: skip
    """Within `map_over_shards`."""
    accepted = sampled.accepted
    if drafts.parents is not None:
        features = features[settled_order(accepted, positions, len(tokens))]
    goes_on = ~samples & (cu_q_lens[1:] > cu_q_lens[:-1])
    following = following_tokens(tokens, accepted, positions, sampled.tokens, samples, goes_on, drafts)
    rejected = jnp.where(samples, drafts.number - accepted.number, 0)
    last = jnp.maximum(cu_q_lens[1:] - 1, 0) - rejected
    return Settled(features, following, last, kv_lens - rejected, newest, samples)


def _publish_drafts(rules: AxisRules, drafts: Drafts, drawn_from: Array | None, slots: Int[Array, " S"]
                    ) -> tuple[Drafts, Array | None]:  # fmt: skip
    """(the tokens for the host, without their distributions; the distributions by slot)."""

    def local(tokens, parents, probabilities, drawn_from, slots):
        published = Drafts(gather_groups(rules, tokens), None if parents is None else gather_groups(rules, parents))
        if drawn_from is None:
            return published, ()
        return published, drawn_from.at[slots, : probabilities.shape[1]].set(probabilities)

    out_axes, out_shape = ((), ()) if drawn_from is None else (_DRAWN_FROM, drawn_from.shape)
    published, by_slot = rules.map_over_shards(
        local, (drafts.tokens, drafts.parents, drafts.probabilities, drawn_from, slots),
        (("rows",), ("rows",), ("rows", None, "vocab"), _DRAWN_FROM, ("rows",)), ((), out_axes), ((), out_shape),
    )  # fmt: skip
    return published, None if drawn_from is None else by_slot


def gather_groups(rules: AxisRules, of_group: Array) -> Array:
    """Within `map_over_shards`: what all data groups have, one after the other."""
    over = rules.over("groups", rules.num_groups)
    return lax.all_gather(of_group, over, tiled=True) if over else of_group


def _where_wanted(rules: AxisRules, wanted: Bool[Array, ""], of_group: TokenLogprobs,
                  ways_back: WaysBack | None = None) -> TokenLogprobs:  # fmt: skip
    """Of all groups, where a request asked; otherwise zeros that nobody sends."""
    if rules.num_groups == 1 and ways_back is None:
        return of_group

    def every(of_group: TokenLogprobs) -> TokenLogprobs:
        of_group = of_group if ways_back is None else ways_back.packed(of_group)
        return jax.tree.map(partial(gather_groups, rules), of_group)

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(every, of_group))
    return lax.cond(wanted, lambda: every(of_group), lambda: zeros)


def _feed(tokens: Int[Array, " T"], from_device: Bool[Array, " T"], slots: Int[Array, " S"],
          last_token: Int[Array, " U"]) -> Int[Array, " T"]:  # fmt: skip
    """Decode rows come first: row s owns token s, which may be known to the device only."""
    num_rows = len(slots)
    fed = jnp.where(from_device[:num_rows], last_token[slots], tokens[:num_rows])
    return tokens.at[:num_rows].set(fed)
