"""The closed shape set, and that a packed step unpacks to what the plan said."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.sampling import SamplingFlags
from serving.engine.plan import GroupPlan, RowPlan, StepPlan
from serving.errors import ConfigError
from serving.request import SamplingParams
from serving.runner.memory import MemoryPlan
from serving.runner.packing import Packer, unpack
from serving.runner.shapes import DraftShapes, StepShape, pick_shape, step_shapes

ROW_PAGES = 6


def test_the_set_for_a_small_server():
    assert step_shapes(8, 100) == (
        StepShape(2, 2), StepShape(4, 4), StepShape(8, 8), StepShape(32, 8), StepShape(64, 8), StepShape(128, 8),
    )  # fmt: skip


def test_the_set_for_small_steps():
    assert step_shapes(3, 32) == (StepShape(2, 2), StepShape(4, 4), StepShape(32, 4))
    assert step_shapes(3, 33)[-1] == StepShape(64, 4) and step_shapes(9, 32)[-1] == StepShape(64, 16)


def test_the_set_with_drafts():
    """Each length has its decode shapes, up to the budget; mixed steps come without drafts, too."""
    decode, drafts = (StepShape(2, 2), StepShape(4, 4)), DraftShapes(lengths=(1, 20))
    of_one = (StepShape(2, 1, num_drafts=1), StepShape(4, 2, num_drafts=1), StepShape(8, 4, num_drafts=1))
    verifying = (*of_one, StepShape(21, 1, num_drafts=20), StepShape(42, 2, num_drafts=20))
    mixed = (StepShape(32, 4), StepShape(32, 4, num_drafts=20), StepShape(64, 4), StepShape(64, 4, num_drafts=20))
    assert step_shapes(4, 40, drafts=drafts) == (*decode, *verifying, *mixed)
    assert pick_shape(step_shapes(4, 40, drafts=drafts), [[1]]) == StepShape(2, 2)  # not the one for a draft
    drafts = DraftShapes(lengths=(1, 20), always=True)
    assert step_shapes(4, 40, drafts=drafts) == (*decode, *verifying, *mixed[1::2])


@given(num_seqs=st.integers(1, 40), extra=st.integers(0, 300), most=st.integers(1, 30), data=st.data())
def test_every_step_with_drafts_has_a_shape(num_seqs, extra, most, data):
    shapes = step_shapes(num_seqs, num_seqs + extra, drafts=DraftShapes(lengths=tuple(sorted({1, most}))))
    lengths, budget = [1] * data.draw(st.integers(1, num_seqs)), num_seqs + extra
    drafts = 0
    for row in range(len(lengths)):
        longer = data.draw(st.integers(0, min(most, budget - sum(lengths))))
        lengths[row], drafts = 1 + longer, max(drafts, longer)
    shape = pick_shape(shapes, [lengths], num_drafts=drafts)
    assert shape.holds(lengths) and shape.num_drafts >= drafts
    known = pick_shape(shapes, [lengths])  # the same tokens without drafts
    assert known.holds(lengths) and cost(known) <= cost(shape)


def cost(shape: StepShape) -> int:
    return shape.num_tokens + shape.num_rows * shape.num_sampled


@pytest.mark.parametrize("lengths, shape", [
    ([9] * 3, StepShape(36, 4, num_drafts=8)), ([9] * 5, StepShape(72, 8, num_drafts=8)),
    ([9] * 14, StepShape(144, 16, num_drafts=8)), ([2] * 20, StepShape(64, 32, num_drafts=1)),
    ([40] + [9] * 2, StepShape(72, 8, num_drafts=8)), ([40, 1, 1], StepShape(64, 32)), ([20, 1], StepShape(32, 8)),
], ids=str)  # fmt: skip
def test_few_rows_with_drafts_are_not_verified_as_many(lengths: list[int], shape: StepShape):
    """64 tokens x 32 rows would hold 7 x 9, and sample after 288 tokens: more than twice the time of 72 x 8."""
    shapes = step_shapes(32, 512, drafts=DraftShapes(lengths=(1, 8)))
    drafts = 0 if shape.num_drafts == 0 else min(lengths[-1] - 1, 8)
    assert pick_shape(shapes, [lengths], num_drafts=drafts) == shape


@given(max_num_seqs=st.integers(1, 300), extra=st.integers(0, 5000), data=st.data())
def test_every_legal_step_has_a_shape(max_num_seqs, extra, data):
    shapes = step_shapes(max_num_seqs, max_num_seqs + extra)
    rows = data.draw(st.integers(0, max_num_seqs))
    tokens = data.draw(st.integers(rows, max_num_seqs + extra)) if rows else 0
    lengths = [1] * (rows - 1) + [tokens - rows + 1] if rows else []
    shape = pick_shape(shapes, [lengths, []])
    assert shape.num_tokens >= tokens and shape.num_rows >= rows
    if shape.num_tokens == shape.num_rows:
        assert tokens == rows  # decode shapes hold decode rows only


def test_a_step_beyond_every_shape_is_an_error():
    with pytest.raises(ValueError, match="no compiled shape holds 129 tokens of 3 rows"):
        pick_shape(step_shapes(8, 128), [[1], [1, 1, 127]])


def row(slot: int, start: int, tokens, **fields) -> RowPlan:
    length = 1 if tokens is None else len(tokens)
    pages = np.arange(1, 1 + -(-(start + length) // 16), dtype=np.int32) + 10 * slot
    sampling = fields.pop("sampling", SamplingParams())
    return RowPlan(**(dict(request_id=f"r{slot}", slot=slot, token_ids=tokens, start=start, num_tokens=length,
                           page_ids=pages, sampling=sampling, samples=True, output_index=start) | fields))  # fmt: skip


def one_group(**plan) -> StepPlan:
    return StepPlan(groups=[GroupPlan(**plan)])


def unpacked(packer: Packer, plan: StepPlan, shape: StepShape, biased=(False,) * 4):
    packed = packer.pack(plan, shape, [biased] * len(plan.groups))
    return jax.tree.map(np.asarray, jax.jit(lambda x: unpack(x, shape, ROW_PAGES))(packed))


def test_round_trip():
    packer = Packer(num_groups=1, max_num_seqs=4, row_pages=ROW_PAGES)
    sampling = SamplingParams(temperature=0.7, top_k=-1, top_p=0.9, min_p=0.1, seed=-3, frequency_penalty=-1.5)
    plan = one_group(num_decode=2, rows=[
        row(3, 40, None, sampling=sampling), row(0, 7, [123]), row(1, 16, [5, 6, 7], samples=False),
    ])  # fmt: skip
    got = unpacked(packer, plan, StepShape(8, 4))
    batch, rows = got.batch, got.rows
    assert batch.tokens.tolist() == [0, 123, 5, 6, 7, 0, 0, 0]
    assert got.from_device.tolist() == [True] + [False] * 7
    assert batch.positions.tolist() == [40, 7, 16, 17, 18, 0, 0, 0]
    assert batch.kv_lens.tolist() == [41, 8, 19, 0]
    assert batch.cu_q_lens.tolist() == [0, 1, 2, 5, 5]
    assert batch.distribution.tolist() == [2, 2, 3]
    assert batch.page_table[0].tolist() == [31, 32, 33, 0, 0, 0]
    assert rows.slot.tolist() == [3, 0, 1, 4]  # padding uses the spare slot
    assert rows.samples.tolist() == [True, True, False, False]
    assert rows.output_index.tolist() == [40, 7, 16, 0]
    assert rows.temperature[0] == np.float32(0.7) and rows.top_k[0] == 0 and rows.top_p[0] == np.float32(0.9)
    assert rows.frequency_penalty[0] == np.float32(-1.5)
    assert rows.seed[0].view(np.uint32).tolist() == [0xFFFFFFFF, 0xFFFFFFFD]
    flags = SamplingFlags(*got.flags[0])
    assert flags.random and flags.top_p and flags.penalized and not flags.top_k and not flags.biased


def test_flags_follow_only_rows_that_sample():
    packer = Packer(num_groups=1, max_num_seqs=4, row_pages=ROW_PAGES)
    asks = SamplingParams(temperature=1.0, top_k=5, logprobs=2, presence_penalty=1.0)
    plan = one_group(num_decode=0, rows=[row(0, 0, [1, 2], sampling=asks, samples=False)])
    flags = SamplingFlags(*unpacked(packer, plan, StepShape(8, 4), biased=(True, False, False, False)).flags[0])
    assert flags.biased and not (flags.random or flags.top_k or flags.logprobs or flags.penalized)


def test_groups_lie_one_after_the_other_and_take_the_same_branches():
    packer = Packer(num_groups=3, max_num_seqs=4, row_pages=ROW_PAGES)
    one = GroupPlan(num_decode=1, rows=[row(2, 9, [7], sampling=SamplingParams(top_k=3, temperature=1.0))])
    two = GroupPlan(num_decode=0, rows=[row(2, 4, [8, 9], sampling=SamplingParams(temperature=0))])
    got = unpacked(packer, StepPlan(groups=[one, GroupPlan(), two]), StepShape(4, 2))
    assert got.batch.tokens.tolist() == [7, 0, 0, 0] + [0] * 4 + [8, 9, 0, 0]
    assert got.batch.positions.tolist() == [9, 0, 0, 0] + [0] * 4 + [4, 5, 0, 0]
    assert got.batch.kv_lens.tolist() == [10, 0, 0, 0, 6, 0]
    assert got.batch.cu_q_lens.tolist() == [0, 1, 1, 0, 0, 0, 0, 2, 2]  # of each group from 0
    assert got.batch.distribution.tolist() == [1, 1, 1, 0, 0, 0, 0, 0, 1]
    assert got.rows.slot.tolist() == [2, 4, 4, 4, 2, 4]
    assert got.rows.temperature[[0, 4]].tolist() == [1.0, 0.0]
    assert (got.flags == got.flags[0]).all() and SamplingFlags(*got.flags[0]).top_k


def test_a_slot_forgets_its_last_owner():
    packer = Packer(num_groups=1, max_num_seqs=4, row_pages=ROW_PAGES)
    first = one_group(num_decode=1, rows=[row(0, 3, [1], sampling=SamplingParams(temperature=0.25))])
    unpacked(packer, first, StepShape(2, 2))
    other = row(0, 3, [1], request_id="other", sampling=SamplingParams(temperature=2.0))
    second = one_group(num_decode=1, rows=[other])
    assert unpacked(packer, second, StepShape(2, 2)).rows.temperature[0] == 2.0


def test_memory_plan():
    plan = MemoryPlan(limit=10_000_000, share=0.5, fixed=1_000_000, temporary=500_000, page=1000)
    assert 3400 <= plan.num_pages <= 3500
    with pytest.raises(ConfigError, match="does not fit: weights and state take 0.00 GB"):
        _ = MemoryPlan(limit=1_000_000, share=0.5, fixed=600_000, temporary=0, page=1000).num_pages
