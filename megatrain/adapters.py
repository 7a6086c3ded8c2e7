"""Adapters of LoRA in the files of peft, folded into the weights that they belong to.

What is computed with is then one matrix again, for a schedule that has no adapters: to evaluate it, or to train on.
`megatrain.export` writes such files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import safetensors
from torch import Tensor

from megatrain.hf import ADAPTER_CONFIG, ADAPTER_WEIGHTS, WeightsError, adapter_name, are_seeing
from megatrain.quantised_files import PLAIN
from megatrain.template import views
from schedules.model import ModelSpec

# Settings of peft's under which adapters add their product and nothing else. Others, if they are set to anything, may
# change what is added or, as PiSSA's beginning does, what it is added to.
HARMLESS = (
    "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules", "exclude_modules", "layers_to_transform",
    "layers_pattern", "megatron_core", "qalora_group_size", "eva_config", "runtime_config", "ensure_weight_tying",
)  # fmt: skip
NEUTRAL = {"bias": ("none",), "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva")}


def folded(source: Callable[[int], Tensor], folder: Path, model: ModelSpec) -> Callable[[int], Tensor]:
    """Layer -> its parameters, fp32, flat: what `source` returns, with the products of `folder`'s adapters added to it.

    That all belong to this model is checked at once. Raises WeightsError.
    """
    rank, scale = _rank_and_scale(folder)
    file = folder / ADAPTER_WEIGHTS
    try:
        with safetensors.safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (it is no mapping)
            found = {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except (OSError, safetensors.SafetensorError) as error:
        raise WeightsError(f"{file} cannot be read: {error}") from None
    _require_pairs(file, found, model, rank)

    def of_layer(i: int) -> Tensor:
        flat = source(i)
        params = views(flat, model.stored_shapes(i))
        with safetensors.safe_open(file, framework="pt") as opened:
            for name, (down, up) in _pairs(model, i, rank, found).items():
                a, b = opened.get_tensor(down).float(), opened.get_tensor(up).float()
                params[name].addmm_(b, a, alpha=scale)
        return flat

    return of_layer


def _rank_and_scale(folder: Path) -> tuple[int, float]:
    """How wide the adapters are, and what their product is multiplied by."""
    if not folder.is_dir():
        raise WeightsError(f"there is no folder {folder}")
    try:
        config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WeightsError(
            f"{folder} has no {ADAPTER_CONFIG}: give adapters in peft's files, as --export writes them"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsError(f"{folder / ADAPTER_CONFIG} cannot be read: {error}") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise WeightsError(f"{folder / ADAPTER_CONFIG} is not of LoRA, by its peft_type")
    for name, value in config.items():
        if value and name not in HARMLESS and value not in NEUTRAL.get(name, ()):
            raise WeightsError(
                f"{folder / ADAPTER_CONFIG} has {name} {value!r}: only adapters that add the product of two matrices "
                "can be folded"
            )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not (_is_number(rank) and rank == int(rank) > 0 and _is_number(alpha)):
        raise WeightsError(f"{folder / ADAPTER_CONFIG} has r {rank!r} and lora_alpha {alpha!r}: numbers are needed")
    return int(rank), alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _is_number(found: Any) -> TypeGuard[float]:
    return type(found) in (int, float) and math.isfinite(found)


def _require_pairs(file: Path, found: Mapping[str, tuple[tuple[int, ...], str]], model: ModelSpec, rank: int) -> None:
    """Raises WeightsError unless these are pairs of adapters of this model."""
    seeing = are_seeing(found)
    wanted = {
        adapter_name(model, i, name, seeing=seeing): shape
        for i in model.blocks
        for name, shape in model.adapter_shapes(i, rank).items()
    }
    for name, (shape, dtype) in found.items():
        if name not in wanted:
            raise WeightsError(f"{file} contains {name}, which belongs to no projection of {model.name}")
        if shape != wanted[name]:
            raise WeightsError(f"{name} in {file} has the shape {list(shape)}, for {model.name} {list(wanted[name])}")
        if dtype not in PLAIN:
            raise WeightsError(f"{name} in {file} is of type {dtype}: bf16, fp16 or fp32 are read")
        other = name.replace("lora_A", "lora_B") if "lora_A" in name else name.replace("lora_B", "lora_A")
        if other not in found:
            raise WeightsError(f"{file} lacks {other}, which {name} is multiplied with")
    if not found:
        raise WeightsError(f"{file} has no adapters")


def _pairs(model: ModelSpec, i: int, rank: int, found: Mapping[str, object]) -> dict[str, tuple[str, str]]:
    """Of layer i's matrices that have adapters, the names of these."""
    pairs, seeing = {}, are_seeing(found)
    for name in model.adapter_shapes(i, rank):
        if "lora_A" in name and (down := adapter_name(model, i, name, seeing=seeing)) in found:
            pairs[name.replace("lora_A.", "")] = (down, down.replace("lora_A", "lora_B"))
    return pairs
