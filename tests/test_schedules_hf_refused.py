"""What a Hugging Face config may not say, and the words in which it is refused."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from small_model import (
    CONFIG,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    FEW_EXPERTS,
    FLASH,
    GEMMA3,
    GEMMA4,
    GPT_OSS,
    GRANITE4,
    LLAMA3,
    LONGROPE,
    NEMOTRON,
    OLMO3,
    PHI3,
    SMOLLM3,
    YARN,
    spec,
)

from schedules import presets
from schedules.model import ModelError, ModelSpec

SWITCHED_ON = {"use_sliding_window": True, "sliding_window": 16}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["BertModel"]}, "is an encoder; MegaTrain trains decoders"),
        ({"architectures": ["T5ForConditionalGeneration"]}, "is an encoder-decoder"),
        ({"architectures": ["FalconForCausalLM"]}, "FalconForCausalLM is not supported; supported are Llama"),
        ({"architectures": None}, "must name one class in 'architectures'"),
        (
            {"architectures": None, "model_type": "gpt2"},
            "model_type 'gpt2' is not supported; supported are llama, llama4_text, mis",
        ),
        ({"vocab_size": None}, "lacks 'vocab_size'"),
        ({**GPT_OSS, "swiglu_limit": 1.0}, "swiglu_limit must be 7.0, as gpt-oss' released models have it, not 1.0"),
        ({**GPT_OSS, "swiglu_alpha": 2}, "swiglu_alpha must be 1.702"),
        ({"architectures": ["MixtralForCausalLM"]}, "lacks 'num_local_experts'"),
        ({"architectures": ["Glm4MoeForCausalLM"]}, "lacks 'n_routed_experts'"),
        ({"hidden_size": -32}, "hidden_size must be a whole number of at least 1, not -32"),
        ({"intermediate_size": math.nan}, "intermediate_size must be a whole number"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 1,000, not 1,000,000,000"),
        ({"num_attention_heads": 0}, "num_attention_heads must be a whole number"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps must be a positive finite number, not nan"),
        ({"rope_theta": math.inf}, "rope_theta must be a positive finite number, not inf"),
        ({"rope_scaling": 2.0}, "rope_scaling must be a dictionary"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "'dynamic' is not supported; supported are default, ",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling of type 'linear' lacks 'factor'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "type 'llama3' lacks 'low_freq_factor'"),
        (
            {"rope_scaling": LLAMA3 | {"high_freq_factor": 0.5}},
            "high_freq_factor must not be below its low_freq_factor",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": math.nan}},
            "factor must be a positive finite number, not nan",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4, "beta_fast": "32"}}, "beta_fast must be a positive"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}, "rope_theta": 1}, "rope_theta must be above 1 where"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4, "mscale": 1.0}}, "with mscale is not supported"),
        ({**DEEPSEEK_V3, "rope_scaling": {"type": "linear", "factor": 2, "mscale": 1}}, "'linear' with mscale is not"),
        ({**DEEPSEEK_V3, "rope_scaling": YARN | {"mscale_all_dim": -1}}, "mscale_all_dim must be a positive finite"),
        ({**DEEPSEEK_V3, "attention_bias": True}, "attention_bias of a DeepseekV3ForCausalLM must be False, not True"),
        ({**DEEPSEEK_V2, "mlp_bias": True}, "mlp_bias of a DeepseekV2ForCausalLM must be False, not True"),
        ({**DEEPSEEK_V3, "rope_interleave": False}, "rope_interleave of a DeepseekV3ForCausalLM must be True"),
        ({**FLASH, "rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor of a Glm4MoeLite"),
        ({**DEEPSEEK_V3, "kv_lora_rank": 0}, "kv_lora_rank must be a whole number of at least 1, not 0"),
        ({**DEEPSEEK_V3, "v_head_dim": 200}, "v_head_dim 200 is more than head_dim, 192"),
        ({**DEEPSEEK_V3, "qk_rope_head_dim": 63, "qk_nope_head_dim": 129}, "partial_rotary_factor 1.0 turns 63 of 192"),
        ({**DEEPSEEK_V3, "num_key_value_heads": 2}, "latent attention has keys for every head; num_key_value_heads is"),
        ({**DEEPSEEK_V3, "scoring_func": "softmax"}, "scoring_func of a DeepseekV3ForCausalLM must be 'sigmoid', not"),
        ({**DEEPSEEK_V2, "scoring_func": "sigmoid"}, "scoring_func of a DeepseekV2ForCausalLM must be 'softmax', not"),
        ({**DEEPSEEK_V2, "topk_method": "noaux_tc"}, "topk_method .* must be 'greedy' or 'group_limited_greedy', not"),
        ({**DEEPSEEK_V2, "norm_topk_prob": True}, "norm_topk_prob of a DeepseekV2ForCausalLM must be False, not True"),
        ({**DEEPSEEK_V3, "moe_layer_freq": 2}, "moe_layer_freq of a DeepseekV3ForCausalLM must be 1, not 2"),
        ({**DEEPSEEK_V3, "n_group": 3}, "256 experts are not 3 groups of the same size"),
        ({**DEEPSEEK_V3, "n_group": 4, "topk_group": 5}, "of 4 groups of 64 experts, topk_group 5 are not there"),
        ({**DEEPSEEK_V3, "n_group": 256, "topk_group": 1}, "have not 2 experts to choose"),
        ({**DEEPSEEK_V3, "n_group": 256, "topk_group": 2}, "n_group leaves one in each"),
        ({**FLASH, "mlp_layer_types": ["sparse", "dense"]}, "dense blocks after those with experts is not supported"),
        ({**FLASH, "mlp_layer_types": "dense"}, "mlp_layer_types must list 'dense' or 'sparse' for each block, not"),
        ({"rope_theta": 10**400}, "rope_theta must be a positive finite number"),
        ({"rms_norm_eps": 1e300}, "rms_norm_eps must be a positive finite number"),
        ({"rope_scaling": {"rope_type": [1]}}, r"rope_scaling of type \[1\] is not supported"),
        ({"rope_scaling": LLAMA3 | {"sections": [16, 24]}}, r"sections must be a number or a word, not \[16, 24\]"),
        ({"architectures": ["Qwen2ForCausalLM"], **SWITCHED_ON, "max_window_layers": "x"}, "max_window_layers must be"),
        ({"architectures": ["Qwen2ForCausalLM"], **SWITCHED_ON, "layer_types": 5}, "layer_types must be a list, not 5"),
        ({"architectures": ["Qwen2ForCausalLM"], **SWITCHED_ON, "layer_types": [[1], 2]}, r"layer_types holds \[1\]"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"num_attention_heads": 5}, "hidden_size 32 is not divisible by 5 attention heads"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 key-value heads evenly"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"attention_dropout": 0.1}, "attention_dropout of 0.1 is not supported"),
        ({"architectures": ["SeedOssForCausalLM"]}, "attention_dropout of 0.1 is not supported: .*; 0 trains without"),
        ({**SMOLLM3, "no_rope_layers": 3}, "no_rope_layers must be a list, not 3"),
        ({**SMOLLM3, "no_rope_layers": [1]}, "no_rope_layers names 1 blocks, num_hidden_layers is 2"),
        ({**SMOLLM3, "no_rope_layers": [1, 2]}, "no_rope_layers must have a 0 or a 1 for each block"),
        ({**SMOLLM3, "no_rope_layer_interval": 0}, "no_rope_layer_interval must be a whole number of at least 1"),
        (
            {**SMOLLM3, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
            "layer_types with 'sliding_attention' needs use_sliding_window",
        ),
        ({**PHI3, "resid_pdrop": 0.1}, "resid_pdrop of 0.1 is not supported"),
        ({**PHI3, "embd_pdrop": 0.1}, "embd_pdrop of 0.1 is not supported"),
        ({**PHI3, "partial_rotary_factor": 0.4}, "partial_rotary_factor 0.4 turns 3 of 8 dimensions"),
        ({**PHI3, "partial_rotary_factor": 1.5}, "partial_rotary_factor 1.5 turns 12 of 8 dimensions"),
        ({**PHI3, "rope_scaling": {"type": "su", "short_factor": [1] * 4}}, "'longrope' lacks 'long_factor'"),
        ({**PHI3, "rope_scaling": LONGROPE | {"long_factor": [1] * 5}}, "long_factor must list 4 positive finite num"),
        ({**PHI3, "rope_scaling": LONGROPE | {"long_factor": 2}}, "long_factor must list 4 positive finite numbers"),
        ({**PHI3, "rope_scaling": LONGROPE | {"short_factor": [1, 1, 1, 0]}}, "short_factor must list 4 positive"),
        ({**PHI3, "rope_scaling": LONGROPE, "original_max_position_embeddings": 1}, "must be a whole number above 1"),
        (
            {**OLMO3, "rope_parameters": {"rope_theta": 5e5}},
            "must say it for full_attention and sliding_attention apart",
        ),
        (
            {**OLMO3, "rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rope_parameters of type 'linear' for sliding_attention are not supported",
        ),
        (
            {**OLMO3, "rope_parameters": {"sliding_attention": {"type": "linear", "factor": 2.0}}},
            "rope_parameters of type 'linear' for sliding_attention are not supported",
        ),
        ({"architectures": ["Qwen3_5ForCausalLM"], "hidden_act": "gelu_pytorch_tanh"}, "'silu' with linear attention"),
        (
            {"architectures": ["MiniMaxM2ForCausalLM"], "rotary_dim": 8, "head_dim": 0, **FEW_EXPERTS},
            "head_dim must be a whole number of at least 1, not 0",
        ),
        ({**OLMO3, "rope_parameters": {"sliding_attention": {"rope_theta": -1}}}, "rope_local_base_freq must be a pos"),
        ({**OLMO3, "sliding_window": None}, "Olmo3ForCausalLM needs a sliding_window"),
        ({**GEMMA3, "sliding_window_pattern": 0}, "sliding_window_pattern must be a whole number of at least 1, not 0"),
        ({**GEMMA3, "query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a whole number of at least 1, not 0"),
        ({**GEMMA3, "attn_logit_softcapping": 50.0}, "attn_logit_softcapping of 50.0 is not supported"),
        ({**GEMMA3, "final_logit_softcapping": 30.0}, "final_logit_softcapping of 30.0 is not supported"),
        ({**GEMMA3, "use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        ({**GEMMA4, "use_bidirectional_attention": "all"}, "use_bidirectional_attention of 'all' is not supported"),
        (
            {**GEMMA4, "hidden_size_per_layer_input": None},
            "hidden_size_per_layer_input of 256 is not supported: blocks",
        ),
        ({**GEMMA4, "num_kv_shared_layers": 1}, "num_kv_shared_layers of 1 is not supported: each block here has keys"),
        ({**GEMMA4, "enable_moe_block": True}, "lacks 'num_experts'"),
        (
            {
                **GEMMA4,
                "enable_moe_block": True,
                "num_experts": 4,
                "top_k_experts": 2,
                "moe_intermediate_size": 12,
                "intermediate_size": 20,
            },
            "intermediate_size 20 is no multiple of moe_intermediate_size, 12",
        ),
        (
            {**GRANITE4, "mamba_conv_bias": False},
            "mamba_conv_bias of a GraniteMoeHybridForCausalLM must be True, not False",
        ),
        ({**GRANITE4, "time_step_limit": [0.0, 0.1]}, r"a time_step_limit of \[0.0, 0.1\] is not supported"),
        ({**GRANITE4, "mamba_d_head": 7}, "4 heads of mamba_d_head 7 are not mamba_expand 2 times hidden_size 32"),
        ({**GRANITE4, "mamba_n_groups": 3}, "4 heads of a state space are not 3 groups of the same size"),
        ({**GRANITE4, "mamba_d_state": 0}, "a state space needs mamba_d_state"),
        (
            {**GRANITE4, "layer_types": ["mamba", "conv"]},
            "layer_types holds 'conv', not 'full_attention', 'sliding_att",
        ),
        ({**GRANITE4, "hidden_act": "gelu_pytorch_tanh"}, "only 'silu' with a state space"),
        (
            {**GRANITE4, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 70},
            "shared_intermediate_size 70 is no multiple of moe_intermediate_size, 48",
        ),
        ({**NEMOTRON, "hybrid_override_pattern": "MX"}, "must be letters of 'M\\*-E', not 'MX'"),
        ({**NEMOTRON, "hybrid_override_pattern": "M*-"}, "3 layers are named, num_hidden_layers is 2"),
        ({**NEMOTRON, "hybrid_override_pattern": ""}, "must be letters of 'M\\*-E', not ''"),
        ({**NEMOTRON, "hybrid_override_pattern": None}, "must be letters of 'M\\*-E', not None"),
        ({**NEMOTRON, "layers_block_type": "ME"}, "layers_block_type must be a list, not 'ME'"),
        ({**NEMOTRON, "layers_block_type": ["mamba", "conv"]}, "layers_block_type holds 'conv', not one of linear_att"),
        ({**NEMOTRON, "layers_block_type": [["mamba"], 1]}, r"layers_block_type holds \"\['mamba'\]\", not one of"),
        ({**NEMOTRON, "mlp_hidden_act": "silu"}, "an MLP without a gate has .* the activation 'relu2'"),
        ({**NEMOTRON, "mlp_bias": True}, "mlp_bias of a NemotronHForCausalLM must be False, not True"),
        ({**NEMOTRON, "tie_word_embeddings": True}, "tie_word_embeddings of a NemotronHForCausalLM must be False, not"),
        ({**NEMOTRON, "hybrid_override_pattern": "ME"}, "lacks 'n_routed_experts'"),
        ({**GPT_OSS, "hidden_act": "gelu_pytorch_tanh"}, "'silu' with gpt-oss' experts"),
        ({**GEMMA4, "global_head_dim": 15}, "partial_rotary_factor 1.0 turns 15 of 15 dimensions"),
        ({**GEMMA4, "global_head_dim": 6}, "partial_rotary_factor 0.25 turns 0 of 3 pairs of dimensions"),
        ({**GEMMA4, "global_head_dim": 16.5}, "global_head_dim must be a whole number"),
        (
            {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 3},
            "4 attention heads cannot share 3 global key-value heads evenly",
        ),
        ({**GEMMA4, "attention_k_eq_v": 1}, "attention_k_eq_v must be true or false, not 1"),
        ({**GEMMA4, "final_logit_softcapping": -1}, "final_logit_softcapping must be a positive finite number, not -1"),
        ({**GEMMA4, "per_layer_config": {"0": {"head_dim": 16}}}, "per_layer_config must say the same of each block"),
        ({**GEMMA4, "per_layer_config": [1]}, "per_layer_config must say the same of each block without a window, and"),
        (
            {**GEMMA4, "per_layer_config": {"1": {"head_dim": 16, "sliding_window": 4}}},
            "per_layer_config with sliding_window is not supported",
        ),
        ({"architectures": ["Gemma2ForCausalLM"]}, "Gemma2ForCausalLM is not supported"),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "must have its language model's in 'text_config'"),
        (
            {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {"final_logit_softcapping": 30.0}},
            "final_logit_softcapping of 30.0 is not supported",
        ),
        (
            {
                "architectures": ["Qwen2MoeForCausalLM"],
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 12,
                "shared_expert_intermediate_size": 18,
            },
            "shared_expert_intermediate_size 18 is no multiple of moe_intermediate_size, 12",
        ),
        (
            {"architectures": ["Qwen3_5MoeForCausalLM"], "mlp_only_layers": [1]},
            "a Qwen3_5MoeForCausalLM with dense blocks between its expert blocks is not supported",
        ),
        (
            {"architectures": ["Qwen3_5ForCausalLM"], "attn_output_gate": False},
            "attn_output_gate of a Qwen3_5ForCausalLM must be True, not False",
        ),
        (
            {"architectures": ["Qwen3_5ForCausalLM"], "output_gate_type": "sigmoid"},
            "output_gate_type of a Qwen3_5ForCausalLM must be 'swish', not 'sigmoid'",
        ),
        (
            {"architectures": ["Qwen3_5ForCausalLM"], "full_attention_interval": 0},
            "full_attention_interval must be a whole number of at least 1, not 0",
        ),
        (
            {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": "llama"}},
            "a Mistral3ForConditionalGeneration whose language model is of model_type 'llama' is not supported",
        ),
        (
            {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": ["mistral"]}},
            r"whose language model is of model_type \['mistral'\] is not supported",
        ),
        (
            {"architectures": ["Ministral3ForCausalLM"], "rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
            "must be of type 'yarn', with llama_4_scaling_beta, and with mscale and mscale_all_dim alike",
        ),
        (
            {
                "architectures": ["Ministral3ForCausalLM"],
                "rope_parameters": {"rope_type": "yarn", "factor": 2.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0},
            },
            "mscale and mscale_all_dim alike",
        ),
        ({"architectures": ["LlavaForConditionalGeneration"]}, "LlavaForConditionalGeneration is not supported"),
        (
            {"architectures": ["Mistral4ForCausalLM"], "num_key_value_heads": 4, "n_group": 2},
            "n_group of a Mistral4ForCausalLM must be 1, not 2",
        ),
        ({"residual_dropout": 0.1}, "residual_dropout of 0.1 is not supported"),
        ({"architectures": ["OlmoeForCausalLM"], "clip_qkv": 8.0}, "clip_qkv of 8.0 is not supported"),
        ({"output_router_logits": True}, "output_router_logits is not supported"),
        ({"router_jitter_noise": 0.01}, "router_jitter_noise of 0.01 is not supported"),
        ({"vocab_size": 10**3000}, "vocab_size must be a number of 64 bits, not one of 3001 digits"),
    ],
)
def test_bad_configs_say_what_is_wrong(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        spec(**changes)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"sigmoid_router": True, "corrected_softmax": True}, "by sigmoid_router or by corrected_softmax, not by both"),
        ({"attn_gate_proj": True, "attn_output_gate": True}, "attn_gate_proj beside attn_output_gate"),
        ({"qk_norm": True, "unit_qk_norm": True}, "unit_qk_norm beside qk_norm"),
    ],
)
def test_what_says_the_same_twice_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ModelError, match=told):
        dataclasses.replace(presets.load("tiny-moe"), **changes)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"moe_layer_interval": 2}, r"moe_layer_interval of a Ernie4_5_MoeForCausalLM must be 1, not 2"),
        ({"moe_layer_end_index": 2}, "moe_layer_end_index of a Ernie4_5_MoeForCausalLM must be -1 or 1, not 2"),
        ({"use_bias": True}, "use_bias is not supported"),
    ],
)
def test_an_ernie_with_experts_elsewhere_is_refused(change: dict[str, Any], told: str) -> None:
    config = CONFIG | {"architectures": ["Ernie4_5_MoeForCausalLM"]}
    ModelSpec.from_hf_config(config | {"moe_layer_end_index": 1}, "ernie")
    with pytest.raises(ModelError, match=told):
        ModelSpec.from_hf_config(config | change, "ernie")


def test_a_trinity_without_windows_is_refused() -> None:
    config = CONFIG | {"architectures": ["AfmoeForCausalLM"]}
    assert ModelSpec.from_hf_config(config, "trinity").sliding_window == 1024
    with pytest.raises(ModelError, match="AfmoeForCausalLM needs a sliding_window"):
        ModelSpec.from_hf_config(config | {"sliding_window": None}, "trinity")
