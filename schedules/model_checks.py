"""What a description of a model must be to have a meaning; `schedules.hf_config` reads it from a `config.json`."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from schedules.errors import InputError
from schedules.families import ACTIVATIONS, FAMILIES, SQUARED
from schedules.whole_numbers import fault
from schedules.words import plain

if TYPE_CHECKING:
    from schedules.model import ModelSpec


class ModelError(InputError):
    """A model that cannot be described, or that MegaTrain cannot train; the message says why."""


FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
DENSE, SPARSE = "dense", "sparse"  # of MLPs: experts
NONE = "none"  # of either
PER_BLOCK = ("layer_types", "no_rope_layers", "mlp_layer_types")  # fields with a value for each block, or empty
_MAY_BE_NONE = (  # counts that may be 0
    "num_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts", "first_k_dense_replace",
    "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "linear_num_key_heads",
    "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim",
    "global_head_dim", "num_global_key_value_heads", "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state",
    "mamba_d_conv", "moe_latent_size", "index_topk", "attention_chunk_size", "floor_scale",
)  # fmt: skip
# What a state space needs.
OF_MAMBA = ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
OF_LINEAR = (  # what linear attention needs
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim",
)  # fmt: skip
_OF_LATENT = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")  # what latent attention needs
ORIGINAL, PARTIAL = "original_max_position_embeddings", "partial_rotary_factor"
# What each kind of rope_scaling must have, and what else of it is a number.
ROPE_NEEDS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL),
    "yarn": ("factor", ORIGINAL),
    "longrope": ("short_factor", "long_factor", ORIGINAL),
    "proportional": (PARTIAL,),
}
ROPE_LISTS = ("short_factor", "long_factor")  # a number for each pair of dimensions
ROPE_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", ORIGINAL, "attention_factor", "beta_fast", "beta_slow")
LATE_QUERIES = "llama_4_scaling_beta"  # a number: by how much queries beyond the original length are multiplied
MSCALE = ("mscale", "mscale_all_dim")  # numbers, too; 0 is as if they were not there
MOST = 3.4028234663852886e38  # in fp32
MOST_BLOCKS = 1000  # eight times as many as the deepest models have


def require_meaning(model: ModelSpec) -> None:
    """Raises ModelError when a value has no meaning, or none beside the others. Makes whole numbers floats in fields of
    these."""
    for field in fields(model):
        _check_type(model, field.name, str(field.type), getattr(model, field.name))
    require_few_blocks(model.num_hidden_layers, model.name)
    if model.architecture not in FAMILIES:
        raise ModelError(f"{model.name}: architecture {model.architecture!r} is not supported")
    if model.num_attention_heads % model.num_key_value_heads:
        raise ModelError(
            f"{model.name}: {model.num_attention_heads} attention heads cannot share "
            f"{model.num_key_value_heads} key-value heads evenly"
        )
    if model.head_dim % 2:
        raise ModelError(f"{model.name}: head_dim {model.head_dim} is odd; rotary embedding needs pairs")
    _check_latent(model)
    dim = model.global_head_dim or model.head_dim
    if model.rotary_dim % 2 or not 2 <= model.rotary_dim <= dim:
        raise ModelError(
            f"{model.name}: partial_rotary_factor {model.partial_rotary_factor} turns {model.rotary_dim} of "
            f"{dim} dimensions; rotary embedding needs pairs of them"
        )
    if not (model.pre_norm or model.post_norm):
        raise ModelError(f"{model.name}: pre_norm and post_norm are both false: a block needs norms")
    if model.fused_projections and (model.attention_bias or model.mlp_bias or model.num_experts):
        raise ModelError(f"{model.name}: fused_projections with biases or experts are not supported")
    if model.fused_gate_up and (model.mlp_bias or model.fused_projections):
        raise ModelError(f"{model.name}: fused_gate_up with mlp_bias or fused_projections is not supported")
    if not model.gated_mlp and (model.fused_gate_up or model.fused_projections or model.hidden_act != SQUARED):
        raise ModelError(f"{model.name}: an MLP without a gate has a matrix of its own, and the activation {SQUARED!r}")
    gpt_oss = model.num_experts and model.experts.as_in_gpt_oss
    recurrence = "a state space" if model.mamba_n_heads else "linear attention"
    silu_alone = "gpt-oss' experts" if gpt_oss else recurrence if LINEAR in model.layer_types else ""
    if model.gated_mlp and (model.hidden_act not in ACTIVATIONS or (silu_alone and model.hidden_act != "silu")):
        known = f"'silu' with {silu_alone}" if silu_alone else " and ".join(map(repr, ACTIVATIONS))
        raise ModelError(f"{model.name}: hidden_act {model.hidden_act!r} is not supported, only {known}")
    if model.scale_embeddings and model.embedding_multiplier != 1:
        raise ModelError(f"{model.name}: scale_embeddings with an embedding_multiplier is not supported")
    if model.zero_centered_norms and model.logits_scaling != 1:
        raise ModelError(f"{model.name}: zero_centered_norms with logits_scaling are not supported")
    if model.attention_multiplier is not None and model.query_pre_attn_scalar is not None:
        raise ModelError(f"{model.name}: attention_multiplier and query_pre_attn_scalar say the same: give one")
    _check_experts(model)
    _check_attention(model)
    check_rope(model.rope_scaling, model.rope_theta, model.rotary_dim // 2, model.name, mscale=model.latent is not None)


def _check_type(model: ModelSpec, name: str, kind: str, value: object) -> None:
    optional = name in _MAY_BE_NONE
    if kind == "bool" and not isinstance(value, bool):
        raise ModelError(f"{model.name}: {name} must be true or false, not {value!r}")
    counts = kind == "int" or (kind == "int | None" and value is not None)
    if counts and (wrong := fault(value, least=0 if optional else 1)):
        raise ModelError(f"{model.name}: {name} {wrong}")
    if kind == "float" or (kind == "float | None" and value is not None):
        if not positive(value):
            raise ModelError(f"{model.name}: {name} must be a positive finite number, not {value!r}")
        object.__setattr__(model, name, float(value))  # type: ignore[arg-type]
    if kind == "str" and not (isinstance(value, str) and value and plain(value) == value):
        raise ModelError(f"{name} of a model must be a non-empty string that can be shown, not {value!r}")


def _check_experts(model: ModelSpec) -> None:
    if not model.num_experts:
        usual = {field.name: field.default for field in fields(model)}
        for key in (
            "sigmoid_router", "corrected_softmax", "n_shared_experts", "first_k_dense_replace", "n_group", "topk_group",
            "shared_expert_gate", "moe_latent_size",
        ):  # fmt: skip
            if getattr(model, key) != usual[key]:
                raise ModelError(f"{model.name}: {key} is {getattr(model, key)}, and num_experts is 0")
        return
    if not 1 <= model.num_experts_per_tok <= model.num_experts:
        raise ModelError(
            f"{model.name}: num_experts_per_tok is {model.num_experts_per_tok}, "
            f"which is not between 1 and num_experts ({model.num_experts})"
        )
    if not model.moe_intermediate_size:
        raise ModelError(f"{model.name}: a mixture of experts needs moe_intermediate_size")
    if model.experts.beside_mlp and model.n_shared_experts * model.moe_intermediate_size != model.intermediate_size:
        raise ModelError(
            f"{model.name}: {model.n_shared_experts} experts of {model.moe_intermediate_size} are no MLP of "
            f"intermediate_size, {model.intermediate_size}"
        )
    if model.sigmoid_router and model.corrected_softmax:
        raise ModelError(f"{model.name}: experts are chosen by sigmoid_router or by corrected_softmax, not by both")
    if model.shared_expert_gate and not model.n_shared_experts:
        raise ModelError(f"{model.name}: shared_expert_gate needs n_shared_experts")
    for key in ("router_bias", "expert_bias", "shared_expert_gate") if not model.gated_mlp else ():
        if getattr(model, key):
            raise ModelError(f"{model.name}: {key} of experts without a gate between their matrices is not supported")
    if (model.experts.as_in_gpt_oss or model.experts.beside_mlp) and (model.moe_latent_size or not model.gated_mlp):
        what = "a moe_latent_size" if model.moe_latent_size else "no gated_mlp"
        raise ModelError(f"{model.name}: {what} in a {model.architecture} is not supported")
    _check_groups(model)
    if model.first_k_dense_replace > model.num_hidden_layers:
        raise ModelError(
            f"{model.name}: first_k_dense_replace is {model.first_k_dense_replace}, "
            f"num_hidden_layers is {model.num_hidden_layers}"
        )


def _check_groups(model: ModelSpec) -> None:
    if model.num_experts % model.n_group:
        raise ModelError(f"{model.name}: {model.num_experts} experts are not {model.n_group} groups of the same size")
    size = model.num_experts // model.n_group
    if model.topk_group > model.n_group or model.topk_group * size < model.num_experts_per_tok:
        raise ModelError(
            f"{model.name}: of {model.n_group} groups of {size} experts, topk_group {model.topk_group} are not there "
            f"or have not {model.num_experts_per_tok} experts to choose"
        )
    if model.sigmoid_router and model.n_group > 1 and size < 2:
        raise ModelError(f"{model.name}: groups are ranked by their two best experts, and n_group leaves one in each")


def _check_latent(model: ModelSpec) -> None:
    if not model.kv_lora_rank:
        for key in ("q_lora_rank", "index_topk", *_OF_LATENT):
            if getattr(model, key):
                raise ModelError(f"{model.name}: {key} is {getattr(model, key)}, and kv_lora_rank is 0")
        return
    for key in _OF_LATENT:
        if not getattr(model, key):
            raise ModelError(f"{model.name}: latent attention needs {key}")
    if (head := model.qk_nope_head_dim + model.qk_rope_head_dim) != model.head_dim:
        raise ModelError(
            f"{model.name}: head_dim is {model.head_dim}; qk_nope_head_dim and qk_rope_head_dim are {head} together"
        )
    if model.v_head_dim > model.head_dim:
        raise ModelError(f"{model.name}: v_head_dim {model.v_head_dim} is more than head_dim, {model.head_dim}")
    if model.num_key_value_heads != model.num_attention_heads:
        raise ModelError(
            f"{model.name}: latent attention has keys for every head; num_key_value_heads is "
            f"{model.num_key_value_heads}, num_attention_heads {model.num_attention_heads}"
        )
    others = (
        "attention_bias", "attention_out_bias", "qk_norm", "attention_sinks", "fused_projections", "sliding_window",
        "query_pre_attn_scalar", "attn_output_gate", "attn_gate_proj", "rope_interleave",
        "attention_multiplier", "value_norm", "unit_qk_norm", "attention_chunk_size", "floor_scale",
    )  # fmt: skip
    _refuse(model, "latent attention", others)
    if model.partial_rotary_factor != 1:
        raise ModelError(f"{model.name}: latent attention turns all of qk_rope_head_dim, not a part of it")


def _refuse(model: ModelSpec, what: str, others: tuple[str, ...]) -> None:
    """Raises ModelError where `what` the model has would stand beside one of these fields."""
    for key in others:
        if getattr(model, key):
            raise ModelError(f"{model.name}: {what} with {key} is not supported")


def _check_attention(model: ModelSpec) -> None:
    attention = (FULL, SLIDING, LINEAR, *((NONE,) if model.mlp_layer_types else ()))
    for key, kinds in (("layer_types", attention), ("mlp_layer_types", (DENSE, SPARSE, NONE))):
        if unknown := [kind for kind in getattr(model, key) if kind not in kinds]:
            *others, last = map(repr, kinds)
            raise ModelError(f"{model.name}: {key} holds {unknown[0]!r}, not {', '.join(others)} or {last}")
    if any(has not in (0, 1) for has in model.no_rope_layers):
        raise ModelError(f"{model.name}: no_rope_layers must have a 0 or a 1 for each block")
    for key in PER_BLOCK:
        if (names := len(getattr(model, key))) not in (0, model.num_hidden_layers):
            raise ModelError(
                f"{model.name}: {key} names {names} blocks, num_hidden_layers is {model.num_hidden_layers}"
            )
    if SLIDING in model.layer_types and model.sliding_window is None:
        raise ModelError(f"{model.name}: layer_types asks for sliding attention without a sliding_window")
    if model.attn_gate_proj and (model.attn_output_gate or model.fused_projections):
        raise ModelError(f"{model.name}: attn_gate_proj beside attn_output_gate or fused_projections is not supported")
    if model.unit_qk_norm and model.qk_norm:
        raise ModelError(f"{model.name}: unit_qk_norm beside qk_norm is not supported")
    _check_branches(model)
    _check_linear(model)
    _check_global(model)


def _check_branches(model: ModelSpec) -> None:
    """Blocks of which some may lack attention, or an MLP."""
    if not model.mlp_layer_types:
        return
    if bare := [i for i in model.blocks if not model.branches(i)]:
        raise ModelError(f"{model.name}: block {bare[0]} has neither attention nor an MLP")
    if SPARSE in model.mlp_layer_types and not model.num_experts:
        raise ModelError(f"{model.name}: mlp_layer_types holds {SPARSE!r}, and num_experts is 0")
    others = (
        "post_norm", "sliding_window", "kv_lora_rank", "global_head_dim", "layer_scalar", "first_k_dense_replace",
        *OF_LINEAR,
    )  # fmt: skip
    _refuse(model, "a list of mlp_layer_types", others)
    if model.residual_multiplier != 1:
        raise ModelError(f"{model.name}: a list of mlp_layer_types with a residual_multiplier is not supported")


def _check_global(model: ModelSpec) -> None:
    """Heads of blocks without a window."""
    if not model.global_head_dim:
        for key in ("num_global_key_value_heads", "attention_k_eq_v"):
            if getattr(model, key):
                raise ModelError(f"{model.name}: {key} is {getattr(model, key)}, and global_head_dim is 0")
        return
    if not model.num_global_key_value_heads:
        raise ModelError(f"{model.name}: a global_head_dim needs num_global_key_value_heads")
    if model.num_attention_heads % model.num_global_key_value_heads:
        raise ModelError(
            f"{model.name}: {model.num_attention_heads} attention heads cannot share "
            f"{model.num_global_key_value_heads} global key-value heads evenly"
        )
    if model.rope_local_base_freq is None:
        raise ModelError(f"{model.name}: a global_head_dim needs a rope_local_base_freq: tables are as wide as heads")
    if model.attention_k_eq_v and not (model.qk_norm and model.value_norm):
        raise ModelError(f"{model.name}: attention_k_eq_v without qk_norm and value_norm is not supported")
    others = (
        "kv_lora_rank", "attention_sinks", "attn_output_gate", "attn_gate_proj", "qk_norm_all_heads",
        "fused_projections",
    )  # fmt: skip
    _refuse(model, "a global_head_dim in a model", others)
    if LINEAR in model.layer_types or model.partial_rotary_factor != 1:
        what = "linear attention" if LINEAR in model.layer_types else PARTIAL
        raise ModelError(f"{model.name}: a global_head_dim in a model with {what} is not supported")


def _check_linear(model: ModelSpec) -> None:
    """Linear attention, or a state space."""
    if LINEAR not in model.layer_types:
        return
    of_mamba = any(getattr(model, key) for key in OF_MAMBA)
    what = "a state space" if of_mamba else "linear attention"
    for key in OF_MAMBA if of_mamba else OF_LINEAR:
        if not getattr(model, key):
            raise ModelError(f"{model.name}: {what} needs {key}")
    for key in OF_LINEAR if of_mamba else ():
        if getattr(model, key):
            raise ModelError(f"{model.name}: {key} in a model with state spaces is not supported")
    if not of_mamba and model.mamba_dt_min is not None:
        raise ModelError(f"{model.name}: mamba_dt_min is {model.mamba_dt_min}, and there is no state space")
    if of_mamba and model.mamba_n_heads % model.mamba_n_groups:
        raise ModelError(
            f"{model.name}: {model.mamba_n_heads} heads of a state space are not {model.mamba_n_groups} groups of the "
            "same size"
        )
    if not of_mamba and model.linear_num_value_heads % model.linear_num_key_heads:
        raise ModelError(
            f"{model.name}: {model.linear_num_value_heads} value heads of linear attention cannot share "
            f"{model.linear_num_key_heads} key heads evenly"
        )
    by_channel = not of_mamba and model.linear_channel_decay
    if by_channel and (
        model.linear_num_key_heads != model.linear_num_value_heads
        or model.linear_key_head_dim != model.linear_value_head_dim
    ):
        raise ModelError(f"{model.name}: linear_channel_decay needs as many key heads as value heads, and as wide")
    others = ["sliding_window", "post_norm", "fused_projections"]
    if not by_channel:
        others.append("kv_lora_rank")
    if not of_mamba:
        others.append("fused_gate_up")
    if not (by_channel or of_mamba):
        others.append("no_rope_layers")
    _refuse(model, f"{what} in a model", tuple(others))
    if not model.pre_norm:
        raise ModelError(f"{model.name}: {what} without pre_norm is not supported")


def check_rope(
    scaling: tuple[tuple[str, Any], ...], theta: float, count: int, name: str, *, mscale: bool = False
) -> None:
    """Raises ModelError for a rope_scaling, as sorted pairs, that no layer of ours has, or that lacks a number.

    So many pairs of dimensions are turned. Only a model with `mscale` may have MSCALE.
    """
    pairs = dict(scaling)
    kind = pairs.get("rope_type", "default")
    if kind == "default":
        return
    if not isinstance(kind, str) or kind not in ROPE_NEEDS:
        raise ModelError(
            f"{name}: rope_scaling of type {kind!r} is not supported; supported are default, {', '.join(ROPE_NEEDS)}"
        )
    for key, value in scaling:
        if kind == "longrope" and key in ROPE_LISTS:
            if not isinstance(value, tuple) or len(value) != count or not all(map(positive, value)):
                raise ModelError(f"{name}: rope_scaling's {key} must list {count} positive finite numbers")
            continue
        if not isinstance(value, (bool, int, float, str)):
            raise ModelError(f"{name}: rope_scaling's {key} must be a number or a word, not {value!r}")
    for key in ROPE_NEEDS[kind]:
        if key not in pairs:
            raise ModelError(f"{name}: rope_scaling of type {kind!r} lacks {key!r}")
    for key in (*ROPE_NUMBERS, *((PARTIAL,) if kind == "proportional" else ())):
        if key in pairs and not positive(pairs[key]):
            raise ModelError(f"{name}: rope_scaling's {key} must be a positive finite number, not {pairs[key]!r}")
    if kind == "proportional" and not 1 <= int(pairs[PARTIAL] * count) <= count:
        raise ModelError(
            f"{name}: rope_scaling's {PARTIAL} {pairs[PARTIAL]} turns {int(pairs[PARTIAL] * count)} of {count} pairs "
            "of dimensions"
        )
    if kind == "yarn" and theta <= 1:
        raise ModelError(f"{name}: rope_theta must be above 1 where rope_scaling is of type 'yarn', not {theta!r}")
    if kind == "longrope" and not (isinstance(pairs[ORIGINAL], int) and pairs[ORIGINAL] > 1):
        raise ModelError(f"{name}: {ORIGINAL} must be a whole number above 1, not {pairs[ORIGINAL]!r}")
    if found := [key for key in MSCALE if pairs.get(key)]:
        if not (mscale and kind == "yarn"):  # no model that we know of has it
            raise ModelError(f"{name}: rope_scaling of type {kind!r} with {found[0]} is not supported here")
        for key in found:
            if not positive(pairs[key]):
                raise ModelError(f"{name}: rope_scaling's {key} must be a positive finite number, not {pairs[key]!r}")
    if kind == "llama3" and pairs["high_freq_factor"] < pairs["low_freq_factor"]:
        raise ModelError(f"{name}: rope_scaling's high_freq_factor must not be below its low_freq_factor")


def require_few_blocks(value: Any, name: str) -> int:
    """The blocks of a model. Raises ModelError if they are too many, for a step has an op or more of each."""
    blocks = whole_number("num_hidden_layers", value, name)
    if blocks > MOST_BLOCKS:
        raise ModelError(f"{name}: num_hidden_layers must be at most {MOST_BLOCKS:,}, not {blocks:,}")
    return blocks


def positive(value: object) -> bool:
    """A number above zero that fp32 has, in which layers compute."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= MOST


def whole_number(key: str, value: Any, name: str, *, least: int = 1) -> int:
    """The value, which the field `key` of the model `name` has. Raises ModelError if it is none, or less."""
    if wrong := fault(value, least=least):
        raise ModelError(f"{name}: {key} {wrong}")
    count: int = value
    return count
