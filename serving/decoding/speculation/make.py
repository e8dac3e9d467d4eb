"""The parts of speculation on the host, as a config asks for them."""

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


def make_length(config: SpeculativeConfig) -> DraftLength:
    if config.num_speculative_tokens_per_batch_size is not None:
        return TableLength(config.num_speculative_tokens_per_batch_size)
    if not config.adaptive:
        return FixedLength(config.most)
    return GoodputLength(config.lengths, on_device=not config.on_host)
