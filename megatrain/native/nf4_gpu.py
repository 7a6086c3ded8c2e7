"""NF4 on a GPU, in Triton: one launch for a matrix, which reads its codes and writes its weights once."""

from __future__ import annotations

from subprocess import SubprocessError

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import TritonError

from megatrain.native.adam_gpu import narrow
from megatrain.native.build import NotBuilt
from schedules.quantised import BLOCK

WEIGHTS = 2048  # of one program
OF_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def _dequantise(codes_at, largest_at, levels_at, weights_at, n, WEIGHTS: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * WEIGHTS + tl.arange(0, WEIGHTS)
    there = i < n
    byte = tl.load(codes_at + i // 2, there, other=0).to(tl.int32)
    code = tl.where(i % 2 == 0, byte >> 4, byte & 15)
    whole = tl.load(levels_at + code) * tl.load(largest_at + i // OF_BLOCK, there, other=0)
    if weights_at.dtype.element_ty == tl.bfloat16:
        tl.store(weights_at + i, narrow(whole), there)
    else:
        tl.store(weights_at + i, whole, there)


def dequantise(codes: Tensor, largest: Tensor, levels: Tensor, weights: Tensor) -> None:
    """Write the weights, [n], of a matrix's codes, uint8 [bytes], on the current stream; nothing waits.

    `largest` are the magnitudes of its blocks, fp32 [blocks]; `levels`, fp32 [16], what a code is a share of.
    """
    n = weights.numel()
    _dequantise[(triton.cdiv(n, WEIGHTS),)](codes, largest, levels, weights, n, WEIGHTS=WEIGHTS)


def try_out(device: torch.device) -> None:
    """Compile the kernel and launch it. Raises NotBuilt where Triton cannot."""
    codes = torch.zeros(1, dtype=torch.uint8, device=device)
    largest, levels, weights = (torch.zeros(n, device=device) for n in (1, 16, 1))
    try:
        dequantise(codes, largest, levels, weights)
    except (TritonError, OSError, RuntimeError, SubprocessError) as error:
        raise NotBuilt(f"Triton cannot compile: {error}") from None
