"""What is to be known of a family of decoders beside its config.json; `schedules.families` has an entry for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Experts:
    """What a family with a mixture of experts calls them.

    count, width, chosen: what its config.json calls the number of experts, the width of each, and how many a token has.
    switch: a field of its config.json without which there are none.
    shared_width: a field that states the width of one expert, or an MLP, that all tokens are given; where a switch is
        off, of the MLP.
    shared: what it calls the number of experts that are given all tokens, where it has such and counts them; the first
        blocks may then have an MLP instead.
    dense: what it calls the number of these blocks.
    router, modules: what a block calls the router's projection, and experts.
    beside_mlp: they stand beside an MLP that is given all tokens, each of the two has norms of its own, and so has the
        router, which weights each expert besides.
    wide_router: routers multiply in fp32.
    scaling: a field that states what weights are multiplied by.
    place, matrices: where files have them within a block, and what they call gate, up and down of each.
    stacked: published with all experts' matrices in one tensor.
    in_files: what files call a part of a name, where they do not have a block's modules by these.
    correction, correction_name: where the bias lies by which experts are chosen, None where sigmoids have none, and
        what it is called; in files it is in `correction_in_files` where that differs, and a `correction_row` is a
        matrix of one row there.
    in_out: matrices are (in, out).
    as_in_gpt_oss: the gate is called a router, and columns of gate and up alternate.
    weights_inputs: what an expert is given is multiplied by its weight, not what it returns.
    """

    count: str = "num_experts"
    width: str = "moe_intermediate_size"
    chosen: str = "num_experts_per_tok"
    switch: str | None = None
    shared_width: str | None = None
    shared: str | None = None
    dense: str = "first_k_dense_replace"
    router: str = "mlp.gate"
    modules: str = "mlp.experts"
    beside_mlp: bool = False
    wide_router: bool = False
    scaling: str = "routed_scaling_factor"
    place: str = "mlp"
    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    stacked: bool = False
    in_files: Mapping[str, str] = field(default_factory=dict)
    correction: str | None = "mlp.gate"
    correction_name: str = "e_score_correction_bias"
    correction_in_files: str | None = None
    correction_row: bool = False
    in_out: bool = False
    as_in_gpt_oss: bool = False
    weights_inputs: bool = False


@dataclass(frozen=True, kw_only=True)
class Family:
    """What the config.json and the files of one architecture leave unsaid.

    model_type: what config.json calls it.
    defaults: what transformers assumes where config.json is silent. Some families alone have a field of these names:
        a `kv_lora_rank` (whose attention is latent), `linear_...` (whose attention is linear in most blocks),
        `mamba_...` (which have a state space there),
        `rope_local_base_freq` (blocks with a window have a rotary embedding of their own), a `global_head_dim` (blocks
        without a window have heads of their own).
    fixed: what its code has, and no config.json says, in the fields of ModelSpec.
    biases: the fields of its config.json that say which projections have a bias. Where none is for o alone, that of q,
        k and v is for o too, if `out_bias`.
    kv_for_each: there are as many key-value heads as query heads where config.json is silent.
    names: what its config.json calls other fields than others do.
    windows: which blocks have the window that config.json states; where `windows_switched`, none if it does not switch
        it on apart.
    rotated: which blocks have rotary embedding, "switched" all or none as config.json says; `partly_rotated`: of each
        head a part may be turned.
    late_queries: queries are multiplied that come later than the original length of their rotary embedding.
    norms: what a block calls its norms, in the order of `schedules.model.Norms`, where the usual names are others.
    modules: what a layer calls its modules, where the usual names are others.
    branches_apart: what is attention of one of our blocks, or its MLP, is a layer of its own in its config.json and
        files, and each may follow its like.
    root: what files call the decoder.
    apart: within a model that sees images it is a whole, its head included.
    experts: of a mixture.
    interleaved: files have what linear attention is computed from in two matrices, one key head's rows after another's.
    bends_logits: its config.json may say towards which number logits are bent.
    untrained: what transformers computes with in a block, makes no gradient of, and is not needed for short sequences:
        the beginnings of names. It is no parameter here, and is exported as it was where the training began.
    predicts_more: files have a further block, which predicts the token after the next: as a block, or apart as "mtp".
    """

    model_type: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    biases: tuple[str, ...] = ()
    out_bias: bool = True
    kv_for_each: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    windows: Literal["none", "some", "all"] = "none"
    windows_switched: bool = False
    rotated: Literal["all", "none", "in windows", "listed", "switched"] = "all"
    partly_rotated: bool = False
    late_queries: bool = False
    norms: tuple[str, str, str, str] | None = None
    modules: Mapping[str, str] = field(default_factory=dict)
    branches_apart: bool = False
    root: str = "model"
    apart: bool = False
    experts: Experts | None = None
    interleaved: bool = False
    bends_logits: bool = False
    untrained: tuple[str, ...] = ()
    predicts_more: Literal["no", "as a block", "apart"] = "no"

    def module_name(self, name: str) -> str:
        """What transformers calls a parameter of a layer within it, or beside all blocks."""
        for ours, theirs in self.modules.items():
            if name.startswith(f"{ours}."):
                return theirs + name.removeprefix(ours)
        return name

    @property
    def latent(self) -> bool:
        """Whether attention is latent."""
        return "kv_lora_rank" in self.defaults

    @property
    def hybrid(self) -> bool:
        """Whether most blocks have linear attention, or a state space."""
        return "linear_num_key_heads" in self.defaults or self.of_mamba

    @property
    def of_mamba(self) -> bool:
        """Whether that is a state space."""
        return "mamba_n_heads" in self.defaults

    @property
    def two_ropes(self) -> bool:
        """Whether blocks without a window have one rotary embedding, those with a window another."""
        return "rope_local_base_freq" in self.defaults

    @property
    def two_heads(self) -> bool:
        """Whether blocks without a window have heads of one kind, those with a window of another."""
        return "global_head_dim" in self.defaults
