"""Stateless layers of decoders: functions of parameters that lie in whichever slot an op names.

A template owns no parameters. It is called with `params`: by name, views into one contiguous slab (`views`), with names
and shapes as in `ModelSpec.parameter_shapes`. Anything else that has `constants` and `forward(params, x, output=...)`
can take a block's place, such as `torch.func.functional_call` on an unmodified module.

What a block saves for its backward is what `schedules.saved` counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatrain import fp8
from megatrain.attention import Attention, band
from megatrain.autograd import again
from megatrain.delta import KimiAttention, LinearAttention
from megatrain.documents import Documents
from megatrain.embed import Embed
from megatrain.experts import Mixture
from megatrain.head import Head
from megatrain.latent import Expansion
from megatrain.layer_parts import gated, mlp_again, norm_beside, opened, rms_norm, rotate, squared, times, weighed
from megatrain.linear import added, linear, linears
from megatrain.mamba import StateSpace
from megatrain.pointwise import PLAIN, Pointwise
from megatrain.rotary import Turns, depends_on_length, sharper_products, turns, unrotated_queries
from megatrain.sink import Sink
from schedules.delta import DeltaNet
from schedules.errors import InputError
from schedules.heads import FLASH_DIM
from schedules.kimi_delta import KimiDelta
from schedules.model import ModelSpec, Norms
from schedules.parameters import (
    AFTER_EXPERTS,
    AFTER_MLP,
    BEFORE_EXPERTS,
    GATE_PROJ,
    LAYER_SCALAR,
    OF_EACH_EXPERT,
    ROUTER_SCALE,
    SHARED,
    SHARED_GATE,
    SHARED_GATED,
)

CAUSAL = Attention()


class TemplateError(InputError):
    """A model that has no template, or a slab that does not have a layer's shapes."""


def views(flat: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The parameters of a layer as views into its slab, in the order of `shapes`; nothing is copied.

    `flat` is one-dimensional and has exactly the layer's elements; raises TemplateError otherwise.
    """
    sizes = [math.prod(shape) for shape in shapes.values()]
    if flat.dim() != 1 or flat.numel() != sum(sizes):
        raise TemplateError(f"a slab of shape {list(flat.shape)} does not hold {sum(sizes)} parameters")
    parts = torch.split(flat, sizes)
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def sinks(flat: Tensor, shapes: Mapping[str, tuple[int, ...]], *, accumulate: bool) -> dict[str, Sink]:
    """The gradients of a layer as places in its gradient slab; see `views`."""
    return {name: Sink(view, accumulate) for name, view in views(flat, shapes).items()}


@dataclass(frozen=True, kw_only=True, eq=False)
class Block:
    """A decoder block: grouped-query or latent attention with rotary embedding, linear attention or a state space, then
    an MLP or a mixture; or one of the two.

    attends, has_mlp: which of them.
    gated_mlp: the MLP has a gate.
    residual_multiplier: of what attention and the MLP add.
    rotary: the tables of rotary embedding on the device; None without it.
    rotates_neighbours: even dimensions are turned with the next.
    expansion: what attention reads where it is latent.
    linear: what takes attention's place.
    of_values: what the norm of values multiplies by: ones, [head_dim]; None without such a norm.
    of_heads: the same of queries and keys, where their norm has no weights.
    late: what queries are multiplied by that have no rotary embedding, [seq, 1, 1]; None if by 1.
    output_gate: queries are projected with as many numbers more, which gate what attention returns.
    pointwise_again: the outputs of norms and gate are not kept, and backward computes them again.
    mlp_chunk: the MLP keeps its input only, and backward computes it again, that many tokens at a time.
    in_fp8: the block multiplies by its matrices in 8 bits, and these functions make the operands.
    """

    head_dim: int
    norms: Norms
    attends: bool = True
    has_mlp: bool = True
    gated_mlp: bool = True
    eps: float
    norm_offset: float = 0.0
    hidden_act: str = "silu"
    residual_multiplier: float = 1.0
    rotary: Turns | None
    rotates_neighbours: bool = False
    attention: Attention = CAUSAL
    expansion: Expansion | None = None
    linear: LinearAttention | StateSpace | None = None
    of_values: Tensor | None = None
    of_heads: Tensor | None = None
    late: Tensor | None = None
    output_gate: bool = False
    mixture: Mixture | None = None
    pointwise: Pointwise = PLAIN
    pointwise_again: bool = False
    mlp_chunk: int | None = None
    in_fp8: Pointwise | None = None

    def within(self, documents: Documents | None) -> Block:
        """The same where tokens attend to those of their document alone."""
        return self if documents is None else replace(self, attention=replace(self.attention, documents=documents))

    @property
    def constants(self) -> tuple[Tensor, ...]:
        mask = () if self.attention.mask is None else (self.attention.mask,)
        others = (t for t in (self.of_values, self.of_heads, self.late) if t is not None)
        return (*(self.rotary.tensors if self.rotary else ()), *mask, *others)

    def forward(self, params: Mapping[str, Tensor], x: Tensor, *, output: bool = True) -> Tensor:
        """x [batch, seq, hidden] -> the same shape; params as in `ModelSpec.parameter_shapes`.

        Without `output` only what backward reads is computed, and the result has no values.
        """
        if self.attends:
            x = self._attended(params, x, output or self.has_mlp)
        if self.has_mlp:
            x = self._through_mlp(params, x, output)
        return x if LAYER_SCALAR not in params else times(x, params[LAYER_SCALAR], output=output)

    def _attended(self, params: Mapping[str, Tensor], x: Tensor, output: bool) -> Tensor:
        """x, and what attention adds to it."""
        before, after, *_ = self.norms
        x, branch = self._before(x, params, before, lambda y: self._attention(params, y, output or after is not None))
        return added(x, self._after(branch, params, after), output, times=self.residual_multiplier)

    def _through_mlp(self, params: Mapping[str, Tensor], x: Tensor, output: bool) -> Tensor:
        """x, and what the MLP adds to it, or experts do."""
        *_, before, after = self.norms
        if self.mixture is not None and self.mixture.each is not None:
            x, branch = self._beside_mlp(params, x)
        else:
            x, branch = self._before(x, params, before, lambda y: self._mlp(params, y, output or after is not None))
        return added(x, self._after(branch, params, after), output, times=self.residual_multiplier)

    def _before(
        self, x: Tensor, params: Mapping[str, Tensor], norm: str | None, branch: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """x, and what a branch makes of it, or of its `norm` where there is one."""
        return (x, branch(x)) if norm is None else self._normed(x, params[f"{norm}.weight"], branch)

    def _normed(self, x: Tensor, weight: Tensor, branch: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """x, and what a branch makes of x normalised."""
        x, normed = norm_beside(x, weight, self.eps, self.pointwise, offset=self.norm_offset)

        def make(x: Tensor, weight: Tensor) -> Tensor:
            return self.pointwise.rms_forward(x, weight, self.eps, self.norm_offset)[0]

        with self._derived(normed, make, x, weight):
            return x, branch(normed)

    def _beside_mlp(self, params: Mapping[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        """x, and what an MLP and experts beside it make of it, each of its own norm."""
        mixture = self.mixture
        assert mixture is not None
        x, mlp = self._before(x, params, self.norms.before_mlp, lambda y: self._whole_mlp(params, y, True))
        mlp = self._after(mlp, params, AFTER_MLP)
        x, scores = self._normed(x, params[ROUTER_SCALE], lambda y: mixture.scores(params, y))
        scores = scores * x.shape[-1] ** -0.5
        x, experts = self._before(
            x, params, BEFORE_EXPERTS, lambda y: mixture.of_scores(params, y, scores, self._derived)
        )
        return x, mlp + self._after(experts, params, AFTER_EXPERTS)

    def _after(self, branch: Tensor, params: Mapping[str, Tensor], norm: str | None) -> Tensor:
        return branch if norm is None else self._norm(branch, params[f"{norm}.weight"])

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self.eps, self.pointwise, offset=self.norm_offset)

    def _derived(self, t: Tensor, make: Callable[..., Tensor], *inputs: Tensor) -> AbstractContextManager[None]:
        return again(t, make, *inputs) if self.pointwise_again else nullcontext()

    def _mlp(self, params: Mapping[str, Tensor], x: Tensor, output: bool) -> Tensor:
        if self.mixture is not None:
            y = self.mixture.forward(params, x, self._derived, output=output)
            if f"{SHARED}.up_proj.weight" in params:
                return added(y, self._whole_mlp(params, x, output, SHARED), output)
            if f"{SHARED_GATE}.weight" not in params:
                return y
            shared = self._whole_mlp(params, x, True, SHARED_GATED)  # which backward reads
            share = linear(params, SHARED_GATE, x)
            return added(y, weighed(shared, share, self.pointwise, output=output), output)
        if self.mlp_chunk is None:
            return self._whole_mlp(params, x, output)
        own = {name: p for name, p in params.items() if name.startswith("mlp.")}
        return mlp_again(x, own, self._whole_mlp, chunk=self.mlp_chunk, output=output)

    def _whole_mlp(self, params: Mapping[str, Tensor], x: Tensor, output: bool, place: str = "mlp") -> Tensor:
        if not self.gated_mlp:
            up = linear(params, f"{place}.up_proj", x)
            product = squared(up, self.pointwise)
            derived = self._derived(product, self.pointwise.squared_forward, up)
            del up
            with derived:
                return linear(params, f"{place}.down_proj", product, output=output)
        names = f"{place}.gate_proj", f"{place}.up_proj"
        gate, up = linears(params, names, x, fused=f"{place}.gate_up_proj", in_fp8=self.in_fp8)
        product = gated(gate, up, self.hidden_act, self.pointwise)
        derived = self._derived(product, self.pointwise.gate_forward(self.hidden_act), gate, up)
        del gate, up  # a forward that saves nothing can free them here
        with derived:
            return linear(params, f"{place}.down_proj", product, output=output, in_fp8=self.in_fp8)

    def _attention(self, params: Mapping[str, Tensor], x: Tensor, output: bool) -> Tensor:
        if self.linear is not None:
            return self.linear.forward(params, x, self._derived, output=output)
        gate: Tensor | None = None
        if self.expansion is None:
            q, k, v, gate = self._projected(params, x)
        else:
            turns = None if self.rotary is None else self._turns(x.shape[1])
            q, k, v = self.expansion.forward(params, x, turns, self._derived)
        y = self.attention.forward(q, k, v, params.get("self_attn.sinks"))
        del q, k, v  # a forward that saves nothing can free them here
        if gate is None:
            return linear(params, "self_attn.o_proj", y.flatten(2), output=output, in_fp8=self.in_fp8)
        product = opened(y, gate, self.pointwise)
        with self._derived(product, self.pointwise.opened_forward, y, gate):
            del y, gate
            return linear(params, "self_attn.o_proj", product.flatten(2), output=output)

    def _projected(self, params: Mapping[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries, keys, values [batch, seq, heads, head_dim], and what gates attention's output, if anything does."""
        batch, seq, _ = x.shape
        names = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
        values_are_keys = "self_attn.v_proj.weight" not in params
        if values_are_keys:
            names.pop()
        if gates := f"{GATE_PROJ}.weight" in params:  # by a projection of its own
            names.append(GATE_PROJ)
        q, k, *others = linears(params, names, x, fused="self_attn.qkv_proj", in_fp8=self.in_fp8)
        v = k if values_are_keys else others[0]
        if self.of_values is not None:
            v = v.view(batch, seq, -1, self.head_dim)
            beside, v = norm_beside(v, self.of_values, self.eps, self.pointwise, offset=0.0)
            k = beside if values_are_keys else k
        gate = None
        if gates:
            gate = others[-1].view(batch, seq, -1, self.head_dim)
        if self.output_gate:  # behind each head's query
            q, gate = torch.unflatten(q, -1, (-1, 2, self.head_dim)).unbind(-2)
        if "self_attn.q_norm.weight" in params:
            weights = params["self_attn.q_norm.weight"], params["self_attn.k_norm.weight"]
            # a norm is over as many elements as its weight has: a head's, or those of all heads of a token
            q = self._norm(q.view(batch, seq, -1, len(weights[0])), weights[0])
            k = self._norm(k.view(batch, seq, -1, len(weights[1])), weights[1])
        q, k, v = (y.view(batch, seq, -1, self.head_dim) for y in (q, k, v))
        if self.of_heads is not None:
            q, k = (self._norm(y, self.of_heads) for y in (q, k))
        if self.late is not None:
            q = q * self.late[:seq]
        if self.rotary is not None:
            turns, neighbours = self._turns(seq), self.rotates_neighbours
            q = rotate(q, *turns.of_queries, self.pointwise, neighbours=neighbours)
            k = rotate(k, *turns.of_keys, self.pointwise, neighbours=neighbours)
        return q, k, v, gate

    def _turns(self, seq: int) -> Turns:
        """Those of a sequence of that length."""
        assert self.rotary is not None
        if seq > (prepared := len(self.rotary.of_keys[0])):
            raise TemplateError(f"a sequence of {seq} tokens is longer than the {prepared} prepared for")
        return self.rotary.first(seq)


@dataclass(frozen=True, kw_only=True)
class Templates:
    """One template per kind of layer; `blocks` is keyed by `ModelSpec.layer_kind`."""

    embed: Embed
    blocks: Mapping[str, Block]
    head: Head


def templates(
    model: ModelSpec,
    *,
    seq_len: int,
    device: torch.device,
    dtype: torch.dtype,
    pointwise: Pointwise = PLAIN,
    pointwise_again: bool = False,
    mlp_chunk: int | None = None,
    matmul: str | None = None,
    documents: bool = False,
) -> Templates:
    """Templates for sequences of up to `seq_len` tokens; `pointwise_again` and `mlp_chunk` as in Block, `matmul` as in
    Workload; `documents`: sequences may hold several.

    Allocates the rotary tables: 2 x seq_len x rotary_dim / 2 elements on `device`, which all blocks share, and as many
    again if blocks with a window have a base of their own, or late queries are multiplied.

    Raises ModelError for an unknown rope_scaling, TemplateError for windows, sinks or documents in fp32 or wide heads
    on a GPU, and for documents beside linear attention, and InputError where there are no products in `matmul`.
    """
    if documents and (linear := [i for i in model.blocks if model.recurrence(i) is not None]):
        what = "linear attention" if isinstance(model.recurrence(linear[0]), DeltaNet) else "state space"
        raise TemplateError(
            f"{model.name}: the {what} of {len(linear)} of its blocks goes on from one document to the next: "
            "leave out the token at which documents end"
        )
    if documents and depends_on_length(model, seq_len):
        raise TemplateError(
            f"{model.name}: its rotary embedding depends on how long a sequence is, and documents would count as long "
            f"as theirs, {seq_len:,} tokens: take shorter ones, or leave out the token at which documents end"
        )
    if documents and device.type == "cuda" and dtype == torch.float32:
        raise TemplateError(f"{model.name}: attention within documents has no fp32 kernel on a GPU")
    for i in model.blocks if documents else ():
        _require_flash(model, i, device, "documents")
    if matmul is not None:
        fp8.require(device)
    of_all = turns(model, seq_len, device, dtype)
    own = model.rope_local_base_freq
    local = of_all if own is None else turns(model, seq_len, device, dtype, theta=own)
    block = Block(
        head_dim=model.head_dim,
        norms=model.norms(0),
        gated_mlp=model.gated_mlp,
        eps=model.rms_norm_eps,
        norm_offset=model.norm_offset,
        hidden_act=model.hidden_act,
        residual_multiplier=model.residual_multiplier,
        rotary=of_all,
        rotates_neighbours=model.rope_interleave,
        expansion=None if model.latent is None else Expansion(widths=model.latent, pointwise=pointwise),
        pointwise=pointwise,
        pointwise_again=pointwise_again,
        mlp_chunk=mlp_chunk,
        in_fp8=None if matmul is None else pointwise,
        output_gate=model.attn_output_gate,
    )
    of_kind = {model.layer_kind(i): i for i in model.blocks}
    return Templates(
        embed=Embed(scale=_embedding_scale(model, dtype)),
        blocks={
            kind: replace(
                block,
                head_dim=model.heads(i).dim,
                norms=model.norms(i),
                attends=model.has_attention(i),
                has_mlp=model.has_mlp(i),
                of_values=_ones(model, i, device, dtype) if model.value_norm else None,
                of_heads=_ones(model, i, device, dtype) if model.unit_qk_norm and model.has_rope(i) else None,
                late=None if model.has_rope(i) else unrotated_queries(model, seq_len, device, dtype),
                attention=_attention(model, i, seq_len, device, dtype),
                linear=_linear(model, i, pointwise),
                mixture=_mixture(model, pointwise) if model.has_experts(i) else None,
                rotary=None if not model.has_rope(i) else of_all if model.window(i) is None else local,
            )
            for kind, i in sorted(of_kind.items())
        },
        head=Head(
            eps=model.rms_norm_eps,
            norm_offset=model.norm_offset,
            logits_scaling=model.logits_scaling,
            softcap=model.final_logit_softcapping,
            pointwise=pointwise,
        ),
    )


def _embedding_scale(model: ModelSpec, dtype: torch.dtype) -> float | None:
    """As transformers has it: Gemma's rounded to the type that it multiplies (modeling_gemma3.py)."""
    if model.scale_embeddings:
        return torch.tensor(model.embedding_scale).to(dtype).item()
    return None if model.embedding_scale == 1 else model.embedding_scale


def _attention(model: ModelSpec, i: int, seq_len: int, device: torch.device, dtype: torch.dtype) -> Attention:
    window = model.window(i)
    if window is not None and window >= seq_len:
        window = None
    scale = model.attention_scale
    if (sharper := sharper_products(model)) != 1:
        scale = sharper * model.heads(i).dim ** -0.5
    if window is None and not model.attention_sinks:
        return replace(CAUSAL, scale=scale)
    if device.type == "cuda" and dtype == torch.float32:
        raise TemplateError(f"{model.name}: attention with a window or sinks has no fp32 kernel on a GPU")
    _require_flash(model, i, device, "a window or sinks")
    mask = None if device.type == "cuda" else band(seq_len, window, device, dtype)
    return Attention(window=window, mask=mask, scale=scale)


def _require_flash(model: ModelSpec, i: int, device: torch.device, what: str) -> None:
    """Raises TemplateError where attention with `what` has no kernel for block i's heads."""
    if device.type == "cuda" and (dim := model.heads(i).dim) > FLASH_DIM:
        raise TemplateError(
            f"{model.name}: attention with {what} has no kernel on a GPU for heads of {dim}, only up to {FLASH_DIM}"
        )


def _ones(model: ModelSpec, i: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.ones(model.heads(i).dim, device=device, dtype=dtype)


def _linear(model: ModelSpec, i: int, pointwise: Pointwise) -> LinearAttention | StateSpace | None:
    widths = model.recurrence(i)
    if isinstance(widths, DeltaNet):
        of = KimiAttention if isinstance(widths, KimiDelta) else LinearAttention
        return of(widths=widths, eps=model.rms_norm_eps, pointwise=pointwise)
    return None if widths is None else StateSpace(widths=widths, eps=model.rms_norm_eps, pointwise=pointwise)


def _mixture(model: ModelSpec, pointwise: Pointwise) -> Mixture:
    return Mixture(
        chosen=model.num_experts_per_tok,
        normalised=model.norm_topk_prob,
        correction=model.score_correction,
        sigmoid=model.sigmoid_router,
        scale=model.routed_scaling_factor,
        groups=model.n_group,
        chosen_groups=model.topk_group,
        wide=model.experts.wide_router,
        interleaved=model.experts.as_in_gpt_oss,
        in_out=model.experts.in_out,
        weights_inputs=model.experts.weights_inputs,
        hidden_act=model.hidden_act,
        gated=model.gated_mlp,
        latent=model.moe_latent_size > 0,
        router=model.experts.router,
        modules=model.experts.modules,
        first=model.expert_first,
        each=OF_EACH_EXPERT if model.experts_beside_mlp else None,
        pointwise=pointwise,
    )
