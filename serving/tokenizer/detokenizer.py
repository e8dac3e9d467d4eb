"""Token ids to text, as they come.

Text is the UTF-8 reading of the tokens' bytes. At most three bytes, the start of a character, are held back; a byte
that cannot continue them turns them into U+FFFD at once. So the work for a token is its own bytes, and endless
incomplete UTF-8 flows on as U+FFFD.
"""

import codecs
from collections.abc import Iterable, Sequence

from serving.tokenizer.tokenizer import Tokenizer

LONGEST_INCOMPLETE = 3  # bytes of a UTF-8 character that is not finished yet


class IncrementalDetokenizer:
    """One generation's text. Every `add` and the final `finish`, joined, are `tokenizer.decode` of all the ids.

    The prompt's ids matter twice: a character that the prompt leaves unfinished is finished by the first tokens, and
    a leading space is only dropped at the very start of a text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,  # no effect, see Tokenizer.decode
        shown_ids: frozenset[int] = frozenset(),  # special tokens that are not skipped
    ):
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids - shown_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        tail = self._last_bytes(prompt_ids)
        self._utf8.decode(tail)
        self._drop_space = tokenizer.strips_leading_space and not tail

    def add(self, ids: Iterable[int]) -> str:
        """The text these tokens finish."""
        return "".join(self.add_tokens(ids))

    def add_tokens(self, ids: Iterable[int]) -> list[str]:
        """The same, one piece a token: "" for a hidden token or one that ends inside a character. Where a token's text
        begins is thus the length of all pieces before it."""
        return [self._piece(i) for i in ids]

    def finish(self) -> str:
        """What is left of a character that never ended: "" or U+FFFD."""
        return self._utf8.decode(b"", final=True)

    def _piece(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        text = self._utf8.decode(self._tokenizer.token_bytes(token_id))
        if self._drop_space and text:
            self._drop_space = False
            return text.removeprefix(" ")
        return text

    def _last_bytes(self, ids: Sequence[int]) -> bytes:
        tail = b""
        for i in reversed(ids):
            if i not in self._hidden:
                tail = self._tokenizer.token_bytes(i) + tail
            if len(tail) >= LONGEST_INCOMPLETE:
                break
        return tail[-LONGEST_INCOMPLETE:]
