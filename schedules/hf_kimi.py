"""What a Kimi Linear's `config.json` calls otherwise than others do; see `schedules.hf_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from schedules.model_checks import FULL, LINEAR, OF_LINEAR, ModelError, whole_number

ARCHITECTURE = "KimiLinearForCausalLM"
APART = "linear_attn_config"  # what says all of linear attention, in files; transformers may write it flat
KDA, OTHERS = "kda_layers", "full_attn_layers"  # the blocks of either attention there, counted from one
# By what linear attention has: its name apart, and flat.
NAMES = {
    "linear_num_key_heads": ("num_heads", "linear_num_heads"),
    "linear_num_value_heads": ("num_heads", "linear_num_heads"),
    "linear_key_head_dim": ("head_dim", "linear_head_dim"),
    "linear_value_head_dim": ("head_dim", "linear_head_dim"),
    "linear_conv_kernel_dim": ("short_conv_kernel_size", "linear_conv_kernel_dim"),
}
# By other names, as transformers calls them.
ALIKE = {"num_experts": "num_local_experts", "num_shared_experts": "n_shared_experts"}
# What its code does otherwise, or not at all, where a config sets it.
_USUAL: dict[str, Any] = {
    "attention_bias": False,
    "mla_use_nope": True,
    "moe_router_activation_func": "sigmoid",
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
}


def with_usual_names(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The config with the names that others have for the same. Raises ModelError for what no block does."""
    for key, usual in _USUAL.items():
        if config.get(key) not in (None, usual):
            raise ModelError(f"{name}: {key} of a {ARCHITECTURE} must be {usual!r}, not {config[key]!r}")
    apart = config.get(APART) or {}
    if not isinstance(apart, Mapping):
        raise ModelError(f"{name}: {APART} must be a dictionary, not {apart!r}")
    apart = {key: value for key, value in apart.items() if value is not None}
    found = {key: value for key, value in config.items() if not key.startswith("rope_")}  # nothing is turned
    stated = {key: apart.get(within, config.get(flat)) for key, (within, flat) in NAMES.items()}
    stated |= {key: config.get(other) for key, other in ALIKE.items() if config.get(key) is None}
    found |= {key: value for key, value in stated.items() if value is not None}
    if "num_experts" in found:
        whole_number("num_experts", found["num_experts"], name)
    if config.get("layer_types") is None:
        blocks = whole_number("num_hidden_layers", config.get("num_hidden_layers"), name)
        found["layer_types"] = _listed(apart, blocks, name)
    return found


def _listed(apart: Mapping[str, Any], blocks: int, name: str) -> list[str]:
    """Each block's attention; where nothing says it, as transformers has it."""
    if KDA not in apart and OTHERS not in apart:
        return [FULL if i and i % 4 == 0 else LINEAR for i in range(blocks)]
    linear, others = (apart.get(key, []) for key in (KDA, OTHERS))
    lists = isinstance(linear, (list, tuple)) and isinstance(others, (list, tuple))
    numbers = [*linear, *others] if lists else []
    if any(not isinstance(i, int) for i in numbers) or sorted(numbers) != list(range(1, blocks + 1)):
        raise ModelError(f"{name}: {KDA} and {OTHERS} of {APART} must name each of 1 to {blocks} once")
    return [LINEAR if i in linear else FULL for i in range(1, blocks + 1)]


def with_own_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse: what its own code reads, and transformers."""
    types = config["layer_types"]
    apart = {within: config[key] for key, (within, _) in NAMES.items() if key in config}
    apart[KDA] = [i for i, kind in enumerate(types, 1) if kind == LINEAR]
    apart[OTHERS] = [i for i, kind in enumerate(types, 1) if kind != LINEAR]
    not_there = (*OF_LINEAR, "layer_types", "rope_theta", "rope_scaling")
    return {**{key: value for key, value in config.items() if key not in not_there}, APART: apart, "mla_use_nope": True}
