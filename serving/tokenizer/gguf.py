"""The tokenizer inside a GGUF file."""

from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from quant.gguf_file import GGUFFile
from serving.errors import ConfigError
from serving.tokenizer.sentencepiece import Vocabulary, add_ends, add_marked_tokens, build, merge_pairs
from serving.tokenizer.tokenizer import Tokenizer as ModelTokenizer

# How text is cut before byte-level BPE, by `tokenizer.ggml.pre`. The regular expressions are those of the models' own
# tokenizer.json; llama.cpp's names for them: `llama-vocab.cpp`.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {
    "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "smaug-bpe": _LLAMA3, "tekken": _TEKKEN,
    "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2,
}  # fmt: skip
GPT2 = {"gpt-2", "default"}  # GPT-2's own cut
DIGITS = {"smollm", "starcoder"}  # single digits first, then GPT-2's
ADDS_BOS = {"llama-bpe", "llama3", "llama-v3", "tekken"}  # unless the file says otherwise
WHOLE_WORDS_FIRST = ADDS_BOS  # a cut that is a token is taken as it is, without merging
TEMPLATE = "tokenizer.chat_template"


def load_gguf(path: Path) -> ModelTokenizer:
    """Raises ConfigError for a file that is no GGUF, or has no or an unknown tokenizer."""
    try:
        file = GGUFFile(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}; pass a whole .gguf file") from error
    metadata = file.metadata
    file.close()
    try:
        return from_metadata(metadata)
    except KeyError as error:
        raise ConfigError(f"{path}: the metadata has no {error}; pass --tokenizer") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}; pass --tokenizer") from error


def from_metadata(metadata: dict[str, Any]) -> ModelTokenizer:
    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{key}", default)

    kind, pre = metadata["tokenizer.ggml.model"], get("pre", "default")
    tokens = metadata["tokenizer.ggml.tokens"]
    if kind == "gpt2":
        backend = _byte_level(tokens, get("token_type"), metadata["tokenizer.ggml.merges"], pre)
    elif kind == "llama":
        backend = build(_vocabulary(metadata))
    else:
        raise ConfigError(f"tokenizer kind {kind!r} is not supported (supported in GGUF: gpt2, llama)")
    bos_id, eos_id = get("bos_token_id"), get("eos_token_id")
    adds_bos = kind == "llama" or pre in ADDS_BOS
    add_ends(backend, bos_id if get("add_bos_token", adds_bos) else None, eos_id if get("add_eos_token") else None)
    roles = {"bos": bos_id, "eos": eos_id, "unk": get("unknown_token_id"), "pad": get("padding_token_id")}
    ends = [eos_id, get("eot_token_id"), get("eom_token_id")]  # end of text, of turn, of message
    return ModelTokenizer(
        backend,
        special_tokens={f"{role}_token": tokens[i] for role, i in roles.items() if i is not None},
        eos_ids=[i for i in ends if i is not None],
        chat_templates=_templates(metadata),
    )


def _byte_level(tokens: list[str], types: list[int] | None, merges: list[str], pre: str) -> Tokenizer:
    vocab = {token: i for i, token in enumerate(tokens)}
    model = models.BPE(vocab=vocab, merges=merge_pairs(merges), ignore_merges=pre in WHOLE_WORDS_FIRST)
    tokenizer = Tokenizer(model)
    if pre in SPLITS:
        cut = pre_tokenizers.Split(Regex(SPLITS[pre]), behavior="isolated")
        steps = [cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    elif pre in DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        steps = [digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    elif pre in GPT2:
        steps = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    else:
        known = ", ".join(sorted([*SPLITS, *DIGITS, *GPT2]))
        raise ConfigError(f"pre-tokenizer {pre!r} is not supported (supported: {known})")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if pre in ("qwen2", "deepseek-r1-qwen"):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    if types is not None:
        add_marked_tokens(tokenizer, tokens, types)
    return tokenizer


def _vocabulary(metadata: dict[str, Any]) -> Vocabulary:
    tokens = metadata["tokenizer.ggml.tokens"]
    return Vocabulary(
        pieces=tokens,
        scores=metadata["tokenizer.ggml.scores"],
        types=metadata["tokenizer.ggml.token_type"],
        unknown_id=metadata.get("tokenizer.ggml.unknown_token_id", 0),
        merges=metadata.get("tokenizer.ggml.merges"),
        add_prefix_space=metadata.get("tokenizer.ggml.add_space_prefix", True),
        collapse_spaces=metadata.get("tokenizer.ggml.remove_extra_whitespaces", False),
        charsmap=bytes(b & 255 for b in metadata.get("tokenizer.ggml.precompiled_charsmap", ())),
    )


def _templates(metadata: dict[str, Any]) -> dict[str, str]:
    """The default template, and named ones (`tokenizer.chat_template.tool_use`)."""
    prefix = f"{TEMPLATE}."
    named = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    return named | ({"default": metadata[TEMPLATE]} if TEMPLATE in metadata else {})
