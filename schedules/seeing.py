"""Models that see images, too: what their language models are called and lack, and how these are trained, on text.

Defaults are those of the configuration classes of Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from schedules.families import FAMILIES
from schedules.model_checks import ModelError

_QWEN2_VL: dict[str, Any] = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}
_GEMMA4: dict[str, Any] = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
# Models that see images, too: what their language model may be, by its model_type, the first where none is stated, and
# what its configuration is silent about.
SEEING: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "Gemma3ForConditionalGeneration": (
        {"gemma3_text": "Gemma3ForCausalLM"},
        {
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
        },
    ),
    "Gemma4ForConditionalGeneration": ({"gemma4_text": "Gemma4ForCausalLM"}, _GEMMA4),
    "Gemma4UnifiedForConditionalGeneration": ({"gemma4_unified_text": "Gemma4UnifiedForCausalLM"}, _GEMMA4),
    "Llama4ForConditionalGeneration": (
        {"llama4_text": "Llama4ForCausalLM"},
        {
            "vocab_size": 202048,
            "hidden_size": 5120,
            "intermediate_size": 8192,
            "num_hidden_layers": 48,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
        },
    ),
    "Mistral3ForConditionalGeneration": (
        {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM", "mistral4": "Mistral4ForCausalLM"},
        {},
    ),
    "Qwen2VLForConditionalGeneration": ({"qwen2_vl_text": "Qwen2ForCausalLM"}, _QWEN2_VL),
    "Qwen2_5_VLForConditionalGeneration": ({"qwen2_5_vl_text": "Qwen2ForCausalLM"}, _QWEN2_VL),
    "Qwen3VLForConditionalGeneration": (
        {"qwen3_vl_text": "Qwen3ForCausalLM"},
        {
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 22016,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 128000,
            "rope_theta": 500000.0,
        },
    ),
    "Qwen3VLMoeForConditionalGeneration": (
        {"qwen3_vl_moe_text": "Qwen3MoeForCausalLM"},
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "max_position_embeddings": 128000,
            "rope_theta": 500000.0,
            "norm_topk_prob": True,
        },
    ),
    "Glm4vMoeForConditionalGeneration": (
        {"glm4v_moe_text": "Glm4MoeForCausalLM"},
        {
            "vocab_size": 151424,
            "hidden_size": 4096,
            "intermediate_size": 10944,
            "num_hidden_layers": 46,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
            "max_position_embeddings": 65536,
            "attention_bias": True,
        },
    ),
    "Exaone4_5_ForConditionalGeneration": (dict.fromkeys(("exaone4", "exaone4_5_text"), "Exaone4ForCausalLM"), {}),
    "Glm4vForConditionalGeneration": (
        {"glm4v_text": "Glm4ForCausalLM"},
        {
            "vocab_size": 151552,
            "hidden_size": 4096,
            "intermediate_size": 13696,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 1.0,
        },
    ),
    "Glm46VForConditionalGeneration": (
        {"glm4v_text": "Glm4ForCausalLM", "glm4v_moe_text": "Glm4MoeForCausalLM"},
        {"attention_bias": True},
    ),
    "InternVLForConditionalGeneration": (
        {
            "qwen2": "Qwen2ForCausalLM",
            "qwen3": "Qwen3ForCausalLM",
            "qwen3_moe": "Qwen3MoeForCausalLM",
            "gpt_oss": "GptOssForCausalLM",
            "llama": "LlamaForCausalLM",
        },
        {},
    ),
    **dict.fromkeys(  # as published, and as transformers calls it
        ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"),
        (dict.fromkeys(("deepseek_v3", "kimi_k2"), "DeepseekV3ForCausalLM"), {}),
    ),
    "Qwen3_5ForConditionalGeneration": (
        {"qwen3_5_text": "Qwen3_5ForCausalLM"},
        {
            "vocab_size": 248320,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
        },
    ),
    "Qwen3_5MoeForConditionalGeneration": (
        {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
        {
            "vocab_size": 248320,
            "hidden_size": 2048,
            "num_hidden_layers": 40,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
        },
    ),
}
# Published with what their language model is beside what the rest is, not apart.
FLAT = ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration")
OF_IMAGES = ("mrope_section", "mrope_interleaved")  # which pairs turn by which of an image patch's three positions


def sees(config: Mapping[str, Any]) -> str | None:
    """The class that a config names, if that is a model that sees images and whose language model is supported."""
    listed = config.get("architectures")
    found = listed[0] if isinstance(listed, (list, tuple)) and len(listed) == 1 else None
    return found if isinstance(found, str) and found in SEEING else None


def language_model(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The config of a model that sees images as that of its language model; any other as it is. Raises ModelError."""
    if (found := sees(config)) is None:
        return config
    known, silent = SEEING[found]
    first, text = next(iter(known)), config.get("text_config")
    if text is None and found in FLAT:
        text = {**config, "model_type": first}
    if not isinstance(text, Mapping):
        raise ModelError(f"{name}: the config of a {found} must have its language model's in 'text_config'")
    kind = text.get("model_type", first)
    if not isinstance(kind, str) or (architecture := known.get(kind)) is None:
        raise ModelError(f"{name}: a {found} whose language model is of model_type {kind!r} is not supported")
    tied = config.get("tie_word_embeddings")  # which counts before the text's, unless that is a whole model
    if tied is not None and not FAMILIES[architecture].apart:
        text = {**text, "tie_word_embeddings": tied}
    ropes = {key: _of_text(text[key]) for key in ("rope_parameters", "rope_scaling") if key in text}
    return {**silent, **text, **ropes, "architectures": [architecture]}


def _of_text(rope: Any) -> Any:
    """Rotary embedding where a token has one position: in text the three of an image's patches are the same."""
    if not isinstance(rope, Mapping):
        return rope
    left = {key: value for key, value in rope.items() if key not in OF_IMAGES}
    return {
        key: "default" if key in ("type", "rope_type") and value == "mrope" else value for key, value in left.items()
    }
