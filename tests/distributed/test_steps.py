"""A packed step is the same after its way to another host."""

import msgspec
import numpy as np

from serving.distributed.messages import FromLeader
from serving.distributed.steps import from_message, to_message
from serving.engine.plan import SlotUpdate
from serving.runner.packing import PackedStep
from serving.runner.shapes import StepShape


def test_a_step_survives_its_way():
    updates = [
        (0, SlotUpdate(slot=3)),
        (1, SlotUpdate(slot=0, logit_bias={7: -1.5, 9: 100.0}, banned_token_ids=(2, 5), allowed_token_ids=[1, 2],
                       reset_counts=False)),
        (1, SlotUpdate(slot=1, allowed_token_ids=(), prompt_token_ids=np.array([4, 4, 1], np.int32),
                       output_token_ids=[8])),
    ]  # fmt: skip
    packed = np.random.default_rng(0).integers(-(2**31), 2**31, (2, 37)).astype(np.int32)
    masks = [(3, np.arange(8, dtype=np.int32).reshape(2, 4)), (5, np.full((1, 4), -1, np.int32))]
    shape = StepShape(32, 8, 4, num_drafts=3, tree_words=1)
    wire = msgspec.msgpack.encode(to_message(PackedStep(shape, packed, updates, masks)))
    step = from_message(msgspec.msgpack.decode(wire, type=FromLeader), num_groups=2)
    assert step.shape == shape
    assert [slot for slot, _ in step.masks] == [3, 5]
    for (_, got), (_, want) in zip(step.masks, masks, strict=True):
        np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(step.packed, packed)
    assert len(wire) < packed.nbytes + 500
    for (group, got), (same_group, want) in zip(step.updates, updates, strict=True):
        assert (group, got.slot, got.reset_counts) == (same_group, want.slot, want.reset_counts)
        assert got.logit_bias == want.logit_bias and list(got.banned_token_ids) == list(want.banned_token_ids)
        assert (got.allowed_token_ids is None) == (want.allowed_token_ids is None)
        assert list(got.allowed_token_ids or ()) == list(want.allowed_token_ids or ())
        assert list(got.prompt_token_ids) == list(want.prompt_token_ids)
        assert list(got.output_token_ids) == list(want.output_token_ids)
