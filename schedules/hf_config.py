"""What a Hugging Face `config.json` says, in the fields of our ModelSpec.

What it leaves unsaid is in `schedules.families`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from schedules import hf_kimi, hf_llama4
from schedules.families import ENCODER_DECODERS, ENCODERS, FAMILIES, MODEL_TYPES, MULTIPLIERS
from schedules.family import Family
from schedules.hf_experts import read_experts, written_experts
from schedules.hf_nemotron import ARCHITECTURE as NEMOTRON
from schedules.hf_nemotron import with_own_names, with_usual_names
from schedules.hf_rope import partial_factor, read_rope, split_ropes
from schedules.model_checks import (
    FULL,
    LINEAR,
    OF_LINEAR,
    OF_MAMBA,
    ORIGINAL,
    SLIDING,
    SPARSE,
    ModelError,
    require_few_blocks,
    whole_number,
)
from schedules.seeing import language_model

# What transformers does where a config sets it, and we do not.
NOT_DONE = {
    "attention_dropout": "attention here drops nothing; 0 trains without",
    "residual_dropout": "what is added to the residual is never dropped here; 0 trains without",
    "resid_pdrop": "what is added to the residual is never dropped here; 0 trains without",
    "embd_pdrop": "embeddings are never dropped here; 0 trains without",
    "attn_logit_softcapping": "attention's logits are not bounded here",
    "final_logit_softcapping": "the head's logits are not bounded here",
    "use_bias": "projections here have biases by other names",
    "use_bidirectional_attention": "attention here sees no later token",
    "output_router_logits": "the loss here has no term that balances experts",
    "clip_qkv": "queries, keys and values are not bounded here",
    "router_jitter_noise": "routers here are given what the block before returned",
    "hidden_size_per_layer_input": "blocks here are not given embeddings of their own",
    "num_kv_shared_layers": "each block here has keys and values of its own",
}
NO_LIMITS = [0.0, math.inf], [0.0, {"__float__": "Infinity"}]  # of steps: as configs say so, and transformers writes it
OF_IMAGES = "vision"  # a value of use_bidirectional_attention, which concerns no text
AS_STATED = (  # fields of some families
    *MULTIPLIERS, "query_pre_attn_scalar", "index_topk", "scale_embeddings", "unit_qk_norm", "attention_chunk_size",
    "floor_scale", "attn_scale",
)  # fmt: skip
WIDTHS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")  # of latent attention

# Fields without a default, whose names are ours as well.
REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def read_config(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The keyword arguments of ModelSpec for `config`; of a model that sees images, of its language model.

    Raises ModelError when the architecture is not one of FAMILIES, a field is missing, or the config
    asks for something our blocks do not do.
    """
    config = language_model(config, name)
    architecture = _architecture(config, name)
    for ours, theirs in FAMILIES[architecture].names.items():
        if config.get(theirs) is not None:
            config = {**config, ours: config[theirs]}
    if architecture == NEMOTRON:
        config = with_usual_names(config, name)
    if architecture == hf_llama4.ARCHITECTURE:
        config = hf_llama4.with_usual_names(config, name)
    if architecture == hf_kimi.ARCHITECTURE:
        config = hf_kimi.with_usual_names(config, name)
    family = FAMILIES[architecture]
    settings = dict(family.defaults)
    # an explicit null means "the default" for most fields, but "none" for these
    none = ("sliding_window", "q_lora_rank")
    settings |= {key: value for key, value in config.items() if value is not None or key in none}

    def need(key: str) -> Any:
        if key not in settings:
            raise ModelError(f"{name}: the config lacks {key!r}, which {architecture} needs")
        return settings[key]

    heads = need("num_attention_heads")
    if not family.kv_for_each and "num_key_value_heads" not in config:
        need("num_key_value_heads")  # transformers has a default here, but a different one in each class
    latent = _latent(architecture, settings, name) if family.latent else {}
    if latent:  # whose config, where it has a head_dim, means that of the part that is turned
        settings["head_dim"] = latent["qk_nope_head_dim"] + latent["qk_rope_head_dim"]
    if "head_dim" not in settings:
        settings["head_dim"] = _divide(need("hidden_size"), heads, name)
    for key, lacks in NOT_DONE.items():
        if key == "final_logit_softcapping" and family.bends_logits:
            continue
        if (asked := settings.get(key)) and asked != OF_IMAGES:
            of = "" if asked is True else f" of {asked!r}"
            raise ModelError(f"{name}: {key}{of} is not supported: {lacks}")
    local = None
    if family.two_ropes:
        settings, local = split_ropes(settings, name)
    theta, scaling = read_rope(architecture, settings, name)
    blocks = require_few_blocks(need("num_hidden_layers"), name)
    listed_mlps = architecture in (NEMOTRON, hf_llama4.ARCHITECTURE)
    rotated = _rotated(architecture, settings, blocks, name)
    windows = _windows(architecture, settings, rotated or (1,) * blocks, name)
    return {
        "name": name,
        "architecture": architecture,
        **{key: need(key) for key in REQUIRED},
        "num_key_value_heads": settings.get("num_key_value_heads", heads),
        "head_dim": settings["head_dim"],
        "tie_word_embeddings": settings.get("tie_word_embeddings", False),
        "max_position_embeddings": settings["max_position_embeddings"],
        "rms_norm_eps": settings.get("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rope_local_base_freq": local,
        "hidden_act": settings.get(_activation(family), "silu"),
        **family.fixed,
        **_biases(family, settings),
        **latent,
        **_experts(architecture, settings, need),
        **windows,
        **(_global_heads(settings, windows["layer_types"], name) if family.two_heads else {}),
        **({"final_logit_softcapping": settings.get("final_logit_softcapping") or None} if family.bends_logits else {}),
        **(
            (_state_spaces if family.of_mamba else _linear)(architecture, settings, blocks, name)
            if family.hybrid
            else {}
        ),
        **{key: settings[key] for key in AS_STATED if key in family.defaults},
        **({"mlp_layer_types": tuple(settings["mlp_layer_types"])} if listed_mlps else {}),
        "no_rope_layers": rotated,
        "partial_rotary_factor": partial_factor(architecture, settings, name),
    }


SAME = (  # fields that mean the same in both
    *REQUIRED,
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "hidden_act",
    "sliding_window",
)


def write_config(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A `config.json` that `read_config` reads as this model, given as ModelSpec.to_dict has it.

    What a field cannot say is left out: read again, the model may be another.
    """
    architecture = spec["architecture"]
    family = FAMILIES[architecture]
    config = {
        "architectures": [architecture],
        "model_type": family.model_type,
        **{key: spec[key] for key in SAME},
        "rope_scaling": spec["rope_scaling"] or None,
        "pad_token_id": None,  # a class's own may lie outside of the vocabulary
    }
    if not spec["rope_scaling"] and "rope_scaling" in family.defaults:
        config["rope_scaling"] = {"rope_type": "default"}  # null would mean the architecture's own
    config |= {key: spec[key] for key in family.biases}
    # silent, it would ask for them
    config |= {key: type(family.defaults[key])() for key in NOT_DONE if key in family.defaults}
    config[_activation(family)] = config.pop("hidden_act")
    if "query_pre_attn_scalar" in family.defaults:
        config["query_pre_attn_scalar"] = spec.get("query_pre_attn_scalar", spec["head_dim"])
    if family.two_ropes:
        theta, scaling = config.pop("rope_theta"), config.pop("rope_scaling") or {"rope_type": "default"}
        config["rope_parameters"] = {
            "full_attention": {**scaling, "rope_theta": theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": spec.get("rope_local_base_freq", theta)},
        }
    if family.two_heads:
        config |= {
            "global_head_dim": spec.get("global_head_dim", spec["head_dim"]),
            "num_global_key_value_heads": spec.get("num_global_key_value_heads"),
            "attention_k_eq_v": spec.get("attention_k_eq_v", False),
        }
    if family.bends_logits:
        config["final_logit_softcapping"] = spec.get("final_logit_softcapping")
    if family.hybrid:
        config |= {key: spec[key] for key in (*OF_LINEAR, *OF_MAMBA) if spec.get(key)}
    if "mamba_expand" in family.defaults:
        config.setdefault("mamba_n_heads", 1)  # silent, it would ask for more than may share what no block has
        config["mamba_expand"] = config["mamba_n_heads"] * spec.get("mamba_d_head", 0) // spec["hidden_size"] or 1
    if "mamba_dt_min" in family.defaults:
        config["mamba_dt_min"] = spec.get("mamba_dt_min") or 0.0
    config |= {key: spec.get(key, 1.0) for key in MULTIPLIERS if key in family.defaults}
    if family.hybrid or (family.windows == "some" and not family.windows_switched):
        config["layer_types"] = spec["layer_types"] or [FULL] * spec["num_hidden_layers"]
    if family.rotated == "switched":
        config["position_embedding_type"] = "nope" if spec.get("no_rope_layers") else "rope"
    if family.rotated == "listed":
        config["no_rope_layers"] = spec.get("no_rope_layers", [1] * spec["num_hidden_layers"])
    if family.partly_rotated:
        config["partial_rotary_factor"] = spec.get("partial_rotary_factor", 1.0)
    if architecture == "Phi3ForCausalLM":
        config[ORIGINAL] = spec["rope_scaling"].get(ORIGINAL, spec["max_position_embeddings"])
    if family.windows_switched:
        config["use_sliding_window"] = spec["sliding_window"] is not None
        if spec["layer_types"]:
            config["layer_types"] = spec["layer_types"]
    if family.experts is not None:
        config |= written_experts(architecture, family.experts, spec)
    if architecture == "Mistral4ForCausalLM":  # from which transformers does not make it where there is a rope_scaling
        turned = {"partial_rotary_factor": spec["qk_rope_head_dim"] / spec["head_dim"]}
        config["rope_scaling"] = {**config["rope_scaling"], **turned}
    if "index_topk" in family.defaults:
        config["index_topk"] = spec.get("index_topk", 0)
    if family.latent:
        config |= {key: spec[key] for key in WIDTHS} | {"q_lora_rank": spec.get("q_lora_rank")}
        del config["head_dim"]
    if architecture == hf_llama4.ARCHITECTURE:
        return hf_llama4.with_own_names(config, spec)
    if architecture == NEMOTRON:
        return with_own_names({**config, "mlp_layer_types": spec["mlp_layer_types"]})
    if architecture == hf_kimi.ARCHITECTURE:
        config = hf_kimi.with_own_names(config)
    if "scale_embeddings" in family.defaults:
        config["scale_embeddings"] = spec.get("scale_embeddings", False)
    return {family.names.get(key, key): value for key, value in config.items()}


def _architecture(config: Mapping[str, Any], name: str) -> str:
    listed = config.get("architectures")
    if listed is None and (kind := config.get("model_type")) is not None:
        listed = [MODEL_TYPES[kind]] if isinstance(kind, str) and kind in MODEL_TYPES else None
        if not listed:
            known = ", ".join(MODEL_TYPES)
            raise ModelError(f"{name}: the config's model_type {kind!r} is not supported; supported are {known}")
    if not isinstance(listed, (list, tuple)) or len(listed) != 1 or not isinstance(listed[0], str):
        raise ModelError(f"{name}: the config must name one class in 'architectures', it has {listed!r}")
    found: str = listed[0]
    if found in FAMILIES:
        return found
    family = found.partition("For")[0].removesuffix("Model")
    if family in ENCODERS:
        raise ModelError(f"{name}: {found} is an encoder; MegaTrain trains decoders")
    if family in ENCODER_DECODERS:
        raise ModelError(f"{name}: {found} is an encoder-decoder; MegaTrain trains decoders")
    raise ModelError(f"{name}: {found} is not supported; supported are {', '.join(FAMILIES)}")


def _divide(hidden: Any, heads: Any, name: str) -> int:
    width, count = whole_number("hidden_size", hidden, name), whole_number("num_attention_heads", heads, name)
    if width % count:
        raise ModelError(f"{name}: hidden_size {width} is not divisible by {count} attention heads")
    return width // count


def _activation(family: Family) -> str:
    """What a config calls hidden_act."""
    return "hidden_activation" if "hidden_activation" in family.defaults else "hidden_act"


def _biases(family: Family, settings: Mapping[str, Any]) -> dict[str, Any]:
    stated = {key: settings.get(key, False) for key in family.biases}
    if "attention_bias" in stated:
        stated.setdefault("attention_out_bias", family.out_bias and stated["attention_bias"])
    return stated


def _experts(architecture: str, settings: Mapping[str, Any], need: Callable[[str], Any]) -> dict[str, Any]:
    family = FAMILIES[architecture]
    if family.experts is None:
        return {}
    if family.branches_apart and SPARSE not in settings["mlp_layer_types"]:
        return {"sigmoid_router": False}  # in place of what is fixed where there are some
    return read_experts(architecture, family.experts, settings, need)


def _latent(architecture: str, settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Its widths, where attention is latent."""
    rope = settings.get("rope_parameters") or settings.get("rope_scaling")
    stated = {**settings, **(rope if isinstance(rope, Mapping) else {})}
    known: dict[str, Any] = {"attention_bias": False, "mlp_bias": False, "rope_interleave": True}
    if architecture != "Mistral4ForCausalLM":  # which states what follows from its heads
        known["partial_rotary_factor"] = 1
    for key, value in known.items():
        if stated.get(key, value) != value:
            raise ModelError(f"{name}: {key} of a {architecture} must be {value}, not {stated[key]!r}")
    found = {key: whole_number(key, settings[key], name) for key in WIDTHS}
    return found | {"q_lora_rank": settings["q_lora_rank"] or 0}


def _linear(architecture: str, settings: Mapping[str, Any], blocks: int, name: str) -> dict[str, Any]:
    """Which blocks have linear attention, and its heads; nothing where none has."""
    for key, known in (("attn_output_gate", (True,)), ("output_gate_type", ("swish", "silu"))):
        if settings.get(key, known[0]) not in known:
            raise ModelError(f"{name}: {key} of a {architecture} must be {known[0]!r}, not {settings[key]!r}")
    if (listed := settings.get("layer_types")) is None:
        interval = whole_number("full_attention_interval", settings["full_attention_interval"], name)
        listed = [LINEAR if (i + 1) % interval else FULL for i in range(blocks)]
    types = tuple(_listed("layer_types", listed, name))
    if LINEAR not in types:
        return {"layer_types": types}
    return {"layer_types": types, **{key: settings[key] for key in OF_LINEAR}}


def _state_spaces(architecture: str, settings: Mapping[str, Any], blocks: int, name: str) -> dict[str, Any]:
    """Which blocks have a state space, and its heads; nothing where none has."""
    for key, known in (("mamba_conv_bias", True), ("mamba_proj_bias", False), ("normalization_function", "rmsnorm")):
        if settings.get(key, known) != known:
            raise ModelError(f"{name}: {key} of a {architecture} must be {known!r}, not {settings[key]!r}")
    if (limit := settings.get("time_step_limit")) not in (None, *NO_LIMITS):
        raise ModelError(f"{name}: a time_step_limit of {limit!r} is not supported: steps are not bounded here")
    listed = settings.get("layer_types", settings.get("layers_block_type", [LINEAR] * blocks))
    older = {"mamba": LINEAR, "attention": FULL}
    types = tuple(older.get(kind, kind) for kind in map(str, _listed("layer_types", listed, name)))
    if LINEAR not in types:
        return {"layer_types": types}
    found = {key: settings[key] for key in OF_MAMBA}
    of_family = FAMILIES[architecture].defaults
    if "mamba_dt_min" in of_family:
        found["mamba_dt_min"] = settings["mamba_dt_min"] or None
    if "mamba_expand" not in of_family:
        return {"layer_types": types, **found}
    keys = ("mamba_n_heads", "mamba_expand", "hidden_size")
    heads, expand, hidden = (whole_number(key, settings[key], name) for key in keys)
    if found["mamba_d_head"] == "auto":
        found["mamba_d_head"] = expand * hidden // heads
    if heads * whole_number("mamba_d_head", found["mamba_d_head"], name) != expand * hidden:
        raise ModelError(
            f"{name}: {heads} heads of mamba_d_head {found['mamba_d_head']} are not mamba_expand {expand} times "
            f"hidden_size {hidden}"
        )
    return {"layer_types": types, **found}


def _global_heads(settings: Mapping[str, Any], types: Sequence[str], name: str) -> dict[str, Any]:
    """The heads of blocks without a window."""
    both, of_keys = settings.get("attention_k_eq_v", False), settings["num_key_value_heads"]
    if "per_layer_config" in settings:
        same = {"head_dim": settings["head_dim"], "num_key_value_heads": of_keys}
        stated = same | _of_full_blocks(settings["per_layer_config"], types, name)
    else:
        of_keys = (both and settings.get("num_global_key_value_heads")) or of_keys
        stated = {"head_dim": settings["global_head_dim"], "num_key_value_heads": of_keys}
    return {
        "global_head_dim": stated["head_dim"],
        "num_global_key_value_heads": stated["num_key_value_heads"],
        "attention_k_eq_v": both,
    }


def _of_full_blocks(listed: Any, types: Sequence[str], name: str) -> dict[str, Any]:
    """What `per_layer_config`, which transformers 5 writes, says of each block without a window: what differs there."""
    full = {str(i) for i, kind in enumerate(types) if kind == FULL}
    if listed == {}:
        return {}
    first = next(iter(listed.values()), None) if isinstance(listed, Mapping) else None
    if not isinstance(first, Mapping) or set(map(str, listed)) != full or any(of != first for of in listed.values()):
        raise ModelError(f"{name}: per_layer_config must say the same of each block without a window, and of no other")
    if others := sorted(set(first) - {"head_dim", "num_key_value_heads"}):
        raise ModelError(f"{name}: per_layer_config with {others[0]} is not supported")
    return dict(first)


def _rotated(architecture: str, settings: Mapping[str, Any], blocks: int, name: str) -> tuple[int, ...]:
    """A 1 for each block with rotary embedding, a 0 for each without; empty where all have it."""
    family = FAMILIES[architecture]
    if family.rotated == "in windows":
        types = _windows(architecture, settings, (1,) * blocks, name).get("layer_types", ())
        return tuple(int(kind == SLIDING) for kind in types)
    if family.rotated == "all" or settings.get("position_embedding_type") == "rope":
        return ()
    if family.rotated in ("none", "switched"):
        return (0,) * blocks
    if "no_rope_layers" in settings:
        found = tuple(_listed("no_rope_layers", settings["no_rope_layers"], name)[:blocks])  # no more is read
        if len(found) < blocks:
            raise ModelError(f"{name}: no_rope_layers names {len(found)} blocks, num_hidden_layers is {blocks}")
    else:
        interval = whole_number("no_rope_layer_interval", settings["no_rope_layer_interval"], name)
        found = tuple(int((i + 1) % interval != 0) for i in range(blocks))
    return () if all(has == 1 for has in found) else found


def _listed(key: str, value: Any, name: str) -> list[Any] | tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise ModelError(f"{name}: {key} must be a list, not {value!r}")
    return value


def _windows(architecture: str, settings: Mapping[str, Any], rotated: tuple[int, ...], name: str) -> dict[str, Any]:
    family, window = FAMILIES[architecture], settings.get("sliding_window")
    if window is None and family.two_ropes:
        raise ModelError(f"{name}: {architecture} needs a sliding_window")
    if window is None and architecture == "AfmoeForCausalLM":  # whose other blocks have no rotary embedding
        raise ModelError(f"{name}: {architecture} needs a sliding_window")
    if family.windows == "none" or window is None:
        return {}
    types = settings.get("layer_types")
    if types is not None:
        types = _listed("layer_types", types, name)
    if family.windows_switched and not settings.get("use_sliding_window", False):
        if architecture == "SmolLM3ForCausalLM" and "sliding_attention" in (types or ()):
            raise ModelError(
                f"{name}: layer_types with 'sliding_attention' needs use_sliding_window: without it transformers' "
                "kernels do not agree on what it means"
            )
        return {}
    if family.windows == "all":
        return {"sliding_window": window}
    if types is None:
        sliding = _sliding(architecture, settings, rotated, name)
        types = ["sliding_attention" if slides else "full_attention" for slides in sliding]
    if family.two_heads:  # as transformers has it
        types = [*types[:-1], FULL]
    return {"sliding_window": window, "layer_types": tuple(types)}


def _sliding(architecture: str, settings: Mapping[str, Any], rotated: tuple[int, ...], name: str) -> list[bool]:
    """Which blocks have a window, where a config does not list them."""
    if FAMILIES[architecture].rotated == "listed":
        return [not has for has in rotated]
    if architecture == "CwmForCausalLM":
        return [i % 4 != 0 for i in range(len(rotated))]
    if "sliding_window_pattern" in settings:
        pattern = whole_number("sliding_window_pattern", settings["sliding_window_pattern"], name)
        return [(i + 1) % pattern != 0 for i in range(len(rotated))]
    first = whole_number("max_window_layers", settings.get("max_window_layers", 28), name, least=0)
    return [i >= first for i in range(len(rotated))]
