"""A completions client that costs next to nothing, because it shares its machine with the server it measures.

One asyncio protocol per request reads the chunked HTTP/1.1 reply and looks at each server-sent event only as bytes: no
HTTP library, and JSON is parsed once a request. `Timing` holds when events arrived.
"""

import asyncio
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import msgspec


class BenchError(Exception):
    """The server answered something other than a stream of tokens."""


@dataclass(kw_only=True)
class Timing:
    """One request, in `time.perf_counter()` seconds. `arrivals` has one entry an event that carried tokens."""

    start: float
    arrivals: list[float] = field(default_factory=list)
    input_tokens: int = 0
    output_tokens: int = 0

    @property
    def ttft(self) -> float:
        return self.arrivals[0] - self.start

    @property
    def tpot(self) -> float | None:
        """Mean time of the tokens after the first; None for a single token."""
        if self.output_tokens < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.output_tokens - 1)

    @property
    def itls(self) -> list[float]:
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]


class StreamProtocol(asyncio.Protocol):
    """Sends one request, records when each event comes; `done` resolves when the reply is complete."""

    def __init__(self, request: bytes):
        self.request = request
        self.done: asyncio.Future[Timing] = asyncio.get_running_loop().create_future()
        self.timing = Timing(start=time.perf_counter())
        self._raw = b""  # not yet dechunked
        self._text = b""  # not yet split into events
        self._head = b""
        self._last_event = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._raw += data
        if not self._head:
            head, separator, rest = self._raw.partition(b"\r\n\r\n")
            if not separator:
                return
            self._head, self._raw = head.lower(), rest
        if b" 200 " not in self._head[:16]:
            return  # the whole body is the error, read when the connection closes
        self._dechunk()
        *events, self._text = self._text.split(b"\n\n")
        for event in events:
            if event == b"data: [DONE]":
                self._finish()
            elif event.startswith(b"data: "):
                self._last_event = event[6:]
                if b'"choices":[]' not in event and b'"choices": []' not in event:  # the usage event has no tokens
                    self.timing.arrivals.append(now)

    def _dechunk(self) -> None:
        while True:
            size_text, separator, rest = self._raw.partition(b"\r\n")
            if not separator:
                return
            size = int(size_text, 16)
            if len(rest) < size + 2:
                return
            self._text += rest[:size]
            self._raw = rest[size + 2 :]

    def _finish(self) -> None:
        usage = msgspec.json.decode(self._last_event).get("usage")
        if not usage or not self.timing.arrivals:
            self._fail(f"no usage or no tokens in the stream; last event: {self._last_event[:300].decode()}")
            return
        self.timing.input_tokens = usage["prompt_tokens"]
        self.timing.output_tokens = usage["completion_tokens"]
        if not self.done.done():
            self.done.set_result(self.timing)
        self.transport.close()

    def _fail(self, message: str) -> None:
        if not self.done.done():
            self.done.set_exception(BenchError(message))
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        status = self._head.split(b"\r\n")[0].decode()
        self._fail(f"the connection closed early: {status} {(self._text or self._raw)[:500].decode(errors='replace')}")


class Client:
    def __init__(self, url: str, model: str):
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise BenchError(f"--url is {url!r}, must look like http://127.0.0.1:8000")
        self.host, self.port, self.model = parts.hostname, parts.port or 80, model

    async def complete(self, prompt: list[int], output_tokens: int) -> Timing:
        """Streams exactly `output_tokens` greedy tokens, end of sequence ignored."""
        body = msgspec.json.encode({
            "model": self.model, "prompt": prompt, "max_tokens": output_tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
        })
        head = (f"POST /v1/completions HTTP/1.1\r\nHost: {self.host}:{self.port}\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n")
        loop = asyncio.get_running_loop()
        _, protocol = await loop.create_connection(
            lambda: StreamProtocol(head.encode() + body), self.host, self.port)
        timing = await protocol.done
        if timing.output_tokens != output_tokens:
            raise BenchError(f"asked for {output_tokens} tokens, got {timing.output_tokens}")
        return timing
