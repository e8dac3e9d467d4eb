"""The engine on meshes with a context axis: greedy tokens and log-probabilities of one device, whatever the scheduler
does on the way, and what a step that is spread over the axis looks like to the compiler."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.build import choose_kernels, model_rules, model_shapes
from model.families.registry import read_config
from model.transformer import with_params
from serving.errors import ConfigError
from serving.llm import LLM, RequestOutput, SamplingParams
from serving.runner import runner
from serving.runner.memory import bytes_per_device
from serving.runner.programs import StepProgram, param_shapes
from serving.runner.shapes import Spreading, StepShape, pick_shape, step_shapes
from sharding.mesh import make_mesh, parse_mesh
from tests.model.harness import config_json
from tests.tolerances import LOGITS_FLOAT32

GOLDENS = Path(__file__).parents[1] / "goldens"
SIZES = dict(max_model_len=256, max_num_seqs=4, max_num_batched_tokens=64, dtype="float32", block_size=4)
THRESHOLD = 48
rng = np.random.default_rng(4)
SHARED = rng.integers(0, 60, 100).tolist()
LENGTHS = (55, 3, 37, 70)  # of prompts, after the shared tokens where they are long


def prompts(round_: int) -> list[dict]:
    """The second round finds the first tokens of two prompts in the cache."""
    tokens = np.random.default_rng(round_)
    return [{"prompt_token_ids": (SHARED + tokens.integers(0, 60, n).tolist() if n > 50 else
                                  tokens.integers(0, 60, n).tolist())} for n in LENGTHS]  # fmt: skip


def run(name: str, tokenizer: str, **options) -> tuple[list[RequestOutput], LLM]:
    llm = LLM(str(GOLDENS / name), tokenizer=tokenizer, progress=False, check_integrity=True, **(SIZES | options))
    outputs = []
    for round_, wanted in enumerate((None, 1)):  # log-probabilities of a prompt are not in the prefix cache
        greedy = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logprobs=1, prompt_logprobs=wanted)
        outputs += llm.generate(prompts(0) + prompts(round_), greedy, use_tqdm=False)
    assert llm.service.engine.stats.compile_misses == 0
    return outputs, llm


def check(name: str, tokenizer: str, mesh: str, **options) -> LLM:
    want, plain = run(name, tokenizer)
    plain.close()
    got, llm = run(name, tokenizer, mesh=mesh, context_parallel_threshold=THRESHOLD, **options)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        for kind in (lambda x: x.prompt_logprobs, lambda x: x.outputs[0].logprobs):
            values = [[0 if at is None else at.logprob for at in kind(x) or ()] for x in (ours, theirs)]
            np.testing.assert_allclose(*values, atol=2 * LOGITS_FLOAT32)
    return llm


@pytest.mark.slow
def test_everything_that_a_scheduler_does(tokenizer, monkeypatch):
    """Chunks of long prompts, prefix cache, preemption, decoding after it; log-probabilities of prompts and tokens."""
    picked = []
    monkeypatch.setattr(runner, "pick_shape", lambda *args: picked.append(pick_shape(*args)) or picked[-1])
    with check("llama-gqa-tied", tokenizer, "context=4", num_pages=17) as llm:
        stats = llm.service.engine.stats
        assert stats.prefix_cache_hits > 0 and stats.num_preemptions > 0
    chunks = {shape.context for shape in picked if shape.num_tokens > shape.num_rows}
    assert chunks == {1, 4}, "chunks below the threshold, and spread ones"


@pytest.mark.slow
@pytest.mark.parametrize("name, mesh, options", [
    pytest.param("gemma3", "context=2,tensor=2,data=2", {}, marks=pytest.mark.matrix),
    ("gpt-oss", "context=4", {}),
    ("qwen3-moe", "context=2,tensor=2,data=2", dict(enable_expert_parallel=True)),
])  # fmt: skip
def test_greedy_goldens(name: str, mesh: str, options: dict, tokenizer: str):
    """Windows, sinks, experts; steps of 8 tokens and more are spread."""
    golden = np.load(GOLDENS / name / "golden.npz")
    sizes = dict(max_num_seqs=2, max_num_batched_tokens=16, num_pages=40, block_size=4, dtype="float32")
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    with LLM(str(GOLDENS / name), tokenizer=tokenizer, mesh=mesh, context_parallel_threshold=8, progress=False,
             check_integrity=True, **sizes, **options) as llm:
        prompts = [{"prompt_token_ids": golden[f"prompt_{i}"].tolist()} for i in range(3)]
        outputs = llm.generate(prompts, greedy, use_tqdm=False)
        assert llm.service.engine.stats.compile_misses == 0
    for number, output in enumerate(outputs):
        assert output.outputs[0].token_ids == golden[f"greedy_{number}"].tolist(), f"prompt {number}"


# What the compiler sees


def compiled_step(mesh: str, shape: StepShape, num_pages: int) -> tuple[str, int]:
    """(optimized HLO of one device, bytes of KV on it) of a tiny model's step."""
    config = read_config(config_json("llama-gqa-tied"))
    rules, dtype = model_rules(config, make_mesh(parse_mesh(mesh))), jnp.dtype("float32")
    kernels = choose_kernels(config, rules, dtype, attention_backend="xla", page_size=16)
    model = model_shapes(config, rules, kernels, dtype)
    program = StepProgram(with_params(model, param_shapes(model)), kernels, max_num_seqs=4)
    state = program.state_shapes(num_pages)
    jitted, arguments = program.step(shape, state, 16)
    return jitted.lower(*arguments).compile().as_text(), bytes_per_device(state.kv_pages)


def test_a_long_step_is_spread_and_others_are_not():
    """Every device computes a quarter of the tokens and sends KV around; a pool takes a quarter on each device."""
    ffn = config_json("llama-gqa-tied")["intermediate_size"]
    spread, kv_bytes = compiled_step("context=4", StepShape(128, 4, 4), 40)
    assert f"f32[32,{ffn}]" in spread and f"f32[128,{ffn}]" not in spread
    assert "collective-permute" in spread
    shared, _ = compiled_step("context=4", StepShape(128, 4), 40)
    assert f"f32[128,{ffn}]" in shared and "collective-permute" not in shared
    assert kv_bytes == bytes_per_device(one_pool(40)) // 4


def one_pool(num_pages: int) -> jax.Array:
    """On one device."""
    config = read_config(config_json("llama-gqa-tied"))
    shape = num_pages, 16, 2, config.num_kv_heads, config.head_dim
    return jnp.zeros((config.num_layers, *shape), jnp.float32)


# Shapes


SPREADING = Spreading(context=4, threshold=100)


def test_shapes_with_a_context_axis():
    shapes = step_shapes(8, 256, SPREADING)
    assert [shape for shape in shapes if shape.context > 1] == [StepShape(192, 8, 4), StepShape(320, 8, 4)]
    assert str(shapes[-3]) == "64 tokens x 8 rows" and shapes[-1] == StepShape(256, 8)
    assert "spread over context=4" in str(StepShape(192, 8, 4))


@pytest.mark.parametrize("groups, want", [
    ([[1, 1, 126]], StepShape(192, 8, 4)),
    ([[1, 1, 97]], StepShape(128, 8)),  # below the threshold
    ([[], [1, 1, 99]], StepShape(192, 8, 4)),  # the group that has most decides
    ([[1] * 7 + [249]], StepShape(320, 8, 4)),  # a full step fits
    ([[1] * 8], StepShape(8, 8)),
])  # fmt: skip
def test_which_steps_are_spread(groups, want):
    assert pick_shape(step_shapes(8, 256, SPREADING), groups, SPREADING) == want


def test_too_many_chunks_are_not_spread():
    shapes, spreading = step_shapes(16, 256, SPREADING), SPREADING
    assert pick_shape(shapes, [[20] * 8], spreading).context == 4
    assert pick_shape(shapes, [[20] * 9], spreading) == StepShape(256, 16)


@pytest.mark.parametrize("options, message", [
    (dict(context_parallel_threshold=8), "--context-parallel-threshold 8: --mesh 1x1 has no context axis"),
    (dict(context_parallel_threshold=65, mesh="context=2"), "threshold 65: no step has more than .* 64"),
    (dict(context_parallel_threshold=0, mesh="context=2"), "--context-parallel-threshold is 0, must be at least 1"),
])  # fmt: skip
def test_thresholds_that_nothing_reaches(tokenizer, options: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        LLM(str(GOLDENS / "llama-gqa-tied"), tokenizer=tokenizer, progress=False, **(SIZES | options))
