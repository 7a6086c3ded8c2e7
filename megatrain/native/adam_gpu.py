"""AdamW's kernels on a GPU, in Triton: one launch for a slab, which reads and writes every byte of it once.

The arithmetic is that of `adam.cpp`; where the compiler contracts to fused multiply-adds a last bit may differ.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from subprocess import SubprocessError
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import TritonError

from megatrain import moments8
from megatrain.native.adam import SCALARS, Coefficients
from megatrain.native.build import NotBuilt
from megatrain.stochastic_rounding import FACTORS, Draws
from schedules.workload import STATE_BLOCK

BLOCK = 1024  # elements of one program
TOP_BIT = tl.constexpr(-(1 << 31))
NAN_BITS = tl.constexpr(0x7FC00000)  # one pattern for every NaN: carries could turn another into a number
FACTOR, OTHER_FACTOR = (tl.constexpr(factor) for factor in FACTORS)


@triton.jit
def _wide(x):
    """To fp32."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x


@triton.jit
def narrow(x):
    """From fp32 to the nearest of bf16, a tie to even; by its bits, since Triton's interpreter cuts them off."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(x != x, NAN_BITS, bits + 0x7FFF + ((bits >> 16) & 1))
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _drawn(j, start, key):
    """Random bits for elements j after `start`, uint32; megatrain/stochastic_rounding.py."""
    x = j.to(tl.uint32) + start.to(tl.uint32)
    x = (x ^ (x >> 16)) * FACTOR
    x = (x ^ (x >> 15) ^ key.to(tl.uint32)) * OTHER_FACTOR
    return x ^ (x >> 16)


@triton.jit
def _rounded(x, drawn):
    """From fp32 to bf16, up or down by the lower 16 bits of `drawn`."""
    bits = tl.where(x != x, NAN_BITS, x.to(tl.int32, bitcast=True))
    return ((bits + (drawn & 0xFFFF).to(tl.int32)) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _larger(a, b):
    return tl.where(a > b, a, b)


@triton.jit
def _within(at, BLOCK: tl.constexpr):
    """A place in a slab as one in a program's block, 32 bits: what is compared with every element."""
    return tl.minimum(tl.maximum(at, 0), BLOCK).to(tl.int32)


@triton.jit
def _moved(grad, m, v, p, j, first, ranges_at, ranges, s, FROM_MEAN: tl.constexpr, BLOCK: tl.constexpr):
    """Moments and parameters j after the first of a program, fp32, after the step; `s` as Coefficients, with the
    gradient's scale."""
    kept, lerp, beta2, square, correction, eps, size, scale = s
    grad = grad * scale
    mean = (m if FROM_MEAN else grad) + lerp * (grad - m)
    var = square * grad * grad + v * beta2
    decay = tl.full(j.shape, 1.0, tl.float32)
    for r in range(ranges):
        begin = _within(tl.load(ranges_at + 2 * r) - first, BLOCK)
        end = _within(tl.load(ranges_at + 2 * r + 1) - first, BLOCK)
        decay = tl.where((j >= begin) & (j < end), kept, decay)
    denominator = tl.div_rn(tl.sqrt_rn(var), correction) + eps
    return mean, var, p * decay + tl.div_rn(size * mean, denominator)


@triton.jit(do_not_specialize=["start", "key"])
def _adamw(
    w_at, g_at, m_at, v_at, kept_at, scale_at, ranges_at, ranges, n, start, key,
    kept, lerp, beta2, square, correction, eps, size,
    PRECISION: tl.constexpr, FROM_MEAN: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first, j = tl.program_id(0).to(tl.int64) * BLOCK, tl.arange(0, BLOCK)
    there, i = j < _within(n - first, BLOCK), first + j
    w = tl.load(w_at + i, there, other=0)
    if PRECISION == "bf16_split":
        low = tl.load(kept_at + i, there, other=0).to(tl.int32)
        p = ((w.to(tl.int16, bitcast=True).to(tl.int32) << 16) + low).to(tl.float32, bitcast=True)
    elif PRECISION == "bf16_fp32":
        p = tl.load(kept_at + i, there, other=0)
    else:
        p = _wide(w)
    grad = _wide(tl.load(g_at + i, there, other=0))
    m = _wide(tl.load(m_at + i, there, other=0))
    v = _wide(tl.load(v_at + i, there, other=0))
    scale = tl.load(scale_at) if SCALED else 1.0
    s = (kept, lerp, beta2, square, correction, eps, size, scale)
    m, v, p = _moved(grad, m, v, p, j, first, ranges_at, ranges, s, FROM_MEAN, BLOCK)
    if m_at.dtype.element_ty == tl.bfloat16:
        drawn = _drawn(j, first + start, key)
        tl.store(m_at + i, _rounded(m, drawn >> 16), there)
        tl.store(v_at + i, _rounded(v, drawn >> 16), there)
    else:
        tl.store(m_at + i, m, there)
        tl.store(v_at + i, v, there)
    if PRECISION == "bf16_split":
        bits = tl.where(p != p, NAN_BITS, p.to(tl.int32, bitcast=True))
        tl.store(kept_at + i, bits.to(tl.int16), there)
        tl.store(w_at + i, ((bits + 0x8000) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), there)
    elif PRECISION == "bf16_fp32":
        tl.store(kept_at + i, p, there)
        tl.store(w_at + i, narrow(p), there)
    elif PRECISION == "fp32":
        tl.store(w_at + i, p, there)
    else:
        tl.store(w_at + i, _rounded(p, _drawn(j, first + start, key)), there)


@triton.jit
def _coded(x, steps_at):
    """A block of moments as codes, and its largest magnitude; a NaN is not the largest."""
    largest = tl.reduce(tl.where(x != x, 0.0, tl.abs(x)), 0, _larger)
    share = tl.where(x != x, float("inf"), tl.div_rn(x, tl.where(largest > 0, largest, 1.0)))
    bits = share.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) | TOP_BIT)  # in the order of the floats, if it had no sign
    step = tl.load(steps_at + ((key >> 16) & 0xFFFF))
    return ((step >> 16) + ((key & 0xFFFF) > (step & 0xFFFF)).to(tl.int32)).to(tl.uint8), largest


@triton.jit(do_not_specialize=["start", "key"])
def _adamw8(
    w_at, g_at, m_at, v_at, m_largest_at, v_largest_at, m_values_at, v_values_at, m_steps_at, v_steps_at,
    scale_at, ranges_at, ranges, n, start, key,
    kept, lerp, beta2, square, correction, eps, size,
    FROM_MEAN: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    first, j = block * BLOCK, tl.arange(0, BLOCK)
    there, i = j < _within(n - first, BLOCK), first + j
    p = _wide(tl.load(w_at + i, there, other=0))
    grad = _wide(tl.load(g_at + i, there, other=0))
    m = tl.load(m_values_at + tl.load(m_at + i, there, other=0).to(tl.int32)) * tl.load(m_largest_at + block)
    v = tl.load(v_values_at + tl.load(v_at + i, there, other=0).to(tl.int32)) * tl.load(v_largest_at + block)
    scale = tl.load(scale_at) if SCALED else 1.0
    s = (kept, lerp, beta2, square, correction, eps, size, scale)
    m, v, p = _moved(grad, m, v, p, j, first, ranges_at, ranges, s, FROM_MEAN, BLOCK)
    tl.store(w_at + i, _rounded(p, _drawn(j, first + start, key)), there)
    # what is beyond the slab has no say in the largest
    m_codes, m_largest = _coded(tl.where(there, m, 0.0), m_steps_at)
    v_codes, v_largest = _coded(tl.where(there, v, 0.0), v_steps_at)
    tl.store(m_at + i, m_codes, there)
    tl.store(v_at + i, v_codes, there)
    tl.store(m_largest_at + block, m_largest)
    tl.store(v_largest_at + block, v_largest)


def update(
    weights: Tensor,
    grad: Tensor,
    m: Tensor,
    v: Tensor,
    kept: Tensor | None,
    *,
    precision: str,
    coefficients: Coefficients,
    grad_scale: Tensor | None,
    decay: Sequence[tuple[int, int]],
    draws: Draws,
) -> None:
    """Update all in place on the current stream; nothing waits.

    All contiguous, on one device, [n]; types as in `megatrain.adam`, `kept` the low halves or the master.
    `grad_scale`, fp32 [], multiplies the gradient; `decay` are the ranges that weight decay applies to; `draws` round
    what has no master.
    """
    n = weights.numel()
    _adamw[(triton.cdiv(n, BLOCK),)](
        weights, grad, m, v, kept, grad_scale, *_ranges(tuple(decay), weights.device), n, draws.start, draws.key,
        *_scalars(coefficients),
        PRECISION=precision, FROM_MEAN=coefficients.from_mean, SCALED=grad_scale is not None, BLOCK=BLOCK,
    )  # fmt: skip


def update8(
    weights: Tensor,
    grad: Tensor,
    m: tuple[Tensor, Tensor],
    v: tuple[Tensor, Tensor],
    *,
    coefficients: Coefficients,
    grad_scale: Tensor | None,
    decay: Sequence[tuple[int, int]],
    draws: Draws,
) -> None:
    """As `update`, where moments have eight bits: codes, uint8 [n], and largest magnitudes, fp32 [blocks]."""
    maps = [moments8.native_map(signed, weights.device) for signed in (True, False)]
    _adamw8[(moments8.blocks(weights.numel()),)](
        weights, grad, m[0], v[0], m[1], v[1], *(map_.values for map_ in maps), *(map_.steps for map_ in maps),
        grad_scale, *_ranges(tuple(decay), weights.device), weights.numel(), draws.start, draws.key,
        *_scalars(coefficients),
        FROM_MEAN=coefficients.from_mean, SCALED=grad_scale is not None, BLOCK=STATE_BLOCK, num_warps=1,
    )  # fmt: skip


def try_out(device: torch.device) -> None:
    """Compile a kernel and launch it. Raises NotBuilt where Triton cannot."""
    weights, grad, m, v = (torch.zeros(1, device=device) for _ in range(4))
    step = Coefficients.of(lr=0.0, betas=(0.9, 0.999), eps=1.0, weight_decay=0.0, step_number=1)
    try:
        update(
            weights, grad, m, v, None, precision="fp32", coefficients=step, grad_scale=None, decay=[],
            draws=Draws.of(0, 1),
        )  # fmt: skip
    except (TritonError, OSError, RuntimeError, SubprocessError) as error:
        raise NotBuilt(f"Triton cannot compile: {error}") from None


def _scalars(coefficients: Coefficients) -> list[float]:
    return [getattr(coefficients, name) for name in SCALARS]


@functools.cache
def _ranges(decay: tuple[tuple[int, int], ...], device: torch.device) -> tuple[Tensor, Any]:
    """The ranges on the device, int64 [ranges, 2], and how many; copied there, which waits, once for layers alike."""
    return torch.tensor(decay or [(0, 0)], dtype=torch.int64, device=device), len(decay)
