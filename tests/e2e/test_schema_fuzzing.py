"""schemathesis, unmodified, makes requests from our OpenAPI document: no 5xx, and no answer that it does not allow."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.servers import Server

CHECKS = ("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance",
          "response_headers_conformance", "negative_data_rejection")  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(850)
def test_requests_made_from_the_schema(start_tiny: Callable[..., Server], tmp_path: Path):
    server = start_tiny("--max-model-len", "64")  # requests without max_tokens fill the context
    command = [
        str(Path(sys.executable).with_name("schemathesis")), "run", f"{server.url}/openapi.json",
        "--checks", ",".join(CHECKS), "--phases", "coverage,fuzzing", "--max-examples", "3",
        "--seed", "1", "--generation-database", "none",
        "--request-timeout", "120", "--continue-on-failure", "--no-color",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2000:]
    assert "19 passed" in done.stdout
    assert "Traceback" not in server.log
