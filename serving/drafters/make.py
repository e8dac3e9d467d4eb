"""The drafter that `--speculative-config` asks for, where it runs on the device."""

from collections.abc import Callable, Mapping

from model.speculative.drafter import DeviceDrafter
from serving.decoding.speculation.config import FLAG, SpeculativeConfig
from serving.drafters.dflash import load_dflash
from serving.drafters.draft_model import load_draft_model
from serving.drafters.eagle import load_eagle
from serving.drafters.loading import Surroundings
from serving.drafters.medusa import load_medusa
from serving.drafters.mtp import load_mtp
from serving.errors import ConfigError

LOADERS: Mapping[str, Callable[[SpeculativeConfig, Surroundings], DeviceDrafter]] = {
    "draft_model": load_draft_model,
    "medusa": load_medusa,
    "eagle": load_eagle,
    "eagle3": load_eagle,
    "mtp": load_mtp,
    "dflash": load_dflash,
}


def load_drafter(config: SpeculativeConfig, around: Surroundings) -> DeviceDrafter:
    """Raises ConfigError."""
    for axis in ("context", "pipeline"):
        if (size := around.target.rules.mesh.shape[axis]) > 1:
            raise ConfigError(f'{FLAG}: "method": "{config.method}" drafts on the device, which --mesh {axis}={size} '
                              "has no part for; use tensor or data, or draft on the host: ngram, suffix")  # fmt: skip
    return LOADERS[config.method](config, around)
