"""A packed step as a message, and back. Arrays travel as the bytes of int32 in this machine's order."""

from dataclasses import astuple

import numpy as np

from serving.distributed.messages import Mask, Step, Write
from serving.engine.plan import SlotUpdate, Tokens
from serving.runner.packing import PackedStep
from serving.runner.shapes import StepShape


def to_message(step: PackedStep) -> Step:
    writes = [
        Write(
            group=group,
            slot=update.slot,
            logit_bias=dict(update.logit_bias),
            banned=_bytes(update.banned_token_ids),
            allowed=None if update.allowed_token_ids is None else _bytes(update.allowed_token_ids),
            reset_counts=update.reset_counts,
            prompt=_bytes(update.prompt_token_ids),
            output=_bytes(update.output_token_ids),
        )
        for group, update in step.updates
    ]
    masks = [Mask(slot, len(mask), _bytes(mask)) for slot, mask in step.masks]
    return Step(astuple(step.shape), _bytes(step.packed), writes, masks)


def from_message(message: Step, num_groups: int) -> PackedStep:
    updates = [
        (
            write.group,
            SlotUpdate(
                slot=write.slot,
                logit_bias=write.logit_bias,
                banned_token_ids=_ints(write.banned).tolist(),
                allowed_token_ids=None if write.allowed is None else _ints(write.allowed).tolist(),
                reset_counts=write.reset_counts,
                prompt_token_ids=_ints(write.prompt),
                output_token_ids=_ints(write.output),
            ),
        )
        for write in message.writes
    ]
    packed = _ints(message.packed).reshape(num_groups, -1)
    masks = [(mask.slot, _ints(mask.words).reshape(mask.positions, -1)) for mask in message.masks]
    return PackedStep(StepShape(*message.shape), packed, updates, masks)


def _bytes(values: Tokens | np.ndarray) -> bytes:
    return np.ascontiguousarray(values, np.int32).tobytes()


def _ints(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.int32)
