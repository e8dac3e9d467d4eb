"""How long the stages of a pipeline are idle: measured beside the formula (P - 1) / (M + P - 1).

    python -m scripts.pipeline_bubble --stages 2

runs steps of 1, 2, 4, ... micro-batches of one size through a small random model on simulated CPU devices. A stage
computes in idle ticks too, so where all devices share the cores the bubble is work, and shows in CPU time.
The least of many laps counts. A tick takes the median of steps over their ticks; what M ticks would take less than a
step is bubble.

    python -m scripts.pipeline_bubble --stages 4 --target v6e

compiles a serving step of 2,048 tokens for an absent chip, with stages and without, and compares a device's matrix
products: what it computes more than its share, loops included, is bubble.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 512, "intermediate_size": 2048,
    "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 512,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000, "tie_word_embeddings": True,
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.pipeline_bubble", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--stages", type=int, choices=(2, 4, 8), default=2, help="P (default: %(default)s)")
    parser.add_argument("--laps", type=int, default=60, help="the best counts (default: %(default)s)")
    parser.add_argument("--target", choices=("v5e", "v6e", "v7x", "h200"), help="compile for it instead")
    args = parser.parse_args(argv)
    if args.target:
        return compare(args.target, args.stages)
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={args.stages}"
    return report(args.stages, args.laps)


def report(stages: int, laps: int) -> int:
    import numpy as np

    from model import pipeline

    steps = list(compiled_steps(stages))
    best = [float("inf")] * len(steps)
    for _ in range(laps):  # in turn: other programs disturb all alike
        for index, (_, run) in enumerate(steps):
            start = time.process_time()
            run()
            best[index] = min(best[index], time.process_time() - start)
    counts = np.array([count for count, _ in steps])
    ticks, times = counts + stages - 1, np.array(best)
    tick = np.median(times / ticks)
    print(f"{stages} stages; a tick takes {tick * 1e3:.2f} ms of CPU time")
    print("micro-batches  ticks  step ms  ms a tick  bubble: formula  measured")
    for count, ticked, taken in zip(counts, ticks, times, strict=True):
        formula, measured = pipeline.bubble(count, stages), 1 - count * tick / taken
        print(f"{count:13d}{ticked:7d}{taken * 1e3:9.2f}{taken / ticked * 1e3:11.2f}{formula:17.1%}{measured:10.1%}")
    return 0


def compiled_steps(stages: int):
    """(micro-batches, a call that runs the layers once) of steps of one token a row."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from model import pipeline
    from model.batch import StepBatch
    from model.build import choose_kernels, model_rules, model_shapes
    from model.families.registry import read_config
    from model.transformer import param_axes, with_params
    from sharding.mesh import MeshSpec, make_mesh

    config, dtype = read_config(CONFIG), jnp.dtype(jnp.float32)
    rules = model_rules(config, make_mesh(MeshSpec(pipeline=stages)))
    kernels = choose_kernels(config, rules, dtype, attention_backend="xla", page_size=16)
    shapes = model_shapes(config, rules, kernels, dtype)
    weights = {path: jax.device_put(0.02 * jax.random.normal(jax.random.key(0), shape), rules.sharding(axes, shape))
               for path, (shape, axes) in param_axes(shapes).items()}  # fmt: skip
    model = with_params(shapes, weights)
    structure, params = nnx.split(model)

    tokens = size = 16
    while (count := pipeline.num_micro_batches(tokens, tokens, stages, "cpu")) * size == tokens:
        layout = kernels.kv_layout(1 + tokens)
        pages = jnp.zeros(layout.shape, dtype, device=rules.sharding(layout.axes, layout.shape))
        zeros, upward = jnp.zeros(tokens, jnp.int32), jnp.arange(tokens + 1, dtype=jnp.int32)
        batch = StepBatch(zeros, zeros, 1 + upward[:-1, None], zeros + 1, upward, jnp.full(3, tokens, jnp.int32))
        step = jax.jit(lambda params, pages, batch: nnx.merge(structure, params)(pages, batch)[:2])
        compiled = step.lower(params, pages, batch).compile()
        jax.block_until_ready(compiled(params, pages, batch))
        yield count, lambda compiled=compiled, pages=pages, batch=batch: jax.block_until_ready(
            compiled(params, pages, batch))  # fmt: skip
        tokens *= 2


def compare(target: str, stages: int) -> int:
    from scripts.aot.targets import TARGETS, prepare_environment

    prepare_environment()
    from model import pipeline
    from pallas_kernels.devices import DEVICES
    from scripts.aot.models import STEPS, StepConfig
    from scripts.aot.step import compile_step
    from scripts.planning.counting import count
    from serving.runner.shapes import StepShape

    platform, shape = DEVICES[target].platform, StepShape(2048, 64)
    hf = {**STEPS["llama3-8b/8"].hf, "num_hidden_layers": 8, "vocab_size": 4096}
    flops = []
    for mesh in ("tensor=1", f"pipeline={stages},tensor=1"):
        step = StepConfig(name=mesh, hf=hf, mesh=mesh, max_model_len=8192, max_num_seqs=64, num_tokens=2048,
                          kv_bytes=2 << 30)  # fmt: skip
        compiled, *_ = compile_step(TARGETS[target], step, "auto", shape)
        counts = count(compiled.as_text())
        passed = sum(n for collective, n in counts.collectives.items() if collective.kind == "collective-permute")
        flops.append(counts.flops)
        print(f"{mesh}: {counts.flops / 1e12:.4f} TFLOP a device, activations passed {passed} times")
    micro_batches = pipeline.num_micro_batches(shape.num_tokens, shape.num_rows, stages, platform)
    whole, staged = flops
    print(f"{micro_batches} micro-batches; bubble: formula {pipeline.bubble(micro_batches, stages):.2%}, compiled "
          f"{1 - whole / stages / staged:.2%}")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
