"""Makes the golden of DeepSeek-V3's layer for multi-token prediction, for the tiny model in `deepseek-v3`.

    python tests/goldens/make_mtp.py

In an environment with torch, as `make_goldens.py`. `transformers` has a decoder layer of this family but not what
stands before and behind it, which is written out here. mtp.safetensors holds the layer's tensors, with the names of
published checkpoints but for the copies of embedding and head; mtp.npz `tokens` [T] and `logits` [T - 1, V], which
at place t are of token t + 2.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from make_goldens import HERE, VOCAB, randomize
from safetensors.torch import load_file, save_file

TARGET, FOLDER, LENGTH = HERE / "deepseek-v3", HERE / "deepseek-v3-mtp", 40


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def main() -> None:
    target = transformers.AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32, attn_implementation="eager")
    config = json.loads((TARGET / "config.json").read_text())
    count, D = config["num_hidden_layers"], config["hidden_size"]
    generator = torch.Generator().manual_seed(7000)
    longer = transformers.AutoConfig.from_pretrained(TARGET, num_hidden_layers=count + 1)
    model = transformers.AutoModelForCausalLM.from_config(longer, attn_implementation="eager").to(torch.float32).eval()
    randomize(model, generator)
    with tempfile.TemporaryDirectory() as folder:  # with each expert's tensors apart
        model.save_pretrained(folder)
        stored = load_file(Path(folder) / "model.safetensors")
    prefix = f"model.layers.{count}."
    tensors = {name: x for name, x in stored.items() if name.startswith(prefix)}
    own = {f"{name}.weight": 1 + 0.3 * torch.randn(D, generator=generator).clamp(-2, 2)
           for name in ("enorm", "hnorm", "shared_head.norm")}
    own["eh_proj.weight"] = torch.randn(D, 2 * D, generator=generator) * (1 / D) ** 0.5
    tensors |= {prefix + name: x for name, x in own.items()}

    tokens = torch.tensor(np.random.default_rng(7).integers(3, VOCAB, LENGTH))
    with torch.inference_mode():
        hidden = target.model(tokens[None]).last_hidden_state  # normed
        embedded = target.model.embed_tokens(tokens[None, 1:])
        both = torch.cat([rms_norm(embedded, own["enorm.weight"]), rms_norm(hidden[:, :-1], own["hnorm.weight"])], -1)
        x = both @ own["eh_proj.weight"].T
        positions = torch.arange(LENGTH - 1)[None]
        mask = torch.full((LENGTH - 1, LENGTH - 1), -torch.inf).triu(1)[None, None]
        angles = target.model.rotary_emb(x, positions)
        out = model.model.layers[count](x, attention_mask=mask, position_ids=positions, position_embeddings=angles)
        logits = target.lm_head(rms_norm(out, own["shared_head.norm.weight"]))[0]
    FOLDER.mkdir(exist_ok=True)
    save_file(tensors, FOLDER / "mtp.safetensors", metadata={"format": "pt"})
    np.savez_compressed(FOLDER / "mtp.npz", tokens=tokens.numpy().astype(np.int32), logits=logits.numpy())
    print(f"std of logits {logits.std(-1).mean():.2f}", sorted(tensors)[:4])


if __name__ == "__main__":
    main()
