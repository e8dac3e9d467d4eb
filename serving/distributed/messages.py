"""What the hosts of one service say to each other: MessagePack in frames, over one TCP connection for each follower.

    follower                          leader (host 0)
      Hello: rank, fingerprint  ----->
                                <-----  Welcome, or Refused: the line to end with
      Mine: a value to agree on ----->
                                <-----  Agreed: the value that all take
                                <-----  Step, Step, ...
      Failed: the line          ----->
                                <-----  Goodbye: the service ends; a line if not by intention
    both: Beat, every second
"""

import struct
from typing import Any

import msgspec

PROTOCOL = 1
HEADER = struct.Struct("<I")  # the length of the frame that follows
LARGEST_FRAME = 1 << 30
LARGEST_HELLO = 1 << 20  # before it is known who is there


class Hello(msgspec.Struct, frozen=True, tag=True):
    rank: int
    fingerprint: dict[str, str]
    protocol: int = PROTOCOL


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """All hosts are there, and alike."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The service cannot start as configured."""

    message: str


class Mine(msgspec.Struct, frozen=True, tag=True):
    name: str
    value: Any


class Agreed(msgspec.Struct, frozen=True, tag=True):
    name: str
    value: Any


class Write(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A `SlotUpdate`, and whose: the data group that owns the slot. Arrays travel as the bytes of int32."""

    group: int
    slot: int
    logit_bias: dict[int, float]
    banned: bytes
    allowed: bytes | None
    reset_counts: bool
    prompt: bytes
    output: bytes


class Mask(msgspec.Struct, frozen=True):
    """Which tokens may follow at each position of a row, by its slot among those of all groups."""

    slot: int
    positions: int
    words: bytes  # int32


class Step(msgspec.Struct, frozen=True, tag=True):
    """Everything a host needs to run the step that host 0 runs: the slots to write first, the shape, the vector."""

    shape: tuple[int, ...]  # the fields of `StepShape`
    packed: bytes
    writes: list[Write] = []
    masks: list[Mask] = []


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Instead of anything else, even of Hello."""

    rank: int
    message: str


class Beat(msgspec.Struct, frozen=True, tag=True):
    pass


class Goodbye(msgspec.Struct, frozen=True, tag=True):
    message: str = ""


FromFollower = Hello | Mine | Failed | Beat
FromLeader = Welcome | Refused | Agreed | Step | Goodbye | Beat
