"""What a Llama 4's `config.json` calls otherwise than others do; see `schedules.hf_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from schedules.model_checks import DENSE, SPARSE, ModelError, whole_number

ARCHITECTURE = "Llama4ForCausalLM"


def with_usual_names(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The config with the names that others have for the same.

    Its `intermediate_size` is an expert's, and `intermediate_size_mlp` that of blocks without experts; which blocks
    these are it lists, or states how many there are from one with experts to the next. Raises ModelError for what no
    block does.
    """
    settings: dict[str, Any] = {"interleave_moe_layer_step": 1, "intermediate_size_mlp": 16384}
    settings |= {key: value for key, value in config.items() if value is not None}
    for key in ("num_hidden_layers", "intermediate_size"):
        if key not in settings:
            raise ModelError(f"{name}: the config lacks {key!r}, which {ARCHITECTURE} needs")
    blocks = range(whole_number("num_hidden_layers", settings["num_hidden_layers"], name))
    if (listed := settings.get("moe_layers")) is None:
        step = whole_number("interleave_moe_layer_step", settings["interleave_moe_layer_step"], name)
        listed = blocks[step - 1 :: step]
    if not isinstance(listed, (list, tuple, range)) or any(i not in blocks for i in listed):
        raise ModelError(f"{name}: moe_layers must list blocks, not {listed!r}")
    types = [SPARSE if i in listed else DENSE for i in blocks]
    not_ours = ("layer_types", "moe_layers", *(["no_rope_layers"] if not settings.get("no_rope_layers") else []))
    found = {key: value for key, value in settings.items() if key not in not_ours}
    if "use_qk_norm" in settings:
        found["unit_qk_norm"] = settings["use_qk_norm"]
    if "attention_chunk_size" in config:
        found["attention_chunk_size"] = config["attention_chunk_size"] or 0
    if not settings.get("attn_temperature_tuning", True):
        found["floor_scale"] = 0
    return found | {
        "intermediate_size": settings["intermediate_size_mlp"],
        "moe_intermediate_size": settings["intermediate_size"],
        "mlp_layer_types": types if DENSE in types else [],
    }


def with_own_names(config: Mapping[str, Any], spec: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse, of a model that is given as ModelSpec.to_dict has it: what its own code reads, and transformers."""
    types = spec.get("mlp_layer_types") or [SPARSE] * spec["num_hidden_layers"]
    return {
        **{key: spec[key] for key in ("floor_scale", "attn_scale") if key in spec},
        **{key: value for key, value in config.items() if key != "moe_intermediate_size"},
        "intermediate_size": config["moe_intermediate_size"],
        "intermediate_size_mlp": config["intermediate_size"],
        "moe_layers": [i for i, kind in enumerate(types) if kind == SPARSE],
        "use_qk_norm": spec.get("unit_qk_norm", False),
        "attention_chunk_size": spec.get("attention_chunk_size"),
        "attn_temperature_tuning": "floor_scale" in spec,
    }
