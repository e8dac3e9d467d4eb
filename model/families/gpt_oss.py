"""gpt-oss: experts with biases and a clamped SwiGLU in every layer, attention sinks, every other layer with a window.

The published weights are MXFP4, which is refused (`quantization_config`); copies in bfloat16 are read.
"""

from checkpoints.tensors import Part
from model.config import MLP, QKVO, ClampedSwiGLU, ModelConfig, MoESpec, Routing
from model.families.common import ConfigReader, base_fields, biases, window_layers
from model.families.names import LLAMA, Names, Stored


def read_config(reader: ConfigReader) -> ModelConfig:
    reader.assume(
        max_position_embeddings=131_072, num_key_value_heads=8, head_dim=64, rms_norm_eps=1e-5, sliding_window=128,
        rope_theta=150_000.0, rope_parameters=dict(rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0,
                                                   truncate=False, original_max_position_embeddings=4096),
    )  # fmt: skip
    reader.insist("hidden_act", "silu")
    for key in ("experts_per_token", "initial_context_length"):  # said a second time
        reader.take(key)
    fields = base_fields(reader)
    routing = Routing(num_experts=int(reader.require("num_local_experts")),
                      top_k=int(reader.require("num_experts_per_tok")), bias="logits")  # fmt: skip
    return ModelConfig(
        layers=window_layers(reader, reader.rope(fields["head_dim"]), reader.take("sliding_window"),
                             moe=MoESpec(routing=routing, width=fields["intermediate_size"]),
                             default=lambda layer: layer % 2 == 0),
        activation=ClampedSwiGLU(alpha=float(reader.take("swiglu_alpha", 1.702)),
                                 limit=float(reader.take("swiglu_limit", 7.0))),
        biases=biases(reader, "attention_bias", QKVO, True) | MLP,
        sinks="learned",
        **fields,
    )  # fmt: skip


def names(config: ModelConfig) -> Names:
    """All experts of a layer are one tensor, as they are multiplied: [E, D, 2F], gate and up in turn."""

    def every_second(name: str, axis: int, start: int) -> Stored:
        part = Part(axis=axis, start=start, step=2, total=2 * config.intermediate_size)
        return Stored(name=f"mlp.experts.{name}", part=part, turned=False)

    experts = {}
    for start, x in enumerate(("gate", "up")):
        experts["mlp", "experts", x] = every_second("gate_up_proj", 2, start)
        experts["mlp", "experts", f"{x}_bias"] = every_second("gate_up_proj_bias", 1, start)
    return {
        **LLAMA, **experts,
        ("attention", "sinks"): "self_attn.sinks",
        ("mlp", "router"): "mlp.router.weight",
        ("mlp", "router_bias"): "mlp.router.bias",
        ("mlp", "experts", "down"): Stored(name="mlp.experts.down_proj", turned=False),
        ("mlp", "experts", "down_bias"): "mlp.experts.down_proj_bias",
    }  # fmt: skip
