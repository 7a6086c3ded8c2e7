"""A Kimi Linear's config.json, as it is published and as transformers writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from schedules import presets
from schedules.hf_config import write_config
from schedules.model import ModelError, ModelSpec

NAME = "kimi-linear-48b-a3b"
PUBLISHED: dict[str, Any] = json.loads((Path(presets.__file__).parent / "models" / f"{NAME}.json").read_text())
APART: dict[str, Any] = PUBLISHED["linear_attn_config"]


def kimi(**changes: Any) -> ModelSpec:
    return ModelSpec.from_hf_config(PUBLISHED | changes, NAME)


def test_blocks_are_as_its_lists_count_them_from_one() -> None:
    model = kimi()
    attends = [i for i in model.blocks if model.recurrence(i) is None]
    assert attends == [3, 7, 11, 15, 19, 23, 26]
    assert not any(map(model.has_rope, model.blocks)), "positions are told by decays alone"
    assert [model.has_experts(i) for i in (0, 1)] == [False, True]
    assert model.heads(3).dim == 192 and model.heads(3).value_dim == 128


@pytest.mark.parametrize(
    "changes",
    [
        {"linear_attn_config": APART | {"num_heads": 16, "short_conv_kernel_size": 3}},
        {"linear_attn_config": APART | {"head_dim": 64}},
        {"linear_attn_config": APART | {"kda_layers": [], "full_attn_layers": list(range(1, 28))}},
        {"linear_attn_config": APART | {"kda_layers": list(range(1, 28)), "full_attn_layers": []}},
        {"linear_attn_config": None, "linear_head_dim": 64, "linear_num_heads": 8, "linear_conv_kernel_dim": 2},
        {"linear_attn_config": None, "layer_types": ["linear_attention", *["full_attention"] * 26]},
        {"moe_renormalize": False},
        {"q_lora_rank": 7},
        {"num_expert_group": 8, "topk_group": 2},
        {"num_shared_experts": 2},
        {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 25},
        {"model_max_length": 4096},
    ],
)
def test_what_it_says_is_read_and_written(changes: dict[str, Any]) -> None:
    model = kimi(**changes)
    assert model != kimi()
    assert ModelSpec.from_hf_config(json.loads(json.dumps(write_config(model.to_dict()))), NAME) == model


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"mla_use_nope": False}, "mla_use_nope of a KimiLinearForCausalLM must be True, not False"),
        ({"moe_router_activation_func": "softmax"}, "must be 'sigmoid', not 'softmax'"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers of a KimiLinearForCausalLM must be 0, not 1"),
        ({"linear_attn_config": [1]}, r"linear_attn_config must be a dictionary, not \[1\]"),
        ({"linear_attn_config": APART | {"kda_layers": [1]}}, "must name each of 1 to 27 once"),
        ({"linear_attn_config": APART | {"full_attn_layers": "all"}}, "must name each of 1 to 27 once"),
        ({"linear_attn_config": APART | {"kda_layers": 5, "full_attn_layers": [*range(1, 28)]}}, "must name each of"),
        ({"linear_attn_config": APART | {"num_heads": 0}}, "linear_num_key_heads"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings of a KimiLinearForCausalLM must be False, not True"),
        ({"num_experts": 0}, "num_experts must be"),
    ],
)
def test_what_no_block_does_is_told(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ModelError, match=told):
        kimi(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_theta": 1e6},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}},
        {"num_experts": None, "num_local_experts": 256, "num_shared_experts": None, "n_shared_experts": 1},
        {"linear_attn_config": APART | {"head_dim": None}, "linear_head_dim": 128},
    ],
)
def test_the_same_in_other_words_is_the_same(changes: dict[str, Any]) -> None:
    assert kimi(**changes) == kimi()


def test_by_other_words_it_says_other_numbers_too() -> None:
    silent = {"num_experts": None, "num_shared_experts": None}
    model = kimi(**silent, num_local_experts=64, n_shared_experts=2)
    assert (model.num_experts, model.n_shared_experts) == (64, 2)
    nothing = kimi(linear_attn_config=APART | {"kda_layers": None, "full_attn_layers": None})
    assert nothing.layer_types == kimi(linear_attn_config=None).layer_types


def test_what_is_written_turns_nothing() -> None:
    written = write_config(kimi().to_dict())
    assert written["mla_use_nope"] and not [key for key in written if key.startswith("rope")]


def test_a_config_without_lists_means_what_it_means_to_transformers() -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    theirs = transformers.KimiLinearConfig()
    ours = kimi(linear_attn_config=None)
    assert list(ours.layer_types) == theirs.layer_types
    of_linear = (theirs.linear_num_heads, theirs.linear_head_dim, theirs.linear_conv_kernel_dim)
    assert (ours.linear_num_key_heads, ours.linear_key_head_dim, ours.linear_conv_kernel_dim) == of_linear


def test_names_and_shapes_are_those_of_transformers() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", minversion="5.0")
    two = {"num_hidden_layers": 2, "linear_attn_config": APART | {"kda_layers": [1], "full_attn_layers": [2]}}
    model = kimi(**two)
    with torch.device("meta"):
        theirs = transformers.KimiLinearForCausalLM(transformers.KimiLinearConfig(**(PUBLISHED | two)))
    ours = {
        key if key == "lm_head.weight" else f"model.{f'layers.{i}.' if i in model.blocks else ''}{key}": shape
        for i in model.layers
        for key, shape in model.stored_shapes(i).items()
    }
    taps = [ours.pop(f"model.layers.0.self_attn.{x}_conv1d.weight") for x in "qkv"]
    ours["model.layers.0.self_attn.conv1d.weight"] = (sum(rows for rows, *_ in taps), *taps[0][1:])
    kept = dict(theirs.named_parameters()) | dict(theirs.named_buffers())
    assert ours == {name: tuple(t.shape) for name, t in kept.items()}
