"""Blocks replayed as CUDA graphs: from the second step on one launch stands for all kernels of a forward or backward.

A schedule names the same buffers for the same op in every step, so all addresses are fixed: the kernels that an op
launched once can be launched again without Python. The graphs share one pool of memory, which is right because they
are replayed as they were captured, one after another on one stream. What autograd keeps between the capture of an
op and that of its backward stays in the pool, and in later steps lies where it lay then.

Left as they are: ops with a tensor that is new in each step (tokens, the loss), and those on a buffer whose
activations are copied, to the host or from there. A copy looks for what autograd kept in the step at hand, and brings
it back to the memory that an op had last, where no graph would look for it; and a buffer that a graph and an op
without one took turns on would have memory of both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from megatrain.backend import Work
from megatrain.experts import waits_for_gpu
from megatrain.float_types import float_type
from schedules.errors import InputError
from schedules.op import Kind, Op, Phase
from schedules.schedule import Schedule
from schedules.tensor import SAVED, parse

PHASES = (Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD)
EAGER_CALLS = 1  # libraries set themselves up in the first


class NotCaptured(RuntimeError):
    """An op failed while it was captured. torch's allocator may be left in that capture: end the process."""


class Pool:
    """The memory that all graphs of one run work in."""

    def __init__(self) -> None:
        self._handle = torch.cuda.graph_pool_handle()

    def capture(self, work: Work, step: int) -> torch.cuda.CUDAGraph:
        """The kernels that `work` launches on the current stream; they are not run."""
        torch.cuda.empty_cache()  # what ops outside have left in torch's cache is of no use to the pool
        graph = torch.cuda.CUDAGraph()
        # other threads go on with copies and events meanwhile, which a global capture would forbid
        graph.capture_begin(pool=self._handle, capture_error_mode="thread_local")
        try:
            work(step)
        except Exception as error:
            with contextlib.suppress(Exception):  # what it would say of a broken capture hides why it broke
                graph.capture_end()
            raise NotCaptured(f"not captured as a CUDA graph: {error}") from error
        graph.capture_end()
        return graph


class _Replayed:
    def __init__(self, work: Work, pool: Pool) -> None:
        self._work, self._pool = work, pool
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, step: int) -> None:
        if self._graph is None and self._calls < EAGER_CALLS:
            self._calls += 1
            self._work(step)
            return
        if self._graph is None:
            self._graph = self._pool.capture(self._work, step)
        self._graph.replay()


def replayed(schedule: Schedule, works: Sequence[Work]) -> list[Work]:
    """The works of a run, those of blocks replayed from the second step on. For one run, on a CUDA backend.

    Raises InputError where experts' products would wait for the GPU, as no graph may.
    """
    if schedule.model.num_experts and any(op.reads_quantised for op in schedule.ops):
        raise InputError(
            f"{schedule.model.name}'s experts cannot be replayed as CUDA graphs where ops make them whole: these wait "
            "for the GPU; leave --graphs out, or have whole blocks made"
        )
    if schedule.model.num_experts and waits_for_gpu(float_type(schedule.workload.bytes.activation)):
        raise InputError(
            f"{schedule.model.name}'s experts cannot be replayed as CUDA graphs here: in fp32, and on all but Hopper "
            "and Blackwell, their products wait for the GPU; leave --graphs out"
        )
    copied = {
        access.buffer
        for op in schedule.ops
        if op.phase == Phase.COPY
        for access in op.accesses
        if parse(access.tensor).cls == SAVED
    }
    pool = Pool()
    return [
        _Replayed(work, pool) if _fixed(op, schedule, copied) else work
        for op, work in zip(schedule.ops, works, strict=True)
    ]


def _fixed(op: Op, schedule: Schedule, copied: set[str]) -> bool:
    return (
        op.kind == Kind.COMPUTE
        and op.phase in PHASES
        and op.layer is not None
        and schedule.model.is_block(op.layer)
        and not any(access.buffer in copied for access in op.accesses)
    )
