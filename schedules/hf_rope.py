"""What a Hugging Face `config.json` says of rotary embedding; see `schedules.hf_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from schedules.families import FAMILIES
from schedules.model_checks import LATE_QUERIES, MSCALE, ORIGINAL, ROPE_LISTS, ModelError, whole_number


def as_pairs(scaling: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """A rope_scaling as ModelSpec has it."""
    return tuple(sorted((k, tuple(v) if k in ROPE_LISTS and isinstance(v, list) else v) for k, v in scaling.items()))


def split_ropes(settings: Mapping[str, Any], name: str) -> tuple[dict[str, Any], Any]:
    """Settings with the rotary embedding of blocks without a window alone, and the base of those with one.

    transformers 5 writes `rope_parameters` for each; before, `rope_scaling` was for the first alone.
    """
    parameters = settings.get("rope_parameters") or {}
    if not isinstance(parameters, Mapping) or not all(isinstance(value, Mapping) for value in parameters.values()):
        raise ModelError(f"{name}: rope_parameters must say it for full_attention and sliding_attention apart")
    sliding = parameters.get("sliding_attention", {})
    if (kind := sliding.get("rope_type", sliding.get("type", "default"))) != "default":
        raise ModelError(f"{name}: rope_parameters of type {kind!r} for sliding_attention are not supported")
    full = parameters.get("full_attention") or settings.get("rope_scaling")
    rest = {key: value for key, value in settings.items() if key not in ("rope_parameters", ORIGINAL)}
    return {**rest, "rope_scaling": full}, sliding.get("rope_theta", settings["rope_local_base_freq"])


def read_rope(architecture: str, settings: Mapping[str, Any], name: str) -> tuple[Any, tuple[tuple[str, Any], ...]]:
    """Base and scaling, as ModelSpec has them. transformers 5 writes both into `rope_parameters`, older ones apart."""
    scaling = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise ModelError(f"{name}: rope_scaling must be a dictionary, not {scaling!r}")
    pairs = {key: value for key, value in scaling.items() if value is not None}
    kind = pairs.pop("type", "default")  # as the type was called before
    kind = pairs.setdefault("rope_type", kind)
    theta = pairs.pop("rope_theta", settings.get("rope_theta", 10000.0))
    if architecture == "Phi3ForCausalLM":
        pairs.pop("partial_rotary_factor", None)
        kind = "longrope" if kind in ("su", "yarn") else kind  # which its first configs call it
        if kind not in ("default", "longrope"):
            raise ModelError(f"{name}: rope_scaling of type {kind!r} is not supported in a Phi-3, only 'longrope'")
        pairs["rope_type"] = kind
    if architecture == "Ministral3ForCausalLM":
        pairs = _longer(pairs, name)
    if architecture == "Mistral4ForCausalLM":
        pairs = {key: pairs[key] for key in pairs if key not in ("partial_rotary_factor", "max_position_embeddings")}
    if kind == "default":
        return theta, ()
    if kind not in ("linear", "proportional"):  # as transformers has it: what stands beside rope_scaling counts first
        pairs[ORIGINAL] = settings.get(ORIGINAL, pairs.get(ORIGINAL, settings["max_position_embeddings"]))
    return theta, as_pairs(pairs)


def _longer(pairs: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The scaling of a Ministral 3, which turns no sharper the further it reaches, but multiplies late queries."""
    rest = {key: value for key, value in pairs.items() if key not in (*MSCALE, "max_position_embeddings")}
    of_tables, of_all = (pairs.get(key) for key in MSCALE)
    if rest.get("rope_type") != "yarn" or LATE_QUERIES not in rest or of_tables != of_all:
        raise ModelError(
            f"{name}: rope_parameters of a Ministral3ForCausalLM must be of type 'yarn', with {LATE_QUERIES}, and with "
            f"{' and '.join(MSCALE)} alike"
        )
    return rest if of_tables is None else {"attention_factor": 1.0, **rest}


def partial_factor(architecture: str, settings: Mapping[str, Any], name: str) -> Any:
    """Of each head's dimensions the part that is turned."""
    if not FAMILIES[architecture].partly_rotated:
        return 1.0
    parameters = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    if architecture == "MiniMaxM2ForCausalLM" and "rotary_dim" in settings:  # as its first configs have it
        of_head = whole_number("head_dim", settings["head_dim"], name)
        return whole_number("rotary_dim", settings["rotary_dim"], name) / of_head
    return parameters.get("partial_rotary_factor", settings.get("partial_rotary_factor", 1.0))
