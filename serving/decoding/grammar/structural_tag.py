"""Structural tags: parts of an output that follow a schema, within text that is free.

Two notations, as in vLLM: the older one,

    {"type": "structural_tag", "structures": [{"begin": "<f>", "schema": {...}, "end": "</f>"}], "triggers": ["<f"]}

and XGrammar's, {"type": "structural_tag", "format": F}, where F is one of FORMATS, nested. The outermost type may be
left out, as the gateway does.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from serving.decoding.grammar.gbnf import lark_of
from serving.decoding.grammar.json_schema import MAX_SCHEMA_BYTES, JsonForm, schema_part
from serving.decoding.grammar.lark import Lark
from serving.errors import InvalidRequest

MAX_NESTING = 32


def tag_expression(tag: Any, form: JsonForm, param: str, lark: Lark) -> str:
    """Raises InvalidRequest."""
    if isinstance(tag, str):
        if len(tag) > MAX_SCHEMA_BYTES:
            raise InvalidRequest(f"{param} has {len(tag)} characters, at most {MAX_SCHEMA_BYTES} are allowed", param)
        try:
            tag = json.loads(tag)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{param} is not JSON: {error}", param) from error
    if not isinstance(tag, Mapping) or tag.get("type", "structural_tag") != "structural_tag":
        raise InvalidRequest(f"{param} must be an object whose type is 'structural_tag'", param)
    writer = _Writer(form, param, lark)
    if "format" in tag:
        writer.only(tag, param, "type", "format")
        return writer.write(tag["format"], f"{param}.format", 0)
    writer.only(tag, param, "type", "structures", "triggers")
    tags = [writer.old_tag(one, f"{param}.structures[{i}]")
            for i, one in enumerate(writer.get(tag, "structures", list, param))]
    return writer.triggered_tags({"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}, param, 0)


class _Writer:
    def __init__(self, form: JsonForm, param: str, lark: Lark):
        self._form, self._param, self._lark = form, param, lark
        self._formats: dict[str, Callable[[Mapping[str, Any], str, int], str]] = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "regex": self._regex,
            "grammar": self._grammar,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._or,
            "optional": self._repeated,
            "star": self._repeated,
            "plus": self._repeated,
            "tag": self.tag,
            "triggered_tags": self.triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }

    def write(self, value: Any, place: str, depth: int) -> str:
        if depth > MAX_NESTING:
            raise self._refuse(f"{place} is nested more than {MAX_NESTING} levels deep")
        kind = value.get("type") if isinstance(value, Mapping) else None
        if not isinstance(kind, str) or kind not in self._formats:
            raise self._refuse(f"{place}.type is {kind!r}, must be one of {', '.join(self._formats)}")
        return self._formats[kind](value, place, depth)

    def old_tag(self, value: Any, place: str) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise self._refuse(f"{place} must be an object with begin, schema and end")
        self.only(value, place, "begin", "schema", "end")
        content = {"type": "json_schema", "json_schema": value.get("schema", {})}
        return {"type": "tag", "begin": value.get("begin"), "content": content, "end": value.get("end")}

    def tag(self, value: Mapping[str, Any], place: str, depth: int) -> str:
        return f"{self._lark.literal(self._begin(value, place))} {self._after_begin(value, place, depth)}"

    def triggered_tags(self, value: Mapping[str, Any], place: str, depth: int,
                       before: list[str] | None = None) -> str:
        """before: text comes first, without these in it."""
        self.only(value, place, "type", "triggers", "tags", "at_least_one", "stop_after_first")
        triggers = self.get(value, "triggers", list, place)
        if not triggers or not all(isinstance(one, str) and one for one in triggers):
            raise self._refuse(f"{place}.triggers must be strings that are not empty, at least one")
        rest: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        whole: list[str] = []
        for i, one in enumerate(self._tags(value, place)):
            where = f"{place}.tags[{i}]"
            begin = self._begin(one, where)
            fitting = [trigger for trigger in rest if begin.startswith(trigger)]
            if len(fitting) != 1:
                raise self._refuse(f"{where}.begin is {begin!r}, must begin with one of the triggers, "
                                   f"{', '.join(map(repr, rest))}" + (", not with several" if fitting else ""))
            after = self._after_begin(one, where, depth)
            left = begin[len(fitting[0]):]
            rest[fitting[0]].append(f"{self._lark.literal(left)} {after}" if left else after)
            whole.append(f"{self._lark.literal(begin)} {after}")

        def any_tag(begun: list[str]) -> str:
            return self._lark.any_of(f"{begin} ({self._lark.any_of(ends)})"
                                     for begin, ends in zip(begun, rest.values(), strict=True) if ends)

        text, begun = self._lark.free(list(rest))
        calls = any_tag(begun)
        first = self._lark.any_of(whole) if before is None else any_tag(self._lark.free(list(rest), before)[1])
        at_least_one, stop = self._flag(value, "at_least_one", place), self._flag(value, "stop_after_first", place)
        if stop:
            return first if at_least_one else f"({calls} | {text})"
        return f"{first} {calls}* {text}" if at_least_one else f"{calls}* {text}"

    def _tags_with_separator(self, value: Mapping[str, Any], place: str, depth: int) -> str:
        self.only(value, place, "type", "tags", "separator", "at_least_one", "stop_after_first")
        separator = self._lark.literal(self.get(value, "separator", str, place))
        one = self._lark.any_of(
            self.tag(tag, f"{place}.tags[{i}]", depth + 1) for i, tag in enumerate(self._tags(value, place)))
        all_of_them = one if self._flag(value, "stop_after_first", place) else f"{one} ({separator} {one})*"
        return all_of_them if self._flag(value, "at_least_one", place) else f"({all_of_them})?"

    def _begin(self, value: Any, place: str) -> str:
        if not isinstance(value, Mapping):
            raise self._refuse(f"{place} must be an object with begin, content and end")
        self.only(value, place, "type", "begin", "content", "end")
        return self.get(value, "begin", str, place)

    def _after_begin(self, value: Mapping[str, Any], place: str, depth: int) -> str:
        """A tag's content and end."""
        ends = value.get("end")
        ends = [ends] if isinstance(ends, str) else ends
        if not isinstance(ends, list) or not ends or not all(isinstance(end, str) for end in ends):
            raise self._refuse(f"{place}.end must be a string, or a list of strings")
        content = value.get("content")
        if isinstance(content, Mapping) and content.get("type") == "any_text" and all(ends):
            return self._lark.any_of(self._lark.until(end, self._excludes(content, f"{place}.content")) for end in ends)
        inside = self.write(content, f"{place}.content", depth + 1)
        return f"{inside} {self._lark.any_of(map(self._lark.literal, ends))}"

    def _const_string(self, value: Mapping[str, Any], place: str, depth: int) -> str:
        return self._lark.literal(self._string(value, place))

    def _string(self, value: Mapping[str, Any], place: str) -> str:
        self.only(value, place, "type", "value")
        return self.get(value, "value", str, place)

    def _json_schema(self, value: Mapping[str, Any], place: str, depth: int) -> str:
        self.only(value, place, "type", "json_schema")
        return self._lark.part(schema_part(value.get("json_schema"), self._form, f"{place}.json_schema"))

    def _regex(self, value: Mapping[str, Any], place: str, depth: int) -> str:
        self.only(value, place, "type", "pattern")
        return self._lark.regex(self.get(value, "pattern", str, place), f"{place}.pattern", self._param)

    def _grammar(self, value: Mapping[str, Any], place: str, depth: int) -> str:
        self.only(value, place, "type", "grammar")
        return self._lark.part({"lark_grammar": lark_of(self.get(value, "grammar", str, place), place)})

    def _any_text(self, value: Mapping[str, Any], place: str, depth: int) -> str:
        return self._lark.rule(self._lark.text(self._excludes(value, place)))

    def _excludes(self, value: Mapping[str, Any], place: str) -> list[str]:
        self.only(value, place, "type", "excludes")
        excludes = value.get("excludes", [])
        if not isinstance(excludes, list) or not all(isinstance(one, str) and one for one in excludes):
            raise self._refuse(f"{place}.excludes must be strings that are not empty")
        return excludes

    def _sequence(self, value: Mapping[str, Any], place: str, depth: int) -> str:
        self.only(value, place, "type", "elements")
        elements = self.get(value, "elements", list, place)
        written: list[str] = []
        text: Mapping[str, Any] | None = None  # any_text, which the next element ends
        for i, one in enumerate(elements):
            where = f"{place}.elements[{i}]"
            if text is not None and isinstance(one, Mapping) and one.get("at_least_one") is True and (
                    one.get("type") == "triggered_tags"):  # fmt: skip
                excludes = self._excludes(text, f"{place}.elements[{i - 1}]")
                written.append(self.triggered_tags(one, where, depth + 1, excludes))
                text = None
            elif text is not None:
                end = self._string(one, where) if isinstance(one, Mapping) and one.get("type") == "const_string" else ""
                if not end:
                    raise self._refuse(f"{place}.elements[{i - 1}] is any_text, which has no end: what follows it must "
                                       "be a const_string, triggered_tags with at_least_one or the end of a tag")
                written.append(self._lark.until(end, self._excludes(text, f"{place}.elements[{i - 1}]")))
                text = None
            elif isinstance(one, Mapping) and one.get("type") == "any_text" and i < len(elements) - 1:
                text = one
            else:
                written.append(self.write(one, where, depth + 1))
        return " ".join(written) or '""'

    def _repeated(self, value: Mapping[str, Any], place: str, depth: int) -> str:
        self.only(value, place, "type", "content")
        times = {"optional": "?", "star": "*", "plus": "+"}[value["type"]]
        return f"{self._lark.any_of([self.write(value.get('content'), f'{place}.content', depth + 1)])}{times}"

    def _or(self, value: Mapping[str, Any], place: str, depth: int) -> str:
        self.only(value, place, "type", "elements")
        elements = self.get(value, "elements", list, place)
        if not elements:
            raise self._refuse(f"{place}.elements is empty, must have at least one")
        return self._lark.any_of(self.write(one, f"{place}.elements[{i}]", depth + 1) for i, one in enumerate(elements))

    def _tags(self, value: Mapping[str, Any], place: str) -> list[Any]:
        tags = self.get(value, "tags", list, place)
        if not tags:
            raise self._refuse(f"{place}.tags is empty, must have at least one")
        return tags

    def _flag(self, value: Mapping[str, Any], name: str, place: str) -> bool:
        flag = value.get(name, False)
        if not isinstance(flag, bool):
            raise self._refuse(f"{place}.{name} is {flag!r}, must be true or false")
        return flag

    def get(self, value: Mapping[str, Any], name: str, kind: type, place: str) -> Any:
        found = value.get(name)
        if not isinstance(found, kind):
            wanted = {list: "a list", str: "a string"}[kind]
            raise self._refuse(f"{place}.{name} is {'missing' if found is None else repr(found)[:60]}, "
                               f"must be {wanted}")
        return found

    def only(self, value: Mapping[str, Any], place: str, *names: str) -> None:
        for name in value:
            if name not in names:
                raise self._refuse(f"{place} has {name!r}, which is not one of {', '.join(names)}")

    def _refuse(self, message: str) -> InvalidRequest:
        return InvalidRequest(message, self._param)
