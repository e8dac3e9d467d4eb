"""What every front end of one service shares."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from serving.config import ServerConfig
from serving.engine.client import EngineClient
from serving.errors import EngineDead, NotFound
from serving.metrics import Metrics
from serving.tokenizer.tokenizer import Tokenizer
from serving.validation import RequestLimits

THREAD_CHARS = 16_384  # longer texts are tokenized in a thread, beside the event loop


@dataclass
class Lifecycle:
    """The only state of a service that changes."""

    draining: bool = False  # no new requests: the service is ending
    live: int = 0  # requests being served
    background: set[asyncio.Task[None]] = field(default_factory=set)  # work that no connection waits for

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs `work` until it is done or the service ends, which cancels it."""
        task = asyncio.create_task(work)
        self.background.add(task)
        task.add_done_callback(self.background.discard)
        return task

    async def end_background(self) -> None:
        tasks = list(self.background)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True, kw_only=True)
class Service:
    engine: EngineClient
    tokenizer: Tokenizer
    config: ServerConfig
    model_name: str
    metrics: Metrics
    version: str
    start_time: float  # time.time()
    lifecycle: Lifecycle = field(default_factory=Lifecycle)

    @property
    def limits(self) -> RequestLimits:
        info = self.engine.info
        return RequestLimits(
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            max_logprobs=self.config.max_logprobs,
            priority_policy=self.config.engine.scheduling_policy == "priority",
            structured_outputs=self.config.engine.structured_outputs_config,
        )

    @property
    def model_names(self) -> tuple[str, ...]:
        return self.model_name, *self.config.served_model_aliases

    @property
    def fingerprint(self) -> str:
        return f"pageloom-{self.version}"

    def check_admission(self) -> None:
        """Raises `EngineDead` unless new requests are taken."""
        if self.lifecycle.draining:
            raise EngineDead("the server is shutting down and takes no new requests")
        self.engine.check_health()

    def check_model(self, name: str | None) -> None:
        if name and name not in self.model_names:
            raise NotFound(f"The model {name!r} does not exist; this server has "
                           f"{' or '.join(map(repr, self.model_names))}")

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) < THREAD_CHARS:
            return self.tokenizer.encode(text, add_special_tokens)
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens)
