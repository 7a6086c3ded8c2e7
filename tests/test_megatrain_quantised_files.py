"""Weights that are published in fewer bits: what is read is what transformers reads, and what the format says."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from math import ceil
from pathlib import Path

import pytest
import torch
from families import MODELS, TINY
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from megatrain import export, hf
from megatrain.hf import WeightsError
from megatrain.initial import random_parameters
from megatrain.quantised_files import lies_as, shape, tile, widened
from schedules.model import ModelSpec
from schedules.workload import Workload

FP8 = torch.float8_e4m3fn
Published = Callable[[str, Tensor], dict[str, Tensor]]


def publish(folder: Path, model: ModelSpec, quantised: Published, quantization: object) -> dict[str, Tensor]:
    """Write a folder of a model's weights, `quantised` one by one; what they were before, by name."""
    export.write(folder, model, Workload(micro_batch_size=1, seq_len=8), random_parameters(model, seed=5))
    whole: dict[str, Tensor] = {}
    index: dict[str, str] = {}
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        whole |= tensors
        parts = {part: t for name, tensor in tensors.items() for part, t in quantised(name, tensor).items()}
        save_file(parts, file)
        index |= dict.fromkeys(parts, file.name)
    (folder / hf.INDEX).write_text(json.dumps({"weight_map": index}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    return whole


def read(folder: Path, model: ModelSpec) -> dict[str, Tensor]:
    """Every tensor that training begins with, by its name in files."""
    source = hf.parameters(folder, model)
    return {name: t for i in model.layers for name, t in hf.tensors_of(model, i, source(i)).items()}


# gpt-oss's own: 2,880 by 2,880, so that no shape tells which way a matrix lies
GPT_OSS = replace(MODELS["gpt-oss"], hidden_size=64, moe_intermediate_size=64, intermediate_size=64)


def test_experts_in_mxfp4_are_what_transformers_makes_of_them(tmp_path: Path) -> None:
    random, expected = torch.Generator().manual_seed(1), {}

    def mxfp4(name: str, tensor: Tensor) -> dict[str, Tensor]:
        if not name.endswith("_proj"):
            return {name: tensor}
        experts, columns, rows = tensor.shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=random, dtype=torch.uint8)
        scales = torch.randint(110, 140, blocks.shape[:-1], generator=random, dtype=torch.uint8)
        expected[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        return {f"{name}_blocks": blocks, f"{name}_scales": scales}

    whole = publish(tmp_path, GPT_OSS, mxfp4, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    found = read(tmp_path, GPT_OSS)
    assert len(expected) == 2 * GPT_OSS.num_hidden_layers and found.keys() == whole.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected.get(name, whole[name]))


def test_a_byte_of_mxfp4_is_two_numbers_the_lower_half_first() -> None:
    blocks = torch.zeros(1, 1, 1, 16, dtype=torch.uint8)
    blocks[..., 0], blocks[..., 1] = 0x71, 0x9C  # 0.5 and 6, -2 and -0.5
    found = widened([blocks, torch.tensor([[[129]]], dtype=torch.uint8)], None, 1)
    assert found.shape == (1, 32, 1)
    assert found[0, :5, 0].tolist() == [2.0, 24.0, -8.0, -2.0, 0.0]


@pytest.mark.parametrize("name", ["llama, tied", "deepseek-v3", "mistral-small-4"])
def test_matrices_in_fp8_are_what_transformers_makes_of_them(name: str, tmp_path: Path) -> None:
    """Tiles at a matrix's edges are smaller, as where DeepSeek-V3's 576 rows lie in tiles of 128."""
    model, size, expected = MODELS[name], [6, 10], {}

    def in_tiles(name: str, tensor: Tensor) -> dict[str, Tensor]:
        if tensor.ndim < 2 or "embed" in name or "lm_head" in name or "mlp.gate." in name:
            return {name: tensor}
        *experts, rows, columns = tensor.shape
        scales = torch.rand(*experts, ceil(rows / size[0]), ceil(columns / size[1])) / 100
        values = (tensor / 0.01).to(FP8)
        expected[name] = _dequantize_fp8_weight(values, scales, size, torch.float32)
        of_inputs = f"{name.replace('.weight', '.')}_activation_scale".replace("._", ".")
        return {name: values, f"{name}_scale_inv": scales, of_inputs: torch.ones(())}

    whole = publish(tmp_path, model, in_tiles, {"quant_method": "fp8", "weight_block_size": size})
    found = read(tmp_path, model)
    assert expected and found.keys() == whole.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected.get(name, whole[name]))


@pytest.mark.parametrize(
    ("whole", "scale", "at"),
    [
        ((4, 6), (), lambda e, i, j: ()),
        ((4, 6), (1,), lambda e, i, j: 0),
        ((4, 6), (4, 1), lambda e, i, j: (i, 0)),
        ((4, 6), (2, 3), lambda e, i, j: (i // 2, j // 2)),
        ((3, 4, 6), (1,), lambda e, i, j: 0),
        ((3, 4, 6), (3, 1, 1), lambda e, i, j: (e, 0, 0)),
        ((3, 4, 6), (3, 2, 1), lambda e, i, j: (e, i // 2, 0)),
    ],
)
def test_a_scale_multiplies_what_it_stands_for(
    whole: tuple[int, ...], scale: tuple[int, ...], at: Callable[[int, int, int], int | tuple[int, ...]]
) -> None:
    """One for all, a row, a tile, an expert, and an expert's gate apart from its up."""
    values, scales = torch.randn(whole).to(FP8), torch.rand(scale)
    found = widened([values, scales], None, whole[-1])
    *experts, rows, columns = whole
    for e in range(*experts or (1,)):
        for i in range(rows):
            for j in range(columns):
                place = (*(e,) * len(experts), i, j)
                assert found[place] == values[place].float() * scales[at(e, i, j)]


@pytest.mark.parametrize(("bits", "columns"), [(4, 16), (8, 8)])
def test_packed_integers_lie_lowest_first_above_half_their_range(bits: int, columns: int) -> None:
    row = {4: [-8, -7, 0, 1, 2, 3, 4, 7] * 2, 8: [-128, -1, 0, 127] * 2}[bits]
    words, each = [], 32 // bits
    for first in range(0, columns, each):
        word = sum((value + 2 ** (bits - 1)) << (bits * k) for k, value in enumerate(row[first : first + each]))
        words.append(word - 2**32 if word >= 2**31 else word)
    packed = torch.tensor([words], dtype=torch.int32)
    scales = torch.tensor([[0.5, 2.0]], dtype=torch.bfloat16)
    found = widened([packed, scales], None, columns)
    half = columns // 2
    assert found.tolist() == [[*(0.5 * v for v in row[:half]), *(2.0 * v for v in row[half:])]]


def test_experts_in_packed_integers_are_read(tmp_path: Path) -> None:
    model, expected = MODELS["deepseek-v3"], {}

    def packed(name: str, tensor: Tensor) -> dict[str, Tensor]:
        if "experts." not in name or "shared" in name:
            return {name: tensor}
        rows, columns = tensor.shape
        values = torch.randint(-8, 8, (rows, columns))
        scales = torch.rand(rows, columns // 4).to(torch.bfloat16)
        expected[name] = values * scales.float().repeat_interleave(4, dim=1)
        words = ((values + 8).view(rows, -1, 8) << torch.arange(0, 32, 4)).sum(dim=-1)
        sizes = torch.tensor([rows, columns])
        parts = {"packed": words.to(torch.int32), "scale": scales, "shape": sizes}
        return {f"{name}_{part}": t for part, t in parts.items()}

    config = {"quant_method": "compressed-tensors", "format": "pack-quantised"}
    whole = publish(tmp_path, model, packed, config)
    found = read(tmp_path, model)
    assert expected and found.keys() == whole.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected.get(name, whole[name]))


def test_what_a_language_model_within_another_is_quantised_with_is_looked_up_there() -> None:
    assert tile({}) is None and tile({"text_config": {}}) is None
    config = {"quant_method": "fp8", "weight_block_size": [128, 64]}
    assert tile({"quantization_config": config}) == tile({"text_config": {"quantization_config": config}}) == (128, 64)


def test_tiles_of_compressed_tensors_are_as_large_as_their_group_says() -> None:
    """192 rows in tiles of 128 have two scales: by their number alone these would be for 96 rows each."""

    def of(**weights: object) -> tuple[int, int] | None:
        groups = {"group_0": {"weights": weights, "input_activations": {"group_size": 16}}}
        return tile({"quantization_config": {"quant_method": "compressed-tensors", "config_groups": groups}})

    assert of(block_structure=[128, 64], group_size=None) == (128, 64)
    assert of(group_size=32, strategy="group") == (1, 32) and of(group_size=-1) is None and of() is None
    found = widened([torch.ones(192, 64).to(FP8), torch.tensor([[2.0], [3.0]])], of(block_structure=[128, 64]), 64)
    assert found[:, 0].tolist() == [2.0] * 128 + [3.0] * 64


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"quant_method": "gptq"}, "are quantised, with gptq: training begins with bf16, fp16 or fp32 weights, or"),
        ({"bits": 4}, "with a way that it does not name: training"),
        ("int8", "are quantised, with int8: training"),
        ("fp8", "are quantised, with fp8: training"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"with tiles of \[128\], not of rows and columns"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, r"tiles of \[128, 0\]"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "tiles of 128"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {str(size): {"weights": {"group_size": size}} for size in (32, -1, 64)},
            },
            r"are quantised with tiles of \[1, 32\] and of \[1, 64\]: training",
        ),
    ],
)
def test_other_ways_to_quantize_are_refused_by_name(config: object, told: str, tmp_path: Path) -> None:
    publish(tmp_path, TINY, lambda name, tensor: {name: tensor}, config)
    with pytest.raises(WeightsError, match=told):
        hf.parameters(tmp_path, TINY)


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        (lambda t: {"": t.to(FP8)}, "is of type F8_E4M3, without a scale beside it: training begins with"),
        (lambda t: {"": t, "_scale": torch.ones(())}, "is of type F32, with a scale of type F32 beside it"),
        (lambda t: {"": t.to(FP8), "_scale": torch.ones(7, 1)}, r"has the shape \[32, 32\], and scales of .* \[7, 1\]"),
        (lambda t: {"": t.to(FP8), "_scale": torch.ones(64)}, r"and scales of the shape \[64\]"),
        (lambda t: {"": t.to(FP8), "_scale": t.to(FP8)}, "a scale of type F8_E4M3 beside it"),
        (
            lambda t: {"_packed": torch.zeros(64, 3, dtype=torch.int32), "_scale": torch.ones(64, 1)},
            "has 3 words a row, not those of 32 integers of 4 or 8 bits",
        ),
        (lambda t: {"_packed": torch.zeros(9, 4, dtype=torch.int32), "_scale": torch.ones(9, 1)}, r"shape \[9, 32\]"),
        (
            lambda t: {"_blocks": torch.zeros(32, 1, 16, dtype=torch.uint8), "_scales": torch.zeros(32, 1).byte()},
            "is of type U8, with a scale of type U8 beside it",
        ),
        (
            lambda t: {"_blocks": torch.zeros(64, 2, 8, dtype=torch.uint8), "_scales": torch.zeros(64, 2).byte()},
            "is of type U8, with a scale of type U8 beside it",
        ),
        (lambda t: {"_packed": torch.zeros(64, 8, dtype=torch.int32)}, "lack .*q_proj.weight: the weights are quant"),
        (
            lambda t: {"": t.to(FP8), "_scale": torch.ones(()), "_zero_point": torch.ones(())},
            "contains .*_zero_point, which tiny has no parameter for: the weights are quantised",
        ),
    ],
)
def test_what_is_not_as_its_format_has_it_is_named(
    parts: Callable[[Tensor], dict[str, Tensor]], told: str, tmp_path: Path
) -> None:
    one = "model.layers.1.self_attn.q_proj.weight"

    def broken(name: str, tensor: Tensor) -> dict[str, Tensor]:
        return {f"{name}{end}": t for end, t in parts(tensor).items()} if name == one else {name: tensor}

    publish(tmp_path, TINY, broken, {"quant_method": "fp8"})
    with pytest.raises(WeightsError, match=told):
        hf.parameters(tmp_path, TINY)


def test_a_tensor_is_itself_where_nothing_lies_beside_it() -> None:
    assert lies_as("a", {"a", "a_blocks", "b_scale"}) == ("a",)
    assert lies_as("a", {"b"}) == ()
    assert lies_as("a", {"a", "a_scale_inv", "a_scale"}) == ("a", "a_scale_inv")
    assert shape([hf.InFile((2, 3), "BF16")], None, 3) == (2, 3)
