"""The engine core in its own process: how it starts, and how the two processes notice each other's end.

The parent starts `python -c BOOTSTRAP`, sends what to build down the child's standard input, and waits on a pipe for
the core's answer: ready, or the one line that says why not. Progress and tracebacks go to the inherited standard error.
Standard input stays open: its end tells the child that the parent is gone, however that died. Front ends see the core's
end as a lost connection (`socket_client.py`). The core ignores SIGINT and SIGTERM: the parent decides.
"""

import gc
import importlib
import math
import os
import pickle
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from serving.config import EngineConfig
from serving.engine.compiling import Compile
from serving.engine.core import ClientId, EngineCore
from serving.engine.messages import Command, Ready, Reply
from serving.engine.plan import Runner
from serving.engine.scheduler import Scheduler
from serving.engine.scheduler_config import SchedulerConfig
from serving.errors import ConfigError, EngineDead, PageloomError
from serving.request import EngineInfo

BOOTSTRAP = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); from serving.engine.process import main; main()"
)
MOST_UNREAD_MESSAGES = 100_000  # a front end that lets more pile up is taken for gone

# Runner, info, eos token ids, and what compiles grammars
Build = Callable[[EngineConfig], tuple[Runner, EngineInfo, tuple[int, ...], Compile | None]]


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    message: str
    is_config: bool  # else another host is gone: the same service may start the next time


class CoreProcess:
    """A running core. `address` is where front ends of any process connect."""

    def __init__(self, process: subprocess.Popen[bytes], address: str, info: EngineInfo):
        self.process, self.address, self.info = process, address, info

    def wait(self, timeout: float) -> int | None:
        """Its exit code, or None if it still runs after `timeout` seconds."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """Ends it at once, if it still runs, and removes what it leaves behind."""
        _clean_up(self.process, self.address)


def launch_core(build: str, config: EngineConfig) -> CoreProcess:
    """Starts a core from `build`, the "module:function" of a `Build`, and waits until it is ready.

    Raises `ConfigError` with the core's own message, or `EngineDead` if it died in another way."""
    address = f"ipc://{tempfile.mkdtemp(prefix='pageloom-')}/core"
    answer, write_end = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", BOOTSTRAP], stdin=subprocess.PIPE, pass_fds=[write_end], start_new_session=True
    )
    os.close(write_end)
    try:
        assert process.stdin is not None
        process.stdin.write(pickle.dumps(sys.path) + pickle.dumps((build, config, address, write_end)))
        process.stdin.flush()
        with open(answer, "rb") as pipe:
            payload = pipe.read()
        if not payload:
            code = process.wait()
            why = "as the kernel ends what needs too much memory" if code == -signal.SIGKILL else "its error is above"
            raise EngineDead(f"the engine core died at start with {_describe_exit(code)}; {why}")
        started = msgspec.msgpack.decode(payload, type=Ready | StartFailed)
        if isinstance(started, StartFailed):
            raise ConfigError(started.message) if started.is_config else EngineDead(started.message)
    except BaseException:
        _clean_up(process, address)
        raise
    return CoreProcess(process, address, started.info)


def describe_death(core: CoreProcess) -> str:
    """Why the connection to `core` broke."""
    code = core.wait(timeout=1.0)
    return (
        "the connection to the engine core broke" if code is None else f"the engine core died: {_describe_exit(code)}"
    )


def main() -> None:
    """The child's whole life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    build, config, address, answer = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_exit_with_parent, args=(os.getppid(), address), daemon=True).start()
    with open(answer, "wb") as pipe:
        try:
            runner, info, eos_token_ids, compile_grammar = _find(build)(config)
        except PageloomError as error:
            pipe.write(msgspec.msgpack.encode(StartFailed(str(error), isinstance(error, ConfigError))))
            pipe.flush()
            os._exit(2)  # jax.distributed's own end would wait for other hosts, and then complain
        except Exception:  # of any kind
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        port = SocketPort(address)
        pipe.write(msgspec.msgpack.encode(Ready(info)))
    scheduler = Scheduler(SchedulerConfig.of(runner, eos_token_ids, config))
    core = EngineCore(runner, scheduler, info, port, compile_grammar=compile_grammar,
                      check_integrity=config.check_integrity)  # fmt: skip
    gc.collect()
    gc.freeze()  # what start-up made stays; a collection need not walk it between two steps
    code, reason = 0, ""
    try:
        core.run()
    except EngineDead as error:  # it says all there is to say
        print(f"pageloom: {error}", file=sys.stderr)
        code = 1
    except Exception as error:  # of any kind, and final; what is left of the device must not keep us from ending
        traceback.print_exc()
        code, reason = 1, f"the engine of host 0 failed: {error!r}"
    port.close()
    runner.close(reason)
    _remove_folder(address)
    sys.stderr.flush()
    os._exit(code)


class SocketPort:
    """The core's end of the socket: a ROUTER, so that each front end has an address of its own."""

    def __init__(self, address: str):
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to a front end that is gone is an error
        self._socket.setsockopt(zmq.SNDHWM, MOST_UNREAD_MESSAGES)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.bind(address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)

    def receive(self, timeout: float) -> list[tuple[ClientId, Command]]:
        if timeout:
            self._socket.poll(None if timeout == math.inf else int(timeout * 1000))
        commands = []
        while True:
            try:
                client, payload = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return commands
            commands.append((client, self._decoder.decode(payload)))

    def send(self, client: ClientId, reply: Reply) -> bool:
        try:
            self._socket.send_multipart([client, self._encoder.encode(reply)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True

    def close(self) -> None:
        """Lets the last messages out, for at most a second."""
        self._socket.close(linger=1000)
        self._context.term()


def _find(build: str) -> Build:
    module, _, function = build.partition(":")
    return getattr(importlib.import_module(module), function)


def _exit_with_parent(parent: int, address: str) -> None:
    """Waits for the end of standard input; looks at the parent's id too, in case something else holds the pipe."""
    while not select.select([0], [], [], 1.0)[0] and os.getppid() == parent:
        pass
    _remove_folder(address)
    os._exit(1)


def _clean_up(process: subprocess.Popen[bytes], address: str) -> None:
    process.kill()
    process.wait()
    assert process.stdin is not None
    process.stdin.close()
    _remove_folder(address)


def _remove_folder(address: str) -> None:
    shutil.rmtree(Path(address.removeprefix("ipc://")).parent, ignore_errors=True)


def _describe_exit(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
