"""Hugging Face configs: read as transformers reads them, and written so that it would."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from families import MODELS as SMALL
from small_model import CONFIG, DEEPSEEK_V3, GEMMA3, GEMMA4, LLAMA3, LONGROPE, OLMO3, PHI3, SMOLLM3, YARN, spec

from schedules import hf_kimi, hf_nemotron, presets
from schedules.families import FAMILIES
from schedules.hf_config import NOT_DONE, REQUIRED, WIDTHS, write_config
from schedules.model import ModelError, ModelSpec
from schedules.seeing import FLAT


def test_a_config_without_its_class_is_known_by_its_type() -> None:
    named = spec(architectures=["Qwen2ForCausalLM"])
    assert spec(architectures=None, model_type="qwen2") == named


def test_configs_are_read_as_transformers_reads_them() -> None:
    assert spec().head_dim == 8
    no_kv = {key: value for key, value in CONFIG.items() if key != "num_key_value_heads"}
    assert ModelSpec.from_hf_config(no_kv, "small").num_key_value_heads == 4
    with pytest.raises(ModelError, match="lacks 'num_key_value_heads'"):
        ModelSpec.from_hf_config(no_kv | {"architectures": ["MistralForCausalLM"]}, "small")
    assert spec(architectures=["MistralForCausalLM"]).sliding_window == 4096
    assert spec(architectures=["MistralForCausalLM"], sliding_window=None).sliding_window is None
    qwen = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 16, "max_window_layers": 1}
    assert spec(**qwen).window(1) is None
    switched_on = spec(**qwen, use_sliding_window=True)
    assert [switched_on.layer_kind(i) for i in switched_on.blocks] == ["block", "block.sliding"]
    slid = spec(**SMOLLM3, no_rope_layer_interval=2, use_sliding_window=True, sliding_window=16)
    assert [slid.layer_kind(i) for i in slid.blocks] == ["block", "block.sliding.no_rope"]
    assert spec(**SMOLLM3, no_rope_layers=[0, 1, 0]).no_rope_layers == (0, 1)
    phi = spec(**PHI3, rope_scaling=LONGROPE | {"type": "su"}, partial_rotary_factor=1.0, max_position_embeddings=512)
    read = dict(phi.rope_scaling)
    assert (read["rope_type"], read["long_factor"], read["original_max_position_embeddings"]) == (
        "longrope", (1, 2, 4, 8), 4096,
    )  # fmt: skip
    apart = {"full_attention": {"rope_theta": 3e5, **YARN}, "sliding_attention": {"rope_theta": 2e4}}
    olmo = spec(**OLMO3, rope_parameters=apart)
    assert (olmo.rope_theta, olmo.rope_local_base_freq, dict(olmo.rope_scaling)["factor"]) == (3e5, 2e4, 4)
    assert spec(**OLMO3, rope_scaling=YARN) == spec(**OLMO3, rope_parameters={"full_attention": YARN})
    gemma = spec(**GEMMA3, sliding_window_pattern=2, rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert [gemma.layer_kind(i) for i in gemma.blocks] == ["block.sliding", "block"]
    assert (gemma.rope_theta, gemma.rope_local_base_freq, gemma.hidden_act) == (1e6, 1e4, "gelu_pytorch_tanh")
    assert spec(**GEMMA3, rope_local_base_freq=3e3).rope_local_base_freq == 3e3
    assert spec(**GEMMA3, hidden_activation="silu").hidden_act == "silu"
    assert spec(no_rope_layers=[0, 1]).no_rope_layers == ()  # which a Llama has no use for
    old = spec(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0})
    new = spec(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5})
    assert old == new
    assert old.rope_scaling == (("factor", 2.0), ("rope_type", "linear"))
    for both in ({"rope_type": "linear", "type": "default"}, {"type": "default", "rope_type": "linear"}):
        assert spec(rope_scaling=both | {"factor": 2.0}).rope_scaling == old.rope_scaling  # as in transformers
    for scaling in (LLAMA3, {"rope_type": "yarn", "factor": 4.0, "attention_factor": None}):
        read = dict(spec(rope_scaling=scaling, max_position_embeddings=512).rope_scaling)
        assert read["original_max_position_embeddings"] == 512 and None not in read.values()


OURS_NEED = (  # that transformers has a default for, another in each class
    "num_key_value_heads",
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_silent_config_means_what_it_means_to_transformers(architecture: str) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    stated: dict[str, Any] = {}
    if architecture == "Dots1ForCausalLM":
        stated = {"n_routed_experts": 4, "n_shared_experts": 1}
    if architecture == "GraniteMoeHybridForCausalLM":  # whose shared experts are else no whole number of others
        stated = {"shared_intermediate_size": 11008}
    if architecture == hf_nemotron.ARCHITECTURE:
        stated = {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]}
    theirs = getattr(transformers, architecture).config_class(**stated)
    silent = {key: value for key, value in theirs.to_dict().items() if key in (*REQUIRED, *OURS_NEED)}
    silent |= {key: 0.0 for key in NOT_DONE if getattr(theirs, key, None)}  # else they would be refused
    latent = FAMILIES[architecture].latent
    whole = not latent and theirs.hidden_size % theirs.num_attention_heads == 0
    silent |= {} if whole or latent else {"head_dim": 128}  # which a GLM-4.5 always states
    silent["num_experts_per_tok"] = silent.get("num_experts_per_tok") or 2  # which a DeepSeek-V2 has no default for
    ours = ModelSpec.from_hf_config(silent | stated | {"architectures": [architecture]}, "silent")
    alike = ["routed_scaling_factor", "n_shared_experts", "n_group", "topk_group", "q_lora_rank", *WIDTHS]
    known = FAMILIES[architecture].experts
    if ours.num_experts and known is not None and known.shared_width is not None:
        alike.remove("n_shared_experts")
        assert ours.shared_width == getattr(theirs, known.shared_width)
    if "n_shared_experts" in FAMILIES[architecture].fixed:
        alike.remove("n_shared_experts")
    called = {} if known is None else {"routed_scaling_factor": known.scaling, "n_shared_experts": known.shared}
    for field in alike:
        said = called.get(field) or field
        assert getattr(ours, field) == (getattr(theirs, said, None) or getattr(spec(), field)), field
    dense = [kind == "dense" for kind in getattr(theirs, "mlp_layer_types", None) or ()]
    of_family = known.dense if known is not None else "first_k_dense_replace"
    assert ours.first_k_dense_replace == (sum(dense) or getattr(theirs, of_family, 0))
    named = hf_nemotron.NAMES if architecture == hf_nemotron.ARCHITECTURE else {}
    for field in ("max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "sliding_window"):
        said = getattr(theirs, named.get(field, field), None)
        assert getattr(ours, field) == (said or None if field == "sliding_window" else said), field
    activation = named.get("hidden_act", "hidden_act")
    assert ours.hidden_act == (getattr(theirs, activation, None) or theirs.hidden_activation)
    for field, theirs_is in named.items():
        assert getattr(ours, field, True) == getattr(theirs, theirs_is), field
    assert ours.query_pre_attn_scalar == getattr(theirs, "query_pre_attn_scalar", None)
    if ours.num_experts:  # a class without the field may have experts whose shares always add up to one
        assert ours.norm_topk_prob == getattr(theirs, "norm_topk_prob", ours.norm_topk_prob)
    if ours.global_head_dim:
        windowed, full = (theirs.per_layer_config[f"{kind}_attention"] for kind in ("sliding", "full"))
        assert (full.head_dim, full.num_key_value_heads) == (512, 4) == (ours.heads(5).dim, ours.heads(5).of_keys)
        assert ours.head_dim == windowed.head_dim
    elif whole:
        assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    if FAMILIES[architecture].rotated == "none":
        assert not any(map(ours.has_rope, ours.blocks)) and not hasattr(theirs, "rope_parameters")
        return
    rope = {"rope_type": "default", **dict(ours.rope_scaling), "rope_theta": ours.rope_theta}
    full = theirs.rope_parameters.get("full_attention", theirs.rope_parameters)
    if architecture == "Mistral4ForCausalLM":
        full = {key: value for key, value in full.items() if key not in ("type", "max_position_embeddings")}
    if architecture == "Ministral3ForCausalLM":
        assert full["mscale"] == full["mscale_all_dim"]  # so that their quotient is 1
        apart = ("type", "mscale", "mscale_all_dim", "max_position_embeddings")
        full = {key: value for key, value in full.items() if key not in apart} | {"attention_factor": 1.0}
    proportional = rope["rope_type"] == "proportional"
    assert rope == {key: value for key, value in full.items() if proportional or key != "partial_rotary_factor"}
    if not latent and not proportional:  # or it follows from its heads
        assert ours.partial_rotary_factor == full.get("partial_rotary_factor", 1.0)
    local = {"rope_type": "default", "rope_theta": ours.rope_local_base_freq}
    assert local == theirs.rope_parameters.get("sliding_attention", {**local, "rope_theta": None})
    rotated = getattr(theirs, "no_rope_layers", [1] * ours.num_hidden_layers)
    if FAMILIES[architecture].rotated == "switched":
        rotated = [theirs.position_embedding_type == "rope"] * ours.num_hidden_layers
    if FAMILIES[architecture].rotated == "in windows":
        rotated = [kind == "sliding_attention" for kind in theirs.layer_types]
    assert [ours.has_rope(i) for i in ours.blocks] == [bool(has) for has in rotated]
    assert [ours.window(i) is not None for i in ours.blocks] == [
        kind == "sliding_attention"
        for kind in getattr(theirs, "layer_types", None)
        or ["sliding_attention" if ours.sliding_window else "full_attention"] * ours.num_hidden_layers
    ]


@pytest.mark.parametrize(
    ("global_head_dim", "of_keys", "written"),
    [(16, 1, {"head_dim": 16, "num_key_value_heads": 1}), (16, 2, {"head_dim": 16}), (8, 1, {"num_key_value_heads": 1}),
     (8, 2, None)],
)  # fmt: skip
def test_heads_that_transformers_says_of_each_block_are_read(
    global_head_dim: int, of_keys: int, written: dict[str, int] | None
) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    stated = {
        **GEMMA4, "num_hidden_layers": 3, "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "num_attention_heads": 4, "num_key_value_heads": 2, "global_head_dim": global_head_dim,
        "num_global_key_value_heads": of_keys, "attention_k_eq_v": True, "sliding_window": 4,
    }  # fmt: skip
    theirs = json.loads(transformers.Gemma4TextConfig(**stated).to_json_string(use_diff=False))
    assert theirs["per_layer_config"] == ({} if written is None else {"0": written, "2": written})
    read = ModelSpec.from_hf_config(theirs | {"architectures": ["Gemma4ForCausalLM"]}, "theirs")
    assert (read.heads(0).dim, read.heads(0).of_keys) == (global_head_dim, of_keys)
    assert (read.heads(1).dim, read.heads(1).of_keys) == (8, 2)


def test_a_model_that_sees_images_is_its_language_model_however_little_it_says_of_that() -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    architecture = "Gemma3ForConditionalGeneration"
    silent = {"architectures": [architecture], "text_config": {}, "vision_config": {}, "hidden_size": 7}
    ours = ModelSpec.from_hf_config(silent, "silent")
    theirs = transformers.Gemma3Config().text_config
    assert ours.architecture == "Gemma3ForCausalLM"
    for field in (*REQUIRED, "num_key_value_heads", "head_dim", "sliding_window", "tie_word_embeddings"):
        assert getattr(ours, field) == getattr(theirs, field), field
    assert list(ours.layer_types) == theirs.layer_types
    assert not ModelSpec.from_hf_config({**silent, "tie_word_embeddings": False}, "silent").tie_word_embeddings


@pytest.mark.parametrize("architecture", FLAT)
def test_a_model_that_sees_images_may_have_its_language_models_config_beside_the_rest(architecture: str) -> None:
    """As Qwen2.5-VL-7B's is published."""
    flat = {
        "architectures": [architecture], "model_type": "qwen2_5_vl", "hidden_size": 3584, "intermediate_size": 18944,
        "max_position_embeddings": 128000, "num_attention_heads": 28, "num_hidden_layers": 28, "vocab_size": 152064,
        "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "sliding_window": 32768,
        "use_sliding_window": False, "tie_word_embeddings": False, "vision_config": {"hidden_size": 1280},
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    }  # fmt: skip
    ours, alone = ModelSpec.from_hf_config(flat, "flat"), presets.load("qwen2.5-7b")
    assert dataclasses.replace(ours, name=alone.name, max_position_embeddings=alone.max_position_embeddings) == alone
    longer = {**flat, "rope_scaling": {"type": "yarn", "factor": 4.0, "mrope_section": [16, 24, 24]}}
    assert dict(ModelSpec.from_hf_config(longer, "flat").rope_scaling) == {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128000,
    }  # fmt: skip


def llama4(**text: Any) -> ModelSpec:
    """Of a config as it is published."""
    config = {key: CONFIG[key] for key in REQUIRED} | {"num_key_value_heads": 2, "model_type": "llama4_text"} | text
    return ModelSpec.from_hf_config(
        {"architectures": ["Llama4ForConditionalGeneration"], "text_config": config, "tie_word_embeddings": True}, "it"
    )


def test_what_a_llama_4_says_of_its_blocks() -> None:
    silent = llama4()
    assert (silent.floor_scale, silent.attn_scale, silent.attention_chunk_size) == (8192, 0.1, 8192)
    assert silent.unit_qk_norm and silent.moe_intermediate_size == CONFIG["intermediate_size"]
    assert llama4(attn_temperature_tuning=False).floor_scale == 0
    assert llama4(attn_temperature_tuning=4).floor_scale == 8192, "as it was once written"
    assert llama4(attention_chunk_size=None).longest_sequence is None
    assert llama4(moe_layers=[1], intermediate_size_mlp=96).mlp_layer_types == ("dense", "sparse")
    assert llama4(interleave_moe_layer_step=2).has_experts(1) and not llama4(interleave_moe_layer_step=2).has_experts(0)
    assert not silent.tie_word_embeddings, "its text counts alone"
    assert llama4(tie_word_embeddings=True).tie_word_embeddings


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ({"moe_layers": [2]}, r"moe_layers must list blocks, not \[2\]"),
        ({"moe_layers": 1}, "moe_layers must list blocks, not 1"),
        ({"interleave_moe_layer_step": 0}, "interleave_moe_layer_step"),
        ({"num_hidden_layers": None, "vocab_size": 1}, "lacks 'num_hidden_layers'|blocks"),
    ],
)
def test_a_llama_4_that_means_nothing_is_told(text: dict[str, Any], told: str) -> None:
    with pytest.raises(ModelError, match=told):
        llama4(**text)


def test_kimi_is_known_by_the_class_that_it_is_published_with() -> None:
    text = {**spec(**DEEPSEEK_V3).to_dict(), "n_routed_experts": 256, "model_type": "kimi_k2"}
    del text["rope_scaling"]
    found = [
        ModelSpec.from_hf_config({"architectures": [name], "text_config": text}, "kimi")
        for name in ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration")
    ]
    assert found[0] == found[1] and found[0].architecture == "DeepseekV3ForCausalLM"


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("scaling", [{}, {"rope_type": "linear", "factor": 2.0}])
def test_a_config_that_is_written_is_read_again(architecture: str, scaling: dict[str, Any]) -> None:
    config = CONFIG | dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4)
    config |= {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1}
    config |= {"n_shared_experts": 1}
    config |= {"num_key_value_heads": 4, "first_k_dense_replace": 1} if FAMILIES[architecture].latent else {}
    more = {"architectures": [architecture], "rope_scaling": scaling, **dict.fromkeys(NOT_DONE, 0.0)}
    if architecture == "Mistral4ForCausalLM":
        more |= {"n_group": 1}
    if FAMILIES[architecture].of_mamba:
        more |= {"mamba_n_heads": 4, "shared_intermediate_size": 2 * config["intermediate_size"]}
    if architecture == hf_nemotron.ARCHITECTURE:
        more |= {"mamba_n_groups": 2, "hybrid_override_pattern": "ME", "moe_shared_expert_intermediate_size": 32}
        more |= {"rope_scaling": None}
        scaling = {}
    if architecture == hf_kimi.ARCHITECTURE:  # which turns nothing
        scaling = {}
    if architecture == "Ministral3ForCausalLM":
        more["rope_scaling"] = scaling = dict(SMALL["ministral3"].rope_scaling)
    if scaling and architecture == "Phi3ForCausalLM":
        with pytest.raises(ModelError, match="'linear' is not supported in a Phi-3"):
            ModelSpec.from_hf_config(config | more, "small")
        return
    model = ModelSpec.from_hf_config(config | more, "small")
    assert dict(model.rope_scaling) == scaling
    assert ModelSpec.from_hf_config(write_config(model.to_dict()), "small") == model


@pytest.mark.parametrize("name", presets.names())
def test_a_model_is_written_so_that_it_is_read_as_the_same(name: str) -> None:
    model = presets.load(name)
    written = write_config(model.to_dict())
    assert ModelSpec.from_hf_config(json.loads(json.dumps(written)), name) == model
    # windows first in every block that the presets have them second
    turned = [("full_attention", "sliding_attention")[i % 2] for i in model.blocks]
    variants: dict[str, list[dict[str, Any]]] = {
        "LlamaForCausalLM": [{"attention_bias": True}, {"mlp_bias": True}],
        "Qwen2ForCausalLM": [{"use_sliding_window": True, "sliding_window": 64, "layer_types": turned}],
        "Qwen3ForCausalLM": [{"attention_bias": True}],
        "Ministral3ForCausalLM": [{"sliding_window": 64}],
        "Qwen3MoeForCausalLM": [{"attention_bias": True}],
        "Qwen3NextForCausalLM": [{"norm_topk_prob": False}, {"linear_num_key_heads": 8}],
        "Qwen3_5MoeForCausalLM": [{"shared_expert_intermediate_size": 2 * model.moe_intermediate_size}],
        "Qwen3_5ForCausalLM": [
            {"attention_bias": True},
            {"partial_rotary_factor": 0.5},
            {"layer_types": ["linear_attention", *["full_attention"] * (model.num_hidden_layers - 1)]},
            {"layer_types": ["full_attention"] * model.num_hidden_layers},
            {"linear_num_value_heads": 64},
            {"linear_conv_kernel_dim": 3},
        ],
        "GptOssForCausalLM": [{"attention_bias": False}, {"layer_types": turned}],
        "MiniMaxM2ForCausalLM": [{"partial_rotary_factor": 0.25}],
        "Glm4MoeLiteForCausalLM": [{"mlp_layer_types": ["sparse"] * model.num_hidden_layers}, {"v_head_dim": 64}],
        "DeepseekV2ForCausalLM": [
            {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 1 + (model.topk_group == 1)},
            {"q_lora_rank": 7},
            {"qk_nope_head_dim": 96},
        ],
        "DeepseekV3ForCausalLM": [
            {"n_group": 4, "topk_group": 1},
            {"q_lora_rank": None if model.q_lora_rank else 7},
            {"norm_topk_prob": False},
            {"first_k_dense_replace": 2},
            {"rope_scaling": None} if model.rope_scaling else {"rope_theta": 1e4},
        ],
        "DeepseekV32ForCausalLM": [{"index_topk": 64}, {"q_lora_rank": 7}, {"n_group": 4, "topk_group": 1}],
        "Llama4ForCausalLM": [
            {"moe_layers": [0, 2]},
            {"interleave_moe_layer_step": 3, "moe_layers": None},
            {"attention_chunk_size": None, "attn_temperature_tuning": False},
            {"use_qk_norm": not model.unit_qk_norm},
            {"no_rope_layers": [], "floor_scale": 4096, "attn_scale": 0.2},
        ],
        "AfmoeForCausalLM": [
            {"num_dense_layers": 0},
            {"mup_enabled": not model.scale_embeddings},
            {"global_attn_every_n_layers": 2, "layer_types": None},
            {"route_scale": 1.5, "num_shared_experts": 2},
            {"attention_bias": True},
        ],
        "Ernie4_5_MoeForCausalLM": [
            {"moe_layer_start_index": 2},
            {"moe_num_shared_experts": 1},
            {"tie_word_embeddings": not model.tie_word_embeddings},
        ],
        "HYV3ForCausalLM": [
            {"attention_bias": True},
            {"num_shared_experts": 2},
            {"router_scaling_factor": 1.5},
            {"mlp_layer_types": ["sparse"] * model.num_hidden_layers},
        ],
        "GlmMoeDsaForCausalLM": [{"index_topk": 64}, {"mlp_layer_types": ["sparse"] * model.num_hidden_layers}],
        "Glm4MoeForCausalLM": [
            {"attention_bias": False},
            {"n_group": 4, "topk_group": 2},
            {"use_qk_norm": not model.qk_norm},
            {"n_shared_experts": 2},
            {"n_shared_experts": 0},
            {"first_k_dense_replace": 2},
            {"routed_scaling_factor": 1.5},
            {"norm_topk_prob": False},
            {"partial_rotary_factor": 1.0},
        ],
        "GraniteMoeHybridForCausalLM": [
            {"position_embedding_type": "rope"},
            {"layer_types": ["attention"] * model.num_hidden_layers},
            {"layers_block_type": ["attention"] + ["mamba"] * (model.num_hidden_layers - 1), "layer_types": None},
            {"mamba_n_groups": 4},
            {"mamba_d_conv": 3},
            {"mamba_d_head": 32, "mamba_expand": 1},
            {"attention_bias": True},
            {"shared_intermediate_size": 512 * 3 * model.hidden_size},
            {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 128}
            if not model.num_experts
            else {"num_local_experts": 0},
        ],
        "NemotronHForCausalLM": [
            *({"hybrid_override_pattern": p, "num_hidden_layers": 6} for p in ("M-*M--", "*-*-*-", "*M*MMM", "-M-M--")),
            {
                "layers_block_type": ["attention", "mamba", "moe" if model.num_experts else "mlp"],
                "num_hidden_layers": 3,
            },
            {"n_groups": 4},
            {"conv_kernel": 3},
            {"mamba_head_dim": 32},
            {"time_step_min": 0.0},
            {"time_step_min": 0.01},
            {"intermediate_size": 512},
            *(
                [
                    {"n_group": 4, "topk_group": 2},
                    {"moe_latent_size": None if model.moe_latent_size else 7},
                    {"norm_topk_prob": False},
                    {"routed_scaling_factor": 1.5},
                    {"moe_shared_expert_intermediate_size": 3 * model.moe_intermediate_size},
                ]
                if model.num_experts
                else []
            ),
        ],
        "SeedOssForCausalLM": [{"attention_bias": False}, {"attention_out_bias": True}, {"mlp_bias": True}],
        "Gemma3ForCausalLM": [
            {"attention_bias": True},
            {"hidden_activation": "silu"},
            {"query_pre_attn_scalar": 7},
            {"layer_types": turned},
        ],
        "Gemma4ForCausalLM": [
            {"attention_bias": True},
            {"attention_k_eq_v": False},
            {"final_logit_softcapping": None},
            {"global_head_dim": 64},
            {"num_global_key_value_heads": 1 + (model.num_global_key_value_heads == 1)},
            {"layer_types": [*turned[:-1], "full_attention"]},
            {
                "enable_moe_block": not model.num_experts,
                "num_experts": 8,
                "top_k_experts": 2,
                "moe_intermediate_size": model.intermediate_size // 3,
            },
        ],
        "Olmo2ForCausalLM": [{"attention_bias": True}],
        "Exaone4ForCausalLM": [{"layer_types": turned, "sliding_window": 64}],
        "CwmForCausalLM": [{"mlp_bias": True}, {"layer_types": turned}],
        "Dots1ForCausalLM": [
            {"attention_bias": True},
            {"first_k_dense_replace": 2},
            {"norm_topk_prob": False},
            {"sliding_window": 64, "layer_types": turned},
        ],
        "OlmoeForCausalLM": [{"attention_bias": True}, {"norm_topk_prob": True}],
        "Olmo3ForCausalLM": [{"attention_bias": True}, {"layer_types": turned}],
        "SmolLM3ForCausalLM": [
            {"attention_bias": True},
            {"mlp_bias": True},
            {"no_rope_layers": [1] * model.num_hidden_layers},
            {"use_sliding_window": True, "sliding_window": 64, "layer_types": turned},
        ],
    }
    for changes in variants.get(model.architecture, []):
        other = ModelSpec.from_hf_config(written | changes, name)
        assert other != model
        assert ModelSpec.from_hf_config(write_config(other.to_dict()), name) == other


@pytest.mark.parametrize(
    "name",
    [
        "llama-3.1-8b",
        "llama-3.2-1b",
        "mistral-7b",
        "qwen2.5-7b",
        "qwen3-8b",
        "mixtral-8x7b",
        "qwen3-30b-a3b",
        "gpt-oss-20b",
        "minimax-m2",
        "glm-4.5-air",
        "glm-4.7-flash",
        "deepseek-v2-lite",
        "deepseek-v2",
        "deepseek-v3",
        "deepseek-v3.2",
        "glm-5",
        "hy3-preview",
        "llama-4-scout-109b-a17b",
        "llama-4-maverick-400b-a17b",
        "trinity-large-400b-a13b",
        "trinity-mini-26b-a3b",
        "ernie-4.5-21b-a3b",
        "ernie-4.5-300b-a47b",
        "seed-oss-36b",
        "smollm3-3b",
        "phi-3-mini-4k",
        "olmo-2-32b",
        "olmo-3-7b",
        "olmoe-1b-7b",
        "gemma-3-1b",
        "gemma-3-27b",
        "gemma-4-12b",
        "gemma-4-26b-a4b",
        "gemma-4-31b",
        "exaone-4.0-32b",
        "exaone-4.0-1.2b",
        "dots.llm1",
        "cwm",
        "ministral-3-3b",
        "qwen3.5-0.8b",
        "qwen3.5-27b",
        "qwen3.5-35b-a3b",
        "granite-4.0-h-micro",
        "granite-4.0-h-tiny",
        "nemotron-nano-9b-v2",
        "nemotron-3-nano-30b-a3b",
        "nemotron-3-super-120b-a12b",
    ],
)
def test_names_and_shapes_are_those_of_transformers(name: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", minversion="5.0")
    folder = Path(presets.__file__).parent / "models"
    config = json.loads((folder / f"{name}.json").read_text()) | {"num_hidden_layers": 2}
    for first in ("first_k_dense_replace", "moe_layer_start_index", "moe_layer_end_index", "num_dense_layers"):
        config |= {first: 1} if first in config else {}
    config |= {"full_attention_interval": 2} if "full_attention_interval" in config else {}
    for listed in ("layer_types", "no_rope_layers"):
        if listed in config:  # those that end at a Granite's first attention
            last = config[listed].index("attention") if "attention" in config[listed] else 1
            config[listed] = config[listed][last - 1 : last + 1]
    if "hybrid_override_pattern" in config:  # which ends at the first attention, with an MLP or experts before it
        pattern = config["hybrid_override_pattern"]
        kinds = pattern.partition("*")[0][-3:] + "*"
        config |= {"hybrid_override_pattern": kinds, "num_hidden_layers": len(kinds)}
    model = ModelSpec.from_hf_config(config, name)
    theirs_class = getattr(transformers, model.architecture)
    with torch.device("meta"):
        theirs = theirs_class(theirs_class.config_class(**config))
    ours = {
        ("lm_head.weight" if key == "lm_head.weight" else f"model.{prefix}{model.family.module_name(key)}"): shape
        for i in model.layers
        for key, shape in model.stored_shapes(i).items()
        for prefix in [f"layers.{model.layer_number(i, key)}." if i in model.blocks else ""]
    }
    kept = {
        **{n: p for n, p in theirs.named_parameters() if ".indexer." not in n},
        **{n: b for n, b in theirs.named_buffers() if n.endswith(("correction_bias", "scalar"))},
    }
    # biases by which experts are chosen may be a matrix of one row there
    of_bias = {key for key, shape in ours.items() if key.endswith("correction_bias") and len(kept[key].shape) == 2}
    ours |= {key: (1, *ours[key]) for key in of_bias}
    assert ours == {key: tuple(value.shape) for key, value in kept.items()}
    assert model.total_params == sum(value.numel() for value in kept.values())
    last = theirs.model.layers[-1]  # the first of a Qwen3.5 has linear attention
    attention = last.mixer if model.family.branches_apart else last.self_attn
    dim = model.heads(model.head - 1).dim
    assert dim == (attention.head_dim if model.latent is None else attention.qk_head_dim)
    windows = [getattr(getattr(layer, "self_attn", None), "sliding_window", None) for layer in theirs.model.layers]
    if model.architecture not in (
        "MistralForCausalLM",
        "Ministral3ForCausalLM",
        "Phi3ForCausalLM",
        "NemotronHForCausalLM",
    ):  # which build the window into their mask, or have none
        assert windows == [model.window(i) for i in model.blocks]
