"""SentencePiece vocabularies as `tokenizers` objects, whether they come from a `tokenizer.model` or a GGUF.

One engine for all tokenizers keeps special tokens, files for other software and speed the same. The ids are those of
the SentencePiece library; tests compare them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors

from serving.errors import ConfigError

# Piece types, the same numbers in both file formats.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    pieces: Sequence[str]
    scores: Sequence[float]
    types: Sequence[int]
    kind: Literal["bpe", "unigram"] = "bpe"
    unknown_id: int = 0
    merges: Sequence[str] | None = None  # "left right", best first; None: recovered from the scores
    add_prefix_space: bool = True
    collapse_spaces: bool = False
    charsmap: bytes = b""  # compiled Unicode normalization


def read_model(path: Path) -> tuple[Vocabulary, int | None, int | None]:
    """A `tokenizer.model` file: its vocabulary, BOS id and EOS id. Raises ConfigError."""
    model = sentencepiece_model_pb2.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]
    try:
        model.ParseFromString(path.read_bytes())
    except (OSError, DecodeError) as error:
        raise ConfigError(f"{path}: not a SentencePiece model ({error})") from error
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    kinds: dict[int, Literal["bpe", "unigram"]] = {trainer.BPE: "bpe", trainer.UNIGRAM: "unigram"}
    if trainer.model_type not in kinds:
        raise ConfigError(f"{path}: SentencePiece model type {trainer.model_type} is not supported (BPE, unigram)")
    vocabulary = Vocabulary(
        pieces=[p.piece for p in model.pieces],
        scores=[p.score for p in model.pieces],
        types=[p.type for p in model.pieces],
        kind=kinds[trainer.model_type],
        unknown_id=trainer.unk_id,
        add_prefix_space=normalizer.add_dummy_prefix,
        collapse_spaces=normalizer.remove_extra_whitespaces,
        charsmap=normalizer.precompiled_charsmap,
    )
    bos_id, eos_id = (i if i >= 0 else None for i in (trainer.bos_id, trainer.eos_id))
    return vocabulary, bos_id, eos_id


def build(vocabulary: Vocabulary) -> Tokenizer:
    v = vocabulary
    byte_fallback = BYTE in v.types
    unknown = v.pieces[v.unknown_id]
    if v.kind == "bpe":
        ids = {piece: i for i, piece in enumerate(v.pieces)}
        merges = _merges(v, ids) if v.merges is None else merge_pairs(v.merges)
        model = models.BPE(vocab=ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=byte_fallback)
    else:
        model = models.Unigram(list(zip(v.pieces, v.scores, strict=True)), v.unknown_id, byte_fallback)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(_normalizers(v))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if v.add_prefix_space else []))
    add_marked_tokens(tokenizer, v.pieces, v.types)
    return tokenizer


def add_marked_tokens(tokenizer: Tokenizer, pieces: Sequence[str], types: Sequence[int]) -> None:
    """Control tokens are special (hidden from text on request); user-defined ones are only never split."""
    special = [p for p, kind in zip(pieces, types, strict=True) if kind in (CONTROL, UNKNOWN)]
    whole = [p for p, kind in zip(pieces, types, strict=True) if kind == USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(p, normalized=False, special=True) for p in special])
    tokenizer.add_tokens([AddedToken(p, normalized=False, special=False) for p in whole])


def add_ends(tokenizer: Tokenizer, bos_id: int | None, eos_id: int | None) -> None:
    """Puts BOS before and EOS after a text that is encoded with special tokens; None: not."""
    before, after = ([] if i is None else [(str(tokenizer.id_to_token(i)), i)] for i in (bos_id, eos_id))
    if before or after:
        template = " ".join([*(t for t, _ in before), "$A", *(t for t, _ in after)])
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=[*before, *after])


def merge_pairs(merges: Sequence[str]) -> list[tuple[str, str]]:
    """`left right` -> (left, right)"""
    pairs = (merge.partition(" ") for merge in merges)
    return [(left, right) for left, _, right in pairs]


def _normalizers(v: Vocabulary) -> list[normalizers.Normalizer]:
    steps: list[normalizers.Normalizer] = []
    if v.charsmap:
        steps.append(normalizers.Precompiled(v.charsmap))
    if v.collapse_spaces:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if v.add_prefix_space:
        steps.append(normalizers.Prepend("▁"))
    return [*steps, normalizers.Replace(" ", "▁")]


def _merges(v: Vocabulary, ids: dict[str, int]) -> list[tuple[str, str]]:
    """SentencePiece stores pieces and scores; a merge list has every way to make a piece of two others, best piece
    first. Source of the order among equals: transformers, `generate_merges`."""
    mergeable = {p for p, kind in zip(v.pieces, v.types, strict=True) if kind not in (UNKNOWN, CONTROL, BYTE)}
    found = []
    for piece, score in zip(v.pieces, v.scores, strict=True):
        if piece not in mergeable:
            continue
        splits = ((piece[:i], piece[i:]) for i in range(1, len(piece)))
        known = [(left, right) for left, right in splits if left in mergeable and right in mergeable]
        found += [(score, pair) for pair in sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]]))]
    found.sort(key=lambda item: (item[0], len(item[1][0]), len(item[1][1])), reverse=True)
    return [pair for _, pair in found]
