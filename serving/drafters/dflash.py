"""DFlash's block drafter for the target, from its folder."""

from functools import partial

from flax import nnx

from model.build import model_rules
from model.speculative.dflash import FROZEN, DFlash, dflash_sources, read_dflash_config
from model.transformer import param_axes
from serving.decoding.speculation.config import FLAG, SpeculativeConfig
from serving.drafters.loading import Surroundings, load_weights, open_drafter
from serving.errors import ConfigError


def load_dflash(config: SpeculativeConfig, around: Surroundings) -> DFlash:
    """Raises ConfigError."""
    target = around.target
    with open_drafter(config) as (checkpoint, source):
        of_drafter = read_dflash_config(checkpoint.config, target.config)
        if config.most >= of_drafter.block_size:
            raise ConfigError(f"{FLAG}: num_speculative_tokens is {config.most}, the DFlash drafter fills blocks of "
                              f"{of_drafter.block_size} tokens: {of_drafter.block_size - 1} at most")
        rules = model_rules(of_drafter.model, target.rules.mesh)
        make = partial(DFlash, of_drafter, rules, page_size=around.page_size,
                       sampling=config.draft_sample_method, dtype=around.dtype)  # fmt: skip
        dflash = nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))
        sources = dflash_sources(of_drafter, param_axes(dflash))
        ignore = () if "speculators_model_type" not in checkpoint.config else FROZEN + ("t2d",)
        return load_weights(dflash, rules, source, sources, ignore=ignore, progress=around.progress)
