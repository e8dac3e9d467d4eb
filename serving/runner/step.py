"""The jitted step: packed inputs in, sampled tokens out, all state on the device and donated.

Axis letters: T tokens, S rows, U slots (one spare for padding rows), V vocab, n top log-probabilities.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from model.sampling import SamplingState, TokenLogprobs, prompt_logprobs, sample
from model.transformer import Transformer, last_hidden
from model.vocabulary import Vocabulary
from pallas_kernels.latent_attention.api import LatentLayout
from pallas_kernels.ragged_paged_attention.api import KVLayout
from serving.runner.packing import unpack
from serving.runner.shapes import StepShape
from sharding.rules import Axes, AxisRules


class DeviceState(NamedTuple):
    kv_pages: jax.Array
    last_token: Int[Array, " U"]
    sampling: SamplingState


class StepOutputs(NamedTuple):
    token_ids: Int[Array, " S"]
    logprobs: TokenLogprobs  # [S]
    prompt_logprobs: TokenLogprobs  # [T]


def state_shapes(layout: KVLayout | LatentLayout, max_num_seqs: int, vocab_size: int) -> DeviceState:
    slots = max_num_seqs + 1

    def make() -> DeviceState:
        per_token = (jnp.zeros((slots, vocab_size), dtype) for dtype in (jnp.float32, bool, jnp.int32))
        kv_pages = jnp.zeros(layout.shape, layout.dtype)
        return DeviceState(kv_pages, jnp.zeros(slots, jnp.int32), SamplingState(*per_token))

    return jax.eval_shape(make)


def with_shardings(rules: AxisRules, shapes: DeviceState, kv_axes: Axes = KVLayout.axes) -> DeviceState:
    """The same shapes, each with the sharding that its logical axes ask for."""

    def shard(shape: Any, axes: Axes) -> Any:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=rules.sharding(axes, shape.shape))

    kv_pages, last_token, sampling = shapes
    return DeviceState(
        shard(kv_pages, kv_axes),
        shard(last_token, ("slots",)),
        SamplingState(*(shard(one, ("slots", "vocab")) for one in sampling)),
    )


def run_step(
    model: Transformer, state: DeviceState, packed: Int[Array, " size"], shape: StepShape, row_pages: int,
    num_logprobs: int,
) -> tuple[DeviceState, StepOutputs]:
    """One ragged step: forward pass, sampling, and the tokens stored for the next step to pick up."""
    inputs = unpack(packed, shape, row_pages)
    rows = inputs.rows
    known = inputs.batch.tokens[: shape.num_rows]  # decode rows come first: row s owns token s
    fed = jnp.where(inputs.from_device[: shape.num_rows], state.last_token[rows.slot], known)
    batch = inputs.batch._replace(tokens=inputs.batch.tokens.at[: shape.num_rows].set(fed))

    hidden, kv_pages = model(state.kv_pages, batch)
    logits = model.logits(last_hidden(hidden, batch.cu_q_lens))
    whole = Vocabulary(size=model.config.vocab_size)
    token, logprobs, sampling = sample(
        logits, rows, inputs.flags, state.sampling, num_logprobs=num_logprobs, vocabulary=whole
    )
    of_prompt = prompt_logprobs(
        hidden, inputs.prompt_targets, inputs.flags.prompt_logprobs, model.logits, num_logprobs=num_logprobs,
        vocabulary=whole,
    )  # fmt: skip
    last_token = state.last_token.at[rows.slot].set(jnp.where(rows.samples, token, state.last_token[rows.slot]))
    return DeviceState(kv_pages, last_token, sampling), StepOutputs(token, logprobs, of_prompt)


def set_bias(bias: Float[Array, "U V"], slot: Int[Array, ""], row: Float[Array, " V"]) -> Float[Array, "U V"]:
    return bias.at[slot].set(row)


def set_counts(
    seen: Bool[Array, "U V"], counts: Int[Array, "U V"], slot: Int[Array, ""], prompt_row: Bool[Array, " V"],
    output_row: Int[Array, " V"],
) -> tuple[Bool[Array, "U V"], Int[Array, "U V"]]:
    return seen.at[slot].set(prompt_row), counts.at[slot].set(output_row)
