"""Medusa heads for the target, from their folder."""

from functools import partial

from flax import nnx

from model.speculative.medusa import Medusa, medusa_sources, read_medusa_config
from serving.decoding.speculation.config import FLAG, SpeculativeConfig
from serving.drafters.loading import Surroundings, load_weights, open_drafter
from serving.errors import ConfigError


def load_medusa(config: SpeculativeConfig, around: Surroundings) -> Medusa:
    """Raises ConfigError."""
    target = around.target
    with open_drafter(config) as (checkpoint, source):
        heads = read_medusa_config(checkpoint.config, target.config, source.names())
        make = partial(Medusa, heads, target.config, target.rules, tree=config.speculative_token_tree,
                       dtype=around.dtype)  # fmt: skip
        medusa = nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))
        if config.most > medusa.max_drafts:
            raise ConfigError(f"{FLAG}: num_speculative_tokens is {config.most}, the Medusa checkpoint has "
                              f"{heads.num_heads} heads: that many at most, or a speculative_token_tree")  # fmt: skip
        sources = medusa_sources(heads, source.names())
        return load_weights(medusa, target.rules, source, sources, progress=around.progress)
