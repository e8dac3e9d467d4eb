"""A vocabulary small enough to try every token: all bytes, words that span the seams of JSON, two special tokens."""

from collections.abc import Sequence

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from serving.decoding.grammar.build import grammar_of
from serving.decoding.grammar.compiler import Compiler
from serving.decoding.grammar.matcher import GrammarMatcher
from serving.decoding.grammar.tokens import vocabulary
from serving.decoding.parts import Frame
from serving.request import StructuredOutputs
from serving.tokenizer.token_bytes import gpt2_alphabet
from serving.tokenizer.tokenizer import Tokenizer

WORDS = ('{"', '": ', '": "', '", "', '"}', '"]', ", ", "[1", "true", "false", "null", "ab", "abc", "10", "12", "xy",
         "é", "😀", '"x', 'x"', "}]", "[]", "{}", "a\\", "\n  ", "00")  # fmt: skip
PADDING = 5  # ids that the model has and the tokenizer does not


def toy_tokenizer() -> Tokenizer:
    letters = {byte: letter for letter, byte in gpt2_alphabet().items()}
    vocab = {letters[byte]: byte for byte in range(256)}
    merges = []
    for word in WORDS:
        spelled = "".join(letters[byte] for byte in word.encode())
        for end in range(2, len(spelled) + 1):
            if spelled[:end] not in vocab:
                merges.append((spelled[: end - 1], spelled[end - 1]))
                vocab[spelled[:end]] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|start|>", "<|end|>"])
    return Tokenizer(backend, special_tokens={"eos_token": "<|end|>"}, eos_ids=[backend.token_to_id("<|end|>")],
                     chat_templates={})


class Grammars:
    """Compiles for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, padding: int = PADDING):
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size + padding
        self.compiler = Compiler(lambda: vocabulary(tokenizer, self.vocab_size), timeout=300)
        self.eos = tokenizer.eos_ids[0]

    def matcher(self, after: Frame | None = None, **outputs: object) -> GrammarMatcher:
        made = StructuredOutputs(**outputs)  # type: ignore[arg-type]
        grammar = grammar_of(made, self.tokenizer.special_token_ids, self.tokenizer.eos_ids, after=after)
        return self.compiler.compile(grammar).result(300)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def allowed(self, matcher: GrammarMatcher) -> list[int]:
        """The ids that may come next."""
        return self.rows(matcher)[0]

    def rows(self, matcher: GrammarMatcher, tokens: Sequence[int] = (), parents: Sequence[int] = ()) -> list[list[int]]:
        out = np.zeros((len(tokens) + 1, -(-self.vocab_size // 32)), np.int32)
        matcher.masks(np.asarray(tokens, np.int32), np.asarray(parents, np.int32), out)
        bits = np.unpackbits(out.view(np.uint8), axis=1, bitorder="little")
        assert not bits[:, self.vocab_size :].any(), "no bits beyond the vocabulary"
        return [np.flatnonzero(row).tolist() for row in bits]

    def accepts(self, matcher: GrammarMatcher, text: str) -> bool:
        """Whether the whole text, as the tokenizer spells it, is allowed and may end the output. Moves the matcher."""
        for token in self.encode(text):
            if token not in self.allowed(matcher):
                return False
            matcher.accept([token])
        return self.eos in self.allowed(matcher)
