"""The step as a program for XLA, from shapes and shardings: for devices that are there, and for devices that are not.

The runner compiles it to serve; `scripts/plan.py` and `scripts/aot_check.py` compile the same without weights.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from model.build import Kernels
from model.speculative.drafter import DeviceDrafter
from model.transformer import Path, Transformer, param_axes, param_dtypes
from model.typical_acceptance import Typical
from serving.config import MAX_LOGPROBS
from serving.runner.packing import packed_size
from serving.runner.shapes import StepShape
from serving.runner.step import DeviceState, run_step, state_shapes


class StepProgram:
    """A model's step, and the shapes of its state. The model, and a drafter on the device, hold arrays or, where
    nothing is to run, shapes with shardings. max_num_seqs: of each data group. num_drafts: the most of a row. typical:
    see `model.next_tokens.sample`."""

    def __init__(self, model: Transformer, kernels: Kernels, *, max_num_seqs: int, num_drafts: int = 0,
                 drafter: DeviceDrafter | None = None, typical: Typical | None = None):  # fmt: skip
        self.drafter, self._num_drafts, self._typical = drafter, num_drafts, typical
        self._structure, params = nnx.split(model)
        self._drafter_structure, of_drafter = (None, ()) if drafter is None else nnx.split(drafter)
        self.params, self._tree = jax.tree.flatten((params, of_drafter))  # the model's come first
        self.paths = [tuple(map(str, path)) for path, _ in nnx.to_flat_state(params)]  # of each of params
        self._config, self._rules, self._kernels, self._max_num_seqs = model.config, model.rules, kernels, max_num_seqs
        self.num_logprobs = min(MAX_LOGPROBS, model.config.vocab_size)

    def state_shapes(self, num_pages: int) -> DeviceState:
        """With their shardings. num_pages: of each data group."""
        config, drafter, num_pages = self._config, self.drafter, self._rules.num_groups * num_pages
        with_experts = sum(layer.moe is not None for layer in config.layers)
        experts = (with_experts, config.num_experts) if config.num_experts is not None else None
        shapes = state_shapes(self._rules, self._kernels.kv_pages(self._rules, num_pages), self._max_num_seqs,
                              config.vocab_size, experts, self._num_drafts,
                              keeps_drawn=drafter is not None and drafter.probabilistic)  # fmt: skip
        return shapes if drafter is None else shapes._replace(drafter=drafter.state_shapes(num_pages))

    def step(self, shape: StepShape, state: DeviceState, row_pages: int) -> tuple[Any, tuple[Any, ...]]:
        """(jitted step, arguments to lower it with). row_pages: of a sequence of full length."""
        whole, num_logprobs = self._rules.whole, self.num_logprobs

        def step(params: list[jax.Array], state: DeviceState, packed: jax.Array):
            of_model, of_drafter = jax.tree.unflatten(self._tree, params)
            model = nnx.merge(self._structure, of_model)
            drafter = None if self._drafter_structure is None else nnx.merge(self._drafter_structure, of_drafter)
            return run_step(model, state, packed, shape, row_pages, num_logprobs, drafter, self._typical)

        size = (self._rules.num_groups, packed_size(shape, row_pages))
        packed = jax.ShapeDtypeStruct(size, jnp.int32, sharding=self._rules.sharding(("groups", None), size))
        shardings = jax.tree.map(lambda x: x.sharding, state)
        jitted = jax.jit(step, donate_argnums=1, out_shardings=(shardings, whole))
        return jitted, (self.params, state, packed)


def param_shapes(model: Transformer) -> Mapping[Path, jax.ShapeDtypeStruct]:
    """Of every parameter, by path, with the sharding that its axes ask for."""
    dtypes = param_dtypes(model)
    return {
        path: jax.ShapeDtypeStruct(shape, dtypes[path], sharding=model.rules.sharding(axes, shape))
        for path, (shape, axes) in param_axes(model).items()
    }
