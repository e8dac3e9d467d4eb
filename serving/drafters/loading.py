"""What all drafters on the device are made from, and how their weights get onto the target's mesh."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import jax.numpy as jnp
from flax import nnx

from checkpoints.errors import CheckpointError
from checkpoints.open import Checkpoint, open_checkpoint
from checkpoints.tensors import ParamSource, TensorSource
from model.build import Kernels, choose_kernels, model_rules
from model.config import ModelConfig
from model.expert_options import DEFAULT, ExpertOptions
from model.families.common import UnsupportedModel
from model.speculative.common import SparePages
from model.transformer import Path, Transformer, with_params
from serving.decoding.speculation.config import FLAG, SpeculativeConfig
from serving.errors import ConfigError
from serving.runner.shapes import most_rows
from serving.weights import read_params
from sharding.mesh import MeshError
from sharding.rules import AxisRules

Module = TypeVar("Module", bound=nnx.Module)


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Of the target, whose mesh, number format and pages a drafter shares. path, tokenizer: of the target."""

    target: Transformer
    dtype: jnp.dtype
    page_size: int
    max_num_seqs: int  # of a data group
    max_model_len: int | None
    attention_backend: str
    progress: bool
    path: str = ""
    tokenizer: str = ""
    experts: ExpertOptions = DEFAULT

    def spare_pages(self, guesses: int) -> SparePages:
        """guesses: that a row feeds the drafter in a step."""
        return SparePages(rows=most_rows(self.max_num_seqs), guesses=max(guesses, 1),
                          page_size=self.page_size, groups=self.target.rules.num_groups)  # fmt: skip

    def rules_and_kernels(self, config: ModelConfig) -> tuple[AxisRules, Kernels]:
        """For layers of the kind of a target's."""
        options = self._expert_options(config.num_experts)
        rules = model_rules(config, self.target.rules.mesh, options)
        return rules, choose_kernels(config, rules, self.dtype, attention_backend=self.attention_backend,
                                     page_size=self.page_size, options=options)  # fmt: skip

    def _expert_options(self, num_experts: int | None) -> ExpertOptions:
        """A drafter's experts have their places for good: what redundant ones make divide may not without them."""
        if num_experts is None:
            return DEFAULT
        sizes = self.target.rules.mesh.shape
        if num_experts % (sizes["data"] * sizes["tensor"]):
            return ExpertOptions(two_micro_batches=self.experts.two_micro_batches)
        return replace(self.experts, redundant=None)


@contextmanager
def naming_the_flag() -> Iterator[None]:
    """Whatever is wrong with a drafter within the block becomes one line, a ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except (CheckpointError, ValueError) as error:  # MeshError, ExpertsError and UnsupportedModel among them
        raise ConfigError(f"{FLAG}: {error}") from error


@contextmanager
def open_named(config: SpeculativeConfig | None) -> Iterator[Checkpoint | None]:
    """What "model" names, if it is there. Raises CheckpointError."""
    if config is None or config.model is None:
        yield None
        return
    with closing(open_checkpoint(config.model)) as checkpoint:
        yield checkpoint


@contextmanager
def open_drafter(config: SpeculativeConfig) -> Iterator[tuple[Checkpoint, TensorSource]]:
    """The folder that "model" names. Whatever is wrong with it within the block becomes one line, a ConfigError."""
    assert config.model is not None
    try:
        with closing(open_checkpoint(config.model)) as checkpoint:
            if checkpoint.source is None:
                raise CheckpointError(f"{checkpoint.path}: an Orbax folder; a drafter is read from safetensors")
            yield checkpoint, checkpoint.source
    except MeshError as error:
        raise ConfigError(f"{FLAG}: {error}") from error
    except (CheckpointError, UnsupportedModel, ValueError) as error:
        raise ConfigError(f'{FLAG}: "model": {error}') from error


def load_weights(module: Module, rules: AxisRules, source: TensorSource, sources: Mapping[Path, ParamSource], *,
                 ignore: Collection[str] = (), progress: bool) -> Module:  # fmt: skip
    """The module, made of shapes, with the tensors that `sources` names for each of its parameters. ignore: names or
    patterns of tensors that may be left over."""
    params = read_params(module, rules, source, lambda paths: sources, ignore=ignore, progress=progress)
    return with_params(module, params)
