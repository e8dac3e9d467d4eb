"""What a request asks of its output, as a grammar in llguidance's notation."""

from collections.abc import Collection, Mapping
from typing import Any

from serving.decoding.grammar.gbnf import lark_of
from serving.decoding.grammar.json_schema import ANY_OBJECT, COMPACT, FREE, SPACED, JsonForm, schema_part
from serving.decoding.grammar.lark import Lark, quote
from serving.decoding.grammar.structural_tag import tag_expression
from serving.decoding.parts import Frame
from serving.errors import InvalidRequest
from serving.request import StructuredOutputs

MAX_REGEX_CHARS = 16 * 1024
MAX_CHOICES = 4096
MAX_CHOICE_CHARS = 64 * 1024  # of all together
LINE_ENDS = r"/\n{0,2}/"  # models write them after their reasoning
FIELD = "structured_outputs"
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
OF_JSON = ("json", "json_object", "structural_tag")


def grammar_of(outputs: StructuredOutputs, special_tokens: Mapping[str, int], eos_ids: Collection[int] = (), *,
               after: Frame | None = None) -> str:
    """special_tokens: the tokenizer's, by their text, which a structural tag may spell. eos_ids: those of them that end
    an output, which free text may not have. after: the output begins with a
    model's reasoning (any text) in this frame, and only what follows obeys the grammar. Raises InvalidRequest."""
    kind, lark = _kind(outputs), Lark(special_tokens, eos_ids)
    main = _main(outputs, kind, source_of(outputs), lark)
    if after is not None:
        reasoning = f"{lark.literal(after.begin)} {lark.until(after.end)} {lark.rule(LINE_ENDS)}"
        main = f"({reasoning}){'?' if after.optional else ''} {lark.rule(main)}"
    return lark.grammar(main)


def source_of(outputs: StructuredOutputs) -> str:
    """The request's field that is to blame for what is wrong."""
    return outputs.source or f"{FIELD}.{_kind(outputs)}"


def _kind(outputs: StructuredOutputs) -> str:
    given = [name for name in KINDS if getattr(outputs, name) is not None]
    if len(given) != 1:
        raise InvalidRequest(f"{FIELD} has {' and '.join(given) or 'no constraint'}, must have exactly one of "
                             f"{', '.join(KINDS)}", FIELD)
    if outputs.json_object is False:
        raise InvalidRequest(f"{FIELD}.json_object is false, must be true or left out", f"{FIELD}.json_object")
    return given[0]


def _main(outputs: StructuredOutputs, kind: str, param: str, lark: Lark) -> str:
    form = JsonForm(_spacing(outputs, kind), bool(outputs.disable_additional_properties))
    match kind:
        case "json":
            return lark.part(schema_part(outputs.json, form, param))
        case "json_object":
            return lark.part(schema_part(ANY_OBJECT, form, param))
        case "regex":
            return lark.regex(_text(outputs.regex, MAX_REGEX_CHARS, param), param, param)
        case "choice":
            return _choice(outputs.choice, param, lark)
        case "grammar":
            return lark.part({"lark_grammar": lark_of(_text(outputs.grammar, None, param), param)})
    return tag_expression(outputs.structural_tag, form, param, lark)


def _spacing(outputs: StructuredOutputs, kind: str) -> dict[str, Any]:
    pattern, strict = outputs.whitespace_pattern, outputs.disable_any_whitespace
    if pattern is not None:
        param = f"{FIELD}.whitespace_pattern"
        if kind not in OF_JSON or strict:
            other = "disable_any_whitespace" if strict else kind
            raise InvalidRequest(f"{param} says how JSON is spaced, {other} leaves nothing to it: give only one", param)
        return {"whitespace_pattern": _text(pattern, 256, param)}
    return SPACED if strict is None else COMPACT if strict else FREE


def _text(value: Any, most: int | None, param: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{param} is a {type(value).__name__}, must be a string", param)
    _check_unicode(value, param)
    if most is not None and len(value) > most:
        raise InvalidRequest(f"{param} has {len(value)} characters, at most {most} are allowed", param)
    return value


def _choice(choice: Any, param: str, lark: Lark) -> str:
    texts = list(choice) if isinstance(choice, list | tuple) else []
    if not texts or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(f"{param} must be a list of strings, at least one", param)
    if len(texts) > MAX_CHOICES or sum(map(len, texts)) > MAX_CHOICE_CHARS:
        raise InvalidRequest(f"{param} has {len(texts)} entries of {sum(map(len, texts))} characters, at most "
                             f"{MAX_CHOICES} and {MAX_CHOICE_CHARS} are allowed", param)
    for text in texts:
        _check_unicode(text, param)
    return lark.terminal(" | ".join(map(quote, dict.fromkeys(texts))))


def _check_unicode(text: str, param: str) -> None:
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise InvalidRequest(f"{param} has half of a surrogate pair, must be Unicode text", param)
