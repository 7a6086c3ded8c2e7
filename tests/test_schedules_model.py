"""The shape of a model: parameters against published totals, FLOPs and bytes against hand counts."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from families import MODELS as SMALL
from hypothesis import given
from hypothesis import strategies as st

from schedules import hf_nemotron, presets
from schedules.families import FAMILIES
from schedules.flops import (
    attended_pairs,
    backward_flops,
    forward_flops,
    model_flops_per_step,
    op_flops,
    recomputed_flops,
)
from schedules.hf_config import NOT_DONE, REQUIRED, WIDTHS, write_config
from schedules.model import ModelError, ModelSpec
from schedules.op import Phase, Tier
from schedules.parameters import is_matrix
from schedules.saved import hidden_bytes, saved_bytes
from schedules.seeing import FLAT
from schedules.traffic import op_bytes, phases_of, pointwise_bytes, product_bytes
from schedules.workload import PRECISIONS, RECOMPUTED, MemoryBudget, Workload
from schedules.workspace import FEW_TERMS, LOSS_CHUNK_TOKENS, workspace_bytes

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


def spec(**changes: Any) -> ModelSpec:
    return ModelSpec.from_hf_config(CONFIG | changes, "small")


def experts(**changes: Any) -> ModelSpec:
    mixtral = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}
    return spec(**(mixtral | changes))


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


def test_forward_flops_by_hand() -> None:
    tokens = 3 * 8
    q = o = 32 * 32
    k = v = 32 * 16
    mlp = 3 * 32 * 48
    pairs = 3 * (1 + 2 + 3 + 4 + 5 + 6 + 7 + 8)
    block = 2 * tokens * (q + k + v + o + mlp) + 2 * (2 * pairs * 32)
    head = 2 * tokens * 32 * 100
    model = spec()
    assert [forward_flops(model, i, WORKLOAD) for i in model.layers] == [0, block, block, head]
    assert backward_flops(model, 0, WORKLOAD) == 2 * block
    assert model_flops_per_step(model, WORKLOAD) == 3 * 2 * (2 * block + head)


def test_an_evaluation_is_forward_alone() -> None:
    model, workload = spec(), dataclasses.replace(WORKLOAD, task="evaluate")
    assert model_flops_per_step(model, workload) == 2 * (2 * forward_flops(model, 0, workload) + 2 * 24 * 32 * 100)


def test_adapters_that_only_the_output_needs_are_left_out_with_it() -> None:
    """The second matrix of the one beside down; all of the MLP where backward computes it again."""
    model, workload = spec(), dataclasses.replace(WORKLOAD, lora_rank=4)
    forward = op_flops(model, 0, Phase.FORWARD, workload)
    assert op_flops(model, 0, Phase.FORWARD, workload, output=False) == forward
    assert op_flops(model, 0, Phase.RECOMPUTE, workload, output=False) == forward - 2 * 24 * (32 * 48 + 4 * 32)
    again = dataclasses.replace(workload, recompute="mlp")
    mlp = 2 * 24 * 3 * (32 * 48 + 4 * (32 + 48))
    assert op_flops(model, 0, Phase.RECOMPUTE, again, output=False) == forward - mlp


def test_of_an_mlp_with_adapters_gate_and_up_are_multiplied_again_and_what_goes_into_down() -> None:
    workload = dataclasses.replace(WORKLOAD, lora_rank=4, recompute="mlp")
    assert recomputed_flops(spec(), 0, workload) == 2 * 24 * (2 * 32 * 48 + 4 * (2 * (32 + 48) + 48))
    assert recomputed_flops(spec(), 0, dataclasses.replace(workload, recompute="pointwise")) == 0


def test_expert_flops_count_the_router_and_the_chosen_experts() -> None:
    dense, mixture = spec(), experts()
    extra = forward_flops(mixture, 0, WORKLOAD) - forward_flops(dense, 0, WORKLOAD)
    assert extra == 2 * 24 * (3 * 32 * 48 + 32 * 8)  # one more expert than the dense MLP, and the router


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


def test_experts_have_no_output_that_nobody_reads() -> None:
    """What each makes is kept, so running them again for their activations takes the whole forward."""
    mixture, dense = experts(), spec()
    again = [op_flops(model, 0, Phase.RECOMPUTE, WORKLOAD, output=False) for model in (mixture, dense)]
    last_product = 2 * 24 * 32 * 48
    assert again == [forward_flops(mixture, 0, WORKLOAD), forward_flops(dense, 0, WORKLOAD) - last_product]


@given(seq_len=st.integers(1, 40), window=st.integers(1, 50))
def test_sliding_window_counts_the_pairs_of_the_mask(seq_len: int, window: int) -> None:
    model = spec(architectures=["MistralForCausalLM"], sliding_window=window)
    mask = sum(query - window < key <= query for query in range(seq_len) for key in range(seq_len))
    assert attended_pairs(model, 0, seq_len) == mask


def test_saved_bytes_by_hand() -> None:
    h, q, kv, f, heads = 32, 32, 16, 48, 4
    elements = h + (q + 2 * kv) + q + 2 * h + 3 * f
    assert saved_bytes(spec(), 0, WORKLOAD) == 24 * (2 * elements + 4 * (2 + heads))
    assert saved_bytes(spec(), -1, WORKLOAD) == saved_bytes(spec(), 2, WORKLOAD) == 0
    assert hidden_bytes(spec(), WORKLOAD) == 24 * 32 * 2


def test_saved_bytes_with_norms_after_by_hand() -> None:
    """What a projection reads is a block's input or its residual sum then; queries and keys have a norm each."""
    h, q, kv, f, heads = 32, 32, 16, 48, 4
    olmo, both = spec(architectures=["Olmo2ForCausalLM"]), dataclasses.replace(spec(), post_norm=True)
    elements = (q + kv) + (q + 2 * kv) + q + h + h + 3 * f + h
    assert saved_bytes(olmo, 0, WORKLOAD) == 24 * (2 * elements + 4 * (2 + 2 + heads))
    assert saved_bytes(both, 0, WORKLOAD) == saved_bytes(spec(), 0, WORKLOAD) + 24 * (2 * 2 * h + 4 * 2)
    again = dataclasses.replace(WORKLOAD, recompute="pointwise")
    assert saved_bytes(olmo, 0, WORKLOAD) - saved_bytes(olmo, 0, again) == 24 * 2 * f


def test_an_output_that_is_normalised_is_not_left_out() -> None:
    olmo, plain = spec(architectures=["Olmo2ForCausalLM"]), spec()
    for mode in RECOMPUTED:
        work = dataclasses.replace(WORKLOAD, recompute=mode)
        whole, alone = (op_flops(olmo, 0, Phase.RECOMPUTE, work, output=yes) for yes in (True, False))
        assert whole == alone == forward_flops(plain, 0, work)
        whole, alone = (product_bytes(olmo, 0, Phase.RECOMPUTE, work, output=yes) for yes in (True, False))
        assert whole == alone
        whole, alone = (pointwise_bytes(olmo, 0, Phase.RECOMPUTE, work, output=yes) for yes in (True, False))
        assert whole - alone == 24 * 2 * 3 * 32


def test_saved_bytes_of_a_known_block() -> None:
    # Llama-3.1-8B, 1 token: 3*4096 + 2*4096 + 2*1024 + 3*14336 = 65536 elements, and 34 fp32 words
    workload = Workload(micro_batch_size=1, seq_len=1)
    assert saved_bytes(presets.load("llama-3.1-8b"), 0, workload) == 2 * 65_536 + 4 * 34


@pytest.mark.parametrize("model", [spec(), experts(), presets.load("gpt-oss-20b"), presets.load("qwen3-8b")])
def test_bytes_grow_with_the_batch_and_hold_what_they_must(model: ModelSpec) -> None:
    small, large = Workload(micro_batch_size=1, seq_len=64), Workload(micro_batch_size=2, seq_len=64)
    assert saved_bytes(model, 0, large) == 2 * saved_bytes(model, 0, small)
    assert saved_bytes(model, 0, small) > 2 * hidden_bytes(model, small)
    for phase in (Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD):
        assert op_bytes(model, 0, phase, small) > model.params(0) * 2
        assert op_bytes(model, 0, phase, large) > op_bytes(model, 0, phase, small)
        assert workspace_bytes(model, 0, phase, large) > workspace_bytes(model, 0, phase, small) > 0


def test_loss_workspace_is_bounded_by_its_chunk() -> None:
    model = spec()
    sizes = [
        workspace_bytes(model, model.head, Phase.LOSS, Workload(micro_batch_size=1, seq_len=n))
        for n in (LOSS_CHUNK_TOKENS // 2, LOSS_CHUNK_TOKENS, 8 * LOSS_CHUNK_TOKENS)
    ]
    assert sizes[0] * 2 == sizes[1] == sizes[2]
    assert sizes[1] >= 2 * LOSS_CHUNK_TOKENS * 100 * 4


@pytest.mark.parametrize(("changes", "summed"), [({}, 1), ({"precision": "fp32"}, 0), ({"lora_rank": 4}, 0)])
def test_loss_workspace_has_room_for_a_sum_of_some_of_many_chunks(changes: dict[str, Any], summed: int) -> None:
    model = spec()
    few, many = (
        workspace_bytes(model, model.head, Phase.LOSS, Workload(micro_batch_size=1, seq_len=n, **changes))
        for n in (FEW_TERMS * LOSS_CHUNK_TOKENS, FEW_TERMS * LOSS_CHUNK_TOKENS + 1)
    )
    assert many - few == summed * model.vocab_size * model.hidden_size * 2


T, H, Q, KV, F = 16_384, 4096, 4096, 1024, 14_336  # 16k tokens of Llama-3.1-8B


@pytest.mark.parametrize(
    ("phase", "recompute", "output", "nbytes"),
    [
        (Phase.FORWARD, "none", True, 2 * T * (2 * H + 3 * F)),  # an MLP takes more than attention
        (Phase.RECOMPUTE, "none", True, 2 * T * (Q + KV + 2 * H)),
        (Phase.RECOMPUTE, "none", False, 2 * T * (Q + KV + H)),
        (Phase.BACKWARD, "none", True, 2 * H * F + 2 * T * (3 * F + 2 * H)),
        # 8,192 tokens of an MLP at once, and three gradients of matrices in fp32
        (Phase.FORWARD, "mlp", True, 2 * (T * 3 * H + T // 2 * 3 * F)),
        (Phase.RECOMPUTE, "mlp", True, 2 * (T * (Q + KV + 2 * H) + T // 2 * 3 * F)),
        (Phase.RECOMPUTE, "mlp", False, 2 * T * (Q + KV + H)),
        (Phase.BACKWARD, "mlp", True, 2 * H * F + 2 * (T * 2 * H + T // 2 * (5 * F + H)) + 4 * 3 * H * F),
    ],
)
def test_a_blocks_workspace_by_hand(phase: Phase, recompute: str, output: bool, nbytes: int) -> None:
    model, workload = presets.load("llama-3.1-8b"), Workload(micro_batch_size=1, seq_len=T, recompute=recompute)
    assert workspace_bytes(model, 0, phase, workload, output=output) == nbytes


def test_workspaces_of_blocks_with_other_norms_or_no_rotary_embedding_by_hand() -> None:
    model, workload = presets.load("llama-3.1-8b"), Workload(micro_batch_size=1, seq_len=T)
    after, both = (dataclasses.replace(model, pre_norm=pre, post_norm=True) for pre in (False, True))
    assert workspace_bytes(after, 0, Phase.FORWARD, workload) == 2 * T * (H + 3 * F)  # an MLP's input is its residual
    assert workspace_bytes(both, 0, Phase.FORWARD, workload) == 2 * T * (2 * H + 3 * F)
    again = dataclasses.replace(workload, recompute="mlp")
    for variant, hidden in ((after, 2), (both, 3)):
        mlp = T * hidden * H + T // 2 * (5 * F + H)
        assert workspace_bytes(variant, 0, Phase.BACKWARD, again) == 2 * H * F + 2 * mlp + 4 * 3 * H * F
    narrow = dataclasses.replace(after, intermediate_size=1024)
    assert workspace_bytes(narrow, 0, Phase.FORWARD, workload) == 2 * T * (3 * Q + 3 * KV)
    assert workspace_bytes(narrow, 0, Phase.FORWARD, again) == 2 * T * 6 * H
    plain = dataclasses.replace(model, intermediate_size=1024, no_rope_layers=(0,) * model.num_hidden_layers)
    assert workspace_bytes(plain, 0, Phase.FORWARD, workload) == 2 * T * (H + 2 * Q + 2 * KV)
    assert workspace_bytes(plain, 0, Phase.RECOMPUTE, workload) == 2 * T * 2 * H
    assert workspace_bytes(plain, 0, Phase.RECOMPUTE, again) == 2 * (T * 2 * H + T // 2 * 3 * 1024)


def test_workspaces_where_attention_is_wider_and_of_the_ends_by_hand() -> None:
    model = dataclasses.replace(presets.load("llama-3.1-8b"), intermediate_size=1024)
    workload = Workload(micro_batch_size=1, seq_len=T)
    attention = 2 * (4 * Q + 2 * KV + 2 * H) + 4 * Q
    assert workspace_bytes(model, 0, Phase.BACKWARD, workload) == 2 * H * Q + T * attention
    assert workspace_bytes(model, 0, Phase.FORWARD, workload) == 2 * T * (H + 3 * Q + 3 * KV)
    again = dataclasses.replace(workload, recompute="mlp")
    assert workspace_bytes(model, 0, Phase.BACKWARD, again) == 2 * H * Q + T * attention
    assert workspace_bytes(model, 0, Phase.FORWARD, again) == 2 * T * 5 * H  # a norm in fp32
    ungrouped = dataclasses.replace(model, num_key_value_heads=32)
    assert workspace_bytes(ungrouped, 0, Phase.FORWARD, again) == 2 * T * (H + 6 * Q)
    assert workspace_bytes(model, model.head, Phase.LOSS, workload) == 4 * 1024 * (2 * 128_256 + 5 * H)
    few = dataclasses.replace(workload, seq_len=16)
    assert workspace_bytes(model, model.head, Phase.LOSS, few) == 4 * 16 * (2 * 128_256 + 5 * H)
    assert workspace_bytes(model, model.embed, Phase.BACKWARD, few) == 12 * 16 * H
    for tokens in (T, 2 * T):
        many = dataclasses.replace(workload, seq_len=tokens)
        assert workspace_bytes(model, model.embed, Phase.BACKWARD, many) == 12 << 26
    assert workspace_bytes(model, model.embed, Phase.BACKWARD, dataclasses.replace(workload, precision="fp32")) == 0
    assert workspace_bytes(model, model.embed, Phase.EMBED, workload) == 0


def test_a_workspace_of_experts_by_hand() -> None:
    """Two copies of the hidden state for each of two choices, and of the matrices' gradient a chunk."""
    model, workload = presets.load("mixtral-8x7b"), Workload(micro_batch_size=1, seq_len=16)
    assert workspace_bytes(model, 0, Phase.FORWARD, workload) == 2 * 16 * (2 * H + 3 * 2 * F + 4 * H)
    assert workspace_bytes(model, 0, Phase.BACKWARD, workload) == 2 * (1 << 29) + 2 * 16 * (3 * 2 * F + 2 * H + 4 * H)


def test_what_the_ends_move_by_hand() -> None:
    model, workload = presets.load("llama-3.1-8b"), Workload(micro_batch_size=1, seq_len=T)
    table, logits, hidden = 128_256 * H, T * 128_256, T * H
    loss, evaluate = model.head, dataclasses.replace(workload, task="evaluate")
    frozen = dataclasses.replace(workload, lora_rank=4)
    # 16 chunks, each with the table twice and its gradient there and back; logits written, and read twice
    assert product_bytes(model, loss, Phase.LOSS, workload) == 16 * table * (2 * 2 + 2 * 2) + 3 * 2 * logits
    assert product_bytes(model, loss, Phase.LOSS, frozen) == 16 * table * 4 + 6 * logits
    assert product_bytes(model, loss, Phase.LOSS, evaluate) == 16 * table * 2 + 2 * logits
    assert pointwise_bytes(model, loss, Phase.LOSS, workload) == 2 * 2 * logits + 8 * 2 * hidden
    assert pointwise_bytes(model, loss, Phase.LOSS, workload, fused=False) == 2 * 4 * logits + 8 * 2 * hidden
    assert pointwise_bytes(model, loss, Phase.LOSS, evaluate) == 4 * logits + 2 * 2 * hidden
    assert pointwise_bytes(model, model.embed, Phase.EMBED, workload) == (2 + 2) * hidden
    assert pointwise_bytes(model, model.embed, Phase.BACKWARD, workload) == (2 + 2 * 2 + 8 * 4) * hidden
    wide = dataclasses.replace(workload, precision="fp32")
    assert pointwise_bytes(model, model.embed, Phase.BACKWARD, wide) == (4 + 2 * 4) * hidden


def test_what_an_mlp_computed_again_moves_by_hand() -> None:
    model, workload = presets.load("llama-3.1-8b"), Workload(micro_batch_size=1, seq_len=T, recompute="mlp")
    forward, layer = 7 * H + 4 * Q + 4 * KV + 3 * F, model.params(0)
    assert product_bytes(model, 0, Phase.FORWARD, workload) == 2 * (T * forward + layer)
    # gate and up once more, with their weights
    again = T * (2 * H + 2 * F) + 2 * H * F
    assert product_bytes(model, 0, Phase.BACKWARD, workload) == 2 * (2 * T * forward + 2 * layer + again)
    unread = T * (F + H) + H * F + again
    assert product_bytes(model, 0, Phase.RECOMPUTE, workload, output=False) == 2 * (T * forward + layer - unread)
    between = 10 * H + 2 * (Q + KV) + 3 * F
    assert pointwise_bytes(model, 0, Phase.RECOMPUTE, workload) == 2 * T * between
    assert pointwise_bytes(model, 0, Phase.RECOMPUTE, workload, output=False) == 2 * T * (between - 3 * H - 3 * F)
    back = 8 * H + 2 * (Q + KV) + 5 * F + 4 * H + 3 * F
    assert pointwise_bytes(model, 0, Phase.BACKWARD, workload) == 2 * T * back


def test_what_products_move_by_hand() -> None:
    h, q, kv, f, layer = 32, 32, 16, 48, spec().params(0)
    qkv, attention, o, gate_up, down = 3 * h + q + 2 * kv, 2 * q + 2 * kv, q + h, 2 * h + 2 * f, f + h
    forward = qkv + attention + o + gate_up + down
    assert product_bytes(spec(), 0, Phase.FORWARD, WORKLOAD) == 2 * (24 * forward + layer)
    assert product_bytes(spec(), 0, Phase.BACKWARD, WORKLOAD) == 2 * (2 * 24 * forward + 2 * layer)
    unread = 24 * down + f * h
    assert product_bytes(spec(), 0, Phase.RECOMPUTE, WORKLOAD, output=False) == 2 * (24 * forward + layer - unread)
    assert pointwise_bytes(spec(), 0, Phase.FORWARD, WORKLOAD) == 2 * 24 * (4 * h + 2 * (q + kv) + 3 * f + 6 * h)
    assert pointwise_bytes(spec(), 0, Phase.BACKWARD, WORKLOAD) == 2 * 24 * (8 * h + 2 * (q + kv) + 5 * f)
    assert product_bytes(spec(), spec().embed, Phase.EMBED, WORKLOAD) == 0


def test_what_experts_move_by_hand() -> None:
    """One more input and output per token than the dense MLP has, both as wide as it, and a router."""
    h, q, kv, f, model = 32, 32, 16, 2 * 48, experts()
    forward = 7 * h + 4 * q + 4 * kv + 3 * f + (h + 8) + 3 * h
    products = 2 * (24 * forward + model.params(0))
    assert product_bytes(model, 0, Phase.FORWARD, WORKLOAD) == products
    assert product_bytes(model, 0, Phase.RECOMPUTE, WORKLOAD, output=False) == products
    whole, without = (pointwise_bytes(model, 0, Phase.RECOMPUTE, WORKLOAD, output=yes) for yes in (True, False))
    assert whole - without == 2 * 24 * (3 * h + 3 * h)  # the last residual sum, and that of two choices


def test_what_adapters_move_by_hand() -> None:
    h, q, kv, f, rank, layer = 32, 32, 16, 48, 4, spec().params(0)
    workload = dataclasses.replace(WORKLOAD, lora_rank=rank)
    beside = (h + q) + 2 * (h + kv) + (q + h) + 2 * (h + f) + (f + h)  # their inputs and outputs
    adapters = rank * beside
    forward = 7 * h + 4 * q + 4 * kv + 3 * f + beside + 2 * 7 * rank
    assert product_bytes(spec(), 0, Phase.FORWARD, workload) == 2 * (24 * forward + layer + adapters)
    assert product_bytes(spec(), 0, Phase.BACKWARD, workload) == 2 * (2 * 24 * forward + layer + 2 * adapters)


@pytest.mark.parametrize("how", [{"scale_embeddings": True}, {"embedding_multiplier": 12.0}])
def test_scaled_embeddings_are_read_and_written_once_more_each_way(how: dict[str, Any]) -> None:
    model, workload = spec(), Workload(micro_batch_size=1, seq_len=10)
    scaled, hidden = dataclasses.replace(model, **how), 10 * 32
    wide = dataclasses.replace(workload, precision="fp32")
    for phase, work, nbytes in ((Phase.EMBED, workload, 4), (Phase.BACKWARD, workload, 8), (Phase.BACKWARD, wide, 8)):
        plain, more = (pointwise_bytes(m, m.embed, phase, work) for m in (model, scaled))
        assert more - plain == nbytes * hidden
    assert workspace_bytes(scaled, scaled.embed, Phase.BACKWARD, wide) == 4 * hidden
    assert workspace_bytes(model, model.embed, Phase.BACKWARD, wide) == 0


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("recompute", ["none", "mlp"])
def test_multiplied_branches_have_gradients_of_their_own(recompute: str, fused: bool) -> None:
    """Forward their sum with the residual multiplies; of both, backward reads one and writes another."""
    model, workload = spec(), Workload(micro_batch_size=1, seq_len=10, recompute=recompute)
    multiplied, hidden = dataclasses.replace(model, residual_multiplier=0.5), 10 * 32 * 2
    for phase, passes, held in ((Phase.FORWARD, 0, 0), (Phase.RECOMPUTE, 0, 0), (Phase.BACKWARD, 4, 1)):
        plain, more = (pointwise_bytes(m, 0, phase, workload, fused=fused) for m in (model, multiplied))
        assert more - plain == passes * hidden
        assert (
            workspace_bytes(multiplied, 0, phase, workload) - workspace_bytes(model, 0, phase, workload)
            == held * hidden
        )


def test_a_layer_has_no_traffic_for_a_phase_it_lacks() -> None:
    with pytest.raises(ModelError, match="layer head has no compute op of phase forward"):
        op_bytes(spec(), 2, Phase.FORWARD, WORKLOAD)


def test_a_config_without_its_class_is_known_by_its_type() -> None:
    named = spec(architectures=["Qwen2ForCausalLM"])
    assert spec(architectures=None, model_type="qwen2") == named


NAN = float("nan")
SWITCHED_ON = {"use_sliding_window": True, "sliding_window": 16}
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
        ({"intermediate_size": NAN}, "intermediate_size must be a whole number"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 1,000, not 1,000,000,000"),
        ({"num_attention_heads": 0}, "num_attention_heads must be a whole number"),
        ({"rms_norm_eps": NAN}, "rms_norm_eps must be a positive finite number, not nan"),
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
        ({"rope_scaling": {"rope_type": "yarn", "factor": NAN}}, "factor must be a positive finite number, not nan"),
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


def test_workload_counts_tokens_and_round_trips() -> None:
    assert (WORKLOAD.tokens_per_microbatch, WORKLOAD.tokens_per_step) == (24, 48)
    assert list(WORKLOAD.microbatches) == [0, 1]
    assert Workload.from_dict(json.loads(json.dumps(WORKLOAD.to_dict()))) == WORKLOAD
    budget = MemoryBudget(device_bytes=80, host_bytes=1000)
    assert [budget.of(tier) for tier in (Tier.DEVICE, Tier.HOST, Tier.NVME)] == [80, 1000, 0]


def test_bytes_per_parameter_of_each_precision() -> None:
    assert {name: p.per_param for name, p in PRECISIONS.items()} == {
        "bf16": 12,  # the paper's
        "bf16_split": 14,
        "bf16_fp32": 16,
        "bf16_16bit": 8,
        "bf16_8bit": 6 + 8 / 256,
        "fp32": 16,
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"micro_batch_size": 0}, "micro_batch_size must be a whole number of at least 1, not 0"),
        ({"accumulation": 1.5}, "accumulation must be a whole number"),
        ({"micro_batch_size": 10**3000}, "micro_batch_size must be a number of 64 bits, not one of 3001 digits"),
        ({"seq_len": NAN}, "seq_len must be a whole number"),
        ({"precision": ["bf16"]}, r"precision \['bf16'\] is unknown"),
        ({"precision": "fp8"}, "precision 'fp8' is unknown; known are bf16, "),
        ({"optimizer": "sgd"}, "optimizer 'sgd' is unknown"),
        ({"grad_clip": 0.0}, "grad_clip must be a positive finite number or None"),
        ({"grad_clip": 10**400}, "grad_clip must be a positive finite number or None"),
        ({"grad_clip": NAN}, "grad_clip must be a positive finite number or None"),
        ({"batch": 1}, "Workload has no field 'batch'"),
    ],
)
def test_bad_workloads_say_what_is_wrong(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Workload.from_dict(WORKLOAD.to_dict() | changes)


@pytest.mark.parametrize("name", ["micro_batch_size", "seq_len"])
def test_a_workload_says_what_it_lacks(name: str) -> None:
    with pytest.raises(ValueError, match=f"Workload lacks the field '{name}'"):
        Workload.from_dict({key: value for key, value in WORKLOAD.to_dict().items() if key != name})


def test_a_block_of_moments_that_is_not_full_has_a_scale_as_well() -> None:
    assert [PRECISIONS["bf16_8bit"].state_bytes(params) for params in (0, 1, 256, 257)] == [0, 10, 520, 530]


def test_bad_budgets_say_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="host_bytes must be a whole number of at least 0, not -1"):
        MemoryBudget(device_bytes=1, host_bytes=-1)


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
    if architecture == "Ministral3ForCausalLM":
        more["rope_scaling"] = scaling = dict(SMALL["ministral3"].rope_scaling)
    if scaling and architecture == "Phi3ForCausalLM":
        with pytest.raises(ModelError, match="'linear' is not supported in a Phi-3"):
            ModelSpec.from_hf_config(config | more, "small")
        return
    model = ModelSpec.from_hf_config(config | more, "small")
    assert dict(model.rope_scaling) == scaling
    assert ModelSpec.from_hf_config(write_config(model.to_dict()), "small") == model


@pytest.mark.parametrize("name", sorted(KNOWN | OURS))
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


def test_unfused_layers_move_more_by_hand() -> None:
    """Per token at bf16, beyond fused kernels: two norms of 28 bytes an element, 8 elements of q and k for rotary
    and two of the MLP's width."""
    model = spec()
    workload = Workload(micro_batch_size=1, seq_len=10)
    heads = model.heads(0)
    fused, unfused = (op_bytes(model, 0, Phase.FORWARD, workload, fused=fused) for fused in (True, False))
    per_token = 2 * model.hidden_size * 28 + 2 * (8 * (heads.q_width + heads.k_width) + 2 * model.mlp_width(0))
    assert unfused - fused == 10 * per_token
    there, back = (pointwise_bytes(model, 0, p, workload, fused=False) for p in (Phase.FORWARD, Phase.BACKWARD))
    assert back == 2 * there
    wide = dataclasses.replace(workload, precision="fp32")
    more = op_bytes(model, 0, Phase.FORWARD, wide, fused=False)
    assert more - op_bytes(model, 0, Phase.FORWARD, wide) < 20 * per_token, "nothing is cast in fp32"
    loss = [op_bytes(model, model.head, Phase.LOSS, workload, fused=fused) for fused in (True, False)]
    assert loss[1] - loss[0] == 10 * 2 * 2 * model.vocab_size, "logits, read and written, are twice as wide"
