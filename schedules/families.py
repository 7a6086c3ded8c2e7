"""The families of decoders that can be trained: what their configurations leave unsaid, as tables by architecture.

Defaults are those of the configuration classes of Hugging Face transformers (`configuration_llama.py` and its
neighbours); what those classes leave to the modelling code, such as which projections have a bias, is stated here.
"""

from __future__ import annotations

from typing import Any

# What config.json calls each.
MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Ministral3ForCausalLM": "ministral3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MixtralForCausalLM": "mixtral",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
    "Qwen3NextForCausalLM": "qwen3_next",
    "GptOssForCausalLM": "gpt_oss",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "Glm4MoeForCausalLM": "glm4_moe",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Mistral4ForCausalLM": "mistral4",
    "GraniteForCausalLM": "granite",
    "GlmForCausalLM": "glm",
    "Glm4ForCausalLM": "glm4",
    "SeedOssForCausalLM": "seed_oss",
    "SmolLM3ForCausalLM": "smollm3",
    "Phi3ForCausalLM": "phi3",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo3",
    "OlmoeForCausalLM": "olmoe",
    "Gemma3ForCausalLM": "gemma3_text",
    "Exaone4ForCausalLM": "exaone4",
    "ExaoneMoeForCausalLM": "exaone_moe",
    "CwmForCausalLM": "cwm",
    "Dots1ForCausalLM": "dots1",
    "SolarOpenForCausalLM": "solar_open",
}
# What gpt-oss' activation is computed with, by the names in its config (transformers, configuration_gpt_oss.py).
GPT_OSS_ACTIVATION = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}
_HYBRID: dict[str, Any] = {
    "max_position_embeddings": 32768,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
# A Granite multiplies embeddings, what a block's two branches add, and products of queries and keys; it divides logits.
MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
_GLM: dict[str, Any] = {
    "max_position_embeddings": 131072,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-7,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
}
# Per architecture: what transformers assumes when config.json is silent, and what its code fixes.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"max_position_embeddings": 2048},
    "MistralForCausalLM": {"max_position_embeddings": 131072, "sliding_window": 4096},
    "Ministral3ForCausalLM": {
        "max_position_embeddings": 262144,
        "head_dim": 128,
        "rope_theta": 1e6,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "attention_factor": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
        "rms_norm_eps": 1e-5,
    },
    "Qwen2ForCausalLM": {"max_position_embeddings": 32768, "sliding_window": 4096},
    "Qwen3ForCausalLM": {"max_position_embeddings": 32768, "sliding_window": 4096, "head_dim": 128},
    "MixtralForCausalLM": {"max_position_embeddings": 131072, "rope_theta": 1e6, "rms_norm_eps": 1e-5},
    "Qwen3MoeForCausalLM": {"max_position_embeddings": 32768, "sliding_window": 4096},
    "Qwen2MoeForCausalLM": {
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "attention_bias": True,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    "Qwen3_5ForCausalLM": _HYBRID,
    "Qwen3_5MoeForCausalLM": {
        **_HYBRID,
        "intermediate_size": 512,  # of no block: all have experts
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    "Qwen3NextForCausalLM": {
        **_HYBRID,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    "GptOssForCausalLM": {
        "attention_bias": True,
        "max_position_embeddings": 131072,
        "sliding_window": 128,
        "head_dim": 64,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "rms_norm_eps": 1e-5,
    },
    "MiniMaxM2ForCausalLM": {"max_position_embeddings": 196608, "head_dim": 128, "rope_theta": 5e6},
    "Glm4MoeForCausalLM": {
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
    },
    "Glm4MoeLiteForCausalLM": {
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "moe_intermediate_size": 1536,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.8,
    },
    "DeepseekV2ForCausalLM": {
        "max_position_embeddings": 2048,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
        "first_k_dense_replace": 0,
        "topk_method": "greedy",
    },
    "DeepseekV3ForCausalLM": {
        "max_position_embeddings": 4096,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
    },
    "GraniteForCausalLM": {"max_position_embeddings": 2048, **dict.fromkeys(MULTIPLIERS, 1.0)},
    "GlmForCausalLM": _GLM,
    "Glm4ForCausalLM": _GLM,
    "Mistral4ForCausalLM": {
        "max_position_embeddings": 1048576,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 128.0,
            "original_max_position_embeddings": 8192,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
        "q_lora_rank": 1024,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "first_k_dense_replace": 0,
    },
    "SeedOssForCausalLM": {
        "attention_bias": True,
        "attention_dropout": 0.1,
        "residual_dropout": 0.1,
        "max_position_embeddings": 524288,
        "head_dim": 128,
    },
    "SmolLM3ForCausalLM": {
        "max_position_embeddings": 32768,
        "rope_theta": 2e6,
        "tie_word_embeddings": True,
        "no_rope_layer_interval": 4,
    },
    "Phi3ForCausalLM": {
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
    "Gemma3ForCausalLM": {
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "rope_theta": 1e6,
        "rope_local_base_freq": 10000.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
    "Olmo2ForCausalLM": {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
    "OlmoeForCausalLM": {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    "Olmo3ForCausalLM": {
        "max_position_embeddings": 2048,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "rope_theta": 500000.0,
        "rope_local_base_freq": 500000.0,
        "rms_norm_eps": 1e-5,
    },
    "Exaone4ForCausalLM": {
        "max_position_embeddings": 2048,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "rms_norm_eps": 1e-5,
    },
    "ExaoneMoeForCausalLM": {
        "max_position_embeddings": 2048,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "rms_norm_eps": 1e-5,
        "num_experts": 64,
        "num_shared_experts": 1,
        "moe_intermediate_size": 1024,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
    },
    "CwmForCausalLM": {
        "max_position_embeddings": 131072,
        "sliding_window": 8192,
        "head_dim": 128,
        "rope_theta": 1e6,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "rms_norm_eps": 1e-5,
    },
    "Dots1ForCausalLM": {
        "max_position_embeddings": 2048,
        "sliding_window": 4096,
        "max_window_layers": 62,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
    },
    "SolarOpenForCausalLM": {
        "max_position_embeddings": 131072,
        "head_dim": 128,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
        "intermediate_size": 1280,  # of no block: all have experts
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "moe_intermediate_size": 1280,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "first_k_dense_replace": 0,
    },
}
HYBRID_OF_EXPERTS = {
    "qk_norm": True,
    "zero_centered_norms": True,
    "attn_output_gate": True,
    "shared_expert_gate": True,
}
GLM = {"fused_gate_up": True, "rope_interleave": True}
OLMO = {"pre_norm": False, "post_norm": True, "qk_norm": True, "qk_norm_all_heads": True}
# Per architecture: what its code has, and no config.json says, in the fields of ModelSpec.
FIXED: dict[str, dict[str, Any]] = {
    "Qwen2ForCausalLM": {"attention_bias": True},
    "Qwen3ForCausalLM": {"qk_norm": True},
    "Qwen3MoeForCausalLM": {"qk_norm": True},
    "Qwen2MoeForCausalLM": {"shared_expert_gate": True},
    "Qwen3_5ForCausalLM": {"qk_norm": True, "zero_centered_norms": True, "attn_output_gate": True},
    "Qwen3_5MoeForCausalLM": HYBRID_OF_EXPERTS,
    "Qwen3NextForCausalLM": HYBRID_OF_EXPERTS,
    "GptOssForCausalLM": {"attention_sinks": True, "router_bias": True, "expert_bias": True},
    "MiniMaxM2ForCausalLM": {"qk_norm": True, "qk_norm_all_heads": True, "sigmoid_router": True},
    "Glm4MoeForCausalLM": {"sigmoid_router": True},
    "Glm4MoeLiteForCausalLM": {"sigmoid_router": True},
    "DeepseekV2ForCausalLM": {"norm_topk_prob": False},
    "DeepseekV3ForCausalLM": {"sigmoid_router": True},
    "GlmForCausalLM": GLM,
    "Glm4ForCausalLM": {**GLM, "post_norm": True},
    "Phi3ForCausalLM": {"fused_projections": True},
    "Gemma3ForCausalLM": {"post_norm": True, "qk_norm": True, "zero_centered_norms": True, "scale_embeddings": True},
    "Olmo2ForCausalLM": OLMO,
    "Olmo3ForCausalLM": OLMO,
    "OlmoeForCausalLM": {"qk_norm": True, "qk_norm_all_heads": True},
    "Exaone4ForCausalLM": {"pre_norm": False, "post_norm": True, "qk_norm": True},
    "ExaoneMoeForCausalLM": {"sigmoid_router": True, "qk_norm": True},
    "Dots1ForCausalLM": {"sigmoid_router": True, "qk_norm": True},
    "SolarOpenForCausalLM": {"sigmoid_router": True},
}
# Per architecture: the fields of its config.json that say which projections have a bias. Where none is for o alone,
# that of q, k and v is for o too, but in those WITHOUT_OUT_BIAS.
BIASES: dict[str, tuple[str, ...]] = {
    "LlamaForCausalLM": ("attention_bias", "mlp_bias"),
    "Qwen3ForCausalLM": ("attention_bias",),
    "Qwen3MoeForCausalLM": ("attention_bias",),
    "Qwen2MoeForCausalLM": ("attention_bias",),
    "Qwen3_5ForCausalLM": ("attention_bias",),
    "Qwen3_5MoeForCausalLM": ("attention_bias",),
    "Qwen3NextForCausalLM": ("attention_bias",),
    "GptOssForCausalLM": ("attention_bias",),
    "Glm4MoeForCausalLM": ("attention_bias",),
    "GraniteForCausalLM": ("attention_bias", "mlp_bias"),
    "GlmForCausalLM": ("attention_bias",),
    "Glm4ForCausalLM": ("attention_bias",),
    "SeedOssForCausalLM": ("attention_bias", "attention_out_bias", "mlp_bias"),
    "SmolLM3ForCausalLM": ("attention_bias", "mlp_bias"),
    "Olmo2ForCausalLM": ("attention_bias",),
    "Olmo3ForCausalLM": ("attention_bias",),
    "OlmoeForCausalLM": ("attention_bias",),
    "Gemma3ForCausalLM": ("attention_bias",),
    "CwmForCausalLM": ("mlp_bias",),
    "Dots1ForCausalLM": ("attention_bias",),
    "SolarOpenForCausalLM": ("attention_bias",),
}
WITHOUT_OUT_BIAS = (
    "Glm4MoeForCausalLM", "SolarOpenForCausalLM", "Qwen2MoeForCausalLM", "GlmForCausalLM", "Glm4ForCausalLM",
)  # fmt: skip
WINDOWLESS = (
    "LlamaForCausalLM", "SeedOssForCausalLM", "Olmo2ForCausalLM", "MiniMaxM2ForCausalLM", "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "OlmoeForCausalLM",
    "SolarOpenForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM",
    "Mistral4ForCausalLM", "GlmForCausalLM", "Glm4ForCausalLM", "GraniteForCausalLM",
)  # fmt: skip
# Most blocks of these have linear attention.
HYBRID = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM")
# Files of these have what linear attention is computed from in two matrices, one key head's rows after another's.
INTERLEAVED = ("Qwen3NextForCausalLM",)
# Of these all tokens are given to one expert, whose output has a gate.
GATED_SHARING = ("Qwen2MoeForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM")
LATENT = (  # attention
    "Glm4MoeLiteForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Mistral4ForCausalLM",
)  # fmt: skip
# Some experts of these are given all tokens, and some blocks may have none.
SHARING = ("Glm4MoeForCausalLM", "Dots1ForCausalLM", "SolarOpenForCausalLM", "ExaoneMoeForCausalLM", *LATENT)
# Routers of these multiply in fp32.
WIDE_ROUTERS = tuple(name for name in SHARING if name != "Mistral4ForCausalLM")
# Blocks of these without a window have no rotary embedding, where others have one.
ROTATED_IN_WINDOWS = ("Exaone4ForCausalLM", "ExaoneMoeForCausalLM")
# Blocks of these without a window have one rotary embedding, those with a window another.
TWO_ROPES = ("Olmo3ForCausalLM", "Gemma3ForCausalLM")
# These have as many key-value heads as query heads where their config is silent.
KV_FOR_EACH = (
    "LlamaForCausalLM",
    "GraniteForCausalLM",
    "Phi3ForCausalLM",
    "Olmo2ForCausalLM",
    "Olmo3ForCausalLM",
    "OlmoeForCausalLM",
    "Dots1ForCausalLM",
    *LATENT,
)
# Of these all blocks have the window that the config states.
ALL_WINDOWED = (
    "MistralForCausalLM", "Ministral3ForCausalLM", "MixtralForCausalLM", "Qwen3MoeForCausalLM", "Phi3ForCausalLM",
)  # fmt: skip
# These state a window, and switch it on apart.
SWITCHED = (
    "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "SmolLM3ForCausalLM", "Qwen2MoeForCausalLM",
)  # fmt: skip

ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
ENCODERS = (
    "Albert", "Bert", "Deberta", "DebertaV2", "DistilBert", "Electra", "ModernBert", "Roberta", "XLMRoberta",
)  # fmt: skip
ENCODER_DECODERS = ("T5", "MT5", "Bart", "MBart", "Pegasus", "Whisper", "Marian")
