"""The best schedule for LoRA's adapters beside frozen weights: a search over the knobs of `lora_streamed`.

Every split of the step and mode of recompute is tried with every place for activations, and with what is quantised made
whole by blocks and by matrices. From the best the search goes on, one knob at a time, while that makes it faster.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from schedules import policies
from schedules.errors import InputError
from schedules.model import ModelSpec
from schedules.op import Kind, Phase, Tier
from schedules.quantised import is_quantised, quantised_bytes
from schedules.schedule import Knob, Schedule
from schedules.verify import verify
from schedules.workload import MemoryBudget, Workload
from sim.candidate import Candidate, Case, Tried, judges, rarely_collecting_garbage
from sim.cost import MissingCost, TooLong, demands
from sim.findings import Findings, Progress, promise
from sim.machine import HardwareProfile
from sim.one_memory import partitions
from sim.prediction import Prediction, memory_of, peak_bytes
from sim.refine import SAME, WORTH_A_STEP
from sim.search import NothingFits
from sim.splits import all_ways, splits, that_can_be_written
from sim.units import at_least

POLICY = "lora_streamed"
PLACES = ("recompute", "inputs", "host", "keep")  # of activations
ENDLESS = MemoryBudget(device_bytes=1 << 60, host_bytes=1 << 60, nvme_bytes=1 << 60)
OF_STARTS = 0.8  # the share of the search that takes
PATIENCE = 2  # splits into ever smaller micro-batches that gain less than SAME, after which no more are tried
SLOTS, EVERY = (1, 2, 3, 4), (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class AdapterPlan:
    """The best schedule found, what was tried, and how much better any could be.

    `lower_bound_ns` holds for every exact schedule of any split of the step that was asked for: what must be computed,
    with nothing computed twice, or what must be loaded because the device has no room for it; `binding` says which. It
    is 0 where a measured profile lacks a time for that. `measure_with` is the command that measures a step that was
    left out because such a profile has no times for it. `finished` is False where the search was interrupted.
    """

    prediction: Prediction
    chosen: Tried
    tried: tuple[Tried, ...]
    lower_bound_ns: float
    binding: str
    measure_with: str | None
    seconds: float
    finished: bool

    @property
    def schedule(self) -> Schedule:
        return self.prediction.schedule

    @property
    def gap(self) -> float:
        """By what fraction the period exceeds the bound over all schedules; inf where there is none."""
        return self.prediction.period_ns / self.lower_bound_ns - 1.0 if self.lower_bound_ns else math.inf


def plan_adapters(
    model: ModelSpec,
    profile: HardwareProfile,
    *,
    rank: int,
    quantised: str | None = None,
    seq_len: int,
    tokens_per_step: int | None = None,
    micro_batch_size: int | None = None,
    accumulation: int | None = None,
    precision: str = "bf16",
    grad_clip: float | None = None,
    memory: MemoryBudget | None = None,
    progress: Progress | None = None,
    workers: int = 1,
) -> AdapterPlan:
    """Search for the fastest schedule of a step that trains adapters of `rank` beside weights kept as `quantised` says.

    The step is given as in `sim.plan.plan`. Ctrl-C ends the search; the best schedule found so far is returned then.

    Raises:
        InputError: the step is not given, or does not divide as was asked for.
        NothingFits: no schedule fits the machine.
        MissingCost: a measured profile has times for no way to run it.
        TooLong: all ways to run it have ops that take too long to be predicted.
    """
    begun = time.perf_counter()
    whole = memory or memory_of(profile)
    asked = splits(seq_len, tokens_per_step, micro_batch_size, accumulation, precision, grad_clip)
    try:
        steps = [replace(step, lora_rank=rank, quantised=quantised) for step in asked]
    except ValueError as error:
        raise InputError(str(error)) from None
    steps = that_can_be_written(model, all_ways(model, steps))
    finished = True
    searches = list[Findings]()
    with rarely_collecting_garbage():
        try:
            for budget in partitions(whole):  # the host's share grows, which needs little beside what is frozen
                with judges(Case(model, profile, budget), workers) as judge:
                    searches.append(found := Findings(model, profile, budget, judge, 0, progress))
                    _search(found, steps)
                if found.best is not None:
                    break
        except KeyboardInterrupt:
            if not searches:
                raise
            finished = False
    found = min(searches, key=promise)
    if found.best is None or found.chosen is None:
        if not finished:
            raise KeyboardInterrupt
        if found.unmeasured is not None:
            raise MissingCost(found.unmeasured)
        if found.too_long is not None:
            raise found.too_long
        over, tier = found.shortest or (0, Tier.DEVICE)
        raise NothingFits(
            f"nothing fits {profile.name}: the closest of {len(found.tried)} schedules lacks {at_least(over, 'GB')} of "
            f"{tier} memory"
        )
    verify(found.best.schedule)
    bound_ns, binding = bound(model, profile, whole, steps)
    return AdapterPlan(
        prediction=found.best,
        chosen=found.chosen,
        tried=tuple(tried for each in searches for tried in each.tried.values()),
        lower_bound_ns=bound_ns,
        binding=binding,
        measure_with=None if found.unmeasured is None else found.unmeasured.command,
        seconds=time.perf_counter() - begun,
        finished=finished,
    )


def _search(found: Findings, steps: Sequence[Workload]) -> None:
    idle = 0
    for _, of_split in itertools.groupby(steps, key=lambda step: step.accumulation):
        before = found.cost_ns
        for step in of_split:
            found.share = OF_STARTS * steps.index(step) / len(steps)
            tried = found.evaluate(*_starts(found, step))
            short = min((each.over for each in tried if each.lacking == Tier.DEVICE), default=0)
            if 0 < short <= _block_bytes(found.model, step) and all(each.period_ns is None for each in tried):
                found.evaluate(*_starts(found, step, slots=1))  # which take a block less
        gained = found.chosen is None or found.cost_ns < before * (1.0 - SAME)
        idle = 0 if gained else idle + 1
        if idle == PATIENCE:
            break
    if found.chosen is None:
        found.evaluate(*(start for step in steps for start in _starts(found, step, slots=1)))
    improved = True
    while improved and found.chosen is not None:
        before = found.cost_ns
        for some in _neighbours(found, found.chosen):
            found.evaluate(*some)
        improved = found.cost_ns < before * (1.0 - WORTH_A_STEP)


def _starts(found: Findings, step: Workload, slots: int = 2) -> Iterator[Candidate]:
    """With one step, all that is tried at first: as many layers on the device as have room there beside buffers, all
    if these are almost all, half as many, embedding and head alone, or none."""
    for whole in ("blocks", "matrices") if step.quantised else ("blocks",):
        for activations in PLACES:
            kind: dict[str, Knob] = {"activations": activations, "whole": whole, "slots": slots}
            most, layers = _most_resident(found, step, kind), len(found.model.layers)
            without_slots = layers if most + slots >= layers else most  # none are needed where all layers are there
            for resident in dict.fromkeys((without_slots, most, most // 2, 2, 0)):
                yield _with_room_on_the_host(found, step, {**kind, "resident": resident})


def _most_resident(found: Findings, step: Workload, kind: dict[str, Knob]) -> int:
    """About how many layers have room on the device where no block keeps its activations but as `kind` says."""
    model, none = found.model, _candidate(step, {**kind, "resident": 0, "keep": 0})
    try:
        built = policies.build_without_waits(POLICY, model, step, found.budget, **dict(none.knobs))
    except policies.PolicyError:  # which judging it will tell
        return 0
    free = found.budget.device_bytes - peak_bytes(built, found.profile)[Tier.DEVICE]
    block = _block_bytes(model, step)
    return min(2 + free // block, len(model.layers)) if free > 0 else 0  # the ends' buffers are there already


def _candidate(step: Workload, knobs: dict[str, Knob]) -> Candidate:
    """Knobs at their defaults are left out; the rank and format are the step's, so that who reads a plan has them."""
    usual = {name: knob.default for name, knob in policies.knobs(POLICY).items()}
    wanted = {**knobs, "rank": step.lora_rank, "quantised": step.quantised}
    changed = {name: value for name, value in wanted.items() if value != usual[name]}
    return Candidate(policy=POLICY, workload=step, knobs=tuple(sorted(changed.items())))


def _with_room_on_the_host(found: Findings, step: Workload, knobs: dict[str, Knob]) -> Candidate:
    """A candidate with as many blocks on a drive as the host has no room for; without, where no drive has it either."""
    model, budget, on_drive = found.model, found.budget, 0
    block = _block_bytes(model, step)
    without = candidate = _candidate(step, knobs)
    while on_drive < len(model.blocks) and budget.nvme_bytes:
        try:
            built = policies.build_without_waits(POLICY, model, step, budget, **dict(candidate.knobs))
        except policies.PolicyError:  # which judging it will tell
            return without
        over = built.allocated_bytes(Tier.HOST) - budget.host_bytes
        if over <= 0:
            return candidate
        on_drive = min(on_drive + math.ceil(over / block), len(model.blocks))
        candidate = _candidate(step, {**knobs, "nvme": on_drive})
    return without


def _neighbours(found: Findings, at: Tried) -> Iterator[list[Candidate]]:
    """The same step with one knob changed, by much and by little; and with other slots, and what then has room."""
    model, knobs = found.model, dict(at.knobs)

    def changed(**values: Knob) -> Candidate:
        return _candidate(at.workload, {**knobs, **values})

    counts = {"resident": (2, len(model.layers))}
    if "nvme" in knobs:
        counts["nvme"] = (0, len(model.blocks))
    for name, (usual, most) in counts.items():
        here = knobs.get(name, usual)
        assert isinstance(here, int)
        strides = {max(most // part, 1) for part in (2, 4, 8, 16, 32)} | {1}
        there = {min(max(here + way, 0), most) for stride in strides for way in (stride, -stride)}
        yield [changed(**{name: value}) for value in sorted(there - {here})]
    yield [changed(slots=slots) for slots in SLOTS]
    yield [
        changed(slots=slots, resident=_most_resident(found, at.workload, {**knobs, "slots": slots})) for slots in SLOTS
    ]
    if knobs.get("activations", "recompute") == "recompute":
        yield [changed(every=every) for every in EVERY]


def _block_bytes(model: ModelSpec, step: Workload) -> int:
    """Bytes of the largest block's weights as they are kept, which are those of a slot."""
    return max(frozen_bytes(model, i, step) for i in model.blocks)


def frozen_bytes(model: ModelSpec, i: int, workload: Workload) -> int:
    """Bytes of layer i's weights as they are kept."""
    if is_quantised(model, i, workload):
        return quantised_bytes(model, i, workload)
    return model.params(i) * workload.bytes.weight


def bound(
    model: ModelSpec, profile: HardwareProfile, budget: MemoryBudget, steps: Sequence[Workload]
) -> tuple[float, str]:
    """In ns, no exact schedule of any of these steps is faster, and what sets that; 0 where a time is lacking.

    Each step passes all blocks twice, there and back. What the device does not hold between two passes comes again in
    each: twice what is more than its memory; and what the host does not hold either comes from a drive. Likewise what
    is quantised is made whole again.
    """
    least, what = math.inf, ""
    for step in steps:
        if step.recompute != "none":
            continue
        try:
            compute_ns = _compute_ns(model, profile, step)
        except (MissingCost, TooLong):
            return 0.0, ""
        frozen = sum(frozen_bytes(model, i, step) for i in model.layers)
        loaded = 2 * max(frozen - budget.device_bytes, 0) / profile.links.h2d.bandwidth.value * 1e9
        deep = 2 * max(frozen - budget.device_and_host_bytes, 0)
        read = deep / profile.nvme.read.value * 1e9 if profile.nvme else 0.0
        of_step = max(
            (compute_ns + _whole_ns(model, profile, budget, step), "compute"), (loaded, "h2d"), (read, "nvme read")
        )
        least, what = min((least, what), of_step)
    return (least, what) if math.isfinite(least) else (0.0, "")


def _whole_ns(model: ModelSpec, profile: HardwareProfile, budget: MemoryBudget, step: Workload) -> float:
    """What making quantised weights whole takes at least, by a datasheet; nothing is known of it by a measurement."""
    if step.quantised is None or profile.mode == "measured":
        return 0.0
    whole = sum(model.params(i) * step.bytes.weight for i in model.blocks)
    share = 2 * max(whole - budget.device_bytes, 0) / whole
    moved = share * (whole + sum(frozen_bytes(model, i, step) for i in model.blocks))
    return moved / (profile.gpu.memory_bandwidth.value * profile.gpu.memory_efficiency.value) * 1e9


def _compute_ns(model: ModelSpec, profile: HardwareProfile, step: Workload) -> float:
    """What the device computes at least: every block once there and once back, with whole weights."""
    knobs: dict[str, Knob] = {"resident": len(model.layers), "activations": "keep"}
    schedule = policies.build_without_waits(POLICY, model, replace(step, quantised=None), ENDLESS, **knobs)
    costs = zip(schedule.ops, demands(schedule, profile), strict=True)
    return sum(cost.duration_ns for op, cost in costs if op.kind == Kind.COMPUTE or op.phase == Phase.ADAM)
