"""What a compute op moves through device memory and allocates for itself, by estimate."""

from __future__ import annotations

import math

from schedules import fp8
from schedules.delta import CHUNK, DeltaNet
from schedules.model import FP32, ModelError, ModelSpec
from schedules.op import Phase
from schedules.optimizer import step_workspace
from schedules.saved import hidden_bytes
from schedules.trained import params, shapes
from schedules.workload import Workload

# What an op works through at a time, so that its workspace does not grow with the step: kernels of these fill a GPU.
LOSS_CHUNK_TOKENS = 1024  # tokens of the loss, whose fp32 logits are 0.5 GB at a vocabulary of 128k
EMBED_CHUNK = 1 << 26  # elements of the embedding's gradient, where it has 16 bits and is summed in fp32: 0.27 GB
MLP_CHUNK_TOKENS = 8192  # tokens of an MLP that is computed again in backward: 0.23 GB for a width of 14,336
EXPERTS_CHUNK = 1 << 29  # elements of the gradient of a mixture's matrices, outside the slab that they go to: 1.1 GB
FEW_TERMS = 16  # a sum of these in 16 bits is not far off


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
    2h + 2f     gate and up; with experts their input is one copy per choice, and a router comes before
    f + h       down; with experts one output per choice
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
        chunks = _loss_chunks(workload)
        matrix, logits = model.vocab_size * model.hidden_size, tokens * model.vocab_size * b.activation
        if workload.task == "evaluate":
            return chunks * matrix * b.weight + logits
        return chunks * matrix * 2 * (b.weight + (b.grad if workload.lora_rank is None else 0)) + 3 * logits
    h, f = model.hidden_size, model.mlp_width(i)
    attended = 0  # what the rule of linear attention moves is among what pointwise kernels do
    if model.delta(i) is None:
        heads = model.heads(i)
        attended = heads.q_width + heads.k_width + heads.v_width + heads.attended_width
    elements, weights = sum(map(sum, model.attention_matrices(i))) + attended, model.params(i) * b.weight
    elements += 3 * h + 3 * f
    if model.has_experts(i):
        elements += h + model.num_experts + 3 * (model.num_experts_per_tok - 1) * h + _of_shared(model, i)
        elements += h + 1 if model.shared_expert_gate else 0
    trained = params(model, workload, i)
    if workload.lora_rank is not None:
        elements += sum(sum(shape) for shape in model.adapter_shapes(i, workload.lora_rank).values())
        weights += trained * b.weight
    again = workload.recompute == "mlp"
    if workload.matmul is not None:
        attended *= (2 if phase == Phase.BACKWARD else 1) * b.activation
        scaled = fp8.product_bytes(model, phase, workload, output=output, parts=_mlp_parts(workload))
        return tokens * attended + scaled
    if phase == Phase.BACKWARD:
        elements = 2 * elements + (2 * h + 2 * f if again else 0)
        weights += trained * b.grad + (2 * h * f * b.weight if again else 0)
    if phase == Phase.RECOMPUTE and not output:
        if not model.keeps_mlp_output(i):
            elements -= h + f + (2 * h + 2 * f if again else 0)
            weights -= (3 if again else 1) * h * f * b.weight
        elif _of_shared(model, i) and not (model.post_norm or model.shared_expert_gate):
            elements -= h + model.shared_width
            weights -= h * model.shared_width * b.weight
    return tokens * elements * b.activation + weights


def pointwise_bytes(
    model: ModelSpec, i: int, phase: Phase, workload: Workload, *, fused: bool = True, output: bool = True
) -> int:
    """Of `op_bytes` what kernels between products move.

    Forward of a block, per token, in activation elements, and its backward:
    4h          8h             two norms of inputs, read and written; gradient, input and what the input's gradient is
                               added to read, the sum written
    4h          6h             two norms of outputs, read and written; gradient and input read, their gradient written
    6h          0 or 6h        two residual sums, whose gradients are those of the norms' inputs, or where these have no
                               norm sums, too
    2(q + k)    2(q + k)       rotary, and back; nothing in blocks without; of latent attention see `_turned_elements`
    2(q + k)    3(q + k)       qk_norm; or the norms of latent vectors
    3a          5a + 2(a + q)  a gate of attention's output; and its gradient put beside queries' again
    of linear attention in place of these what its rule moves, see `schedules.delta`, and the gated norm: 3a, 5a
    3f          5f             activation and product: gate and up read, product written; its gradient, gate and up
                               read, both gradients written
    (k + 1)h    (k + 4)h       with experts copies of the input for k choices; their gradients summed, and the router's
    (k + 1)h    2(k + 1)h      with experts the sum of what was chosen; outputs' and weights' gradients
    2h          2h             with a layer_scalar what is returned; and its gradient
    3h          3h             with shared experts the sum with their output; of their input's gradient and the others'
    8h          14h            with experts beside an MLP two more norms of inputs, two of outputs
    2h          6h             their gate: output read, product written; gradient and output read, its gradient written,
                               and what the input's gradient is summed with
    The gradients of experts' matrices are made beside their slab, and read and written once more. Where kernels are not
    `fused` forward moves `_unfused_block_bytes` more, and backward twice what forward does.
    Backward makes again what is computed again: norms with their copies for experts, gate, up and their product, and
    what gates of attention let through.
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
    copied = summed = h + model.num_experts_per_tok * h if model.has_experts(i) else 0
    shared = _of_shared(model, i)
    gated = h if model.shared_expert_gate and model.has_experts(i) else 0
    normed = _normed_in_attention(model, i)
    turned, turned_back = _turned_elements(model, i)
    heads = model.heads(i)
    if (gate := heads.gate_width) and model.delta(i) is None:
        turned, turned_back = turned + 3 * gate, turned_back + 5 * gate + 2 * (gate + heads.q_width)
    norms = 2 * (model.pre_norm + model.post_norm) * h + (4 * h if model.experts_beside_mlp else 0)
    scaled = 2 * h if model.layer_scalar else 0
    elements = 2 * norms + 6 * h + turned + 2 * normed + 3 * f + copied + summed + shared + 2 * gated + scaled
    nbytes = elements * b.activation
    if not fused:
        nbytes += _unfused_block_bytes(model, i, b.activation)
    if phase == Phase.BACKWARD:
        if fused:
            of_router = 3 * h if model.has_experts(i) else 0
            of_norms = (8 if model.pre_norm else 6) * h + (6 * h if model.post_norm else 0)
            of_norms += 14 * h if model.experts_beside_mlp else 0
            of_experts = copied + of_router + 2 * summed + shared + 6 * gated
            elements = of_norms + turned_back + 3 * normed + 5 * f + of_experts
            nbytes = elements * b.activation
        else:
            nbytes *= 2
        nbytes += 2 * h * b.activation if model.layer_scalar and fused else 0  # else counted as forward's
        if model.residual_multiplier != 1:  # the gradients of both branches, read and written
            nbytes += 4 * h * b.activation
        if workload.recompute != "none":
            delta = model.delta(i)
            opened = heads.gate_width if delta is None else delta.value_width
            normed_again = (4 * h if model.pre_norm else 0) + (4 * h if model.experts_beside_mlp else 0)
            nbytes += (normed_again + 3 * (f + opened) + copied) * b.activation
    if phase == Phase.RECOMPUTE and not output:
        unread = summed + shared + 2 * gated + (3 * f if workload.recompute == "mlp" else 0)
        nbytes -= (3 * h + scaled + (0 if model.post_norm else unread)) * b.activation
    moved = 2 * _of_experts(model, workload, i) * b.grad if phase == Phase.BACKWARD else 0
    if (delta := model.delta(i)) is not None:
        moved += tokens * FP32 * delta.moved(backward=phase == Phase.BACKWARD)[1]
    if workload.matmul is not None:
        moved += fp8.scaling_bytes(model, phase, workload, output=output, parts=_mlp_parts(workload))
    return tokens * nbytes + moved


def _normed_in_attention(model: ModelSpec, i: int) -> int:
    """Elements per token of queries, keys and values, or of latent vectors, that have a norm."""
    if model.delta(i) is not None:
        return 0
    if model.latent is not None:
        return model.latent.normed
    heads = model.heads(i)
    of_values = heads.v_width if model.value_norm else 0
    return of_values + (heads.q_width + heads.k_width if model.qk_norm else 0)


def _turned_elements(model: ModelSpec, i: int) -> tuple[int, int]:
    """Elements per token that rotary embedding moves in block i, forward and backward.

    Queries and keys read and written. Keys of latent attention are put together of what was expanded and of the turned
    one for all heads, and values are copied from beside them. Flash attention wants these as wide as keys: forward pads
    values, and cuts what it returns; backward pads these and its gradient, and cuts values'. Keys and values that are
    repeated are copied, in backward again, and their gradients summed. Linear attention turns nothing: what its rule is
    given and returns, and its gated norm.
    """
    if (delta := model.delta(i)) is not None:
        there, back = (delta.moved(backward=backward)[0] for backward in (False, True))
        return there + 3 * delta.value_width, back + 5 * delta.value_width
    heads = model.heads(i)
    q, k, v = heads.q_width, heads.k_width, heads.v_width
    if (latent := model.latent) is None:
        both = 2 * (q + k) if model.has_rope(i) else 0
        copied = k + v + 2 * q if heads.repeated else 0
        return both + copied, both + 2 * copied
    cut = v
    moved = 2 * q + latent.expanded + latent.rope + k + cut
    pass_of_one = q + cut if latent.padded else 0
    return moved + 2 * pass_of_one, moved + 4 * pass_of_one


def _of_shared(model: ModelSpec, i: int) -> int:
    """Elements per token that shared experts' products move as wide as a hidden state; the sum with others' as many."""
    return 3 * model.hidden_size if model.n_shared_experts and model.has_experts(i) else 0


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
    gate     activation and product apart: 5 elements for 3 when fused
    """
    h, f, heads = model.hidden_size, model.mlp_width(i), model.heads(i)
    q, k = heads.q_width, heads.k_width
    norm = 24 + 2 * a if a < FP32 else 20
    if (latent := model.latent) is not None:
        q, k = latent.heads * latent.rope, latent.rope  # that are turned
    elements = (8 * (q + k) if model.has_rope(i) else 0) + 2 * f
    norms = 2 * (model.pre_norm + model.post_norm) * h + _normed_in_attention(model, i)
    norms += 4 * h if model.experts_beside_mlp else 0
    if (delta := model.delta(i)) is not None:
        return norms * norm + 2 * f * a + _unfused_rule_bytes(delta)
    elements += 2 * heads.gate_width
    return norms * norm + elements * a


def _unfused_rule_bytes(delta: DeltaNet) -> int:
    """Bytes per token that the rule moves in fp32 beyond fused kernels, op by op: its convolution is made of a copy,
    a copy with zeros before, and a product and sums with two reads, its result has silu, and queries and keys a length.
    """
    keys = 2 * delta.value_heads * delta.key_dim
    convolved = delta.mixed * (2 + 2 + 2 + 4 * (delta.kernel - 1) + 2)
    return FP32 * (convolved + 8 * keys + 4 * delta.value_width + 12 * delta.value_heads * CHUNK)


def terms_together(terms: int, element_bytes: int) -> int:
    """How many of so many terms are summed by themselves, before their sum is added to that of the others.

    In 16 bits a sum that has grown loses what is added (tests/test_megatrain_template.py).
    """
    return terms if terms <= FEW_TERMS or element_bytes >= FP32 else math.isqrt(terms)


def _loss_chunks(workload: Workload) -> int:
    return -(-workload.tokens_per_microbatch // LOSS_CHUNK_TOKENS)


def _mlp_parts(workload: Workload) -> int:
    return -(-workload.tokens_per_microbatch // MLP_CHUNK_TOKENS)


def workspace_bytes(model: ModelSpec, i: int, phase: Phase, workload: Workload, *, output: bool = True) -> int:
    """Estimate of the device bytes that an op on it allocates and frees, beside the buffers it names.

    Loss: for the tokens of one chunk, fp32 logits twice (a copy while they are normalised; three times where they are
    bent, and that is kept), and five fp32 hidden states, since the norm's backward works in fp32; of many chunks, the
    projection's gradient of some.
    Backward of a block: the gradient of its largest parameter, of experts EXPERTS_CHUNK at a time, and the
    larger of the MLP's gradients (product, gate, up, and two hidden) and attention's (output, q, k, v,
    two hidden, and what flash attention adds: an fp32 accumulator of q, and k and v once per query head; twice where
    these are repeated to be read).
    Forward, which may run without saving: the larger of what lives at once in attention (normalised
    input, q, k, v, rotated q and k, output) and in the MLP (residual, norm, gate, up, product). Recompute
    saves all but q and k before rotary and the two branches' outputs, the second only with an `output`.
    Without rotary embedding q and k are there once; of latent attention see `_beside_attention`. Experts add their
    copies of the hidden state, and beside an MLP their input.
    Embedding: none forward, and what sorting the tokens takes is ignored; backward, where gradients have 16 bits, the
    fp32 terms of some columns, sorted, and sums, and where they have 32 its terms if they are scaled. The optimizer's
    step: see `schedules.optimizer`.
    An MLP computed again: for a chunk of tokens gate, up and three gradients as wide; the fp32 sums of its gradients
    over the chunks, and the largest of them once more; and two hidden: its input, which is the norm's output, and the
    gradient of it, and that of its output where this is normalised. Forward: gate, up and product of a chunk; residual,
    norm, and the output of all; or a norm that is not compiled, with its input in fp32, and that squared, of an output
    beside the residual, or of queries beside what they were projected with.

    The block's templates take no more, compiled or not (tests/on_played_gpu.py), but for a recompute, whose backward
    takes more still, and 2.4 % in an eager forward of experts. With products in 8 bits: see
    `schedules.fp8`.
    """
    if phase == Phase.ADAM:
        return step_workspace(model, workload, i)
    if i == model.head:
        chunk, chunks = min(LOSS_CHUNK_TOKENS, workload.tokens_per_microbatch), _loss_chunks(workload)
        trained = params(model, workload, i) and workload.task == "train"
        summed = trained and terms_together(chunks, workload.bytes.grad) < chunks
        some = model.vocab_size * model.hidden_size * workload.bytes.grad if summed else 0
        copies = 2 if model.final_logit_softcapping is None else 3
        return chunk * FP32 * (copies * model.vocab_size + 5 * model.hidden_size) + some
    if i == model.embed and phase == Phase.BACKWARD and workload.bytes.grad < FP32:
        return min(model.hidden_size * workload.tokens_per_microbatch, EMBED_CHUNK) * 3 * FP32
    if i == model.embed and phase == Phase.BACKWARD and model.embedding_scale != 1:
        return hidden_bytes(model, workload)
    if not model.is_block(i):
        return 0
    taken = _block_workspace_bytes(model, i, phase, workload, output)
    if workload.matmul is None:
        return taken
    scaled = fp8.workspace_bytes(model, phase, workload, chunk=MLP_CHUNK_TOKENS)
    return scaled if phase == Phase.BACKWARD else max(taken, scaled)


def _block_workspace_bytes(model: ModelSpec, i: int, phase: Phase, workload: Workload, output: bool) -> int:
    h, f = model.hidden_size, model.mlp_width(i)
    tokens, a = workload.tokens_per_microbatch, workload.bytes.activation
    wide = 3 * f
    delta = model.delta(i)
    if model.has_experts(i):  # then those that are shared, or in backward before, beside what the others returned
        chosen, beside = f - model.shared_width, h * (bool(model.n_shared_experts) + model.experts_beside_mlp)
        wide = beside + max(3 * chosen + 2 * model.num_experts_per_tok * h, 3 * model.shared_width)
    if workload.recompute == "mlp":
        return _chunked_workspace_bytes(model, i, phase, workload, output)
    if phase == Phase.BACKWARD:
        largest = max((math.prod(shape) for shape in shapes(model, workload, i).values()), default=0)
        largest = min(largest, EXPERTS_CHUNK) if model.has_experts(i) else largest
        of_branch = _scaled_gradients(model) * a
        per_token = of_branch + max((wide + 2 * h) * a, _attention_backward_bytes(model, i, workload))
        return largest * workload.bytes.grad + tokens * per_token
    if phase == Phase.RECOMPUTE:
        rule = 0 if delta is None else _rule_bytes(delta, workload, backward=False)
        per_token = max((_beside_attention(model, i) + (2 if output else 1) * h) * a, h * a + rule)
    else:
        normed = h if model.pre_norm else 0
        per_token = max(normed * a + _attention_bytes(model, i, workload), (normed + h + wide) * a)
    return tokens * per_token


def _scaled_gradients(model: ModelSpec) -> int:
    """Elements of one token that are gradients beside others of which they are multiples: a branch's, and a block's."""
    return model.hidden_size * ((model.residual_multiplier != 1) + model.layer_scalar)


def _beside_attention(model: ModelSpec, i: int) -> int:
    """Elements of one token that attention has at once beside queries, keys, values and what it returns.

    Queries and keys before they are turned, or keys and values repeated, and sums in fp32. Latent attention has queries
    before they are turned, or what keys and values are expanded from, or padded values and as wide an output.
    """
    if model.delta(i) is not None:
        return 0
    heads = model.heads(i)
    q = heads.q_width
    if (latent := model.latent) is None:
        turned = q + heads.k_width if model.has_rope(i) else 0
        return max(turned, 4 * q if heads.repeated else 0)
    return max(2 * q if latent.padded else q, latent.expanded)


def _attention_bytes(model: ModelSpec, i: int, workload: Workload) -> int:
    """What attention has at once of one token in a forward that saves nothing, without its input."""
    a = workload.bytes.activation
    if (delta := model.delta(i)) is not None:
        given = delta.mixed + 2 * delta.value_heads + 2 * delta.value_width
        return given * a + max(_rule_bytes(delta, workload, backward=False), delta.value_width * (a + FP32))
    heads = model.heads(i)
    attended = heads.q_width + heads.k_width + heads.v_width + heads.attended_width + heads.gate_width
    return (attended + max(_beside_attention(model, i), heads.gate_width)) * a


def _rule_bytes(delta: DeltaNet, workload: Workload, *, backward: bool) -> int:
    """What linear attention's rule has at once of one token, beside what it is given and returns."""
    share = delta.share_at_once(workload.micro_batch_size, workload.seq_len)
    return math.ceil(share * delta.workspace_words(backward=backward) * FP32)


def _attention_backward_bytes(model: ModelSpec, i: int, workload: Workload) -> int:
    """What attention's backward has at once of one token."""
    if (delta := model.delta(i)) is not None:
        kept = 2 * delta.value_width + delta.mixed + 2 * delta.value_heads + 2 * model.hidden_size
        return kept * workload.bytes.activation + _rule_bytes(delta, workload, backward=True)
    h, heads = model.hidden_size, model.heads(i)
    q, k, v = heads.q_width, heads.k_width, heads.v_width
    kept = (6 if heads.repeated else 4) * q + k + v
    if model.latent is not None and model.latent.padded:  # what is padded, and its gradients
        kept = 6 * q + v + heads.attended_width
    return (kept + 2 * heads.gate_width + 2 * h) * workload.bytes.activation + q * FP32


def _chunked_workspace_bytes(model: ModelSpec, i: int, phase: Phase, workload: Workload, output: bool) -> int:
    h, f = model.hidden_size, model.mlp_width(i)
    tokens, a = workload.tokens_per_microbatch, workload.bytes.activation
    chunk = min(tokens, MLP_CHUNK_TOKENS)
    if phase == Phase.BACKWARD:
        sizes = {name: math.prod(shape) for name, shape in shapes(model, workload, i).items()}
        sums = sum(size for name, size in sizes.items() if name.startswith("mlp.")) * FP32
        largest = max(sizes.values(), default=0) * workload.bytes.grad
        mlp = tokens * (1 + model.pre_norm + model.post_norm) * h * a + chunk * (5 * f + h) * a + sums
        attention = tokens * _attention_backward_bytes(model, i, workload)
        of_branch = tokens * _scaled_gradients(model) * a
        return largest + of_branch + max(mlp, attention)
    if phase == Phase.RECOMPUTE:
        delta, turned = model.delta(i), _beside_attention(model, i)
        rule = 0 if delta is None else tokens * _rule_bytes(delta, workload, backward=False)
        of_mlp = tokens * (turned + 2 * h) * a + chunk * 3 * f * a if output else tokens * (turned + h) * a
        return max(of_mlp, tokens * h * a + rule)
    attention = (h if model.pre_norm else 0) * a + _attention_bytes(model, i, workload)
    of_norms = (6 if model.post_norm else 5) * h * a
    if model.qk_norm and model.delta(i) is None:
        heads = model.heads(i)
        given = h + heads.q_width + heads.gate_width + heads.k_width + heads.v_width
        given += heads.v_width if model.value_norm and not heads.values_are_keys else 0
        of_norms = max(of_norms, given * a + 2 * heads.q_width * FP32)
    return max(tokens * max(attention, of_norms), (tokens * 3 * h + chunk * 3 * f) * a)
