"""When the contents of a schedule's buffers end, read off the accesses of its repeating step."""

from __future__ import annotations

from schedules.hazards import Clock, HappensBefore, Instance, in_order
from schedules.op import Op
from schedules.schedule import Schedule


def released(schedule: Schedule) -> list[tuple[str, ...]]:
    """Per op, the buffers whose contents nobody will read once the op has finished.

    A content ends with its last reader in program order: the next access, in this step or the following, is
    a write that does not read. Where another reader may still be running by then, as the schedule's own order
    leaves it open, the content is not listed: it ends when it is overwritten.
    """
    touching: dict[str, list[int]] = {}
    for index, op in enumerate(schedule.ops):
        for buffer in dict.fromkeys(access.buffer for access in op.accesses):
            touching.setdefault(buffer, []).append(index)
    order, starts = _order(schedule)
    found: list[list[str]] = [[] for _ in schedule.ops]
    for buffer, indices in touching.items():
        for at, last in enumerate(indices):
            after = schedule.ops[indices[(at + 1) % len(indices)]]
            if after.reads_from(buffer):
                continue
            users = _users(schedule.ops, buffer, indices, at)
            if all(order.implies(starts[last], user) for user in users):
                found[last].append(buffer)
    return [tuple(buffers) for buffers in found]


def _users(ops: tuple[Op, ...], buffer: str, indices: list[int], at: int) -> list[Instance]:
    """Who else used the content that op `indices[at]` of step 1 uses last, back to the op that made it."""
    users: list[Instance] = []
    position, step = at, 1
    while ops[indices[position]].reads_from(buffer):
        position, step = (position - 1, step) if position else (len(indices) - 1, step - 1)
        if position == at:  # read only, or only ever updated in place: it has no beginning
            break
        users.append(Instance(step, indices[position]))
    return users


def _order(schedule: Schedule) -> tuple[HappensBefore, list[Clock]]:
    """The order that streams, waits and the host give, and what has finished when each op of step 1 starts."""
    order = HappensBefore()
    starts = [clock for instance, _, clock in in_order(schedule, order) if instance.step == 1]
    return order, starts
