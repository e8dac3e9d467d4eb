"""What a model needs before it can be made: the rules of its mesh and its kernels, chosen once."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from model import pipeline
from model.config import ModelConfig
from model.context import ContextAttention, choose_context_attention
from model.expert_options import DEFAULT, ExpertOptions, choose_experts, expert_rules
from model.experts import ExpertsBackend
from model.fitting import check_tensor
from model.transformer import Transformer, abstract_model
from pallas_kernels.latent_attention import api as latent_attention
from pallas_kernels.latent_attention.api import LatentLayout
from pallas_kernels.ragged_paged_attention import api as attention
from pallas_kernels.ragged_paged_attention.api import KVLayout
from sharding.mesh import MeshError
from sharding.rules import AxisRules, axis_rules


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """num_kv_heads, num_kv_layers: of all devices, with copies. experts: None where no layer has any."""

    attention: attention.Backend | latent_attention.LatentBackend | ContextAttention
    num_kv_heads: int
    num_kv_layers: int
    experts: ExpertsBackend | None

    def kv_layout(self, num_pages: int) -> KVLayout | LatentLayout:
        """Of what this kind of attention keeps of each token."""
        if isinstance(self.attention, latent_attention.LatentBackend):
            return self.attention.layout(self.num_kv_layers, num_pages)
        return self.attention.layout(self.num_kv_layers, num_pages, self.num_kv_heads)

    def kv_pages(self, rules: AxisRules, num_pages: int) -> jax.ShapeDtypeStruct:
        """All of them, with the sharding that their axes ask for. num_pages: of all data groups."""
        layout = self.kv_layout(num_pages)
        return jax.ShapeDtypeStruct(layout.shape, layout.dtype, sharding=rules.sharding(layout.axes, layout.shape))


def model_rules(config: ModelConfig, mesh: jax.sharding.Mesh, options: ExpertOptions = DEFAULT) -> AxisRules:
    """Raises MeshError where the model cannot be divided as the mesh wants."""
    pipeline.check(config, mesh)
    tensor = mesh.shape["tensor"]
    better = check_tensor(config, tensor) if tensor > 1 else None
    rules = expert_rules(axis_rules(mesh, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads), options)
    if better is not None:
        rules.replicated["attention"] += f"; {better}"
    if config.latent is not None and tensor > 1:
        rules.replicated["latent KV pages"] = f"all heads attend to one row a token: each of tensor={tensor} holds it"
    return rules


def choose_kernels(config: ModelConfig, rules: AxisRules, dtype: jnp.dtype, *, attention_backend: str,
                   page_size: int, options: ExpertOptions = DEFAULT) -> Kernels:  # fmt: skip
    """For the devices of the mesh; with the options of its rules. Raises ValueError with what is missing."""
    if (context := rules.mesh.shape["context"]) > 1:
        _check_context(config, rules, page_size)
    device = rules.mesh.devices.flat[0]
    num_kv_heads = rules.held("kv_heads", config.num_kv_heads)
    shards = rules.shards("kv_heads", num_kv_heads)
    heads = config.num_heads // shards
    if config.latent is not None:
        spec = latent_attention.LatentSpec(
            num_heads=heads, latent_dim=config.latent.latent_dim, rope_dim=config.latent.rope_dim, page_size=page_size,
            dtype=dtype, kv_dtype=dtype,
        )  # fmt: skip
        chosen = latent_attention.choose_backend(attention_backend, spec, device)
    else:
        spec = attention.AttentionSpec(
            num_heads=heads, num_kv_heads=num_kv_heads // shards, head_dim=config.head_dim, page_size=page_size,
            dtype=dtype, kv_dtype=dtype,
        )  # fmt: skip
        chosen = _choose_attention(spec, device, attention_backend, context)
    if chosen.choice.simulated and chosen.choice.name == "mosaic_gpu" and rules.mesh.size > 1:
        raise ValueError(f"attention backend 'mosaic_gpu': jax simulates a GPU kernel on one device, the mesh has "
                         f"{rules.mesh.size}")  # fmt: skip
    experts = choose_experts(config, rules, options, dtype)
    return Kernels(attention=chosen, num_kv_heads=num_kv_heads,
                   num_kv_layers=pipeline.num_kv_layers(config, rules), experts=experts)  # fmt: skip


def _check_context(config: ModelConfig, rules: AxisRules, page_size: int) -> None:
    """MeshError with what ring attention has not, or not yet."""
    context = rules.mesh.shape["context"]
    missing = {
        "latent attention over it; data groups share out its cache": config.latent is not None,
        "attention in chunks over it": any(layer.chunk for layer in config.layers),
        f"--block-size of {page_size} tokens for it; it takes a multiple": page_size % context > 0,
    }
    for what, is_missing in missing.items():
        if is_missing:
            raise MeshError(f"--mesh context={context}: there is no {what}")


def _choose_attention(spec: attention.AttentionSpec, device, name: str, context: int
                      ) -> attention.Backend | ContextAttention:  # fmt: skip
    if context == 1:
        return attention.choose_backend(name, spec, device)
    return choose_context_attention(replace(spec, page_size=spec.page_size // context), device, name, context)


def model_shapes(config: ModelConfig, rules: AxisRules, kernels: Kernels, dtype: jnp.dtype) -> Transformer:
    """The model with shapes instead of arrays."""
    chosen = kernels.attention
    attend = chosen if isinstance(chosen, ContextAttention) else chosen.attend
    return abstract_model(config, rules, attend, dtype, kernels.experts)
