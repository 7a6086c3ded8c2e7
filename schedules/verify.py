"""Is a schedule safe? Every hazard re-derived from the accesses, and every read followed to its write.

`verify` finds all problems at once, before anything runs. What it returns is the only thing the executor
accepts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from schedules.contents import Contents, Violation, describe
from schedules.errors import Refused
from schedules.hazards import Accesses, HappensBefore, Hazard, Instance, unrolled
from schedules.op import Kind, Op, Phase, Stream, Tier
from schedules.program import Program
from schedules.schedule import Schedule
from schedules.show import excerpt
from schedules.tensor import TensorError, parse


class ScheduleError(Refused):
    """A schedule that must not run; `violations` lists why, all of them."""

    def __init__(self, schedule: Schedule, violations: list[Violation]) -> None:
        self.schedule = schedule
        self.violations = violations
        count = f"{len(violations)} problem{'s' if len(violations) > 1 else ''}"
        title = f"{count} in {schedule.policy} ({schedule.short_digest}, {len(schedule.ops)} ops)"
        super().__init__("\n\n".join([title, *(self._told(v) for v in violations[:_TOLD])]) + self._rest())

    def _told(self, violation: Violation) -> str:
        where = excerpt(self.schedule, violation.op, violation.on) if violation.op else ""
        return "\n".join("  " + line for line in [*str(violation).splitlines(), *where.splitlines()])

    def _rest(self) -> str:
        left = len(self.violations) - _TOLD
        return f"\n\n  and {left} more" if left > 0 else ""


_TOLD = 10  # violations told in the message; the exception carries all


@dataclass(frozen=True, kw_only=True)
class Verified:
    """A schedule that `verify` found safe, the digest it had then, and what its buffers start with."""

    schedule: Schedule
    digest: str
    initial: dict[str, str]  # buffer -> the tensor it must hold before the first step

    def allocated_bytes(self) -> dict[Tier, int]:
        """Bytes of buffers per tier."""
        return {tier: self.schedule.allocated_bytes(tier) for tier in Tier}


def verify(schedule: Schedule) -> Verified:
    """Prove a schedule safe for any number of steps.

    In order: every name, size and wait has a meaning; no wait is for an op issued later (a deadlock, or an
    event never recorded); read in program order, every op finds the tensors it names at the version it is
    due, and every gradient is complete and applied once; streams and waits keep every hazard in that order.

    Raises:
        ScheduleError: with all violations found.
    """
    violations = list(_structure(schedule))
    if violations:  # the other checks would stumble over the same faults
        raise ScheduleError(schedule, violations)
    contents = Contents(schedule)
    violations = [*_deadlocks(schedule), *contents.check()]
    if not any(v.rule == "deadlock" for v in violations):
        violations += _races(schedule)
    if violations:
        raise ScheduleError(schedule, violations)
    return Verified(schedule=schedule, digest=schedule.digest, initial=dict(contents.initial))


# ---- structure


def _structure(schedule: Schedule) -> Iterator[Violation]:
    names: set[str] = set()
    for op in schedule.ops:
        if op.name in names:
            yield _wrong(op, f"the name {op.name} stands for two ops", "give every op its own name")
        names.add(op.name)
    if not schedule.ops:
        yield Violation(rule="structure", op="", message="the schedule has no ops", fix="add some")
    seen: set[str] = set()
    for buffer in schedule.buffers:
        if buffer.name in seen:
            yield Violation(
                rule="structure",
                op="",
                buffer=buffer.name,
                message=f"the name {buffer.name} stands for two buffers",
                fix="give every buffer its own name",
            )
        seen.add(buffer.name)
        if buffer.nbytes < 0:
            yield Violation(
                rule="structure",
                op="",
                buffer=buffer.name,
                message=f"buffer {buffer.name} has {buffer.nbytes} bytes",
                fix="give it the bytes of the largest tensor it holds",
            )
    for wait in schedule.waits:
        for name in (wait.op, wait.on):
            if name not in names:
                yield Violation(
                    rule="structure",
                    op="",
                    message=f"wait {wait.op} on {wait.on}: there is no op {name}",
                    fix="name an op of this schedule",
                )
        if wait.distance not in (0, 1):
            yield Violation(
                rule="structure",
                op=wait.op if wait.op in names else "",
                message=f"wait {wait.op} on {wait.on} has distance {wait.distance}",
                fix="use 0 for this step or 1 for the step before",
            )
    sizes = Program(schedule.model, schedule.workload)
    for op in schedule.ops:
        faults = list(_op_structure(schedule, op, sizes.nbytes))
        yield from faults or _op_form(schedule, op, sizes.nbytes)


def _op_structure(schedule: Schedule, op: Op, size: Callable[[str], int]) -> Iterator[Violation]:
    for amount in ("nbytes", "flops", "params"):
        if getattr(op, amount) < 0:
            yield _wrong(op, f"{op.name} has {amount} {getattr(op, amount)}", "amounts are never negative")
    for access in op.accesses:
        buffer = schedule.buffer.get(access.buffer)
        if buffer is None:
            yield _wrong(op, f"{op.name} touches buffer {access.buffer}, which is not declared", "declare it")
            continue
        try:
            need = size(access.tensor)
        except (TensorError, ValueError) as error:
            yield _wrong(op, f"{op.name}: {error}", "name a tensor of this model", access.buffer)
            continue
        microbatch = parse(access.tensor).microbatch
        if microbatch is not None and microbatch not in schedule.workload.microbatches:
            yield _wrong(
                op,
                f"{op.name} names {access.tensor}, but the step has {schedule.workload.accumulation} micro-batches",
                "number micro-batches from 0",
                access.buffer,
            )
        if need > buffer.nbytes:
            yield _wrong(
                op,
                f"{op.name} puts {describe(access.tensor)} ({need} bytes) into {buffer.name} ({buffer.nbytes} bytes)",
                f"make {buffer.name} {need} bytes or more",
                buffer.name,
            )


def _op_form(schedule: Schedule, op: Op, size: Callable[[str], int]) -> Iterator[Violation]:
    """Kind, phase and stream must go together, and each phase must name what it cannot do without."""
    if op.phase not in _PHASES_OF[op.kind]:
        yield _wrong(op, f"{op.name} is a {op.kind} of phase {op.phase}", f"{op.kind} has {_list(_PHASES_OF[op.kind])}")
        return
    if (op.kind == Kind.COMPUTE) != (op.stream == Stream.COMPUTE and op.phase in _PHASES_OF[Kind.COMPUTE]):
        yield _wrong(op, f"{op.name} ({op.phase}) is queued on {op.stream}", "compute ops run on the compute stream")
    if op.phase == Phase.SYNC and op.stream != Stream.HOST:
        yield _wrong(op, f"{op.name} synchronises on stream {op.stream}", "only the host synchronises")
    if op.kind == Kind.COMPUTE:
        if op.layer not in schedule.model.layers or op.microbatch not in schedule.workload.microbatches:
            yield _wrong(op, f"{op.name} computes layer {op.layer}, micro-batch {op.microbatch}", "name both")
        for access in op.accesses:
            if access.buffer in schedule.buffer and schedule.buffer[access.buffer].tier != Tier.DEVICE:
                yield _wrong(op, f"{op.name} computes with {access.buffer}, not on the device", "prefetch it first")
    if op.phase in (Phase.COPY, Phase.CAST):
        if len(op.reads) != 1 or len(op.writes) != 1:
            yield _wrong(
                op, f"{op.name} is a copy with {len(op.reads)} sources and {len(op.writes)} targets", "name one"
            )
            return
        source, target = op.reads[0].tensor, op.writes[0].tensor
        if op.phase == Phase.COPY and source != target:
            yield _wrong(op, f"{op.name} copies {source} into {target}", "a copy keeps the tensor's name")
        if op.phase == Phase.COPY and source == target and op.nbytes != size(source):
            yield _wrong(op, f"{op.name} moves {op.nbytes} bytes of {source}'s {size(source)}", "move all of them")
        if parse(source).layer != parse(target).layer:
            yield _wrong(op, f"{op.name} makes {target} of {source}", "stay in one layer")
    if op.phase in (Phase.ACCUMULATE, Phase.NORM, Phase.SCALE) and len(op.writes) != 1:
        yield _wrong(op, f"{op.name} ({op.phase}) writes {len(op.writes)} buffers", "write one")


_COMPUTE_PHASES = (Phase.EMBED, Phase.FORWARD, Phase.RECOMPUTE, Phase.LOSS, Phase.BACKWARD)
_PHASES_OF = {
    Kind.PREFETCH: (Phase.COPY, Phase.SYNC),
    Kind.OFFLOAD: (Phase.COPY, Phase.SYNC),
    Kind.COMPUTE: (*_COMPUTE_PHASES, Phase.SYNC),
    Kind.UPDATE: (
        Phase.ACCUMULATE,
        Phase.CAST,
        Phase.ZERO,
        Phase.NORM,
        Phase.SCALE,
        Phase.ADAM,
        Phase.SYNC,
    ),
}


def _wrong(op: Op, message: str, fix: str, buffer: str = "") -> Violation:
    return Violation(rule="structure", op=op.name, buffer=buffer, message=message, fix=fix)


def _list(phases: tuple[Phase, ...]) -> str:
    return ", ".join(phases)


# ---- order


def _deadlocks(schedule: Schedule) -> Iterator[Violation]:
    """A wait for an op issued later: the stream would stand still, or wait for an event nobody recorded."""
    index = schedule.index
    for wait in schedule.waits:
        if wait.distance == 0 and index[wait.on] >= index[wait.op]:
            yield Violation(
                rule="deadlock",
                op=wait.op,
                on=wait.on,
                message=f"{wait.op} waits for {wait.on}, which is issued after it in the same step",
                fix=f"remove  wait {wait.op} on {wait.on}, or issue {wait.on} first",
            )


def _races(schedule: Schedule) -> Iterator[Violation]:
    """Hazards that neither streams, nor waits, nor the issuing host keep in order, over three steps."""
    accesses, order = Accesses(), HappensBefore()
    told: set[tuple[str, str, str, int]] = set()
    for instance, op in unrolled(schedule.ops, 3):
        clock = order.start(op)
        for wait in schedule.waits_of[op.name]:
            on = Instance(instance.step - wait.distance, schedule.index[wait.on])
            if order.knows(on):
                clock = order.after(clock, on)
        for hazard in accesses.hazards(op):
            first = schedule.ops[hazard.first.place]
            key = (op.name, first.name, hazard.buffer, instance.step - hazard.first.step)
            if not order.implies(clock, hazard.first) and key not in told:
                told.add(key)
                yield _race(op, first, hazard, instance)
        order.finish(op, instance, clock)
        accesses.record(op, instance)


def _race(op: Op, first: Op, hazard: Hazard, instance: Instance) -> Violation:
    def tensor(of: Op, written: bool) -> str:
        side = of.writes if written else of.reads
        return describe(next(a.tensor for a in side if a.buffer == hazard.buffer))

    distance = instance.step - hazard.first.step
    before = f"{first.name} of the step before" if distance else first.name
    if hazard.rule == "RAW":
        message = f"{op.name} reads {tensor(op, False)} while {before} may still be writing"
    elif hazard.rule == "WAR":
        message = f"{op.name} overwrites {tensor(first, False)} while {before} may still read it"
    else:
        message = f"{op.name} writes {tensor(op, True)} while {before} may still be writing there"
    wait = f"wait {op.name} on {first.name}" + (" at distance 1" if distance else "")
    return Violation(
        rule="race",
        op=op.name,
        on=first.name,
        buffer=hazard.buffer,
        message=message,
        fix=f"nothing orders {before} before {op.name}; add  {wait}",
    )
