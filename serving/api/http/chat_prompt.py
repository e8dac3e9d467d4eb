"""The prompt of a chat: its messages, tools and documents through the model's template."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from serving.api.http.requests import ChatPrompt
from serving.api.service import Service
from serving.errors import InvalidRequest
from serving.tokenizer.foreign_template import render_foreign

FOREIGN_TEMPLATES = ThreadPoolExecutor(2, "foreign-template")  # at a time, and never in the way of other threads' work
TEMPLATE_OWN_NAMES = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template")
)


def _variables(chat: ChatPrompt, template: str) -> dict[str, Any]:
    """What the template finds beside the messages."""
    kwargs = dict(chat.chat_template_kwargs or {})
    if taken := TEMPLATE_OWN_NAMES & kwargs.keys():
        raise InvalidRequest(f"chat_template_kwargs sets {sorted(taken)[0]!r}, which is a request field of its own",
                             "chat_template_kwargs")
    effort = chat.reasoning_effort
    if effort is not None:
        if "reasoning_effort" in template:
            kwargs.setdefault("reasoning_effort", effort)
        elif "enable_thinking" in template:  # Qwen3's switch knows only on and off
            kwargs.setdefault("enable_thinking", effort != "none")
        else:
            raise InvalidRequest("reasoning_effort is not used by this model's chat template", "reasoning_effort")
    return kwargs


def _check_template(chat: ChatPrompt, template: str, documents: Any, needs_tools: bool) -> None:
    if documents and "documents" not in template:
        raise InvalidRequest("documents are not used by this model's chat template", "documents")
    if needs_tools and chat.tools and "tools" not in template:
        raise InvalidRequest("tools are not used by this model's chat template: force a call with tool_choice, or give "
                             "a chat_template that shows them", "tools")
    if "tool_calls" not in template:
        for i, message in enumerate(chat.messages):
            if message.tool_calls:
                param = f"messages[{i}].tool_calls"  # or input, in a response
                raise InvalidRequest(f"{param} has calls, which this model's chat template does not use", param)


async def chat_prompt_ids(service: Service, chat: ChatPrompt, documents: list[dict[str, Any]] | None = None,
                          add_special_tokens: bool = False, needs_tools: bool = True) -> list[int]:
    """Renders the chat template and tokenizes. The template writes BOS and the like itself.

    needs_tools: refuse tools if the template has no place for them.
    """
    tokenizer = service.tokenizer
    template = tokenizer.template_for(chat.chat_template or service.config.chat_template, bool(chat.tools))
    kwargs = _variables(chat, template)
    _check_template(chat, template, documents, needs_tools)
    continues = bool(chat.continue_final_message)
    generation_prompt = chat.add_generation_prompt
    messages = [message.for_template() for message in chat.messages]
    options: dict[str, Any] = {
        "tools": [tool.for_template() for tool in chat.tools] if chat.tools else None,
        "documents": documents,
        "add_generation_prompt": not continues if generation_prompt is None else generation_prompt,
        "continue_final_message": continues,
    }
    if chat.chat_template is not None:
        options["variables"] = {**tokenizer.special_tokens, **kwargs}
        render = partial(render_foreign, template, messages, **options)
        text = await asyncio.get_running_loop().run_in_executor(FOREIGN_TEMPLATES, render)
    else:
        text = tokenizer.apply_chat_template(messages, chat_template=template, **options, **kwargs)
    return await service.encode(text, add_special_tokens)
