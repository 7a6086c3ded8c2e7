"""What a compute op moves through device memory, by estimate."""

from __future__ import annotations

import math

from schedules import fp8
from schedules.flops import last_width
from schedules.model import FP32, ModelError, ModelSpec
from schedules.op import Phase
from schedules.saved import hidden_bytes
from schedules.trained import params, shapes
from schedules.workload import Workload
from schedules.workspace import loss_chunks, mlp_parts


def phases_of(model: ModelSpec, i: int) -> tuple[Phase, ...]:
    """The phases in which layer i is computed. Raises ModelError when there is no layer i."""
    if model.is_block(i):
        return Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD
    return (Phase.EMBED, Phase.BACKWARD) if i == model.embed else (Phase.LOSS,)


def op_bytes(
    model: ModelSpec, i: int, phase: Phase, workload: Workload, *, fused: bool = True, output: bool = True
) -> int:
    """Device-memory traffic of a compute op on layer i for one micro-batch, by estimate.

    Every kernel reads its inputs and writes its outputs once; what products reload into their tiles is left out.
    Raises ModelError for a phase that layer i does not compute.
    """
    return product_bytes(model, i, phase, workload, output=output) + pointwise_bytes(
        model, i, phase, workload, fused=fused, output=output
    )


def product_bytes(model: ModelSpec, i: int, phase: Phase, workload: Workload, *, output: bool = True) -> int:
    """Of `op_bytes` what matrix products and attention move: their operands, weights included, and results.

    Forward of a block, per token, in activation elements:
    3h + q+k+v  q, k, v projections; of latent attention those that compress and those that expand
    q+k+v + a   attention reads q, k, v and writes its output
    a + h       o projection
    2h + 2f     gate and up, without a gate half of that; with experts their input is one copy per choice, and a router
                comes before
    f + h       down; with experts one output per choice; h and a latent vector to make their inputs, and of outputs
    3h          shared experts' gate, up and down, whose width is in f
    and all weights, read once; adapters move their input and output and what lies between. Backward: twice the
    activations, since each product has two in its backward, the weights read and their gradients written. What runs
    for its activations alone leaves out the down projection, and gate and up where backward computes them again, unless
    the MLP's output is one of them; of experts', those that are shared alone.
    Loss, per chunk: the projection read twice (logits, d hidden) and its gradient read and written; logits written by
    one product, and their gradient read by two.
    """
    tokens, b = workload.tokens_per_microbatch, workload.bytes
    if phase not in phases_of(model, i):
        raise ModelError(f"{model.name}: layer {model.layer_name(i)} has no compute op of phase {phase}")
    if i == model.embed:
        return 0
    if i == model.head:
        chunks = loss_chunks(workload)
        matrix, logits = model.vocab_size * model.hidden_size, tokens * model.vocab_size * b.activation
        if workload.task == "evaluate":
            return chunks * matrix * b.weight + logits
        return chunks * matrix * 2 * (b.weight + (b.grad if workload.lora_rank is None else 0)) + 3 * logits
    h, f = model.hidden_size, model.mlp_width(i)
    attended = 0  # what a recurrence moves is among what pointwise kernels do
    if model.recurrence(i) is None:
        heads = model.heads(i)
        attended = heads.q_width + heads.k_width + heads.v_width + heads.attended_width
    elements, weights = sum(map(sum, model.attention_matrices(i))) + attended, model.params(i) * b.weight
    elements += model.mlp_matrices * (h + f) if model.has_mlp(i) else 0
    if model.has_experts(i):
        of_chosen = model.num_experts_per_tok * model.expert_input - h
        elements += h + model.num_experts + model.mlp_matrices * (of_chosen + (h if model.n_shared_experts else 0))
        elements += 2 * (h + model.moe_latent_size) if model.moe_latent_size else 0
        elements += h + 1 if model.shared_expert_gate else 0
    trained = params(model, workload, i)
    if workload.lora_rank is not None:
        elements += sum(sum(shape) for shape in model.adapter_shapes(i, workload.lora_rank).values())
        weights += trained * b.weight
    again = workload.recompute == "mlp"
    if workload.matmul is not None:
        attended *= (2 if phase == Phase.BACKWARD else 1) * b.activation
        scaled = fp8.product_bytes(model, phase, workload, output=output, parts=mlp_parts(workload))
        return tokens * attended + scaled
    if phase == Phase.BACKWARD:
        elements = 2 * elements + (2 * h + 2 * f if again else 0)
        weights += trained * b.grad + (2 * h * f * b.weight if again else 0)
    if phase == Phase.RECOMPUTE and not output:
        last = last_width(model, i)
        if not model.keeps_mlp_output(i):
            elements -= h + last + (2 * h + 2 * f if again else 0)
            weights -= (3 if again else 1) * h * last * b.weight
        elif last and not (model.post_norm or model.shared_expert_gate):
            elements -= h * ((model.n_shared_experts > 0) + (model.moe_latent_size > 0)) + last
            weights -= h * last * b.weight
    return tokens * elements * b.activation + weights


def pointwise_bytes(
    model: ModelSpec, i: int, phase: Phase, workload: Workload, *, fused: bool = True, output: bool = True
) -> int:
    """Of `op_bytes` what kernels between products move.

    Forward of a block, per token, in activation elements, and its backward:
    4h          8h             two norms of inputs, read and written; gradient, input and what the input's gradient is
                               added to read, the sum written; in blocks of one branch half of this and of the next two
    4h          6h             two norms of outputs, read and written; gradient and input read, their gradient written
    6h          0 or 6h        two residual sums, whose gradients are those of the norms' inputs, or where these have no
                               norm sums, too
    2(q + k)    2(q + k)       rotary, and back; nothing in blocks without; of latent attention see `_turned_elements`
    2(q + k)    3(q + k)       qk_norm; or the norms of latent vectors
    3a          5a + 2(a + q)  a gate of attention's output; and its gradient put beside queries' again, if
                               one projection makes both
    of a recurrence in place of these what it moves, see `schedules.delta` and `schedules.mamba`, and the gated norm:
                               3a, 5a
    3f          5f             activation and product: gate and up read, product written; its gradient, gate and up
                               read, both gradients written; without a gate 2f and 3f
    (k + 1)h    (k + 4)h       with experts copies of the input, or of its latent vector, for k choices; their gradients
                               summed, and the router's
    (k + 1)h    2(k + 1)h      with experts the sum of what was chosen; outputs' and weights' gradients
    2h          2h             with a layer_scalar what is returned; and its gradient
    3h          3h             with shared experts the sum with their output; of their input's gradient and the others'
    8h          14h            with experts beside an MLP two more norms of inputs, two of outputs; but no sums of the
                               gradients of one input
    2h          6h             their gate: output read, product written; gradient and output read, its gradient written,
                               and what the input's gradient is summed with
    The gradients of experts' matrices are made beside their slab, and read and written once more. Where kernels are not
    `fused` forward moves `_unfused_block_bytes` more, and backward twice what forward does.
    Backward makes again what is computed again: norms with their copies for experts, gate, up and their product, and
    what gates of attention let through; of frozen experts neither copies nor products.
    What runs for its activations alone leaves out the last residual sum, and unless that output is normalised, with
    experts the sum of outputs, and what backward computes again of an MLP.
    Embedding: one row read and one written per token; its backward reads d and updates gradient rows. Where these have
    16 bits its terms are sorted and added up in fp32 first: eight passes. Where embeddings are scaled, two more each.
    Loss, per token: logits read and made into their gradient, in fp32 where that is not `fused`; and norm input, output
    and both gradients.
    """
    tokens, b = workload.tokens_per_microbatch, workload.bytes
    h, f = model.hidden_size, model.mlp_width(i)
    if i == model.embed:
        passes = 2 if model.embedding_scale != 1 else 0
        if phase == Phase.EMBED:
            return tokens * h * (b.weight + (1 + passes) * b.activation)
        widened = (8 + passes) * FP32 if b.grad < FP32 else passes * b.activation
        return tokens * h * (b.activation + 2 * b.grad + widened)
    if i == model.head:
        logits, hidden = tokens * model.vocab_size, hidden_bytes(model, workload)
        if workload.task == "evaluate":
            return logits * FP32 + 2 * hidden
        return 2 * logits * (b.activation if fused else FP32) + 8 * hidden
    copied = summed = (1 + model.num_experts_per_tok) * model.expert_input if model.has_experts(i) else 0
    shared = 3 * h if model.n_shared_experts and model.has_experts(i) else 0
    gated = h if model.shared_expert_gate and model.has_experts(i) else 0
    normed = _normed_in_attention(model, i)
    turned, turned_back = _turned_elements(model, i)
    heads = model.heads(i)
    if (gate := heads.gate_width) and model.recurrence(i) is None:
        beside = 2 * (gate + heads.q_width) if model.attn_output_gate else 0
        turned, turned_back = turned + 3 * gate, turned_back + 5 * gate + beside
    branches, of_mlp = model.branches(i), model.mlp_matrices * f
    norms = branches * (model.pre_norm + model.post_norm) * h + (4 * h if model.experts_beside_mlp else 0)
    scaled = 2 * h if model.layer_scalar else 0
    sums = 3 * branches * h
    elements = 2 * norms + sums + turned + 2 * normed + of_mlp + copied + summed + shared + 2 * gated + scaled
    nbytes = elements * b.activation
    if not fused:
        nbytes += _unfused_block_bytes(model, i, b.activation)
    if phase == Phase.BACKWARD:
        if fused:
            # the gradients of one input: the router's, experts' and those' that are given all tokens
            added = 0 if model.experts_beside_mlp else shared + (3 * h if model.has_experts(i) else 0)
            of_norms = branches * ((4 if model.pre_norm else 3) * h + (3 * h if model.post_norm else 0))
            of_norms += 14 * h if model.experts_beside_mlp else 0  # four more, two of which add to their input's
            of_experts = copied + added + 2 * summed + 6 * gated
            elements = of_norms + turned_back + 3 * normed + (5 if model.gated_mlp else 3) * f + of_experts
            nbytes = elements * b.activation
        else:
            nbytes *= 2
        nbytes += 2 * h * b.activation if model.layer_scalar and fused else 0  # else counted as forward's
        if model.residual_multiplier != 1:  # the gradients of both branches, read and written
            nbytes += 4 * h * b.activation
        if workload.recompute != "none":
            recurrence = model.recurrence(i)
            opened = heads.gate_width if recurrence is None else recurrence.value_width
            normed_again = (2 * branches * h if model.pre_norm else 0) + (4 * h if model.experts_beside_mlp else 0)
            if model.has_experts(i) and workload.lora_rank is not None:
                copied, of_mlp = 0, model.mlp_matrices * model.shared_width
            nbytes += (normed_again + of_mlp + 3 * opened + copied) * b.activation
    if phase == Phase.RECOMPUTE and not output:
        unread = shared + 2 * gated + (0 if model.moe_latent_size else summed)
        unread += of_mlp if workload.recompute == "mlp" else 0
        nbytes -= (3 * h + scaled + (0 if model.post_norm else unread)) * b.activation
    moved = 2 * _of_experts(model, workload, i) * b.grad if phase == Phase.BACKWARD else 0
    if (recurrence := model.recurrence(i)) is not None:
        moved += tokens * FP32 * recurrence.moved(backward=phase == Phase.BACKWARD)[1]
    if workload.matmul is not None:
        moved += fp8.scaling_bytes(model, phase, workload, output=output, parts=mlp_parts(workload))
    return tokens * nbytes + moved


def _normed_in_attention(model: ModelSpec, i: int) -> int:
    """Elements per token of queries, keys and values, or of latent vectors, that have a norm."""
    if model.recurrence(i) is not None:
        return 0
    if model.latent is not None:
        return model.latent.normed
    heads = model.heads(i)
    of_values = heads.v_width if model.value_norm else 0
    return of_values + (heads.q_width + heads.k_width if model.has_qk_norm(i) else 0)


def _turned_elements(model: ModelSpec, i: int) -> tuple[int, int]:
    """Elements per token that rotary embedding moves in block i, forward and backward.

    Queries and keys read and written, in blocks with it. Keys of latent attention are put together of what was expanded
    and of the turned one for all heads, and values are copied from beside them. Flash attention wants these as wide as
    keys: forward pads values, and cuts what it returns; backward pads these and its gradient, and cuts values'. Keys
    and values that are repeated are copied, in backward again, and their gradients summed. A recurrence turns nothing:
    what it is given and returns, and its gated norm.
    """
    if (recurrence := model.recurrence(i)) is not None:
        there, back = (recurrence.moved(backward=backward)[0] for backward in (False, True))
        return there + 3 * recurrence.value_width, back + 5 * recurrence.value_width
    heads = model.heads(i)
    q, k, v = heads.q_width, heads.k_width, heads.v_width
    if (latent := model.latent) is None:
        both = 2 * (q + k) if model.has_rope(i) else 0
        copied = k + v + 2 * q if heads.repeated else 0
        return both + copied, both + 2 * copied
    cut = v
    moved = (2 * q if model.has_rope(i) else 0) + latent.expanded + latent.rope + k + cut
    pass_of_one = q + cut if latent.padded else 0
    return moved + 2 * pass_of_one, moved + 4 * pass_of_one


def _of_experts(model: ModelSpec, workload: Workload, i: int) -> int:
    """Elements of the gradients of block i's experts' matrices."""
    trained = shapes(model, workload, i).items()
    return sum(math.prod(shape) for name, shape in trained if model.is_of_experts(name) and len(shape) == 3)


def _unfused_block_bytes(model: ModelSpec, i: int, a: int) -> int:
    """Bytes per token that block i's forward moves beyond fused kernels when PyTorch runs it op by op, as
    Hugging Face's layers are written (transformers, modeling_qwen2.py; modeling_llama.py is alike). `a` is the
    bytes of an activation.

    norm     per element: to fp32, squared, mean, scaled, back, times weight: 24 bytes of fp32 passes and 4 a (in
             fp32 28 in all, for nothing is cast), of which a fused kernel needs 2 a
    rotary   x cos, minus half, concatenated, x sin, sum: 10 elements for 2 when fused
    gate     activation and product apart: 5 elements for 3 when fused; without one activation and square, 4 for 2
    """
    h, f, heads = model.hidden_size, model.mlp_width(i), model.heads(i)
    q, k = heads.q_width, heads.k_width
    norm = 24 + 2 * a if a < FP32 else 20
    if (latent := model.latent) is not None:
        q, k = latent.heads * latent.rope, latent.rope  # that are turned
    elements = (8 * (q + k) if model.has_rope(i) else 0) + 2 * f
    norms = model.branches(i) * (model.pre_norm + model.post_norm) * h + _normed_in_attention(model, i)
    norms += 4 * h if model.experts_beside_mlp else 0
    if (recurrence := model.recurrence(i)) is not None:
        return norms * norm + 2 * f * a + FP32 * recurrence.unfused_words
    elements += 2 * heads.gate_width
    return norms * norm + elements * a
