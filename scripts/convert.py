"""Writes a native (Orbax) checkpoint from a GGUF file or a Hugging Face folder.

    python -m scripts.convert SmolLM2-135M-Instruct.Q4_1.gguf converted/
    python -m serve --model converted/

The folder holds the parameters, the model's config and its tokenizer, and in `mtp/` DeepSeek-V3's layer for
multi-token prediction; it restores onto any mesh.
"""

import argparse
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import jax

from checkpoints.errors import CheckpointError
from checkpoints.open import open_checkpoint
from checkpoints.orbax_folder import check_new, save_folder
from model.transformer import Path as ParamPath
from model.transformer import variables_of
from serving.config import Dtype, EngineConfig
from serving.decoding.speculation.config import SpeculativeConfig
from serving.drafters.loading import Surroundings
from serving.drafters.mtp import LAYER, has_layer, load_mtp
from serving.errors import ConfigError
from serving.loading import LoadedModel, load_model, page_size
from serving.tokenizer.load import load_tokenizer


def stored_dtype(config: dict[str, Any]) -> Dtype:
    """The smallest dtype that keeps every value: a GGUF's decoded blocks need float32."""
    return "bfloat16" if config.get("dtype", config.get("torch_dtype")) == "bfloat16" else "float32"


def convert(source: str, folder: Path, dtype: Dtype | None = None) -> None:
    """Raises ConfigError or CheckpointError."""
    check_new(folder)
    if dtype is None:
        checkpoint = open_checkpoint(source)
        dtype = stored_dtype(checkpoint.config)
        checkpoint.close()
    tokenizer = load_tokenizer(source)
    engine = EngineConfig(model=source, dtype=dtype)
    loaded = load_model(engine, progress=True)
    config = {key: value for key, value in loaded.hf_config.items() if key not in ("dtype", "torch_dtype")}
    save_folder(folder, loaded.stored_params, {**config, "dtype": dtype}, tokenizer.tokenizer_files(),
                beside=_beside(engine, loaded))  # fmt: skip


def _beside(engine: EngineConfig, loaded: LoadedModel) -> dict[str, Mapping[ParamPath, jax.Array]]:
    """What the checkpoint has that is not the model's own. Latent attention has no heads' copies to take out."""
    with closing(open_checkpoint(engine.model)) as checkpoint:
        if not has_layer(checkpoint, loaded.model.config):
            return {}
    around = Surroundings(
        target=loaded.model, path=engine.model, dtype=loaded.dtype, page_size=page_size(engine), max_num_seqs=1,
        max_model_len=None, attention_backend=engine.attention_backend, progress=True,
    )  # fmt: skip
    layer = load_mtp(SpeculativeConfig(method="mtp", num_speculative_tokens=1), around)
    return {LAYER: {path: variable.get_value() for path, variable in variables_of(layer)}}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.convert", description="Write a native checkpoint.")
    parser.add_argument("source", help="a GGUF file, a Hugging Face folder or an Orbax folder")
    parser.add_argument("folder", type=Path, help="the folder to write; it must be new or empty")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: what keeps every value")
    options = parser.parse_args(arguments)
    try:
        convert(options.source, options.folder, options.dtype)
    except (ConfigError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"Wrote {options.folder}; serve it with: python -m serve --model {options.folder}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
