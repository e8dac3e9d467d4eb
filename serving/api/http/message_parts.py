"""From a chat request to the way its output is read, and from parsed output to the fields of an answer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from serving.api.http.requests import ChatCompletionRequest
from serving.api.http.responses import (
    ChatAnswer,
    ChatDelta,
    FunctionCall,
    FunctionCallDelta,
    ToolCall,
    ToolCallDelta,
)
from serving.api.http.tool_fields import NamedToolChoice
from serving.api.service import Service
from serving.decoding.output_format import OutputFormat
from serving.decoding.output_parser import OutputParser
from serving.decoding.parts import ContentDelta, Frame, Message, Part, ReasoningDelta
from serving.decoding.tools.base import Tool
from serving.errors import InvalidRequest
from serving.tokenizer.tokenizer import Tokenizer

PROMPT_TAIL = 16  # tokens, enough for the tags at a prompt's end


def output_format(service: Service, body: ChatCompletionRequest) -> OutputFormat:
    """Raises InvalidRequest for tools that cannot be called as the request wants."""
    config = service.config
    tools = tuple(Tool(tool.function.name, tool.function.parameters or {}) for tool in body.tools or ())
    choice = body.tool_choice or ("auto" if tools else "none")
    shared = OutputFormat(
        reasoning_parser=config.reasoning_parser,
        tool_parser=config.tool_call_parser,
        tools=tools,
        parallel_tool_calls=body.parallel_tool_calls is not False,
    )
    if isinstance(choice, NamedToolChoice):
        tools = tuple(tool for tool in tools if tool.name == choice.function.name)
        if not tools:
            raise InvalidRequest(f"tool_choice names {choice.function.name!r}, which is none of tools", "tool_choice")
        return replace(shared, calls="named", tools=tools)
    if choice == "auto" and tools and not config.enable_auto_tool_choice:
        raise InvalidRequest('"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set; '
                             'without them tool_choice may be "none", "required" or a function', "tool_choice")
    if choice == "required" and not tools:
        raise InvalidRequest('tool_choice is "required", which needs tools', "tool_choice")
    return replace(shared, calls=choice if tools else "none")


@dataclass(frozen=True, kw_only=True)
class OutputReader:
    """Of one request. Texts have to show the special tokens in `shown_ids`; each sequence takes a parser of its own."""

    form: OutputFormat
    prompt: str  # its end, or the message of it that goes on
    continues: bool
    shown: dict[int, str]
    hides: bool  # special tokens, from what is content

    @classmethod
    def make(cls, tokenizer: Tokenizer, form: OutputFormat, body: ChatCompletionRequest,
             prompt_token_ids: Sequence[int]) -> "OutputReader":
        if body.continue_final_message:
            prompt = str(body.messages[-1].for_template()["content"] or "")
        else:
            prompt = tokenizer.decode(prompt_token_ids[-PROMPT_TAIL:], skip_special_tokens=False)
        ids = {marker: tokenizer.backend.token_to_id(marker) for marker in form.markers}
        return cls(
            form=form,
            prompt=prompt,
            continues=bool(body.continue_final_message),
            shown={i: marker for marker, i in ids.items() if i is not None and tokenizer.is_special(i)},
            hides=body.skip_special_tokens is not False,
        )

    @property
    def shown_ids(self) -> frozenset[int]:
        return frozenset(self.shown)

    @property
    def grammar_after(self) -> Frame | None:
        return self.form.free(self.prompt, continues=self.continues)

    def parser(self) -> OutputParser:
        return self.form.parser(self.prompt, self.shown.values() if self.hides else (), continues=self.continues)


def chat_answer(message: Message, include_reasoning: bool) -> ChatAnswer:
    calls = [ToolCall(id=call.id, function=FunctionCall(name=call.name, arguments=call.arguments))
             for call in message.tool_calls]  # fmt: skip
    answer = ChatAnswer(content=None if calls and not message.content else message.content)
    if message.reasoning and include_reasoning:
        answer.reasoning = answer.reasoning_content = message.reasoning
    if calls:
        answer.tool_calls = calls
    return answer


def chat_delta(parts: Sequence[Part], include_reasoning: bool) -> ChatDelta:
    """One chunk's news; clients put each field together by itself."""
    delta = ChatDelta()
    calls: list[ToolCallDelta] = []
    for part in parts:
        if isinstance(part, ContentDelta):
            delta.content = (delta.content or "") + part.text
        elif isinstance(part, ReasoningDelta):
            if include_reasoning:
                delta.reasoning = delta.reasoning_content = (delta.reasoning or "") + part.text
        elif part.name is not None and part.id is not None:
            calls.append(ToolCallDelta(index=part.index, id=part.id, type="function",
                                       function=FunctionCallDelta(name=part.name, arguments=part.arguments)))
        else:
            calls.append(ToolCallDelta(index=part.index, function=FunctionCallDelta(arguments=part.arguments)))
    if calls:
        delta.tool_calls = calls
    return delta
