"""Which bytes a token stands for.

The tokenizers served here (byte-level BPE and SentencePiece) spell text as a concatenation of byte strings, one a
token. Decoding through those bytes instead of the library's decoder makes streaming simple and exact: text is the
UTF-8 reading of the bytes so far, whatever the token boundaries.
"""

import json
import re
from collections.abc import Callable

import tokenizers

from serving.errors import ConfigError

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
META_SPACE = "▁"


def gpt2_alphabet() -> dict[str, int]:
    """Byte-level BPE's letter for each byte: printable Latin-1 stands for itself, the rest is moved to U+0100 and up.
    Source: openai/gpt-2 `encoder.py`."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(moved)}


_ALPHABET = gpt2_alphabet()


def byte_level(token: str) -> bytes:
    """A token with a letter outside the alphabet (an added one) is spelled as it reads."""
    try:
        return bytes([_ALPHABET[letter] for letter in token])
    except KeyError:
        return token.encode()


def sentencepiece(token: str) -> bytes:
    match = BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.replace(META_SPACE, " ").encode()


def speller(backend: tokenizers.Tokenizer) -> tuple[Callable[[str], bytes], bool]:
    """The rule for this tokenizer, and whether decoding drops one space at the start of a text.
    Raises ConfigError for a decoder of another kind."""
    decoder: dict = json.loads(backend.to_str())["decoder"] or {"type": "none"}
    steps: list[dict] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return byte_level, False
    if kinds == ["Metaspace"]:
        return sentencepiece, steps[0].get("prepend_scheme", "always") != "never"
    if "ByteFallback" in kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return sentencepiece, "Strip" in kinds
    raise ConfigError(f"the tokenizer decodes with {', '.join(kinds)}; supported are ByteLevel and SentencePiece's "
                      "(Replace, ByteFallback, Fuse, Strip, Metaspace)")  # fmt: skip
