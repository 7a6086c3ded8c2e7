"""One small model, or a few, of every family that can be trained."""

from __future__ import annotations

from dataclasses import replace

from schedules import presets
from schedules.model import ModelSpec
from schedules.model_checks import OF_MAMBA

TINY = replace(presets.load("tiny"), num_hidden_layers=2)
LLAMA3 = (("factor", 8.0), ("high_freq_factor", 4.0), ("low_freq_factor", 1.0),
          ("original_max_position_embeddings", 64), ("rope_type", "llama3"))  # fmt: skip
YARN = (("beta_fast", 32.0), ("beta_slow", 1.0), ("factor", 8.0), ("original_max_position_embeddings", 64),
        ("rope_type", "yarn"), ("truncate", False))  # fmt: skip
MOE = replace(presets.load("tiny-moe"), num_hidden_layers=2)
LONGROPE = (("long_factor", (1.5, 4.0, 9.0)), ("original_max_position_embeddings", 16), ("rope_type", "longrope"),
            ("short_factor", (1.0, 1.25, 2.0)))  # fmt: skip
PHI3 = replace(TINY, architecture="Phi3ForCausalLM", fused_projections=True)
SMOLLM3 = replace(TINY, architecture="SmolLM3ForCausalLM", no_rope_layers=(1, 0))
GRANITE = replace(
    TINY,
    architecture="GraniteForCausalLM",
    tie_word_embeddings=True,
    embedding_multiplier=12.0,
    residual_multiplier=0.22,
    attention_multiplier=0.2,
    logits_scaling=3.0,
)
GLM4 = replace(
    TINY,
    architecture="Glm4ForCausalLM",
    post_norm=True,
    fused_gate_up=True,
    rope_interleave=True,
    attention_bias=True,
    head_dim=16,
    partial_rotary_factor=0.5,
)
OLMO2 = replace(
    TINY,
    architecture="Olmo2ForCausalLM",
    pre_norm=False,
    post_norm=True,
    qk_norm=True,
    qk_norm_all_heads=True,
)
OLMO3 = replace(
    OLMO2,
    architecture="Olmo3ForCausalLM",
    sliding_window=5,
    layer_types=("sliding_attention", "full_attention"),
    rope_local_base_freq=500000.0,
)
GEMMA3 = replace(
    TINY,
    architecture="Gemma3ForCausalLM",
    post_norm=True,
    qk_norm=True,
    zero_centered_norms=True,
    scale_embeddings=True,
    hidden_act="gelu_pytorch_tanh",
    query_pre_attn_scalar=11,
    tie_word_embeddings=True,
    head_dim=16,
    rope_theta=1e6,
    sliding_window=5,
    layer_types=("sliding_attention", "full_attention"),
    rope_local_base_freq=100.0,
)
GEMMA4 = replace(
    GEMMA3,
    architecture="Gemma4ForCausalLM",
    zero_centered_norms=False,
    query_pre_attn_scalar=None,
    attention_multiplier=1.0,
    rope_scaling=(("partial_rotary_factor", 0.25), ("rope_type", "proportional")),
    global_head_dim=24,
    num_global_key_value_heads=1,
    attention_k_eq_v=True,
    value_norm=True,
    layer_scalar=True,
    final_logit_softcapping=2.0,
)
MINIMAX_M2 = replace(
    MOE,
    architecture="MiniMaxM2ForCausalLM",
    sigmoid_router=True,
    qk_norm=True,
    qk_norm_all_heads=True,
    head_dim=16,
    partial_rotary_factor=0.5,
    intermediate_size=32,
)
GLM4_MOE = replace(
    MOE,
    architecture="Glm4MoeForCausalLM",
    num_hidden_layers=3,
    first_k_dense_replace=1,
    n_shared_experts=1,
    sigmoid_router=True,
    qk_norm=False,
    attention_bias=True,
    head_dim=16,
    partial_rotary_factor=0.5,
)
LLAMA4 = replace(
    MOE,
    architecture="Llama4ForCausalLM",
    num_hidden_layers=3,
    num_experts_per_tok=1,
    n_shared_experts=1,
    sigmoid_router=True,
    norm_topk_prob=False,
    qk_norm=False,
    unit_qk_norm=True,
    rope_interleave=True,
    no_rope_layers=(1, 0, 1),
    attention_chunk_size=32,
    floor_scale=64,
    rope_scaling=tuple(sorted({**dict(LLAMA3), "high_freq_factor": 1.0}.items())),
)
EXAONE4 = replace(
    TINY,
    architecture="Exaone4ForCausalLM",
    pre_norm=False,
    post_norm=True,
    qk_norm=True,
    sliding_window=5,
    layer_types=("sliding_attention", "full_attention"),
    no_rope_layers=(1, 0),
)
DEEPSEEK_V3 = replace(
    GLM4_MOE,
    architecture="DeepseekV3ForCausalLM",
    attention_bias=False,
    partial_rotary_factor=1.0,
    num_key_value_heads=4,
    head_dim=20,
    q_lora_rank=24,
    kv_lora_rank=20,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=12,
)
DEEPSEEK_YARN = tuple(sorted((*YARN[:-1], ("mscale", 0.7), ("mscale_all_dim", 0.9))))
KIMI_LINEAR = replace(
    DEEPSEEK_V3,
    architecture="KimiLinearForCausalLM",
    num_hidden_layers=3,
    layer_types=("linear_attention", "full_attention", "linear_attention"),
    no_rope_layers=(0, 0, 0),
    q_lora_rank=0,
    routed_scaling_factor=2.446,
    linear_num_key_heads=4,
    linear_num_value_heads=4,
    linear_key_head_dim=12,
    linear_value_head_dim=12,
    linear_conv_kernel_dim=4,
    linear_channel_decay=True,
)
QWEN2_MOE = replace(
    MOE,
    architecture="Qwen2MoeForCausalLM",
    qk_norm=False,
    norm_topk_prob=False,
    attention_bias=True,
    n_shared_experts=2,
    shared_expert_gate=True,
)
QWEN3_5 = replace(
    TINY,
    architecture="Qwen3_5ForCausalLM",
    num_hidden_layers=3,
    layer_types=("linear_attention", "full_attention", "linear_attention"),
    qk_norm=True,
    zero_centered_norms=True,
    attn_output_gate=True,
    head_dim=16,
    partial_rotary_factor=0.5,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=12,
    linear_value_head_dim=8,
    linear_conv_kernel_dim=4,
)
QWEN3_5_MOE = replace(
    QWEN3_5,
    architecture="Qwen3_5MoeForCausalLM",
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    intermediate_size=24,
    n_shared_experts=1,
    shared_expert_gate=True,
)
QWEN3_NEXT = replace(QWEN3_5_MOE, architecture="Qwen3NextForCausalLM")
GRANITE4 = replace(
    TINY,
    architecture="GraniteMoeHybridForCausalLM",
    num_hidden_layers=3,
    layer_types=("linear_attention", "full_attention", "linear_attention"),
    no_rope_layers=(0, 0, 0),
    tie_word_embeddings=True,
    fused_gate_up=True,
    embedding_multiplier=3.0,
    residual_multiplier=0.3,
    attention_multiplier=0.2,
    logits_scaling=2.0,
    mamba_n_heads=4,
    mamba_d_head=16,
    mamba_n_groups=2,
    mamba_d_state=10,
    mamba_d_conv=3,
)
GRANITE4_MOE = replace(
    GRANITE4,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    intermediate_size=24,
    n_shared_experts=2,
)
NEMOTRON_H = replace(
    TINY,
    architecture="NemotronHForCausalLM",
    num_hidden_layers=3,
    layer_types=("linear_attention", "linear_attention", "full_attention"),
    mlp_layer_types=("dense", "none", "dense"),
    no_rope_layers=(0, 0, 0),
    gated_mlp=False,
    hidden_act="relu2",
    mamba_n_heads=4,
    mamba_d_head=16,
    mamba_n_groups=2,
    mamba_d_state=10,
    mamba_d_conv=3,
    mamba_dt_min=0.6,
)
NEMOTRON3 = replace(
    NEMOTRON_H,
    mlp_layer_types=("sparse", "none", "sparse"),
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    n_shared_experts=2,
    sigmoid_router=True,
    routed_scaling_factor=2.5,
)
MINISTRAL3 = replace(
    TINY,
    architecture="Ministral3ForCausalLM",
    rope_scaling=tuple(sorted((*YARN[:-1], ("attention_factor", 1.0), ("llama_4_scaling_beta", 0.1)))),
    max_position_embeddings=512,
)
MISTRAL4 = replace(
    DEEPSEEK_V3,
    architecture="Mistral4ForCausalLM",
    num_hidden_layers=2,
    first_k_dense_replace=0,
    sigmoid_router=False,
    qk_nope_head_dim=8,
    head_dim=16,
    v_head_dim=16,
    rope_scaling=tuple(sorted((*YARN[:-1], ("llama_4_scaling_beta", 0.1), ("mscale", 1.0), ("mscale_all_dim", 1.0)))),
    max_position_embeddings=512,
)


def of_length(model: ModelSpec, original: int) -> ModelSpec:
    """The model with a rotary embedding of another original length."""
    scaling = dict(model.rope_scaling) | {"original_max_position_embeddings": original}
    return replace(model, rope_scaling=tuple(sorted(scaling.items())))


MODELS = {
    "llama": TINY,
    "llama, tied": replace(TINY, tie_word_embeddings=True),
    "llama 3.1": replace(TINY, rope_scaling=LLAMA3, max_position_embeddings=512),
    "llama with biases": replace(TINY, attention_bias=True, attention_out_bias=True, mlp_bias=True),
    "mistral": replace(TINY, architecture="MistralForCausalLM"),
    "ministral3": MINISTRAL3,
    "ministral3, of late queries": of_length(MINISTRAL3, 5),
    "qwen2": replace(TINY, architecture="Qwen2ForCausalLM", attention_bias=True, rope_theta=1e6),
    "qwen3": replace(TINY, architecture="Qwen3ForCausalLM", qk_norm=True, head_dim=32, tie_word_embeddings=True),
    "qwen3-moe": replace(MOE, norm_topk_prob=False),
    "qwen3.5": QWEN3_5,
    "qwen3.5 with biases, tied, of heads for each": replace(
        QWEN3_5,
        attention_bias=True,
        attention_out_bias=True,
        tie_word_embeddings=True,
        linear_num_key_heads=4,
        linear_conv_kernel_dim=2,
    ),
    "qwen3.5-moe": QWEN3_5_MOE,
    "qwen3-next": QWEN3_NEXT,
    "granite-4": GRANITE4,
    "granite-4 with experts": GRANITE4_MOE,
    "granite-4 of attention alone": replace(
        GRANITE4,
        layer_types=("full_attention",) * 3,
        no_rope_layers=(),
        attention_bias=True,
        attention_out_bias=True,
        tie_word_embeddings=False,
        **dict.fromkeys(OF_MAMBA, 0),
    ),
    "nemotron-h": NEMOTRON_H,
    "nemotron-3": NEMOTRON3,
    "nemotron-3, latent, of groups, with all kinds": replace(
        NEMOTRON3,
        num_hidden_layers=5,
        layer_types=("none", "linear_attention", "none", "full_attention", "linear_attention"),
        mlp_layer_types=("sparse", "dense", "sparse", "none", "sparse"),
        no_rope_layers=(0, 0, 0, 0, 0),
        moe_latent_size=12,
        num_experts=8,
        n_group=4,
        topk_group=2,
        n_shared_experts=1,
        norm_topk_prob=False,
        mamba_dt_min=None,
    ),
    "qwen3-next, not normalised, of heads for each": replace(
        QWEN3_NEXT, norm_topk_prob=False, n_shared_experts=2, linear_num_value_heads=2, linear_value_head_dim=16
    ),
    "qwen2-moe": QWEN2_MOE,
    "qwen2-moe, normalised, without biases": replace(
        QWEN2_MOE, n_shared_experts=1, norm_topk_prob=True, attention_bias=False
    ),
    "mixtral": replace(MOE, architecture="MixtralForCausalLM", qk_norm=False, intermediate_size=32),
    "mistral with a window": replace(TINY, architecture="MistralForCausalLM", sliding_window=5),
    "gpt-oss": replace(
        MOE,
        architecture="GptOssForCausalLM",
        qk_norm=False,
        attention_sinks=True,
        intermediate_size=32,
        attention_bias=True,
        attention_out_bias=True,
        router_bias=True,
        expert_bias=True,
        rope_scaling=YARN,
        sliding_window=5,
        layer_types=("sliding_attention", "full_attention"),
        max_position_embeddings=512,
    ),
    "minimax-m2": MINIMAX_M2,
    "glm-4.5-air": GLM4_MOE,
    "glm-4.5": replace(
        GLM4_MOE,
        n_shared_experts=2,
        first_k_dense_replace=2,
        routed_scaling_factor=2.5,
        qk_norm=True,
        norm_topk_prob=False,
    ),
    "dots.llm1": replace(
        GLM4_MOE,
        architecture="Dots1ForCausalLM",
        partial_rotary_factor=1.0,
        attention_out_bias=True,
        qk_norm=True,
        n_shared_experts=2,
        routed_scaling_factor=2.5,
    ),
    "solar-open": replace(
        GLM4_MOE,
        architecture="SolarOpenForCausalLM",
        num_hidden_layers=2,
        first_k_dense_replace=0,
        partial_rotary_factor=1.0,
    ),
    "deepseek-v3": replace(DEEPSEEK_V3, routed_scaling_factor=2.5, n_group=2, topk_group=1),
    "deepseek-v3, longer, of few groups, without a latent query": replace(
        DEEPSEEK_V3, rope_scaling=DEEPSEEK_YARN, max_position_embeddings=512, q_lora_rank=0, rms_norm_eps=1e-3
    ),
    "deepseek-v2": replace(
        DEEPSEEK_V3,
        architecture="DeepseekV2ForCausalLM",
        sigmoid_router=False,
        norm_topk_prob=False,
        routed_scaling_factor=16.0,
        n_shared_experts=2,
        num_experts=8,
        n_group=4,
        topk_group=2,
        rope_scaling=DEEPSEEK_YARN,
        max_position_embeddings=512,
    ),
    "deepseek-v2-lite": replace(
        DEEPSEEK_V3,
        architecture="DeepseekV2ForCausalLM",
        sigmoid_router=False,
        norm_topk_prob=False,
        q_lora_rank=0,
    ),
    "glm-4.7-flash": replace(
        DEEPSEEK_V3,
        architecture="Glm4MoeLiteForCausalLM",
        v_head_dim=20,
        routed_scaling_factor=1.8,
        first_k_dense_replace=2,
    ),
    "deepseek-v3.2": replace(
        DEEPSEEK_V3,
        architecture="DeepseekV32ForCausalLM",
        index_topk=32,
        n_group=2,
        topk_group=1,
        rope_scaling=DEEPSEEK_YARN,
        max_position_embeddings=512,
    ),
    "kimi-linear": KIMI_LINEAR,
    "kimi-linear, of groups, with experts alone": replace(
        KIMI_LINEAR,
        layer_types=("full_attention", "linear_attention", "linear_attention"),
        first_k_dense_replace=0,
        n_group=2,
        topk_group=1,
        norm_topk_prob=False,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_conv_kernel_dim=2,
    ),
    "glm-5": replace(DEEPSEEK_V3, architecture="GlmMoeDsaForCausalLM", index_topk=32, rms_norm_eps=1e-3, v_head_dim=20),
    "mistral-small-4": MISTRAL4,
    "mistral-small-4, of late queries": of_length(MISTRAL4, 5),
    "hy3": replace(
        GLM4_MOE,
        architecture="HYV3ForCausalLM",
        qk_norm=True,
        attention_bias=False,
        partial_rotary_factor=1.0,
        routed_scaling_factor=2.8,
        n_shared_experts=2,
        first_k_dense_replace=2,
    ),
    "llama-4": LLAMA4,
    "llama-4, some dense": replace(
        LLAMA4, mlp_layer_types=("dense", "sparse", "dense"), unit_qk_norm=False, num_experts_per_tok=2
    ),
    "llama-4, of late queries": replace(LLAMA4, floor_scale=5, attn_scale=0.5, attention_chunk_size=0),
    "arcee": replace(TINY, architecture="ArceeForCausalLM", gated_mlp=False, hidden_act="relu2"),
    "trinity": replace(
        GLM4_MOE,
        architecture="AfmoeForCausalLM",
        num_hidden_layers=4,
        post_norm=True,
        qk_norm=True,
        attn_gate_proj=True,
        attention_bias=False,
        partial_rotary_factor=1.0,
        scale_embeddings=True,
        routed_scaling_factor=2.4,
        sliding_window=5,
        layer_types=("sliding_attention", "sliding_attention", "full_attention", "sliding_attention"),
        no_rope_layers=(1, 1, 0, 1),
    ),
    "ernie-4.5": replace(TINY, architecture="Ernie4_5ForCausalLM", rope_interleave=True),
    "ernie-4.5-moe": replace(
        GLM4_MOE,
        architecture="Ernie4_5_MoeForCausalLM",
        sigmoid_router=False,
        corrected_softmax=True,
        attention_bias=False,
        partial_rotary_factor=1.0,
        rope_interleave=True,
        n_shared_experts=2,
    ),
    "k-exaone": replace(
        GLM4_MOE,
        architecture="ExaoneMoeForCausalLM",
        qk_norm=True,
        attention_bias=False,
        partial_rotary_factor=1.0,
        routed_scaling_factor=2.5,
        sliding_window=5,
        layer_types=("sliding_attention", "full_attention", "sliding_attention"),
        no_rope_layers=(1, 0, 1),
    ),
    "granite": GRANITE,
    "granite with biases, untied": replace(
        GRANITE, attention_bias=True, attention_out_bias=True, mlp_bias=True, tie_word_embeddings=False
    ),
    "glm-4": GLM4,
    "glm-4 of all dimensions, without biases, tied": replace(
        GLM4, attention_bias=False, partial_rotary_factor=1.0, tie_word_embeddings=True
    ),
    "glm-4-9b": replace(GLM4, architecture="GlmForCausalLM", post_norm=False),
    "seed-oss": replace(TINY, architecture="SeedOssForCausalLM", attention_bias=True, head_dim=32),
    "seed-oss with all biases": replace(
        TINY, architecture="SeedOssForCausalLM", attention_bias=True, attention_out_bias=True, mlp_bias=True
    ),
    "smollm3": replace(SMOLLM3, tie_word_embeddings=True),
    "smollm3 with biases, and rotary everywhere": replace(
        SMOLLM3, no_rope_layers=(), attention_bias=True, attention_out_bias=True, mlp_bias=True
    ),
    "smollm3 with a window": replace(SMOLLM3, sliding_window=5, layer_types=("full_attention", "sliding_attention")),
    "smollm3 with a window and rotary": replace(
        SMOLLM3, sliding_window=5, layer_types=("sliding_attention", "full_attention")
    ),
    "phi3": replace(PHI3, sliding_window=5),
    "phi4-mini, in short sequences": replace(
        PHI3, partial_rotary_factor=0.75, rope_scaling=LONGROPE, tie_word_embeddings=True
    ),
    "phi4-mini, in long sequences": replace(
        PHI3,
        partial_rotary_factor=0.75,
        rope_scaling=tuple(
            (key, 15 if key == "original_max_position_embeddings" else value) for key, value in LONGROPE
        ),
    ),
    "phi3 with a factor": replace(
        PHI3, partial_rotary_factor=0.75, rope_scaling=tuple(sorted((*LONGROPE, ("factor", 4.0))))
    ),
    "olmoe": replace(
        MOE, architecture="OlmoeForCausalLM", qk_norm_all_heads=True, norm_topk_prob=False, intermediate_size=32
    ),
    "olmo2": OLMO2,
    "olmo2 with biases": replace(
        OLMO2, attention_bias=True, attention_out_bias=True, head_dim=16, tie_word_embeddings=True
    ),
    "olmo3": replace(OLMO3, rope_scaling=YARN[:-1], rope_local_base_freq=500.0),
    "exaone4": EXAONE4,
    "exaone4 without windows": replace(
        EXAONE4, sliding_window=None, layer_types=(), no_rope_layers=(), tie_word_embeddings=True
    ),
    "cwm": replace(
        TINY,
        architecture="CwmForCausalLM",
        rope_scaling=LLAMA3,
        sliding_window=5,
        layer_types=("full_attention", "sliding_attention"),
    ),
    "gemma3": GEMMA3,
    "gemma3 of one kind, untied, with biases": replace(
        GEMMA3,
        layer_types=("full_attention", "full_attention"),
        attention_bias=True,
        attention_out_bias=True,
        tie_word_embeddings=False,
    ),
    "gemma4": GEMMA4,
    "gemma4, with experts": replace(
        GEMMA4, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=12, n_shared_experts=2, intermediate_size=24
    ),
    "gemma4, unified": replace(GEMMA4, architecture="Gemma4UnifiedForCausalLM"),
    "gemma4 with values apart, biases, and logits as they are": replace(
        GEMMA4,
        attention_k_eq_v=False,
        num_global_key_value_heads=GEMMA3.num_key_value_heads,
        attention_bias=True,
        attention_out_bias=True,
        final_logit_softcapping=None,
        tie_word_embeddings=False,
    ),
    "gemma3, longer": replace(GEMMA3, rope_scaling=(("factor", 8.0), ("rope_type", "linear")), num_key_value_heads=1),
}
