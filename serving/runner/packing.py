"""One step as one int32 vector: a single host-to-device copy carries everything the jitted step needs.

Axis letters: T tokens, S rows, M pages of the longest row.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

from model.batch import StepBatch
from model.sampling import SamplingFlags, SamplingRows
from serving.engine.plan import RowPlan, StepPlan
from serving.request import SamplingParams
from serving.runner.shapes import StepShape

FROM_DEVICE = -1  # in `tokens`: the slot's last sampled token
_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
_PARAMS = 3 + len(_FLOATS)  # seed high, seed low, top_k, floats


class StepInputs(NamedTuple):
    """What the device sees of a packed step."""

    batch: StepBatch
    rows: SamplingRows
    flags: SamplingFlags
    prompt_targets: Int[Array, " T"]
    from_device: Bool[Array, " T"]


def _layout(shape: StepShape, row_pages: int) -> dict[str, tuple[int, ...]]:
    """Sections of the vector, in order."""
    T, S = shape.num_tokens, shape.num_rows
    return {
        "tokens": (T,),
        "prompt_targets": (T,),
        "page_table": (S, row_pages),
        "kv_lens": (S,),
        "cu_q_lens": (S + 1,),
        "distribution": (3,),
        "slots": (S,),
        "samples": (S,),
        "output_index": (S,),
        "params": (S, _PARAMS),
        "flags": (len(SamplingFlags._fields),),
    }


def packed_size(shape: StepShape, row_pages: int) -> int:
    return sum(int(np.prod(dims)) for dims in _layout(shape, row_pages).values())


def pack_params(sampling: SamplingParams) -> np.ndarray:
    """A request's constant sampling fields as one int32 row; floats by their bits."""
    seed = sampling.seed or 0
    words = np.array([(seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32).view(np.int32)
    floats = np.array([getattr(sampling, name) for name in _FLOATS], np.float32)
    return np.concatenate([words, [np.int32(max(sampling.top_k, 0))], floats.view(np.int32)])


def is_penalized(sampling: SamplingParams) -> bool:
    return bool(sampling.frequency_penalty or sampling.presence_penalty or sampling.repetition_penalty != 1.0)


class Packer:
    """Packs plans, remembering what does not change from step to step: each slot's sampling fields."""

    def __init__(self, *, max_num_seqs: int, row_pages: int):
        self.row_pages, self.spare_slot = row_pages, max_num_seqs
        self._owner: list[str | None] = [None] * max_num_seqs
        self._params = np.zeros((max_num_seqs, _PARAMS), np.int32)

    def pack(self, plan: StepPlan, shape: StepShape, biased_slots: Sequence[bool]) -> np.ndarray:
        """A fresh vector (the device may still read the last one). Padding rows use the spare slot and no tokens."""
        vector = np.zeros(packed_size(shape, self.row_pages), np.int32)
        part = _split(vector, shape, self.row_pages)
        (group,) = plan.groups
        rows, count = group.rows, len(group.rows)
        slots = [row.slot for row in rows]
        for row in rows:
            if self._owner[row.slot] != row.request_id:
                self._owner[row.slot] = row.request_id
                self._params[row.slot] = pack_params(row.sampling)
        part["slots"][:] = self.spare_slot
        part["slots"][:count] = slots
        part["params"][:count] = self._params[slots]
        part["samples"][:count] = [row.samples for row in rows]
        part["output_index"][:count] = [row.output_index for row in rows]
        lengths = [row.num_tokens for row in rows]
        part["kv_lens"][:count] = [row.start + row.num_tokens for row in rows]
        part["cu_q_lens"][1 : count + 1] = np.cumsum(lengths)
        part["cu_q_lens"][count + 1 :] = part["cu_q_lens"][count]
        part["distribution"][:] = (group.num_decode, group.num_decode, count)
        at = 0
        for index, row in enumerate(rows):
            part["page_table"][index, : len(row.page_ids)] = row.page_ids
            part["tokens"][at : at + row.num_tokens] = FROM_DEVICE if row.token_ids is None else row.token_ids
            if row.prompt_targets is not None:
                part["prompt_targets"][at : at + len(row.prompt_targets)] = row.prompt_targets
            at += row.num_tokens
        part["flags"][:] = _flags(rows, biased_slots)
        return vector


def _flags(rows: Sequence[RowPlan], biased_slots: Sequence[bool]) -> list[bool]:
    """In the order of SamplingFlags' fields."""
    sampled = [row.sampling for row in rows if row.samples]
    drawn = [sampling for sampling in sampled if sampling.temperature > 0]
    flags = dict(
        random=bool(drawn),
        top_k=any(sampling.top_k > 0 for sampling in drawn),
        top_p=any(sampling.top_p < 1 for sampling in drawn),
        biased=any(biased_slots[row.slot] for row in rows),
        penalized=any(is_penalized(sampling) for sampling in sampled),
        logprobs=any(sampling.logprobs is not None for sampling in sampled),
        prompt_logprobs=any(row.prompt_targets is not None for row in rows),
    )
    return [flags[name] for name in SamplingFlags._fields]


def _split(vector, shape: StepShape, row_pages: int) -> dict:
    """Views of the sections, for numpy and jax arrays alike."""
    parts, at = {}, 0
    for name, dims in _layout(shape, row_pages).items():
        size = int(np.prod(dims))
        parts[name] = vector[at : at + size].reshape(dims)
        at += size
    return parts


def unpack(vector: Int[Array, " size"], shape: StepShape, row_pages: int) -> StepInputs:
    """Inside the jitted step."""
    part = _split(vector, shape, row_pages)
    params = part["params"]
    floats = lax.bitcast_convert_type(params[:, 3:], jnp.float32)
    rows = SamplingRows(
        slot=part["slots"],
        samples=part["samples"].astype(bool),
        output_index=part["output_index"],
        seed=params[:, :2],
        top_k=params[:, 2],
        **{name: floats[:, index] for index, name in enumerate(_FLOATS)},
    )
    cu_q_lens, kv_lens = part["cu_q_lens"], part["kv_lens"]
    token = jnp.arange(shape.num_tokens, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(cu_q_lens[1:], token, side="right"), shape.num_rows - 1)
    # Until a cache can be compacted, a token's position is its index in the cache. Padding stays at 0.
    positions = jnp.where(token < cu_q_lens[-1], kv_lens[row] - cu_q_lens[row + 1] + token, 0)
    batch = StepBatch(
        tokens=jnp.maximum(part["tokens"], 0),
        positions=positions,
        page_table=part["page_table"],
        kv_lens=kv_lens,
        cu_q_lens=cu_q_lens,
        distribution=part["distribution"],
    )
    flags = SamplingFlags(*(part["flags"][index].astype(bool) for index in range(len(SamplingFlags._fields))))
    return StepInputs(batch, rows, flags, part["prompt_targets"], part["tokens"] == FROM_DEVICE)
