"""Is a schedule safe? Every hazard re-derived from the accesses, and every read followed to its write.

`verify` finds the problems before anything runs: all at once, except those that are only consequences of others. The
executor accepts nothing but what `verify` returns.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from schedules.contents import Contents
from schedules.errors import Refused
from schedules.hazards import Accesses, HappensBefore, Hazard, Instance, in_order
from schedules.op import Op, Tier
from schedules.schedule import Schedule
from schedules.show import excerpt
from schedules.tensor import describe
from schedules.violation import Violation
from schedules.well_formed import malformed, wrong_amounts


class ScheduleError(Refused):
    """A schedule that must not run; `violations` lists why, all of them."""

    def __init__(self, schedule: Schedule, violations: list[Violation]) -> None:
        self.schedule = schedule
        self.violations = violations
        count = f"{len(violations)} problem{'s' if len(violations) > 1 else ''}"
        title = f"{count} in {schedule.policy} ({schedule.short_digest}, {len(schedule.ops)} ops)"
        groups = _alike(violations)
        told = [title, *(self._told(group) for group in groups[:_TOLD])]
        super().__init__("\n\n".join(told) + _rest(sum(map(len, groups[_TOLD:]))))

    def __reduce__(self) -> tuple[type[ScheduleError], tuple[Schedule, list[Violation]]]:
        return type(self), (self.schedule, self.violations)  # it may come from another process

    def _told(self, group: list[Violation]) -> str:
        first, *others = group
        lines = str(first).splitlines()
        if others:
            shown = [v.op if v.op != first.op else v.about for v in others[:_TOLD]]
            names = ", ".join(filter(None, dict.fromkeys(shown))) or f"{len(shown)} more"
            lines.append(f"the same for {names}" + _rest(len(others) - len(shown), " "))
        where = excerpt(self.schedule, first.op, first.on) if first.op else ""
        return "\n".join("  " + line for line in [*lines, *where.splitlines()])


def _alike(violations: list[Violation]) -> list[list[Violation]]:
    """The violations in groups whose messages differ in numbers only."""
    groups: dict[str, list[Violation]] = {}
    for violation in violations:
        groups.setdefault(re.sub(r"\d+", "", str(violation)), []).append(violation)
    return list(groups.values())


def _rest(left: int, before: str = "\n\n  ") -> str:
    return f"{before}and {left} more" if left else ""


_TOLD = 10  # violations told in the message; the exception carries all


@dataclass(frozen=True, kw_only=True)
class Verified:
    """A schedule that `verify` found safe, the fingerprint it had then, and what its buffers start with."""

    schedule: Schedule
    fingerprint: str
    initial: dict[str, str]  # buffer -> the tensor it must hold before the first step
    newest: frozenset[str]  # of these, those with its newest version when a step ends
    carried: dict[str, str]  # buffer -> the gradient or norm in it that a step leaves to the next one's updates
    behind: dict[str, int]  # trained layer -> by how many steps the weights that it is computed with are behind

    def allocated_bytes(self) -> dict[Tier, int]:
        """Bytes of buffers per tier."""
        return {tier: self.schedule.allocated_bytes(tier) for tier in Tier}


def verify(schedule: Schedule) -> Verified:
    """Prove a schedule safe for any number of steps.

    What is checked, in this order:
      - every name, size and wait has a meaning;
      - no wait is for an op issued later, which would be a deadlock, or a wait for an event that is never recorded;
      - read in program order, every op finds the tensors it names, in the version that is due, and every gradient is
        complete and applied once;
      - streams and waits keep every hazard in program order;
      - each op's bytes, FLOPs and parameters are those of the tensors it touches.

    Raises:
        ScheduleError: with all violations found. If a name, size or wait has no meaning, the other checks are left out;
            the amounts are checked only if all else is right.
    """
    violations = list(malformed(schedule))
    if violations:  # the other checks would stumble over the same faults
        raise ScheduleError(schedule, violations)
    contents = Contents(schedule)
    violations = [*_deadlocks(schedule), *contents.check()]
    if not any(v.rule == "deadlock" for v in violations):
        violations += _races(schedule)
    violations = violations or list(wrong_amounts(schedule))
    if violations:
        raise ScheduleError(schedule, violations)
    return Verified(
        schedule=schedule,
        fingerprint=schedule.fingerprint,
        initial=dict(contents.initial),
        newest=contents.newest(),
        carried=dict(contents.carried),
        behind=dict(contents.behind),
    )


# ---- order


def _deadlocks(schedule: Schedule) -> Iterator[Violation]:
    """A wait for an op issued later: the stream would stand still, or wait for an event nobody recorded."""
    index = schedule.index
    for wait in schedule.waits:
        if wait.distance == 0 and index[wait.on] >= index[wait.op]:
            itself = wait.on == wait.op
            late = "itself" if itself else f"{wait.on}, which is issued after it in the same step"
            yield Violation(
                rule="deadlock",
                op=wait.op,
                on=wait.on,
                message=f"{wait.op} waits for {late}",
                fix=f"remove  wait {wait.op} on {wait.on}" + ("" if itself else f", or issue {wait.on} first"),
            )


def _races(schedule: Schedule) -> Iterator[Violation]:
    """Hazards in a step or from one to the next that neither streams, nor waits, nor the issuing host keep in order."""
    accesses, order = Accesses(), HappensBefore()
    told: set[tuple[str, str, str, int]] = set()
    for instance, op, clock in in_order(schedule, order):
        for hazard in accesses.hazards(op):
            if order.implies(clock, hazard.first):
                continue
            first = schedule.ops[hazard.first.place]
            key = (op.name, first.name, hazard.buffer, instance.step - hazard.first.step)
            if key not in told:
                told.add(key)
                yield _race(op, first, hazard, instance)
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
    wait = f"add  wait {op.name} on {first.name}" + (" at distance 1" if distance else "")
    lacking = f"{op.name} does not wait for {before}" if distance else f"nothing orders {before} before {op.name}"
    return Violation(
        rule="race",
        op=op.name,
        on=first.name,
        buffer=hazard.buffer,
        message=message,
        fix=f"{lacking}; {wait}",
    )
