"""Runs drafters without an engine: their weights from a file or at random, and steps that settle known tokens."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from checkpoints.load import load_params
from checkpoints.safetensors_source import SafetensorsSource
from checkpoints.tensors import ParamSource
from model.batch import StepBatch
from model.sampling import SamplingRows
from model.speculative.drafter import Settled
from model.transformer import param_axes, param_dtypes, with_params
from sharding.copies import stored_layout, with_copies
from sharding.rules import AxisRules

M = TypeVar("M", bound=nnx.Module)


def paths_of(module: Any) -> list[tuple[str, ...]]:
    return list(param_axes(module))


def loaded(module: M, rules: AxisRules, sources: Mapping[tuple[str, ...], ParamSource], folder: Path) -> M:
    """The module of shapes with the weights of a folder."""
    of: Any = module
    axes = param_axes(of)
    stored = {path: stored_layout(rules, names, shape) for path, (shape, names) in axes.items()}
    params = load_params(SafetensorsSource(folder), sources, {path: shape for path, (shape, _) in stored.items()},
                         {path: sharding for path, (_, sharding) in stored.items()}, param_dtypes(of))
    full: Any = with_params(of, {path: with_copies(rules, names, shape, params[path])
                                 for path, (shape, names) in axes.items()})
    return full


def sampling_rows(num_rows: int) -> SamplingRows:
    fields = dict.fromkeys(SamplingRows._fields, jnp.zeros(num_rows, jnp.int32))
    return SamplingRows(**fields | dict(seed=jnp.zeros((num_rows, 2), jnp.int32), temperature=jnp.zeros(num_rows),
                                        samples=jnp.ones(num_rows, bool)))


def settled(step: StepBatch, features: np.ndarray, rejected: Sequence[int], token: Sequence[int],
            samples: Sequence[bool] | None = None, num_groups: int = 1) -> Settled:  # fmt: skip
    """features: of the step's tokens, those rejected at the end of each row among them. Of one data group, as are all
    but `step`; the groups get the same."""
    cu_q_lens = np.asarray(step.cu_q_lens).reshape(num_groups, -1)[0]
    kv_lens = np.asarray(step.kv_lens).reshape(num_groups, -1)[0]
    less = np.asarray([*rejected, *[0] * (len(kv_lens) - len(rejected))])
    rows = len(kv_lens)
    known = np.asarray([*token, *[0] * (rows - len(token))], np.int32)
    wants = np.asarray([*(samples or [True] * len(token)), *[False] * (rows - len(token))])
    arrays = (features, np.zeros(len(features), np.int32), np.maximum(cu_q_lens[1:] - 1, 0) - less, kv_lens - less,
              known, wants)  # fmt: skip
    return Settled(*(jax.device_put(np.concatenate([x] * num_groups)) for x in arrays))
