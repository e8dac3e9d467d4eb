"""Closing an `LLM`, without a model."""

import asyncio
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from serving.llm import LLM, _run


def test_what_has_ended_before_close_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the thread that closes does not get the processor again at once."""
    submit = asyncio.run_coroutine_threadsafe

    def ended(coroutine: Any, loop: asyncio.AbstractEventLoop) -> Future[None]:
        future = submit(coroutine, loop)
        future.result(60)
        time.sleep(0.1)  # for the loop to wait
        return future

    async def shutdown(grace_seconds: float) -> None:
        assert grace_seconds == 0

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", ended)
    llm = object.__new__(LLM)
    llm._loop, llm._closing, llm._ending = asyncio.new_event_loop(), threading.Lock(), None
    llm._thread = threading.Thread(target=_run, args=(llm._loop,), daemon=True)
    llm._thread.start()
    llm.service = SimpleNamespace(engine=SimpleNamespace(shutdown=shutdown))  # type: ignore[assignment]
    closing = threading.Thread(target=llm.close, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive() and llm._loop.is_closed()
