"""What loading takes of the host's memory, measured: the shards of its devices and next to nothing beside them."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.e2e.tiny_model import CONFIG

V, D, F, N, K, H, LAYERS = 8192, 1024, 2816, 16, 8, 64, 4  # 222 MB in float32
LARGEST = 4 * LAYERS * D * F  # bytes of the largest parameter
SLACK = LARGEST // 2  # an eighth is a device's shard of it; the rest is allocators and threads

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory") / "model"
    folder.mkdir()
    sizes = dict(vocab_size=V, hidden_size=D, intermediate_size=F, num_hidden_layers=LAYERS, num_attention_heads=N,
                 num_key_value_heads=K, head_dim=H)  # fmt: skip
    shapes = {"model.embed_tokens": (V, D), "model.norm": (D,)}
    for layer in range(LAYERS):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in {
            "input_layernorm": (D,), "post_attention_layernorm": (D,), "self_attn.q_proj": (N * H, D),
            "self_attn.k_proj": (K * H, D), "self_attn.v_proj": (K * H, D), "self_attn.o_proj": (D, N * H),
            "mlp.gate_proj": (F, D), "mlp.up_proj": (F, D), "mlp.down_proj": (D, F),
        }.items()}  # fmt: skip
    save_file({f"{name}.weight": np.ones(shape, np.float32) for name, shape in shapes.items()},
              folder / "model.safetensors")  # fmt: skip
    (folder / "config.json").write_text(json.dumps({**CONFIG, **sizes}))
    return folder


def start(devices: int, *arguments: str) -> subprocess.Popen:
    environment = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    return subprocess.Popen([sys.executable, "-m", "tests.checkpoints.peak_memory", *arguments], env=environment,
                            stdout=subprocess.PIPE, text=True)  # fmt: skip


def measured(process: subprocess.Popen) -> dict[str, int]:
    out, _ = process.communicate(timeout=120)
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
