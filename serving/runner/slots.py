"""Writes what slots keep of their requests on the device: biases, counted tokens, masks of grammars. Between steps."""

from collections.abc import Collection, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

from model.sampling import BANNED, SamplingState
from serving.engine.plan import SlotUpdate
from sharding.rules import AxisRules


class SlotWriter:
    """Its methods take the state, which is given up, and return the new one. Slots are those of all groups."""

    def __init__(self, rules: AxisRules, state: SamplingState, masks_at_once: Collection[int]):
        """state: shapes. masks_at_once: numbers of masks to compile for."""
        self._vocab_size = state.bias.shape[1]
        vector = partial(jax.ShapeDtypeStruct, sharding=rules.whole)
        slot = vector((), jnp.int32)
        floats, bools, ints = (vector((self._vocab_size,), dtype) for dtype in (jnp.float32, bool, jnp.int32))
        bias = jax.jit(partial(_set_bias, rules), donate_argnums=0, out_shardings=state.bias.sharding)
        counts = jax.jit(partial(_set_counts, rules), donate_argnums=(0, 1),
                         out_shardings=(state.prompt_seen.sharding, state.output_counts.sharding))
        masks = jax.jit(partial(_set_masks, rules), donate_argnums=0, out_shardings=state.mask.sharding)
        self._set_bias = bias.lower(state.bias, slot, floats).compile()
        self._set_counts = counts.lower(state.prompt_seen, state.output_counts, slot, bools, ints).compile()
        self._set_masks = {}
        for count in sorted(masks_at_once):
            slots, rows = vector((count,), jnp.int32), vector((count, *state.mask.shape[1:]), jnp.int32)
            self._set_masks[count] = masks.lower(state.mask, slots, rows).compile()

    def update(self, state: SamplingState, slot: int, update: SlotUpdate) -> SamplingState:
        row = np.zeros(self._vocab_size, np.float32)
        if update.allowed_token_ids is not None:
            row[:] = BANNED
            row[list(update.allowed_token_ids)] = 0
        for token, value in update.logit_bias.items():
            row[token] += value
        row[list(update.banned_token_ids)] = BANNED
        where = np.array(slot, np.int32)
        state = state._replace(bias=self._set_bias(state.bias, where, row))
        if not update.reset_counts:
            return state
        prompt = np.zeros(self._vocab_size, bool)
        prompt[np.asarray(update.prompt_token_ids, np.int32)] = True
        output = np.bincount(np.asarray(update.output_token_ids, np.int32), minlength=self._vocab_size)
        seen, counts = self._set_counts(state.prompt_seen, state.output_counts, where, prompt, output.astype(np.int32))
        return state._replace(prompt_seen=seen, output_counts=counts)

    def mask(self, state: SamplingState, masks: Sequence[tuple[int, np.ndarray]]) -> SamplingState:
        """masks: a slot, and the masks of its row's first positions [n, W]."""
        largest = max(self._set_masks)
        for first in range(0, len(masks), largest):
            some = masks[first : first + largest]
            count = min(count for count in self._set_masks if count >= len(some))
            slots = np.full(count, len(state.mask), np.int32)  # beyond the end: dropped
            rows = np.zeros((count, *state.mask.shape[1:]), np.int32)
            for place, (slot, mask) in enumerate(some):
                slots[place], rows[place, : len(mask)] = slot, mask
            state = state._replace(mask=self._set_masks[count](state.mask, slots, rows))
        return state

    def warm_up(self, state: SamplingState, slot: int) -> SamplingState:
        """Runs every executable once, on a slot that nobody uses."""
        state = self.update(state, slot, SlotUpdate(slot=slot))
        for count in self._set_masks:
            state = self.mask(state, [(slot, np.zeros((1, 1), np.int32))] * count)
        return state


def is_biased(update: SlotUpdate) -> bool:
    return bool(update.logit_bias or len(update.banned_token_ids) or update.allowed_token_ids is not None)


def _set_bias(rules: AxisRules, bias: Float[Array, "U V"], slot: Int[Array, ""], row: Float[Array, " V"]
             ) -> Float[Array, "U V"]:  # fmt: skip
    return _set_rows(rules, slot, (bias,), (row,))[0]


def _set_counts(
    rules: AxisRules, seen: Bool[Array, "U V"], counts: Int[Array, "U V"], slot: Int[Array, ""],
    prompt_row: Bool[Array, " V"], output_row: Int[Array, " V"],
) -> tuple[Bool[Array, "U V"], Int[Array, "U V"]]:
    seen, counts = _set_rows(rules, slot, (seen, counts), (prompt_row, output_row))
    return seen, counts


def _set_masks(rules: AxisRules, masks: Int[Array, "U J W"], slots: Int[Array, " n"], rows: Int[Array, "n J W"]
              ) -> Int[Array, "U J W"]:  # fmt: skip
    """Of several slots at once, of those of all groups."""
    shape, axes = masks.shape, ("slots", None, None)

    def set_rows(masks, slots, rows):
        here = slots - rules.place("slots", shape[0]) * len(masks)
        return (masks.at[jnp.where(here >= 0, here, len(masks))].set(rows, mode="drop"),)

    return rules.map_over_shards(set_rows, (masks, slots, rows), (axes, (), ()), (axes,), (shape,))[0]


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
