"""The shape of a model: parameters against published totals, its layers, and what has no meaning."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from small_model import CONFIG, DEEPSEEK_V3, GPT_OSS, PHI3, WORKLOAD, experts, spec

from schedules import presets
from schedules.flops import forward_flops, op_flops
from schedules.model import ModelError, ModelSpec
from schedules.parameters import is_matrix
from schedules.traffic import op_bytes, phases_of
from schedules.workload import Workload

# Published totals: the parameter counts shown on the models' Hugging Face pages (safetensors metadata).
PUBLISHED = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "llama-3.3-70b": 70_553_706_496,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-14b": 14_768_307_200,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    # less the scales of its matrices in fp8, one for 128 x 128 elements
    "minimax-m2": 228_703_644_928 - 62 * (256 * 3 * 24 * 12 + 2 * 48 * 24 + 2 * 8 * 24),
    # less a further block, for the token after the next, with a table, a head, a matrix and three norms of its own
    "glm-4.5-air": 110_468_824_832 - (2_341_492_864 + 2 * 151_552 * 4096 + 2 * 4096**2 + 3 * 4096),
    "glm-4.5": 358_337_791_296 - (3_935_625_632 + 2 * 151_552 * 5120 + 2 * 5120**2 + 3 * 5120),
    "glm-4.7-flash": 31_221_488_576 - (635_311_424 + 2 * 154_880 * 2048 + 2 * 2048**2 + 3 * 2048),
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_419_200,  # without such a block, and scales
    "deepseek-v3.2": 671_026_419_200,  # without indexers, too
    "moonlight-16b-a3b": 15_960_110_208,
    "kimi-k2": 1_026_408_232_448,  # without scales
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "seed-oss-36b": 36_151_104_512,
    "smollm3-3b": 3_075_098_624,
    "phi-4": 14_659_507_200,
    "phi-3-mini-4k": 3_821_079_552,
    "olmo-2-7b": 7_298_617_344,
    "olmo-2-13b": 13_716_198_400,
    "olmo-2-32b": 32_234_279_936,
    "olmo-3-7b": 7_298_011_136,
    "olmoe-1b-7b": 6_919_161_856,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    # less the 416,866,032 of what sees images, and its projection
    "gemma-3-4b": 4_300_079_472 - 416_866_032 - (1152 * 2560 + 1152),
    "gemma-3-12b": 12_187_325_040 - 416_866_032 - (1152 * 3840 + 1152),
    "gemma-3-27b": 27_432_406_640 - 416_866_032 - (1152 * 5376 + 1152),
}
# Of these only what their model cards say is known here, of EXAONE without its table and head; of Qwen3.5 what others
# count of its language models alone.
ROUNDED = {
    "qwen3.5-0.8b": 0.752e9,
    "qwen3.5-2b": 1.88e9,
    "qwen3.5-4b": 4.21e9,
    "qwen3.5-9b": 8.95e9,
    "qwen3.5-27b": 26.9e9,
    "qwen3.5-35b-a3b": 34.7e9,
    "qwen3.5-122b-a10b": 122e9,
    "qwen3.5-397b-a17b": 396e9,
    "qwen3-next-80b-a3b": 80e9,
    "kimi-linear-48b-a3b": 49.1e9,
    "exaone-4.0-32b": 30.95e9,
    "exaone-4.0-1.2b": 1.07e9,
    "dots.llm1": 142e9,
    "granite-3.3-2b": 2.53e9,
    "granite-3.3-8b": 8.17e9,
    "granite-4.0-h-micro": 3.19e9,
    "granite-4.0-h-tiny": 6.94e9,
    "granite-4.0-h-small": 32.2e9,
    "nemotron-nano-9b-v2": 8.89e9,
    "nemotron-3-nano-30b-a3b": 31.6e9,
    "nemotron-3-super-120b-a12b": 120.6e9,
    "nemotron-3-ultra-550b-a55b": 550e9,
    "glm-5": 744e9,  # with indexers
    "hy3-preview": 295e9,
    "llama-4-scout-109b-a17b": 109e9,  # with what sees images
    "llama-4-maverick-400b-a17b": 400e9,
    "trinity-large-400b-a13b": 398e9,
    "trinity-mini-26b-a3b": 26e9,
    "ernie-4.5-21b-a3b": 21.8e9,
    "ernie-4.5-300b-a47b": 300e9,
    "glm-4-9b-0414": 9.4e9,
    "glm-4-32b-0414": 32.6e9,
    "k-exaone-236b-a23b": 236e9,
    "mistral-small-4-119b": 119e9,
    "cwm": 32e9,
    "ministral-3-3b": 3.4e9,
    "ministral-3-8b": 8.4e9,
    "ministral-3-14b": 13.5e9,
    "gemma-4-12b": 11.95e9,  # with what sees and hears
    "gemma-4-26b-a4b": 25.2e9,
    "gemma-4-31b": 30.7e9,
}
KNOWN = {*PUBLISHED, *ROUNDED}
OURS = {"tiny-moe", "tiny", "demo", "demo-tied"}


def test_every_preset_is_accounted_for() -> None:
    assert set(presets.names()) == KNOWN | OURS


@pytest.mark.parametrize("name", PUBLISHED)
def test_total_parameters_are_the_published_ones(name: str) -> None:
    assert presets.load(name).total_params == PUBLISHED[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_total_parameters_are_about_those_of_the_model_card(name: str) -> None:
    model = presets.load(name)
    ends = sum(model.params(i) for i in (model.embed, model.head)) if name.startswith("exaone") else 0
    assert model.total_params - ends == pytest.approx(ROUNDED[name], rel=0.02)


@pytest.mark.parametrize("name", sorted(KNOWN | OURS))
def test_layers_add_up_and_come_back_from_json(name: str) -> None:
    model = presets.load(name)
    for i in model.layers:
        assert model.params(i) == sum(math.prod(shape) for shape in model.parameter_shapes(i).values())
        assert model.layer_index(model.layer_name(i)) == i
    assert ModelSpec.from_dict(json.loads(json.dumps(model.to_dict()))) == model


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("gpt-oss-20b", ["block", "block.sliding"]),
        ("smollm3-3b", ["block", "block.no_rope"]),
        ("glm-4.5", ["block", "block.dense"]),
        ("deepseek-v3", ["block", "block.dense"]),
        ("qwen3.5-9b", ["block", "block.linear"]),
        ("granite-4.0-h-tiny", ["block.linear", "block.no_rope"]),
        ("nemotron-nano-9b-v2", ["block.linear", "block.linear.attention_alone", "block.no_rope"]),
        ("nemotron-3-super-120b-a12b", ["block.linear", "block.linear.attention_alone", "block.no_rope"]),
    ],
)
def test_layers_of_one_kind_cost_the_same(name: str, kinds: list[str]) -> None:
    model = presets.load(name)
    workload = Workload(micro_batch_size=1, seq_len=512)
    cost: dict[str, set[tuple[Any, ...]]] = {}
    for i in model.layers:
        shapes = tuple(model.parameter_shapes(i).items())
        amounts = [
            (op_flops(model, i, phase, workload), op_bytes(model, i, phase, workload, fused=fused))
            for phase in phases_of(model, i)
            for fused in (False, True)
        ]
        cost.setdefault(model.layer_kind(i), set()).add((shapes, *amounts))
    assert set(cost) == {"embed", *kinds, "head"}
    assert all(len(variants) == 1 for variants in cost.values())
    assert len({variants.pop() for variants in cost.values()}) == len(kinds) + 2


def test_a_model_of_some_blocks_has_their_kinds() -> None:
    gpt, smol = presets.load("gpt-oss-20b"), presets.load("smollm3-3b")
    assert gpt.of_blocks([1, 4]).layer_types == ("full_attention", "sliding_attention")
    assert smol.of_blocks([3, 4]).no_rope_layers == (0, 1)
    assert presets.load("qwen3-8b").of_blocks(range(2)).num_hidden_layers == 2


def test_layer_numbers_and_names() -> None:
    model = spec()
    assert (model.embed, list(model.blocks), model.head) == (-1, [0, 1], 2)
    assert [model.layer_name(i) for i in model.layers] == ["embed", "0", "1", "head"]
    for wrong in (lambda: model.layer_name(3), lambda: model.layer_index("2"), lambda: model.params(-2)):
        with pytest.raises(ModelError, match="has no layer"):
            wrong()


def test_tied_head_keeps_its_work_but_not_its_matrix() -> None:
    tied, untied = spec(tie_word_embeddings=True), spec()
    assert list(tied.parameter_shapes(tied.head)) == ["norm.weight"]
    assert untied.total_params - tied.total_params == 100 * 32
    assert forward_flops(tied, tied.head, WORKLOAD) == forward_flops(untied, untied.head, WORKLOAD) > 0


def test_fused_projections_are_one_in_files_and_beside_adapters() -> None:
    model, fused = spec(), spec(**PHI3)
    assert fused.parameter_shapes(0) == model.parameter_shapes(0)
    assert fused.stored_shapes(0) == {
        "input_layernorm.weight": (32,),
        "self_attn.qkv_proj.weight": (32 + 2 * 16, 32),
        "self_attn.o_proj.weight": (32, 32),
        "post_attention_layernorm.weight": (32,),
        "mlp.gate_up_proj.weight": (2 * 48, 32),
        "mlp.down_proj.weight": (32, 48),
    }
    assert len(fused.adapter_shapes(0, 3)) == 2 * 4
    assert fused.adapter_shapes(0, 3)["mlp.gate_up_proj.lora_B.weight"] == (2 * 48, 3)
    with pytest.raises(ModelError, match="fused_projections with biases"):
        dataclasses.replace(fused, attention_bias=True)


def test_adapters_stand_beside_projections_and_nowhere_else() -> None:
    """Each projection (out, in) has one of (rank, in) and one of (out, rank); experts, embedding and head have none."""
    model, mixture = spec(), experts()
    projections = {
        name.removesuffix("weight"): shape
        for name, shape in model.parameter_shapes(0).items()
        if name.endswith("_proj.weight")
    }
    assert len(projections) == 7
    assert model.adapter_shapes(0, 3) == {
        f"{name}lora_{half}.weight": (3, columns) if half == "A" else (rows, 3)
        for name, (rows, columns) in projections.items()
        for half in "AB"
    }
    assert len(mixture.adapter_shapes(0, 3)) == 2 * 4
    assert not model.adapter_shapes(model.embed, 3) and not model.adapter_shapes(model.head, 3)


def test_weight_decay_is_for_matrices() -> None:
    assert is_matrix("q_proj.weight", (4, 4)) and is_matrix("experts.gate_up_proj", (8, 4, 4))
    assert not is_matrix("norm.weight", (4,)) and not is_matrix("experts.down_proj_bias", (8, 4))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_lora_rank": 0}, "q_lora_rank is 1536, and kv_lora_rank is 0"),
        ({"rope_interleave": True}, "latent attention with rope_interleave is not supported"),
        ({"attention_multiplier": 0.5}, "latent attention with attention_multiplier is not supported"),
        ({"qk_nope_head_dim": 0}, "latent attention needs qk_nope_head_dim"),
        ({"head_dim": 128}, "head_dim is 128; qk_nope_head_dim and qk_rope_head_dim are 192 together"),
        ({"qk_norm": True}, "latent attention with qk_norm is not supported"),
        ({"partial_rotary_factor": 0.5}, "latent attention turns all of qk_rope_head_dim, not a part of it"),
    ],
)
def test_latent_attention_is_refused_where_it_has_no_meaning(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        dataclasses.replace(spec(**DEEPSEEK_V3), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale_embeddings": True, "embedding_multiplier": 2.0}, "scale_embeddings with an embedding_multiplier"),
        ({"zero_centered_norms": True, "logits_scaling": 2.0}, "zero_centered_norms with logits_scaling"),
        ({"query_pre_attn_scalar": 4, "attention_multiplier": 0.5}, "say the same: give one"),
        ({"residual_multiplier": 0.0}, "residual_multiplier must be a positive finite number, not 0.0"),
        ({"fused_gate_up": True, "mlp_bias": True}, "fused_gate_up with mlp_bias"),
        ({"fused_gate_up": True, "fused_projections": True}, "or fused_projections is not supported"),
    ],
)
def test_multipliers_and_fused_matrices_are_refused_where_they_have_no_meaning(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        dataclasses.replace(spec(), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp_layer_types": ("dense",)}, "mlp_layer_types names 1 blocks, num_hidden_layers is 2"),
        ({"mlp_layer_types": ("dense", "moe")}, "mlp_layer_types holds 'moe', not 'dense', 'sparse' or 'none'"),
        ({"layer_types": ("none", "full_attention")}, "layer_types holds 'none', not 'full_attention', 'sliding_att"),
        (
            {"layer_types": ("full_attention", "none"), "mlp_layer_types": ("none", "none")},
            "block 1 has neither attention nor an MLP",
        ),
        ({"mlp_layer_types": ("none", "sparse")}, "mlp_layer_types holds 'sparse', and num_experts is 0"),
        ({"mlp_layer_types": ("none", "dense"), "post_norm": True}, "mlp_layer_types with post_norm is not supported"),
        ({"mlp_layer_types": ("none", "dense"), "residual_multiplier": 2.0}, "with a residual_multiplier is not"),
        ({"gated_mlp": False}, "an MLP without a gate has a matrix of its own, and the activation 'relu2'"),
        ({"gated_mlp": False, "hidden_act": "relu2", "fused_gate_up": True}, "an MLP without a gate has a matrix of"),
        ({"hidden_act": "relu2"}, "hidden_act 'relu2' is not supported, only"),
        ({"moe_latent_size": 4}, "moe_latent_size is 4, and num_experts is 0"),
    ],
)
def test_blocks_without_attention_or_an_mlp_or_a_gate_are_refused_where_they_have_no_meaning(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        dataclasses.replace(spec(), **changes)


def test_what_experts_need_is_refused_without_them() -> None:
    for key in ("n_group", "topk_group"):
        with pytest.raises(ModelError, match=f"{key} is 2, and num_experts is 0"):
            dataclasses.replace(spec(), **{key: 2})


def test_bad_experts_and_windows_say_what_is_wrong() -> None:
    with pytest.raises(ModelError, match="not between 1 and num_experts"):
        experts(num_experts_per_tok=9)
    ungated = {"gated_mlp": False, "hidden_act": "relu2"}
    with pytest.raises(ModelError, match="router_bias of experts without a gate between their matrices"):
        dataclasses.replace(experts(), **ungated, router_bias=True)
    gpt_oss = spec(**GPT_OSS)
    with pytest.raises(ModelError, match="a moe_latent_size in a GptOssForCausalLM is not supported"):
        dataclasses.replace(gpt_oss, moe_latent_size=4)
    with pytest.raises(ModelError, match="needs moe_intermediate_size"):
        dataclasses.replace(experts(), moe_intermediate_size=0)
    with pytest.raises(ModelError, match="layer_types names 1 blocks"):
        dataclasses.replace(spec(), layer_types=("full_attention",))
    with pytest.raises(ModelError, match="without a sliding_window"):
        dataclasses.replace(spec(), layer_types=("full_attention", "sliding_attention"))
    with pytest.raises(ModelError, match="dense blocks between"):
        spec(architectures=["Qwen3MoeForCausalLM"], num_experts=4, mlp_only_layers=[0])


def test_from_dict_names_the_field_at_fault() -> None:
    data = spec().to_dict()
    with pytest.raises(ModelError, match="no field 'n_layer'"):
        ModelSpec.from_dict(data | {"n_layer": 2})
    for wrong in (None, [1], "yarn"):
        with pytest.raises(ModelError, match="rope_scaling must be a dictionary"):
            ModelSpec.from_dict(data | {"rope_scaling": wrong})
    with pytest.raises(ModelError, match="layer_types must be a list, not None"):
        ModelSpec.from_dict(data | {"layer_types": None})
    with pytest.raises(ModelError, match="rope_scaling of type 'yarn' lacks 'factor'"):
        ModelSpec.from_dict(data | {"rope_scaling": {"rope_type": "yarn"}})
    with pytest.raises(ModelError, match="type 'yarn' lacks 'original_max_position_embeddings'"):
        ModelSpec.from_dict(data | {"rope_scaling": {"rope_type": "yarn", "factor": 4}})
    del data["head_dim"]
    with pytest.raises(ModelError, match="'head_dim'"):
        ModelSpec.from_dict(data)


def test_load_takes_names_files_and_folders(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "other.json").write_text(json.dumps(CONFIG))
    assert presets.load(folder) == presets.load(str(folder / "config.json"))
    assert (presets.load(folder).name, presets.load(tmp_path / "other.json").name) == ("my-model", "other")
    assert presets.load("Qwen2.5-7B") == presets.load("qwen2.5-7b")
    latin = tmp_path / os.fsdecode(b"mod\xe8le")
    latin.mkdir()
    (latin / "config.json").write_text(json.dumps(CONFIG))
    assert presets.load(latin).name == "mod?le"


def test_load_explains_what_it_cannot_find_or_read(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no model is called 'llama3.1-8b'; nearest are llama-3.1-8b"):
        presets.load("llama3.1-8b")
    with pytest.raises(
        ModelError, match=r"no model is called '8B'; nearest are granite-3.3-8b, llama-3-8b, llama-3.1-8b"
    ):
        presets.load("8B")
    with pytest.raises(ModelError, match="there are cwm, deepseek-v2, deepseek"):
        presets.load("zzzzzz")
    with pytest.raises(ModelError, match="no model is named"):
        presets.load("")
    with pytest.raises(ModelError, match="there is no file"):
        presets.load(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read as JSON"):
        presets.load(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ' + "[" * 10**5)
    with pytest.raises(ModelError, match="cannot be read as JSON"):
        presets.load(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="holds no JSON object"):
        presets.load(tmp_path)
