"""Runs the front ends of one service in one event loop, until a signal or the engine's death.

    SIGTERM, SIGINT   no new requests (503, UNAVAILABLE); live ones finish or are aborted after the grace period; exit 0
    a second signal   no grace
    engine dead       live and new requests get 503, UNAVAILABLE; exit 1 within seconds
"""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc
import uvicorn

from serving.api.grpc.server import create_grpc_server
from serving.api.http.app import create_app
from serving.api.http.protocol import Http
from serving.api.service import Service
from serving.config import ServerConfig
from serving.errors import ConfigError, EngineDead

log = logging.getLogger(__name__)
HEALTH_POLL_SECONDS = 0.25
LAST_ANSWERS_SECONDS = 2  # for answers that are on their way when the engine has ended


@dataclass(frozen=True)
class Ports:
    """Addresses that are ours from the start, though nothing listens on them yet."""

    http: socket.socket
    grpc: socket.socket | None

    @property
    def http_port(self) -> int:
        return self.http.getsockname()[1]

    @property
    def grpc_port(self) -> int | None:
        return None if self.grpc is None else self.grpc.getsockname()[1]

    def listen(self) -> None:
        """Connections inherit SO_REUSEADDR, so that the port can be had again as soon as this server has ended."""
        self.http.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.http.listen()

    def close(self) -> None:
        self.http.close()
        if self.grpc is not None:
            self.grpc.close()


def _bind(host: str, port: int, flag: str) -> socket.socket:
    """Without SO_REUSEADDR at first: with it, two servers that are still loading could both have the port. But after a
    restart only SO_REUSEADDR gets past the closed connections of the last server, if those had it too: see `listen`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    reason = ""
    for reuse in (0, 1):
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        try:
            listener.bind((host, port))
            return listener
        except (OSError, OverflowError) as error:
            listener.close()
            reason = error.strerror if isinstance(error, OSError) else str(error)
    raise ConfigError(f"cannot bind {host}:{port}: {reason}; choose another with --host or {flag}")


def bind_ports(config: ServerConfig) -> Ports:
    """Takes the ports before anything slow happens. Raises `ConfigError` when one is busy."""
    http = _bind(config.host, config.port, "--port")
    if config.grpc_port is None:
        return Ports(http, None)
    try:
        probe = _bind(config.host, config.grpc_port, "--grpc-port")  # fails where anybody listens
    except ConfigError:
        http.close()
        raise
    host, port = probe.getsockname()[:2]
    probe.close()
    # gRPC binds by itself; it can share the port with this placeholder because both say SO_REUSEPORT.
    placeholder = socket.socket(http.family, socket.SOCK_STREAM)
    placeholder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    placeholder.bind((host, port))
    return Ports(http, placeholder)


class _Uvicorn(uvicorn.Server):
    """Leaves the signals to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def _signals(handler: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    handled = (signal.SIGTERM, signal.SIGINT)
    for number in handled:
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in handled:
            loop.remove_signal_handler(number)


async def _engine_death(service: Service) -> EngineDead:
    """Returns when the engine is dead."""
    while True:
        try:
            service.engine.check_health()
        except EngineDead as error:
            return error
        await asyncio.sleep(HEALTH_POLL_SECONDS)



async def _drain(service: Service, hurry: asyncio.Event) -> None:
    """Lets live requests finish for the grace period, or until told to hurry; ends the engine."""
    service.lifecycle.draining = True
    ending = asyncio.ensure_future(service.engine.shutdown(service.config.shutdown_grace_seconds))
    hurrying = asyncio.ensure_future(hurry.wait())
    await asyncio.wait((ending, hurrying), return_when=asyncio.FIRST_COMPLETED)
    hurrying.cancel()
    if not ending.done():
        ending.cancel()
        await asyncio.gather(ending, return_exceptions=True)
        await service.engine.shutdown(0.0)
    else:
        ending.result()


async def serve_apis(service: Service, ports: Ports, on_ready: Callable[[], None] = lambda: None) -> int:
    """Serves until the end and returns the exit code. `on_ready` is called once requests are answered."""
    stop, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            hurry.set()
        stop.set()

    http = _Uvicorn(uvicorn.Config(
        create_app(service), log_level="warning", access_log=False, lifespan="off", http=Http, ws="none",
        timeout_graceful_shutdown=LAST_ANSWERS_SECONDS, timeout_keep_alive=75, server_header=False,
    ))  # fmt: skip
    rpc: grpc.aio.Server | None = None
    with _signals(on_signal):
        if ports.grpc is not None:
            host, port = ports.grpc.getsockname()[:2]
            rpc = create_grpc_server(service, f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
            await rpc.start()
        ports.listen()
        serving = asyncio.ensure_future(http.serve([ports.http]))
        death = asyncio.ensure_future(_engine_death(service))
        stopping = asyncio.ensure_future(stop.wait())
        try:
            while not http.started and not serving.done():
                await asyncio.sleep(0.01)
            on_ready()
            await asyncio.wait((serving, death, stopping), return_when=asyncio.FIRST_COMPLETED)
            died = death.done()
            death.cancel()
            if died:
                log.error("the server ends: %s", death.result())
                service.lifecycle.draining = True
                with contextlib.suppress(TimeoutError):  # nobody may be left who could answer
                    await asyncio.wait_for(service.engine.shutdown(0.0), LAST_ANSWERS_SECONDS)
            else:
                await _drain(service, hurry)
        finally:
            await service.lifecycle.end_background()
            http.should_exit = True
            if rpc is not None:
                await rpc.stop(LAST_ANSWERS_SECONDS)
            await serving
            stopping.cancel()
            ports.close()
    return 1 if died else 0
