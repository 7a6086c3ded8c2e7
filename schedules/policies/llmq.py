"""LLM.Q (IST-DASLab): everything on the GPU, the optimizer too; what does not fit is fetched block by block.

What it does. Ordinary training, all layers of a micro-batch and then the next. After the last backward the norm of all
gradients is taken, clipped or not, and the GPU updates embedding, blocks and head in this order; the CPU computes
nothing. What has no room on the device lives in pinned host memory, as its user sets it, here in the order in which
LLM.Q's own benchmarks go on when a model grows (offload, each with those before it):
- moment: one of the two moments passes through two device buffers during the update, beside that of the block before.
- states: so does the other.
- inputs: blocks' inputs (the residual stream), but the first's, leave after forward and come back for the backward.
- weights: blocks' weights come through two device buffers for every forward and backward, one block ahead;
  embedding and head take turns in one more. For the update they come once more, and go back.
- gradients: a block's gradient is written to the host from the compute stream; from the second micro-batch on the
  sum is read from there, added to and written back.
A block keeps all activations or runs forward again whole; --recompute pointwise and mlp are LLM.Q's recompute-norm
with recompute-swiglu, and recompute-ffn with recompute-norm. The host waits for the device once a step.

Where states live, in bytes per parameter at bf16: on the device weights 2, gradients 2, moments 4; each on the host
instead where it is offloaded, but for the gradients of embedding and head. Moments and weights are bf16, rounded
stochastically: precision bf16_16bit.

Exact in its training. Approximated: kernels that work on host memory directly (moments and weights of embedding and
head, sums of gradients, the norm of those) are shown as copies on the compute stream, whose result goes down beside
what follows; the moments of embedding and head pass in eighths, so that no device buffer holds them; with
offload=moment half of each layer's elements have both moments on the host, where all should have one; the head's input,
which leaves as blocks' do and does not come back, stays. With --matmul fp8 weights are scaled for every micro-batch,
where LLM.Q does so once a step and keeps activations and, if asked, weights in 8 bits. Moments in 8 bits, and more than
one GPU, are not here.
Its C++ issues ops faster than the profile's Python.
Source: IST-DASLab/llmq b77d969, doc.md, src/models (llama_model.cpp, llama_weights.cpp, llama_run_state.cpp),
src/training (adamw_optimizer.cpp, gradients.cpp).
"""

from __future__ import annotations

from typing import Literal, get_args

from schedules.kept_activations import Kept
from schedules.llmq_step import LlmqStep
from schedules.model import ModelSpec
from schedules.program import Program
from schedules.workload import MemoryBudget, Workload

Offload = Literal["nothing", "moment", "states", "inputs", "weights", "gradients"]
LEVELS: tuple[Offload, ...] = get_args(Offload)


def policy(
    model: ModelSpec,
    workload: Workload,
    memory: MemoryBudget,
    *,
    offload: Literal["auto", "nothing", "moment", "states", "inputs", "weights", "gradients"] = "auto",
    activations: Literal["recompute", "keep"] = "recompute",
) -> Program:
    """Build the step.

    Args:
        offload: what lives on the host, each with those before it; auto takes the first that fits the device.
        activations: what blocks do: run forward again from their input, or keep what they need, but for inputs that
            are offloaded.
    """

    def build(level: Offload) -> Program:
        away = LEVELS[1 : LEVELS.index(level) + 1]
        kept = Kept(
            on_device=model.blocks if activations == "keep" else (),
            inputs=model.blocks[1:] if "inputs" in away else (),
        )
        return LlmqStep(model, workload, kept, away=away).whole()

    if offload != "auto":
        return build(offload)
    for level in LEVELS[:-1]:
        if (step := build(level)).device_room(memory) >= 0:
            return step
    return build(LEVELS[-1])
