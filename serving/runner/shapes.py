"""The closed set of step shapes: everything the engine can run is compiled before it serves.

A shape is T tokens x S rows of each data group, padded up. T == S: decode rows only, one token each. T > S: anything,
unless its tokens are spread over a context axis: then T / context on each of its devices, and few chunks of prompts.
With speculation a shape also says how many drafts a row may have: as many more tokens of each row are sampled.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pallas_kernels.ring_attention.api import MAX_CHUNKS, tokens_needed

_UNIT = 16  # tokens of a spread step on a device come in multiples of it; one more holds what rows do not divide into


@dataclass(frozen=True, order=True)
class StepShape:
    num_tokens: int  # T
    num_rows: int  # S
    context: int = 1  # devices of the context axis that share out the tokens
    num_drafts: int = 0  # K, of a row
    tree_words: int = 0  # C, of the tree mask: trees are in a row's first 32 C tokens; 0: drafts are chains

    def __str__(self) -> str:
        spread = f", spread over context={self.context}" if self.context > 1 else ""
        drafts = f", {self.num_drafts} drafts a row" if self.num_drafts else ""
        return f"{self.num_tokens} tokens x {self.num_rows} rows{drafts}{spread}"

    @property
    def num_sampled(self) -> int:
        """Tokens of a row that a token is sampled after."""
        return self.num_drafts + 1

    def holds(self, lengths: Sequence[int]) -> bool:
        """lengths: tokens of each row of a group."""
        if len(lengths) > self.num_rows:
            return False
        if self.context == 1:
            return sum(lengths) <= self.num_tokens
        chunks = [length for length in lengths if length > 1]
        needed = tokens_needed(self.context, len(lengths) - len(chunks), chunks)
        return len(chunks) <= MAX_CHUNKS and needed <= self.num_tokens


@dataclass(frozen=True, kw_only=True)
class Spreading:
    """Steps of at least so many tokens of a group are spread over the devices of the context axis."""

    context: int
    threshold: int

    def holds(self, groups: Sequence[Sequence[int]]) -> bool:
        return max(map(sum, groups)) >= self.threshold


@dataclass(frozen=True, kw_only=True)
class DraftShapes:
    """How many drafts a row may have: one of these lengths, ascending, or none."""

    lengths: tuple[int, ...] = ()
    tree_words: int = 0
    always: bool = False  # a drafter on the device, which has to see every chunk of a prompt and is never off
    adaptive: bool = False  # the number is chosen by how long steps take

    @property
    def most(self) -> int:
        return max(self.lengths, default=0)


def step_shapes(
    max_num_seqs: int, max_num_batched_tokens: int, spreading: Spreading | None = None,
    drafts: DraftShapes = DraftShapes(),
) -> tuple[StepShape, ...]:  # fmt: skip
    """Powers of two: decode shapes from 2 rows (one-row products are slow on CPU), and for each number of drafts those
    that verify so many in every row; a small mixed shape, so that a short prompt on an idle server is quick; mixed
    shapes with all rows, where steps may be larger. The largest comes last.
    """
    rows, most = _powers(2, max_num_seqs), most_rows(max_num_seqs)
    tokens = _powers(max(2 * most, 64), max(max_num_batched_tokens, 2 * most))
    verified = dict(num_drafts=drafts.most, tree_words=drafts.tree_words)
    # Sampling after K drafts in all rows costs as much as a small step: chunks of prompts are spared it where nothing
    # is drafted.
    kinds = [verified] if drafts.always or not drafts.lengths else [{}, verified]
    mixed = [StepShape(32, min(most, 8), **kind) for kind in kinds]
    if mixed[0].num_rows < most or mixed[0].num_tokens < max_num_batched_tokens:
        mixed += [StepShape(t, most, **kind) for kind in kinds for t in tokens]
    verifying = [StepShape(r * (k + 1), r, num_drafts=k, tree_words=drafts.tree_words)
                 for k in drafts.lengths for r in (1, *rows) if r * (k + 1) <= tokens[-1]]  # fmt: skip
    return (*(StepShape(r, r) for r in rows), *verifying, *_spread(tokens, most, spreading, verified), *mixed)


def most_rows(max_num_seqs: int) -> int:
    """Of a step, of a data group."""
    return _powers(2, max_num_seqs)[-1]


def _spread(tokens: Sequence[int], rows: int, spreading: Spreading | None, verified: dict[str, int]
            ) -> list[StepShape]:  # fmt: skip
    if spreading is None:
        return []
    devices, wanted = spreading.context, [t for t in tokens if t >= spreading.threshold]
    return [StepShape(devices * _UNIT * (-(-t // (devices * _UNIT)) + 1), rows, devices, **verified) for t in wanted]


def pick_shape(
    shapes: Sequence[StepShape], groups: Sequence[Sequence[int]], spreading: Spreading | None = None,
    num_drafts: int = 0,
) -> StepShape:  # fmt: skip
    """The cheapest shape that holds the rows of every data group, of which the tokens are given, with so many drafts
    in a row; spread where that is wanted and possible. Sampling after a token is taken to cost what the token costs:
    it goes through the vocabulary's matrix, as large as a small model's layers. Raises ValueError if no shape does: the
    scheduler broke its limits.
    """
    decode_only = all(length == 1 for lengths in groups for length in lengths)
    spread = spreading is not None and not decode_only and spreading.holds(groups)
    fitting = [
        shape for shape in shapes
        if (shape.context == 1 or spread)
        and (shape.num_tokens > shape.num_rows or decode_only)
        and shape.num_drafts >= num_drafts
        and all(map(shape.holds, groups))
    ]  # fmt: skip
    if fitting:
        def cost(shape: StepShape) -> tuple[bool, int, int]:
            num_sampled = shape.num_rows * shape.num_sampled
            return spread and shape.context == 1, shape.num_tokens + num_sampled, shape.num_drafts

        return min(fitting, key=cost)
    num_tokens, num_rows = max(map(sum, groups)), max(map(len, groups))
    raise ValueError(f"no compiled shape holds {num_tokens} tokens of {num_rows} rows; the largest is {shapes[-1]}")


def _powers(first: int, last: int) -> list[int]:
    """first, 2 first, 4 first, ... until `last` is covered."""
    sizes = [first]
    while sizes[-1] < last:
        sizes.append(sizes[-1] * 2)
    return sizes
