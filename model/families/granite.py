"""Granite 3 (dense): Llama with factors on embeddings, attention scores, residuals and logits."""

from dataclasses import replace

from model.config import ModelConfig
from model.families import llama
from model.families.common import ConfigReader


def read_config(reader: ConfigReader) -> ModelConfig:
    return replace(
        llama.read_config(reader),
        embedding_scale=float(reader.take("embedding_multiplier", 1.0)),
        attention_scale=float(reader.take("attention_multiplier", 1.0)),
        residual_scale=float(reader.take("residual_multiplier", 1.0)),
        logit_scale=1 / float(reader.take("logits_scaling", 1.0)),
    )
