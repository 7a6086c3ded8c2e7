"""The shape of a decoder-only language model, in the fields of Hugging Face's `config.json`.

Its parameters, the bytes of its activations, FLOPs and traffic have files of their own. Nothing is measured and
nothing depends on a machine.

Layers are numbered as in a schedule: -1 is the embedding, 0 .. L-1 are the decoder blocks, L is the head
(final norm and output projection).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from schedules import parameters
from schedules.delta import DeltaNet
from schedules.families import FAMILIES, MULTIPLIERS
from schedules.family import Experts, Family
from schedules.heads import Heads
from schedules.hf_config import read_config
from schedules.hf_rope import as_pairs
from schedules.kimi_delta import KimiDelta
from schedules.latent import Latent
from schedules.mamba import Mamba2
from schedules.model_checks import (
    LINEAR,
    NONE,
    OF_MAMBA,
    PER_BLOCK,
    SLIDING,
    SPARSE,
    ModelError,
    require_meaning,
)
from schedules.workload import RECOMPUTED

__all__ = ["ModelError", "ModelSpec", "Recurrence"]

Recurrence = DeltaNet | Mamba2  # what takes the place of attention where a block has a state

FP32 = 4  # bytes
# Fields that files written before them lack.
_LATER = (
    "no_rope_layers", "partial_rotary_factor", "fused_projections", "pre_norm", "post_norm", "qk_norm_all_heads",
    "rope_local_base_freq", "zero_centered_norms", "scale_embeddings", "query_pre_attn_scalar", "sigmoid_router",
    "routed_scaling_factor", "n_shared_experts", "first_k_dense_replace", "n_group", "topk_group", "q_lora_rank",
    "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "attn_output_gate", "linear_num_key_heads",
    "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim",
    "shared_expert_gate", "fused_gate_up", "rope_interleave", "global_head_dim", "num_global_key_value_heads",
    "attention_k_eq_v", "value_norm", "layer_scalar", "final_logit_softcapping", "mlp_layer_types", "gated_mlp",
    "moe_latent_size", "mamba_dt_min", "index_topk", "corrected_softmax", "unit_qk_norm", "attention_chunk_size",
    "floor_scale", "attn_scale", "attn_gate_proj", "linear_channel_decay", *OF_MAMBA, *MULTIPLIERS,
)  # fmt: skip


class Norms(NamedTuple):
    """What a block calls the RMSNorms of what attention and the MLP are given, and return; None where there is none."""

    before_attention: str | None
    after_attention: str | None
    before_mlp: str | None
    after_mlp: str | None


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder with rotary attention and a gated MLP, dense or mixture of experts.

    Fields have the names and meanings of Hugging Face's `config.json`, except those that other libraries leave to code:
    `attention_bias` is for q, k, v and `attention_out_bias` for o; `pre_norm` is an RMSNorm of what attention and the
    MLP are given, `post_norm` one of what they return; `qk_norm` is one over each query and key head, or with
    `qk_norm_all_heads` over all of a token's together; with `zero_centered_norms` all norms multiply by 1 + their
    weight; `attention_sinks` is one learned logit per head; with `scale_embeddings` embeddings are multiplied by the
    root of `hidden_size`; with `fused_projections` q, k and v are one matrix in files and beside LoRA's adapters, and
    so are gate and up, with `fused_gate_up` these alone; with `rope_interleave` rotary embedding turns neighbours, not
    one half of a head's dimensions with the other. With `sigmoid_router` experts are chosen by the sigmoids of their
    logits and a bias each, which no gradient changes, and weighted by those sigmoids; without, by the probabilities
    that their logits make, with `corrected_softmax` chosen by these and a bias each. Weights are multiplied by
    `routed_scaling_factor`. Of `n_group` groups of experts those of the best `topk_group` alone are chosen from;
    `n_shared_experts` are given all tokens, as one MLP of their widths together, whose output is multiplied by the
    sigmoid of a number of the token's with a `shared_expert_gate`; the first `first_k_dense_replace` blocks have an MLP
    instead of experts. With a `kv_lora_rank` attention is latent, see `schedules.latent`: `head_dim` is then
    `qk_nope_head_dim` and `qk_rope_head_dim` together, of which rotary embedding turns the latter, and `q_lora_rank` 0
    where queries have no latent vector. With `attn_output_gate` the projection of queries has as many elements more,
    with `attn_gate_proj` there is another, by whose sigmoids what attention returns is multiplied. `layer_types` names
    each block's attention; empty means all blocks alike, sliding if `sliding_window` is set. Linear attention is by the
    gated delta rule, with the heads, dimensions and convolution that the fields `linear_...` say, see
    `schedules.delta`, of each channel of keys by itself with `linear_channel_decay`, see `schedules.kimi_delta`; or a
    state space, by the fields `mamba_...`, see `schedules.mamba`. `no_rope_layers` has a 0 for
    each block without rotary embedding and a 1 for each with it; empty means that all have it. `rope_scaling` is the
    config's dictionary as sorted pairs, lists as tuples; with `rope_local_base_freq` blocks with a window have plain
    rotary embedding of that base. Neither changes a cost. `query_pre_attn_scalar` is `head_dim` where None; an
    `attention_multiplier` stands for its inverse root. Embeddings are multiplied by `embedding_multiplier`, what
    attention and the MLP add by `residual_multiplier`, and logits divided by `logits_scaling`. With a `global_head_dim`
    blocks without a window have heads of that dimension, `num_global_key_value_heads` for keys and values, and with
    `attention_k_eq_v` one projection for both. `value_norm` is an RMSNorm without a weight over each value head; with
    `layer_scalar` what a block returns is multiplied by a number that no gradient changes. Logits beyond
    `final_logit_softcapping` are bent towards it. `mlp_layer_types` names each block's MLP, "dense" or "sparse", or
    "none", and so may `layer_types` of attention; empty means that all have both. Without `gated_mlp` an MLP, and each
    expert, is two matrices and the square of what is positive between them. With a `moe_latent_size` experts are given
    that many numbers, and return as many: one projection makes them, another a hidden state of what they add up to.
    Steps of a state space are no less than `mamba_dt_min`. With an `index_topk` a token attends to that many tokens,
    which a small network chooses: to all before it in sequences of no more, and no others can be trained; with an
    `attention_chunk_size` it attends to those of its chunk of so many, and the same holds. With `unit_qk_norm` queries
    and keys of blocks with rotary embedding have an RMSNorm without a weight. With a `floor_scale` queries of blocks
    without it grow, by `attn_scale` times the logarithm of 1 + how often their position has passed that. Raises
    ModelError when a value has no meaning.
    """

    name: str
    architecture: str = "LlamaForCausalLM"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    attention_sinks: bool = False
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = True
    router_bias: bool = False
    expert_bias: bool = False
    sliding_window: int | None = None
    layer_types: tuple[str, ...] = ()
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: tuple[tuple[str, Any], ...] = ()
    hidden_act: str = "silu"
    no_rope_layers: tuple[int, ...] = ()
    partial_rotary_factor: float = 1.0
    fused_projections: bool = False
    pre_norm: bool = True
    post_norm: bool = False
    qk_norm_all_heads: bool = False
    rope_local_base_freq: float | None = None
    zero_centered_norms: bool = False
    scale_embeddings: bool = False
    query_pre_attn_scalar: int | None = None
    sigmoid_router: bool = False
    routed_scaling_factor: float = 1.0
    n_shared_experts: int = 0
    first_k_dense_replace: int = 0
    n_group: int = 1
    topk_group: int = 1
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    attn_output_gate: bool = False
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_conv_kernel_dim: int = 0
    mamba_n_heads: int = 0
    mamba_d_head: int = 0
    mamba_n_groups: int = 0
    mamba_d_state: int = 0
    mamba_d_conv: int = 0
    shared_expert_gate: bool = False
    fused_gate_up: bool = False
    rope_interleave: bool = False
    global_head_dim: int = 0
    num_global_key_value_heads: int = 0
    attention_k_eq_v: bool = False
    value_norm: bool = False
    layer_scalar: bool = False
    final_logit_softcapping: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float | None = None
    logits_scaling: float = 1.0
    mlp_layer_types: tuple[str, ...] = ()
    gated_mlp: bool = True
    moe_latent_size: int = 0
    mamba_dt_min: float | None = None
    index_topk: int = 0
    corrected_softmax: bool = False
    unit_qk_norm: bool = False
    attention_chunk_size: int = 0
    floor_scale: int = 0
    attn_scale: float = 0.1
    attn_gate_proj: bool = False
    linear_channel_decay: bool = False

    def __post_init__(self) -> None:
        require_meaning(self)

    # ---- files

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any], name: str) -> ModelSpec:
        """The model that a Hugging Face `config.json` describes; raises ModelError if we cannot train it."""
        return cls(**read_config(config, name))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` restores an equal spec.

        Fields added to the language later are there only where they are not at their defaults.
        """
        usual = {field.name: field.default for field in fields(self) if field.name in _LATER}
        return {
            key: value
            for key, value in self.all_values().items()
            if key not in usual or getattr(self, key) != usual[key]
        }

    def all_values(self) -> dict[str, Any]:
        """Plain JSON values of all fields."""
        lists = {key: list(getattr(self, key)) for key in PER_BLOCK}
        scaling = {key: list(value) if isinstance(value, tuple) else value for key, value in self.rope_scaling}
        return asdict(self) | lists | {"rope_scaling": scaling}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelSpec:
        """The inverse of `to_dict`. Raises ModelError on an unknown, missing or meaningless field."""
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(data) - set(known))
        if unknown:
            raise ModelError(f"a model has no field {unknown[0]!r}; its fields are {', '.join(known)}")
        values = dict(data)
        for key in PER_BLOCK:
            if not isinstance(listed := data.get(key, ()), (list, tuple)):
                raise ModelError(f"{key} must be a list, not {listed!r}")
            values[key] = tuple(listed)
        scaling = data.get("rope_scaling", {})
        if not isinstance(scaling, Mapping):
            raise ModelError(f"rope_scaling must be a dictionary, not {scaling!r}")
        values["rope_scaling"] = as_pairs(scaling)
        try:
            return cls(**values)
        except TypeError as error:  # what dataclasses raise for a field left out
            raise ModelError(f"incomplete model: {error}") from None

    @property
    def family(self) -> Family:
        """What is to be known of the architecture beside these fields."""
        return FAMILIES[self.architecture]

    @property
    def experts(self) -> Experts:
        """What the architecture calls experts, which a model that was made up may have where its family has none."""
        return self.family.experts or Experts()

    # ---- layers

    @property
    def embed(self) -> int:
        return -1

    @property
    def head(self) -> int:
        return self.num_hidden_layers

    @property
    def layers(self) -> range:
        """All layers in forward order, embedding and head included."""
        return range(self.embed, self.head + 1)

    @property
    def blocks(self) -> range:
        return range(self.num_hidden_layers)

    def layer_name(self, i: int) -> str:
        """'embed', 'head', or the block's number. Raises ModelError when there is no layer i."""
        name = self._names.get(i)
        if name is None:
            raise ModelError(f"{self.name} has no layer {i}; its layers are {self.embed} to {self.head}")
        return name

    def layer_index(self, name: str) -> int:
        """The inverse of `layer_name`. Raises ModelError when no layer has that name."""
        i = self._indices.get(name)
        if i is None:
            raise ModelError(f"{self.name} has no layer {name!r}; it has embed, 0 to {self.head - 1}, and head")
        return i

    @cached_property
    def _names(self) -> dict[int, str]:
        return {self.embed: "embed", **{i: str(i) for i in self.blocks}, self.head: "head"}

    @cached_property
    def _indices(self) -> dict[str, int]:
        return {name: i for i, name in self._names.items()}

    def window(self, i: int) -> int | None:
        """How many keys, its own included, a token of block i may attend to; None for all before it."""
        if i not in self.blocks:
            raise ModelError(f"{self.name} has no block {i}; its blocks are 0 to {self.head - 1}")
        sliding = self.layer_types[i] == SLIDING if self.layer_types else self.sliding_window is not None
        return self.sliding_window if sliding else None

    def has_rope(self, i: int) -> bool:
        """Whether block i has rotary embedding."""
        return not self.no_rope_layers or bool(self.no_rope_layers[i])

    def has_qk_norm(self, i: int) -> bool:
        """Whether queries and keys of block i have a norm, with weights or without."""
        return self.qk_norm or (self.unit_qk_norm and self.has_rope(i))

    def has_attention(self, i: int) -> bool:
        """Whether layer i has attention, or what takes its place, if it is a block."""
        return not self.layer_types or (i in self.blocks and self.layer_types[i] != NONE)

    def has_mlp(self, i: int) -> bool:
        """Whether layer i has an MLP, or a mixture of experts, if it is a block."""
        return not self.mlp_layer_types or (i in self.blocks and self.mlp_layer_types[i] != NONE)

    def branches(self, i: int) -> int:
        """How many of the two block i has."""
        return self.has_attention(i) + self.has_mlp(i)

    def has_experts(self, i: int) -> bool:
        """Whether layer i is a block with a mixture of experts."""
        if self.mlp_layer_types:
            return i in self.blocks and self.mlp_layer_types[i] == SPARSE
        return self.num_experts > 0 and self.first_k_dense_replace <= i < self.num_hidden_layers

    def layer_kind(self, i: int) -> str:
        """Layers of one kind have the same parameters and the same computation, hence the same cost."""
        if i not in self._kinds:
            self._kinds[i] = self._block_kind(i) if self.is_block(i) else self.layer_name(i)
        return self._kinds[i]

    @cached_property
    def _kinds(self) -> dict[int, str]:
        """Those told so far: schedules ask for them once per op."""
        return {}

    def _block_kind(self, i: int) -> str:
        kind = "block" if self.window(i) is None else "block.sliding"
        attends, recurrence = self.has_attention(i), self.recurrence(i)
        if recurrence is not None:
            kind = "block.linear"
        if not (attends and self.has_mlp(i)):
            kind += ".attention_alone" if attends else ".mlp_alone"
        if self.num_experts and not self.has_experts(i) and self.has_mlp(i):
            kind += ".dense"
        return kind if recurrence is not None or self.has_rope(i) or not attends else f"{kind}.no_rope"

    def layer_number(self, i: int, name: str) -> int:
        """The number that transformers has for the layer in which a parameter of block i lies."""
        if not self.family.branches_apart:
            return i
        of_mlp = name.startswith("mlp.") or name == f"{self.norms(i).before_mlp}.weight"
        return self._branches_before[i] + (of_mlp and self.has_attention(i))

    @cached_property
    def _branches_before(self) -> list[int]:
        """Of each block, those of the blocks before it."""
        return list(accumulate(map(self.branches, self.blocks), initial=0))

    def of_blocks(self, chosen: Sequence[int]) -> ModelSpec:
        """The same model with these of its blocks alone, in their order."""
        per_block: dict[str, Any] = {
            key: tuple(found[i] for i in chosen) for key in PER_BLOCK if (found := getattr(self, key))
        }
        dense = sum(i < self.first_k_dense_replace for i in chosen)
        return replace(self, num_hidden_layers=len(chosen), first_k_dense_replace=dense, **per_block)

    def norms(self, i: int) -> Norms:
        """Of block i. "post_attention" is before the MLP where nothing is normalised after attention."""
        before_mlp = "pre_feedforward_layernorm" if self.post_norm else "post_attention_layernorm"
        if self.family.norms is not None:
            return Norms(*self.family.norms)
        return Norms(
            before_attention="input_layernorm" if self.pre_norm and self.has_attention(i) else None,
            after_attention="post_attention_layernorm" if self.post_norm else None,
            before_mlp=before_mlp if self.pre_norm and self.has_mlp(i) else None,
            after_mlp="post_feedforward_layernorm" if self.post_norm else None,
        )

    @property
    def norm_offset(self) -> float:
        """What norms add to their weight before they multiply by it."""
        return 1.0 if self.zero_centered_norms else 0.0

    @property
    def embedding_scale(self) -> float:
        """What embeddings are multiplied by."""
        return math.sqrt(self.hidden_size) if self.scale_embeddings else self.embedding_multiplier

    @property
    def attention_scale(self) -> float | None:
        """What products of queries and keys are multiplied by; None where that is 1 / sqrt(head_dim)."""
        if self.query_pre_attn_scalar is not None:
            return 1 / math.sqrt(self.query_pre_attn_scalar)
        return self.attention_multiplier

    @property
    def largest_block(self) -> int:
        """The first of the blocks that have the most parameters: most blocks are like it."""
        return max(self.blocks, key=self.params)

    def keeps_mlp_output(self, i: int) -> bool:
        """Whether backward reads what the MLP of block i, or each of its experts, returns."""
        return self.has_experts(i) or self.post_norm

    @property
    def recompute_modes(self) -> tuple[str, ...]:
        """The modes of recompute, see Workload, that blocks have: neither experts' products are made a chunk at a time,
        nor an MLP's that has no gate, or that not all blocks have."""
        whole = self.num_experts > 0 or self.mlp_layer_types or not self.gated_mlp
        return tuple(mode for mode in RECOMPUTED if not (mode == "mlp" and whole))

    def require_recompute(self, mode: str) -> None:
        """Raises ModelError where blocks do not have this mode of recompute."""
        if mode not in self.recompute_modes:
            what = "experts" if self.num_experts else "MLPs without a gate, or that not all blocks have,"
            raise ModelError(f"{self.name}: {what} are not computed again inside a block, only what is pointwise")

    def unmet_length(self, seq_len: int) -> str | None:
        """Why the model cannot be trained on sequences of so many tokens; None if it can be."""
        if self.longest_sequence is None or seq_len <= self.longest_sequence:
            return None
        some, lacking = f"{self.index_topk:,} chosen ones", "choosing"
        if not self.index_topk:
            some, lacking = f"those of its chunk of {self.attention_chunk_size:,} alone", "attention in chunks"
        return (
            f"{self.name}: a token of a sequence of {seq_len:,} would attend to {some}, and {lacking} is not supported"
        )

    @property
    def longest_sequence(self) -> int | None:
        """How many tokens a sequence may have for each to attend to all before it; None if any number."""
        return self.index_topk or self.attention_chunk_size or None

    def require_length(self, seq_len: int) -> None:
        """Raises ModelError where the model cannot be trained on sequences of so many tokens."""
        if unmet := self.unmet_length(seq_len):
            raise ModelError(f"{unmet}: give sequences of at most {self.longest_sequence:,}")

    def is_block(self, i: int) -> bool:
        """Whether layer i is a decoder block. Raises ModelError when there is no layer i."""
        return self.layer_name(i) not in ("embed", "head")

    # ---- parameters

    def parameter_shapes(self, i: int) -> dict[str, tuple[int, ...]]:
        """Name within the layer -> shape, in the order in which they lie in the layer's slab.

        Names and shapes are those of the modules of Hugging Face transformers 5, where a layer's experts are
        stacked in one tensor; but for what is fused, see `stored_shapes`. A tied head has no projection of its
        own.
        """
        return parameters.of_layer(self, i)

    @property
    def expert_first(self) -> str:
        """What the first matrix of each expert is called, of all in one tensor."""
        return "gate_up_proj" if self.gated_mlp else "up_proj"

    @property
    def expert_input(self) -> int:
        """Elements that an expert is given of a token, and returns."""
        return self.moe_latent_size or self.hidden_size

    @property
    def mlp_matrices(self) -> int:
        """Of an MLP, and of each expert: gate, up and down."""
        return 3 if self.gated_mlp else 2

    @property
    def shared_place(self) -> str:
        """What the experts that are given all tokens are called within a block."""
        if self.experts.beside_mlp:
            return "mlp"
        return parameters.SHARED_GATED if self.shared_expert_gate else parameters.SHARED

    @property
    def experts_beside_mlp(self) -> bool:
        """Whether experts and those that are given all tokens each have norms of their own, and the router has one."""
        return self.num_experts > 0 and self.experts.beside_mlp

    def is_of_experts(self, name: str) -> bool:
        """Whether a parameter of a block holds matrices or biases of all its experts."""
        return name.startswith(f"{self.experts.modules}.")

    @property
    def score_correction(self) -> str | None:
        """The parameter that is added to experts' scores where they are chosen; None where there is none."""
        if self.experts.correction is None or not (self.sigmoid_router or self.corrected_softmax):
            return None
        return f"{self.experts.correction}.{self.experts.correction_name}"

    def stored_shapes(self, i: int) -> dict[str, tuple[int, ...]]:
        """As `parameter_shapes`, with what is one matrix in files: its parts lie in a row as it is."""
        return parameters.as_stored(self, i)

    def adapter_shapes(self, i: int, rank: int) -> dict[str, tuple[int, ...]]:
        """Name -> shape of LoRA's adapters of that rank in layer i.

        Beside a projection (out, in) stand a matrix (rank, in) and one (out, rank), named as in Hugging Face's peft.
        Experts, which are stacked, the router, the embedding and the head have none, nor have projections that files
        interleave.
        """
        return parameters.adapters(self, i, rank)

    def params(self, i: int) -> int:
        """Parameters of layer i."""
        if i not in self._params:
            self._params[i] = sum(math.prod(shape) for shape in self.parameter_shapes(i).values())
        return self._params[i]

    @cached_property
    def _params(self) -> dict[int, int]:
        """Those counted so far: schedules ask for them once per op."""
        return {}

    @property
    def total_params(self) -> int:
        return sum(self.params(i) for i in self.layers)

    def heads(self, i: int) -> Heads:
        """Those of block i's attention, none where it has none. Raises ModelError when there is no block i."""
        of_windows, of_others = self._heads
        if not self.has_attention(i):
            return self._no_heads
        return of_others if self.window(i) is None else of_windows

    @cached_property
    def _heads(self) -> tuple[Heads, Heads]:
        """Those of blocks with a window, and of others."""
        heads = Heads(
            count=self.num_attention_heads,
            of_keys=self.num_key_value_heads,
            dim=self.head_dim,
            value_dim=self.v_head_dim or self.head_dim,
            gated=self.attn_output_gate or self.attn_gate_proj,
        )
        if not self.global_head_dim:
            return heads, heads
        others = replace(
            heads,
            of_keys=self.num_global_key_value_heads,
            dim=self.global_head_dim,
            value_dim=self.global_head_dim,
            values_are_keys=self.attention_k_eq_v,
        )
        return heads, others

    @cached_property
    def _no_heads(self) -> Heads:
        return replace(self._heads[1], count=0, of_keys=0)

    @cached_property
    def latent(self) -> Latent | None:
        """What latent attention goes through; None where attention is not latent."""
        if not self.kv_lora_rank:
            return None
        return Latent(
            heads=self.num_attention_heads,
            q_rank=self.q_lora_rank,
            kv_rank=self.kv_lora_rank,
            nope=self.qk_nope_head_dim,
            rope=self.qk_rope_head_dim,
            value=self.v_head_dim,
        )

    def recurrence(self, i: int) -> Recurrence | None:
        """What takes attention's place in block i; None where layer i has none."""
        there = self._recurrence is not None and i in self.blocks and self.layer_types[i] == LINEAR
        return self._recurrence if there else None

    @cached_property
    def _recurrence(self) -> Recurrence | None:
        if LINEAR not in self.layer_types:
            return None
        if self.mamba_n_heads:
            return Mamba2(
                heads=self.mamba_n_heads,
                head_dim=self.mamba_d_head,
                groups=self.mamba_n_groups,
                state_dim=self.mamba_d_state,
                kernel=self.mamba_d_conv,
                least_step=self.mamba_dt_min or 0.0,
            )
        kind = KimiDelta if self.linear_channel_decay else DeltaNet
        return kind(
            key_heads=self.linear_num_key_heads,
            value_heads=self.linear_num_value_heads,
            key_dim=self.linear_key_head_dim,
            value_dim=self.linear_value_head_dim,
            kernel=self.linear_conv_kernel_dim,
        )

    def attention_matrices(self, i: int) -> tuple[tuple[int, ...], ...]:
        """The shapes (out, in) of the projections of block i's attention."""
        kind = self.layer_kind(i)
        if kind not in self._matrices:
            self._matrices[kind] = tuple(
                shape for shape in parameters.of_attention(self, i).values() if len(shape) == 2
            )
        return self._matrices[kind]

    @cached_property
    def _matrices(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Those found so far."""
        return {}

    @property
    def rotary_dim(self) -> int:
        """Of a head's dimensions those that rotary embedding turns: the first, of latent attention the last."""
        return self.qk_rope_head_dim or int((self.global_head_dim or self.head_dim) * self.partial_rotary_factor)

    @property
    def local_rotary_dim(self) -> int:
        """The same where blocks with a window have a rotary embedding of their own."""
        return int(self.head_dim * self.partial_rotary_factor)

    def mlp_width(self, i: int) -> int:
        """Intermediate elements of one token in block i: of all its experts together, where there are experts.

        0 without an MLP.
        """
        if not self.has_mlp(i):
            return 0
        if self.has_experts(i):
            return self.num_experts_per_tok * self.moe_intermediate_size + self.shared_width
        return self.intermediate_size

    @property
    def shared_width(self) -> int:
        """Of these, those of the experts that are given all tokens."""
        return self.n_shared_experts * self.moe_intermediate_size
