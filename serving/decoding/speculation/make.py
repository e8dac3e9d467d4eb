"""The parts of speculation on the host, as a config asks for them."""

from collections.abc import Mapping

from serving.decoding.speculation.adaptive import GoodputLength
from serving.decoding.speculation.config import SpeculativeConfig
from serving.decoding.speculation.drafter import Drafter, DraftLength
from serving.decoding.speculation.lengths import FixedLength, TableLength
from serving.decoding.speculation.ngram import NgramDrafter
from serving.decoding.speculation.suffix import SuffixDrafter


def make_drafter(config: SpeculativeConfig) -> Drafter | None:
    """None: drafts come from the device."""
    if config.method == "ngram":
        return NgramDrafter(*config.lookup)
    return SuffixDrafter(config) if config.method == "suffix" else None


def make_length(config: SpeculativeConfig, decode_seconds: Mapping[tuple[int, int], float]) -> DraftLength:
    """decode_seconds: see `serving.engine.plan.Runner`."""
    if config.chooses_by_goodput:
        return GoodputLength(config.lengths, decode_seconds, on_device=not config.on_host)
    if config.num_speculative_tokens_per_batch_size is not None:
        return TableLength(config.num_speculative_tokens_per_batch_size)
    return FixedLength(config.most)
