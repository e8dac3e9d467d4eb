"""A front end's connection to an engine core in another process. It belongs to the event loop it was opened in."""

import asyncio
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio

from serving.engine.messages import Command, Goodbye, Hello, Ready, Reply, Shutdown
from serving.engine.process import CoreProcess, describe_death
from serving.engine.streams import Resume, StreamingClient
from serving.errors import EngineDead

DAY = 24 * 60 * 60 * 1000  # in milliseconds


class SocketClient(StreamingClient):
    """Made by `connect`. A lost connection, noticed within milliseconds, means that the core is gone for good."""

    def __init__(self, address: str, process: CoreProcess | None):
        super().__init__()
        self._process = process
        self._gone = asyncio.Event()
        self._shutting_down = False
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # no limit, so that sending never waits
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, DAY)  # in effect never; -1 would drop what is still to be read
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(address)
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def connect(cls, address: str, process: CoreProcess | None = None, timeout: float = 10.0) -> "SocketClient":
        """`process`, where this process launched the core: its end can then be told more exactly, and enforced.

        Raises `EngineDead` if no core answers."""
        client = cls(address, process)
        client._send(Hello())
        try:
            payload = await asyncio.wait_for(client._socket.recv(), timeout)
        except TimeoutError:
            await client.close()
            raise EngineDead(f"no engine core answers at {address} within {timeout:g} s") from None
        ready = client._decoder.decode(payload)
        assert isinstance(ready, Ready)
        client.info = ready.info
        reader = asyncio.create_task(client._read())
        client._tasks = [reader, asyncio.create_task(client._watch(reader))]
        return client

    async def shutdown(self, grace_seconds: float) -> None:
        self._shutting_down = True
        if self._dead is None:
            self._send(Shutdown(grace_seconds))
            try:
                await asyncio.wait_for(self._gone.wait(), grace_seconds + 5.0)
            except TimeoutError:  # the device hangs
                pass
        if self._process is not None:
            if self._gone.is_set():  # it is about to exit by itself
                await asyncio.to_thread(self._process.wait, 2.0)
            await asyncio.to_thread(self._process.kill)
        await self.close()

    async def close(self) -> None:
        """Detaches this front end, which aborts its requests. The core goes on. Closing again does nothing."""
        if self._socket.closed:
            return
        if self._dead is None:
            self._send(Goodbye())
            self._died("this front end has detached from the engine core")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0 if self._gone.is_set() else 1000)
        await asyncio.to_thread(self._context.term)

    async def _read(self) -> None:
        while True:
            await self._socket.poll()  # unlike a `recv`, it can be cancelled without losing a message
            await self._receive_all()

    async def _receive_all(self) -> None:
        while True:
            try:
                payload = await self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._receive(self._decoder.decode(payload))

    async def _watch(self, reader: asyncio.Task[None]) -> None:
        await self._monitor.recv_multipart()
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        await self._receive_all()  # what the core said last
        if self._shutting_down:
            self._died("the engine was shut down")
        elif self._process is None:
            self._died("the connection to the engine core broke")
        else:
            self._died(await asyncio.to_thread(describe_death, self._process))
        self._gone.set()

    def _send(self, command: Command) -> None:
        self._socket.send(self._encoder.encode(command))  # done at once: there is no limit to wait for

    def _waker(self) -> Callable[[Resume], object]:
        return lambda resume: resume()  # replies arrive in the consumers' own loop
