"""What families say in their published configs, without what is about tokens and training."""

from typing import Any

PUBLISHED: dict[str, dict[str, Any]] = {
    "gemma-2-9b-it": dict(
        model_type="gemma2", attention_bias=False, attn_logit_softcapping=50.0, cache_implementation="hybrid",
        final_logit_softcapping=30.0, head_dim=256, hidden_act="gelu_pytorch_tanh", hidden_size=3584,
        hidden_activation="gelu_pytorch_tanh", intermediate_size=14336, max_position_embeddings=8192,
        num_attention_heads=16, num_hidden_layers=42, num_key_value_heads=8, query_pre_attn_scalar=256,
        rms_norm_eps=1e-6, rope_theta=10000.0, sliding_window=4096, vocab_size=256000),
    "gemma-3-1b-it": dict(
        model_type="gemma3_text", attention_bias=False, attn_logit_softcapping=None, cache_implementation="hybrid",
        eos_token_id=[1, 106], final_logit_softcapping=None, head_dim=256, hidden_activation="gelu_pytorch_tanh",
        hidden_size=1152, intermediate_size=6912, max_position_embeddings=32768, num_attention_heads=4,
        num_hidden_layers=26, num_key_value_heads=1, query_pre_attn_scalar=256, rms_norm_eps=1e-6,
        rope_local_base_freq=10000, rope_scaling=None, rope_theta=1000000, sliding_window=512,
        sliding_window_pattern=6, vocab_size=262144),
    "gemma-3-27b-it": dict(
        model_type="gemma3", boi_token_index=255999, eoi_token_index=256000, eos_token_id=[1, 106],
        image_token_index=262144, mm_tokens_per_image=256, vision_config=dict(model_type="siglip_vision_model"),
        text_config=dict(head_dim=128, hidden_size=5376, intermediate_size=21504, model_type="gemma3_text",
                         num_attention_heads=32, num_hidden_layers=62, num_key_value_heads=16,
                         query_pre_attn_scalar=168, rope_scaling=dict(factor=8.0, rope_type="linear"),
                         sliding_window=1024)),
    "Phi-3-mini-4k-instruct": dict(
        model_type="phi3", attention_bias=False, embd_pdrop=0.0, hidden_act="silu", hidden_size=3072,
        intermediate_size=8192, max_position_embeddings=4096, num_attention_heads=32, num_hidden_layers=32,
        num_key_value_heads=32, original_max_position_embeddings=4096, resid_pdrop=0.0, rms_norm_eps=1e-5,
        rope_scaling=None, rope_theta=10000.0, sliding_window=2047, tie_word_embeddings=False, vocab_size=32064),
    "Phi-4-mini-instruct": dict(
        model_type="phi3", attention_bias=False, embd_pdrop=0.0, full_attn_mod=1, hidden_act="silu", hidden_size=3072,
        intermediate_size=8192, interpolate_factor=1, lm_head_bias=False, max_position_embeddings=131072,
        mlp_bias=False, num_attention_heads=24, num_hidden_layers=32, num_key_value_heads=8,
        original_max_position_embeddings=4096, partial_rotary_factor=0.75, resid_pdrop=0.0, rms_norm_eps=1e-5,
        rope_scaling=dict(type="longrope", short_factor=[1.0] * 48, long_factor=[2.0] * 48), rope_theta=10000.0,
        sliding_window=262144, tie_word_embeddings=True, vocab_size=200064),
    "GLM-4-9B-0414": dict(
        model_type="glm4", attention_bias=True, eos_token_id=[151329, 151336, 151338], head_dim=128,
        hidden_act="silu", hidden_size=4096, intermediate_size=13696, max_position_embeddings=32768,
        num_attention_heads=32, num_hidden_layers=40, num_key_value_heads=2, partial_rotary_factor=0.5,
        rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=False, vocab_size=151552),
    "OLMo-2-1124-7B": dict(
        model_type="olmo2", attention_bias=False, hidden_act="silu", hidden_size=4096, intermediate_size=11008,
        max_position_embeddings=4096, num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=32,
        rms_norm_eps=1e-6, rope_scaling=None, rope_theta=500000, tie_word_embeddings=False, vocab_size=100352),
    "Olmo-3-7B": dict(
        model_type="olmo3", attention_bias=False, hidden_act="silu", hidden_size=4096, intermediate_size=11008,
        layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 8, max_position_embeddings=65536,
        num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=32, rms_norm_eps=1e-6,
        rope_scaling=dict(attention_factor=1.2079441541679836, beta_fast=32, beta_slow=1, factor=8.0,
                          original_max_position_embeddings=8192, rope_type="yarn"),
        rope_theta=500000, sliding_window=4096, tie_word_embeddings=False, vocab_size=100278),
    "granite-3.3-8b-instruct": dict(
        model_type="granite", attention_bias=False, attention_multiplier=0.0078125, embedding_multiplier=12.0,
        hidden_act="silu", hidden_size=4096, intermediate_size=12800, logits_scaling=16.0,
        max_position_embeddings=131072, mlp_bias=False, num_attention_heads=32, num_hidden_layers=40,
        num_key_value_heads=8, residual_multiplier=0.22, rms_norm_eps=1e-5, rope_scaling=None, rope_theta=10000000.0,
        tie_word_embeddings=True, vocab_size=49159),
    "Mixtral-8x7B-Instruct-v0.1": dict(
        model_type="mixtral", attention_dropout=0.0, hidden_act="silu", hidden_size=4096, intermediate_size=14336,
        max_position_embeddings=32768, num_attention_heads=32, num_experts_per_tok=2, num_hidden_layers=32,
        num_key_value_heads=8, num_local_experts=8, output_router_logits=False, rms_norm_eps=1e-5, rope_theta=1e6,
        router_aux_loss_coef=0.02, sliding_window=None, tie_word_embeddings=False, vocab_size=32000),
    "Qwen1.5-MoE-A2.7B": dict(
        model_type="qwen2_moe", attention_dropout=0.0, decoder_sparse_step=1, hidden_act="silu", hidden_size=2048,
        intermediate_size=5632, max_position_embeddings=8192, max_window_layers=21, moe_intermediate_size=1408,
        norm_topk_prob=False, num_attention_heads=16, num_experts=60, num_experts_per_tok=4, num_hidden_layers=24,
        num_key_value_heads=16, output_router_logits=False, rms_norm_eps=1e-6, rope_theta=1000000.0,
        router_aux_loss_coef=0.001, shared_expert_intermediate_size=5632, sliding_window=32768,
        tie_word_embeddings=False, use_sliding_window=False, vocab_size=151936),
    "Qwen3-30B-A3B": dict(
        model_type="qwen3_moe", attention_bias=False, attention_dropout=0.0, decoder_sparse_step=1, head_dim=128,
        hidden_act="silu", hidden_size=2048, intermediate_size=6144, max_position_embeddings=40960,
        max_window_layers=48, mlp_only_layers=[], moe_intermediate_size=768, norm_topk_prob=True,
        num_attention_heads=32, num_experts=128, num_experts_per_tok=8, num_hidden_layers=48, num_key_value_heads=4,
        output_router_logits=False, rms_norm_eps=1e-6, rope_scaling=None, rope_theta=1000000.0,
        router_aux_loss_coef=0.001, sliding_window=None, tie_word_embeddings=False, use_sliding_window=False,
        vocab_size=151936),
    "gpt-oss-20b in bfloat16": dict(
        model_type="gpt_oss", attention_bias=True, eos_token_id=200002, experts_per_token=4, head_dim=64,
        hidden_act="silu", hidden_size=2880, initial_context_length=4096, intermediate_size=2880,
        layer_types=["sliding_attention", "full_attention"] * 12, max_position_embeddings=131072,
        num_attention_heads=64, num_experts_per_tok=4, num_hidden_layers=24, num_key_value_heads=8,
        num_local_experts=32, output_router_logits=False, rms_norm_eps=1e-5,
        rope_scaling=dict(beta_fast=32.0, beta_slow=1.0, factor=32.0, original_max_position_embeddings=4096,
                          rope_type="yarn", truncate=False),
        rope_theta=150000, router_aux_loss_coef=0.9, sliding_window=128, swiglu_limit=7.0, tie_word_embeddings=False,
        vocab_size=201088),
    "DeepSeek-V2-Lite": dict(
        model_type="deepseek_v2", attention_bias=False, attention_dropout=0.0, aux_loss_alpha=0.001,
        first_k_dense_replace=1, hidden_act="silu", hidden_size=2048, intermediate_size=10944, kv_lora_rank=512,
        max_position_embeddings=163840, moe_intermediate_size=1408, moe_layer_freq=1, n_group=1, n_routed_experts=64,
        n_shared_experts=2, norm_topk_prob=False, num_attention_heads=16, num_experts_per_tok=6, num_hidden_layers=27,
        num_key_value_heads=16, q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64, rms_norm_eps=1e-6,
        rope_scaling=dict(beta_fast=32, beta_slow=1, factor=40, mscale=0.707, mscale_all_dim=0.707,
                          original_max_position_embeddings=4096, type="yarn"),
        rope_theta=10000, routed_scaling_factor=1.0, scoring_func="softmax", seq_aux=True, tie_word_embeddings=False,
        topk_group=1, topk_method="greedy", v_head_dim=128, vocab_size=102400),
    "DeepSeek-V3 in bfloat16": dict(
        model_type="deepseek_v3", attention_bias=False, attention_dropout=0.0, aux_loss_alpha=0.001, ep_size=1,
        first_k_dense_replace=3, hidden_act="silu", hidden_size=7168, intermediate_size=18432, kv_lora_rank=512,
        max_position_embeddings=163840, moe_intermediate_size=2048, moe_layer_freq=1, n_group=8, n_routed_experts=256,
        n_shared_experts=1, norm_topk_prob=True, num_attention_heads=128, num_experts_per_tok=8, num_hidden_layers=61,
        num_key_value_heads=128, num_nextn_predict_layers=1, q_lora_rank=1536, qk_nope_head_dim=128,
        qk_rope_head_dim=64, rms_norm_eps=1e-6,
        rope_scaling=dict(beta_fast=32, beta_slow=1, factor=40, mscale=1.0, mscale_all_dim=1.0,
                          original_max_position_embeddings=4096, type="yarn"),
        rope_theta=10000, routed_scaling_factor=2.5, scoring_func="sigmoid", seq_aux=True, tie_word_embeddings=False,
        topk_group=4, topk_method="noaux_tc", v_head_dim=128, vocab_size=129280),
    "Llama-4-Scout-17B-16E-Instruct": dict(
        model_type="llama4", boi_token_index=200080, eoi_token_index=200081, image_token_index=200092,
        tie_word_embeddings=False, vision_config=dict(model_type="llama4_vision_model"),
        text_config=dict(
            _attn_implementation_autoset=True, attention_bias=False, attention_chunk_size=8192, attention_dropout=0.0,
            attn_scale=0.1, attn_temperature_tuning=True, bos_token_id=200000, eos_token_id=[200001, 200007, 200008],
            floor_scale=8192, for_llm_compressor=False, head_dim=128, hidden_act="silu", hidden_size=5120,
            interleave_moe_layer_step=1, intermediate_size=8192, intermediate_size_mlp=16384,
            max_position_embeddings=10485760, model_type="llama4_text", no_rope_layers=[], num_attention_heads=40,
            num_experts_per_tok=1, num_hidden_layers=48, num_key_value_heads=8, num_local_experts=16,
            pad_token_id=200018, rms_norm_eps=1e-5, rope_theta=500000.0, use_qk_norm=True, vocab_size=202048,
            rope_scaling=dict(factor=16.0, high_freq_factor=1.0, low_freq_factor=1.0,
                              original_max_position_embeddings=8192, rope_type="llama3"))),
    "Llama-4-Maverick-17B-128E, its text": dict(
        model_type="llama4_text", attention_bias=False, attention_chunk_size=8192, attn_scale=0.1,
        attn_temperature_tuning=4, floor_scale=8192, head_dim=128, hidden_act="silu", hidden_size=5120,
        interleave_moe_layer_step=2, intermediate_size=8192, intermediate_size_mlp=16384,
        layer_types=(["chunked_attention"] * 3 + ["full_attention"]) * 12, max_position_embeddings=1048576,
        moe_layers=list(range(1, 48, 2)), no_rope_layers=[1, 1, 1, 0] * 12, num_attention_heads=40,
        num_experts_per_tok=1, num_hidden_layers=48, num_key_value_heads=8, num_local_experts=128,
        rms_norm_eps=1e-5, rope_scaling=None, rope_theta=500000.0, use_qk_norm=False, vocab_size=202048),
    "Qwen2.5 with YaRN": dict(
        model_type="qwen2", hidden_act="silu", hidden_size=3584, intermediate_size=18944, max_position_embeddings=32768,
        max_window_layers=28, num_attention_heads=28, num_hidden_layers=28, num_key_value_heads=4, rms_norm_eps=1e-6,
        rope_scaling=dict(type="yarn", factor=4.0, original_max_position_embeddings=32768), rope_theta=1000000.0,
        sliding_window=131072, tie_word_embeddings=False, use_sliding_window=False, vocab_size=152064),
    "gemma-3-270m": dict(
        _sliding_window_pattern=6, model_type="gemma3_text", attention_bias=False, attn_logit_softcapping=None,
        eos_token_id=1, final_logit_softcapping=None, head_dim=256, hidden_activation="gelu_pytorch_tanh",
        hidden_size=640, intermediate_size=2048, layer_types=(5 * ["sliding_attention"] + ["full_attention"]) * 3,
        max_position_embeddings=32768, num_attention_heads=4, num_hidden_layers=18, num_key_value_heads=1,
        query_pre_attn_scalar=256, rms_norm_eps=1e-6, rope_local_base_freq=10000.0, rope_scaling=None,
        rope_theta=1000000.0, sliding_window=512, use_bidirectional_attention=False, vocab_size=262144),
}  # fmt: skip

PUBLISHED |= {
    "gemma-2-27b": PUBLISHED["gemma-2-9b-it"] | dict(
        _attn_implementation="eager", head_dim=128, hidden_size=4608, intermediate_size=36864, num_attention_heads=32,
        num_hidden_layers=46, num_key_value_heads=16, query_pre_attn_scalar=144, sliding_window_size=4096),
    "Qwen3-Coder-30B-A3B-Instruct": PUBLISHED["Qwen3-30B-A3B"] | dict(
        max_position_embeddings=262144, qkv_bias=False, rope_theta=10000000, router_aux_loss_coef=0.0,
        shared_expert_intermediate_size=0, use_qk_norm=True),
    "DeepSeek-R1-0528-Qwen3-8B": dict(
        model_type="qwen3", attention_bias=False, head_dim=128, hidden_act="silu", hidden_size=4096,
        intermediate_size=12288, max_position_embeddings=131072, max_window_layers=36, num_attention_heads=32,
        num_hidden_layers=36, num_key_value_heads=8, rms_norm_eps=1e-6,
        rope_scaling=dict(attn_factor=0.8782488562869419, factor=4.0, original_max_position_embeddings=32768,
                          rope_type="yarn"),
        rope_theta=1000000, sliding_window=None, tie_word_embeddings=False, use_sliding_window=False,
        vocab_size=151936),
    "Moonlight-16B-A3B": PUBLISHED["DeepSeek-V3 in bfloat16"] | dict(
        first_k_dense_replace=1, hidden_size=2048, intermediate_size=11264, max_position_embeddings=8192,
        moe_intermediate_size=1408, n_group=1, n_routed_experts=64, n_shared_experts=2, num_attention_heads=16,
        num_experts_per_tok=6, num_hidden_layers=27, num_key_value_heads=16, num_nextn_predict_layers=0,
        q_lora_rank=None, rms_norm_eps=1e-5, rope_scaling=None, rope_theta=50000.0, routed_scaling_factor=2.446,
        topk_group=1, vocab_size=163840),
}  # fmt: skip
