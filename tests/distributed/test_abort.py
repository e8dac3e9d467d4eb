"""The runtime's `abort()` ends with a line of ours, whichever comes first."""

import subprocess
import sys

import pytest

CODE = """
import ctypes, threading, time
from concurrent.futures import Future
from serving.distributed import abort
abort.SECONDS = {patience}
over = Future()
abort.explain_aborts(over)
threading.Timer({delay}, over.set_result, ["host 0 is gone"]).start()
aborting = threading.Thread(target=ctypes.CDLL(None).abort)
aborting.start()
aborting.join()
"""


@pytest.mark.parametrize("delay, patience, line", [
    (0.0, 60.0, "host 0 is gone"), (0.3, 60.0, "host 0 is gone"), (60.0, 0.3, "the runtime has"),
])  # fmt: skip
def test_an_abort_is_explained(delay: float, patience: float, line: str):
    code = CODE.format(delay=delay, patience=patience)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.startswith(f"pageloom: {line}") and done.stderr.count("\n") == 1
