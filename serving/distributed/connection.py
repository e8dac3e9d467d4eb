"""One TCP connection between two hosts: whole messages both ways, a heartbeat, and the other end's death.

A thread of its own reads, and sends a beat each second. The other end is gone when its socket closes (a killed process:
at once), when nothing came from it for LOST_AFTER_SECONDS (a machine without power, a cut cable), or when what was sent
is not acknowledged for as long.
"""

import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from serving.distributed.messages import HEADER, LARGEST_FRAME, Beat

BEAT_SECONDS = 1.0
LOST_AFTER_SECONDS = 7.0


class Gone(Exception):
    """The other end is; the text says how that was noticed."""


class Connection:
    """`kind`: the messages that may come in. `receive` until `start`, which hands every later message to `on_message`
    and the end, unless `close` came first, to `on_gone`; both are called in the connection's thread."""

    def __init__(self, sock: socket.socket, kind: Any):
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(LOST_AFTER_SECONDS * 1000))
            sock.settimeout(None)
            self.peer = sock.getpeername()[0].removeprefix("::ffff:")
        except OSError:  # closed already
            sock.close()
            raise
        self._socket = sock
        self._lock = threading.Lock()  # one whole frame at a time
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._closed = False

    def send(self, message: msgspec.Struct) -> None:
        """Waits where the other end lags behind by more than the buffers hold. Raises `Gone`."""
        self.send_encoded(self._encoder.encode(message))

    def send_encoded(self, payload: bytes) -> None:
        try:
            with self._lock:
                self._socket.sendall(HEADER.pack(len(payload)) + payload)
        except OSError as error:
            raise Gone(error.strerror or str(error)) from error

    def receive(self, timeout: float, largest: int = LARGEST_FRAME) -> Any:
        """The next message. Raises `Gone`, also for nonsense and after `timeout` seconds."""
        end = time.monotonic() + timeout
        try:
            (size,) = HEADER.unpack(self._read(HEADER.size, end))
            if size > largest:
                raise Gone("what it sends is none of our messages")
            return self._decoder.decode(self._read(size, end))
        except TimeoutError as error:
            raise Gone(f"nothing came for {timeout:.3g} s") from error
        except OSError as error:
            raise Gone(error.strerror or str(error)) from error
        except msgspec.MsgspecError as error:
            raise Gone("what it sends is none of our messages") from error

    def is_silent(self) -> bool:
        """Where nothing is to come yet: whether the other end is still there."""
        return not self._readable(0)

    def start(self, on_message: Callable[[Any], None], on_gone: Callable[[str], None]) -> None:
        threading.Thread(target=self._watch, args=(on_message, on_gone), daemon=True, name=f"from {self.peer}").start()

    def close(self) -> None:
        self._closed = True
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._socket.close()

    def _watch(self, on_message: Callable[[Any], None], on_gone: Callable[[str], None]) -> None:
        heard = beaten = time.monotonic()
        try:
            while not self._closed:
                ready = self._readable(BEAT_SECONDS / 2)
                now = time.monotonic()
                if ready:
                    message = self.receive(LOST_AFTER_SECONDS)
                    heard = time.monotonic()
                    if not isinstance(message, Beat):
                        on_message(message)
                elif now - heard > LOST_AFTER_SECONDS:
                    raise Gone(f"nothing came for {LOST_AFTER_SECONDS:g} s")
                if now - beaten >= BEAT_SECONDS:
                    self.send(Beat())
                    beaten = now
        except (Gone, OSError, ValueError) as error:  # the last two: closed while waiting
            if not self._closed:
                on_gone(str(error))

    def _readable(self, seconds: float) -> bool:
        """The socket itself stays blocking: a timeout of its own would hold for the thread that sends, too."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(max(seconds, 0.0) * 1000))

    def _read(self, size: int, end: float) -> bytes:
        data = bytearray(size)
        view, at = memoryview(data), 0
        while at < size:
            if not self._readable(end - time.monotonic()):
                raise TimeoutError
            count = self._socket.recv_into(view[at:])
            if count == 0:
                raise Gone("its connection closed")
            at += count
        return bytes(data)
