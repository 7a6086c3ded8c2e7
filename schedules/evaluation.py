"""The part of a step that makes its losses: what a training evaluates a text by, in its own memory."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from schedules import tensor as tensors
from schedules.amounts import Amounts
from schedules.errors import Refused
from schedules.hazards import minimal_waits
from schedules.op import Access, Kind, Op, Phase
from schedules.tensor import parse
from schedules.verify import Verified, verify


def evaluation(training: Verified) -> Verified:
    """The same step without what only training needs: in the same buffers, a part of the ops.

    It begins with what lies in them between steps, and leaves that there: what the step carries over in a buffer that
    is used for something else meanwhile comes again, as the step has it come. Raises Refused where it cannot.
    """
    schedule = training.schedule
    workload = replace(schedule.workload, task="evaluate", grad_clip=None)
    amounts = Amounts(schedule.model, workload)
    wanted, found = set[Access](), list[Op]()
    for op in reversed(schedule.ops):
        if op.phase == Phase.ADAM:  # between steps every gradient has been applied
            continue
        written = tuple(access for access in op.writes if access in wanted)
        if not written and op.phase != Phase.LOSS:
            continue
        wanted.difference_update(written)
        read = tuple(access for access in op.reads if parse(access.tensor).cls not in tensors.GRADIENTS)
        wanted.update(read)
        found.append(_counted(replace(op, reads=read, writes=written), amounts))
    found.reverse()
    lost = dict[Access, Op]()  # what the step carries over -> an op that writes over it
    for op in found:
        for access in op.writes:
            kept = training.initial.get(access.buffer)
            if kept is not None and (kept != access.tensor or schedule.staleness):  # it might be of another version
                lost.setdefault(Access(access.buffer, kept), op)
    for carried, op in lost.items():
        again = None if schedule.staleness else _brought(carried, training, lost)
        if again is None:
            raise Refused(
                f"{schedule.label} cannot be evaluated between steps: {op.name} writes into {carried.buffer}, which "
                f"keeps {carried.tensor} from one step to the next, and no other buffer does"
            )
        found.append(replace(again, name=f"{again.name}.again", blocking=False))
    ops = tuple(found)
    used = {access.buffer for op in ops for access in op.accesses}
    return verify(
        replace(
            schedule,
            ops=ops,
            buffers=tuple(buffer for buffer in schedule.buffers if buffer.name in used),
            waits=minimal_waits(ops),
            workload=workload,
            staleness=0,
        )
    )


def _brought(carried: Access, training: Verified, lost: Collection[Access]) -> Op | None:
    """The step's copy of what is carried over, from where it is kept as well."""
    for op in training.schedule.ops:
        if op.phase == Phase.COPY and carried in op.writes:
            (source,) = op.reads
            kept = training.initial.get(source.buffer) == carried.tensor and source not in lost
            if kept and {source.buffer, carried.buffer} <= training.newest:
                return op
    return None


def _counted(op: Op, amounts: Amounts) -> Op:
    """The same op with what it does where nothing is trained."""
    if op.kind != Kind.COMPUTE:
        return op
    assert op.layer is not None
    flops, nbytes = amounts.compute(
        op.layer, op.phase, output=op.makes_output, fused=True, quantised=op.reads_quantised
    )
    return replace(op, flops=flops, nbytes=nbytes)
