"""How many ops a step may have: beyond that nobody would wait for its proof."""

from __future__ import annotations

from schedules.errors import ProgramError
from schedules.model import ModelSpec
from schedules.workload import Workload

MOST_OPS = 200_000  # of a step, which take some five minutes to build, prove and simulate, and a gigabyte
_TOO_MANY = f"more than {MOST_OPS:,} ops, too many to simulate"
_FEWER = "give fewer micro-batches, each of more sequences"


def require_few_ops(model: ModelSpec, workload: Workload) -> None:
    """Raises ProgramError where a step has too many ops, before any of them is written: it has a forward and, in
    training, a backward of every block and micro-batch.
    """
    passes = 2 if workload.task == "train" else 1
    if passes * len(model.blocks) * workload.accumulation > MOST_OPS:
        count = f"{workload.accumulation:,} micro-batch{'es' if workload.accumulation > 1 else ''}"
        raise ProgramError(f"a step of {count} has {_TOO_MANY}: {_FEWER}")


def require_few(ops: int) -> None:
    """Raises ProgramError where a policy has written more than MOST_OPS ops: so does a loop that never ends."""
    if ops > MOST_OPS:
        raise ProgramError(f"the policy writes {_TOO_MANY}: see that its loops end; if they do, {_FEWER}")
