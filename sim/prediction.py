"""What to expect of a schedule on a machine: its period beside its bound, its memory, and where time goes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from schedules import tensor as tensors
from schedules.amounts import amounts_of
from schedules.errors import Refused
from schedules.flops import model_flops_per_step
from schedules.op import Kind, Op, Phase, Tier
from schedules.schedule import Schedule
from schedules.trace import Trace
from schedules.workload import MemoryBudget
from sim.bound import Bound, bound_of
from sim.cost import Demand, demands, peak_flops
from sim.engine import simulate
from sim.interpolation import largest_of_lines
from sim.machine import HardwareProfile
from sim.profile_coverage import is_of_another
from sim.signature import signature, tabulated
from sim.units import scaled

DAY_NS = 86_400 * 10**9
STEPS = (4, 8, 16)  # simulated until the period repeats
HOLDERS = 5  # how many of the largest holders of memory an error names

CLASS_NAMES: Mapping[str, str] = {
    tensors.WEIGHT: "weights",
    tensors.QUANTISED: "quantised weights",
    tensors.ADAPTER: "adapters",
    tensors.GRAD: "gradients",
    tensors.GRAD32: "fp32 gradients",
    tensors.STATE: "optimizer state",
    tensors.OUTPUT: "layer outputs",
    tensors.SAVED: "saved activations",
    tensors.OUTPUT_GRAD: "output gradients",
    tensors.NORM: "gradient norm",
}


@dataclass(frozen=True, kw_only=True)
class Lack:
    """A tier of which a schedule needs more than there is.

    `op` is the op whose workspace makes the peak; it is None where the buffers alone, which are allocated before the
    first step, are too large. `holders` are (what, bytes), largest first.
    """

    tier: Tier
    needed: int
    available: int
    op: str | None
    holders: tuple[tuple[str, int], ...]

    @property
    def over(self) -> int:
        """Bytes that are lacking."""
        return self.needed - self.available

    def __str__(self) -> str:
        when = f"while {self.op} runs" if self.op else "when buffers are allocated"
        largest = ", ".join(f"{what} {scaled(size, 'GB')}" for what, size in self.holders)
        return (
            f"{self.tier} memory is {scaled(self.over, 'GB')} short {when}: {scaled(self.needed, 'GB')} needed, "
            f"{scaled(self.available, 'GB')} available; largest are {largest}"
        )


class DoesNotFit(Refused):
    """A schedule needs more of some tiers than there is: `lacks`, the device first; `short` says it in few words."""

    def __init__(self, lacks: Sequence[Lack]) -> None:
        self.lacks = tuple(lacks)
        self.short = ", ".join(f"{lack.tier} +{scaled(lack.over, 'GB')}" for lack in lacks)
        super().__init__("; and ".join(map(str, lacks)))


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A simulated run and what follows from it.

    `period_ns` is the time per step once steps repeat, or the mean where they never do; all rates are per that time.
    `window` is the span of the trace, a whole number of periods, over which utilisation and idle causes are counted.
    """

    schedule: Schedule
    profile: HardwareProfile
    trace: Trace
    bound: Bound
    period_ns: float
    window: tuple[int, int]
    peak_bytes: dict[Tier, int]
    does_not_fit: DoesNotFit | None

    @property
    def fits(self) -> bool:
        """Whether every tier has room."""
        return self.does_not_fit is None

    @property
    def bound_ns(self) -> float:
        """No run of this schedule settles at a shorter period."""
        return self.bound.period_ns

    @property
    def gap(self) -> float:
        """By what fraction the period exceeds its bound."""
        return self.period_ns / self.bound_ns - 1.0 if self.bound_ns else 0.0

    @property
    def binding(self) -> str:
        """What sets the bound."""
        return self.bound.binding

    @property
    def tokens_per_s(self) -> float:
        return self.schedule.workload.tokens_per_step / (self.period_ns / 1e9)

    @property
    def model_flops_per_s(self) -> float:
        """FLOP/s of the model's forward and backward; what is computed twice counts once."""
        model, workload = self.schedule.model, self.schedule.workload
        return model_flops_per_step(model, workload) / (self.period_ns / 1e9)

    @property
    def mfu(self) -> float:
        """Model FLOP/s over the peak matrix rate of the element type."""
        return self.model_flops_per_s / peak_flops(self.profile, self.schedule.workload)

    @property
    def hfu(self) -> float:
        """As MFU, with every FLOP that is executed."""
        executed = sum(op.flops for op in self.schedule.ops if op.kind == Kind.COMPUTE)
        return executed / (self.period_ns / 1e9) / peak_flops(self.profile, self.schedule.workload)

    @property
    def utilisation(self) -> dict[str, float]:
        """Stream -> the fraction of the window in which it ran an op."""
        span = self.window[1] - self.window[0]
        return {
            str(stream): self.trace.busy_ns(self.schedule, stream, self.window) / span if span else 0.0
            for stream in self.schedule.streams
        }

    @property
    def nvme_bytes_per_day(self) -> float:
        """Bytes written to NVMe in a day of training: what wears a drive out."""
        copies = [op for op in self.schedule.ops if op.phase == Phase.COPY]
        written = sum(op.nbytes for op in copies if self.schedule.route(op)[1] == Tier.NVME)
        return written * DAY_NS / self.period_ns

    @property
    def drive_days(self) -> float | None:
        """Days of training after which the drive has had the writes its maker promises; None where none is known."""
        drive = self.profile.nvme
        if drive is None or drive.endurance is None or not self.nvme_bytes_per_day:
            return None
        return drive.endurance.value / self.nvme_bytes_per_day

    @property
    def idle_causes_ns(self) -> dict[str, dict[str, int]]:
        """Stream -> what its next op was waiting for -> ns within the window."""
        return {
            str(stream): self.trace.idle_causes_ns(self.schedule, stream, self.window)
            for stream in self.schedule.streams
        }


def predict(
    schedule: Schedule,
    profile: HardwareProfile,
    budget: MemoryBudget | None = None,
    *,
    costs: Sequence[Demand] | None = None,
    limit: Bound | None = None,
) -> Prediction:
    """Simulate a schedule until its period repeats. One that does not fit is simulated all the same.

    `budget` is the machine's own memory if left out; `costs` and `limit` are the schedule's demands and bounds, where
    they are known already.

    Raises:
        MissingCost: the profile is a measured one and lacks an op's time.
        Stuck: some op would never run.
    """
    budget = budget or memory_of(profile)
    costs = demands(schedule, profile) if costs is None else costs
    limit = limit or bound_of(schedule, costs)
    largest = _largest_workspace(schedule, profile)
    for steps in STEPS:
        trace = simulate(schedule, profile, steps=steps, costs=costs)
        if found := repeats(trace):
            break
    last, span = found or (trace.steps - 2, trace.steps // 2)
    window = (int(trace.step_end_ns[last - span]), int(trace.step_end_ns[last]))
    period_ns = (window[1] - window[0]) / span
    return Prediction(
        schedule=schedule,
        profile=profile,
        trace=trace,
        bound=limit,
        # a mean over too few steps can fall short of what no long run can beat
        period_ns=period_ns if found else max(period_ns, limit.period_ns),
        window=window,
        peak_bytes=_peak_bytes(schedule, largest),
        does_not_fit=_shortage(schedule, budget, largest),
    )


def repeats(trace: Trace) -> tuple[int, int] | None:
    """The last step that repeats an earlier one, and how many steps earlier that is; None if there is none yet.

    It does when every op ends later by the same time, and the host, which may run ahead, by no more. Equal
    times between the ends of steps would not do: a stream that is late may be about to be the slowest. The
    last step does not count, because no step follows it with which it would have to share the machine; nor do those
    before it through which a stream is that far behind: they repeat nothing.
    """
    issues, ends = (column.reshape(trace.steps, -1) for column in (trace.issue_ns, trace.end_ns))
    for last in range(trace.steps - 2, 0, -1):
        for length in range(1, last + 1):
            later = ends[last] - ends[last - length]
            if (later == later[0]).all() and (issues[last] - issues[last - length]).max() <= later[0]:
                return last, length
    return None


def memory_of(profile: HardwareProfile) -> MemoryBudget:
    """All the memory that a machine has."""
    both = int(profile.unified_memory.value) if profile.unified_memory else None
    device, host = int(profile.gpu.memory.value), int(profile.host.memory.value)
    return MemoryBudget(
        device_bytes=device if both is None else min(device, both),
        host_bytes=host if both is None else min(host, both),
        nvme_bytes=int(profile.nvme.capacity.value) if profile.nvme else 0,
        unified_bytes=both,
    )


def peak_bytes(schedule: Schedule, profile: HardwareProfile) -> dict[Tier, int]:
    """Per tier, the bytes of all buffers; on the device, with the largest workspace of any compute op."""
    return _peak_bytes(schedule, _largest_workspace(schedule, profile))


def _peak_bytes(schedule: Schedule, largest: Workspace) -> dict[Tier, int]:
    peaks = {tier: schedule.allocated_bytes(tier) for tier in Tier}
    peaks[Tier.DEVICE] += largest.nbytes
    return peaks


def require_fit(schedule: Schedule, profile: HardwareProfile, budget: MemoryBudget) -> None:
    """Raises DoesNotFit unless every tier has room."""
    if lacking := shortage(schedule, profile, budget):
        raise lacking


def shortage(schedule: Schedule, profile: HardwareProfile, budget: MemoryBudget) -> DoesNotFit | None:
    """What a schedule lacks, in all tiers; None where it fits."""
    return _shortage(schedule, budget, _largest_workspace(schedule, profile))


def _shortage(schedule: Schedule, budget: MemoryBudget, largest: Workspace) -> DoesNotFit | None:
    lacks = []
    for tier in Tier:
        allocated, available = schedule.allocated_bytes(tier), budget.of(tier)
        if tier == Tier.DEVICE:
            available = budget.device_beside(schedule.allocated_bytes(Tier.HOST))
        extra = largest.nbytes if tier == Tier.DEVICE else 0
        if allocated + extra > available:
            holders = contents(schedule, tier)
            if extra:
                holders.append((f"workspace of {largest.op}", extra))
            lacks.append(
                Lack(
                    tier=tier,
                    needed=allocated + extra,
                    available=available,
                    op=largest.op if allocated <= available else None,
                    holders=tuple(sorted(holders, key=lambda holder: -holder[1])[:HOLDERS]),
                )
            )
    return DoesNotFit(lacks) if lacks else None


class Workspace(NamedTuple):
    """What an op allocates beside its buffers; no op, and nothing, where none does."""

    op: str | None
    nbytes: int


def _largest_workspace(schedule: Schedule, profile: HardwareProfile) -> Workspace:
    """Of the op that allocates most: measured, or else estimated."""
    estimated = _estimates(schedule)
    sizes = [(_workspace(op, schedule, profile, estimated), op.name) for op in schedule.ops if op.takes_workspace]
    size, name = max(sizes, key=lambda found: found[0], default=(0, None))
    return Workspace(name, size)


def _workspace(op: Op, schedule: Schedule, profile: HardwareProfile, estimated: Callable[[Op], int]) -> int:
    if op.layer is None:
        return 0
    table = profile.measured.workspace if profile.measured else None
    if table is not None and not is_of_another(profile, schedule.model, op.layer):
        key = signature(op, schedule.model, schedule.workload)
        measured = tabulated(table, key, schedule.workload, largest_of_lines)
        if measured is not None:
            return math.ceil(measured)
    return estimated(op)


def _estimates(schedule: Schedule) -> Callable[[Op], int]:
    """What tells the bytes of an op's workspace."""
    workspace = amounts_of(schedule.model, schedule.workload).workspace

    def estimated(op: Op) -> int:
        return (
            0
            if op.layer is None
            else workspace(op.layer, op.phase, output=op.makes_output, quantised=op.reads_quantised)
        )

    return estimated


def estimated_workspace(schedule: Schedule) -> int:
    """Bytes of the largest workspace of any op, on whatever machine."""
    estimated = _estimates(schedule)
    return max((estimated(op) for op in schedule.ops if op.takes_workspace), default=0)


def contents(schedule: Schedule, tier: Tier) -> list[tuple[str, int]]:
    """What fills a tier: (class of tensor, bytes). A buffer that holds several classes in turn is named after all.

    A buffer that no op touches is room that a system reserves, and goes by its own name.
    """
    classes: dict[str, dict[str, None]] = {}
    for op in schedule.ops:
        for access in op.accesses:
            classes.setdefault(access.buffer, {})[CLASS_NAMES[tensors.parse(access.tensor).cls]] = None
    totals: dict[str, int] = {}
    for buffer in schedule.buffers:
        if buffer.tier == tier:
            what = " / ".join(sorted(classes.get(buffer.name, {buffer.name: None})))
            totals[what] = totals.get(what, 0) + buffer.nbytes
    return list(totals.items())
