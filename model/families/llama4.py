"""Llama 4's text: chunked attention, but in every fourth layer without RoPE; one expert of many, and a shared one.

Published checkpoints hold a vision tower too, which is left unread.
"""

from dataclasses import replace

from checkpoints.tensors import Part
from model.config import QKVO, AttentionGrowth, LayerSpec, ModelConfig, MoESpec, Routing
from model.families.common import ConfigReader, UnsupportedModel, base_fields, biases
from model.families.names import LLAMA, Names, Stored

VISION = ("vision_model.*", "multi_modal_projector.*")  # tensors
_CHUNKED, _GLOBAL = "chunked_attention", "full_attention"


def read_text(reader: ConfigReader) -> ModelConfig:
    reader.assume(max_position_embeddings=131_072, num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5,
                  rope_theta=500_000.0, attention_chunk_size=8192)  # fmt: skip
    reader.insist("hidden_act", "silu")
    fields = base_fields(reader)
    expert_width, count = fields["intermediate_size"], reader.num_layers()
    fields |= dict(intermediate_size=int(reader.require("intermediate_size_mlp")))
    routing = Routing(num_experts=int(reader.require("num_local_experts")), scores="sigmoid", weights="scores",
                      top_k=int(reader.take("num_experts_per_tok", 1)), applied_to="input")  # fmt: skip
    moe = MoESpec(routing=routing, width=expert_width, shared_width=expert_width)
    step = int(reader.take("interleave_moe_layer_step", 1))
    sparse = reader.take("moe_layers", range(step - 1, count, step))
    rope, turned = reader.rope(fields["head_dim"], pairs="neighbours"), _turned(reader, count)
    growth = _growth(reader)
    return ModelConfig(
        layers=tuple(
            LayerSpec(rope=rope if turned[layer] else None, growth=None if turned[layer] else growth, chunk=chunk,
                      moe=moe if layer in sparse else None)
            for layer, chunk in enumerate(_chunks(reader, turned))
        ),
        qk_norm="rotated" if reader.take("use_qk_norm", True) else None,
        biases=biases(reader, "attention_bias", QKVO),
        **fields,
    )  # fmt: skip


def _turned(reader: ConfigReader, count: int) -> list[int]:
    """1 for each layer that has RoPE. `no_rope_layers` says just that, whatever its name."""
    interval = int(reader.take("no_rope_layer_interval", 4))
    turned = reader.take("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(count)]
    if len(turned) != count or not set(turned) <= {0, 1}:
        raise UnsupportedModel(f"config.json: no_rope_layers={turned} must be {count} times 0 or 1")
    return turned


def _chunks(reader: ConfigReader, turned: list[int]) -> list[int | None]:
    """`layer_types` where given; otherwise the layers with RoPE are chunked."""
    size, kinds = reader.take("attention_chunk_size"), reader.take("layer_types")
    size = None if size is None else int(size)
    if not kinds:
        return [size if has_rope else None for has_rope in turned]
    if len(kinds) != len(turned) or not set(kinds) <= {_CHUNKED, _GLOBAL}:
        raise UnsupportedModel(f"config.json: layer_types={kinds} must be {len(turned)} times {_CHUNKED} or {_GLOBAL}")
    if size is None and _CHUNKED in kinds:
        raise UnsupportedModel(f"config.json: layer_types has {_CHUNKED} but there is no attention_chunk_size")
    return [size if kind == _CHUNKED else None for kind in kinds]


def _growth(reader: ConfigReader) -> AttentionGrowth | None:
    every, strength = int(reader.take("floor_scale", 8192)), float(reader.take("attn_scale", 0.1))
    wanted = reader.take("attn_temperature_tuning", True)
    return AttentionGrowth(every=every, strength=strength) if wanted else None


def read_multimodal(reader: ConfigReader) -> ModelConfig:
    """With a vision tower, which is not loaded: text only."""
    for key in ("vision_config", *(f"{x}_token_{y}" for x in ("boi", "eoi", "image") for y in ("index", "id"))):
        reader.take(key)
    text = reader.nested("text_config")
    text.assume(bos_token_id=reader.take("bos_token_id"), eos_token_id=reader.take("eos_token_id"))
    config = read_text(text)
    text.finish()
    tied = reader.take("tie_word_embeddings", config.tie_embeddings)
    return replace(config, family=reader.require("model_type"), tie_embeddings=bool(tied))


def names(config: ModelConfig) -> Names:
    """All experts of a layer are one tensor, as they are multiplied: [E, D, 2F], gate beside up."""
    width = next(layer.moe.width for layer in config.layers if layer.moe is not None) if config.num_experts else 0

    def half(start: int) -> Stored:
        part = Part(axis=2, start=start, total=2 * width)
        return Stored(name="feed_forward.experts.gate_up_proj", part=part, turned=False)

    projections = ("gate", "up", "down")
    return {
        **LLAMA,
        **{("mlp", x): f"feed_forward.{x}_proj.weight" for x in projections},
        **{("mlp", "shared", x): f"feed_forward.shared_expert.{x}_proj.weight" for x in projections},
        ("mlp", "router"): "feed_forward.router.weight",
        ("mlp", "experts", "gate"): half(0),
        ("mlp", "experts", "up"): half(width),
        ("mlp", "experts", "down"): Stored(name="feed_forward.experts.down_proj", turned=False),
    }  # fmt: skip
