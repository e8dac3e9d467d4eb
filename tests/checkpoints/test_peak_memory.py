"""What loading takes of the host's memory, measured: the shards of its devices and next to nothing beside them."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoints.llama import write_llama

D, F, LAYERS = 1024, 2816, 4  # with what is below 222 MB in float32
LARGEST = 4 * LAYERS * D * F  # bytes of the largest parameter
SLACK = LARGEST // 2  # an eighth is a device's shard of it; the rest is allocators and threads

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = dict(vocab_size=8192, hidden_size=D, intermediate_size=F, num_hidden_layers=LAYERS, head_dim=64,
                 num_attention_heads=16, num_key_value_heads=8)  # fmt: skip
    return write_llama(tmp_path_factory.mktemp("memory") / "model", lambda shape: np.ones(shape, np.float32), **sizes)


def start(devices: int, *arguments: str) -> subprocess.Popen:
    environment = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    return subprocess.Popen([sys.executable, "-m", "tests.checkpoints.peak_memory", *arguments], env=environment,
                            stdout=subprocess.PIPE, text=True)  # fmt: skip


def measured(process: subprocess.Popen) -> dict[str, int]:
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0
    print(out)
    return json.loads(out.splitlines()[-1])


def test_a_process_with_all_devices(folder: Path):
    taken = measured(start(8, str(folder), "8x1"))
    model = (folder / "model.safetensors").stat().st_size
    assert 0.99 < taken["shards"] / model < 1.01  # norms are on every device, all else is on one
    assert taken["shards"] < taken["peak"] < taken["shards"] + SLACK


def test_a_host_reads_what_its_devices_hold(folder: Path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    hosts = [start(4, str(folder), "8x1", coordinator, str(rank)) for rank in range(2)]
    try:
        taken = [measured(host) for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    model = (folder / "model.safetensors").stat().st_size
    for one in taken:
        assert one["devices"] == 4 and 0.49 < one["shards"] / model < 0.51
        assert one["shards"] < one["peak"] < one["shards"] + SLACK < model * 0.7
