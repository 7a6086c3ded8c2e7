"""A schedule that could be planned, and the verdict on it: built, weighed, bounded, and simulated if there is hope.

Candidates are judged a round at a time, here or by several processes; what is found does not depend on how many.
"""

from __future__ import annotations

import functools
import gc
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, replace

from schedules import policies
from schedules.hazards import minimal_waits
from schedules.model import ModelSpec
from schedules.op import Stream, Tier
from schedules.schedule import Knob, Schedule
from schedules.workload import MemoryBudget, Workload
from sim.bound import bound_of, busiest_ns
from sim.cost import MissingCost, TooLong, Unmeasured, demands
from sim.machine import HardwareProfile
from sim.prediction import DoesNotFit, Prediction, predict, require_fit
from sim.units import seconds
from sim.worker import begin_to_work, helpers

OURS = "streamed"
ROUND = 4  # candidates judged at once: all are measured against the best of the rounds before
DRIVE_GAIN = 0.01  # a drive wears: what uses one must be faster by so much than what uses none
GARBAGE = 200_000  # objects between two looks for garbage: ops live long, and looking at all of them takes a sixth


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A schedule that can be built."""

    policy: str
    workload: Workload
    knobs: tuple[tuple[str, Knob], ...] = ()

    def with_knobs(self, values: Mapping[str, Knob]) -> Candidate:
        """With these of our own knobs changed; those at their defaults are left out, or without a meaning."""
        changed, usual = {**dict(self.knobs), **values}, _defaults()
        if self.workload.grad_clip is not None:
            changed.pop("defer", None)
        return replace(self, knobs=tuple(sorted((name, v) for name, v in changed.items() if v != usual.get(name))))

    def value(self, name: str) -> Knob:
        """Of one of our own knobs."""
        return {**_defaults(), **dict(self.knobs)}[name]

    def count(self, name: str) -> int:
        """Of one of our own knobs that is a whole number."""
        value = self.value(name)
        assert isinstance(value, int), name
        return value


@functools.cache
def _defaults() -> dict[str, Knob]:
    return {name: knob.default for name, knob in policies.knobs(OURS).items()}


def cost(period: float, on_drive: bool) -> float:
    """What schedules are compared by, in the period's unit: the period, and DRIVE_GAIN more where a drive is used."""
    return period * (1.0 + DRIVE_GAIN * on_drive)


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A candidate and what became of it: `period_ns` if it was simulated, else `reason`.

    over: how many bytes it lacked; zero if it has room.
    lacking: the tier on which it lacked them.
    on_drive: whether a drive holds any of it.
    measured: False if the profile lacks an op's time; `lacks` then says of what kind, if it has none of that kind.
    """

    policy: str
    workload: Workload
    knobs: Mapping[str, Knob]
    period_ns: float | None
    reason: str
    over: int = 0
    lacking: Tier | None = None
    on_drive: bool = False
    measured: bool = True
    lacks: str = ""

    @property
    def cost_ns(self) -> float:
        """Inf if it was not simulated."""
        return math.inf if self.period_ns is None else cost(self.period_ns, self.on_drive)


@dataclass(frozen=True)
class Case:
    """What all candidates of a search are for."""

    model: ModelSpec
    profile: HardwareProfile
    budget: MemoryBudget


@dataclass(frozen=True)
class Verdict:
    """What became of a candidate, its prediction if that is the best so far, and how many ops were looked at.

    unmeasured: an op that the profile has no time for.
    too_long: an op that takes too long.
    """

    tried: Tried
    prediction: Prediction | None
    effort: int
    unmeasured: Unmeasured | None = None
    too_long: TooLong | None = None


Judge = Callable[[list[Candidate], float], Iterable[Verdict]]  # candidates, and the least cost so far in ns


def judge(case: Case, candidate: Candidate, best_ns: float, schedule: Schedule | None = None) -> Verdict:
    """Build a candidate, unless its schedule is given, and simulate it if it fits and its bound leaves hope."""
    period, reason, over, effort, on_drive = None, "", 0, 0, False
    lacking: Tier | None = None
    unmeasured: Unmeasured | None = None
    too_long: TooLong | None = None
    prediction: Prediction | None = None
    try:
        built = schedule or policies.build_without_waits(
            candidate.policy, case.model, candidate.workload, case.budget, **dict(candidate.knobs)
        )
        effort, on_drive = len(built.ops) // 2, any(buffer.tier == Tier.NVME for buffer in built.buffers)
        require_fit(built, case.profile, case.budget)
        costs = demands(built, case.profile)
        least_ns: float = busiest_ns(built, costs)
        if not built.staleness and least_ns < best_ns:  # most that are not worth simulating need no waits to show it
            whole = schedule or replace(built, waits=minimal_waits(built.ops))
            if any(op.stream == Stream.HOST for op in built.ops):
                costs = demands(whole, case.profile)  # what the host's waits take is in what follows them
            limit = bound_of(whole, costs)
            least_ns = limit.period_ns
            if least_ns < best_ns:
                prediction = predict(whole, case.profile, case.budget, costs=costs, limit=limit)
                period, effort = prediction.period_ns, len(whole.ops)
        if built.staleness:
            reason = f"stale by {built.staleness}"
        elif prediction is None:
            reason = f"cannot take less than {seconds(least_ns / 1e9)}"
    except DoesNotFit as error:
        reason, over, lacking = f"does not fit: {error.short}", error.lacks[0].over, error.lacks[0].tier
    except MissingCost as error:  # others of the step may not need that op
        reason, unmeasured = str(error.what), error.what
    except TooLong as error:  # others of the step may have shorter ops
        reason, too_long = str(error), error
    except policies.PolicyError as error:
        reason = str(error)
    tried = Tried(
        policy=candidate.policy,
        workload=candidate.workload,
        knobs=dict(candidate.knobs),
        period_ns=period,
        reason=reason,
        over=over,
        lacking=lacking,
        on_drive=on_drive,
        measured=unmeasured is None,
        lacks=unmeasured.kind if unmeasured else "",
    )
    better = prediction if tried.cost_ns < best_ns else None
    return Verdict(tried, better, effort, unmeasured, too_long)


@contextmanager
def rarely_collecting_garbage() -> Iterator[None]:
    thresholds = gc.get_threshold()
    gc.set_threshold(GARBAGE, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


@contextmanager
def judges(case: Case, workers: int) -> Iterator[Judge]:
    """What judges a round of candidates: here, or in processes that each know the case."""
    if workers == 1:
        yield lambda candidates, best_ns: (judge(case, candidate, best_ns) for candidate in candidates)
        return
    with helpers(min(workers, ROUND), "make room and plan again", _begin_to_judge, case) as pool:
        yield functools.partial(_judged_by, pool)


def _judged_by(pool: Executor, candidates: list[Candidate], best_ns: float) -> Iterable[Verdict]:
    return pool.map(_judge_here, candidates, [best_ns] * len(candidates))


_here: list[Case] = []  # in a process that judges: what for


def _begin_to_judge(case: Case) -> None:
    begin_to_work()
    gc.set_threshold(GARBAGE, *gc.get_threshold()[1:])
    _here.append(case)


def _judge_here(candidate: Candidate, best_ns: float) -> Verdict:
    return judge(_here[0], candidate, best_ns)
