"""AdamW's kernel on the CPU: one pass over gradient, moments, weights and what is kept of a master.

Has the same bits on every processor and by any number of threads: on x86 those of torch's fused kernel wherever that
one is vectorised; on others torch's own depend on what its compiler fused. Torch computes the last elements of a slab,
fewer than a vector, in another precision, so those are left to it.
"""

from __future__ import annotations

import ctypes
import functools
import math
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from megatrain.native import build
from megatrain.stochastic_rounding import Draws
from schedules.workload import STATE_BLOCK

VECTOR = 16  # a multiple of torch's vector length on every processor: 16 or 8 floats
SOURCE = Path(__file__).with_name("adam.cpp")
_CODES = {"bf16": 0, "bf16_split": 1, "bf16_fp32": 2, "fp32": 3, "bf16_16bit": 4}
SCALARS = ("kept", "lerp", "beta2", "square", "correction", "eps", "size")  # of Coefficients, as kernels take them
_GRADS = {torch.bfloat16: 0, torch.float32: 1}
_building = threading.Lock()


@dataclass(frozen=True)
class Map:
    """How moments of eight bits are stored.

    `values`, fp32 [256]: what codes stand for, ascending. `steps`, int32 [65536]: by the upper half of a float's bits,
    in the order of floats, the code of the least float that begins so in its upper half, and in its lower half that of
    the largest float that still has this code, of those that begin so. Others have the next: floats that begin alike
    differ by less than a hundredth, so that at most one limit between codes lies between them.
    """

    values: Tensor
    steps: Tensor


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """The numbers of one step of AdamW, as torch's fused kernel has them.

    The mean moves by `lerp` times the gradient's distance: from where it is by 1 - beta1, or if not `from_mean`, since
    less is rounded so, from the gradient by -beta1. `square` is 1 - beta2, `correction` the root of 1 - beta2^t, `size`
    -lr / (1 - beta1^t), `kept` 1 - lr * weight decay.
    """

    kept: float
    lerp: float
    from_mean: bool
    beta2: float
    square: float
    correction: float
    eps: float
    size: float

    @classmethod
    def of(
        cls, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, step_number: int
    ) -> Coefficients:
        """Of a step, counted from 1."""
        beta1, beta2 = betas
        lerp = ctypes.c_float(1 - beta1).value
        from_mean = lerp < 0.5
        return cls(
            kept=1 - lr * weight_decay,
            lerp=lerp if from_mean else lerp - 1,
            from_mean=from_mean,
            beta2=beta2,
            square=1 - beta2,
            correction=math.sqrt(1 - beta2**step_number),
            eps=eps,
            size=-lr / (1 - beta1**step_number),
        )


class _Step(ctypes.Structure):
    """As adam.cpp declares it."""

    _fields_: ClassVar = [
        *((name, ctypes.c_float) for name in (*SCALARS, "scale")),
        *((name, ctypes.c_uint32) for name in ("from_mean", "start", "key")),
    ]

    @classmethod
    def of(cls, c: Coefficients, scale: float, draws: Draws) -> _Step:
        from_mean = 0xFFFFFFFF if c.from_mean else 0
        return cls(*(getattr(c, name) for name in SCALARS), scale, from_mean, draws.start, draws.key)


class Kernel:
    """The compiled function. Its calls hold no Python lock."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, number = ctypes.c_void_p, ctypes.c_int
        self._function, self._function8 = library.megatrain_adam, library.megatrain_adam8
        self._function.restype = None
        self._function.argtypes = [
            number, number, ctypes.c_int64, number, *[pointer] * 5, _Step,
        ]  # fmt: skip
        self._function8.restype = None
        self._function8.argtypes = [
            number, ctypes.c_int64, number, *[pointer] * 11, ctypes.c_int64, _Step,
        ]  # fmt: skip

    def update(
        self,
        weights: Tensor,
        grad: Tensor,
        m: Tensor,
        v: Tensor,
        kept: Tensor | None,
        *,
        precision: str,
        coefficients: Coefficients,
        grad_scale: float,
        draws: Draws,
    ) -> int:
        """Update the leading elements in place, on torch's number of threads; how many: all but a vector's rest.

        All contiguous, on the CPU, [n]; types as in `megatrain.adam`, `kept` the low halves or the master. None
        are updated where the gradient is neither bf16 nor fp32.
        """
        if grad.dtype not in _GRADS:
            return 0
        count = weights.numel() // VECTOR * VECTOR
        if count:
            self._function(
                _CODES[precision], _GRADS[grad.dtype], count, torch.get_num_threads(),
                weights.data_ptr(), grad.data_ptr(), m.data_ptr(), v.data_ptr(),
                None if kept is None else kept.data_ptr(),
                _Step.of(coefficients, grad_scale, draws),
            )  # fmt: skip
        return count

    def update8(
        self,
        weights: Tensor,
        grad: Tensor,
        moments: Sequence[tuple[Tensor, Tensor, Map]],
        decay: Tensor,
        *,
        coefficients: Coefficients,
        grad_scale: float,
        draws: Draws,
    ) -> int:
        """As `update`, where moments have eight bits; how many were updated: all whole blocks.

        `moments` are the first and the second: codes, uint8 [n], largest magnitudes, fp32 [blocks], and the map.
        `decay`, int64 [ranges, 2], are the sorted ranges that weight decay applies to.
        """
        if grad.dtype not in _GRADS:
            return 0
        count = weights.numel() // STATE_BLOCK * STATE_BLOCK
        if count:
            stored = [
                tensor.data_ptr()
                for codes, largest, map_ in moments
                for tensor in (codes, largest, map_.values, map_.steps)
            ]
            self._function8(
                _GRADS[grad.dtype], count, torch.get_num_threads(), weights.data_ptr(), grad.data_ptr(), *stored,
                decay.data_ptr(), len(decay), _Step.of(coefficients, grad_scale, draws),
            )  # fmt: skip
        return count


def kernel() -> Kernel | None:
    """The kernel, or None where it cannot be built; `why_not` says why. Compiled at the first call.

    The first call also warns where it cannot be: updates then take several passes over their memory.
    """
    found = _kernel_or_reason()
    return found if isinstance(found, Kernel) else None


def why_not() -> str | None:
    """Why there is no kernel; None where there is one."""
    found = _kernel_or_reason()
    return found if isinstance(found, str) else None


def _kernel_or_reason() -> Kernel | str:
    with _building:
        return _built()


@functools.cache
def _built() -> Kernel | str:
    try:
        return Kernel(build.load(SOURCE))
    except build.NotBuilt as error:
        warnings.warn(f"AdamW on the CPU takes several passes over its memory: {error}", stacklevel=2)
        return str(error)
