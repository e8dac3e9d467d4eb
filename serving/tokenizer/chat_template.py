"""Chat templates: the Jinja programs that models carry to turn messages into a prompt.

They come with model files and may come with requests, so they run in a sandbox that allows no access to attributes
that could leave the template. What templates expect to find (filters, globals, block trimming) follows transformers,
`utils/chat_template_utils.py`.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from serving.errors import InvalidRequest

# What a bad template raises. SyntaxError: Python refuses the code that Jinja makes of it, say a break out of no loop.
_FAILURES = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError, SyntaxError,
             MemoryError)  # fmt: skip


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what an assistant wrote, for training; it renders as its body."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes `<` and `>` for HTML, which models never saw."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


@lru_cache(maxsize=64)
def _compile(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment.from_string(source)


def render(
    source: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    documents: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    continue_final_message: bool,
    variables: Mapping[str, Any],
) -> str:
    """The prompt as text. Raises InvalidRequest with the template's own message when it refuses the messages."""
    if continue_final_message and add_generation_prompt:
        raise InvalidRequest("continue_final_message goes on with the last message, add_generation_prompt starts a "
                             "new one: set only one", "continue_final_message")  # fmt: skip
    if continue_final_message and not messages:
        raise InvalidRequest("continue_final_message needs a message to continue", "continue_final_message")
    messages = [_text_content(message) for message in messages]
    try:
        prompt = _compile(source).render(
            {
                **variables,
                "messages": messages,
                "tools": tools or None,
                "documents": documents or None,
                "add_generation_prompt": add_generation_prompt,
            }
        )
    except jinja2.TemplateError as error:
        where = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise InvalidRequest(f"the chat template refuses the messages: {error.message}{where}", "messages") from error
    except _FAILURES as error:
        raise InvalidRequest(f"the chat template fails on the messages: {error}", "messages") from error
    return _up_to_final_message(prompt, messages[-1]) if continue_final_message else prompt


def _text_content(message: Mapping[str, Any]) -> dict[str, Any]:
    """Content given as a list of text parts becomes one text, a line a part: templates of text models add strings."""
    content = message.get("content")
    if not isinstance(content, list) or not all(isinstance(p, dict) and p.get("type") == "text" for p in content):
        return dict(message)
    return {**message, "content": "\n".join(part.get("text", "") for part in content)}


def _up_to_final_message(prompt: str, message: Mapping[str, Any]) -> str:
    """Cuts what the template puts after the last message (its end mark), so that the model continues it."""
    content = message.get("content")
    if not isinstance(content, str) or not content.strip():
        raise InvalidRequest("continue_final_message needs text in the last message", "continue_final_message")
    start = prompt.rfind(content.strip())
    if start < 0:
        raise InvalidRequest("continue_final_message: the chat template changes the last message, so where to continue "
                             "is unknown", "continue_final_message")  # fmt: skip
    kept = content.lstrip()  # templates often trim; trailing space stays if the template kept it
    end = start + len(kept) if prompt.startswith(kept, start) else start + len(content.strip())
    return prompt[:end]
