"""Weights in the files of Hugging Face, where training may start.

Names are those that models are published under: those of `ModelSpec.parameter_shapes` with a layer's place before
them, but for experts, which lie in files one by one, and for projections that are fused or interleaved there. Files are
read a layer at a time; `megatrain.export` writes them.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from megatrain import quantised_files
from megatrain.quantised_files import InFile, Tile
from megatrain.template import views
from schedules.delta import DeltaNet
from schedules.errors import InputError
from schedules.families import MULTIPLIERS
from schedules.model import ModelError, ModelSpec
from schedules.seeing import sees

HEAD = "lm_head.weight"
WITHIN = "model.language_model."  # in place of "model.", within a model that sees images
APART = "language_model."  # before it, where that model has its language model apart
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # as peft calls them


class WeightsError(InputError):
    """A folder without a model's weights, or with others than the model's; the message names the first."""


def global_name(model: ModelSpec, i: int, name: str) -> str:
    """What transformers calls a parameter of layer i."""
    if model.is_block(i):
        return f"model.layers.{model.layer_number(i, name)}.{model.family.module_name(name)}"
    return name if name.startswith("lm_head.") else f"model.{model.family.module_name(name)}"


def _file_name(model: ModelSpec, i: int, name: str) -> str:
    """What files call it."""
    found = global_name(model, i, name)
    return f"{model.family.root}{found.removeprefix('model')}" if found.startswith("model.") else found


def adapter_name(model: ModelSpec, i: int, name: str, *, seeing: bool = False) -> str:
    """What peft calls a matrix of layer i's adapters; `seeing`: beside a model that sees images."""
    found = global_name(model, i, name)
    if seeing:
        found = f"{APART}{found}" if model.family.apart else found.replace("model.", WITHIN, 1)
    return f"base_model.model.{found}"


def are_seeing(adapters: Iterable[str]) -> bool:
    """Whether adapters of these names are beside a model that sees images."""
    return any(name.startswith((f"base_model.model.{WITHIN}", f"base_model.model.{APART}")) for name in adapters)


# Of models that see images those that are published with all experts' matrices in one tensor (in, out), and written by
# transformers (out, in).
TRANSPOSED = ("Qwen3VLMoeForConditionalGeneration",)


def file_shapes(model: ModelSpec, i: int, *, stacked: bool | None = None) -> dict[str, tuple[int, ...]]:
    """Name in files -> shape of each tensor that layer i is stored as, in the order in which they lie in its slab.

    `stacked`: all experts' matrices are one tensor; as they are published if None.
    """
    found: dict[str, tuple[int, ...]] = {}
    experts = model.experts
    gate, up, down = experts.matrices
    one_by_one = not (experts.as_in_gpt_oss or (experts.stacked if stacked is None else stacked))
    for name, shape in model.stored_shapes(i).items():
        if not (one_by_one and model.is_of_experts(name)):
            whole = _file_name(model, i, _in_files(model, i, name))
            rows, *rest = (1, *shape) if name == model.score_correction and experts.correction_row else shape
            found[whole] = (found.get(whole, (0,))[0] + rows, *rest)
            continue
        parts = (down,) if name.endswith("down_proj") else (gate, up) if model.gated_mlp else (up,)
        for e in range(shape[0]):
            for part in parts:
                expert = f"{experts.place}.experts.{e}.{part}.weight"
                found[_file_name(model, i, expert)] = (shape[1] // len(parts), shape[2])
    return found


def _in_files(model: ModelSpec, i: int, name: str) -> str:
    """What files call a parameter of block i, or the tensor that it is a part of."""
    experts = model.experts
    if model.family.interleaved and name in JOINED:
        return JOINED[name]
    if name == model.score_correction and experts.correction_in_files is not None:
        return f"{experts.correction_in_files}.{experts.correction_name}"
    for ours, theirs in experts.in_files.items():
        if name.endswith(ours):
            return name.removesuffix(ours) + theirs
    return name.replace("mlp.", f"{experts.place}.", 1) if model.has_experts(i) and name.startswith("mlp.") else name


# Linear attention's projections that families with `interleaved` files have in one: of each key head its queries,
# keys, values and what gates them, and of its value heads b and a (transformers, modeling_qwen3_next.py).
QKVZ, BA = "linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_ba.weight"
JOINED = {
    "linear_attn.in_proj_qkv.weight": QKVZ,
    "linear_attn.in_proj_z.weight": QKVZ,
    "linear_attn.in_proj_b.weight": BA,
    "linear_attn.in_proj_a.weight": BA,
}


def _interleaved(model: ModelSpec, i: int) -> dict[str, list[int]]:
    """Name in files -> how many rows of each kind a tensor has that is there in another order than in a slab."""
    delta = model.recurrence(i)
    if not (model.family.interleaved and isinstance(delta, DeltaNet)):
        return {}
    qkvz, ba = (global_name(model, i, name) for name in (QKVZ, BA))
    return {qkvz: [delta.key_width] * 2 + [delta.value_width] * 2, ba: [delta.value_heads] * 2}


def slab_of(model: ModelSpec, i: int, parts: Mapping[str, Tensor]) -> Tensor:
    """Layer i's parameters, flat, of the tensors that it is stored as: all of `file_shapes`, in its order."""
    found, heads = {name: part.flatten() for name, part in parts.items()}, model.linear_num_key_heads
    for name, kinds in _interleaved(model, i).items():
        by_head = found[name].view(heads, sum(kinds) // heads, -1)
        by_kind = torch.split(by_head, [rows // heads for rows in kinds], dim=1)
        found[name] = torch.cat([part.flatten() for part in by_kind])
    return torch.cat(list(found.values()))


def tensors_of(model: ModelSpec, i: int, slab: Tensor) -> dict[str, Tensor]:
    """The tensors that layer i is stored as; views into its slab, but where rows are in another order there."""
    found = views(slab, file_shapes(model, i))
    for name, kinds in _interleaved(model, i).items():
        by_kind = torch.split(found[name], kinds)
        by_head = [part.view(model.linear_num_key_heads, -1, part.shape[1]) for part in by_kind]
        found[name] = torch.cat(by_head, dim=1).flatten(0, 1)
    return found


# ---- reading


@dataclass(frozen=True)
class _Tensors:
    """The tensors of a folder, by what a language model alone calls them: the file of each, and its name there."""

    folder: Path
    files: dict[str, str]
    stored: dict[str, str]
    tile: Tile | None

    @classmethod
    def of(cls, folder: Path, config: Mapping[str, Any] | None) -> _Tensors:
        files = files_of(folder)
        stored, tile = {name: name for name in files}, None
        if config is not None:
            try:
                tile = quantised_files.tile(config)
            except ValueError as error:
                raise WeightsError(f"the weights in {folder} {error}: {PLAIN_ONLY}") from None
            if sees(config):
                stored = _of_text(files)
        return cls(folder, {name: files[there] for name, there in stored.items()}, stored, tile)

    def as_published(self, model: ModelSpec) -> _Tensors:
        """With MLPs of blocks without experts by their names where transformers writes them as if they had some."""
        place = model.experts.place
        dense = [i for i in model.blocks if model.num_experts and model.has_mlp(i) and not model.has_experts(i)]
        starts = {_file_name(model, i, f"{place}."): _file_name(model, i, "mlp.") for i in dense if place != "mlp"}

        def published(name: str) -> str:
            start = name[: name.find(f"{place}.") + len(place) + 1]
            return starts[start] + name.removeprefix(start) if start in starts else name

        files = {published(name): file for name, file in self.files.items()}
        return replace(self, files=files, stored={published(name): there for name, there in self.stored.items()})

    def headers(self, names: Iterable[str]) -> dict[str, InFile]:
        """What files say of these before they are read."""
        found: dict[str, InFile] = {}
        for file, within in by_file(self.files, names).items():
            try:
                with safetensors.safe_open(self.folder / file, framework="pt") as opened:
                    slices = {name: opened.get_slice(self.stored[name]) for name in within}
                    found |= {name: InFile(tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
            except (OSError, safetensors.SafetensorError) as error:
                raise WeightsError(f"{self.folder / file} cannot be read: {error}") from None
        return found

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """These as they lie there."""
        found: dict[str, Tensor] = {}
        for file, within in by_file(self.files, names).items():
            with safetensors.safe_open(self.folder / file, framework="pt") as opened:
                found |= {name: opened.get_tensor(self.stored[name]) for name in within}
        return found


def parameters(folder: Path, model: ModelSpec) -> Callable[[int], Tensor]:
    """Layer -> its parameters, fp32, flat, from `folder`, which has them in bf16, fp16, fp32 or fewer bits.

    Of a model that sees images, by its config.json, its language model is read, and nothing else is looked at. What
    lies there as transformers computes with it, all experts' matrices in one tensor, is read like what it writes. What
    `megatrain.quantised_files` knows is made whole.
    That all are there, in the model's shapes, and nothing else that the model would compute with, is checked at once.
    Raises WeightsError.
    """
    config = _config(folder)
    there = _Tensors.of(folder, config).as_published(model)
    files = there.files
    if config is not None:
        _require_same(config, folder, model)
    may_be_transposed = config is not None and sees(config) in TRANSPOSED
    transposed = set[str]()
    experts = f"{model.experts.modules}.{model.expert_first}"
    first = model.family.module_name(_in_files(model, model.largest_block, experts))
    stacked = any(name.endswith(f".{first}") for name in files)
    wanted = {name: shape for i in model.layers for name, shape in file_shapes(model, i, stacked=stacked).items()}
    parts = {name: quantised_files.lies_as(name, files) for name in wanted}
    for name, found in parts.items():
        if not found:
            raise WeightsError(
                f"the weights in {folder} lack {name}{_quantised(files) or _by_other_names(name, files)}"
            )
    needed = {part for found in parts.values() for part in found}
    for name in files:
        if name not in needed and not _not_needed(name, model):
            raise WeightsError(
                f"{folder} contains {name}, which {model.name} has no parameter for"
                + (_quantised(files) or "; remove it if it is not needed")
            )
    if model.tie_word_embeddings and HEAD in files:
        _require_tied(there, model)
    headers = there.headers(needed)
    for name, shape in wanted.items():
        try:
            found_shape = quantised_files.shape([headers[part] for part in parts[name]], there.tile, shape[-1])
        except ValueError as error:
            raise WeightsError(f"{name} in {folder} {error}: {PLAIN_ONLY}") from None
        if may_be_transposed and found_shape != shape and (found_shape[0], *found_shape[:0:-1]) == shape:
            transposed.add(name)
        elif found_shape != shape:
            raise WeightsError(f"{name} in {folder} has the shape {list(found_shape)}, the model's has {list(shape)}")

    def of_layer(i: int) -> Tensor:
        shapes = file_shapes(model, i, stacked=stacked)
        # The bias by which experts are chosen is made to lie around 0, which changes no choice: training may leave it
        # in a narrow band around numbers so large that in bf16 most experts' would be alike.
        correction = model.score_correction and _file_name(model, i, _in_files(model, i, model.score_correction))
        read, found = there.read(part for name in shapes for part in parts[name]), {}
        for name, shape in shapes.items():
            whole = quantised_files.widened([read.pop(part) for part in parts[name]], there.tile, shape[-1])
            flat = (whole.mT if name in transposed else whole).flatten()
            found[name] = flat - flat.median() if name == correction else flat
        return slab_of(model, i, found)

    return of_layer


def untrained(folder: Path, model: ModelSpec) -> Callable[[int, torch.dtype], dict[str, Tensor]]:
    """Layer -> what the files of `folder` have of it that no training here changes, by name, as it lies there.

    What lies there in fewer bits is made whole, of the type that is asked for.
    That all of it can be read is checked at once. Raises WeightsError.
    """
    if not model.family.untrained:
        return lambda i, dtype: {}
    there = _Tensors.of(folder, _config(folder))
    names: dict[int, list[str]] = {}
    for i in model.blocks:
        starts = tuple(_file_name(model, i, start) for start in model.family.untrained)
        of_block = (part for part in there.files if part.startswith(starts))
        whole = {quantised_files.whole_name(part) for part in of_block if not part.endswith(quantised_files.NOT_NEEDED)}
        names[i] = sorted(whole)
    parts = {name: quantised_files.lies_as(name, there.files) for of_block in names.values() for name in of_block}
    packed = [name for name in parts if f"{name}_shape" in there.files]
    headers = there.headers([*(part for found in parts.values() for part in found), *(f"{n}_shape" for n in packed)])
    columns = dict.fromkeys(parts, 0)
    columns |= {name: int(there.read([f"{name}_shape"])[f"{name}_shape"][-1]) for name in packed}
    for name, found in parts.items():
        try:
            quantised_files.shape([headers[part] for part in found], there.tile, columns[name])
        except ValueError as error:
            raise WeightsError(f"{name} in {folder} {error}: {PLAIN_ONLY}") from None

    def of_layer(i: int, dtype: torch.dtype) -> dict[str, Tensor]:
        found = there.read(part for name in names.get(i, ()) for part in parts[name])
        for name in names.get(i, ()):
            if parts[name] != (name,):
                pieces = [found.pop(part) for part in parts[name]]
                found[name] = quantised_files.widened(pieces, there.tile, columns[name]).to(dtype)
        return found

    return of_layer


def sees_images(folder: Path) -> bool:
    """Whether a folder's model sees images, by its config.json. Raises WeightsError where that cannot be read."""
    return sees(_config(folder) or {}) is not None


def _of_text(files: Iterable[str]) -> dict[str, str]:
    """What a language model's tensors are called where it is alone -> in files of a model that sees images."""
    before, after = APART, ""
    if any(name.startswith(WITHIN) for name in files):  # as some write it, the head apart
        before, after = WITHIN, "model."
    elif not any(name.startswith(before) for name in files):  # as where it is alone
        before = after = "model."
    found = {f"{after}{name.removeprefix(before)}": name for name in files if name.startswith(before)}
    return found | ({HEAD: HEAD} if after and HEAD in files else {})


def by_file(files: Mapping[str, str], names: Iterable[str]) -> dict[str, list[str]]:
    """A file's header is read anew each time that it is opened, and a mixture's has thousands of names."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(files[name], []).append(name)
    return found


PLAIN_ONLY = f"training begins with {quantised_files.TOLD}; export the model so"


def _config(folder: Path) -> dict[str, Any] | None:
    """What config.json says; None where there is none: a preset may say what the model is. Raises WeightsError."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsError(f"{folder / 'config.json'} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise WeightsError(f"{folder / 'config.json'} holds no JSON object")
    return config


# What a model computes with and no tensor's shape tells; and of that, what continued training may change on purpose.
NO_SHAPE_TELLS = (
    "num_attention_heads", "num_key_value_heads", "head_dim", "num_experts_per_tok", "norm_topk_prob", "no_rope_layers",
    "partial_rotary_factor", "hidden_act", "zero_centered_norms", "scale_embeddings", "query_pre_attn_scalar",
    "sigmoid_router", "routed_scaling_factor", "n_group", "topk_group", "attn_output_gate", "linear_num_key_heads",
    "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim", "shared_expert_gate", "rope_interleave",
    "global_head_dim", "num_global_key_value_heads", "final_logit_softcapping", "mamba_n_groups", "mamba_d_state",
    "mamba_dt_min", "corrected_softmax", "linear_channel_decay", *MULTIPLIERS,
)  # fmt: skip
MAY_BE_CHANGED = (
    "rms_norm_eps", "rope_theta", "rope_scaling", "rope_local_base_freq", "sliding_window", "layer_types",
    "index_topk",
)  # fmt: skip


def _require_same(config: dict[str, Any], folder: Path, model: ModelSpec) -> None:
    """Raises WeightsError where config.json describes another model; warns where only MAY_BE_CHANGED differ."""
    try:
        other = ModelSpec.from_hf_config(config, model.name)
    except ModelError as error:  # tensors may be alike all the same, and what is computed with them another thing
        raise WeightsError(
            f"the weights in {folder} are of another model than {model.name}, by its config.json: {error}"
        ) from None
    ours, theirs = model.all_values(), other.all_values()

    def differing(*keys: str) -> str:
        return "; ".join(f"{key} is {theirs[key]}, not {ours[key]}" for key in keys if theirs[key] != ours[key])

    told = differing(*NO_SHAPE_TELLS)
    if [file_shapes(other, i) for i in other.layers] != [file_shapes(model, i) for i in model.layers]:
        told = differing(*(key for key, value in theirs.items() if isinstance(value, (int, str))))
    if told:
        raise WeightsError(f"the weights in {folder} are of another model than {model.name}: {told}")
    if changed := differing(*MAY_BE_CHANGED):
        warnings.warn(
            f"{model.name} is not quite what the weights in {folder} were trained as: {changed}", stacklevel=3
        )


def _not_needed(name: str, model: ModelSpec) -> bool:
    """Of a tensor that no layer reads, whether the model has it otherwise, or does without it as transformers does."""
    predicts_more = model.family.predicts_more
    if predicts_more == "apart" and name.startswith("mtp."):
        return True
    in_block = re.match(r"model\.layers\.(\d+)\.", name)
    if predicts_more == "as a block" and in_block and int(in_block[1]) >= model.num_hidden_layers:
        return True
    if in_block and name.startswith(tuple(f"{in_block[0]}{start}" for start in model.family.untrained)):
        return True
    beside_others = name.endswith(("rotary_emb.inv_freq", *quantised_files.NOT_NEEDED))
    return beside_others or (model.tie_word_embeddings and name == HEAD)


def _require_tied(there: _Tensors, model: ModelSpec) -> None:
    """Raises WeightsError for a head that is another than the embedding: transformers computes with it then."""
    (table,) = file_shapes(model, model.embed)
    try:
        read = there.read((table, HEAD))
    except (OSError, KeyError, safetensors.SafetensorError) as error:
        raise WeightsError(f"{table} and {HEAD} in {there.folder} cannot be read: {error}") from None
    if not torch.equal(read[table], read[HEAD]):
        raise WeightsError(
            f"{there.folder} has a head, {HEAD}, that is not its embedding, and its model ties them: set "
            "tie_word_embeddings to false in its config.json, or remove the head if it is not needed"
        )


def _quantised(files: Mapping[str, str]) -> str:
    quantised = any(name.endswith(("_blocks", "_packed", "_scales", "_scale", "_scale_inv")) for name in files)
    return f": the weights are quantised; {PLAIN_ONLY}" if quantised else ""


def _by_other_names(name: str, files: Mapping[str, str]) -> str:
    """What the files call a parameter that may be this one; nothing where they have none like it."""
    like = [other for other in files if other.endswith(f".{name.removeprefix('model.')}") or f"model.{other}" == name]
    return f": they have {like[0]}; names must be those of a causal language model alone" if like else ""


def files_of(folder: Path) -> dict[str, str]:
    """The file that each tensor lies in."""
    try:
        if (folder / INDEX).is_file() and not (folder / WHOLE).is_file():  # as transformers chooses
            index = json.loads((folder / INDEX).read_text())
            listed = index.get("weight_map") if isinstance(index, dict) else None
            if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
                raise ValueError(f"the weight_map of {INDEX} does not name a file for each tensor")
            return listed
        with safetensors.safe_open(folder / WHOLE, framework="pt") as file:
            return dict.fromkeys(file.keys(), WHOLE)
    except FileNotFoundError:
        if not folder.is_dir():
            raise WeightsError(f"there is no folder {folder}") from None
        if (folder / WHOLE).exists():  # what safetensors raises for it, too
            raise WeightsError(f"{folder / WHOLE} may not be read: check its permissions") from None
        others = sorted(path.name for pattern in ("*.safetensors", "*.bin", "*.pth") for path in folder.glob(pattern))
        how = f", but {others[0]}: transformers' save_pretrained makes such files of it" if others else ""
        raise WeightsError(f"{folder} has neither {INDEX} nor {WHOLE}{how}") from None
    except (OSError, ValueError, RecursionError, safetensors.SafetensorError) as error:
        raise WeightsError(f"the weights in {folder} cannot be read: {error}") from None
