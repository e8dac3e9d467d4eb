"""The runtime's `abort()` ends with a line of ours, whichever comes first."""

import subprocess
import sys

import pytest

CODE = """
import ctypes, threading, time
from concurrent.futures import Future
from serving.distributed import abort
abort.SECONDS = 1.0
over = Future()
abort.explain_aborts(over)
threading.Timer({delay}, over.set_result, ["host 0 is gone"]).start()
aborting = threading.Thread(target=ctypes.CDLL(None).abort)
aborting.start()
aborting.join()
"""


@pytest.mark.parametrize("delay, line", [(0.0, "host 0 is gone"), (0.3, "host 0 is gone"), (5.0, "the runtime has")])
def test_an_abort_is_explained(delay: float, line: str):
    done = subprocess.run([sys.executable, "-c", CODE.format(delay=delay)], capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert done.stderr.startswith(f"pageloom: {line}") and done.stderr.count("\n") == 1
