"""Weights in the files of Hugging Face: where training may start, and what comes of it.

Names are those that models are published under: those of `ModelSpec.parameter_shapes` with a layer's place before
them, but for experts, which lie in files one by one. Files are read a layer at a time, and written as a file per layer
with an index; adapters are written as peft reads them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

from megatrain.linear import LORA_SCALE
from megatrain.template import views
from schedules import trained
from schedules.errors import InputError
from schedules.hf_config import write_config
from schedules.model import ModelError, ModelSpec
from schedules.workload import Workload

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class WeightsError(InputError):
    """A folder without a model's weights, or with others than the model's; the message names the first."""


def global_name(model: ModelSpec, i: int, name: str) -> str:
    """What transformers calls a parameter of layer i."""
    if model.is_block(i):
        return f"model.layers.{i}.{name}"
    return name if name.startswith("lm_head.") else f"model.{name}"


# What files call experts' matrices, and what comes before them and the router, where it is not `mlp.experts.gate_proj`.
EXPERTS: dict[str, tuple[str, dict[str, str]]] = {
    "MixtralForCausalLM": ("block_sparse_moe", {"gate": "w1", "up": "w3", "down": "w2"}),
    "Qwen3MoeForCausalLM": ("mlp", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}),
}


def file_shapes(model: ModelSpec, i: int) -> dict[str, tuple[int, ...]]:
    """Name in files -> shape of each tensor that layer i is stored as, in the order in which they lie in its slab."""
    found: dict[str, tuple[int, ...]] = {}
    place, matrices = EXPERTS.get(model.architecture, ("mlp", {}))
    for name, shape in model.parameter_shapes(i).items():
        stored = name.replace("mlp.", f"{place}.", 1) if name.startswith("mlp.") else name
        if not (matrices and ".experts." in name):
            found[global_name(model, i, stored)] = shape
            continue
        both = name.endswith("gate_up_proj")
        for e in range(shape[0]):
            for part in ("gate", "up") if both else ("down",):
                expert = f"{place}.experts.{e}.{matrices[part]}.weight"
                found[global_name(model, i, expert)] = (shape[1] // 2 if both else shape[1], shape[2])
    return found


# ---- reading


def parameters(folder: Path, model: ModelSpec) -> Callable[[int], Tensor]:
    """Layer -> its parameters, fp32, flat, from `folder`, in any floating type there.

    That all are there, in the model's shapes, is checked at once. Raises WeightsError.
    """
    files = _files(folder)
    wanted = {name: shape for i in model.layers for name, shape in file_shapes(model, i).items()}
    for name in wanted:
        if name not in files:
            raise WeightsError(f"the weights in {folder} lack {name}{_quantized(files)}")
    for file, names in _by_file(files, wanted).items():
        try:
            with safetensors.safe_open(folder / file, framework="pt") as opened:
                found = {name: tuple(opened.get_slice(name).get_shape()) for name in names}
        except (OSError, safetensors.SafetensorError) as error:
            raise WeightsError(f"{folder / file} cannot be read: {error}") from None
        for name, shape in found.items():
            if shape != wanted[name]:
                raise WeightsError(
                    f"{name} in {folder} has the shape {list(shape)}, the model's has {list(wanted[name])}"
                )

    def of_layer(i: int) -> Tensor:
        parts = dict.fromkeys(file_shapes(model, i), torch.empty(0))
        for file, names in _by_file(files, parts).items():
            with safetensors.safe_open(folder / file, framework="pt") as opened:
                parts |= {name: opened.get_tensor(name).to(torch.float32).flatten() for name in names}
        return torch.cat(list(parts.values()))

    return of_layer


def _by_file(files: Mapping[str, str], names: Iterable[str]) -> dict[str, list[str]]:
    """A file's header is read anew each time that it is opened, and a mixture's has thousands of names."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(files[name], []).append(name)
    return found


def _quantized(files: Mapping[str, str]) -> str:
    quantized = any(name.endswith(("_blocks", "_scales")) for name in files)
    return ": they are quantized; training begins with bf16, fp16 or fp32 weights" if quantized else ""


def _files(folder: Path) -> dict[str, str]:
    """The file that each tensor lies in."""
    try:
        if (folder / INDEX).is_file():
            listed: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
            return listed
        with safetensors.safe_open(folder / WHOLE, framework="pt") as file:
            return dict.fromkeys(file.keys(), WHOLE)
    except FileNotFoundError:
        raise WeightsError(f"{folder} has neither {INDEX} nor {WHOLE}") from None
    except (OSError, ValueError, KeyError, safetensors.SafetensorError) as error:
        raise WeightsError(f"the weights in {folder} cannot be read: {error}") from None


# ---- writing


def require_writable(folder: Path, model: ModelSpec, workload: Workload) -> dict[str, Any]:
    """Make `folder` if it is not there; what its config.json will say. Better asked before a training than after it.

    Raises:
        ModelError: no config.json describes this model.
        WeightsError: nothing is trained.
        OSError: the folder cannot be made.
    """
    if not trained.layers(model, workload):
        raise WeightsError("nothing is trained, so that there is nothing to export")
    config = write_config(model.to_dict())
    if ModelSpec.from_hf_config(config, model.name) != model:
        raise ModelError(f"{model.name}: no config.json of a {model.architecture} describes it")
    folder.mkdir(parents=True, exist_ok=True)
    return config


def write(folder: Path, model: ModelSpec, workload: Workload, weights: Callable[[int], Tensor]) -> None:
    """Write what is trained to `folder`; `weights(i)` is that of layer i, flat. Raises as `require_writable` does."""
    config = require_writable(folder, model, workload)
    if workload.lora_rank is not None:
        _write_adapters(folder, model, workload.lora_rank, weights)
        return
    files: dict[str, str] = {}
    total, count = 0, len(model.layers)
    for number, i in enumerate(model.layers, 1):
        flat = weights(i)
        parts = views(flat, file_shapes(model, i))
        file = f"model-{number:05d}-of-{count:05d}.safetensors"
        save_file(parts, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(parts, file)
        total += flat.nbytes
    _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": files})
    _write_json(folder / "config.json", {**config, "dtype": str(flat.dtype).removeprefix("torch.")})


def _write_adapters(folder: Path, model: ModelSpec, rank: int, adapters: Callable[[int], Tensor]) -> None:
    found: dict[str, Tensor] = {}
    for i in model.blocks:
        for name, part in views(adapters(i), model.adapter_shapes(i, rank)).items():
            found[f"base_model.model.{global_name(model, i, name)}"] = part
    save_file(found, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    targets = sorted({name.split(".")[-3] for name in found})
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": LORA_SCALE * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": targets,
    }
    _write_json(folder / "adapter_config.json", config)


def _write_json(path: Path, body: dict[str, Any]) -> None:
    path.write_text(json.dumps(body, indent=1) + "\n")
