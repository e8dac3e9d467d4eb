"""Pipeline parallelism: each stage of the mesh axis `pipeline` holds a part of the layers, and their KV pages.

One step's tokens are cut into micro-batches, which pass the stages one after another, all in one jitted program
(GPipe, arXiv 1811.06965). With 3 stages and 4 micro-batches, M + P - 1 = 6 ticks:

    tick      0   1   2   3   4   5
    stage 0   m0  m1  m2  m3  .   .
    stage 1   .   m0  m1  m2  m3  .
    stage 2   .   .   m0  m1  m2  m3

so (P - 1) / (M + P - 1) of the stages' time is idle. A stage computes in idle ticks too, on an empty micro-batch: it
writes no page, and nobody reads its result. A row that is cut in two, a long prompt, is whole again for attention: at
every stage its first part's keys are in the pages before its second part comes.

Axis letters: P stages, M micro-batches, G data groups, T tokens, S rows, D model dim; t, s those of a micro-batch.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from model.batch import ROW_AXES, StepBatch
from model.config import ModelConfig, StackSpec
from sharding.mesh import MeshError
from sharding.rules import AxisRules

AXIS = "pipeline"

# A smaller micro-batch takes no less time: reading the weights is what takes it. FLOP a byte of memory traffic of the
# hardware, about; on a CPU small enough that tiny models have micro-batches.
_FEWEST_TOKENS: Mapping[str, int] = {"cpu": 16, "gpu": 256, "tpu": 512}
_MOST = 4  # micro-batches a stage: less than a fifth of the time is idle


def num_stages(rules: AxisRules) -> int:
    return rules.mesh.shape[AXIS]


def num_micro_batches(num_tokens: int, num_rows: int, stages: int, platform: str) -> int:
    """Of a step of this shape, of one data group: a power of two that divides its tokens."""
    if stages == 1:
        return 1
    most = min(_MOST * stages, num_tokens // _FEWEST_TOKENS[platform])
    if num_tokens > num_rows:  # a micro-batch may have all rows, and a shape of as many tokens is for decoding only
        most = min(most, (num_tokens - 1) // num_rows)
    count = 1
    while 2 * count <= most and num_tokens % (2 * count) == 0:
        count *= 2
    return count


def bubble(micro_batches: int, stages: int) -> float:
    """The share of the stages' time that is idle."""
    return (stages - 1) / (micro_batches + stages - 1)


def stacks_of_stage(config: ModelConfig, rules: AxisRules) -> tuple[StackSpec, ...]:
    """What a stage holds of each of the model's stacks; `first_layer` counts its own layers.

    A stack whose periods the stages do not divide is whole on every stage, and each runs it for all tokens.
    """
    held, first = [], 0
    for stack in config.stacks:
        periods = stack.periods // rules.shards("layers", stack.periods)
        held.append(replace(stack, first_layer=first, periods=periods))
        first += held[-1].num_layers
    return tuple(held)


def num_kv_layers(config: ModelConfig, rules: AxisRules) -> int:
    """Of the KV cache: those of the first stage, then those of the second, ..."""
    return num_stages(rules) * sum(stack.num_layers for stack in stacks_of_stage(config, rules))


def check(config: ModelConfig, mesh: jax.sharding.Mesh) -> None:
    """MeshError where no layer could be divided over the stages, or another axis rules the pipeline out."""
    stages = mesh.shape[AXIS]
    if stages == 1:
        return
    if mesh.shape["context"] > 1:
        raise MeshError(f"--mesh pipeline={stages},context={mesh.shape['context']}: the two cannot be combined; give "
                        "the devices of one of them to tensor or data")  # fmt: skip
    periods = [stack.periods for stack in config.stacks]
    if any(count % stages == 0 for count in periods):
        return
    largest = max(periods)
    fitting = [n for n in range(2, largest + 1) if largest % n == 0]
    raise MeshError(
        f"--mesh pipeline={stages} does not divide this model's layers, repeated patterns of "
        f"{' + '.join(map(str, periods))}; pipeline={' or '.join(map(str, fitting or [1]))} would"
    )


def run_stages(
    layers: Callable[..., tuple[jax.Array, jax.Array, Any]], params: Any, periods: int, rules: AxisRules,
    x: Float[Array, "T D"], angles: Any, kv_pages: jax.Array, batch: StepBatch,
) -> tuple[Float[Array, "T D"], jax.Array, Any]:
    """One stack of layers over all tokens of a step. Returns what `layers` does, of all tokens.

    layers: (params, x, angles, kv_pages, batch) -> (x, kv_pages, counts), of one stage and micro-batch.
    params: stacked, of all stages, [periods, ...]. angles: a tree of [T, ...]. counts: a tree of [layers of the stage,
    ...], summed over the micro-batches.
    """
    stages, groups = num_stages(rules), rules.num_groups
    platform = rules.mesh.devices.flat[0].platform
    count = num_micro_batches(len(x) // groups, len(batch.kv_lens) // groups, stages, platform)
    depth = rules.shards("layers", periods)  # 1: every stage has all of these layers

    def run(params, x, angles, kv_pages, batch):
        stage = lax.axis_index(AXIS) if depth > 1 else 0
        own, per_token = rules.within(AXIS), partial(_micro_batch, groups, count)

        def tick(carry, now):
            x_before, kv_pages = carry
            number = now - stage
            number = jnp.where((number >= 0) & (number < count), number, count)  # `count`: one without tokens
            x_first, tokens, positions, angles_in = jax.tree.map(
                lambda a: per_token(a, number), (x, batch.tokens, batch.positions, angles)
            )
            step = StepBatch(tokens, positions, *_rows_of(own, count, number, batch))
            x_in = jnp.where(stage == 0, x_first, x_before)
            x_out, kv_pages, counts = layers(params, x_in, angles_in, kv_pages, step)
            passed = lax.ppermute(x_out, AXIS, [(s, s + 1) for s in range(stages - 1)]) if depth > 1 else x_out
            return (passed, kv_pages), (x_out, counts)

        nothing = jnp.zeros((len(x) // count, x.shape[1]), x.dtype)
        ticks = jnp.arange(count + depth - 1, dtype=jnp.int32)
        (_, kv_pages), (outs, counts) = lax.scan(tick, (nothing, kv_pages), ticks)
        out = outs[depth - 1 :].reshape(count, groups, -1, x.shape[1])  # of the last stage, in order
        out = jnp.moveaxis(out, 0, 1).reshape(1, *x.shape)
        return out, kv_pages, jax.tree.map(lambda a: a.sum(0), counts)

    of_stage, whole = PartitionSpec(AXIS), PartitionSpec()
    of_layers = of_stage if depth > 1 else whole
    staged = jax.shard_map(
        run, mesh=rules.mesh, axis_names={AXIS}, check_vma=False, out_specs=(of_stage, of_stage, of_layers),
        in_specs=(of_layers, whole, whole, of_stage, whole),
    )  # fmt: skip
    outs, kv_pages, counts = staged(params, x, angles, kv_pages, batch)
    return _of_last_stage(rules, outs), kv_pages, counts


def _of_last_stage(rules: AxisRules, outs: Float[Array, "P T D"]) -> Float[Array, "T D"]:
    """On all stages: each has what comes after the layers."""
    def send(outs: jax.Array) -> tuple[jax.Array]:
        is_last = rules.place("layers", stages) == stages - 1
        return (rules.sum_over("layers", stages, jnp.where(is_last, outs[0], 0)),)

    stages, of_tokens = len(outs), ("tokens", "embed")
    (out,) = rules.map_over_shards(send, (outs,), (("layers", *of_tokens),), (of_tokens,), (outs.shape[1:],))
    return out


def _micro_batch(groups: int, count: int, x: Float[Array, "T ..."], number: Int[Array, ""]) -> Float[Array, "t ..."]:
    """Each group's tokens of a micro-batch; where there is no such micro-batch, of some."""
    split = x.reshape(groups, count, -1, *x.shape[1:])
    return lax.dynamic_index_in_dim(split, number, axis=1, keepdims=False).reshape(-1, *x.shape[1:])


def _rows_of(rules: AxisRules, count: int, number: Int[Array, ""], batch: StepBatch
             ) -> tuple[Array, Array, Array, Array]:  # fmt: skip
    """`StepBatch.of_rows` of a micro-batch."""
    groups = rules.num_groups
    num_tokens, num_rows = len(batch.tokens) // groups, len(batch.kv_lens) // groups
    of_rows = partial(micro_batch_rows, num_tokens=num_tokens // count,
                      num_rows=num_rows // count if num_tokens == num_rows else num_rows)  # fmt: skip
    shapes = jax.eval_shape(of_rows, number, *(jax.ShapeDtypeStruct((x.shape[0] // groups, *x.shape[1:]), x.dtype)
                                               for x in batch.of_rows))  # fmt: skip
    page_table, kv_lens, cu_q_lens, distribution = rules.map_over_shards(
        of_rows, (number, *batch.of_rows), ((), *ROW_AXES), ROW_AXES,
        [(groups * s.shape[0], *s.shape[1:]) for s in shapes],
    )  # fmt: skip
    return page_table, kv_lens, cu_q_lens, distribution


def micro_batch_rows(
    number: Int[Array, ""], page_table: Int[Array, "S M"], kv_lens: Int[Array, " S"], cu_q_lens: Int[Array, " S+1"],
    distribution: Int[Array, " 3"], *, num_tokens: int, num_rows: int,
) -> tuple[Int[Array, "s M"], Int[Array, " s"], Int[Array, " s+1"], Int[Array, " 3"]]:  # fmt: skip
    """The rows, of one group's step, that have some of the tokens number * t .. (number + 1) * t - 1, and only those.

    A row cut by the end is as long as it is then. num_tokens: t; num_rows: s, as many as may have some.
    """
    begin = number * num_tokens
    first = jnp.searchsorted(cu_q_lens[1:], begin, side="right").astype(jnp.int32)
    rows = first + jnp.arange(num_rows, dtype=jnp.int32)
    used = (rows < distribution[2]) & (cu_q_lens[jnp.minimum(rows, len(kv_lens))] < begin + num_tokens)
    rows = jnp.minimum(rows, len(kv_lens) - 1)
    ends = cu_q_lens[rows + 1] - begin
    lengths = jnp.where(used, kv_lens[rows] - jnp.maximum(ends - num_tokens, 0), 0)
    in_use = used.sum(dtype=jnp.int32)
    decode = jnp.clip(distribution[0] - first, 0, in_use)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.clip(ends, 0, num_tokens)])
    return page_table[rows], lengths, starts, jnp.stack([decode, decode, in_use])
