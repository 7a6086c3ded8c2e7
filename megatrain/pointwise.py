"""The parts of a layer that multiply no matrices, forward and backward, as plain functions of tensors.

On a GPU each line of them is a kernel that reads and writes device memory; `compiled` makes one kernel of each
function. What autograd keeps does not depend on which of the two runs: `megatrain.template` decides that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMSNorm over the last dimension in x's type, and 1 / sqrt(mean(x^2) + eps) in at least fp32."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * rstd * weight).to(x.dtype), rstd


def rms_backward(dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x (in x's type) and of weight (in rstd's type, summed over rows)."""
    normed = x.to(rstd.dtype) * rstd
    wide = dy.to(rstd.dtype)
    dnormed = wide * weight
    dx = rstd * (dnormed - normed * (dnormed * normed).mean(-1, keepdim=True))
    return dx.to(x.dtype), (wide * normed).flatten(0, -2).sum(0)


def swiglu_forward(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return F.silu(gate) * up


def swiglu_backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up; silu(gate) is computed again, which is cheaper than keeping it."""
    return torch.ops.aten.silu_backward(dy * up, gate), dy * F.silu(gate)


def rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [batch, seq, heads, head_dim] turned by [seq, 1, head_dim / 2]; with -sin, turned back."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def cross_entropy(logits: Tensor, label: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Summed loss of logits [tokens, vocab] in at least fp32, and their gradient over `total`; label [tokens, 1].

    Overwrites the logits where they are in that type already.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_sum = wide.logsumexp(-1, keepdim=True)
    loss = (log_sum - wide.gather(-1, label)).sum()
    # softmax minus one at the label, in the logits' own memory
    gradient = wide.sub_(log_sum).exp_()
    gradient.scatter_add_(-1, label, torch.full_like(log_sum, -1.0))
    return loss, gradient.div_(total).to(logits.dtype)


@dataclass(frozen=True, kw_only=True, eq=False)
class Pointwise:
    """These functions, as they are to be called."""

    rms_forward: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]] = rms_forward
    rms_backward: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = rms_backward
    swiglu_forward: Callable[[Tensor, Tensor], Tensor] = swiglu_forward
    swiglu_backward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = swiglu_backward
    rotation: Callable[[Tensor, Tensor, Tensor], Tensor] = rotation
    cross_entropy: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]] = cross_entropy


PLAIN = Pointwise()
SHAPES = 4096  # that a process may compile a function for


@functools.cache
def compiled(backend: str = "inductor") -> Pointwise:
    """One kernel of each, by torch.compile, when it is first called with a shape; once for all layers alike.

    Where a rounding between two steps falls away the result is closer to exact, so bits differ from PLAIN's.
    """
    for limit in ("recompile_limit", "accumulated_recompile_limit"):  # beyond which nothing would be compiled
        setattr(torch._dynamo.config, limit, SHAPES)
    make = functools.partial(torch.compile, backend=backend, dynamic=False)
    return Pointwise(
        rms_forward=make(rms_forward),
        rms_backward=make(rms_backward),
        swiglu_forward=make(swiglu_forward),
        swiglu_backward=make(swiglu_backward),
        rotation=make(rotation),
        cross_entropy=make(cross_entropy),
    )
