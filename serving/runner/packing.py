"""One step as one int32 vector for each data group: a single host-to-device copy carries everything the step needs.

Axis letters: G data groups; T tokens, S rows of a group; M pages of the longest row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

from model.batch import StepBatch
from model.sampling import SamplingFlags, SamplingRows
from model.verification import DraftRows
from serving.engine.plan import GroupPlan, RowPlan, SlotUpdate, StepPlan
from serving.request import SamplingParams
from serving.runner.shapes import StepShape

FROM_DEVICE = -1  # in `tokens`: the slot's last sampled token
_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
_PARAMS = 3 + len(_FLOATS)  # seed high, seed low, top_k, floats


class StepInputs(NamedTuple):
    """What the devices see of a packed step, group after group."""

    batch: StepBatch
    rows: SamplingRows  # [G S]
    flags: Bool[Array, "G n"]  # of SamplingFlags; the same for all groups
    targets: Int[Array, " GT"]
    from_device: Bool[Array, " GT"]
    drafts: DraftRows | None  # [G S]; None: the shape has none


def _layout(shape: StepShape, row_pages: int) -> dict[str, tuple[int, ...]]:
    """Sections of the vector, in order."""
    T, S = shape.num_tokens, shape.num_rows
    sections: dict[str, tuple[int, ...]] = {
        "tokens": (T,),
        "targets": (T,),
        "page_table": (S, row_pages),
        "kv_lens": (S,),
        "cu_q_lens": (S + 1,),
        "distribution": (3,),
        "slots": (S,),
        "samples": (S,),
        "masked": (S,),
        "output_index": (S,),
        "params": (S, _PARAMS),
        "flags": (len(SamplingFlags._fields),),
    }
    if shape.num_drafts:
        sections |= {"num_drafts": (S,), "following": (S,)}
    if shape.tree_words:
        sections["parents"] = S, shape.num_drafts
    return sections


def packed_size(shape: StepShape, row_pages: int) -> int:
    return sum(int(np.prod(dims)) for dims in _layout(shape, row_pages).values())


def pack_params(sampling: SamplingParams) -> np.ndarray:
    """A request's constant sampling fields as one int32 row; floats by their bits."""
    seed = sampling.seed or 0
    words = np.array([(seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32).view(np.int32)
    floats = np.array([getattr(sampling, name) for name in _FLOATS], np.float32)
    return np.concatenate([words, [np.int32(max(sampling.top_k, 0))], floats.view(np.int32)])


@dataclass(frozen=True)
class PackedStep:
    """All that a host needs to run a step."""

    shape: StepShape
    packed: Int[np.ndarray, "G size"]
    updates: Sequence[tuple[int, SlotUpdate]]  # and the data group of each
    # Slot, of those of all groups, and the tokens that may follow: int32 [sampled, V / 32 rounded up], sampled as in
    # `shape` or fewer.
    masks: Sequence[tuple[int, np.ndarray]] = ()


class Packer:
    """Packs plans, remembering what does not change from step to step: each slot's sampling fields."""

    def __init__(self, *, num_groups: int, max_num_seqs: int, row_pages: int):
        self.row_pages, self.spare_slot = row_pages, max_num_seqs
        self._owner: list[list[str | None]] = [[None] * max_num_seqs for _ in range(num_groups)]
        self._params = np.zeros((num_groups, max_num_seqs, _PARAMS), np.int32)

    def pack(self, plan: StepPlan, shape: StepShape, biased_slots: Sequence[Sequence[bool]]) -> np.ndarray:
        """A fresh array [G, size] (the device may still read the last one). biased_slots: of each group.

        Padding rows use the spare slot and no tokens."""
        packed = np.zeros((len(plan.groups), packed_size(shape, self.row_pages)), np.int32)
        flags = np.zeros(len(SamplingFlags._fields), bool)
        for index, group in enumerate(plan.groups):
            self._pack_group(_split(packed[index], shape, self.row_pages), index, group)
            flags |= _flags(group.rows, biased_slots[index])
        _split(packed, shape, self.row_pages)["flags"][:] = flags  # devices of different groups take the same branches
        return packed

    def _pack_group(self, part: dict[str, np.ndarray], index: int, group: GroupPlan) -> None:
        rows, count = group.rows, len(group.rows)
        slots = [row.slot for row in rows]
        owner, params = self._owner[index], self._params[index]
        for row in rows:
            if owner[row.slot] != row.request_id:
                owner[row.slot] = row.request_id
                params[row.slot] = pack_params(row.sampling)
        part["slots"][:] = self.spare_slot
        part["slots"][:count] = slots
        part["params"][:count] = params[slots]
        part["samples"][:count] = [row.samples for row in rows]
        part["masked"][:count] = [row.mask is not None for row in rows]
        part["output_index"][:count] = [row.output_index for row in rows]
        lengths = [row.num_tokens for row in rows]
        part["kv_lens"][:count] = [row.start + row.num_tokens for row in rows]
        part["cu_q_lens"][1 : count + 1] = np.cumsum(lengths)
        part["cu_q_lens"][count + 1 :] = part["cu_q_lens"][count]
        part["distribution"][:] = (group.num_decode, group.num_decode, count)
        at = 0
        for place, row in enumerate(rows):
            part["page_table"][place, : len(row.page_ids)] = row.page_ids
            part["tokens"][at : at + row.num_tokens] = FROM_DEVICE if row.token_ids is None else row.token_ids
            if row.targets is not None:
                part["targets"][at : at + len(row.targets)] = row.targets
            at += row.num_tokens
        if "num_drafts" in part:
            part["num_drafts"][:count] = [row.num_drafts for row in rows]
            part["following"][:count] = [row.following for row in rows]
        for place, row in enumerate(rows if "parents" in part else ()):
            if row.draft is not None:
                part["parents"][place, : row.num_drafts] = row.draft.parent_of


def _flags(rows: Sequence[RowPlan], biased_slots: Sequence[bool]) -> np.ndarray:
    """In the order of SamplingFlags' fields."""
    sampled = [row.sampling for row in rows if row.samples]
    drawn = [sampling for sampling in sampled if sampling.temperature > 0]
    flags = dict(
        random=bool(drawn),
        top_k=any(sampling.top_k > 0 for sampling in drawn),
        top_p=any(sampling.top_p < 1 for sampling in drawn),
        biased=any(biased_slots[row.slot] for row in rows),
        penalized=any(sampling.is_penalized for sampling in sampled),
        logprobs=any(sampling.logprobs is not None for sampling in sampled),
        masked=any(row.mask is not None for row in rows),
        target_logprobs=any(row.targets is not None for row in rows),
    )
    return np.array([flags[name] for name in SamplingFlags._fields])


def _split(packed, shape: StepShape, row_pages: int) -> dict:
    """Views of the sections, for numpy and jax arrays alike, of one group or of all: [..., size]."""
    parts, at = {}, 0
    for name, dims in _layout(shape, row_pages).items():
        size = int(np.prod(dims))
        parts[name] = packed[..., at : at + size].reshape(*packed.shape[:-1], *dims)
        at += size
    return parts


def unpack(packed: Int[Array, "G size"], shape: StepShape, row_pages: int) -> StepInputs:
    """Inside the jitted step."""
    of_groups = _split(packed, shape, row_pages)
    positions = jax.vmap(partial(_positions, shape.num_tokens))(of_groups["cu_q_lens"], of_groups["kv_lens"])
    part = {name: x.reshape(-1, *x.shape[2:]) for name, x in of_groups.items()}
    params = part["params"]
    floats = lax.bitcast_convert_type(params[:, 3:], jnp.float32)
    rows = SamplingRows(
        slot=part["slots"],
        samples=part["samples"].astype(bool),
        masked=part["masked"].astype(bool),
        output_index=part["output_index"],
        seed=params[:, :2],
        top_k=params[:, 2],
        **{name: floats[:, index] for index, name in enumerate(_FLOATS)},
    )
    batch = StepBatch(
        tokens=jnp.maximum(part["tokens"], 0),
        positions=positions.reshape(-1),
        page_table=part["page_table"],
        kv_lens=part["kv_lens"],
        cu_q_lens=part["cu_q_lens"],
        distribution=part["distribution"],
    )
    flags, from_device = of_groups["flags"].astype(bool), part["tokens"] == FROM_DEVICE
    drafts = None
    if shape.num_drafts:
        parents = part["parents"] if shape.tree_words else None
        drafts = DraftRows(part["num_drafts"], part["following"], parents)
    return StepInputs(batch, rows, flags, part["targets"], from_device, drafts)


def _positions(num_tokens: int, cu_q_lens: Int[Array, " S+1"], kv_lens: Int[Array, " S"]) -> Int[Array, " T"]:
    """Until a cache can be compacted, a token's position is its index in the cache. Padding stays at 0."""
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(cu_q_lens[1:], token, side="right"), len(kv_lens) - 1)
    return jnp.where(token < cu_q_lens[-1], kv_lens[row] - cu_q_lens[row + 1] + token, 0)
