"""The drafter that `--speculative-config` asks for, where it runs on the device."""

from collections.abc import Callable, Mapping

from model.config import ModelConfig
from model.speculative.drafter import DeviceDrafter
from serving.decoding.speculation.config import FLAG, SpeculativeConfig
from serving.drafters.dflash import load_dflash
from serving.drafters.draft_model import load_draft_model
from serving.drafters.eagle import load_eagle
from serving.drafters.loading import Surroundings, naming_the_flag, open_named
from serving.drafters.medusa import load_medusa
from serving.drafters.mtp import load_mtp
from serving.errors import ConfigError
from sharding.mesh import MeshSpec

LOADERS: Mapping[str, Callable[[SpeculativeConfig, Surroundings], DeviceDrafter]] = {
    "draft_model": load_draft_model,
    "medusa": load_medusa,
    "eagle": load_eagle,
    "eagle3": load_eagle,
    "mtp": load_mtp,
    "dflash": load_dflash,
}


def check_speculation(config: SpeculativeConfig, target: ModelConfig, mesh: MeshSpec) -> None:
    """What can be seen before the target is loaded. Raises ConfigError."""
    if config.has_tree:
        missing = {
            "attention windows, which count a tree's tokens in the order of the cache":
                any(layer.window or layer.chunk for layer in target.layers),
            "a context axis": mesh.context > 1,
            "pipeline stages": mesh.pipeline > 1,
        }  # fmt: skip
        for what, is_there in missing.items():
            if is_there:
                raise ConfigError(f"{FLAG}: drafts that are trees do not go with {what}; a chain does: leave out "
                                  "speculative_token_tree, suffix_decoding_tree and eagle_topk")  # fmt: skip
    if config.on_host:
        return
    for axis in ("context", "pipeline"):
        if (size := getattr(mesh, axis)) > 1:
            raise ConfigError(f'{FLAG}: "method": "{config.method}" drafts on the device, which --mesh {axis}={size} '
                              "has no part for; use tensor or data, or draft on the host: ngram, suffix")  # fmt: skip
    with naming_the_flag(), open_named(config):
        pass


def load_drafter(config: SpeculativeConfig, around: Surroundings) -> DeviceDrafter:
    """Of a config that was checked. Raises ConfigError."""
    return LOADERS[config.method](config, around)
