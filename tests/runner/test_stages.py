"""Greedy tokens through the engine on pipeline meshes: prompts cut into micro-batches, then decoding."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from serving.errors import ConfigError
from serving.llm import LLM, RequestOutput, SamplingParams
from tests.tolerances import LOGITS_FLOAT32

GOLDENS = Path(__file__).parents[1] / "goldens"
SIZES = dict(max_num_seqs=2, max_num_batched_tokens=64, num_pages=40, block_size=8, dtype="float32")


def run(model: Path, tokenizer: str, mesh: str) -> list[RequestOutput]:
    golden = np.load(GOLDENS / "olmo2" / "golden.npz" if model.parent != GOLDENS else model / "golden.npz")
    prompts = [{"prompt_token_ids": golden[f"prompt_{i}"].tolist()} for i in range(3)]
    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, prompt_logprobs=1)
    with LLM(str(model), tokenizer=tokenizer, mesh=mesh, progress=True, check_integrity=True, **SIZES) as llm:
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        assert llm.service.engine.stats.compile_misses == 0
        return outputs


@pytest.mark.parametrize("name, mesh", [
    ("olmo2", "pipeline=2"),
    pytest.param("gpt-oss", "pipeline=2,tensor=2,data=2", marks=pytest.mark.slow),
])  # fmt: skip
def test_greedy(name: str, mesh: str, tokenizer: str, capsys: pytest.CaptureFixture[str]):
    golden = np.load(GOLDENS / name / "golden.npz")
    for number, output in enumerate(run(GOLDENS / name, tokenizer, mesh)):
        assert output.outputs[0].token_ids == golden[f"greedy_{number}"].tolist(), f"prompt {number}"
    told = capsys.readouterr().err
    assert "Decoding (2 tokens x 2 rows) passes 2 stages whole: 50% of their time is idle" in told
    assert "The largest step (64 tokens x 2 rows) passes 2 stages in 4 micro-batches: 20% of their time is idle" in told


@pytest.mark.slow
def test_four_stages(tmp_path: Path, tokenizer: str):
    """Two layers twice: tokens and prompts' log-probabilities as on one device."""
    config = json.loads((GOLDENS / "olmo2" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    weights = load_file(GOLDENS / "olmo2" / "model.safetensors")
    again = {f"layers.{layer}.": f"layers.{layer + 2}." for layer in range(2)}
    more = {name.replace(old, new): value for name, value in weights.items() for old, new in again.items()
            if old in name}  # fmt: skip
    save_file(weights | more, tmp_path / "model.safetensors")
    for one, four in zip(run(tmp_path, tokenizer, "1x1"), run(tmp_path, tokenizer, "pipeline=4,data=2"), strict=True):
        assert one.outputs[0].token_ids == four.outputs[0].token_ids
        assert one.prompt_logprobs is not None and four.prompt_logprobs is not None
        for want, got in zip(one.prompt_logprobs[1:], four.prompt_logprobs[1:], strict=True):
            assert want is not None and got is not None and want.token_id == got.token_id
            np.testing.assert_allclose(got.logprob, want.logprob, atol=LOGITS_FLOAT32)


def test_layers_that_do_not_divide_are_refused_at_start(tokenizer: str):
    with pytest.raises(ConfigError, match="--mesh pipeline=2 does not divide this model's layers.*pipeline=3 would"):
        LLM(str(GOLDENS / "llama2-mha"), tokenizer=tokenizer, mesh="pipeline=2", progress=False, **SIZES)
