"""Renders a chat template that came with a request. It is a program of unknown intent: the sandbox keeps it from
reaching out, but it can still loop for ever or fill the memory. So it runs in a process that may use only so much."""

import json
import resource
import subprocess
import sys
from typing import Any

from serving.errors import InvalidRequest
from serving.tokenizer.chat_template import render

MAX_SECONDS = 2  # of CPU time
MAX_BYTES = 1 << 30
MAX_CHARS = 1 << 25  # of the prompt
_BOOTSTRAP = (
    "import json, sys; job = json.load(sys.stdin); sys.path[:] = job.pop('path'); "
    "from serving.tokenizer.foreign_template import _main; _main(job)"
)


def render_foreign(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    """As `chat_template.render`, whose arguments it takes, but made of JSON. Blocks for tenths of a second. Raises
    `InvalidRequest`, also for a template that needs too much."""
    job = {"path": sys.path, "source": source, "messages": messages, **options}
    try:
        done = subprocess.run([sys.executable, "-c", _BOOTSTRAP], input=json.dumps(job).encode(), capture_output=True,
                              timeout=10 * MAX_SECONDS, check=False)  # fmt: skip
        answer = json.loads(done.stdout) if done.returncode == 0 else {}
    except subprocess.TimeoutExpired:
        answer = {}
    if "text" in answer:
        return answer["text"]
    rule = f"it needs more than {MAX_SECONDS} s, {MAX_BYTES >> 20} MB or {MAX_CHARS} characters"
    raise InvalidRequest(f"chat_template: {answer.get('refused', rule)}", "chat_template")


def _main(job: dict[str, Any]) -> None:
    """The child's whole life."""
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_SECONDS, MAX_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    try:
        text = render(job.pop("source"), job.pop("messages"), **job)
        answer = {"text": text} if len(text) <= MAX_CHARS else {}
    except InvalidRequest as error:
        answer = {"refused": str(error)}
    json.dump(answer, sys.stdout)
