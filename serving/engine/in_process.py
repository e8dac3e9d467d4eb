"""The engine core in a thread of this process: for notebooks, scripts and tests. Usable from any event loop."""

import asyncio
import logging
import math
import queue
import threading
from collections.abc import Callable

from serving.config import EngineConfig
from serving.engine.compiling import Compile
from serving.engine.core import ClientId, EngineCore
from serving.engine.messages import Command, Hello, Reply, Shutdown
from serving.engine.plan import Runner
from serving.engine.scheduler import Scheduler
from serving.engine.scheduler_config import SchedulerConfig
from serving.engine.streams import Resume, StreamingClient
from serving.request import EngineInfo

log = logging.getLogger(__name__)
ME: ClientId = b"in-process"


class InProcessClient(StreamingClient):
    def __init__(self, runner: Runner, info: EngineInfo, eos_token_ids: tuple[int, ...], config: EngineConfig,
                 compile_grammar: Compile | None = None):  # fmt: skip
        super().__init__()
        self.info = info
        self.scheduler = Scheduler(SchedulerConfig.of(runner, eos_token_ids, config))
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._core = EngineCore(runner, self.scheduler, info, self, compile_grammar=compile_grammar,
                                check_integrity=config.check_integrity)  # fmt: skip
        self._thread = threading.Thread(target=self._run, name="engine-core", daemon=True)
        self._inbox.put(Hello())
        self._thread.start()

    async def shutdown(self, grace_seconds: float) -> None:
        self._send(Shutdown(grace_seconds))
        await asyncio.to_thread(self._thread.join)

    # The core's port, called in its thread.

    def receive(self, timeout: float) -> list[tuple[ClientId, Command]]:
        commands = []
        try:
            if timeout:
                commands.append((ME, self._inbox.get(timeout=None if timeout == math.inf else timeout)))
            while True:
                commands.append((ME, self._inbox.get_nowait()))
        except queue.Empty:
            return commands

    def send(self, client: ClientId, reply: Reply) -> bool:
        self._receive(reply)
        return True

    def _run(self) -> None:
        try:
            self._core.run()
        except Exception as error:  # of any kind: callers get EngineDead, the log the whole story
            log.exception("the engine core failed")
            self._died(f"the engine core failed: {error!r}")
        else:
            self._died("the engine was shut down")

    def _send(self, command: Command) -> None:
        self._inbox.put(command)

    def _waker(self) -> Callable[[Resume], object]:
        loop = asyncio.get_running_loop()

        def wake(resume: Resume) -> None:
            if not loop.is_closed():  # else nobody waits there any more
                loop.call_soon_threadsafe(resume)

        return wake
