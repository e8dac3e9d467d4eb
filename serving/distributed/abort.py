"""jax ends a process by `abort()` once its coordinator is gone. Our own connection tells of the same death, within
milliseconds of it and with a line to print, so the abort waits for that.

Python's own signal handlers run in the main thread, later: for an abort there is no later. So this one is C's, and
calls back into Python from the thread that aborts, where it is an ordinary call.
"""

import ctypes
import os
import signal
import sys
from concurrent.futures import Future

SECONDS = 2.0
_handlers = []  # C keeps no reference


def explain_aborts(over: "Future[str]") -> None:
    """`over` will have the line."""

    def end(number: int) -> None:
        try:
            line = over.result(SECONDS)
        except TimeoutError:
            line = "the runtime has ended this process; the reason is above"
        print(f"pageloom: {line}", file=sys.stderr, flush=True)
        os._exit(1)

    _handlers.append(ctypes.CFUNCTYPE(None, ctypes.c_int)(end))
    ctypes.CDLL(None).signal(int(signal.SIGABRT), _handlers[-1])
