"""A small model by its Hugging Face config, and what makes it one of another family: each test says what it changes."""

from __future__ import annotations

from typing import Any

from schedules.model import ModelSpec
from schedules.workload import Workload

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
WORKLOAD = Workload(micro_batch_size=3, accumulation=2, seq_len=8)
PHI3 = {"architectures": ["Phi3ForCausalLM"]}
LONGROPE = {"type": "longrope", "short_factor": [1, 1, 1.5, 2], "long_factor": [1, 2, 4, 8]}
OLMO3 = {"architectures": ["Olmo3ForCausalLM"]}
GEMMA3 = {"architectures": ["Gemma3ForCausalLM"], "head_dim": 8}
GRANITE4 = {"architectures": ["GraniteMoeHybridForCausalLM"], "num_local_experts": 0, "mamba_n_heads": 4}
NEMOTRON = {"architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": "M*"}
GEMMA4 = {"architectures": ["Gemma4ForCausalLM"], "head_dim": 8, "hidden_size_per_layer_input": 0}
SMOLLM3 = {"architectures": ["SmolLM3ForCausalLM"]}
DEEPSEEK_V2 = {"architectures": ["DeepseekV2ForCausalLM"], "num_key_value_heads": 4, "num_experts_per_tok": 2}
DEEPSEEK_V3 = {**DEEPSEEK_V2, "architectures": ["DeepseekV3ForCausalLM"], "first_k_dense_replace": 1}
FLASH = {**DEEPSEEK_V3, "architectures": ["Glm4MoeLiteForCausalLM"]}
FEW_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
GPT_OSS = {"architectures": ["GptOssForCausalLM"], **FEW_EXPERTS}
YARN = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}


def spec(**changes: Any) -> ModelSpec:
    return ModelSpec.from_hf_config(CONFIG | changes, "small")


def experts(**changes: Any) -> ModelSpec:
    mixtral = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}
    return spec(**(mixtral | changes))
