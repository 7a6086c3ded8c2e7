"""The ways to split a step into micro-batches: which there are, their bounds, and which are worth searching."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from schedules import fp8
from schedules.errors import InputError
from schedules.model import ModelSpec
from schedules.most_ops import require_few_ops
from schedules.workload import ADAMW, MemoryBudget, Workload
from sim.cost import MissingCost, TooLong, Unmeasured
from sim.machine import HardwareProfile
from sim.placement_bound import NoPlacement, PlacementBound, placement_bound

SPLITS = 6  # ways to split a step into micro-batches that are searched
NEARLY_LEAST = 0.01  # of bounds: by what fraction one may be above the least

Bounded = tuple[PlacementBound, Workload]  # a split of the step, and a mode of recompute, behind its bound


def splits(
    seq_len: int,
    tokens_per_step: int | None,
    micro_batch_size: int | None,
    accumulation: int | None,
    precision: str,
    grad_clip: float | None,
    optimizer: str = ADAMW,
    matmul: str | None = None,
) -> Iterator[Workload]:
    """The ways to split a step into equal micro-batches, largest micro-batch first.

    Raises:
        InputError: there is none.
    """

    def workload(size: int, count: int) -> Workload:
        try:
            return Workload(
                micro_batch_size=size,
                accumulation=count,
                seq_len=seq_len,
                precision=precision,
                optimizer=optimizer,
                grad_clip=grad_clip,
                matmul=matmul,
            )
        except ValueError as error:
            raise InputError(str(error)) from None

    if tokens_per_step is None:
        if micro_batch_size is None:
            raise InputError("say how long a step is: tokens per step, or a micro-batch size")
        yield workload(micro_batch_size, 1 if accumulation is None else accumulation)
        return
    sequences, rest = divmod(tokens_per_step, max(seq_len, 1))
    if rest or sequences < 1 or seq_len < 1:
        raise InputError(f"{tokens_per_step:,} tokens per step is no whole number of sequences of {seq_len:,} tokens")
    small = [count for count in range(1, math.isqrt(sequences) + 1) if sequences % count == 0]
    counts = [
        count
        for count in sorted({*small, *(sequences // count for count in small)})
        if micro_batch_size in (None, sequences // count) and accumulation in (None, count)
    ]
    if not counts:
        asked = f"{'' if accumulation is None else f'{accumulation:,} '}micro-batches"
        of_size = "" if micro_batch_size is None else f" of {micro_batch_size:,}"
        raise InputError(f"{sequences:,} sequences a step do not divide into {asked}{of_size}")
    for count in counts:
        yield workload(sequences // count, count)


def all_ways(model: ModelSpec, steps: Iterable[Workload]) -> list[Workload]:
    """Each split with every mode of recompute."""
    return [replace(workload, recompute=mode) for workload in steps for mode in model.recompute_modes]


def that_can_be_written(model: ModelSpec, steps: Sequence[Workload]) -> list[Workload]:
    """Without the steps of so many micro-batches, or of so few tokens each, that no schedule of them is built.

    Raises InputError if all are.
    """
    found: list[Workload] = []
    for workload in steps:
        try:
            require_few_ops(model, workload)
            fp8.require(model, workload)
            model.require_length(workload.seq_len)
            found.append(workload)
        except InputError:
            if workload is steps[-1] and not found:
                raise
    return found


def by_bound(
    model: ModelSpec, profile: HardwareProfile, budget: MemoryBudget, steps: Sequence[Workload]
) -> tuple[list[Bounded], list[Unmeasured]]:
    """Those of `steps` that could fit, in their order, each behind its bound; and what a measured profile lacks a time
    for, of each step that it cannot predict.

    Raises TooLong where every step has an op that takes too long.
    """
    found, unmeasured, too_long = [], list[Unmeasured](), list[TooLong]()
    for workload in steps:
        try:
            found.append((placement_bound(model, workload, profile, budget), workload))
        except NoPlacement:
            pass
        except MissingCost as error:
            unmeasured.append(replace(error.what, workload=workload))  # the bound asks about fewer micro-batches
        except TooLong as error:  # smaller micro-batches have shorter ops
            too_long.append(error)
    if len(too_long) == len(steps) > 0:
        raise too_long[-1]
    return found, unmeasured


def worth_searching(bounded: list[Bounded]) -> list[Bounded]:
    """All of them, or, where a step can be split in more than SPLITS ways, some.

    Smaller micro-batches move more bytes for the same work, and a schedule of many takes longer to evaluate. Where
    memory is short, though, the bound falls as their number grows. So the searched ones are spread evenly, by ratio,
    from the fewest micro-batches that could fit to the fewest whose bound is nearly the least.
    """
    counts = sorted({workload.accumulation for _, workload in bounded})
    if len(counts) <= SPLITS:
        return bounded
    least = min(found.period_ns for found, _ in bounded)
    enough = min(w.accumulation for found, w in bounded if found.period_ns <= least * (1.0 + NEARLY_LEAST))
    counts = counts[: max(counts.index(enough) + 1, SPLITS)]
    even = np.geomspace(counts[0], counts[-1], SPLITS)
    some = counts if len(counts) == SPLITS else [min(counts, key=lambda n: abs(math.log(n / at))) for at in even]
    return [(found, workload) for found, workload in bounded if workload.accumulation in some]
