"""The best schedule for a step on a machine, and how much better any could be.

`sim.search` finds the schedule; the bound over all placements says what is left to gain.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from schedules.model import ModelSpec
from schedules.schedule import Schedule
from schedules.verify import verify
from schedules.workload import ADAMW, MemoryBudget, Workload
from sim.candidate import OURS, Case, Tried, judges, rarely_collecting_garbage
from sim.cost import MissingCost, TooLong, Unmeasured
from sim.findings import Findings, Progress, promise, within
from sim.machine import HardwareProfile
from sim.one_memory import partition_of_least, partitions
from sim.placement_bound import PlacementBound
from sim.prediction import Prediction, memory_of
from sim.profile_coverage import command
from sim.search import EFFORT, NothingFits, Search
from sim.splits import Bounded, all_ways, by_bound, splits, that_can_be_written

QUICKER = 6  # of a memory that device and host share, each partition is searched so much quicker, then the best of them
QUICK = 0.4  # how much of all the time that takes
HARDLY = 0.01  # slower, as a fraction, than what was found quickly in another partition: worth a thorough search too


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The best schedule found, and how much better any could be.

    `asked` is the ways to split the step that were asked for and can be written, the largest micro-batches first.
    `chosen` is the candidate that the prediction is of, one of all `tried`. `lower_bound_ns` holds for every exact
    schedule of any split of the step that was asked for, but for those that are `left_out`, since a measured profile
    has no times for them, and those with ops too long to predict. `measure_with` is the command that would make a
    profile with all that this search lacked; None if that is nothing. `finished` is False where the search was
    interrupted.
    """

    prediction: Prediction
    asked: tuple[Workload, ...]
    chosen: Tried
    bound: PlacementBound
    tried: tuple[Tried, ...]
    seconds: float
    finished: bool
    left_out: tuple[Unmeasured, ...] = ()
    measure_with: str | None = None

    @property
    def schedule(self) -> Schedule:
        return self.prediction.schedule

    @property
    def lower_bound_ns(self) -> float:
        return self.bound.period_ns

    @property
    def spared(self) -> float:
        """By what fraction the fastest schedule on a drive is faster, whose gain was not worth the drive's wear."""
        on_drive = [one.period_ns for one in self.tried if one.on_drive and one.period_ns is not None]
        if self.chosen.on_drive or not on_drive:
            return 0.0
        assert self.chosen.period_ns is not None
        return max(0.0, self.chosen.period_ns / min(on_drive) - 1.0)

    @property
    def gap(self) -> float:
        """By what fraction the period exceeds the bound over all schedules."""
        return self.prediction.period_ns / self.lower_bound_ns - 1.0

    @property
    def gap_parts(self) -> dict[str, float]:
        """What the gap is made of, in words; one plus each, multiplied, is one plus the gap.

        What the fullest resource does beyond the least that a relaxed placement leaves for one; what a circle of ops
        over several streams takes beyond that resource; what ops take longer that share something or wait. The first is
        negative where the bound counts more than work: ops that copies slow down, and windows that cannot overlap.
        """
        own = self.prediction.bound
        fullest = max(own.area_ns, key=lambda name: own.area_ns[name])
        area = own.area_ns[fullest]
        more = area / self.lower_bound_ns - 1.0
        what = f"more work for {fullest} than a relaxed placement leaves"
        if more < 0:
            what = f"work of {fullest} alone: the bound counts slow-downs too"
        return {
            what: more,
            f"a circle of ops over {', '.join(own.streams_ns)}": own.period_ns / area - 1.0,
            "ops that share a resource, or wait for one that does": self.prediction.period_ns / own.period_ns - 1.0,
        }


def plan(
    model: ModelSpec,
    profile: HardwareProfile,
    *,
    seq_len: int,
    tokens_per_step: int | None = None,
    micro_batch_size: int | None = None,
    accumulation: int | None = None,
    precision: str = "bf16",
    grad_clip: float | None = None,
    optimizer: str = ADAMW,
    matmul: str | None = None,
    memory: MemoryBudget | None = None,
    progress: Progress | None = None,
    first: Sequence[Schedule] = (),
    effort: int = EFFORT,
    workers: int = 1,
) -> Plan:
    """Search for the fastest exact schedule of a step; a drive is used only where that makes it DRIVE_GAIN faster.

    By datasheet, of two that are as fast, within SAME, the one with fewer micro-batches is taken (`sim.refine`).

    The step is given as `tokens_per_step`, split into micro-batches as is best, or as a micro-batch size and an
    accumulation (1 if left out). The search begins with the schedules `first`, as they are and with their policies and
    knobs: the plan is not slower than any of them that fits, or by less than DRIVE_GAIN and spares the drive. `effort`
    limits how many candidates are evaluated, and how many more to improve the best of these; below EFFORT that holds
    also where there are few. `workers` processes share them. Ctrl-C ends the search; the best schedule found so far is
    returned then.

    Raises:
        InputError: the step is not given, is no whole number of sequences, does not divide into the micro-batches that
            were asked for, or has too many of them; or a schedule to begin with is of another model or step.
        ScheduleError: it is not safe.
        NothingFits: no schedule fits the machine.
        MissingCost: a measured profile has times for no way to run it.
        TooLong: all ways to run it have ops that take too long to be predicted.
    """
    begun = time.perf_counter()
    whole = memory or memory_of(profile)
    asked = splits(seq_len, tokens_per_step, micro_batch_size, accumulation, precision, grad_clip, optimizer, matmul)
    steps = that_can_be_written(model, all_ways(model, asked))
    finished = True
    limit: PlacementBound | None = None
    bounded: list[Bounded] = []
    unmeasured: list[Unmeasured] = []
    searches: list[Search] = []

    def search_in(budget: MemoryBudget, effort: int, progress: Progress | None) -> Findings:
        with judges(Case(model, profile, budget), workers) as judge:
            searches.append(search := Search(model, profile, budget, judge, progress, effort))
            for schedule in first:
                search.begin_with(schedule, steps)
            search.all_of(steps, bounded)
        return search.found

    with rarely_collecting_garbage():
        try:
            bounded, unmeasured = by_bound(model, profile, whole, steps)
            limit = min((found for found, _ in bounded), key=lambda found: found.period_ns, default=None)
            if len(parts := partitions(whole, first)) == 1:
                search_in(whole, effort, progress)
            else:
                _in_partitions(
                    search_in, parts, effort, progress, lambda: partition_of_least(model, profile, steps, whole)
                )
        except KeyboardInterrupt:
            if not searches:
                raise
            finished = False
    search = min(searches, key=lambda each: promise(each.found))
    left_out = tuple(what for what in unmeasured if search.found.room.might_hold(what.workload))
    lacking = search.found.unmeasured or next(iter(left_out), None)
    wanted = [workload for _, workload in bounded] + [what.workload for what in left_out]
    measure_with = None if lacking is None else command(model.name, wanted or [lacking.workload], OURS, profile)
    if search.found.best is None or search.found.chosen is None or limit is None:
        if not finished:
            raise KeyboardInterrupt
        if lacking is not None:  # of a candidate or a split that has room
            raise MissingCost(lacking, measure_with)
        if search.found.best is None and search.found.too_long is not None:
            raise search.found.too_long
        smallest = [step for step in steps if step.accumulation == steps[-1].accumulation]
        raise NothingFits(search.found.room.nothing_fits(smallest, search.found.shortest))
    verify(search.found.best.schedule)
    return Plan(
        prediction=search.found.best,
        asked=tuple(step for step in steps if step.recompute == "none"),
        chosen=search.found.chosen,
        bound=limit,
        tried=tuple(tried for each in searches for tried in each.found.tried.values()),
        seconds=time.perf_counter() - begun,
        finished=finished,
        left_out=left_out,
        measure_with=measure_with,
    )


def _in_partitions(
    search_in: Callable[[MemoryBudget, int, Progress | None], Findings],
    parts: Sequence[MemoryBudget],
    effort: int,
    progress: Progress | None,
    of_least: Callable[[], MemoryBudget],
) -> None:
    """Search all partitions of a memory quickly, and thoroughly the best and those that are hardly slower.

    Where nothing fits any, search the one `of_least`, for what takes least memory.
    """
    each = QUICK / len(parts)
    found = [
        search_in(part, max(effort // QUICKER, 1), within(progress, place * each, each))
        for place, part in enumerate(parts)
    ]
    most = min(one.cost_ns for one in found) * (1.0 + HARDLY)
    likeliest = [one.budget for one in found if one.best is not None and one.cost_ns <= most] or [of_least()]
    each = (1.0 - QUICK) / len(likeliest)
    for place, part in enumerate(likeliest):
        search_in(part, effort, within(progress, QUICK + place * each, each))


def bound_of_any_split(
    model: ModelSpec,
    profile: HardwareProfile,
    *,
    seq_len: int,
    tokens_per_step: int,
    precision: str = "bf16",
    grad_clip: float | None = None,
    optimizer: str = ADAMW,
    matmul: str | None = None,
) -> float:
    """In ns, no exact schedule of this step is faster, however it is split; 0 where the bound knows of none.

    It knows of none where nothing could fit, a measured profile lacks a time, or all splits have ops that take
    too long.
    """
    steps = splits(seq_len, tokens_per_step, None, None, precision, grad_clip, optimizer, matmul)
    return _least_bound(model, profile, that_can_be_written(model, all_ways(model, steps)))


def bound_of_these_micro_batches(
    schedule: Schedule, profile: HardwareProfile, budget: MemoryBudget | None = None
) -> float:
    """In ns, no exact schedule of this one's step with its micro-batches is faster; 0 where the bound knows of none.

    `budget` is the machine's own memory if left out. The bound knows of none where the schedule is not one that
    `is_bounded`, nothing could fit, a measured profile lacks a time, or ops take too long.
    """
    if not is_bounded(schedule):
        return 0.0
    return _least_bound(schedule.model, profile, all_ways(schedule.model, [schedule.workload]), budget)


def is_bounded(schedule: Schedule) -> bool:
    """Whether the bounds over all schedules are about it: it trains all weights, with gradients of its own step."""
    return schedule.staleness == 0 and schedule.workload.trains == "weights"


def _least_bound(
    model: ModelSpec, profile: HardwareProfile, steps: Sequence[Workload], budget: MemoryBudget | None = None
) -> float:
    try:
        bounded, unmeasured = by_bound(model, profile, budget or memory_of(profile), steps)
    except TooLong:
        return 0.0
    return 0.0 if unmeasured else min((found.period_ns for found, _ in bounded), default=0.0)
