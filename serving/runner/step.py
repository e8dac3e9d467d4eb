"""The jitted step: packed inputs in, sampled tokens out, all state on the device and donated.

Axis letters: G data groups; T tokens, S rows, U slots (one of a group is spare, for padding rows) of all groups, or on
a device of its own; V vocab, n top log-probabilities, Lm layers with experts, E experts.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from model.context import WaysBack, spread_model, spread_step
from model.sampling import SamplingFlags, SamplingRows, SamplingState, TokenLogprobs, prompt_logprobs, sample
from model.transformer import Transformer, last_hidden
from pallas_kernels.latent_attention.api import LatentLayout
from pallas_kernels.ragged_paged_attention.api import KVLayout
from serving.runner.packing import unpack
from serving.runner.shapes import StepShape
from sharding.rules import Axes, AxisRules


class DeviceState(NamedTuple):
    kv_pages: jax.Array
    last_token: Int[Array, " U"]
    sampling: SamplingState
    # Tokens that chose each expert since the start, uint32. None for a model without experts.
    expert_load: Int[Array, "Lm E"] | None = None


class StepOutputs(NamedTuple):
    token_ids: Int[Array, " S"]
    logprobs: TokenLogprobs  # [S]
    prompt_logprobs: TokenLogprobs  # [T]
    expert_load: Int[Array, "Lm E"] | None = None  # as in the state, which the next step takes away


def state_shapes(layout: KVLayout | LatentLayout, num_groups: int, max_num_seqs: int, vocab_size: int,
                 experts: tuple[int, int] | None = None) -> DeviceState:  # fmt: skip
    """layout: of the pages of all groups. max_num_seqs: of one group. experts: (Lm, E), if there are any."""
    slots = num_groups * (max_num_seqs + 1)

    def make() -> DeviceState:
        per_token = (jnp.zeros((slots, vocab_size), dtype) for dtype in (jnp.float32, bool, jnp.int32))
        kv_pages = jnp.zeros(layout.shape, layout.dtype)
        load = None if experts is None else jnp.zeros(experts, jnp.uint32)
        return DeviceState(kv_pages, jnp.zeros(slots, jnp.int32), SamplingState(*per_token), load)

    return jax.eval_shape(make)


def with_shardings(rules: AxisRules, shapes: DeviceState, kv_axes: Axes = KVLayout.axes) -> DeviceState:
    """The same shapes, each with the sharding that its logical axes ask for."""

    def shard(shape: Any, axes: Axes) -> Any:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=rules.sharding(axes, shape.shape))

    kv_pages, last_token, sampling, load = shapes
    return DeviceState(
        shard(kv_pages, kv_axes),
        shard(last_token, ("slots",)),
        SamplingState(*(shard(one, ("slots", "vocab")) for one in sampling)),
        None if load is None else shard(load, (None, None)),
    )


def run_step(
    model: Transformer, state: DeviceState, packed: Int[Array, "G size"], shape: StepShape, row_pages: int,
    num_logprobs: int,
) -> tuple[DeviceState, StepOutputs]:
    """One ragged step: forward pass, sampling, and the tokens stored for the next step to pick up."""
    rules, inputs = model.rules, unpack(packed, shape, row_pages)
    batch, targets, spread = inputs.batch, inputs.prompt_targets, None
    packed_tokens = ("packed_tokens",)
    (tokens,) = rules.map_over_shards(
        _feed, (batch.tokens, inputs.from_device, inputs.rows.slot, state.last_token),
        (packed_tokens, packed_tokens, ("rows",), ("slots",)), (packed_tokens,), (batch.tokens.shape,),
    )
    batch = batch._replace(tokens=tokens)
    if shape.context > 1:
        spread, model = spread_step(rules, batch, targets), spread_model(model)
        batch, targets = spread.batch, spread.targets
    hidden, kv_pages, load = model(state.kv_pages, batch)

    sampling_axes = ("slots", "vocab")
    vocabulary = model.vocabulary

    def finish(hidden, matrix, cu_q_lens, ways_back: WaysBack | None, rows: SamplingRows, flags, targets, last_token,
               sampling):  # fmt: skip
        """On each device: its group's rows, its part of the vocabulary."""
        enabled, project = SamplingFlags(*flags[0]), partial(model.project, matrix)
        logits = project(last_hidden(hidden, cu_q_lens) if ways_back is None else ways_back.last_hidden(hidden))
        token, logprobs, sampling = sample(logits, rows, enabled, sampling, num_logprobs=num_logprobs,
                                           vocabulary=vocabulary)
        of_prompt = prompt_logprobs(hidden, targets, enabled.prompt_logprobs, project, num_logprobs=num_logprobs,
                                    vocabulary=vocabulary)
        last_token = last_token.at[rows.slot].set(jnp.where(rows.samples, token, last_token[rows.slot]))
        outputs = StepOutputs(
            gather_groups(rules, token),
            _where_wanted(rules, enabled.logprobs, logprobs),
            _where_wanted(rules, enabled.prompt_logprobs, of_prompt, ways_back),
        )
        return outputs, last_token, sampling

    outputs, last_token, sampling = model.rules.map_over_shards(
        finish,
        (hidden, model.output_matrix, batch.cu_q_lens, spread and spread.ways_back, inputs.rows, inputs.flags,
         targets, state.last_token, state.sampling),
        (("tokens",), ("vocab", "embed"), ("groups",), ("groups", None), ("rows",), ("groups",), ("tokens",),
         ("slots",), sampling_axes),
        ((), ("slots",), sampling_axes),
        ((), state.last_token.shape, state.sampling.bias.shape),
    )
    if state.expert_load is not None and load is not None:
        load = state.expert_load + load.sum(1).astype(jnp.uint32)  # of all groups
    return DeviceState(kv_pages, last_token, sampling, load), outputs._replace(expert_load=load)


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
          last_token: Int[Array, " U"]) -> tuple[Int[Array, " T"]]:  # fmt: skip
    """Decode rows come first: row s owns token s, which may be known to the device only."""
    num_rows = len(slots)
    fed = jnp.where(from_device[:num_rows], last_token[slots], tokens[:num_rows])
    return (tokens.at[:num_rows].set(fed),)


def set_bias(rules: AxisRules, bias: Float[Array, "U V"], slot: Int[Array, ""], row: Float[Array, " V"]
             ) -> Float[Array, "U V"]:  # fmt: skip
    return _set_rows(rules, slot, (bias,), (row,))[0]


def set_counts(
    rules: AxisRules, seen: Bool[Array, "U V"], counts: Int[Array, "U V"], slot: Int[Array, ""],
    prompt_row: Bool[Array, " V"], output_row: Int[Array, " V"],
) -> tuple[Bool[Array, "U V"], Int[Array, "U V"]]:
    seen, counts = _set_rows(rules, slot, (seen, counts), (prompt_row, output_row))
    return seen, counts


def _set_rows(rules: AxisRules, slot, states: tuple[Array, ...], rows: tuple[Array, ...]):
    """Each device sets the row if it holds the slot. slot: of those of all groups."""
    shape = states[0].shape

    def set_rows(slot, states, rows):
        here = slot - rules.place("slots", shape[0]) * len(states[0])
        here = jnp.where(here >= 0, here, len(states[0]))  # beyond the end: dropped, where -1 would be the last
        return (tuple(x.at[here].set(row, mode="drop") for x, row in zip(states, rows, strict=True)),)

    axes = ("slots", "vocab")
    (states,) = rules.map_over_shards(set_rows, (slot, states, rows), ((), axes, ("vocab",)), (axes,), (shape,))
    return states
