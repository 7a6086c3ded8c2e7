"""What a Nemotron-H's `config.json` calls otherwise than others do; see `schedules.hf_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from schedules.model_checks import EXPERTS, FULL, LINEAR, MLP, ModelError

ARCHITECTURE = "NemotronHForCausalLM"
NAMES = {
    "mamba_n_heads": "mamba_num_heads",
    "mamba_d_head": "mamba_head_dim",
    "mamba_n_groups": "n_groups",
    "mamba_d_state": "ssm_state_size",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_min": "time_step_min",
    "mamba_conv_bias": "use_conv_bias",
    "rms_norm_eps": "layer_norm_epsilon",
    "hidden_act": "mlp_hidden_act",
}
KINDS = {"M": LINEAR, "*": FULL, "-": MLP, "E": EXPERTS}
_OLDER = {"mamba": LINEAR, "attention": FULL}
# What transformers does otherwise, or not at all, where a config sets it.
_USUAL: dict[str, Any] = {
    "mlp_bias": False,
    "use_bias": False,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "mamba_hidden_act": "silu",
    "n_shared_experts": 1,  # of the width that is stated
}


def with_usual_names(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The config with the names that others have for the same.

    Blocks are one letter each of `hybrid_override_pattern`, or listed, and their number follows. Raises ModelError for
    what no block of ours does.
    """
    for key, usual in _USUAL.items():
        if config.get(key, usual) != usual:
            raise ModelError(f"{name}: {key} of a {ARCHITECTURE} must be {usual!r}, not {config[key]!r}")
    types = _types(config, name)
    if "num_hidden_layers" in config and config["num_hidden_layers"] != len(types):
        raise ModelError(f"{name}: {len(types)} blocks are named, num_hidden_layers is {config['num_hidden_layers']!r}")
    known = {ours: config[theirs] for ours, theirs in NAMES.items() if theirs in config}
    rest = {key: value for key, value in config.items() if key not in NAMES.values()}
    return {**rest, **known, "layer_types": types, "num_hidden_layers": len(types)}


def _types(config: Mapping[str, Any], name: str) -> list[str]:
    listed = config.get("layers_block_type") or config.get("layer_types")
    if listed is not None:
        if not isinstance(listed, (list, tuple)):
            raise ModelError(f"{name}: layers_block_type must be a list, not {listed!r}")
        return [_OLDER.get(kind, kind) for kind in map(str, listed)]
    pattern = config.get("hybrid_override_pattern")
    if not isinstance(pattern, str) or not set(pattern) <= set(KINDS):
        raise ModelError(f"{name}: hybrid_override_pattern must be letters of {''.join(KINDS)!r}, not {pattern!r}")
    return [KINDS[letter] for letter in pattern]


def with_own_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse: what its own code reads, and transformers."""
    letters = {kind: letter for letter, kind in KINDS.items()}
    not_there = "layer_types", "rope_theta", "rope_scaling"
    found = {NAMES.get(key, key): value for key, value in config.items() if key not in not_there}
    return {**found, "hybrid_override_pattern": "".join(letters[kind] for kind in config["layer_types"])}
