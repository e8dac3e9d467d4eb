"""The tokenizer of a model folder: tokenizer.json, or SentencePiece's tokenizer.model."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from serving.errors import ConfigError
from serving.tokenizer.sentencepiece import add_ends, build, read_model
from serving.tokenizer.tokenizer import Tokenizer as ModelTokenizer

ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def load_folder(folder: Path) -> ModelTokenizer:
    """A Hugging Face or Orbax folder. Raises ConfigError."""
    config = {**_read_json(folder / "special_tokens_map.json"), **_read_json(folder / "tokenizer_config.json")}
    special = {role: _content(config[role]) for role in ROLES if config.get(role)}
    if (folder / "tokenizer.json").exists():
        try:
            backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises plain Exception for everything
            raise ConfigError(f"{folder / 'tokenizer.json'}: cannot be read ({error})") from error
    elif (folder / "tokenizer.model").exists():
        backend, special = _from_sentencepiece(folder, config, special)
    else:
        raise ConfigError(f"{folder}: has no tokenizer.json or tokenizer.model; add one, or name another folder with "
                          "--tokenizer")
    return ModelTokenizer(
        backend,
        special_tokens=special,
        eos_ids=_eos_ids(folder, backend, special),
        chat_templates=_templates(folder, config),
        folder=folder,
    )


def _from_sentencepiece(
    folder: Path, config: dict[str, Any], special: dict[str, str]
) -> tuple[Tokenizer, dict[str, str]]:
    vocabulary, bos_id, eos_id = read_model(folder / "tokenizer.model")
    backend = build(vocabulary)
    # Tokens added after training, in the order of their ids, which go on where the vocabulary ends.
    added = {int(i): token for i, token in config.get("added_tokens_decoder", {}).items()}
    added |= {i: {"content": token} for token, i in _read_json(folder / "added_tokens.json").items() if i not in added}
    for i, token in sorted(added.items()):
        content, is_special = token["content"], token.get("special", token["content"] in special.values())
        add = backend.add_special_tokens if is_special else backend.add_tokens
        add([AddedToken(content, normalized=token.get("normalized", False), special=is_special,
                        lstrip=token.get("lstrip", False), rstrip=token.get("rstrip", False))])  # fmt: skip
        if backend.token_to_id(content) != i:
            raise ConfigError(f"{folder}: added token {content!r} has id {i}, but {backend.token_to_id(content)} is "
                              "the next free one; save the tokenizer as tokenizer.json")  # fmt: skip
    pieces = {"bos_token": bos_id, "eos_token": eos_id, "unk_token": vocabulary.unknown_id}
    own = {role: str(vocabulary.pieces[i]) for role, i in pieces.items() if i is not None}
    special = own | special
    ends = {role: backend.token_to_id(special[role]) if role in special else None for role in pieces}
    add_ends(backend, ends["bos_token"] if config.get("add_bos_token", True) else None,
             ends["eos_token"] if config.get("add_eos_token", False) else None)  # fmt: skip
    return backend, special


def _eos_ids(folder: Path, backend: Tokenizer, special: dict[str, str]) -> list[int]:
    """The tokenizer's EOS, then those of the generation config (or, without one, of the model's config)."""
    own = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
    config = _read_json(folder / "generation_config.json") or _read_json(folder / "config.json")
    more = config.get("eos_token_id")
    more = more if isinstance(more, list) else [more]
    return [i for i in (own, *more) if i is not None]


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    file = folder / "chat_template.jinja"
    given: Any = file.read_text(encoding="utf-8") if file.exists() else config.get("chat_template")
    if isinstance(given, list):  # several named ones
        return {entry["name"]: entry["template"] for entry in given}
    return {"default": given} if given else {}


def _content(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]


def _read_json(file: Path) -> dict[str, Any]:
    """Empty when the file is not there."""
    try:
        value = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: holds a {type(value).__name__}, expected an object")
    return value
