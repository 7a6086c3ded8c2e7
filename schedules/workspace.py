"""What a compute op allocates for itself in device memory, by estimate, and what it works through at a time."""

from __future__ import annotations

import math

from schedules import fp8
from schedules.model import FP32, ModelSpec, Recurrence
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


def terms_together(terms: int, element_bytes: int) -> int:
    """How many of so many terms are summed by themselves, before their sum is added to that of the others.

    In 16 bits a sum that has grown loses what is added (tests/test_megatrain_template.py).
    """
    return terms if terms <= FEW_TERMS or element_bytes >= FP32 else math.isqrt(terms)


def loss_chunks(workload: Workload) -> int:
    """How many parts of a micro-batch's tokens the loss is computed for, one after another."""
    return -(-workload.tokens_per_microbatch // LOSS_CHUNK_TOKENS)


def mlp_parts(workload: Workload) -> int:
    """The same of an MLP that is computed again in backward."""
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
    copies of the hidden state, and beside an MLP their input; of a latent vector in its place that, and their sum.
    Without a gate an MLP has two as wide as itself. Adapters make one more as wide, beside a product and their sum, and
    where they are of gate and up together two.
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
        chunk, chunks = min(LOSS_CHUNK_TOKENS, workload.tokens_per_microbatch), loss_chunks(workload)
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
    matrices = model.mlp_matrices + (_beside_products(model, workload) if phase == Phase.FORWARD else 0)
    wide = matrices * f
    recurrence = model.recurrence(i)
    if model.has_experts(i):  # then those that are shared, or in backward before, beside what the others returned
        chosen, beside = f - model.shared_width, h * (bool(model.n_shared_experts) + model.experts_beside_mlp)
        copied = 2 * (model.num_experts_per_tok * model.expert_input + model.moe_latent_size)
        wide = beside + max(model.mlp_matrices * chosen + copied, matrices * model.shared_width)
    if workload.recompute == "mlp":
        return _chunked_workspace_bytes(model, i, phase, workload, output)
    if phase == Phase.BACKWARD:
        largest = max((math.prod(shape) for shape in shapes(model, workload, i).values()), default=0)
        largest = min(largest, EXPERTS_CHUNK) if model.has_experts(i) else largest
        of_branch = _scaled_gradients(model) * a
        per_token = of_branch + max((wide + 2 * h) * a, _attention_backward_bytes(model, i, workload))
        return largest * workload.bytes.grad + tokens * per_token
    if phase == Phase.RECOMPUTE:
        chunks = 0 if recurrence is None else _chunks_bytes(recurrence, workload, backward=False)
        per_token = max((_beside_attention(model, i) + (2 if output else 1) * h) * a, h * a + chunks)
    else:
        normed = h if model.pre_norm else 0
        of_norm = 0 if model.has_mlp(i) else 5 * h * a  # that is not compiled, where no MLP takes more
        per_token = max(normed * a + _attention_bytes(model, i, workload), (normed + h + wide) * a, of_norm)
    return tokens * per_token


def _beside_products(model: ModelSpec, workload: Workload) -> int:
    """How many more as wide as an MLP are there at once where adapters add to its first products."""
    if workload.lora_rank is None:
        return 0
    return 1 + (model.fused_gate_up or model.fused_projections)


def _scaled_gradients(model: ModelSpec) -> int:
    """Elements of one token that are gradients beside others of which they are multiples: a branch's, and a block's."""
    return model.hidden_size * ((model.residual_multiplier != 1) + model.layer_scalar)


def _beside_attention(model: ModelSpec, i: int) -> int:
    """Elements of one token that attention has at once beside queries, keys, values and what it returns.

    Queries and keys before they are turned, or keys and values repeated, and sums in fp32. Latent attention has queries
    before they are turned, where they are, or what keys and values are expanded from, or padded values and as wide an
    output.
    """
    if model.recurrence(i) is not None:
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
    if (recurrence := model.recurrence(i)) is not None:
        given, values = recurrence.mixed + recurrence.gates, recurrence.value_width
        chunks = _chunks_bytes(recurrence, workload, backward=False)
        return (given + 2 * values) * a + max(chunks, values * (a + FP32))
    heads = model.heads(i)
    attended = heads.q_width + heads.k_width + heads.v_width + heads.attended_width + heads.gate_width
    return (attended + max(_beside_attention(model, i), heads.gate_width)) * a


def _chunks_bytes(recurrence: Recurrence, workload: Workload, *, backward: bool) -> int:
    """What a recurrence has at once of one token, beside what it is given and returns."""
    share = recurrence.share_at_once(workload.micro_batch_size, workload.seq_len)
    return math.ceil(share * recurrence.workspace_words(backward=backward) * FP32)


def _attention_backward_bytes(model: ModelSpec, i: int, workload: Workload) -> int:
    """What attention's backward has at once of one token."""
    if (recurrence := model.recurrence(i)) is not None:
        kept = 2 * recurrence.value_width + recurrence.mixed + recurrence.gates + 2 * model.hidden_size
        return kept * workload.bytes.activation + _chunks_bytes(recurrence, workload, backward=True)
    h, heads = model.hidden_size, model.heads(i)
    q, k, v = heads.q_width, heads.k_width, heads.v_width
    kept = (6 if heads.repeated else 4) * q + k + v
    if model.latent is not None and model.latent.padded:  # what is padded, and its gradients
        kept = 6 * q + v + heads.attended_width
    return (kept + 2 * heads.gate_width + 2 * h) * workload.bytes.activation + q * FP32


def _chunked_workspace_bytes(model: ModelSpec, i: int, phase: Phase, workload: Workload, output: bool) -> int:
    h, f = model.hidden_size, model.mlp_width(i)
    tokens, a = workload.tokens_per_microbatch, workload.bytes.activation
    chunk, wide = min(tokens, MLP_CHUNK_TOKENS), (3 + _beside_products(model, workload)) * f
    if phase == Phase.BACKWARD:
        sizes = {name: math.prod(shape) for name, shape in shapes(model, workload, i).items()}
        sums = sum(size for name, size in sizes.items() if name.startswith("mlp.")) * FP32
        largest = max(sizes.values(), default=0) * workload.bytes.grad
        mlp = tokens * (1 + model.pre_norm + model.post_norm) * h * a + chunk * (5 * f + h) * a + sums
        attention = tokens * _attention_backward_bytes(model, i, workload)
        of_branch = tokens * _scaled_gradients(model) * a
        return largest + of_branch + max(mlp, attention)
    if phase == Phase.RECOMPUTE:
        recurrence, turned = model.recurrence(i), _beside_attention(model, i)
        chunks = 0 if recurrence is None else tokens * _chunks_bytes(recurrence, workload, backward=False)
        of_mlp = tokens * (turned + 2 * h) * a + chunk * wide * a if output else tokens * (turned + h) * a
        return max(of_mlp, tokens * h * a + chunks)
    attention = (h if model.pre_norm else 0) * a + _attention_bytes(model, i, workload)
    of_norms = (6 if model.post_norm else 5) * h * a
    if model.has_qk_norm(i) and model.recurrence(i) is None:
        heads = model.heads(i)
        given = h + heads.q_width + heads.gate_width + heads.k_width + heads.v_width
        given += heads.v_width if model.value_norm and not heads.values_are_keys else 0
        of_norms = max(of_norms, given * a + 2 * heads.q_width * FP32)
    return max(tokens * max(attention, of_norms), (tokens * 3 * h + chunk * wide) * a)
