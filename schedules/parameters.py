"""The parameters of a layer: what they are called, their shapes, and which lie together in files.

`ModelSpec` has them by layer; names are those of Hugging Face transformers 5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from schedules.model import ModelSpec

Shapes = dict[str, tuple[int, ...]]  # by name, in the order in which they lie in a layer's slab

GATE_PROJ = "self_attn.gate_proj"  # of attention's output
SHARED = "mlp.shared_experts"
SHARED_GATED, SHARED_GATE = "mlp.shared_expert", "mlp.shared_expert_gate"
TO_LATENT, OF_LATENT = "mlp.fc1_latent_proj", "mlp.fc2_latent_proj"  # of what experts are given, and return
ROUTERS = (
    "mlp.gate.weight", "mlp.router.weight", "router.proj.weight", "block_sparse_moe.router.weight",
    f"{SHARED_GATE}.weight",
)  # fmt: skip
LAYER_SCALAR = "layer_scalar"
# Of experts beside an MLP: what the router's norm multiplies by, and it each expert; and the norms of what the MLP
# returns, and of what experts are given, and return.
ROUTER_SCALE, OF_EACH_EXPERT = "router.scale", "router.per_expert_scale"
AFTER_MLP = "post_feedforward_layernorm_1"
BEFORE_EXPERTS, AFTER_EXPERTS = "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"
# Of one input, and in some families' files one matrix.
FUSED_MLP = {f"{place}.gate_up_proj": ("gate_proj", "up_proj") for place in ("mlp", SHARED)}
FUSED = {"self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"), **FUSED_MLP}
FUSED_MAMBA = {"mamba.in_proj": ("in_proj_z", "in_proj_xbc", "in_proj_dt")}


def of_layer(model: ModelSpec, i: int) -> Shapes:
    """See `ModelSpec.parameter_shapes`."""
    h, v = model.hidden_size, model.vocab_size
    if i == model.embed:
        return {"embed_tokens.weight": (v, h)}
    if i == model.head:
        return {"norm.weight": (h,)} | ({} if model.tie_word_embeddings else {"lm_head.weight": (v, h)})
    model.layer_name(i)  # raises for a layer that is not there
    norms = [{} if norm is None else {f"{norm}.weight": (h,)} for norm in model.norms(i)]
    mlp: Shapes = {}
    if model.has_mlp(i):
        mlp = _of_experts(model) if model.has_experts(i) else _of_mlp(model, "mlp", model.intermediate_size)
    scalar: Shapes = {LAYER_SCALAR: (1,)} if model.layer_scalar else {}
    return norms[0] | of_attention(model, i) | norms[1] | norms[2] | mlp | norms[3] | scalar


def of_attention(model: ModelSpec, i: int) -> Shapes:
    """Those of block i's attention, or of what takes its place; none where it has neither."""
    if not model.has_attention(i):
        return {}
    if (recurrence := model.recurrence(i)) is not None:
        return recurrence.parameter_shapes(model.hidden_size)
    if model.latent is not None:
        return model.latent.parameter_shapes(model.hidden_size)
    heads = model.heads(i)
    q, k = heads.q_width, heads.k_width
    widths = {"q": q + (heads.gate_width if model.attn_output_gate else 0), "k": k}
    widths |= {} if heads.values_are_keys else {"v": heads.v_width}
    shapes: Shapes = {}
    for letter, width in widths.items():
        shapes[f"self_attn.{letter}_proj.weight"] = (width, model.hidden_size)
        if model.attention_bias:
            shapes[f"self_attn.{letter}_proj.bias"] = (width,)
    if model.attn_gate_proj:
        shapes[f"{GATE_PROJ}.weight"] = (heads.gate_width, model.hidden_size)
    shapes["self_attn.o_proj.weight"] = (model.hidden_size, q)
    if model.attention_out_bias:
        shapes["self_attn.o_proj.bias"] = (model.hidden_size,)
    if model.qk_norm:
        shapes["self_attn.q_norm.weight"] = (q if model.qk_norm_all_heads else heads.dim,)
        shapes["self_attn.k_norm.weight"] = (k if model.qk_norm_all_heads else heads.dim,)
    if model.attention_sinks:
        shapes["self_attn.sinks"] = (model.num_attention_heads,)
    return shapes


def _of_mlp(model: ModelSpec, place: str, f: int) -> Shapes:
    h = model.hidden_size
    shapes: Shapes = {}
    gate = {"gate": (f, h)} if model.gated_mlp else {}
    for part, (rows, columns) in {**gate, "up": (f, h), "down": (h, f)}.items():
        shapes[f"{place}.{part}_proj.weight"] = (rows, columns)
        if model.mlp_bias:
            shapes[f"{place}.{part}_proj.bias"] = (rows,)
    return shapes


def _of_experts(model: ModelSpec) -> Shapes:
    n, h, f, wide = model.num_experts, model.hidden_size, model.moe_intermediate_size, model.expert_input
    transposed = model.experts.in_out
    router, modules = model.experts.router, model.experts.modules
    shapes: Shapes = {f"{router}.weight": (n, h)}
    if model.router_bias:
        shapes[f"{router}.bias"] = (n,)
    if model.experts.beside_mlp:
        shapes |= {ROUTER_SCALE: (h,), OF_EACH_EXPERT: (n,)}
        shapes |= {f"{norm}.weight": (h,) for norm in (AFTER_MLP, BEFORE_EXPERTS, AFTER_EXPERTS)}
    if model.score_correction is not None:
        shapes[model.score_correction] = (n,)
    if model.moe_latent_size:
        shapes |= {f"{TO_LATENT}.weight": (wide, h), f"{OF_LATENT}.weight": (h, wide)}
    first, rows = model.expert_first, 2 * f if model.gated_mlp else f
    shapes[f"{modules}.{first}"] = (n, wide, rows) if transposed else (n, rows, wide)
    if model.expert_bias:
        shapes[f"{modules}.{first}_bias"] = (n, rows)
    shapes[f"{modules}.down_proj"] = (n, f, wide) if transposed else (n, wide, f)
    if model.expert_bias:
        shapes[f"{modules}.down_proj_bias"] = (n, wide)
    if model.n_shared_experts:
        shapes |= _of_mlp(model, model.shared_place, model.shared_width)
    if model.shared_expert_gate:
        shapes[f"{SHARED_GATE}.weight"] = (1, h)
    return shapes


def as_stored(model: ModelSpec, i: int) -> Shapes:
    """See `ModelSpec.stored_shapes`."""
    fused_ones = FUSED if model.fused_projections else FUSED_MLP if model.fused_gate_up else {}
    whole = {
        f"{fused.rpartition('.')[0]}.{part}.weight": f"{fused}.weight"
        for fused, parts in (fused_ones | FUSED_MAMBA).items()
        for part in parts
    }
    found: Shapes = {}
    for name, shape in model.parameter_shapes(i).items():
        if (fused := whole.get(name)) is None:
            found[name] = shape
        else:
            found[fused] = (found.get(fused, (0,))[0] + shape[0], *shape[1:])
    return found


def adapters(model: ModelSpec, i: int, rank: int) -> Shapes:
    """See `ModelSpec.adapter_shapes`."""
    found: Shapes = {}
    for name, shape in model.stored_shapes(i).items() if model.is_block(i) else ():
        if model.family.interleaved and name.startswith("linear_attn.in_proj"):
            continue
        if "_proj" in name and name.endswith(".weight") and len(shape) == 2:
            projection = name.removesuffix("weight")
            found[f"{projection}lora_A.weight"] = (rank, shape[1])
            found[f"{projection}lora_B.weight"] = (shape[0], rank)
    return found


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a parameter is a matrix, or several in one tensor: what weight decay is for.

    Norms and biases are not, nor is a convolution of each channel by itself, nor are rates of decay.
    """
    return len(shape) > 1 and not name.endswith(("bias", "conv1d.weight", "A_log"))
