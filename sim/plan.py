"""The best schedule for a step on a machine: a search over the knobs of `streamed`, and every exact policy beside it.

A candidate is a policy with knobs and a split of the step into micro-batches. It is built, dropped if it does not
fit, dropped if a bound of it (area, then cycle ratio: the limit of the longest-path engine) already exceeds the
best period known, and else simulated. Where there are few placements all are tried, which is exact; elsewhere a
coarse grid is, and what the bound over all placements suggests. The best point is improved one knob at a time until
no step helps. That bound says what is left to gain.
"""

from __future__ import annotations

import functools
import gc
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from schedules import policies
from schedules.errors import InputError, Refused
from schedules.model import ModelSpec
from schedules.op import Tier
from schedules.schedule import Knob, Schedule
from schedules.verify import verify
from schedules.workload import RECOMPUTED, MemoryBudget, Workload
from sim.bound import bound
from sim.hardware import HardwareProfile
from sim.placement_bound import NoPlacement, PlacementBound, placement_bound
from sim.prediction import DoesNotFit, Prediction, memory_of, peak_bytes, predict, require_fit

OURS = "streamed"
PLACEMENT = ("resident", "offload", "defer", "through")  # the knobs that say where things are, and when
EXHAUSTIVE = 900  # placements of one workload; no more are all tried
SPLITS = 6  # ways to split a step into micro-batches that are looked at
WORTH_A_LOOK = (1.0, 0.97)  # of the best period, a bound below which a split is tried; and one with recompute
GRID = 4  # values of residency on the coarse grid
SLACK = 4  # visits that activations may take to leave or to come, to begin with
EFFORT = 75  # candidates as large as one micro-batch's that are simulated at most, or twice as many only bounded
GARBAGE = 200_000  # objects between two looks for garbage: ops live long, and looking at all of them takes a sixth
Progress = Callable[["Prediction | None", float, str], None]  # best so far, share done, what is tried


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A candidate and what became of it: `period_ns` where it was simulated, `reason` where it was not."""

    policy: str
    workload: Workload
    knobs: Mapping[str, Knob]
    period_ns: float | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The best schedule found, and how much better any could be.

    `lower_bound_ns` holds for every exact schedule of any split of the step that was asked for. `finished` is
    False where the search was interrupted.
    """

    prediction: Prediction
    bound: PlacementBound
    tried: tuple[Tried, ...]
    seconds: float
    finished: bool

    @property
    def schedule(self) -> Schedule:
        return self.prediction.schedule

    @property
    def lower_bound_ns(self) -> float:
        return self.bound.period_ns

    @property
    def chosen(self) -> Tried:
        """The candidate that the prediction is of."""
        return min((one for one in self.tried if one.period_ns is not None), key=lambda one: one.period_ns or 0.0)

    @property
    def gap(self) -> float:
        """By what fraction the period exceeds the bound over all schedules."""
        return self.prediction.period_ns / self.lower_bound_ns - 1.0

    @property
    def gap_parts(self) -> dict[str, float]:
        """What the gap is made of, in words; one plus each, multiplied, is one plus the gap.

        What the fullest resource does beyond the least that a relaxed placement leaves for one; what a circle of ops
        over several streams takes beyond that resource; what ops take longer that share something or wait.
        """
        own = self.prediction.bound
        fullest = max(own.area_ns, key=lambda name: own.area_ns[name])
        area = own.area_ns[fullest]
        return {
            f"more work for {fullest} than a relaxed placement leaves": area / self.lower_bound_ns - 1.0,
            f"a circle of ops over {', '.join(own.streams)}": own.period_ns / area - 1.0,
            "ops that share a resource, or wait for one that does": self.prediction.period_ns / own.period_ns - 1.0,
        }


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A schedule that can be built."""

    policy: str
    workload: Workload
    knobs: tuple[tuple[str, Knob], ...] = ()

    def with_knobs(self, values: Mapping[str, Knob]) -> Candidate:
        """With these of our own knobs changed; those at their defaults are left out."""
        changed, usual = {**dict(self.knobs), **values}, _defaults()
        return replace(self, knobs=tuple(sorted((name, v) for name, v in changed.items() if v != usual[name])))


@functools.cache
def _defaults() -> dict[str, Knob]:
    return {name: knob.default for name, knob in policies.knobs(OURS).items()}


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
    memory: MemoryBudget | None = None,
    progress: Progress | None = None,
    effort: int = EFFORT,
) -> Plan:
    """Search for the fastest exact schedule of a step.

    The step is given as `tokens_per_step`, split into micro-batches as is best, or as a micro-batch size and an
    accumulation (1 if left out). `effort` limits how many candidates are evaluated. Ctrl-C ends the search; the
    best schedule found so far is returned then.

    Raises:
        InputError: the step is not given, or is no whole number of sequences.
        NothingFits: no schedule fits the machine.
        MissingCost: a measured profile lacks a time.
    """
    begun = time.perf_counter()
    budget = memory or memory_of(profile)
    steps = [
        replace(workload, recompute=mode)
        for workload in splits(seq_len, tokens_per_step, micro_batch_size, accumulation, precision, grad_clip)
        for mode in (RECOMPUTED if not model.num_experts else RECOMPUTED[:1])
    ]
    search = Search(model, profile, budget, progress, effort)
    finished = True
    limit: PlacementBound | None = None
    thresholds = gc.get_threshold()
    gc.set_threshold(GARBAGE, *thresholds[1:])
    try:
        bounded = _by_bound(model, profile, budget, steps)
        limit = min((found for found, _ in bounded), key=lambda found: found.period_ns, default=None)
        # what computes nothing again first: with that known, the bound rules most of the others out
        for again in (False, True):
            some = [(found, workload) for found, workload in bounded if (workload.recompute != "none") == again]
            for number, (found, workload) in enumerate(some):
                search.share = number / (4 * len(some)) + 0.5 * again
                if search.period_ns is None or found.period_ns < WORTH_A_LOOK[again] * search.period_ns:
                    search.look(workload, whole=search.best is None)
                    search.as_placed(workload, found)
                    if not number:
                        search.refine(hold=False)  # fewer of the other splits are worth a look then
            if search.at is None or (search.at.workload.recompute != "none") != again:
                continue
            search.refine(hold=False)
            at = search.at
            for _, workload in some:  # the same with micro-batches of twice or half the size
                if at.workload.accumulation in (2 * workload.accumulation, workload.accumulation / 2):
                    search.evaluate(replace(at, workload=workload))
            for found, workload in some:
                if search.period_ns is not None and found.period_ns < WORTH_A_LOOK[True] * search.period_ns:
                    search.hold(workload)
            search.refine(hold=True)
        search.share = 0.9
        of_best = search.workload or steps[0]
        of_bound = bounded[0][1] if bounded else of_best
        for workload in dict.fromkeys([of_best, *(replace(w, recompute="none") for w in (of_best, of_bound))]):
            search.named(workload)
    except KeyboardInterrupt:
        finished = False
    finally:
        gc.set_threshold(*thresholds)
    if search.best is None or limit is None:
        if not finished:
            raise KeyboardInterrupt
        raise search.nothing_fits(steps[-1])
    verify(search.best.schedule)
    return Plan(
        prediction=search.best,
        bound=limit,
        tried=tuple(search.tried.values()),
        seconds=time.perf_counter() - begun,
        finished=finished,
    )


_NO_STEP = Workload(micro_batch_size=1, seq_len=1)


class NothingFits(Refused):
    """No schedule fits; the message names the smallest shortage found."""


def splits(
    seq_len: int,
    tokens_per_step: int | None,
    micro_batch_size: int | None,
    accumulation: int | None,
    precision: str,
    grad_clip: float | None,
) -> Iterator[Workload]:
    """The ways to split a step into equal micro-batches, largest micro-batch first. Raises InputError."""

    def workload(size: int, count: int) -> Workload:
        try:
            return Workload(
                micro_batch_size=size, accumulation=count, seq_len=seq_len, precision=precision, grad_clip=grad_clip
            )
        except ValueError as error:
            raise InputError(str(error)) from None

    if tokens_per_step is None:
        if micro_batch_size is None:
            raise InputError("say how long a step is: tokens per step, or a micro-batch size")
        yield workload(micro_batch_size, 1 if accumulation is None else accumulation)
        return
    sequences, rest = divmod(tokens_per_step, seq_len)
    if rest or not sequences:
        raise InputError(f"{tokens_per_step:,} tokens per step is no whole number of sequences of {seq_len:,} tokens")
    for count in range(1, sequences + 1):
        size = sequences // count
        if size * count == sequences and micro_batch_size in (None, size) and accumulation in (None, count):
            yield workload(size, count)


def _by_bound(
    model: ModelSpec, profile: HardwareProfile, budget: MemoryBudget, steps: list[Workload]
) -> list[tuple[PlacementBound, Workload]]:
    """The splits that could fit, the fewest micro-batches first, each with its bound."""
    found = []
    for workload in steps:
        try:
            found.append((placement_bound(model, workload, profile, budget), workload))
        except NoPlacement:
            continue
        if len({other.accumulation for _, other in found}) > SPLITS:
            found.pop()
            break  # smaller micro-batches move more for what they do, and take longer to look at
    return found


@dataclass
class Search:
    """What has been tried, and the best of it."""

    model: ModelSpec
    profile: HardwareProfile
    budget: MemoryBudget
    progress: Progress | None = None
    effort: int = EFFORT  # from the start on: ops that may still be evaluated
    best: Prediction | None = None
    at: Candidate | None = None  # the best with our own knobs
    start: Candidate = field(default_factory=lambda: Candidate(policy=OURS, workload=_NO_STEP))
    least: int = 0  # layers that must and
    most: int = 0  # may live on the device
    share: float = 0.0
    tried: dict[Candidate, Tried] = field(default_factory=dict)
    shortest: DoesNotFit | None = None

    def __post_init__(self) -> None:
        self.effort *= len(policies.build(OURS, self.model, _NO_STEP, self.budget).ops)

    @property
    def period_ns(self) -> float | None:
        """Of the best schedule so far."""
        return None if self.best is None else self.best.period_ns

    @property
    def workload(self) -> Workload | None:
        """Of the best schedule so far."""
        return None if self.best is None else self.best.schedule.workload

    def look(self, workload: Workload, *, whole: bool) -> None:
        """Try one split of the step: all candidates if they are few, else a coarse grid, or only its corners."""
        start = Candidate(policy=OURS, workload=workload)
        space = knob_space(self.model, workload, nvme="nvme" in dict(self.start.knobs))
        placements = {name: values for name, values in space.items() if name in PLACEMENT}
        if math.prod(map(len, placements.values())) <= EXHAUSTIVE:
            effort = self.effort
            for chosen in itertools.product(*placements.values()):
                self.evaluate(start.with_knobs(dict(zip(placements, chosen, strict=True))))
            self.effort = effort  # there are few: what follows may still take its own
            return
        blocks = self.model.num_hidden_layers
        if whole:
            start = self._off_the_device(start)
            self.start = self._off_the_host(start)
            self.least, self.most = self._residents(self.start)
        start = replace(self.start, workload=workload)
        least, most = self.least, self.most
        most = max(least, most)
        # smaller micro-batches leave room for more: all but the head
        residents = [most, blocks + 1]
        if whole:
            residents = [least + round((most - least) * part / (GRID - 1)) for part in range(GRID)]
        orders = ("layers", "microbatches") if workload.accumulation > 1 else ("layers",)
        away = {"offload": blocks // 2 if whole else blocks // 4, "slack": SLACK}
        for order, resident, offload, defer in itertools.product(
            orders, dict.fromkeys(residents), ({}, away), (0, blocks // 4) if whole else (0,)
        ):
            self.evaluate(start.with_knobs({"order": order, "resident": resident, "defer": defer, **offload}))

    def as_placed(self, workload: Workload, bound: PlacementBound) -> None:
        """Try what the bound's placement would be in whole blocks; of several micro-batches, both orders at once."""
        blocks, placed = self.model.num_hidden_layers, bound.placed
        start = replace(self.start, workload=workload)
        resident = min(self.most, max(self.least, round(placed.get("state on device", 0.0) * (blocks + 2))))
        late = {"resident": resident, "defer": blocks * 3 // 8, "slabs": 16}
        self.evaluate(
            start.with_knobs(
                {
                    **late,
                    "offload": round(placed.get("activations on host", 0.0) * blocks),
                    "through": round(placed.get("state through device", 0.0) * blocks),
                    "slack": SLACK,
                }
            )
        )
        # most blocks are then loaded twice for every micro-batch
        load_ns = self.model.total_params * workload.bytes.weight / self.profile.links.h2d.bandwidth.value * 1e9
        if workload.accumulation > 1 and 2 * workload.accumulation * load_ns < (self.period_ns or math.inf):
            for hold in (0, blocks // 6):
                both = {**late, "singly": blocks * 7 // 8, "slots": 4, "slabs": 32, "hold": hold}
                self.evaluate(start.with_knobs(both))

    def hold(self, workload: Workload) -> None:
        """Try one split with as many blocks' weights on the device as it has room for."""
        for order in ("layers", "microbatches") if workload.accumulation > 1 else ("layers",):
            start = replace(self.start, workload=workload).with_knobs({"order": order, "resident": self.least})
            for hold in self._holds(start):
                self.evaluate(start.with_knobs({"hold": hold}))

    def _holds(self, start: Candidate) -> list[int]:
        """How many blocks may have their weights on the device: beside all activations, and beside none."""
        blocks, workload = self.model.num_hidden_layers, start.workload
        adding_up = dict(start.knobs).get("order") == "microbatches"
        one = self.model.params(0) * (workload.bytes.weight + (workload.bytes.grad if adding_up else 0))
        kept = self.model.saved_bytes(0, workload) * (1 if adding_up else workload.accumulation)
        spare = (
            self.budget.device_bytes - peak_bytes(self._built(start.with_knobs({"keep": 0})), self.profile)[Tier.DEVICE]
        )
        found = (int((spare - kept * count) // one) for count in (blocks, 0))
        return sorted({min(hold, blocks) for hold in found if hold > 0})

    def refine(self, *, hold: bool, start: Candidate | None = None) -> None:
        """Change one knob of a candidate, the best one if none is given, at a time, while that makes it faster.

        By large steps and then by small ones. How many blocks are held is one of these knobs if `hold`: early on it
        leads away from better places.
        """
        at = start or self.at
        if at is None:
            return
        period = self.tried[at].period_ns
        assert period is not None, "what is refined has been simulated"
        space = knob_space(self.model, at.workload, nvme="nvme" in dict(self.start.knobs))
        if not hold:
            del space["hold"]
        stride = max(self.model.num_hidden_layers // 6, 1)
        while stride and self.effort > 0:
            before = at
            for name, values in space.items():
                here = values.index(dict(at.knobs).get(name, values[0]))
                step = min(stride, max(len(values) // 3, 1))
                for there in (here + step, here - step):
                    if 0 <= there < len(values) and self.effort > 0:
                        found = self.evaluate(at.with_knobs({name: values[there]}))
                        if found is not None and found < period:
                            at, period = at.with_knobs({name: values[there]}), found
                            break
            if at == before:
                stride //= 2

    def named(self, workload: Workload) -> None:
        """Every exact policy with the knobs it comes with."""
        for name in policies.comparable():
            self.evaluate(Candidate(policy=name, workload=workload))

    def evaluate(self, candidate: Candidate) -> float | None:
        """The period of a candidate in ns; None if it does not fit or cannot beat the best."""
        if candidate in self.tried:
            return self.tried[candidate].period_ns
        period, reason = None, ""
        try:
            schedule = self._built(candidate)
            self.effort -= len(schedule.ops) // 2
            require_fit(schedule, self.profile, self.budget)
            reason = "" if schedule.staleness == 0 else f"stale by {schedule.staleness}"
            limit = bound(schedule, self.profile)
            if not reason and self.period_ns is not None and limit.period_ns >= self.period_ns:
                reason = f"cannot take less than {limit.period_ns / 1e6:,.1f} ms"
            if not reason:
                prediction = predict(schedule, self.profile, self.budget, limit=limit)
                period = prediction.period_ns
                self.effort -= len(schedule.ops) - len(schedule.ops) // 2
                if self.period_ns is None or period < self.period_ns:
                    self.best = prediction
                    self.at = candidate if candidate.policy == OURS else self.at
        except DoesNotFit as error:
            reason = f"does not fit: {error.tier} {error.over / 1e9:+,.1f} GB"
            if self.shortest is None or error.over < self.shortest.over:
                self.shortest = error
        except policies.PolicyError as error:
            reason = str(error)
        self.tried[candidate] = Tried(
            policy=candidate.policy,
            workload=candidate.workload,
            knobs=dict(candidate.knobs),
            period_ns=period,
            reason=reason,
        )
        if self.progress is not None:
            self.progress(self.best, self.share, f"{candidate.policy}, {len(self.tried)} tried")
        return period

    def _built(self, candidate: Candidate) -> Schedule:
        return policies.build(candidate.policy, self.model, candidate.workload, self.budget, **dict(candidate.knobs))

    def _room(self, candidate: Candidate) -> dict[Tier, bool]:
        """Whether a candidate has room in each tier."""
        limits = zip(Tier, vars(self.budget).values(), strict=True)
        try:
            peaks = peak_bytes(self._built(candidate), self.profile)
        except policies.PolicyError:
            return dict.fromkeys(Tier, False)
        return {tier: peaks[tier] <= limit for tier, limit in limits}

    def _residents(self, start: Candidate) -> tuple[int, int]:
        """The fewest layers that must live on the device, for the host has no room, and the most that may."""
        limit = self.model.num_hidden_layers + 2

        def room(resident: int, tier: Tier) -> bool:
            return self._room(start.with_knobs({"resident": resident, "keep": 0}))[tier]

        least = _first(range(limit + 1), lambda n: room(n, Tier.HOST))
        most = _first(range(limit + 1), lambda n: not room(n, Tier.DEVICE)) - 1
        return least, most

    def _off_the_device(self, start: Candidate) -> Candidate:
        """With the blocks' inputs on the host between forward and backward, if they do not fit the device."""
        if self._room(start.with_knobs({"keep": 0}))[Tier.DEVICE]:
            return start
        return start.with_knobs({"inputs": self.model.num_hidden_layers})

    def _off_the_host(self, start: Candidate) -> Candidate:
        """With as much state on NVMe as host and device together cannot hold."""

        def held(nvme: int) -> bool:
            least, most = self._residents(start.with_knobs({"nvme": nvme}))
            return least <= most

        blocks = self.model.num_hidden_layers
        if self.profile.nvme is None or held(0):
            return start
        return start.with_knobs({"nvme": _first(range(1, blocks + 1), held)})

    def nothing_fits(self, workload: Workload) -> NothingFits:
        """The sentence for a machine on which nothing runs."""
        model = self.model
        state = model.total_params * workload.bytes.per_param
        have = self.budget.device_bytes + self.budget.host_bytes + self.budget.nvme_bytes
        told = [f"no schedule of {model.name} fits {self.profile.name}"]
        if state > have:
            told.append(
                f"weights, gradients and optimizer state take {state / 1e9:,.1f} GB, all its memory together is "
                f"{have / 1e9:,.1f} GB"
            )
        elif self.shortest is not None:
            told.append(f"the closest one {str(self.shortest).partition(chr(10))[0]}")
        endless = MemoryBudget(device_bytes=1 << 60, host_bytes=1 << 60)
        least = policies.build(OURS, model, workload, endless, keep=0, inputs=model.num_hidden_layers, slabs=1)
        peaks = peak_bytes(least, self.profile)
        told.append(
            f"the thriftiest one takes {peaks[Tier.DEVICE] / 1e9:,.1f} GB of device and "
            f"{peaks[Tier.HOST] / 1e9:,.1f} GB of host memory"
        )
        return NothingFits("; ".join(told))


def _first(values: range, holds: Callable[[int], bool]) -> int:
    """The first of the values for which `holds`, as it then does for all after it; the one past the end if none."""
    low, high = values.start, values.stop
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


def knob_space(model: ModelSpec, workload: Workload, *, nvme: bool) -> dict[str, list[Knob]]:
    """The knobs of `streamed` that are searched, each with its values in order."""
    blocks = model.num_hidden_layers
    counts: list[Knob] = list(range(blocks + 1))
    space: dict[str, list[Knob]] = {
        "resident": list(range(blocks + 3)),
        "offload": counts,
        "slack": [1, 2, 3, 4],
        "slots": [2, 3, 4],
        "slabs": [4, 2, 8, 16, 32],
    }
    if workload.grad_clip is None:
        space |= {"defer": counts, "through": counts}
    if nvme:
        space["nvme"] = counts
    if workload.accumulation > 1:
        space |= {"order": ["layers", "microbatches"], "singly": counts}
    return {**space, "hold": counts}
