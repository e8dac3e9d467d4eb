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


def test_logits():
    name, length, mesh = "llama-gqa-tied", 33, "context=4"
    golden = np.load(harness.GOLDENS / name / "golden.npz")
    tokens, want = golden[f"tokens_{length}"], golden[f"logits_{length}"]
    model = harness.load(harness.GOLDENS / name, mesh)
    groups = model.rules.num_groups
    pages = jnp.full_like(harness.kv_pages(model, num_pages=32 * groups), jnp.nan)
    # Rows are (sequence, first token, end). All sequences have the same tokens.
    steps = (
        (True, ((0, 0, 15), (1, 0, 3), (2, 0, 5))),
        (True, ((1, 3, 4), (2, 5, 6), (0, 15, length - 4))),
        (False, ((2, 6, 7), (0, length - 4, length - 1))),
        (False, ((0, length - 1, length), (1, 4, 5))),
    )
    for spread, rows in steps:
        decode = all(end - first == 1 for _, first, end in rows)
        step = harness.batch([(tokens[first:end], first) for _, first, end in rows], num_tokens=4 if decode else 64,
                             num_rows=4, num_groups=groups)  # fmt: skip
        table = [1 + sequence * 10 + np.arange(10) for sequence, _, _ in rows] + [np.zeros(10)] * (4 - len(rows))
        step = step._replace(page_table=jnp.asarray(np.concatenate([table] * groups), jnp.int32))
        got, pages = logits_of(model, pages, step, spread)
        expected = np.concatenate([want[first:end] for _, first, end in rows])
        for of_group in np.asarray(got):
            np.testing.assert_allclose(of_group[: len(expected)], expected, atol=LOGITS_FLOAT32, rtol=0)


def test_what_has_no_ring_is_refused():
    def kernels(name: str, mesh: str, backend: str = "auto", page_size: int = 8):
        config = read_config(harness.config_json(name))
        rules = model_rules(config, make_mesh(parse_mesh(mesh)))
        return choose_kernels(config, rules, jnp.dtype("float32"), attention_backend=backend, page_size=page_size)

    chosen = kernels("llama-gqa-tied", "context=4").attention
    assert isinstance(chosen, ContextAttention) and chosen.choice.name == "xla" and chosen.storage.spec.page_size == 2
    with pytest.raises(ValueError, match="--mesh context=2: there is no latent attention"):
        kernels("deepseek-v2-lite", "context=2")
    with pytest.raises(ValueError, match="--mesh context=2: there is no attention in chunks"):
        kernels("llama4", "context=2")
    with pytest.raises(ValueError, match="pipeline=2,context=2: the two cannot be combined"):
        kernels("llama-mqa", "context=2,pipeline=2")
    with pytest.raises(ValueError, match="--mesh context=3: there is no --block-size of 8 tokens"):
        kernels("llama-gqa-tied", "context=3")
    with pytest.raises(ValueError, match="'mosaic_gpu' has no ring attention: .* takes auto or xla"):
        kernels("llama-gqa-tied", "context=2", backend="mosaic_gpu")
