"""What a compute op multiplies; what it moves through device memory and allocates for itself, by estimate."""

from __future__ import annotations

import math

from schedules.model import FP32, ModelError, ModelSpec
from schedules.op import Phase
from schedules.trained import params, shapes
from schedules.workload import Workload

# The loss op never holds the logits of a whole micro-batch: it works through this many tokens at a time.
LOSS_CHUNK_TOKENS = 1024
# Nor are more elements of the embedding's gradient summed in fp32 at a time, where they are kept in 16 bits.
EMBED_CHUNK = 1 << 26
# Nor does an MLP that is computed again in backward hold what is as wide as it for more tokens than this.
MLP_CHUNK_TOKENS = 8192


def op_flops(model: ModelSpec, i: int, phase: Phase, workload: Workload, *, output: bool = True) -> int:
    """FLOPs of a compute op on layer i for one micro-batch, what it computes again included; see ModelSpec.

    A block that runs again for its activations alone has no `output`, and does not compute what only that needs.
    """
    if phase == Phase.BACKWARD:
        return model.backward_flops(i, workload) + model.recomputed_flops(i, workload)
    if phase == Phase.LOSS:
        return model.loss_flops(workload)
    unread = 0 if output or phase != Phase.RECOMPUTE else model.unread_flops(i, workload)
    return model.forward_flops(i, workload) - unread


def elementwise_bytes(
    model: ModelSpec, i: int, phase: Phase, workload: Workload, *, fused: bool = True, output: bool = True
) -> int:
    """Device-memory traffic of one micro-batch through layer i, for a roofline estimate.

    Every kernel reads its inputs and writes its outputs once; what products reload into their tiles is
    left out. Forward per token, in activation elements, for a block: `_block_traffic`; plus all weights,
    read once. Backward: twice the forward's activations (each product has two in its backward, each
    pointwise kernel reads what it saved and a gradient), the weights read and their gradients written.
    Embedding: one row read and one written per token; its backward reads d and updates gradient rows. Where these have
    16 bits its terms are sorted and added up in fp32 first: eight passes.
    Loss, per chunk: the projection read twice (logits, d hidden) and its gradient read and written; per
    token 5 passes over fp32 logits (written, normalised, made into a gradient, read by two products),
    and norm input, output and both gradients.
    Where kernels are not `fused`, a block's are those of `_unfused_block_bytes` too. Frozen weights have no gradient;
    adapters beside them move, per token, their input and output and what lies between. What backward computes again is
    added as `_again_bytes`; what a block's recompute without an `output` leaves out is not counted, `_unread_bytes`.
    Raises ModelError for a phase that layer i does not compute.
    """
    tokens, b = workload.tokens_per_microbatch, workload.bytes
    if model.is_block(i) and phase in (Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD):
        activations = tokens * _block_traffic(model) * b.activation
        if not fused:
            activations += tokens * _unfused_block_bytes(model, b.activation)
        weights = model.params(i) * b.weight
        trained = params(model, workload, i)
        if workload.lora_rank is not None:
            shapes = model.adapter_shapes(i, workload.lora_rank).values()
            activations += tokens * sum(sum(shape) for shape in shapes) * b.activation
            weights += trained * b.weight
        if phase == Phase.BACKWARD:
            return 2 * activations + weights + trained * b.grad + _again_bytes(model, workload)
        unread = 0 if output or phase != Phase.RECOMPUTE else _unread_bytes(model, workload)
        return activations + weights - unread
    if i == model.embed and phase == Phase.EMBED:
        return tokens * model.hidden_size * (b.weight + b.activation)
    if i == model.embed and phase == Phase.BACKWARD:
        widened = 8 * FP32 if b.grad < FP32 else 0
        return tokens * model.hidden_size * (b.activation + 2 * b.grad + widened)
    if i == model.head and phase == Phase.LOSS:
        chunks = -(-tokens // LOSS_CHUNK_TOKENS)
        matrix = model.vocab_size * model.hidden_size
        logits = tokens * model.vocab_size * FP32
        if workload.task == "evaluate":  # the projection read once, logits written and read, norm input and output
            return chunks * matrix * b.weight + 2 * logits + 2 * model.hidden_bytes(workload)
        moved = 2 * (b.weight + (b.grad if workload.lora_rank is None else 0))
        return chunks * matrix * moved + 5 * logits + 8 * model.hidden_bytes(workload)
    raise ModelError(f"{model.name}: layer {model.layer_name(i)} has no compute op of phase {phase}")


def _again_bytes(model: ModelSpec, workload: Workload) -> int:
    """Bytes that a block's backward moves for what it computes again.

    4h       pointwise: two norms, read and written; with experts the second one's copies, too
    3f       and gate, up and their product
    2h + 2f  mlp: also the input of gate and up, and what they write, and their weights
    """
    h, f, k = model.hidden_size, model.mlp_width, model.num_experts_per_tok
    elements, weights = 0, 0
    if workload.recompute != "none":
        elements += 4 * h + 3 * f + (h + k * h if model.num_experts else 0)
    if workload.recompute == "mlp":
        elements += 2 * h + 2 * f
        weights += 2 * h * f
    return workload.tokens_per_microbatch * elements * workload.bytes.activation + weights * workload.bytes.weight


def _unread_bytes(model: ModelSpec, workload: Workload) -> int:
    """Bytes that a block's forward moves for its output alone.

    3h       the last residual sum
    f + h    the down projection, and its weights; with experts, one output per choice that the sum gathers
    2h + 5f  mlp: also gate and up, their product, and their weights; what backward computes again
    """
    h, f = model.hidden_size, model.mlp_width
    elements, weights = 3 * h, 0
    if model.num_experts:
        elements += model.num_experts_per_tok * h + h
    else:
        elements, weights = elements + f + h, f * h
    if workload.recompute == "mlp":
        elements, weights = elements + 2 * h + 5 * f, 3 * f * h
    return workload.tokens_per_microbatch * elements * workload.bytes.activation + weights * workload.bytes.weight


def _block_traffic(model: ModelSpec) -> int:
    """Activation elements that a block's forward reads and writes per token.

    4h          two norms, read and written
    3h + q+2kv  q, k, v projections
    2(q + kv)   rotary; again for qk_norm
    2q + 2kv    attention reads q, k, v and writes its output
    q + h       o projection
    6h          two residual sums
    2h + 2f     gate and up; with experts their input is one copy per choice
    3f          activation and product
    f + h       down; with experts one output per choice, then gathered into one
    """
    h, q, kv, f = model.hidden_size, model.q_width, model.kv_width, model.mlp_width
    k = model.num_experts_per_tok
    elements = 17 * h + 6 * q + 6 * kv + 6 * f
    if model.qk_norm:
        elements += 2 * (q + kv)
    if model.num_experts:
        # router input and logits; copies written; inputs and outputs per choice; the weighted sum
        elements += h + model.num_experts + (h + k * h) + 3 * (k - 1) * h + (k * h + h)
    return elements


def _unfused_block_bytes(model: ModelSpec, a: int) -> int:
    """Bytes per token that a block's forward moves beyond `_block_traffic` when PyTorch runs it op by op, as
    Hugging Face's layers are written (transformers, modeling_qwen2.py; modeling_llama.py is alike). `a` is the
    bytes of an activation.

    norm     per element: to fp32, squared, mean, scaled, back, times weight: 24 bytes of fp32 passes and 4 a (in
             fp32 28 in all, for nothing is cast), of which a fused kernel needs 2 a
    rotary   x cos, minus half, concatenated, x sin, sum: 10 elements for 2 when fused
    gate     activation and product apart: 5 elements for 3 when fused
    """
    h, q, kv, f = model.hidden_size, model.q_width, model.kv_width, model.mlp_width
    norm = 24 + 2 * a if a < FP32 else 20
    elements = 8 * (q + kv) + 2 * f
    norms = 2 * h + (q + kv if model.qk_norm else 0)
    return norms * norm + elements * a


def workspace_bytes(model: ModelSpec, i: int, phase: Phase, workload: Workload, *, output: bool = True) -> int:
    """Estimate of the device bytes a compute op allocates and frees, beside the buffers it names.

    Loss: for the tokens of one chunk, fp32 logits twice (a copy while they are normalised), and five fp32
    hidden states, since the norm's backward works in fp32.
    Backward of a block: the gradient of its largest parameter, held until it is in its buffer, and the
    larger of the MLP's gradients (product, gate, up, and two hidden) and attention's (output, q, k, v,
    two hidden, and what flash attention adds: an fp32 accumulator of q, and k and v once per query head).
    Forward, which may run without saving: the larger of what lives at once in attention (normalised
    input, q, k, v, rotated q and k, output) and in the MLP (residual, norm, gate, up, product). Recompute
    saves all but q and k before rotary and the two branches' outputs, the second only with an `output`.
    Experts add their copies of the hidden state. Embedding: none forward; an fp32 index sort of the tokens is
    ignored; backward, where gradients have 16 bits, the fp32 terms of some columns, sorted, and sums.
    An MLP computed again: for a chunk of tokens gate, up and three gradients as wide; the fp32 sums of its gradients
    over the chunks, and the largest of them once more; and two hidden: its input, which is the norm's output, and the
    gradient of it.
    """
    if i == model.head:
        chunk = min(LOSS_CHUNK_TOKENS, workload.tokens_per_microbatch)
        return chunk * FP32 * (2 * model.vocab_size + 5 * model.hidden_size)
    if i == model.embed and phase == Phase.BACKWARD and workload.bytes.grad < FP32:
        return min(model.hidden_size * workload.tokens_per_microbatch, EMBED_CHUNK) * 3 * FP32
    if not model.is_block(i):
        return 0
    h, q, kv, f = model.hidden_size, model.q_width, model.kv_width, model.mlp_width
    copies = 2 * model.num_experts_per_tok * h
    tokens, a = workload.tokens_per_microbatch, workload.bytes.activation
    if workload.recompute == "mlp":
        return _chunked_workspace_bytes(model, i, phase, workload, output)
    if phase == Phase.BACKWARD:
        largest = max((math.prod(shape) for shape in shapes(model, workload, i).values()), default=0)
        per_token = max((3 * f + 2 * h + copies) * a, (4 * q + 2 * kv + 2 * h) * a + q * FP32)
        return largest * workload.bytes.grad + tokens * per_token
    if phase == Phase.RECOMPUTE:
        per_token = (q + kv + (2 if output else 1) * h) * a
    else:
        per_token = max(h + 3 * q + 3 * kv, 2 * h + 3 * f + copies) * a
    return tokens * per_token


def _chunked_workspace_bytes(model: ModelSpec, i: int, phase: Phase, workload: Workload, output: bool) -> int:
    h, q, kv, f = model.hidden_size, model.q_width, model.kv_width, model.mlp_width
    tokens, a = workload.tokens_per_microbatch, workload.bytes.activation
    chunk = min(tokens, MLP_CHUNK_TOKENS)
    if phase == Phase.BACKWARD:
        sizes = {name: math.prod(shape) for name, shape in shapes(model, workload, i).items()}
        sums = sum(size for name, size in sizes.items() if name.startswith("mlp.")) * FP32
        largest = max(sizes.values(), default=0) * workload.bytes.grad
        mlp = tokens * 2 * h * a + chunk * (5 * f + h) * a + sums
        attention = tokens * ((4 * q + 2 * kv + 2 * h) * a + q * FP32)
        return largest + max(mlp, attention)
    if phase == Phase.RECOMPUTE:
        return tokens * (q + kv + 2 * h) * a + chunk * 3 * f * a if output else tokens * (q + kv + h) * a
    return max(tokens * (h + 3 * q + 3 * kv), tokens * 2 * h + chunk * 3 * f) * a
