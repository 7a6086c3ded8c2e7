"""How long each resource is busy with what may be done to a layer: the areas that a placement is made of.

They are taken from the cost model by way of ops that schedules really have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from schedules import policies
from schedules.model import ModelSpec
from schedules.op import DRIVE_STREAMS, Kind, Op, Phase, Stream, Tier
from schedules.schedule import Schedule
from schedules.sizes import tensor_bytes
from schedules.tensor import GRAD, SAVED, STATE, parse
from schedules.workload import MemoryBudget, Workload
from sim.cost import MissingCost, Terms, TooLong, demands
from sim.machine import HardwareProfile
from sim.signature import signature

OPTIMIZER = "optimizer"  # the CPU's threads, which serve one update at a time
_ALONE = Terms(issue=False, size_dependent_bandwidth=False, compute_slowdown=False)
_ENDLESS = MemoryBudget(device_bytes=1 << 60, host_bytes=1 << 60, nvme_bytes=1 << 60)
Areas = Mapping[str, float]  # resource -> ns


def together(*parts: Areas) -> Areas:
    """What several things keep busy, one after another."""
    total: dict[str, float] = {}
    for part in parts:
        for name, ns in part.items():
            total[name] = total.get(name, 0.0) + ns
    return total


class LayerAreas:
    """Areas of what may be done to a layer of a model, `times` over; ns by resource, as if each op ran alone.

    Raises MissingCost where a measured profile has no times for any way to run the step, TooLong where all have ops
    that take too long.
    """

    def __init__(self, model: ModelSpec, workload: Workload, profile: HardwareProfile) -> None:
        self.model, self.workload = model, workload
        self._found: dict[tuple[object, ...], Areas] = {}
        # one block of each kind stands for all, and two micro-batches for any more
        first = sorted({model.layer_kind(i): i for i in reversed(model.blocks)}.values())
        self._stands_for = {model.layer_kind(i): place for place, i in enumerate(first)}
        small = model.of_blocks(first)
        step = replace(workload, accumulation=min(workload.accumulation, 2))
        blocks = len(first)
        probes: list[dict[str, int]] = [{"keep": 0}, {"keep": 0, "offload": blocks}]
        places = (
            {},
            {"resident": len(small.layers)},
            {"through": blocks},
            *([{"nvme": blocks}] if profile.nvme else []),
        )
        probes += [{"keep": blocks, **place} for place in places]
        missing: MissingCost | TooLong | None = None
        for knobs in probes:
            schedule = policies.build_without_waits("streamed", small, step, _ENDLESS, **knobs)
            try:
                self._learn(schedule, profile)
            except (MissingCost, TooLong) as error:  # what has no time here, no schedule predicted with it can use
                missing = error
        if not self._found and missing is not None:
            raise missing

    def nbytes(self, cls: str, i: int) -> int:
        """Of layer i's tensor of that class; of activations, one micro-batch's."""
        name = self.model.layer_name(i)
        return tensor_bytes(f"{cls}.{name}.0" if cls == SAVED else f"{cls}.{name}", self.model, self.workload)

    def compute(self, i: int, phase: Phase, times: float = 1) -> Areas:
        """An op of that phase; nothing if layer i has none."""
        return self._times(("compute", i, phase), times)

    def copy(self, cls: str, i: int, kind: Kind, times: float = 1) -> Areas:
        """Of a layer's tensor over the link; of a state, or a gradient that comes back, as that of its weights by the
        bytes it has."""
        if cls == STATE or (cls == GRAD and kind == Kind.PREFETCH):
            times *= self.nbytes(cls, i) / self.nbytes("w", i)
            cls = "w"
        if kind == Kind.OFFLOAD and cls == "w":  # gradients go that way, weights in some policies only
            times *= self.nbytes("w", i) / self.nbytes("g", i)
            cls = "g"
        return self._times(("copy", i, cls, kind), times)

    def update(self, i: int, tier: Tier, times: float) -> Areas:
        """The optimizer's step, on the device or the host."""
        return self._times(("update", i, tier), times)

    def round_trip(self, i: int, times: float) -> Areas:
        """The state crosses the link both ways."""
        return together(self.copy(STATE, i, Kind.PREFETCH, times), self.copy(STATE, i, Kind.OFFLOAD, times))

    def drive(self, cls: str, i: int, times: float, *kinds: Kind) -> Areas:
        """Read from the drive, written back, or both if left out, once a step."""
        times *= self.nbytes(cls, i) / self.nbytes(STATE, 0)
        return together(*(self._times(("drive", kind), times) for kind in kinds or (Kind.PREFETCH, Kind.OFFLOAD)))

    def _times(self, key: tuple[object, ...], times: float) -> Areas:
        kind, *rest = key
        if kind != "drive":  # ops of the small model are known by their place in it
            rest[0] = self._place(rest[0])
        return {name: ns * times for name, ns in self._found.get((kind, *rest), {}).items()}

    def _place(self, i: Any) -> int:
        if not self.model.is_block(i):
            return -1 if i == self.model.embed else len(self._stands_for)
        return self._stands_for[self.model.layer_kind(i)]

    def _learn(self, schedule: Schedule, profile: HardwareProfile) -> None:
        for op, cost in zip(schedule.ops, demands(schedule, profile, _ALONE), strict=True):
            areas = {name: cost.duration_ns * share for name, share in cost.usage.items()}
            key = _key(op)
            if key is None:
                continue
            if key[0] == "update":
                if key[2] == Tier.HOST:
                    areas[OPTIMIZER] = float(cost.duration_ns)
                least = _least_ns(op, schedule, profile, cost.duration_ns) / max(cost.duration_ns, 1)
                areas = {name: ns * least for name, ns in areas.items()}
            elif key[0] != "compute":  # a copy, whose time was rounded up: what others are told from it by their bytes
                areas = {name: ns * (1.0 - 1.0 / max(cost.duration_ns, 1)) for name, ns in areas.items()}
            # variants of an op differ where they are measured: any schedule may have the quicker one
            known = self._found.get(key)
            self._found[key] = areas if known is None else {r: min(known.get(r, 0.0), ns) for r, ns in areas.items()}


def _least_ns(op: Op, schedule: Schedule, profile: HardwareProfile, whole_ns: int) -> float:
    """What an update of a layer takes, or its parts together, or the issuing thread, where these are quicker."""
    table = profile.measured.op_times if profile.measured else None
    times = {} if table is None else table.values
    found = [float(whole_ns)]
    for by in (op, replace(op, stream=Stream.HOST)) if op.stream == Stream.CPU else (op,):
        key = signature(by, schedule.model, schedule.workload)
        in_parts = f"{key}/1 of "
        found += [times[key]] if key in times else []
        found += [ns * int(name.removeprefix(in_parts)) for name, ns in times.items() if name.startswith(in_parts)]
    return min(found)


def _key(op: Op) -> tuple[object, ...] | None:
    if op.kind == Kind.COMPUTE:
        return ("compute", op.layer, op.phase)
    if op.phase == Phase.ADAM:
        return ("update", op.layer, Tier.HOST if op.stream == Stream.CPU else Tier.DEVICE)
    if op.phase != Phase.COPY:
        return None
    if op.stream in DRIVE_STREAMS:
        return ("drive", op.kind) if op.layer == 0 else None
    return ("copy", op.layer, parse(op.reads[0].tensor).cls, op.kind)
