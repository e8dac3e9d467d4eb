"""Llama 3.2 and 4: a Python list of calls, `[get_weather(city='Paris'), get_time()]`, in Llama 4 between
`<|python_start|>` and `<|python_end|>`.

Any answer may hold brackets, so it is a call only with the name of a tool. A call comes out when it is complete.
"""

import ast
import json
import re
from collections.abc import Sequence
from typing import Any

from serving.decoding.text_source import Reading, whole_characters
from serving.decoding.tools.base import ToolParser, beginning

BEGIN, END = "<|python_start|>", "<|python_end|>"
_NAME = re.compile(r"[\w.-]*")
_PLAIN = re.compile(r"[^'\"()\[\]{}]*")
_STRINGS = {quote: re.compile(rf"[^{quote}\\]*") for quote in "'\""}
_ESCAPE, _ESCAPED = re.compile(r"\\(.)", re.DOTALL), "\\'\"abfnrtv0123xuUN"
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_JSON_NAMES = {"true": True, "false": False, "null": None}


class PythonicToolParser(ToolParser):
    markers = (BEGIN, END)

    def call_forms(self, special: Sequence[str]) -> list[dict[str, Any]]:
        return [beginning(start, special) for start in (BEGIN, *(f"[{name}(" for name in self.tools))]

    def run(self) -> Reading[None]:
        source = self.source
        while marker := (yield from source.until((BEGIN, "["), self.content)):
            source.mark(len(marker))
            if marker == BEGIN:
                yield from source.space()
            if marker == "[" or (yield from source.accept("[")):
                if (yield from self._calls()) and (yield from source.accept("]")):
                    source.release()
                    yield from source.space()
                    yield from source.close(END)
            self.reject()

    def _calls(self) -> Reading[bool]:
        """Reads calls with commas between; one that makes no sense is content. Returns whether any did."""
        source = self.source
        before = self.num_calls
        while True:
            yield from source.space()
            name = yield from source.take(_NAME)
            if name not in self.tools or not (yield from source.accept("(")):
                return False
            text: list[str] = []
            if not (yield from self._up_to_closing(text)):
                return False
            arguments = _arguments("".join(text))
            if arguments is None:
                self.reject()
            else:
                self.begin_call(name)
                self.arguments(arguments)
            source.mark()
            yield from source.space()
            if not (yield from source.accept(",")):
                return self.num_calls > before

    def _up_to_closing(self, text: list[str]) -> Reading[bool]:
        """Reads to the parenthesis that closes the call, which `text` leaves out."""
        source = self.source
        closing = [")"]
        while True:
            yield from source.take(_PLAIN, text.append)
            letter = yield from source.letter()
            if letter in _STRINGS:
                text.append(letter)
                if not (yield from self._string(letter, text)):
                    return False
                continue
            if letter in _CLOSING:
                closing.append(_CLOSING[letter])
            elif not letter or closing.pop() != letter:
                return False
            if not closing:
                return True
            text.append(letter)

    def _string(self, quote: str, text: list[str]) -> Reading[bool]:
        """The rest of a string, with or without triple quotes, on one line: models break lines in both."""
        source = self.source
        more, closing = quote * 2, quote
        if (yield from source.accept(more)):
            closing += more
            text.append(more)
        while True:
            yield from source.take(_STRINGS[quote], lambda piece: text.append(piece.replace("\n", "\\n")))
            letter = yield from source.letter()
            if letter == "\\":
                letter += yield from source.letter()
            elif letter == quote and (closing == quote or (yield from source.accept(more))):
                text.append(closing)
                return True
            text.append(letter)
            if not letter:
                return False


def _backslash(escape: re.Match[str]) -> str:
    """Python warns of escapes that are none; their backslash is one."""
    return escape.group() if escape.group(1) in _ESCAPED else f"\\{escape.group()}"


def _arguments(text: str) -> str | None:
    """`a=1, b='x'` as a JSON object; None if it is not only names and literals."""
    try:
        call = ast.parse(f"call({_ESCAPE.sub(_backslash, text)})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
            return None
        values = {str(keyword.arg): _literal(keyword.value) for keyword in call.keywords}
        return whole_characters(json.dumps(values, ensure_ascii=False, allow_nan=False))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _JSON_NAMES:
        return _JSON_NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("JSON's keys are strings")
        return dict(zip(keys, map(_literal, node.values), strict=True))
    return ast.literal_eval(node)
