"""AdamW on a layer's slabs, on whichever device they lie; one pass over them, in chunks that fit a cache.

What a slab of optimizer state holds is in `adam_state`. The arithmetic is torch's fused AdamW kernel, in fp32; moments
in fewer bits are fp32 while they are updated, chunk by chunk. On the CPU our own kernel does the same, bit by bit, in
one pass where torch needs several, if it can be compiled.

Where there is no master, bf16 weights, and moments in bf16, are rounded stochastically
(`megatrain.stochastic_rounding`). Rounded to nearest, a weight or moment that changes by less than half its last bit
would stand still, as v would where beta2 is above 0.996.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from megatrain import moments8
from megatrain.adam_state import CHUNK, QUANTISED, State, load_master, require_bytes, split_state, store_master
from megatrain.float_types import float_type
from megatrain.native import adam as native
from megatrain.native.build import NotBuilt
from megatrain.stochastic_rounding import Draws, round_to
from schedules.parameters import is_matrix
from schedules.workload import PRECISIONS, STATE_BLOCK


@dataclass(frozen=True, kw_only=True)
class Adam:
    """Hyperparameters of AdamW (Loshchilov and Hutter, arXiv:1711.05101). Raises ValueError when meaningless.

    The learning rate is that of the step at hand: a schedule makes a new Adam (`dataclasses.replace`).
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if not (self.lr >= 0 and self.eps >= 0 and self.weight_decay >= 0):
            raise ValueError(f"lr, eps and weight_decay must not be negative: {self}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be in [0, 1), not {self.betas}")


def decayed(shapes: Mapping[str, tuple[int, ...]]) -> list[tuple[int, int]]:
    """The ranges [start, stop) of a slab that weight decay applies to: matrices, not norms and biases."""
    ranges: list[tuple[int, int]] = []
    start = 0
    for name, shape in shapes.items():
        stop = start + torch.Size(shape).numel()
        if is_matrix(name, shape):
            if ranges and ranges[-1][1] == start:
                ranges[-1] = (ranges[-1][0], stop)
            else:
                ranges.append((start, stop))
        start = stop
    return ranges


def within(ranges: Sequence[tuple[int, int]], of: slice) -> list[tuple[int, int]]:
    """What of ranges lies in [start, stop) of a slab, counted from its start."""
    cut = [(max(a, of.start) - of.start, min(b, of.stop) - of.start) for a, b in ranges]
    return [(a, b) for a, b in cut if a < b]


def step(
    weights: Tensor,
    grad: Tensor,
    state: Tensor,
    hyper: Adam,
    step_number: int,
    *,
    precision: str,
    grad_scale: Tensor | None = None,
    decay: Sequence[tuple[int, int]] | None = None,
    layer: int = 0,
    start: int = 0,
) -> None:
    """Update `weights` (bf16 or fp32 [n]) and `state` (uint8) in place from `grad` (any floating type [n]).

    `step_number` counts from 1. `grad_scale`, fp32 [] on the same device, multiplies the gradient, which is
    left as it is. `decay` are the sorted ranges that weight decay applies to, all when None. What has no master is
    rounded as `layer`, `step_number` and its place in the layer's slab say, of which these weights begin at `start`.
    All on one device; nothing waits for it. Raises ValueError when sizes or types do not agree with `precision`.
    """
    n = weights.numel()
    expected = float_type(PRECISIONS[precision].weight)
    if weights.dtype != expected or weights.shape != (n,) or grad.shape != (n,):
        raise ValueError(
            f"{precision} updates {expected} [n], not {weights.dtype} {list(weights.shape)} "
            f"from a gradient {list(grad.shape)}"
        )
    if not (weights.is_contiguous() and grad.is_contiguous() and state.is_contiguous()):
        raise ValueError("slabs must be contiguous: the fused kernel would read the wrong elements")
    if step_number < 1:
        raise ValueError(f"steps count from 1, not {step_number}")
    draws = Draws.of(layer, step_number).after(start)
    if precision == QUANTISED:
        _step_quantised(weights, grad, state, hyper, step_number, grad_scale, decay, draws)
    else:
        _step_whole(weights, grad, state, hyper, step_number, precision, grad_scale, decay, draws)


def _step_whole(
    weights: Tensor,
    grad: Tensor,
    state: Tensor,
    hyper: Adam,
    step_number: int,
    precision: str,
    grad_scale: Tensor | None,
    decay: Sequence[tuple[int, int]] | None,
    draws: Draws,
) -> None:
    """`step` with moments of one number each."""
    n = weights.numel()
    parts = split_state(state, n, precision)
    kept = parts.low if parts.master is None else parts.master
    if on_gpu := kernels_on(weights.device):
        on_gpu.update(
            weights, grad, parts.m, parts.v, kept, precision=precision, grad_scale=grad_scale,
            coefficients=_coefficients(hyper, step_number, hyper.weight_decay),
            decay=[(0, n)] if decay is None else decay, draws=draws,
        )  # fmt: skip
        return
    size = min(n, CHUNK[weights.device.type])
    rows = 2 if parts.m.dtype == torch.float32 else 4
    scratch = torch.empty(rows, size, dtype=torch.float32, device=weights.device)
    count = torch.full((), float(step_number), device=weights.device)
    kernel = native.kernel() if weights.device.type == "cpu" else None
    with torch.no_grad():
        for start, stop, weight_decay in _ranges(n, hyper.weight_decay, decay):
            done = 0
            if kernel is not None:
                part = slice(start, stop)
                done = kernel.update(
                    weights[part], grad[part], parts.m[part], parts.v[part], None if kept is None else kept[part],
                    precision=precision, coefficients=_coefficients(hyper, step_number, weight_decay),
                    grad_scale=1.0 if grad_scale is None else float(grad_scale), draws=draws.after(start),
                )  # fmt: skip
            for at in range(start + done, stop, size):
                part = slice(at, min(at + size, stop))
                _step_in_torch(
                    weights, grad, parts, part, scratch, count, hyper, weight_decay, grad_scale, draws.after(at)
                )


def _step_quantised(
    weights: Tensor,
    grad: Tensor,
    state: Tensor,
    hyper: Adam,
    step_number: int,
    grad_scale: Tensor | None,
    decay: Sequence[tuple[int, int]] | None,
    draws: Draws,
) -> None:
    """`step` with moments of 8 bits, which are fp32 for as long as a chunk of whole blocks is worked on."""
    n = weights.numel()
    require_bytes(state, PRECISIONS[QUANTISED].state_bytes(n), n, QUANTISED)
    stored = (state[:n], state[n : 2 * n])
    # the slab's tail need not be aligned to fp32: it is copied out, and back
    largest = state[2 * n :].clone().view(torch.float32).view(2, moments8.blocks(n))
    coefficients = _coefficients(hyper, step_number, hyper.weight_decay)
    kernel = native.kernel() if weights.device.type == "cpu" else None
    done = 0
    if on_gpu := kernels_on(weights.device):
        on_gpu.update8(
            weights, grad, *zip(stored, largest, strict=True), coefficients=coefficients, grad_scale=grad_scale,
            decay=[(0, n)] if decay is None else decay, draws=draws,
        )  # fmt: skip
        done = n
    elif kernel is not None:
        done = kernel.update8(
            weights, grad,
            [(codes, scales, moments8.native_map(signed, weights.device))
             for codes, scales, signed in zip(stored, largest, (True, False), strict=True)],
            torch.tensor([(0, n)] if decay is None else decay, dtype=torch.int64).view(-1, 2),
            coefficients=coefficients, grad_scale=1.0 if grad_scale is None else float(grad_scale), draws=draws,
        )  # fmt: skip
    size = min(n, CHUNK[weights.device.type])
    wide = torch.empty(8 * size if done < n else 0, dtype=torch.uint8, device=weights.device)
    for start in range(done, n, size):
        stop = min(start + size, n)
        part, of_blocks = slice(start, stop), slice(start // STATE_BLOCK, moments8.blocks(stop))
        both = wide[: 8 * (stop - start)]
        parts = split_state(both, stop - start, "bf16")
        for values, codes, scales, signed in zip((parts.m, parts.v), stored, largest, (True, False), strict=True):
            moments8.dequantise(codes[part], scales[of_blocks], values, signed=signed)
        part_decay = None if decay is None else within(decay, part)
        _step_whole(
            weights[part], grad[part], both, hyper, step_number, "bf16", grad_scale, part_decay, draws.after(start)
        )
        for values, codes, scales, signed in zip((parts.m, parts.v), stored, largest, (True, False), strict=True):
            moments8.quantise(values, codes[part], scales[of_blocks], signed=signed)
    state[2 * n :].copy_(largest.view(-1).view(torch.uint8))


@functools.cache
def kernels_on(device: torch.device) -> ModuleType | None:
    """Our kernels for a GPU, `native.adam_gpu`; None elsewhere, and where Triton cannot compile them."""
    if device.type != "cuda":
        return None
    try:
        from megatrain.native import adam_gpu

        adam_gpu.try_out(device)
    except (ImportError, NotBuilt) as error:
        warnings.warn(f"AdamW on the GPU takes several passes over its memory: {error}", stacklevel=2)
        return None
    return adam_gpu


def _coefficients(hyper: Adam, step_number: int, weight_decay: float) -> native.Coefficients:
    return native.Coefficients.of(
        lr=hyper.lr, betas=hyper.betas, eps=hyper.eps, weight_decay=weight_decay, step_number=step_number
    )


def _step_in_torch(
    weights: Tensor,
    grad: Tensor,
    parts: State,
    part: slice,
    scratch: Tensor,
    count: Tensor,
    hyper: Adam,
    weight_decay: float,
    grad_scale: Tensor | None,
    draws: Draws,
) -> None:
    """`step` on one part of the slabs, no longer than `scratch`: fp32 copies, torch's kernel, and back."""
    length = part.stop - part.start
    w, low = weights[part], None if parts.low is None else parts.low[part]
    g = grad[part]
    alone = low is None and parts.master is None and grad_scale is None
    # no copies needed; bf16 in place rounds otherwise than its copies in fp32 do, and schedules' bits would differ
    if alone and w.dtype == g.dtype == parts.m.dtype == torch.float32:
        _fused(w, g, parts.m[part], parts.v[part], count, hyper, weight_decay)
        return
    if g.dtype != torch.float32 or grad_scale is not None:
        g = scratch[0, :length].copy_(g)
        if grad_scale is not None:
            g.mul_(grad_scale)
    if parts.master is not None:
        p = parts.master[part]
    elif w.dtype == torch.float32:
        p = w
    else:
        p = scratch[1, :length]
        load_master(p, w, low, None)
    moments = [parts.m[part], parts.v[part]]
    m, v = moments
    if m.dtype != torch.float32:
        m, v = (row[:length].copy_(values) for row, values in zip(scratch[2:], moments, strict=True))
    _fused(p, g, m, v, count, hyper, weight_decay)
    if low is not None or parts.master is not None:
        store_master(p, w, low, None)
    elif p is not w:
        for_weights, for_moments = draws.bits(length, w.device)
        round_to(w, p, for_weights)
        if m is not moments[0]:
            round_to(moments[0], m, for_moments)
            round_to(moments[1], v, for_moments)


def _fused(p: Tensor, g: Tensor, m: Tensor, v: Tensor, count: Tensor, hyper: Adam, weight_decay: float) -> None:
    torch._fused_adamw_(
        [p], [g], [m], [v], [], [count],
        lr=hyper.lr, beta1=hyper.betas[0], beta2=hyper.betas[1], eps=hyper.eps,
        weight_decay=weight_decay, amsgrad=False, maximize=False,
    )  # fmt: skip


def _ranges(n: int, weight_decay: float, decay: Sequence[tuple[int, int]] | None) -> list[tuple[int, int, float]]:
    """(start, stop, weight decay) of pieces that cover [0, n)."""
    if decay is None or not weight_decay:
        return [(0, n, weight_decay)]
    pieces: list[tuple[int, int, float]] = []
    at = 0
    for start, stop in [*decay, (n, n)]:
        pieces += [(at, start, 0.0), (start, stop, weight_decay)]
        at = stop
    return [piece for piece in pieces if piece[0] < piece[1]]
