"""Products with the matrices of blocks in 8 bits: which those are, and what making their operands moves and takes.

A product's operands are scaled so that the largest magnitude of each becomes the largest that its format has, one scale
a tensor, found anew for every product (tensor-wise dynamic scaling; Micikevicius et al., arXiv:2209.05433): e4m3 for
inputs and weights, e5m2 for gradients of outputs. Results are bf16. Attention, norms, embedding, head and loss stay as
they are, and so does all that is kept and copied: weights, gradients, state, activations.

The matrix units of NVIDIA's GPUs from compute capability 8.9 multiply 8 bits at twice the rate of 16, rows by rows:
in backward operands are made again, transposed.
"""

from __future__ import annotations

from dataclasses import dataclass

from schedules.model import FP32, ModelError, ModelSpec
from schedules.op import Phase
from schedules.workload import Workload

ALIGNED = 16  # elements in a row of an operand, a multiple of this (cuBLASLt: rows of 8 bits begin at 16 bytes)


def unmet(model: ModelSpec, workload: Workload) -> str | None:
    """Why this model's blocks cannot multiply so in this step; None if they can, or are not asked to."""
    if workload.matmul is None:
        return None
    if model.num_experts:
        return f"{model.name}: experts' products are not made in {workload.matmul}"
    if model.latent is not None:
        return f"{model.name}: latent attention's products are not made in {workload.matmul}"
    if model.attn_output_gate or model.attn_gate_proj or any(model.recurrence(i) is not None for i in model.blocks):
        of = "a state space" if model.mamba_n_heads else "gated or linear attention"
        return f"{model.name}: products of {of} are not made in {workload.matmul}"
    if model.mlp_layer_types or not model.gated_mlp:
        what = "blocks that lack attention or an MLP" if model.gated_mlp else "MLPs without a gate"
        return f"{model.name}: products of {what} are not made in {workload.matmul}"
    if model.global_head_dim:
        return f"{model.name}: products of blocks with heads of two kinds are not made in {workload.matmul}"
    heads = model.heads(0)
    widths = {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "the width of its queries": heads.q_width,
        "the width of its keys": heads.k_width,
        "a micro-batch's tokens": workload.tokens_per_microbatch,
    }
    for what, width in widths.items():
        if width % ALIGNED:
            return f"{model.name}: {workload.matmul} products need {what}, {width:,}, to be a multiple of {ALIGNED}"
    return None


def require(model: ModelSpec, workload: Workload) -> None:
    """Raises ModelError where this model's blocks cannot multiply so in this step."""
    if lacks := unmet(model, workload):
        raise ModelError(lacks)


# Bytes an element: of a result and of an operand; and what scaling moves, which reads for the largest magnitude, then
# reads again and writes 8 bits.
_RESULT, _OPERAND = 2, 1
_SCALED, _SCALED_BOTH_WAYS = 2 + 2 + 1, 2 + 2 + 2 * 1  # the second: also transposed, by the same kernel
# These products do not add to what is there: a weight's gradient is copied to its slab, or added to the fp32 sum of the
# parts that an MLP is made in; and all but the first term of an input's gradient are added to it.
_COPIED, _SUMMED = 2 + 2, FP32 + FP32 + FP32
_TERM = 2 + 2 + 2


@dataclass(frozen=True, kw_only=True)
class _Group:
    """Products of one input, of that width, with matrices of these heights; made so many times over, of all tokens."""

    width: int
    heights: tuple[int, ...]
    parts: int = 1

    @property
    def weights(self) -> int:
        """Elements of the matrices."""
        return self.width * sum(self.heights)


def product_bytes(model: ModelSpec, phase: Phase, workload: Workload, *, output: bool, parts: int) -> int:
    """What a block's products in 8 bits move, operands and results, for one micro-batch.

    `output` as for `schedules.traffic.op_bytes`; an MLP that is computed again is made in so many `parts`.
    """
    tokens, found = workload.tokens_per_microbatch, 0
    for group in _forward(model, phase, workload, output, parts):
        found += tokens * (len(group.heights) * group.width * _OPERAND + sum(group.heights) * _RESULT)
        found += group.parts * group.weights * _OPERAND
    for group in _groups(model, workload, parts) if phase == Phase.BACKWARD else ():
        # of the input's gradient, then of the weights'
        found += tokens * (sum(group.heights) * _OPERAND + len(group.heights) * group.width * _RESULT)
        found += tokens * (sum(group.heights) + len(group.heights) * group.width) * _OPERAND
        found += group.parts * group.weights * (_OPERAND + (_RESULT if group.parts == 1 else FP32))
    return found


def scaling_bytes(model: ModelSpec, phase: Phase, workload: Workload, *, output: bool, parts: int) -> int:
    """What making the operands of these products moves, and adding up and delivering gradients."""
    tokens, found = workload.tokens_per_microbatch, 0
    for group in _forward(model, phase, workload, output, parts):
        found += (tokens * group.width + group.parts * group.weights) * _SCALED
    for group in _groups(model, workload, parts) if phase == Phase.BACKWARD else ():
        found += tokens * (sum(group.heights) * _SCALED_BOTH_WAYS + group.width * _SCALED)
        found += tokens * (len(group.heights) - 1) * group.width * _TERM
        found += group.parts * group.weights * (_SCALED + (_COPIED if group.parts == 1 else _SUMMED))
    return found


def workspace_bytes(model: ModelSpec, phase: Phase, workload: Workload, *, chunk: int) -> int:
    """What an op on a block takes beside its buffers where it multiplies in 8 bits; if not backward, unless it takes
    more in 16.

    Forward, beside residual and norm, and where the MLP is made a `chunk` of tokens at a time its output: gate, up, and
    the product and the last matrix in 8 bits; or what attention read and returned, that and a matrix in 8 bits. Run
    again, likewise, but for what is kept. Backward: the gradients of gate and up, one of them in 8 bits both ways, the
    input in 8 bits, its gradient and a term that comes to it, the matrix in 8 bits; then one gradient in 8 bits, and
    the matrix's; or what attention takes in 16 bits. What is computed again lies beside it: the norm's output; of an
    MLP that, its gradient, a chunk's gate and up, and the sums of its gradients, which of several chunks are in fp32.
    Outputs' norms keep one more.
    """
    tokens, h, f = workload.tokens_per_microbatch, model.hidden_size, model.intermediate_size
    q, kv = model.heads(0).q_width, model.heads(0).k_width
    again = workload.recompute == "mlp"
    rows = min(tokens, chunk) if again else tokens
    normalised = 2 * h * tokens if model.post_norm else 0
    if phase == Phase.RECOMPUTE:
        return tokens * (f + 2 * h) + f * h + normalised
    if phase == Phase.FORWARD:
        of_mlp = (6 if again else 4) * h * tokens + (4 * f + h) * rows + f * h
        return normalised + max(of_mlp, tokens * (3 * h + 2 * q) + q * h)
    element = FP32 if rows < tokens else _RESULT
    beside = {"none": 0, "pointwise": 2 * h * tokens, "mlp": 4 * h * tokens + 4 * f * rows + 3 * element * f * h}
    operands = max((6 * f + 5 * h) * rows + f * h, (5 * f + 3 * h) * rows + element * f * h)
    attention = tokens * (2 * (4 * q + 2 * kv + 2 * h) + FP32 * q)
    return normalised + max(operands + beside[workload.recompute], attention)


def _groups(model: ModelSpec, workload: Workload, parts: int) -> list[_Group]:
    h, q, kv, f = model.hidden_size, model.heads(0).q_width, model.heads(0).k_width, model.intermediate_size
    times = parts if workload.recompute == "mlp" else 1
    return [
        _Group(width=h, heights=(q, kv, kv)),
        _Group(width=q, heights=(h,)),
        _Group(width=h, heights=(f, f), parts=times),
        _Group(width=f, heights=(h,), parts=times),
    ]


def _forward(model: ModelSpec, phase: Phase, workload: Workload, output: bool, parts: int) -> list[_Group]:
    """The products that an op makes as forward does: a backward, those that it makes again."""
    attends, attended, widens, narrows = _groups(model, workload, parts)
    again = workload.recompute == "mlp"
    if phase == Phase.BACKWARD:
        return [widens] if again else []
    if phase == Phase.RECOMPUTE and not output and not model.post_norm:
        return [attends, attended] if again else [attends, attended, widens]
    return [attends, attended, widens, narrows]
