"""What hosts compare: the same drafter may lie in another folder, and another one may not."""

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from serving.build import host_fingerprint
from serving.config import EngineConfig
from serving.decoding.speculation.config import SpeculativeConfig
from serving.distributed.hosts import describe_difference

MODEL = Path(__file__).parents[1] / "goldens" / "olmo2"


def host(folder: Path, scale: float = 1.0, **more: Any) -> dict[str, str]:
    """Of one whose heads are in this folder."""
    folder.mkdir()
    (folder / "config.json").write_text('{"medusa_num_heads": 1, "medusa_num_layers": 1}')
    save_file({"0.0.linear.weight": np.eye(4, dtype=np.float32) * scale}, folder / "model.safetensors")
    given = {"method": "medusa", "model": str(folder), "num_speculative_tokens": 1, **more}
    return host_fingerprint(EngineConfig(model=str(MODEL), speculative_config=SpeculativeConfig.of(given)), False)


def test_a_drafter_counts_as_the_model_does(tmp_path: Path):
    ours = host(tmp_path / "a")
    assert describe_difference(ours, host(tmp_path / "b")) == ""
    assert "the drafter's sampled weights" in describe_difference(ours, host(tmp_path / "c", scale=2.0))
    assert "--speculative-config" in describe_difference(ours, host(tmp_path / "d", adaptive=False))
    without = host_fingerprint(EngineConfig(model=str(MODEL)), False)
    assert "--speculative-config: None there" in describe_difference(ours, without)
    assert {name for name in ours if name not in without} == {
        "the drafter's medusa_num_heads", "the drafter's medusa_num_layers", "the drafter's tensors' names and shapes",
        "the drafter's sampled weights",
    }  # fmt: skip
