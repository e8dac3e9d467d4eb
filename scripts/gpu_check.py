"""The GPU kernels on a real H200, in under 10 minutes: right first, then how fast. One command, no arguments.

    .venv-gpu/bin/python -m scripts.gpu_check            # environment: pip install -e '.[cuda]'

1. Every kernel against its float32 reference, on the ragged batches of the tests.
2. Decode, 64 rows of 4k tokens: share of the bandwidth of a copy, measured in the same run (target 85%), beside jax's
   own paged attention.
3. Prefill, 8k tokens, causal: share of the speed of cuDNN's attention through jax, in the same run (target 80%).
4. Latent attention and experts: share of the copy's bandwidth; experts beside jax.lax.ragged_dot.

Exits with 1 when a result is wrong. Without a GPU it runs the first part in interpret mode on small shapes, and says
so.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from pallas_kernels import interpret
from pallas_kernels.devices import device_of_kind
from pallas_kernels.grouped_matmul import api as grouped
from pallas_kernels.grouped_matmul import reference as grouped_reference
from quant.experts import quantize_experts
from scripts.aot.cases import (
    DECODE,
    PREFILL,
    Rows,
    grouped_matmul,
    latent_attention,
    paged_metadata,
    ragged_paged,
)
from scripts.aot.models import ATTENTION, EXPERTS, LATENT, AttentionShape
from scripts.aot.timing import program_seconds, seconds_of
from tests.kernels import latent_cases, ragged_cases  # the same batches as the tests; needs a checkout
from tests.tolerances import GROUPED_MATMUL

DECODE_TARGET, PREFILL_TARGET = 0.85, 0.80
ROWS = ((1, 40), (1, 1), (1, 129), (1, 64), (37, 100), (5, 5), (64, 64), (70, 201))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.gpu_check", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--skip-correctness", action="store_true", help="only the timing")
    args = parser.parse_args(argv)
    # The interpreter's threads wait for each other in XLA's pool: with the threads of one device they can hang.
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8".strip()
    device = jax.devices()[0]
    real = device.platform == "gpu"
    started = time.perf_counter()
    if real:
        print(f"jax {jax.__version__} on {device.device_kind}")
    else:
        print(f"jax {jax.__version__}: no GPU here. The kernels run in interpret mode on the CPU, on small shapes; "
              "nothing is timed.")
    failed = 0 if args.skip_correctness else run_checks(correctness_checks(small=not real))
    if real:
        failed += run_timing(device)
    print(f"{failed} failed; {time.perf_counter() - started:.0f} s")
    return int(failed > 0)


# Correctness


def correctness_checks(*, small: bool) -> dict[str, Callable[[], None]]:
    """Each raises AssertionError when a result is wrong. small: for interpret mode, which is slow."""
    ragged = partial(ragged_cases.Case, rows=ROWS[:1] + ROWS[4:6] if small else ROWS, page_size=16)
    attention = {
        "plain": ragged(heads=(8, 2), head_dim=64),
        "window": ragged(heads=(8, 2), head_dim=64, options={"window": 33}),
        "soft cap and sinks": ragged(heads=(4, 2), head_dim=64, options={
            "soft_cap": 20.0, "sinks": np.linspace(-1, 1, 4).astype(np.float32)}),
        "bias": ragged(heads=(4, 2), head_dim=64, bias=True),
        "tree": ragged(heads=(4, 2), head_dim=64, tree_words=2),
        "int8": ragged(heads=(4, 2), head_dim=64, kv_dtype="int8"),
        "fp8": ragged(heads=(4, 2), head_dim=64, kv_dtype="float8_e4m3fn"),
        "head 128, page 64": ragged(heads=(32, 8), head_dim=128, page_size=64),
        "head 128, one kv head": ragged(heads=(8, 1), head_dim=128, page_size=64),
        "head 256": ragged(heads=(4, 2), head_dim=256, page_size=32),
        "no grouping": ragged(heads=(4, 4), head_dim=128, page_size=128),
    }  # fmt: skip
    names = ("plain", "window", "int8") if small else attention
    checks: dict[str, Callable[[], None]] = {
        f"ragged paged attention: {name}": partial(ragged_cases.check, attention[name], "mosaic_gpu", "bfloat16")
        for name in names
    }
    latent = ragged_cases.Case(rows=ROWS[:1] + ROWS[4:5] if small else ROWS, heads=(16, 1), head_dim=512, page_size=64)
    checks["latent attention"] = partial(latent_cases.check, latent, "mosaic_gpu", "bfloat16")
    for weights in ("bfloat16", "int8"):
        checks[f"grouped matmul: {weights} weights"] = partial(check_grouped, weights, small=small)
    return checks


def check_grouped(weights: str, *, small: bool) -> None:
    sizes = np.array([5, 0, 70, 1] if small else [5, 0, 300, 1, 128, 77, 0, 513], np.int32)
    depth, columns = (128, 256) if small else (1024, 1792)
    rng = np.random.default_rng(0)
    lhs = jnp.asarray(rng.standard_normal((sizes.sum() + 3, depth)), jnp.bfloat16)
    rhs = jnp.asarray(rng.standard_normal((len(sizes), depth, columns)), jnp.float32)
    operand: Any = rhs.astype(jnp.bfloat16)
    values, scales = np.asarray(operand.astype(jnp.float32)), None
    if weights == "int8":
        operand = quantize_experts(rhs)
        values, scales = np.asarray(operand.values, np.float32), np.asarray(operand.scales)
    spec = grouped.ExpertsSpec(num_experts=len(sizes), dtype=jnp.dtype(jnp.bfloat16), weight_dtype=jnp.dtype(weights))
    backend = grouped.choose_backend("mosaic_gpu", spec, jax.devices()[0])
    out = np.asarray(jax.jit(backend.matmul)(lhs, operand, sizes), np.float32)
    want = grouped_reference.grouped_matmul(np.asarray(lhs, np.float32), values, sizes, scales=scales)
    tolerance = GROUPED_MATMUL["bfloat16" if scales is None else "quantized bfloat16"]
    np.testing.assert_allclose(out, want, rtol=tolerance, atol=tolerance * depth**0.5)


def run_checks(checks: dict[str, Callable[[], None]]) -> int:
    failed = 0
    for name, check in tqdm(checks.items(), desc="Checking", leave=False):
        started = time.perf_counter()
        try:
            check()
            result = "ok"
        except Exception as error:  # a wrong number and a refusal are both this line's result
            failed += 1
            result = f"FAILED: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
            interpret.reset()
        tqdm.write(f"  {name}: {result} ({time.perf_counter() - started:.1f} s)")
    return failed


# Timing


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Of one pass. share: of what it is measured against; target: None where there is none."""

    name: str
    seconds: float
    rate: str
    share: float
    against: str
    target: float | None = None

    def __str__(self) -> str:
        verdict = ""
        if self.target is not None:
            verdict = f", target {self.target:.0%} {'reached' if self.share >= self.target else 'missed'}"
        return f"  {self.name}: {1e6 * self.seconds:.0f} us, {self.rate}: {self.share:.1%} of {self.against}{verdict}"


def run_timing(device: Any) -> int:
    """Prints a line for each; returns how many could not run."""
    chip = device_of_kind(device.device_kind)
    copy = copy_bandwidth()
    print(f"  copy: {copy / 1e12:.2f} TB/s read and written, {copy / chip.hbm_bandwidth:.0%} of the data sheet's")
    failed = 0
    jobs: list[tuple[str, Callable[[], Timing | None]]] = []
    for name in ("llama3-8b", "llama3-70b/8"):
        jobs.append((f"decode {name}", partial(time_decode, ATTENTION[name], device, copy)))
        jobs.append((f"decode {name}, jax's paged attention", partial(time_jax_decode, ATTENTION[name], copy)))
    jobs.append(("prefill", partial(time_prefill, ATTENTION["llama3-8b"], device)))
    jobs.append(("latent", partial(time_latent, device, copy)))
    jobs += [(f"experts {backend}", partial(time_experts, backend, device, copy)) for backend in ("mosaic_gpu", "xla")]
    for name, job in jobs:
        try:
            print(job(), flush=True)
        except Exception as error:
            ours = "jax" not in name and "xla" not in name
            failed += ours
            print(f"  {name}: {'FAILED' if ours else 'not available'}: {' '.join(str(error).split())[:300]}")
    return failed


def copy_bandwidth(num_bytes: int = 1 << 30) -> float:
    """Bytes a second, read and written, of XLA's loop over a large array."""
    x = jnp.zeros(num_bytes // 4, jnp.float32)

    def make(n: int) -> Callable[[], Any]:
        compiled = jax.jit(lambda x: jax.lax.fori_loop(0, n, lambda _, y: y + 1, x)).lower(x).compile()
        return lambda: compiled(x)

    return 2 * num_bytes / seconds_of(make, 40)


def kv_bytes(shape: AttentionShape, rows: Rows) -> int:
    """What a decode step has to read."""
    itemsize = jnp.dtype(shape.kv_dtype).itemsize
    return rows.num_rows * rows.kv_len * 2 * shape.num_kv_heads * shape.head_dim * itemsize


def time_decode(shape: AttentionShape, device: Any, copy: float) -> Timing:
    seconds = program_seconds(ragged_paged(shape, DECODE, "mosaic_gpu", [device], pool_bytes=0), 64)
    rate = kv_bytes(shape, DECODE) / seconds
    return Timing(name=f"{DECODE.name}, {shape.name}", seconds=seconds, rate=f"{rate / 1e12:.2f} TB/s",
                  share=rate / copy, against="the copy", target=DECODE_TARGET)  # fmt: skip


def time_jax_decode(shape: AttentionShape, copy: float) -> Timing:
    """jax's own kernel (Pallas Triton): pages [K, P, B, H], one token a row, nothing written."""
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    page_size = 64
    (table, lengths, *_), num_pages = paged_metadata(DECODE, page_size)
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (DECODE.num_rows, shape.num_heads, shape.head_dim), jnp.bfloat16)
    k, v = (jax.random.normal(key, (shape.num_kv_heads, num_pages, page_size, shape.head_dim), jnp.bfloat16)
            for key in keys[1:])  # fmt: skip

    def make(n: int) -> Callable[[], Any]:
        def passes(q, k, v):
            return jax.lax.fori_loop(0, n, lambda _, q: paged_attention(q, k, v, table, lengths).astype(q.dtype), q)

        compiled = jax.jit(passes).lower(q, k, v).compile()
        return lambda: compiled(q, k, v)

    seconds = seconds_of(make, 32)
    rate = kv_bytes(shape, DECODE) / seconds
    return Timing(name=f"{DECODE.name}, {shape.name}, jax's paged attention", seconds=seconds,
                  rate=f"{rate / 1e12:.2f} TB/s", share=rate / copy, against="the copy")  # fmt: skip


def time_prefill(shape: AttentionShape, device: Any) -> Timing:
    tokens = PREFILL.chunk
    flops = 4 * shape.num_heads * shape.head_dim * tokens * (tokens + 1) / 2
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (1, tokens, heads, shape.head_dim), jnp.bfloat16)
               for key, heads in zip(keys, (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads), strict=True))
    attend = partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")

    def make(n: int) -> Callable[[], Any]:
        def passes(q, k, v):
            return jax.lax.fori_loop(0, n, lambda _, q: attend(q, k, v), q)

        compiled = jax.jit(passes).lower(q, k, v).compile()
        return lambda: compiled(q, k, v)

    cudnn = seconds_of(make, 16)
    seconds = program_seconds(ragged_paged(shape, PREFILL, "mosaic_gpu", [device], pool_bytes=0), 16)
    return Timing(
        name=f"{PREFILL.name} causal, {shape.name}", seconds=seconds, rate=f"{flops / seconds / 1e12:.0f} Tflop/s",
        share=cudnn / seconds, target=PREFILL_TARGET,
        against=f"cuDNN ({1e6 * cudnn:.0f} us, {flops / cudnn / 1e12:.0f} Tflop/s)",
    )


def time_latent(device: Any, copy: float) -> Timing:
    shape = LATENT["deepseek-v3/8"]
    program = latent_attention(shape, DECODE, "mosaic_gpu", [device], pool_bytes=0)
    seconds = program_seconds(program, 64)
    rate = DECODE.num_rows * DECODE.kv_len * 2 * (shape.latent_dim + shape.rope_dim) / seconds
    return Timing(name=f"{DECODE.name}, {shape.name}", seconds=seconds, rate=f"{rate / 1e12:.2f} TB/s",
                  share=rate / copy, against="the copy")  # fmt: skip


def time_experts(backend: str, device: Any, copy: float) -> Timing:
    """A decode step: bound by the weights' bytes."""
    shape, tokens = EXPERTS["mixtral-8x7b up"], 64
    program = grouped_matmul(shape, tokens * shape.top, backend, [device])
    seconds = program_seconds(program, 32)
    rate = 2 * shape.experts * shape.d * shape.f / seconds
    kernel = "jax.lax.ragged_dot" if backend == "xla" else "grouped matmul"
    return Timing(name=f"{tokens} tokens, {shape.name}, {kernel}", seconds=seconds, rate=f"{rate / 1e12:.2f} TB/s",
                  share=rate / copy, against="the copy")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
