"""What is multiplied: FLOPs of a layer, of an op, and of a step as MFU counts them."""

from __future__ import annotations

import math

from schedules.model import ModelSpec
from schedules.op import Phase
from schedules.parameters import OF_LATENT
from schedules.workload import Workload


def attended_pairs(model: ModelSpec, i: int, seq_len: int) -> int:
    """(query, key) pairs that causal attention of block i computes in one sequence.

    Query t (from 1) sees min(t, window) keys.
    """
    reach = min(seq_len, model.window(i) or seq_len)
    return reach * (reach + 1) // 2 + (seq_len - reach) * reach


def forward_flops(model: ModelSpec, i: int, workload: Workload) -> int:
    """FLOPs of one micro-batch through layer i, a multiply-add being 2.

    Matrix products only: 2 * tokens * weights of every matrix a token meets, and 2 * pairs * heads * head_dim for QK^T
    and as many, of values' dimensions, for PV, over the pairs the causal mask leaves; of linear attention see
    `schedules.delta`, of state spaces `schedules.mamba`. Norms, rotary, softmax and biases are not counted, as is usual
    for MFU (Chowdhery et al., PaLM, arXiv:2204.02311, appendix B). The embedding is a lookup: 0. The head multiplies by
    the vocabulary whether or not its matrix is tied. Adapters are matrices like others; so are a router and what makes
    experts' inputs, and a hidden state of their outputs.
    """
    tokens, h = workload.tokens_per_microbatch, model.hidden_size
    if i == model.embed:
        return 0
    if i == model.head:
        return 2 * tokens * h * model.vocab_size
    projections = sum(map(math.prod, model.attention_matrices(i)))
    mlp = model.mlp_matrices * h * model.mlp_width(i)
    if model.has_experts(i):
        of_chosen = model.mlp_width(i) - model.shared_width
        mlp += h * (model.num_experts + model.shared_expert_gate + 2 * model.moe_latent_size)
        mlp -= model.mlp_matrices * (h - model.expert_input) * of_chosen
    matrices = projections + mlp + _adapter_params(model, i, workload)
    return 2 * tokens * matrices + attention_flops(model, i, workload)


def attention_flops(model: ModelSpec, i: int, workload: Workload) -> int:
    """The part of a block's forward FLOPs that attention has, QK^T and PV, or what takes its place."""
    if (recurrence := model.recurrence(i)) is not None:
        return workload.micro_batch_size * recurrence.flops(workload.seq_len)
    pairs = workload.micro_batch_size * attended_pairs(model, i, workload.seq_len)
    heads = model.heads(i)
    return 2 * pairs * (heads.q_width + heads.attended_width)


def attention_padding(model: ModelSpec, i: int) -> float:
    """Times the FLOPs of block i's attention that are multiplied: values as wide as keys, whatever of that is zeros."""
    heads = model.heads(i)
    if not heads.count:
        return 1.0
    return 2 * heads.q_width / (heads.q_width + heads.attended_width)


def backward_flops(model: ModelSpec, i: int, workload: Workload) -> int:
    """Twice the forward: one product for the input's gradient and one for the weight's. No recompute.

    A frozen matrix needs the first only.
    """
    forward = forward_flops(model, i, workload)
    if workload.lora_rank is None:
        return 2 * forward
    trained = 2 * workload.tokens_per_microbatch * _adapter_params(model, i, workload)
    return forward + trained + (attention_flops(model, i, workload) if model.is_block(i) else 0)


def recomputed_flops(model: ModelSpec, i: int, workload: Workload) -> int:
    """FLOPs that the backward of block i spends on what the workload wants computed again.

    Gate and up with their adapters, and the first matrix of the adapter beside down.
    """
    if workload.recompute != "mlp" or not model.is_block(i):
        return 0
    model.require_recompute("mlp")
    again = 2 * model.hidden_size * model.mlp_width(i)
    again += _adapter_params(model, i, workload, "mlp.") - _adapter_params(model, i, workload, "mlp.down_proj.lora_B.")
    return 2 * workload.tokens_per_microbatch * again


def unread_flops(model: ModelSpec, i: int, workload: Workload) -> int:
    """The part of block i's forward FLOPs that only its output needs, and nothing that it keeps.

    The last product of the MLP, an adapter's second matrix beside it included; all of the MLP where backward
    computes it again; of experts those that are shared alone, and what makes a hidden state of the others' outputs.
    None where backward reads that output, as it does that of experts with a gate.
    """
    if model.post_norm or model.shared_expert_gate:
        return 0
    if workload.recompute == "mlp":
        matrix = model.mlp_matrices * model.hidden_size * model.mlp_width(i)
        return 2 * workload.tokens_per_microbatch * (matrix + _adapter_params(model, i, workload, "mlp."))
    of_adapters = sum(_adapter_params(model, i, workload, f"{last}.lora_B.") for last in _last_projections(model, i))
    return 2 * workload.tokens_per_microbatch * (last_width(model, i) * model.hidden_size + of_adapters)


def last_width(model: ModelSpec, i: int) -> int:
    """Elements of one token that block i's last products are of, which only its output needs."""
    if model.has_experts(i):
        return model.shared_width + model.moe_latent_size
    if model.has_mlp(i):
        return model.mlp_width(i)
    return model.attention_matrices(i)[-1][1]


def _last_projections(model: ModelSpec, i: int) -> tuple[str, ...]:
    """What those are called."""
    if model.has_experts(i):
        return f"{model.shared_place}.down_proj", OF_LATENT
    if model.has_mlp(i):
        return ("mlp.down_proj",)
    return ("self_attn.o_proj" if model.recurrence(i) is None else "mamba.out_proj",)


def loss_flops(model: ModelSpec, workload: Workload) -> int:
    """FLOPs of the loss op: the head forward, and backward unless the task is to evaluate."""
    forward = forward_flops(model, model.head, workload)
    return forward if workload.task == "evaluate" else forward + backward_flops(model, model.head, workload)


def model_flops_per_step(model: ModelSpec, workload: Workload) -> int:
    """FLOPs of one step as MFU counts them: forward and backward of every micro-batch, or forward alone."""
    inner = [i for i in model.layers if i != model.head]
    once = sum(forward_flops(model, i, workload) for i in inner) + loss_flops(model, workload)
    if workload.task == "train":
        once += sum(backward_flops(model, i, workload) for i in inner)
    return workload.accumulation * once


def _adapter_params(model: ModelSpec, i: int, workload: Workload, of: str = "") -> int:
    """Elements of the adapters whose names begin so."""
    if workload.lora_rank is None:
        return 0
    shapes = model.adapter_shapes(i, workload.lora_rank).items()
    return sum(math.prod(shape) for name, shape in shapes if name.startswith(of))


def op_flops(model: ModelSpec, i: int, phase: Phase, workload: Workload, *, output: bool = True) -> int:
    """FLOPs of a compute op on layer i for one micro-batch, what it computes again included.

    A block that runs again for its activations alone has no `output`, and does not compute what only that needs.
    """
    if phase == Phase.BACKWARD:
        return backward_flops(model, i, workload) + recomputed_flops(model, i, workload)
    if phase == Phase.LOSS:
        return loss_flops(model, workload)
    unread = 0 if output or phase != Phase.RECOMPUTE else unread_flops(model, i, workload)
    return forward_flops(model, i, workload) - unread
