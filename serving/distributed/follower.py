"""The whole life of a process that follows: it runs what host 0 runs, step by step, and reads no results.

Exit codes: 0 when host 0 ends the service, 1 when a host is gone, 2 when the service cannot start as configured.
SIGTERM is not the end: a cluster sends it to all hosts at once, and host 0 lets its requests finish. So it goes on
for host 0's grace period, or until a second signal.
"""

import os
import queue
import signal
import sys
import threading
import traceback
from types import FrameType
from typing import NoReturn

import jax

from serving.build import build
from serving.config import EngineConfig
from serving.distributed.following import FollowerHosts
from serving.distributed.steps import from_message
from serving.errors import ConfigError, EngineDead, PageloomError
from serving.runner.runner import ModelRunner

EXTRA_GRACE_SECONDS = 15.0  # beyond host 0's own


def follow(config: EngineConfig, grace_seconds: float) -> NoReturn:
    """Never returns: nobody should wait for the threads of jax.distributed."""
    try:
        built = build(config, progress=False)
    except PageloomError as error:
        _leave(str(error), 2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        _leave("", 130)
    except Exception:  # of any kind; host 0 knows
        traceback.print_exc()
        _leave("", 1)
    assert isinstance(built.hosts, FollowerHosts)
    hosts = built.hosts
    print(f"Host {hosts.plan.rank} of {hosts.plan.count} follows {hosts.plan.name(0)}", file=sys.stderr, flush=True)
    _outlive_signals(grace_seconds)
    try:
        _run(built.runner, hosts)
    except EngineDead as error:
        _leave(str(error), 1)
    except Exception as error:  # of any kind: host 0 must hear of it
        if hosts.is_over(within=2.0):  # a collective may notice before the connection does
            _leave(hosts.over.result(), 1)
        traceback.print_exc()
        hosts.fail(error)
        _leave("", 1)
    _leave("", 0)


def _run(runner: ModelRunner, hosts: FollowerHosts) -> None:
    outputs: queue.SimpleQueue[jax.Array] = queue.SimpleQueue()
    threading.Thread(target=_watch, args=(outputs, hosts), daemon=True).start()
    while (message := hosts.next_step()) is not None:
        step = runner.execute(from_message(message, runner.num_groups))
        outputs.put(step.sampled)


def _watch(outputs: "queue.SimpleQueue[jax.Array]", hosts: FollowerHosts) -> None:
    """Nobody reads results here, so nobody would see that a step has failed on the device."""
    while True:
        try:
            outputs.get().block_until_ready()
        except Exception as error:  # of any kind
            if not hosts.is_over(within=2.0):
                hosts.fail(error)
                _leave(f"a step failed on {hosts.plan.name(hosts.plan.rank)}: {error!r}", 1)
            return


def _outlive_signals(grace_seconds: float) -> None:
    def end(number: int, frame: FrameType | None) -> None:
        if timers:
            _leave("a second signal: this host ends before host 0", 1)
        timer = threading.Timer(grace_seconds + EXTRA_GRACE_SECONDS, _leave, ("host 0 has not ended in time", 1))
        timer.daemon = True
        timers.append(timer)
        timer.start()

    timers: list[threading.Timer] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)


def _leave(message: str, code: int) -> NoReturn:
    """At once: what jax leaves running would wait for hosts that are gone."""
    if message:
        print(f"pageloom: {message}", file=sys.stderr, flush=True)
    os._exit(code)

