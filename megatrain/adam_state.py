"""The optimizer state of AdamW: what a layer's slab of it holds, and the master of the weights that it may keep.

The slab is flat bytes, for n parameters: m fp32 [n], v fp32 [n], and then by precision
  bf16        nothing: the bf16 weight is updated in place
  bf16_split  int16 [n], the lower half of an fp32 master whose rounding is the bf16 weight
  bf16_fp32   fp32 [n], the master
  fp32        nothing: the weight is the master
or in place of all this
  bf16_16bit  m bf16 [n], v bf16 [n]
  bf16_8bit   m and v as codes, uint8 [n] each, and the largest magnitudes of their blocks, fp32 [blocks] each
              (`megatrain.moments8`)
These are the bytes of `schedules.workload.PRECISIONS`.

A split master is exact: master bits = (weight bits << 16) + low, low signed. The weight is the master rounded
to nearest, a tie away from zero; rounding ties to even would leave one of 65537 cases without a code.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatrain import moments8
from schedules.workload import PRECISIONS, STATE_BLOCK

QUANTISED = "bf16_8bit"
MASTERS = ("bf16_split", "bf16_fp32")  # what keeps one beside the weights
MOMENTS = {"bf16_16bit": torch.bfloat16}  # their type, where it is not fp32
# Elements worked on at a time: on a CPU 2 to 4 MB with its scratch; on a GPU enough to fill it.
CHUNK = {"cpu": 1 << 18, "cuda": 1 << 24}


@dataclass(frozen=True, slots=True)
class State:
    """The parts of a state slab, as views."""

    m: Tensor
    v: Tensor
    low: Tensor | None
    master: Tensor | None


def split_state(state: Tensor, n: int, precision: str) -> State:
    """Views of a state slab, uint8, of n parameters, in any precision but 8 bits. See `require_bytes`."""
    require_bytes(state, PRECISIONS[precision].state_bytes(n), n, precision)
    moment = MOMENTS.get(precision, torch.float32)
    size = n * moment.itemsize
    rest = state[2 * size :]
    return State(
        m=state[:size].view(moment),
        v=state[size : 2 * size].view(moment),
        low=rest.view(torch.int16) if precision == "bf16_split" else None,
        master=rest.view(torch.float32) if precision == "bf16_fp32" else None,
    )


def require_bytes(state: Tensor, expected: int, n: int, precision: str) -> None:
    """Raises ValueError unless the state of n parameters is a flat slab of so many bytes."""
    if state.dtype != torch.uint8 or state.shape != (expected,):
        raise ValueError(
            f"the state of {n} parameters in {precision} is uint8 [{expected}], not {state.dtype} {list(state.shape)}"
        )


def matched(whole: Tensor, part: Tensor, n: int, of: slice, precision: str) -> list[tuple[Tensor, Tensor]]:
    """The state of parameters `of`, in the slab of all n and in a slab of their own: pairs of views of the same bytes.

    `of` begins at a whole block of STATE_BLOCK parameters.
    """
    return [
        (in_whole[of.start // params : -(-of.stop // params)], in_part)
        for (params, in_whole), (_, in_part) in zip(
            _arrays(whole, n, precision), _arrays(part, of.stop - of.start, precision), strict=True
        )
    ]


def _arrays(state: Tensor, n: int, precision: str) -> list[tuple[int, Tensor]]:
    """What a state slab of n parameters is made of, uint8 [elements, bytes], and how many parameters an element has."""
    if precision != QUANTISED:
        found = split_state(state, n, precision)
        return [
            (1, array.view(torch.uint8).view(n, -1))
            for array in (found.m, found.v, found.low, found.master)
            if array is not None
        ]
    codes, scales = state[: 2 * n].view(2, n, 1), state[2 * n :].view(2, moments8.blocks(n), -1)
    return [*((1, array) for array in codes), *((STATE_BLOCK, array) for array in scales)]


def initialise(weights: Tensor, state: Tensor, precision: str, source: Tensor | None = None) -> None:
    """Set the state before the first step, and the weights from `source` (fp32 [n]) where one is given.

    Without a source the master starts at the weights as they are.
    """
    state.zero_()  # of 8 bits too: codes of blocks whose largest is zero stand for zero
    if precision not in MASTERS:
        if source is not None:
            weights.copy_(source)
        return
    n, parts = weights.numel(), split_state(state, weights.numel(), precision)
    size = CHUNK[weights.device.type]  # a layer's whole master would take gigabytes beside it
    for start in range(0, n, size):
        of = slice(start, start + size)
        master = weights[of].float() if source is None else source[of].clone()  # storing may change a NaN's pattern
        store_master(master, weights[of], *(None if kept is None else kept[of] for kept in (parts.low, parts.master)))


def master_weights(weights: Tensor, state: Tensor, precision: str) -> Tensor:
    """The weights at their most exact, put together from both halves where there are two: a new fp32 [n]."""
    if precision == QUANTISED:
        return weights.float()
    parts = split_state(state, weights.numel(), precision)
    master = torch.empty(weights.shape, dtype=torch.float32, device=weights.device)
    load_master(master, weights, parts.low, parts.master)
    return master


def load_master(master: Tensor, weights: Tensor, low: Tensor | None, kept: Tensor | None) -> None:
    """master (fp32, overwritten) from the weights and what the state keeps of it."""
    master.copy_(weights if kept is None else kept)
    if low is not None:
        # a bf16 widened to fp32 is its bits shifted by 16; a mixed-type add would be many times slower
        master.view(torch.int32).add_(low.to(torch.int32))


def store_master(master: Tensor, weights: Tensor, low: Tensor | None, kept: Tensor | None) -> None:
    """The weights, and what the state keeps, from master (fp32, left with one pattern for every NaN)."""
    if kept is not None:
        kept.copy_(master)
    if low is None:
        weights.copy_(master)
        return
    # half a unit added to the bits of a NaN of all ones would wrap it around to zero
    bits = master.nan_to_num_(nan=torch.nan, posinf=torch.inf, neginf=-torch.inf).view(torch.int32)
    low.copy_(bits)  # narrowing keeps the lower half
    weights.view(torch.int16).copy_(bits.add(0x8000).bitwise_right_shift_(16))
