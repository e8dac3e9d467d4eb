"""How often a target would accept a draft model's tokens: python -m scripts.draft_acceptance TEXT --draft-model PATH

From both models' distributions after each of the first tokens of a text, for each way to draw (`draft_sample_method`).
Without --draft-model: against the target itself with --noise, relative to each matrix, added to its weights.
"""

import argparse
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from checkpoints.default_model import default_model_path
from checkpoints.errors import CheckpointError
from model.batch import StepBatch
from model.transformer import Transformer
from serving.config import EngineConfig
from serving.errors import PageloomError
from serving.loading import LoadedModel, load_model
from serving.tokenizer.load import load_tokenizer

PAGE, RACES = 16, 40


def logits(loaded: LoadedModel, tokens: list[int]) -> np.ndarray:
    """After each of the tokens, f32."""
    count, pages = len(tokens), -(-len(tokens) // PAGE)
    layout = loaded.kernels.kv_layout(pages + 1)
    lens = jnp.array([count], jnp.int32)
    step = StepBatch(tokens=jnp.array(tokens, jnp.int32), positions=jnp.arange(count, dtype=jnp.int32),
                     page_table=1 + jnp.arange(pages, dtype=jnp.int32)[None], kv_lens=lens,
                     cu_q_lens=jnp.array([0, count], jnp.int32), distribution=jnp.array([0, 0, 1], jnp.int32))

    @nnx.jit
    def run(model: Transformer, kv_pages: jax.Array) -> jax.Array:
        return model.logits(model(kv_pages, step)[0])

    return np.asarray(run(loaded.model, jnp.zeros(layout.shape, layout.dtype)))


def disturbed(loaded: LoadedModel, noise: float) -> LoadedModel:
    structure, state = nnx.split(loaded.model)
    rng = np.random.default_rng(0)

    def disturb(x: jax.Array) -> jax.Array:
        return x + (noise * x.std() * rng.standard_normal(x.shape)).astype(x.dtype) if x.ndim > 1 else x

    return LoadedModel(nnx.merge(structure, jax.tree.map(disturb, state)), loaded.hf_config, loaded.params,
                       loaded.dtype, loaded.kernels)  # fmt: skip


def rates(target: np.ndarray, drafter: np.ndarray, temperature: float) -> dict[str, float]:
    """Shares of accepted drafts."""
    p, q = (np.asarray(jax.nn.softmax(x / temperature)) for x in (target, drafter))
    rng, hits = np.random.default_rng(1), []
    for _ in range(RACES):
        chance = rng.exponential(size=p.shape).astype(np.float32)
        first = [(chance / np.maximum(x, 1e-30)).argmin(-1) for x in (p, q)]
        hits.append((first[0] == first[1]).mean())
    return {
        "probabilistic": float(np.minimum(p, q).sum(-1).mean()),
        "coupled": float(np.mean(hits)),
        "greedy": float(p[np.arange(len(p)), q.argmax(-1)].mean()),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", default="", help="the target (default: the default model)")
    parser.add_argument("--draft-model")
    parser.add_argument("--noise", type=float, default=0.06)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 0.7])
    args = parser.parse_args(arguments)
    if args.tokens < 1 or not all(0 < temperature < 1e3 for temperature in args.temperatures):
        parser.error(f"--tokens {args.tokens} must be at least 1, --temperatures {args.temperatures} in 0 to 1000")
    try:
        measure(args, parser)
    except (PageloomError, CheckpointError, OSError, UnicodeDecodeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def measure(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    path = args.model or str(default_model_path(True))
    tokens = load_tokenizer(path).encode(args.text.read_text("utf-8"))[: args.tokens]
    if not tokens:
        parser.error(f"{args.text} is empty")
    loaded = load_model(EngineConfig(model=path, dtype="float32", block_size=PAGE))
    drafter = disturbed(loaded, args.noise)
    if args.draft_model:
        drafter = load_model(EngineConfig(model=args.draft_model, dtype="float32", block_size=PAGE))
    if loaded.model.config.vocab_size != drafter.model.config.vocab_size:
        parser.error(f"{args.draft_model} has {drafter.model.config.vocab_size} tokens, the target "
                     f"{loaded.model.config.vocab_size}; it must have the target's vocabulary")  # fmt: skip
    of_target, of_drafter = logits(loaded, tokens), logits(drafter, tokens)
    agree = (of_target.argmax(-1) == of_drafter.argmax(-1)).mean()
    print(f"{len(tokens)} tokens; temperature 0: {agree:.3f} accepted")
    for temperature in args.temperatures:
        found = rates(of_target, of_drafter, temperature)
        print(f"temperature {temperature:g}: " + ", ".join(f"{name} {rate:.3f}" for name, rate in found.items()))


if __name__ == "__main__":
    sys.exit(main())
