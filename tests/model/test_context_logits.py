"""Logits of transformers from pages striped over a context axis: a chunk spread over it, one shared, a decode step."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model.batch import StepBatch
from model.build import choose_kernels, model_rules
from model.context import ContextAttention, spread_model, spread_step
from model.families.registry import read_config
from model.transformer import Transformer
from sharding.mesh import make_mesh, parse_mesh
from tests.model import harness
from tests.tolerances import LOGITS_FLOAT32


@partial(nnx.jit, static_argnums=3, donate_argnums=1)
def logits_of(model: Transformer, pages: jax.Array, step: StepBatch, spread: bool) -> tuple[jax.Array, jax.Array]:
    """Of all tokens [G, T, V], in the order of the rows; and the pages."""
    groups = model.rules.num_groups
    if not spread:
        hidden, pages, _ = model(pages, step)
        return model.logits(hidden).reshape(groups, len(step.tokens) // groups, -1), pages
    spread_ = spread_step(model.rules, step, step.tokens)
    hidden, pages, _ = spread_model(model)(pages, spread_.batch)
    by_place = model.logits(hidden).reshape(groups, len(step.tokens) // groups, -1)
    return jax.vmap(lambda x, place: x[place])(by_place, spread_.ways_back.place), pages


@pytest.mark.parametrize("name, length, mesh", [
    ("llama-gqa-tied", 33, "context=4"),
    pytest.param("gemma3", 65, "context=2,tensor=2,data=2", marks=pytest.mark.slow),
    pytest.param("gpt-oss", 65, "context=4,tensor=2", marks=pytest.mark.slow),
])  # fmt: skip
def test_logits(name: str, length: int, mesh: str):
    golden = np.load(harness.GOLDENS / name / "golden.npz")
    tokens, want = golden[f"tokens_{length}"], golden[f"logits_{length}"]
    model = harness.load(harness.GOLDENS / name, mesh)
    groups, found = model.rules.num_groups, []
    pages = harness.kv_pages(model, num_pages=32 * groups)
    pages = jnp.full_like(pages, jnp.nan)
    # The other row's tokens are the same ones, so that every step has rows in other places of the sequence.
    for first, end, other, spread in ((0, length - 14, 3, True), (length - 14, length - 1, 1, False)):
        rows = [(tokens[3:4], 3), (tokens[first:end], first)] if other == 1 else [
            (tokens[first:end], first), (tokens[:3], 0)]
        table_of = (1, 0) if other == 1 else (0, 1)
        step = placed(harness.batch(rows, num_tokens=64, num_rows=2, num_groups=groups), table_of, groups)
        got, pages = logits_of(model, pages, step, spread)
        at = 1 if other == 1 else 0
        found.append(np.asarray(got)[:, at : at + end - first])
    step = harness.batch([(tokens[-1:], length - 1), (tokens[4:5], 4)], num_tokens=2, num_rows=2, num_groups=groups)
    got, pages = logits_of(model, pages, placed(step, (0, 1), groups), False)
    found.append(np.asarray(got)[:, :1])
    for of_group in np.concatenate(found, 1):
        np.testing.assert_allclose(of_group, want, atol=LOGITS_FLOAT32, rtol=0)
    np.testing.assert_allclose(np.asarray(got)[0, 1], want[4], atol=LOGITS_FLOAT32)


def placed(step: StepBatch, sequences: tuple[int, int], groups: int) -> StepBatch:
    """With the pages of these sequences for its rows."""
    table = np.asarray(step.page_table).reshape(groups, 2, -1)[0]
    table = 1 + np.array(sequences)[:, None] * table.shape[1] + np.arange(table.shape[1])
    return step._replace(page_table=jnp.asarray(np.concatenate([table] * groups), jnp.int32))


def test_what_has_no_ring_is_refused():
    def kernels(name: str, mesh: str, backend: str = "auto", page_size: int = 8):
        config = read_config(harness.config_json(name))
        rules = model_rules(config, make_mesh(parse_mesh(mesh)))
        return choose_kernels(config, rules, jnp.dtype("float32"), attention_backend=backend, page_size=page_size)

    chosen = kernels("llama-gqa-tied", "context=4").attention
    assert isinstance(chosen, ContextAttention) and chosen.choice.name == "xla" and chosen.paged.spec.page_size == 2
    with pytest.raises(ValueError, match="no latent attention over context=2"):
        kernels("deepseek-v2-lite", "context=2")
    with pytest.raises(ValueError, match="no attention in chunks over context=2"):
        kernels("llama4", "context=2")
    with pytest.raises(ValueError, match="pipeline=2,context=2: the two cannot be combined"):
        kernels("llama-mqa", "context=2,pipeline=2")
    with pytest.raises(ValueError, match="no pages of 8 tokens over context=3; it takes a multiple"):
        kernels("llama-gqa-tied", "context=3")
    with pytest.raises(ValueError, match="'mosaic_gpu' has no ring attention: .* takes auto or xla"):
        kernels("llama-gqa-tied", "context=2", backend="mosaic_gpu")
