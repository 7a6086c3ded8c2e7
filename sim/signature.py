"""What ops are called in a profile's tables of what was measured, and what a table tells of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from schedules import tensor as tensors
from schedules import trained
from schedules.model import ModelSpec
from schedules.op import Kind, Op, Phase, Stream, Tier
from schedules.quantised import makes_whole
from schedules.schedule import Schedule
from schedules.workload import MUON, Workload
from sim.machine import SHAPE, Table

Law = Callable[[Mapping[tuple[int, int], float], tuple[int, int]], float | None]  # see sim.interpolation


def signature(op: Op, model: ModelSpec, workload: Workload) -> str:
    """What decides an op's time on a given machine where no link and no drive does, as one word for tables.

    Compute: model, kind of layer, phase, whether activations are kept, whether a recompute makes its output, and
    whether a gradient is added to, micro-batch x sequence, element type, format of products, and of weights that it
    makes whole. Updates and copies within
    a tier: model, kind of layer, what is passed over, or the optimizer whose step it is, whose threads do it,
    precision, parts of the layer.
    """
    if op.kind != Kind.COMPUTE:
        return _of_pass(op, model, workload)
    layer = "all" if op.layer is None else model.layer_kind(op.layer)
    keep = "+keep" if any(tensors.parse(a.tensor).cls == tensors.SAVED for a in op.writes) else ""
    if op.phase == Phase.RECOMPUTE and op.makes_output:
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
    if workload.matmul is not None and op.layer is not None and model.is_block(op.layer):
        element += f"/{workload.matmul}"
    if op.reads_quantised:
        element += f"/{workload.quantised}"
    return f"{model.name}/{layer}/{op.phase}{keep}{add}/{shape}/{element}"


def _of_pass(op: Op, model: ModelSpec, workload: Workload) -> str:
    layer, part = op.layer, trained.part(op)
    if op.phase == Phase.NORM:  # its op is of no layer, and what it writes of none
        read = tensors.parse(op.reads[0].tensor)
        layer, part = model.layer_index(read.layer), read.part
    kind = "all" if layer is None else model.layer_kind(layer)
    adapted = workload.lora_rank is not None and not makes_whole(op)  # of frozen weights, whatever lies beside them
    of = f"/lora{workload.lora_rank}" if adapted else ""
    if part is not None:
        of += f"/1 of {part.of}"
    stepped = op.phase == Phase.ADAM and op.flops > 0  # by Muon, that multiplies
    passed = workload.optimizer if stepped else _passed_over(op)
    return f"{model.name}/{kind}/{passed}/{_whose(op)}/{workload.precision}{of}"


def _passed_over(op: Op) -> str:
    """The phase and the classes of tensors; what is added to another of its class is told twice.

    The optimizer's step is one, whichever width its gradient has: that is a tenth of its traffic at most.
    """
    read, written = (tuple(tensors.parse(a.tensor).cls for a in accesses) for accesses in (op.reads, op.writes))
    if op.phase == Phase.ADAM:
        return str(op.phase)
    if op.phase == Phase.NORM:
        return f"{op.phase} {read[0]}"
    where = "in place" if op.reads == op.writes else f"to {'+'.join(written)}"
    return f"{op.phase} {'+'.join(read) or 'nothing'} {where}{'+fresh' if op.fresh else ''}"


def _whose(op: Op) -> str:
    """A queue of the device, the optimizer's workers, or the issuing thread with as many threads as that has."""
    return "device" if op.on_device else "issuer" if op.stream == Stream.HOST else "host"


def in_words(signature: str) -> str:
    """The kind of op that a signature is of, for those that have to be timed: "a forward that keeps no activations"."""
    _, _, what, where, element, *_ = signature.split("/")
    phase, *more = what.split("+")
    if phase in (Phase.ADAM, MUON):
        who = {"device": "on the device", "issuer": "by the issuing thread", "host": "by the host's workers"}
        whose = "an optimizer's" if phase == Phase.ADAM else "Muon's"
        return f"{whose} step {who[where]} in {element}"
    if phase.startswith(Phase.CAST):
        return "one that makes a block's quantised weights whole"
    if phase == Phase.FORWARD:
        return f"a forward that keeps {'its' if 'keep' in more else 'no'} activations"
    if phase == Phase.RECOMPUTE:
        made = [words for word, words in (("output", "its output"), ("keep", "activations")) if word in more]
        return f"a recompute that makes {' and '.join(made)}"
    return f"{'an' if phase == Phase.EMBED else 'a'} {phase}{' that adds to a gradient' if 'add' in more else ''}"


Which = Literal["all", "needed", "computed"]


def timed(schedule: Schedule, which: Which = "all") -> dict[int, str]:
    """Place -> signature of the ops that a profile times one by one: all but copies between tiers and what only waits.

    Copies go by the link. Those within a tier are passes over its memory; of activations, whose bytes the signature
    does not tell, they go by its bandwidth, as do norms of several gradients at once, and passes that were not timed.

    `which`: those "needed" have to be timed, see `needs_time`; or only what is "computed".
    """

    def wanted(op: Op) -> bool:
        if which == "all":
            return is_timed(op, schedule)
        return needs_time(op) if which == "needed" else op.kind == Kind.COMPUTE

    return {
        place: signature(op, schedule.model, schedule.workload) for place, op in enumerate(schedule.ops) if wanted(op)
    }


def needs_time(op: Op) -> bool:
    """Whether what an op takes does not follow from its bytes: one that computes, an optimizer's step, and what makes
    quantised weights whole."""
    return op.kind == Kind.COMPUTE or op.phase == Phase.ADAM or makes_whole(op)


def is_timed(op: Op, schedule: Schedule) -> bool:
    """Whether `timed` has the op."""
    if op.phase == Phase.NORM:
        return sum(tensors.parse(access.tensor).cls != tensors.NORM for access in op.reads) == 1
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
