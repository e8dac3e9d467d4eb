"""The limit: a bare JAX loop that does the model's arithmetic and nothing else.

SmolLM2-135M's shapes with random weights (speed does not depend on them), a dense cache, all rows in step, the whole
generation in one `lax.scan` on the device: no scheduler, no pages, no host. The engine's tokens per second over
this one's is the share that it keeps.

Letters: S rows, T tokens of a row, N query heads, K kv heads, G = N / K, H head dim, D model dim, F ffn dim, V vocab,
L layers, C cache length.
"""

import argparse
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from scripts.bench_lib import report

L, D, N, K, H, F, V = 30, 576, 9, 3, 64, 1536, 49152
G = N // K
ROPE_THETA = 1e5
Params = dict[str, Any]

dot = partial(jnp.einsum, preferred_element_type=jnp.float32)


def random_params(dtype: jnp.dtype) -> Params:
    shapes = {"q": (L, D, N * H), "k": (L, D, K * H), "v": (L, D, K * H), "o": (L, N * H, D),
              "gate": (L, D, F), "up": (L, D, F), "down": (L, F, D), "embedding": (V, D)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    params = {name: (0.05 * jax.random.normal(key, shape)).astype(dtype)
              for key, (name, shape) in zip(keys, shapes.items(), strict=True)}
    return params | {"norm1": jnp.ones((L, D), dtype), "norm2": jnp.ones((L, D), dtype)}


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5) * scale).astype(x.dtype)


def rope(x: jax.Array, positions: jax.Array) -> jax.Array:  # x [S, T, heads, H], positions [T]
    angles = positions[:, None] * ROPE_THETA ** (-jnp.arange(H // 2) / (H // 2))
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def forward(params: Params, caches: jax.Array, tokens: jax.Array, start: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Tokens [S, T] at positions start .. start + T - 1; caches [L, 2, S, C, K, H]. Returns next tokens [S]."""
    S, T = tokens.shape
    C = caches.shape[3]
    dtype = params["embedding"].dtype
    positions = start + jnp.arange(T)
    mask = jnp.arange(C)[None] <= positions[:, None]  # [T, C]

    def layer(x, inputs):
        w, cache = inputs
        h = rms_norm(x, w["norm1"])
        q = rope(dot("std,de->ste", h, w["q"]).astype(dtype).reshape(S, T, N, H), positions)
        k = rope(dot("std,de->ste", h, w["k"]).astype(dtype).reshape(S, T, K, H), positions)
        v = dot("std,de->ste", h, w["v"]).astype(dtype).reshape(S, T, K, H)
        cache = lax.dynamic_update_slice(cache, jnp.stack([k, v]), (0, 0, start, 0, 0))
        scores = dot("stkgh,sckh->skgtc", q.reshape(S, T, K, G, H), cache[0]) * H**-0.5
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e30), -1).astype(dtype)
        out = dot("skgtc,sckh->stkgh", weights, cache[1]).astype(dtype)
        x = x + dot("ste,ed->std", out.reshape(S, T, N * H), w["o"]).astype(dtype)
        h = rms_norm(x, w["norm2"])
        gated = (jax.nn.silu(dot("std,df->stf", h, w["gate"])) * dot("std,df->stf", h, w["up"])).astype(dtype)
        return x + dot("stf,fd->std", gated, w["down"]).astype(dtype), cache

    layers = {name: value for name, value in params.items() if name != "embedding"}
    x, caches = lax.scan(layer, params["embedding"][tokens], (layers, caches))
    logits = dot("sd,vd->sv", rms_norm(x[:, -1], jnp.ones((D,), dtype)), params["embedding"])
    return jnp.argmax(logits, -1).astype(jnp.int32), caches


@partial(jax.jit, static_argnums=2)
def generate(params: Params, prompts: jax.Array, output_tokens: int, caches: jax.Array) -> jax.Array:
    """prompts [S, T] -> greedy tokens [output_tokens, S]."""
    first, caches = forward(params, caches, prompts, jnp.int32(0))

    def step(carry, position):
        token, caches = carry
        token, caches = forward(params, caches, token[:, None], position)
        return (token, caches), token

    positions = prompts.shape[1] + jnp.arange(output_tokens - 1)
    _, rest = lax.scan(step, (first, caches), positions)
    return jnp.concatenate([first[None], rest])


def rates(params: Params, streams: int, input_tokens: int, output_tokens: int, rounds: int) -> list[float]:
    """Batches a second, after one round that compiles and warms up."""
    cache_length = -(-(input_tokens + output_tokens) // 128) * 128
    caches = jnp.zeros((L, 2, streams, cache_length, K, H), params["embedding"].dtype)
    result = []
    for index in range(rounds + 1):
        prompts = jax.random.randint(jax.random.key(index), (streams, input_tokens), 100, 40000)
        start = time.perf_counter()
        generate(params, prompts, output_tokens, caches).block_until_ready()
        if index:
            result.append(1 / (time.perf_counter() - start))
    return result


def main(args: argparse.Namespace) -> None:
    dtype = jnp.dtype(args.dtype)
    params = random_params(dtype)
    levels = []
    for streams in args.concurrency:
        tokens = [streams * args.output_len * rate
                  for rate in rates(params, streams, args.input_len, args.output_len, args.rounds)]
        median = statistics.median(tokens)
        print(f"loop {args.dtype} streams={streams} output tok/s median {median:.1f} "
              f"{[round(value, 1) for value in tokens]}", flush=True)
        levels.append({"concurrency": streams, "output_tokens_per_second": round(median, 1)})
    path = report.save_json(Path(args.out), report.header(
        "loop", ["python", "-m", "scripts.bench", *sys.argv[1:]], dtype=args.dtype, levels=levels))
    print(f"Saved {path}")
