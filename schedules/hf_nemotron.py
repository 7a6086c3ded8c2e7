"""What a Nemotron-H's `config.json` calls otherwise than others do; see `schedules.hf_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from schedules.model_checks import DENSE, FULL, LINEAR, NONE, SPARSE, ModelError

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
# What a layer is: its letter in a pattern, and what lists call it, since transformers 5 and before.
_ATTENTION = {"M": LINEAR, "*": FULL}
_MLP = {"-": DENSE, "E": SPARSE}
_LISTED = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "mlp": "-", "moe": "E"}
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

    Its layers are one letter each of `hybrid_override_pattern`, or listed, and their number follows: an MLP and the
    attention before it make a block of ours. Raises ModelError for what no block does.
    """
    for key, usual in _USUAL.items():
        if config.get(key) not in (None, usual):
            raise ModelError(f"{name}: {key} of a {ARCHITECTURE} must be {usual!r}, not {config[key]!r}")
    pattern = _pattern(config, name)
    if config.get("num_hidden_layers", len(pattern)) != len(pattern):
        raise ModelError(
            f"{name}: {len(pattern)} layers are named, num_hidden_layers is {config['num_hidden_layers']!r}"
        )
    blocks: list[tuple[str, str]] = []
    for letter in pattern:
        if letter in _ATTENTION:
            blocks.append((_ATTENTION[letter], NONE))
        elif blocks and blocks[-1][1] == NONE:
            blocks[-1] = blocks[-1][0], _MLP[letter]
        else:
            blocks.append((NONE, _MLP[letter]))
    known = {ours: config[theirs] for ours, theirs in NAMES.items() if theirs in config}
    rest = {key: value for key, value in config.items() if key not in NAMES.values()}
    types = {"layer_types": [of for of, _ in blocks], "mlp_layer_types": [mlp for _, mlp in blocks]}
    return {**rest, **known, **types, "num_hidden_layers": len(blocks)}


def _pattern(config: Mapping[str, Any], name: str) -> str:
    listed = config.get("layers_block_type") or config.get("layer_types")
    if listed is not None:
        if not isinstance(listed, (list, tuple)):
            raise ModelError(f"{name}: layers_block_type must be a list, not {listed!r}")
        if unknown := [kind for kind in map(str, listed) if kind not in _LISTED]:
            raise ModelError(f"{name}: layers_block_type holds {unknown[0]!r}, not one of {', '.join(_LISTED)}")
        return "".join(_LISTED[kind] for kind in listed)
    pattern, letters = config.get("hybrid_override_pattern"), {*_ATTENTION, *_MLP}
    if not isinstance(pattern, str) or not pattern or not set(pattern) <= letters:
        raise ModelError(f"{name}: hybrid_override_pattern must be letters of 'M*-E', not {pattern!r}")
    return pattern


def with_own_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse: what its own code reads, and transformers."""
    letters = {kind: letter for letter, kind in (_ATTENTION | _MLP).items()} | {NONE: ""}
    pairs = zip(config["layer_types"], config["mlp_layer_types"], strict=True)
    pattern = "".join(letters[of] + letters[mlp] for of, mlp in pairs)
    not_there = "layer_types", "mlp_layer_types", "rope_theta", "rope_scaling"
    found = {NAMES.get(key, key): value for key, value in config.items() if key not in not_there}
    return {**found, "hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern)}
