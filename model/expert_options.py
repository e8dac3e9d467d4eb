"""How the experts of a model are spread over a mesh: what is asked for, whether that can be, and what it makes."""

import math
from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp

from model.config import ModelConfig
from model.dispatch import BySize, Dispatch, ExchangeRows, GatherTokens, TwoMicroBatches
from model.experts import ExpertsBackend
from pallas_kernels.grouped_matmul import api as grouped_matmul
from sharding.exchange import exchange_for
from sharding.rules import AxisRules

All2AllBackend = Literal["auto", "ragged_all_to_all", "allgather_reducescatter"]

# Tokens of a group from which "auto" exchanges rows: where that moves fewer bytes, and where it only saves sorting.
_EXCHANGE_FROM, _EXCHANGE_FROM_AT_MORE_BYTES = 32, 256
_SPLIT_FROM = 32  # tokens of a group that are worth two micro-batches; vLLM's dbo_decode_token_threshold


class ExpertsError(ValueError):
    """A model, a mesh and options that do not go together; the message is one line and names the flags."""


@dataclass(frozen=True, kw_only=True)
class ExpertOptions:
    """parallel: experts over data x tensor instead of tensor. redundant: more places than experts, which may then move;
    None: every expert has its place. Names of flags: see `serving.flags`."""

    parallel: bool = False
    all2all: All2AllBackend = "auto"
    redundant: int | None = None
    two_micro_batches: bool = False


DEFAULT = ExpertOptions()


def expert_rules(rules: AxisRules, options: ExpertOptions) -> AxisRules:
    return replace(rules, rules={**rules.rules, "experts": ("data", "tensor")}) if options.parallel else rules


def choose_experts(config: ModelConfig, rules: AxisRules, options: ExpertOptions, dtype: jnp.dtype
                   ) -> ExpertsBackend | None:  # fmt: skip
    """None for a model without experts. Raises ExpertsError."""
    num_experts, device = config.num_experts, rules.mesh.devices.flat[0]
    _check(options, num_experts, rules.mesh)
    if num_experts is None:
        return None
    num_places = num_experts + (options.redundant or 0)
    axes, held = rules.over("experts", num_places), num_places // rules.shards("experts", num_places)
    specs = {layer.moe for layer in config.layers if layer.moe is not None}
    spec = grouped_matmul.ExpertsSpec(
        num_experts=held, dtype=dtype, weight_dtype=dtype, sizes=(config.hidden_size, *(moe.width for moe in specs))
    )  # fmt: skip
    dispatch: Dispatch = GatherTokens(axes=axes, num_places=num_places, held=held)
    if options.parallel and axes and options.all2all != "allgather_reducescatter":
        exchange = ExchangeRows(axes=axes, num_places=num_places, held=held, exchange=exchange_for(device))
        top_k = max(moe.routing.top_k for moe in specs)
        least = 1 if options.all2all == "ragged_all_to_all" else exchange_from(rules.mesh, top_k)
        dispatch = BySize(small=dispatch, large=exchange, from_tokens=least)
    if options.two_micro_batches:
        dispatch = TwoMicroBatches(way=dispatch, from_tokens=_SPLIT_FROM)
    return ExpertsBackend(
        matmuls=grouped_matmul.choose_backend("auto", spec, device), dispatch=dispatch, num_places=num_places,
        max_replicas=None if options.redundant is None else options.redundant + 1,
    )  # fmt: skip


def exchange_from(mesh: jax.sharding.Mesh, top_k: int) -> int:
    """Tokens of a group from which exchanging rows is the better way; the formulas are in `model.dispatch`."""
    groups, alike = mesh.shape["data"], mesh.shape["tensor"]
    n = groups * alike
    gather = 2 * (groups - 1) + 2 * (alike - 1) / alike
    exchange = 2 * top_k / alike * (n - 1) / n + (alike - 1) / alike
    return _EXCHANGE_FROM if exchange < gather else _EXCHANGE_FROM_AT_MORE_BYTES


def _check(options: ExpertOptions, num_experts: int | None, mesh: jax.sharding.Mesh) -> None:
    if num_experts is None:
        for flag, given in (("--enable-expert-parallel", options.parallel), ("--enable-dbo", options.two_micro_batches),
                            ("--enable-eplb", options.redundant is not None),
                            (f"--all2all-backend {options.all2all}", options.all2all != "auto")):
            if given:
                raise ExpertsError(f"{flag}: this model has no experts")
        return
    if not options.parallel:
        if options.redundant is not None:
            raise ExpertsError("--enable-eplb moves experts between all devices: give --enable-expert-parallel too")
        if options.all2all != "auto":
            raise ExpertsError(f"--all2all-backend {options.all2all} is for --enable-expert-parallel: without it no "
                               "token leaves its data group")  # fmt: skip
        return
    may_move = mesh.shape.get("pipeline", 1) == 1
    if options.redundant is not None and not may_move:
        raise ExpertsError("--enable-eplb works within one pipeline stage: give a mesh with pipeline=1")
    sizes = {axis: mesh.shape[axis] for axis in ("data", "tensor")}
    devices, places = math.prod(sizes.values()), num_experts + (options.redundant or 0)
    if places > num_experts * devices:
        raise ExpertsError(f"--eplb-config: num_redundant_experts is {options.redundant}, must be at most "
                           f"{num_experts * (devices - 1)}: {num_experts} experts are then on every device")
    if places % devices:
        missing, fitting = -num_experts % devices, [n for n in range(1, devices) if num_experts % n == 0]
        if not may_move:
            hint = f"over {' or '.join(map(str, fitting[-3:]))} devices of a stage they would"
        elif missing:
            hint = f"--enable-eplb --eplb-config '{{\"num_redundant_experts\": {missing}}}' would fill them up"
        else:
            hint = f"num_redundant_experts must be a multiple of {devices}"
        what = f"{num_experts} experts" + (f" and {options.redundant} redundant ones" if options.redundant else "")
        over = " x ".join(f"{axis}={size}" for axis, size in sizes.items())
        raise ExpertsError(f"--enable-expert-parallel: {what} do not divide over {over}; {hint}")
