"""DeepSeek-V3's layer for multi-token prediction, from the target's own checkpoint or another of the same model."""

from contextlib import closing
from functools import partial

from flax import nnx

from checkpoints.open import Checkpoint, open_checkpoint
from model.config import ModelConfig
from model.speculative.mtp import MTP, mtp_config, mtp_prefix, mtp_sources
from model.transformer import with_params
from serving.decoding.speculation.config import FLAG, SpeculativeConfig
from serving.drafters.loading import Surroundings, naming_the_flag
from serving.errors import ConfigError
from serving.weights import read_params

LAYER = "mtp"  # what an Orbax folder calls it


def has_layer(checkpoint: Checkpoint, target: ModelConfig) -> bool:
    """Whether a checkpoint of the target has it."""
    if target.family != "deepseek_v3":
        return False
    if checkpoint.source is None:
        return (checkpoint.path / LAYER).is_dir()
    return any(name.startswith(mtp_prefix(target)) for name in checkpoint.source.names())


def load_mtp(config: SpeculativeConfig, around: Surroundings) -> MTP:
    """Raises ConfigError."""
    target, most = around.target.config, config.most
    with naming_the_flag(), closing(open_checkpoint(config.model or around.path)) as checkpoint:
        if not has_layer(checkpoint, target):
            raise ConfigError(f'{FLAG}: "method": "mtp" needs the layer that DeepSeek-V3 is published with; '
                              f"{checkpoint.path} has none")  # fmt: skip
        of_layer = mtp_config(target)
        rules, kernels = around.rules_and_kernels(of_layer)
        make = partial(MTP, of_layer, rules, kernels, around.spare_pages(most - 1), max_drafts=most,
                       sampling=config.draft_sample_method, dtype=around.dtype)  # fmt: skip
        module = nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))
        params = read_params(module, rules, checkpoint.source or checkpoint.path / LAYER, partial(mtp_sources, target),
                             ignore=("*",), progress=around.progress)  # fmt: skip
    return with_params(module, params)
