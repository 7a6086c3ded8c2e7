"""How many ops a step may have: beyond that nobody would wait for its proof."""

from __future__ import annotations

from schedules.errors import ProgramError
from schedules.model import ModelSpec
from schedules.workload import Workload

MOST_OPS = 200_000  # of a step, which take some five minutes to build, prove and simulate, and a gigabyte


def require_few_ops(model: ModelSpec, workload: Workload) -> None:
    """Raises ProgramError where a step has too many ops, before any of them is written: it has a forward and, in
    training, a backward of every block and micro-batch.
    """
    passes = 2 if workload.task == "train" else 1
    require_few(passes * len(model.blocks) * workload.accumulation, workload)


def require_few(ops: int, workload: Workload) -> None:
    """Raises ProgramError where a step has more ops than MOST_OPS."""
    if ops > MOST_OPS:
        raise ProgramError(
            f"a step of {workload.accumulation:,} micro-batches has more than {MOST_OPS:,} ops, too many to simulate: "
            "give fewer micro-batches, each of more sequences"
        )
