"""Medusa heads against their formula, whoever wrote the checkpoint, on one device and on a mesh."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from checkpoints.errors import CheckpointError
from model.build import model_rules
from model.config import ModelConfig
from model.families.registry import read_config
from model.speculative.medusa import Medusa, medusa_sources, read_medusa_config
from serving.decoding.speculation.token_trees import PUBLISHED
from sharding.mesh import make_mesh, parse_mesh
from tests.model.drafting import loaded, paths_of, sampling_rows, settled
from tests.model.harness import batch, config_json
from tests.tolerances import LOGITS_FLOAT32

TARGET: ModelConfig = read_config(config_json("llama-gqa-tied"))
F32 = jnp.dtype("float32")
HEADS, V, D = 3, TARGET.vocab_size, TARGET.hidden_size
RNG = np.random.default_rng(0)
MATRIX = RNG.normal(size=(V, D)).astype(np.float32)  # the target's
FEATURES = RNG.normal(size=(16, D)).astype(np.float32)


def tensors(blocks: int, output: str, *, bias: bool = True, style: str = "published") -> dict[str, np.ndarray]:
    """A checkpoint as FasterDecoding's trainer names it ("published"), as it stores the heads alone ("bare"), or as
    vLLM wants it."""
    rng, found = np.random.default_rng(blocks), {}
    prefix = {"published": "medusa_head.", "bare": "", "vllm": ""}[style]
    for head in range(HEADS):
        for block in range(blocks):
            name = f"blocks.{head}.layers.{block}" if style == "vllm" else f"{prefix}{head}.{block}.linear"
            found[f"{name}.weight"] = rng.normal(size=(D, D), scale=0.3).astype(np.float32)
            if bias:
                found[f"{name}.bias"] = rng.normal(size=D).astype(np.float32)
        if output == "own" or (output == "shared" and head == 0):
            name = f"lm_heads.{head}" if style == "vllm" else f"{prefix}{head}.{blocks}"
            found[f"{name}.weight"] = rng.normal(size=(V, D)).astype(np.float32)
    return found


def by_formula(of: dict[str, np.ndarray], blocks: int, output: str, hidden: np.ndarray) -> np.ndarray:
    """Logits [heads, rows, V]. of: under published names."""
    logits = []
    for head in range(HEADS):
        x = hidden.astype(np.float64)
        for block in range(blocks):
            name = f"medusa_head.{head}.{block}.linear"
            y = x @ of[f"{name}.weight"].T + of.get(f"{name}.bias", 0)
            x = x + y / (1 + np.exp(-y))
        matrix = MATRIX if output == "target" else of[f"medusa_head.{head if output == 'own' else 0}.{blocks}.weight"]
        logits.append(x @ matrix.T)
    return np.stack(logits)


def hf_config(blocks: int, output: str, **more) -> dict:
    tied = {"tie_word_embeddings": True} if output == "target" else {}
    shared = {"original_lm_head": True} if output == "shared" else {}
    return {"medusa_num_heads": HEADS, "medusa_num_layers": blocks, **tied, **shared, **more}


def make(tmp_path: Path, hf: dict, of: dict[str, np.ndarray], tree=None, mesh: str = "1x1") -> Medusa:
    save_file(of, tmp_path / "medusa_lm_head.safetensors")
    config, rules = read_medusa_config(hf, TARGET, of), model_rules(TARGET, make_mesh(parse_mesh(mesh)))
    shapes = nnx.eval_shape(lambda: Medusa(config, TARGET, rules, tree=tree, rngs=nnx.Rngs(0), dtype=F32))
    sources = medusa_sources(config, of)
    assert set(sources) == set(paths_of(shapes))
    return loaded(shapes, rules, sources, tmp_path)


@pytest.mark.parametrize("style", ["published", "bare", "vllm"])
@pytest.mark.parametrize("output", ["own", "shared", "target"])
def test_logits(tmp_path: Path, output: str, style: str):
    blocks = 2 if output == "own" else 1
    hf = hf_config(blocks, output)
    if style == "vllm":
        hf = {"num_heads": HEADS, "num_hidden_layers": blocks, "medusa_fc_bias": True, "model_type": "medusa",
              "hidden_size": D, "vocab_size": V, "truncated_vocab_size": V,
              **{key: value for key, value in hf.items() if not key.startswith("medusa")}}  # fmt: skip
    medusa = make(tmp_path, hf, tensors(blocks, output, style=style))
    wanted = by_formula(tensors(blocks, output), blocks, output, FEATURES)
    got = nnx.jit(lambda medusa, *args: medusa.logits(*args))(medusa, jnp.asarray(FEATURES), jnp.asarray(MATRIX))
    np.testing.assert_allclose(got, wanted, atol=LOGITS_FLOAT32)


@pytest.mark.parametrize("mesh, output", [("1x1", "own"), ("tensor=2,data=2", "own"), ("tensor=2,data=2", "target")])
@pytest.mark.parametrize("tree", [None, ((0,), (1,), (4,), (0, 0), (0, 2), (1, 0), (0, 0, 0), (0, 2, 1))])
def test_drafts_are_the_heads_best_tokens(tmp_path: Path, mesh: str, output: str, tree):
    """In three rows of 5, 1 and 4 tokens, the last of which has two rejected drafts."""
    medusa = make(tmp_path, hf_config(1, output), tensors(1, output), tree, mesh)
    groups = medusa.rules.num_groups
    step = batch([([1] * 5, 3), ([2], 9), ([3] * 4, 20)], num_tokens=16, num_rows=4, num_groups=groups)
    now = settled(step, FEATURES, [0, 0, 2], [7, 8, 9], num_groups=groups)
    propose = nnx.jit(lambda medusa, *args: medusa.propose((), *args[:3], medusa.max_drafts, *args[3:]))
    matrix = jax.device_put(MATRIX, medusa.rules.sharding(("vocab", "embed"), MATRIX.shape))
    drafts, _ = propose(medusa, now, step, sampling_rows(4 * groups), matrix, matrix)
    logits = by_formula(tensors(1, output), 1, output, FEATURES[[4, 5, 7]])
    best = np.argsort(-logits, axis=-1, kind="stable")  # [heads, rows, ranks]
    paths = sorted(tree) if tree else [(0,) * (head + 1) for head in range(HEADS)]
    wanted = [[best[len(path) - 1, row, path[-1]] for path in paths] for row in range(3)]
    of_groups = np.asarray(drafts.tokens).reshape(groups, 4, len(paths))
    assert all((of_group[:3] == wanted).all() for of_group in of_groups)
    if tree is None:
        assert drafts.parents is None
        return
    parents = np.asarray(drafts.parents)
    assert (parents == [paths.index(path[:-1]) if path[:-1] else -1 for path in paths]).all()
    assert (parents < np.arange(len(paths))).all()  # parents come first
    assert paths[:3] == [(0,), (0, 0), (0, 0, 0)]  # and the likeliest path leads


def test_fewer_drafts_are_the_start_of_the_chain(tmp_path: Path):
    medusa = make(tmp_path, hf_config(1, "own"), tensors(1, "own"))
    step = batch([([1] * 5, 3)], num_tokens=16, num_rows=1)
    args, matrix = (settled(step, FEATURES, [0], [7]), step, sampling_rows(1)), jnp.asarray(MATRIX)
    every, fewer = (medusa.propose((), *args, count, matrix, matrix)[0].tokens for count in (3, 2))
    assert (every[:, :2] == fewer).all()


WRONG = [
    ({"hidden_size": D + 1}, None, f"hidden_size={D + 1}, the target has {D}"),
    ({"vocab_size": V + 1}, None, f"vocab_size={V + 1}, the target has {V}"),
    ({"truncated_vocab_size": V - 1}, None, "truncated_vocab_size"),
    ({"medusa_num_heads": 65}, None, "num_heads=65 must be in 1"),
    ({}, PUBLISHED["mc_sim_7b_63"], "needs 4 Medusa heads, there are 3"),
    ({}, ((0,), (V,)), f"rank {V} is not in a vocabulary of {V}"),
    ({}, ((0,), (1, 0)), "after its parent"),
]


@pytest.mark.parametrize("more, tree, message", WRONG)
def test_what_does_not_fit_is_refused(more: dict, tree, message: str):
    with pytest.raises(ValueError, match=message):
        config = read_medusa_config(hf_config(1, "own", **more), TARGET, tensors(1, "own"))
        Medusa(config, TARGET, model_rules(TARGET, make_mesh(parse_mesh("1x1"))), tree=tree, rngs=nnx.Rngs(0),
               dtype=F32)  # fmt: skip


@pytest.mark.parametrize("style", ["published", "vllm"])
@pytest.mark.parametrize("output", ["own", "shared", "target"])
def test_the_tensors_say_what_heads_there_are(output: str, style: str):
    """Configs speak of fewer heads, as vicuna-7b-v1.3's, or are copies of a target's with tied embeddings."""
    wrong = {"medusa_num_heads": 2, "tie_word_embeddings": output == "own", "medusa_fc_bias": output == "target"}
    config = read_medusa_config(wrong, TARGET, tensors(2, output, bias=output != "target", style=style))
    assert (config.num_heads, config.num_blocks, config.output) == (HEADS, 2, output)
    assert config.has_bias == (output != "target")


def test_heads_that_are_not_there(tmp_path: Path):
    with pytest.raises(ValueError, match=r"no Medusa heads: no tensor 0\.0\.linear\.weight"):
        read_medusa_config(hf_config(1, "own"), TARGET, ["embed_tokens.weight"])
    with pytest.raises(CheckpointError, match=r"missing tensors: 3\.0\.linear"):
        make(tmp_path, hf_config(1, "own", medusa_num_heads=HEADS + 1), tensors(1, "own", style="bare"))
