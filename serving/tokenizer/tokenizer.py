"""Text to token ids and back, for one model."""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from serving.errors import InvalidRequest
from serving.tokenizer.chat_template import render
from serving.tokenizer.token_bytes import speller

# A model folder's files that other software needs to make the same tokenizer.
FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json",
)  # fmt: skip


class Tokenizer:
    """Made by `serving.tokenizer.load.load_tokenizer`. Immutable and safe to share between threads.

    bos_id: the id that starts a text, None when the model has none.
    eos_ids: ids that end a generation, the tokenizer's own first.
    special_tokens: role ("bos_token", "eos_token", ...) -> the token as text.
    chat_templates: name -> Jinja source; the one called "default" is used unless tools ask for "tool_use".
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        eos_ids: Sequence[int],
        chat_templates: Mapping[str, str],
        folder: Path | None = None,
    ):
        self.backend = backend
        self.special_tokens = dict(special_tokens)
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        self.chat_templates = dict(chat_templates)
        self._folder = folder
        self._spell, self.strips_leading_space = speller(backend)
        self._added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in self._added.items() if token.special)
        self.special_token_ids = {str(backend.id_to_token(i)): i for i in sorted(self.special_ids)}  # by their text
        bos = self.special_tokens.get("bos_token")
        self.bos_id = None if bos is None else backend.token_to_id(bos)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def chat_template(self) -> str | None:
        return self.chat_templates.get("default")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """`add_special_tokens` adds what the model's texts start (or end) with, such as BOS. Special tokens written
        out in `text` are always recognised."""
        try:
            # The library's `encode` keeps the interpreter's lock all the while, its batches do not.
            return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidRequest("the text is not valid Unicode: it holds half of a surrogate pair") from error

    def decode(
        self, ids: Iterable[int], skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        """Bytes that are no UTF-8 become U+FFFD. No tokenizer served here puts spaces between special tokens, so
        `spaces_between_special_tokens` changes nothing (as in vLLM with the same tokenizers)."""
        hidden = self.special_ids if skip_special_tokens else frozenset()
        text = b"".join(self.token_bytes(i) for i in ids if i not in hidden).decode("utf-8", "replace")
        return text[1:] if self.strips_leading_space and text.startswith(" ") else text

    def token_bytes(self, token_id: int) -> bytes:
        """Empty for an id without a token: models round their vocabulary up."""
        token = self.backend.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None
        return b"" if token is None else self._spell(token)

    def token_text(self, token_id: int) -> str:
        """One token by itself; a part of a character reads as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def is_special(self, token_id: int) -> bool:
        return token_id in self.special_ids

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,  # a template variable may have any name
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt as text; encode it with `add_special_tokens=False`, the template writes BOS itself.
        `kwargs` become template variables. Raises InvalidRequest."""
        return render(
            self.template_for(chat_template, bool(tools)),
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables={**self.special_tokens, **kwargs},
        )

    def template_for(self, given: str | None, with_tools: bool) -> str:
        """The one that was given, or the model's own. Raises InvalidRequest for a model without."""
        if given is not None:
            return given
        named = self.chat_templates.get("tool_use") if with_tools else None
        template = named or self.chat_template
        if template is None:
            raise InvalidRequest("the model has no chat template: pass `chat_template`, or use completions", "messages")
        return template

    def tokenizer_files(self) -> dict[str, bytes]:
        """What other software loads to get this tokenizer: the model folder's own files, or ones made from the GGUF."""
        files = {}
        if self._folder is not None:
            files = {name: (self._folder / name).read_bytes() for name in FILES if (self._folder / name).exists()}
        if "tokenizer.json" not in files:
            files["tokenizer.json"] = self.backend.to_str().encode()
            files["tokenizer_config.json"] = _json(self._config())
        if "generation_config.json" not in files:
            files["generation_config.json"] = _json({"bos_token_id": self.bos_id, "eos_token_id": list(self.eos_ids)})
        return files

    def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **self.special_tokens}
        if set(self.chat_templates) == {"default"}:
            config["chat_template"] = self.chat_template
        elif self.chat_templates:
            config["chat_template"] = [{"name": n, "template": t} for n, t in self.chat_templates.items()]
        # Other readers must not "tidy" the spaces before punctuation: generated text is exact.
        config["clean_up_tokenization_spaces"] = False
        config["added_tokens_decoder"] = {
            str(i): {"content": t.content, "special": t.special, "normalized": t.normalized, "lstrip": t.lstrip,
                     "rstrip": t.rstrip, "single_word": t.single_word}
            for i, t in sorted(self._added.items())
        }  # fmt: skip
        return config


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, indent=2).encode()
