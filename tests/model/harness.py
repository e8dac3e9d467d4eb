"""Runs a model directly, without an engine: dense page tables, one call a step."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from checkpoints.load import load_params
from checkpoints.open import open_checkpoint
from model.batch import StepBatch
from model.build import choose_kernels, model_rules, model_shapes
from model.config import ModelConfig
from model.families.registry import may_be_left_over, param_sources, read_config
from model.transformer import Transformer, param_axes, param_dtypes, with_params
from sharding.copies import stored_layout, with_copies
from sharding.mesh import make_mesh, parse_mesh

GOLDENS = Path(__file__).parents[1] / "goldens"


def config_json(name: str) -> dict[str, Any]:
    """Of a golden."""
    return json.loads((GOLDENS / name / "config.json").read_text())


def shapes_of(config: ModelConfig, mesh: str = "1x1", dtype=jnp.float32) -> Transformer:
    """The model without arrays."""
    rules, dtype = model_rules(config, make_mesh(parse_mesh(mesh))), jnp.dtype(dtype)
    return model_shapes(config, rules, choose_kernels(config, rules, dtype, attention_backend="xla", page_size=8),
                        dtype)  # fmt: skip


def load(path: Path, mesh: str = "1x1", dtype=jnp.float32, context: int | None = None) -> Transformer:
    checkpoint = open_checkpoint(path)
    config = read_config(checkpoint.config, context)
    model = shapes_of(config, mesh, dtype)
    axes = param_axes(model)
    stored = {path: stored_layout(model.rules, names, shape) for path, (shape, names) in axes.items()}
    shapes = {path: shape for path, (shape, _) in stored.items()}
    shardings = {path: sharding for path, (_, sharding) in stored.items()}
    assert checkpoint.source is not None
    params = load_params(checkpoint.source, param_sources(config, shapes), shapes, shardings, param_dtypes(model),
                         ignore=may_be_left_over(config))
    return with_params(model, {path: with_copies(model.rules, names, shape, params[path])
                               for path, (shape, names) in axes.items()})


def kv_pages(model: Transformer, num_pages: int = 64, page_size: int = 8, dtype=jnp.float32) -> jax.Array:
    """num_pages: of all data groups."""
    config, rules = model.config, model.rules
    kernels = choose_kernels(config, rules, jnp.dtype(dtype), attention_backend="xla", page_size=page_size)
    layout = kernels.kv_layout(num_pages)
    return jnp.zeros(layout.shape, dtype, device=rules.sharding(layout.axes, layout.shape))


def batch(rows: Sequence[tuple[Sequence[int], int]], *, num_tokens: int, num_rows: int, row_pages: int = 8,
          page_size: int = 8, num_groups: int = 1) -> StepBatch:
    """rows: (new tokens, tokens already cached). Row s owns the pages 1 + s * row_pages ... All data groups have the
    same rows."""
    tokens, positions = np.zeros(num_tokens, np.int32), np.zeros(num_tokens, np.int32)
    kv_lens, cu_q_lens = np.zeros(num_rows, np.int32), np.zeros(num_rows + 1, np.int32)
    at = 0
    for row, (new, start) in enumerate(rows):
        tokens[at : at + len(new)], positions[at : at + len(new)] = new, start + np.arange(len(new))
        at += len(new)
        kv_lens[row], cu_q_lens[row + 1 :] = start + len(new), at
    table = 1 + np.arange(num_rows * row_pages, dtype=np.int32).reshape(num_rows, row_pages)
    decode = next((i for i, (new, _) in enumerate(rows) if len(new) > 1), len(rows))
    arrays = (tokens, positions, table, kv_lens, cu_q_lens, np.array([decode, decode, len(rows)], np.int32))
    return StepBatch(*(jnp.asarray(np.concatenate([x] * num_groups)) for x in arrays))


@nnx.jit(donate_argnums=1)
def all_logits(model: Transformer, pages: jax.Array, step: StepBatch) -> tuple[jax.Array, jax.Array]:
    hidden, pages, _ = model(pages, step)
    return model.logits(hidden), pages
