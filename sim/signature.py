"""What ops are called in a profile's tables of what was measured, and what a table tells of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from schedules import tensor as tensors
from schedules import trained
from schedules.model import ModelSpec
from schedules.op import Access, Kind, Op, Phase, Tier
from schedules.schedule import Schedule
from schedules.workload import Workload
from sim.machine import SHAPE, Table

Law = Callable[[Mapping[tuple[int, int], float], tuple[int, int]], float | None]  # see sim.shapes


def signature(op: Op, model: ModelSpec, workload: Workload) -> str:
    """What decides an op's time on a given machine where no link and no drive does, as one word for tables.

    Compute: model, kind of layer, phase, whether activations are kept, whether a recompute makes its output, and
    whether a gradient is added to, micro-batch x sequence, element type. Other passes over memory: model, kind of
    layer, phase, of what but the optimizer's step, where, precision, parts of the layer.
    """
    layer = "all" if op.layer is None else model.layer_kind(op.layer)
    if op.kind != Kind.COMPUTE:
        of = f"/lora{workload.lora_rank}" if workload.lora_rank is not None else ""
        if (part := trained.part(op)) is not None:
            of += f"/1 of {part.of}"
        what = op.phase if op.phase == Phase.ADAM else f"{op.phase} {_passed_over(op)}"
        fresh = "+fresh" if op.fresh else ""
        return f"{model.name}/{layer}/{what}{fresh}/{'device' if op.on_device else 'host'}/{workload.precision}{of}"
    keep = "+keep" if any(tensors.parse(a.tensor).cls == tensors.SAVED for a in op.writes) else ""
    if op.phase == Phase.RECOMPUTE and tensors.makes_output(a.tensor for a in op.writes):
        keep += "+output"
    add = "+add" if any(tensors.parse(a.tensor).cls in tensors.GRADIENTS for a in op.reads) else ""
    shape = f"{workload.micro_batch_size}x{workload.seq_len}"
    element = "fp32" if workload.bytes.activation == 4 else "bf16"
    if workload.lora_rank is not None:
        element += f"/lora{workload.lora_rank}"
    if workload.task == "evaluate":
        element += "/evaluate"
    if workload.recompute != "none":
        element += f"/{workload.recompute} again"
    return f"{model.name}/{layer}/{op.phase}{keep}{add}/{shape}/{element}"


def _passed_over(op: Op) -> str:
    """The classes of tensors that an op reads and writes: what is added to another of its class is told twice."""
    read, written = _classes(op.reads), _classes(op.writes)
    return f"{read} in place" if op.reads == op.writes else f"{read} to {written}"


def _classes(accesses: Sequence[Access]) -> str:
    return "+".join(tensors.parse(access.tensor).cls for access in accesses) or "nothing"


def timed(schedule: Schedule, *, needed: bool = False) -> dict[int, str]:
    """Place -> signature of the ops that a profile times one by one: all but copies between tiers and what only waits.

    Copies go by the link. Those within a tier are passes over its memory; of activations, whose bytes the signature
    does not tell, they go by its bandwidth. So do other passes where they were not timed; those `needed` alone have to
    be: what computes, and the optimizer's steps.
    """

    return {
        place: signature(op, schedule.model, schedule.workload)
        for place, op in enumerate(schedule.ops)
        if is_timed(op, schedule) and not (needed and op.kind != Kind.COMPUTE and op.phase != Phase.ADAM)
    }


def is_timed(op: Op, schedule: Schedule) -> bool:
    """Whether `timed` has the op."""
    if op.phase != Phase.COPY:
        return op.phase != Phase.SYNC
    tiers = {schedule.buffer[access.buffer].tier for access in op.accesses}
    return len(tiers) == 1 and Tier.NVME not in tiers and op.microbatch is None


def tabulated(table: Table, key: str, workload: Workload, law: Law) -> float | None:
    """A table's value for a signature: as measured, or by a law between measured shapes; None where neither can be."""
    if key in table.values:
        return table.values[key]
    points = table.shapes.get(SHAPE.sub("/", key), {})
    return law(points, (workload.micro_batch_size, workload.seq_len))
