"""Matrix products of operands in 8 bits, each with one scale; the rule is that of `schedules.fp8`.

The largest magnitude of a tensor becomes the largest that the format has, so that nothing saturates; what is smaller by
more than 29,000 (e4m3) or 900 million (e5m2) has fewer bits, and by sixteen or eight times that, none. Zeros have a
scale, too. An infinity or a NaN makes the scale one, and with it all that is multiplied: a training that diverges shows
it. Scales stay on the device.

A product adds up along the rows of both operands: torch._scaled_mm takes, on NVIDIA, a row-major and a column-major
matrix (torch's checks in ATen/native/cuda/Blas.cpp, 2.10). Sums are fp32, forward on Hopper with fewer bits, as
torchao's tensor-wise recipe has them (Float8GemmConfig, use_fast_accum: for outputs, not for gradients).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain.pointwise import Pointwise
from schedules.errors import InputError

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2  # of inputs and weights, of gradients of outputs
CAPABILITY = (8, 9)  # the first with 8 bits in its matrix units


def require(device: torch.device) -> None:
    """Raises InputError where the device has no such products."""
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < CAPABILITY:
        needed, own = (".".join(map(str, capability)) for capability in (CAPABILITY, found))
        raise InputError(
            f"fp8 products need a GPU of compute capability {needed} or more, and this one has {own}: leave out matmul"
        )


@dataclass(frozen=True, slots=True)
class Operand:
    """`values` [m, k] of 8 bits, contiguous, times `unit`, fp32 [1]; products add up over k."""

    values: Tensor
    unit: Tensor


def rows(x: Tensor, dtype: torch.dtype, pointwise: Pointwise) -> Operand:
    """Of x [m, k]."""
    unit = pointwise.fp8_unit(x, dtype)
    return Operand(pointwise.fp8_rows(x, unit, dtype), unit)


def columns(x: Tensor, dtype: torch.dtype, pointwise: Pointwise) -> Operand:
    """Of x [k, m], transposed."""
    unit = pointwise.fp8_unit(x, dtype)
    return Operand(pointwise.fp8_columns(x, unit, dtype), unit)


def both(x: Tensor, dtype: torch.dtype, pointwise: Pointwise) -> tuple[Operand, Operand]:
    """`rows` and `columns` of the same."""
    unit = pointwise.fp8_unit(x, dtype)
    along, across = pointwise.fp8_both(x, unit, dtype)
    return Operand(along, unit), Operand(across, unit)


def product(a: Operand, b: Operand, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """a [m, k] times b [n, k] transposed: [m, n] in bf16 or fp32. `fast`: summed with fewer bits where that is faster.

    The result is a tensor of its own: the kernels that torch chooses may write to multiples of 256 bytes alone, where
    a place in a slab need not lie (cuBLASLt, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, which torch leaves as it is).
    """
    return torch._scaled_mm(
        a.values, b.values.t(), scale_a=a.unit, scale_b=b.unit, out_dtype=dtype, use_fast_accum=fast
    )
