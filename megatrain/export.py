"""Weights written in the files of Hugging Face: a file per layer with an index, or adapters as peft reads them.

They are written apart, and take their places when all are there. What an export that was ended from outside has left is
removed by the next.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from megatrain.checkpoint import Diverged, all_finite, require_apart
from megatrain.checksum import checksum
from megatrain.hf import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    INDEX,
    WeightsError,
    adapter_name,
    are_seeing,
    by_file,
    file_shapes,
    files_of,
    sees_images,
    slab_of,
    tensors_of,
    untrained,
)
from megatrain.linear import LORA_SCALE
from megatrain.template import views
from megatrain.tensor_file import save_file
from schedules import trained
from schedules.errors import Refused
from schedules.files import sync
from schedules.hf_config import write_config
from schedules.model import ModelError, ModelSpec
from schedules.workload import Workload

PARTIAL = ".export.partial"  # a folder where files are written before they take their places
LEAVING = "leaving.json"  # there, from when they begin to: their names
BESIDE = (  # what a folder of weights has beside them that training leaves as it is
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "*.bpe.model",
    "tekken.json", "chat_template*", "generation_config.json",
)  # fmt: skip
ITS_OWN = (  # what of its config.json no schedule depends on: special tokens, and of indexers sizes and places
    "bos_token_id", "eos_token_id", "pad_token_id", "index_n_heads", "index_head_dim", "indexer_types",
    "index_topk_freq", "index_skip_topk_offset", "index_topk_pattern",
)  # fmt: skip


class NotExported(Refused):
    """Weights that could not be written; nothing of them is left behind."""


def require_writable(folder: Path, model: ModelSpec, workload: Workload) -> dict[str, Any]:
    """Make `folder` if it is not there; what its config.json will say. Better asked before a training than after it.

    Raises:
        ModelError: no config.json describes this model.
        WeightsError: nothing is trained, or the folder has weights already.
        CheckpointError: the folder is a checkpoint or in one.
        OSError: the folder cannot be made.
    """
    if not trained.layers(model, workload):
        raise WeightsError("nothing is trained, so that there is nothing to export")
    config = write_config(model.to_dict())
    if ModelSpec.from_hf_config(config, model.name) != model:
        raise ModelError(f"{model.name}: no config.json of a {model.architecture} describes it")
    require_apart(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _clear(folder)
    there = [path for pattern in ("*.safetensors", "*.bin") for path in sorted(folder.glob(pattern))]
    if there:
        raise WeightsError(f"{folder} has weights already, {there[0].name}: export to another folder, or remove them")
    return config


def written_bytes(model: ModelSpec, workload: Workload) -> int:
    """What `write` takes on a drive, but for some kilobytes."""
    params = sum(trained.params(model, workload, i) for i in trained.layers(model, workload))
    return params * workload.bytes.weight


def write(
    folder: Path, model: ModelSpec, workload: Workload, weights: Callable[[int], Tensor], base: Path | None = None
) -> None:
    """Write what is trained to `folder`; `weights(i)` is that of layer i, flat, `base` where the training began.

    A model gets the tokenizer and the special tokens of that folder, and what no training here changes; adapters its
    path.

    Raises:
        NotExported: not all could be written, for want of room perhaps.
        Diverged: some numbers are not finite.
        ModelError, WeightsError, OSError: see `require_writable`.
    """
    config = require_writable(folder, model, workload)

    def finite(i: int) -> Tensor:
        found = weights(i)
        if not all_finite(found):
            raise Diverged(f"the weights of layer {model.layer_name(i)} are not finite and are not exported")
        return found

    partial = folder / PARTIAL
    try:
        partial.mkdir()
        if workload.lora_rank is not None:
            _write_adapters(partial, model, workload.lora_rank, finite, base)
        else:
            _write_model(partial, model, config, finite, base)
        written = sorted(partial.iterdir())
        for path in written:
            sync(path)
        _write_json(partial / LEAVING, [path.name for path in written])
        sync(partial / LEAVING)
        for path in written:
            path.replace(folder / path.name)
        sync(folder)
        (partial / LEAVING).unlink()  # all are where they belong
    except BaseException as error:  # an interrupt too
        with suppress(OSError):
            _clear(folder)
        if not isinstance(error, (OSError, safetensors.SafetensorError)):
            raise
        raise NotExported(f"the weights could not be exported to {folder}: {error}") from None
    shutil.rmtree(partial, ignore_errors=True)


def _clear(folder: Path) -> None:
    """Remove what an export that did not come to its end has left: what it wrote apart, and weights in their place."""
    partial = folder / PARTIAL
    with suppress(FileNotFoundError, ValueError):  # before it was whole none has left
        for name in json.loads((partial / LEAVING).read_text()):
            if name.endswith(".safetensors"):
                (folder / name).unlink(missing_ok=True)
    if partial.is_dir():
        shutil.rmtree(partial)


def is_of(folder: Path, model: ModelSpec, workload: Workload, checksums: Mapping[str, Mapping[str, int]]) -> bool:
    """Whether the weights, or adapters, in `folder` are to the bit those of a checkpoint with these checksums.

    Not of an export that has not come to its end, nor where nothing is trained.
    """
    if (folder / PARTIAL / LEAVING).exists():
        return False
    layers = trained.layers(model, workload)
    try:
        adapters = workload.lora_rank is not None
        files = _adapters_in(folder) if adapters else files_of(folder)
        seeing = are_seeing(files)
        for i in layers:
            names = [*file_shapes(model, i)]
            if adapters:
                names = [adapter_name(model, i, name, seeing=seeing) for name in trained.shapes(model, workload, i)]
            parts = dict.fromkeys(names, torch.empty(0))
            for file, of in by_file(files, names).items():
                with safetensors.safe_open(folder / file, framework="pt") as opened:
                    parts |= {name: opened.get_tensor(name).flatten() for name in of}
            slab = torch.cat(list(parts.values())) if adapters else slab_of(model, i, parts)
            if checksum(slab) != checksums[model.layer_name(i)]["weights"]:
                return False
    except (OSError, KeyError, WeightsError, safetensors.SafetensorError):
        return False
    return bool(layers)


def _adapters_in(folder: Path) -> dict[str, str]:
    with safetensors.safe_open(folder / ADAPTER_WEIGHTS, framework="pt") as opened:
        return dict.fromkeys(opened.keys(), ADAPTER_WEIGHTS)


def _write_model(
    folder: Path, model: ModelSpec, config: dict[str, Any], weights: Callable[[int], Tensor], base: Path | None
) -> None:
    files: dict[str, str] = {}
    total, count = 0, len(model.layers)
    beside = _beside(base, model)
    for number, i in enumerate(model.layers, 1):
        flat = weights(i)
        parts = tensors_of(model, i, flat) | beside(i, flat.dtype)
        file = f"model-{number:05d}-of-{count:05d}.safetensors"
        save_file(parts, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(parts, file)
        total += sum(part.nbytes for part in parts.values())
    _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": files})
    if base is not None:
        config = {**config, **_its_own(base)}
        if base.resolve() != folder.resolve().parent:  # where all of it is already
            _copy_what_lies_beside(base, folder)
    _write_json(folder / "config.json", {**config, "dtype": str(flat.dtype).removeprefix("torch.")})


def _beside(base: Path | None, model: ModelSpec) -> Callable[[int, torch.dtype], dict[str, Tensor]]:
    """Layer -> its tensors that no training here changes. Warns where they cannot be read: what was trained is worth
    more."""
    if base is not None:
        try:
            return untrained(base, model)
        except WeightsError as error:
            warnings.warn(f"the export lacks what was not trained: {error}", stacklevel=2)
    return lambda i, dtype: {}


def _copy_what_lies_beside(base: Path, folder: Path) -> None:
    """Warns of a file that cannot be copied: what was trained is worth more."""
    for path in sorted({path for pattern in BESIDE for path in base.glob(pattern) if path.is_file()}):
        try:
            shutil.copyfile(path, folder / path.name)
        except OSError as error:
            (folder / path.name).unlink(missing_ok=True)
            warnings.warn(f"the export lacks {path}, which cannot be copied: {error.strerror or error}", stacklevel=2)


def _its_own(base: Path) -> dict[str, Any]:
    """What the config.json of a folder says that a model's does not; nothing where there is none."""
    try:
        found = json.loads((base / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # weights alone were asked of that folder
        return {}
    if not isinstance(found, dict):
        return {}
    text = found.get("text_config")  # of a model that sees images
    found = (text if isinstance(text, dict) else {}) | found
    return {key: found[key] for key in ITS_OWN if key in found}


def _write_adapters(
    folder: Path, model: ModelSpec, rank: int, adapters: Callable[[int], Tensor], base: Path | None
) -> None:
    found: dict[str, Tensor] = {}
    seeing = base is not None and sees_images(base)
    for i in model.blocks:
        for name, part in views(adapters(i), model.adapter_shapes(i, rank)).items():
            found[adapter_name(model, i, name, seeing=seeing)] = part
    save_file(found, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    targets = sorted({name.split(".")[-3] for name in found})
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": LORA_SCALE * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": targets,
        **({} if base is None else {"base_model_name_or_path": str(base.resolve())}),
    }
    _write_json(folder / ADAPTER_CONFIG, config)


def _write_json(path: Path, body: dict[str, Any] | list[str]) -> None:
    path.write_text(json.dumps(body, indent=1) + "\n")
