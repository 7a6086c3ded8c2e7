"""What a Hugging Face `config.json` says of experts; see `schedules.hf_config`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from schedules.families import FAMILIES, GPT_OSS_ACTIVATION
from schedules.family import Experts
from schedules.model_checks import ModelError, whole_number

# What some families' config.json says of how experts are chosen, and of what they are given.
_CHOICE = ("routed_scaling_factor", "n_group", "topk_group", "moe_latent_size")


def written_experts(architecture: str, names: Experts, spec: Mapping[str, Any]) -> dict[str, Any]:
    """What a `config.json` says of the experts of a model, given as ModelSpec.to_dict has it."""
    family = FAMILIES[architecture]
    config: dict[str, Any] = {}
    if names.switch is not None:
        config[names.switch] = spec["num_experts"] > 0
        if not spec["num_experts"]:
            return config | _written_dense(names, spec)
    if not spec["num_experts"]:  # where some blocks have no MLP, and none has experts
        return config
    config |= {
        names.chosen: spec["num_experts_per_tok"],
        names.count: spec["num_experts"],
        names.width: spec["moe_intermediate_size"],
    }
    if "norm_topk_prob" in family.defaults:
        config["norm_topk_prob"] = spec["norm_topk_prob"]
    if names.shared_width is not None:
        config[names.shared_width] = spec["n_shared_experts"] * spec["moe_intermediate_size"]
    config |= {key: spec.get(key, family.defaults[key]) or None for key in _CHOICE if key in family.defaults}
    if names.shared is None:
        return config
    dense = spec.get("first_k_dense_replace", 0)
    config |= {
        names.shared: spec.get("n_shared_experts", 0),
        names.dense: dense,
        names.scaling: spec.get("routed_scaling_factor", 1.0),
        "n_group": spec.get("n_group", 1),
        "topk_group": spec.get("topk_group", 1),
    }
    if architecture == "Glm4MoeForCausalLM":
        config["use_qk_norm"] = spec["qk_norm"]
    if architecture in ("Glm4MoeLiteForCausalLM", "HYV3ForCausalLM"):
        config["mlp_layer_types"] = ["dense" if i < dense else "sparse" for i in range(spec["num_hidden_layers"])]
    if architecture == "DeepseekV2ForCausalLM":
        config["topk_method"] = "greedy" if config["n_group"] == 1 else "group_limited_greedy"
    return config


def _written_dense(names: Experts, spec: Mapping[str, Any]) -> dict[str, Any]:
    """The same where there are none: an MLP may be called as what all tokens are given beside experts."""
    config = {} if names.shared_width is None else {names.shared_width: spec["intermediate_size"]}
    return config | ({names.count: 0} if names.switch == names.count else {})


def read_experts(
    architecture: str, known: Experts, settings: Mapping[str, Any], need: Callable[[str], Any]
) -> dict[str, Any]:
    """The fields of ModelSpec that say what experts a model has, or how wide its MLP is where it has none.

    `settings` are the config's, with what transformers assumes where it is silent; `need` returns one of them. Raises
    ModelError where that is missing, or the config asks for something our experts do not do.
    """
    if known.switch is not None and not settings.get(known.switch):
        return {} if known.shared_width is None else {"intermediate_size": need(known.shared_width)}
    for name, value in GPT_OSS_ACTIVATION.items() if known.as_in_gpt_oss else ():
        if settings.get(name, value) != value:
            raise ModelError(f"{name} must be {value}, as gpt-oss' released models have it, not {settings[name]!r}")
    of_family = FAMILIES[architecture].defaults
    if "decoder_sparse_step" in of_family and (settings.get("mlp_only_layers") or settings["decoder_sparse_step"] != 1):
        raise ModelError(f"a {architecture} with dense blocks between its expert blocks is not supported")
    # configs saved by transformers 5 may have the field under the name Mixtral gives it
    named_otherwise = known.count not in settings and "num_local_experts" in settings
    count = "num_local_experts" if named_otherwise else known.count
    found = {
        "num_experts": need(count),
        "num_experts_per_tok": need(known.chosen),
        "moe_intermediate_size": need(known.width),
    }
    if "norm_topk_prob" in of_family:
        found["norm_topk_prob"] = settings["norm_topk_prob"]
    if known.shared_width is not None:
        found["n_shared_experts"] = _shared(known.shared_width, settings[known.shared_width], found)
    found |= {key: settings[key] for key in _CHOICE if key in of_family}
    if known.shared is not None:
        found |= _sharing(architecture, known, settings, need)
    return found


def _shared(key: str, width: Any, experts: Mapping[str, Any]) -> int:
    """How many experts are as wide together as that which is given all tokens, whose width the field `key` states."""
    whole_number(key, width, "the config")
    each = whole_number("moe_intermediate_size", experts["moe_intermediate_size"], "the config")
    if width % each:
        raise ModelError(f"{key} {width} is no multiple of moe_intermediate_size, {each}")
    return int(width // each)


def _sharing(
    architecture: str, names: Experts, settings: Mapping[str, Any], need: Callable[[str], Any]
) -> dict[str, Any]:
    """Of experts where so many as a field says are given all tokens, and the first blocks may have none."""
    sigmoid = FAMILIES[architecture].fixed.get("sigmoid_router", False)
    known: dict[str, tuple[Any, ...]] = {"scoring_func": ("sigmoid" if sigmoid else "softmax",), "moe_layer_freq": (1,)}
    if architecture == "DeepseekV2ForCausalLM":
        known |= {"topk_method": ("greedy", "group_limited_greedy"), "norm_topk_prob": (False,)}
    if architecture == "Ernie4_5_MoeForCausalLM":
        known |= {"moe_layer_interval": (1,), "moe_layer_end_index": (-1, need("num_hidden_layers") - 1)}
    if architecture == "Mistral4ForCausalLM":  # ranks groups otherwise
        known["n_group"] = (1,)
    for key, values in known.items():
        if settings.get(key, values[0]) not in values:
            named = " or ".join(map(repr, values))
            raise ModelError(f"{key} of a {architecture} must be {named}, not {settings[key]!r}")
    found = {
        "routed_scaling_factor": settings.get(names.scaling, 1.0),
        "n_shared_experts": need(str(names.shared)),
        "first_k_dense_replace": _dense(names, settings, need),
    }
    if settings.get("topk_method") != "greedy":  # which chooses from all
        found |= {key: settings.get(key, 1) for key in ("n_group", "topk_group")}
    if architecture == "Glm4MoeForCausalLM":
        found["qk_norm"] = settings.get("use_qk_norm", False)
    return found


def _dense(names: Experts, settings: Mapping[str, Any], need: Callable[[str], Any]) -> Any:
    """How many blocks, the first, have an MLP instead of experts; `mlp_layer_types` may say it of each."""
    if (types := settings.get("mlp_layer_types")) is None:
        return need(names.dense)
    if not isinstance(types, (list, tuple)) or any(kind not in ("dense", "sparse") for kind in types):
        raise ModelError(f"mlp_layer_types must list 'dense' or 'sparse' for each block, not {types!r}")
    count = types.count("dense")
    if "dense" in types[count:]:
        raise ModelError("a model with dense blocks after those with experts is not supported")
    return count
