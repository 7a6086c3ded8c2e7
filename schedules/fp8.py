"""Products with the matrices of blocks in 8 bits: which those are, and what making their operands moves and takes.

A product's operands are scaled so that the largest magnitude of each becomes the largest that its format has, one scale
a tensor, found anew for every product (tensor-wise dynamic scaling; Micikevicius et al., arXiv:2209.05433): e4m3 for
inputs and weights, e5m2 for gradients of outputs. Results are bf16. Attention, norms, embedding, head and loss stay as
they are, and so does all that is kept and copied: weights, gradients, state, activations.

The matrix units of NVIDIA's GPUs from compute capability 8.9 multiply 8 bits at twice the rate of 16, rows by rows:
in backward operands are made again, transposed.
"""

from __future__ import annotations

from schedules.model import ModelSpec
from schedules.workload import Workload

ALIGNED = 16  # elements in a row of an operand, a multiple of this (cuBLASLt: rows of 8 bits begin at 16 bytes)


def unmet(model: ModelSpec, workload: Workload) -> str | None:
    """Why this model's blocks cannot multiply so in this step; None if they can, or are not asked to."""
    if workload.matmul is None:
        return None
    if model.num_experts:
        return f"{model.name}: experts' products are not made in {workload.matmul}"
    widths = {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "the width of its queries": model.q_width,
        "the width of its keys": model.kv_width,
        "a micro-batch's tokens": workload.tokens_per_microbatch,
    }
    for what, width in widths.items():
        if width % ALIGNED:
            return f"{model.name}: {workload.matmul} products need {what}, {width:,}, to be a multiple of {ALIGNED}"
    return None
