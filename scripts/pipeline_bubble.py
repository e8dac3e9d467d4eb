"""How long the stages of a pipeline are idle: measured beside the formula (P - 1) / (M + P - 1).

    python -m scripts.pipeline_bubble --stages 2

runs steps of 1, 2, 4, ... micro-batches of one size through a small random model on simulated CPU devices. A stage
computes in idle ticks too, so where all devices share the cores the bubble is work, and shows in CPU time.
The least of many laps counts. A tick takes the median of steps over their ticks; what M ticks would take less than a
step is bubble.
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
    args = parser.parse_args(argv)
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={args.stages}"
    return report(args.stages, args.laps)


def report(stages: int, laps: int) -> int:
    import numpy as np

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
        formula, measured = (stages - 1) / ticked, 1 - count * tick / taken
        print(f"{count:13d}{ticked:7d}{taken * 1e3:9.2f}{taken / ticked * 1e3:11.2f}{formula:17.1%}{measured:10.1%}")
    return 0


def compiled_steps(stages: int):
    """(micro-batches, a call that runs the layers once) of steps of one token a row."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx

    from model import pipeline
    from model.batch import StepBatch
    from model.build import choose_kernels, model_rules
    from model.families.registry import read_config
    from model.transformer import Transformer, param_axes
    from sharding.mesh import MeshSpec, make_mesh

    config, dtype = read_config(CONFIG), jnp.dtype(jnp.float32)
    rules = model_rules(config, make_mesh(MeshSpec(pipeline=stages)))
    kernels = choose_kernels(config, rules, dtype, attention_backend="xla", page_size=16)
    model = Transformer(config, rules, kernels.attention.attend, rngs=nnx.Rngs(0), dtype=dtype)
    axes = param_axes(model)
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        shape, names = axes[tuple(str(part) for part in path)]
        variable.set_value(jax.device_put(variable.get_value(), rules.sharding(names, shape)))
    structure, params = nnx.split(model)

    tokens = size = 16
    while (count := pipeline.num_micro_batches(tokens, tokens, stages, "cpu")) * size == tokens:
        layout = kernels.kv_layout(config, 1 + tokens)
        pages = jnp.zeros(layout.shape, dtype, device=rules.sharding(layout.axes, layout.shape))
        ones = np.arange(tokens + 1, dtype=np.int32)
        batch = StepBatch(*map(jnp.asarray, (
            np.zeros(tokens, np.int32), np.zeros(tokens, np.int32), 1 + ones[:-1, None], np.ones(tokens, np.int32),
            ones, np.full(3, tokens, np.int32),
        )))  # fmt: skip
        step = jax.jit(lambda params, pages, batch: nnx.merge(structure, params)(pages, batch)[:2])
        compiled = step.lower(params, pages, batch).compile()
        jax.block_until_ready(compiled(params, pages, batch))
        yield count, lambda compiled=compiled, pages=pages, batch=batch: jax.block_until_ready(
            compiled(params, pages, batch))  # fmt: skip
        tokens *= 2


if __name__ == "__main__":
    sys.exit(main())
