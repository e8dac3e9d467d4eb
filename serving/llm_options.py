"""Keyword arguments of `LLM` to an `EngineConfig`."""

from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from inspect import formatannotation
from os import PathLike, fspath
from typing import Any, get_type_hints

import msgspec

from serving.config import PARALLEL_SIZES, EngineConfig, EplbConfig, StructuredOutputsConfig, config_of, mesh_of
from serving.decoding.speculation.config import SpeculativeConfig
from serving.errors import ConfigError

FROM_JSON = {
    "speculative_config": SpeculativeConfig.of,
    "eplb_config": partial(config_of, "eplb_config", EplbConfig),
    "structured_outputs_config": partial(config_of, "structured_outputs_config", StructuredOutputsConfig),
}
MAX_PROMPTS = 1 << 31  # a batch may be of any length: nobody else waits, and nobody could retry later


def engine_config(options: Mapping[str, Any]) -> EngineConfig:
    """Raises ConfigError with one line for a bad one."""
    known = [field.name for field in fields(EngineConfig) if field.name != "hosts"] + [*PARALLEL_SIZES.values()]
    for name in options:
        if name not in known:
            raise ConfigError(f"LLM has no option {name!r}; it has {', '.join(known)}")
    sizes = {axis: options.get(name) for axis, name in PARALLEL_SIZES.items()}
    values = {name: value for name, value in options.items() if name not in PARALLEL_SIZES.values()}
    values = {name: fspath(value) if isinstance(value, PathLike) else value for name, value in values.items()}
    values["mesh"] = mesh_of(options.get("mesh"), sizes)
    for name, from_json in FROM_JSON.items():
        if isinstance(given := values.get(name), Mapping):
            values[name] = from_json(given)
    expected_types = get_type_hints(EngineConfig)
    for name, value in values.items():
        try:
            msgspec.convert(value, expected_types[name])
        except msgspec.ValidationError as error:
            expected = formatannotation(expected_types[name]) + (" or a dict" if name in FROM_JSON else "")
            raise ConfigError(f"{name} is {value!r}, must be {expected}") from error
    return EngineConfig(**{"max_num_waiting": MAX_PROMPTS, **values})
