"""Does every name, size and wait of a schedule mean something? Checked before its meaning is."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise

from schedules import fp8, trained
from schedules import tensor as tensors
from schedules.amounts import Amounts
from schedules.most_ops import MOST_OPS
from schedules.op import DRIVE_STREAMS, Kind, Op, Phase, Stream, Tier
from schedules.phases import COMPUTE, misused
from schedules.schedule import Schedule
from schedules.tensor import NORM, SAVED, describe, parse
from schedules.violation import Violation, some


def malformed(schedule: Schedule) -> Iterator[Violation]:
    """What is wrong with the schedule as a text: unknown or doubled names, impossible sizes, ops out of form."""
    if (count := schedule.workload.accumulation) > MOST_OPS:  # each of them would be looked at
        message = f"the step has {count:,} micro-batches, and may have {MOST_OPS:,} ops"
        yield Violation(rule="structure", op="", subject="micro-batches", message=message, fix="give fewer")
        return
    if (mode := schedule.workload.recompute) not in (modes := schedule.model.recompute_modes):
        message = f"blocks of {schedule.model.name} have no recompute={mode}"
        yield _wrong(None, message, f"choose from {', '.join(modes)}")
        return
    if unmet := fp8.unmet(schedule.model, schedule.workload):
        yield _wrong(None, unmet, "leave out matmul")
        return
    if unmet := schedule.model.unmet_length(schedule.workload.seq_len):
        yield _wrong(None, unmet, f"give sequences of at most {schedule.model.longest_sequence:,}")
        return
    yield from _ops_named_once(schedule)
    yield from _sized_buffers(schedule)
    yield from _known_waits(schedule)
    yield from _updates_on_one_stream(schedule)
    amounts = Amounts(schedule.model, schedule.workload)
    ill = False
    for op in schedule.ops:
        found = list(_op_accesses(schedule, op, amounts))
        ill = ill or bool(found)
        yield from found or [*_op_form(schedule, op), *_op_reach(schedule, op)]
    if not ill:
        yield from _saved_apart(schedule)
        yield from _divided_in_one_way(schedule)


def wrong_amounts(schedule: Schedule) -> Iterator[Violation]:
    """Bytes, FLOPs and parameters that are not those of the model and step: a prediction is made of them.

    They follow from what ops touch: ask only once the accesses are known to be right.
    """
    amounts = Amounts(schedule.model, schedule.workload)
    for op in schedule.ops:
        right = _amounts(schedule, op, amounts)
        for amount, unit in _AMOUNTS.items():
            found, due = getattr(op, amount), right.get(amount, (0,))
            if found not in due:
                of_step = " or ".join(map(str, sorted(due)))
                yield _wrong(
                    op,
                    f"{op.name} declares {found} {unit}; this model and step need {of_step}",
                    "give it those of the workload",
                )


def _ops_named_once(schedule: Schedule) -> Iterator[Violation]:
    if not schedule.ops:
        yield _wrong(None, "the schedule has no ops", "add some")
    seen: set[str] = set()
    for op in schedule.ops:
        if op.name in seen:
            yield _wrong(op, f"the name {op.name} stands for two ops", "give every op its own name")
        seen.add(op.name)


def _sized_buffers(schedule: Schedule) -> Iterator[Violation]:
    seen: set[str] = set()
    for buffer in schedule.buffers:
        name = buffer.name
        if name in seen:
            yield _wrong(None, f"the name {name} stands for two buffers", "give every buffer its own name", name)
        seen.add(name)
        if buffer.nbytes < 0:
            fix = "give it the bytes of the largest tensor it holds"
            yield _wrong(None, f"buffer {name} has {buffer.nbytes} bytes", fix, name)


def _known_waits(schedule: Schedule) -> Iterator[Violation]:
    ops = {op.name: op for op in schedule.ops}
    for wait in schedule.waits:
        what = f"wait {wait.op} on {wait.on}"
        for name in (wait.op, wait.on):
            if name not in ops:
                yield _wrong(None, f"{what}: there is no op {name}", "name an op of this schedule")
        if wait.distance not in (0, 1):
            fix = "use 0 for this step or 1 for the step before"
            yield _wrong(ops.get(wait.op), f"{what} has distance {wait.distance}", fix)


def _updates_on_one_stream(schedule: Schedule) -> Iterator[Violation]:
    """Those of the CPU: an update takes all its threads already, and on two streams they would be counted twice."""
    first: dict[Stream, Op] = {}
    for op in schedule.ops:
        if op.phase == Phase.ADAM and not op.on_device:
            first.setdefault(op.stream, op)
    for one, other in pairwise(first.values()):
        what = f"{one.name} updates on {one.stream} and {other.name} on {other.stream}"
        yield _wrong(other, what, "let the CPU run all its updates on one stream")


def _op_accesses(schedule: Schedule, op: Op, amounts: Amounts) -> Iterator[Violation]:
    for amount in _AMOUNTS:
        if getattr(op, amount) < 0:
            yield _wrong(op, f"{op.name} has {amount} {getattr(op, amount)}", "amounts are never negative")
    for access in op.accesses:
        buffer = schedule.buffer.get(access.buffer)
        if buffer is None:
            yield _wrong(op, f"{op.name} touches buffer {access.buffer}, which is not declared", "declare it")
            continue
        try:
            need = amounts.tensor(access.tensor)
        except ValueError as error:
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


def _saved_apart(schedule: Schedule) -> Iterator[Violation]:
    """What autograd saves inside a layer brings its own memory: a device buffer for it has none for other tensors."""
    first: dict[str, tuple[Op, str]] = {}  # device buffer -> who touched it first, and what
    told: set[str] = set()
    for op in schedule.ops:
        for access in op.accesses:
            if schedule.buffer[access.buffer].tier != Tier.DEVICE or access.buffer in told:
                continue
            by, tensor = first.setdefault(access.buffer, (op, access.tensor))
            if (parse(tensor).cls == SAVED) != (parse(access.tensor).cls == SAVED):
                told.add(access.buffer)
                what = f"{by.name} touches {describe(tensor)} in {access.buffer}, {op.name} {describe(access.tensor)}"
                fix = "give saved activations buffers of their own on the device"
                yield _wrong(op, what, fix, access.buffer, on=by.name)


def _divided_in_one_way(schedule: Schedule) -> Iterator[Violation]:
    """A layer's optimizer state is whole or in parts, the same for all ops, or a checkpoint would have it twice."""
    first: dict[str, tuple[Op, str, int]] = {}  # layer -> who touched its state first, what of it, in how many parts
    told: set[str] = set()
    for op in schedule.ops:
        for access in op.accesses:
            name = parse(access.tensor)
            if name.cls != tensors.STATE or name.layer in told:
                continue
            of = name.part.of if name.part else 1
            by, tensor, others = first.setdefault(name.layer, (op, access.tensor, of))
            if of != others:
                told.add(name.layer)
                what = f"{by.name} touches {describe(tensor)}, {op.name} {describe(access.tensor)}"
                yield _wrong(op, what, "divide a layer in one way", access.buffer, on=by.name)


def _op_form(schedule: Schedule, op: Op) -> Iterator[Violation]:
    """Kind, phase and stream must go together, and each phase must name what it cannot do without."""
    if op.phase not in _PHASES_OF[op.kind]:
        yield _wrong(op, f"{op.name} is a {op.kind} of phase {op.phase}", f"{op.kind} has {_list(_PHASES_OF[op.kind])}")
        return
    if op.kind == Kind.COMPUTE and op.stream != Stream.COMPUTE:
        yield _wrong(op, f"{op.name} ({op.phase}) is queued on {op.stream}", "compute ops run on the compute stream")
    if op.phase == Phase.SYNC and op.stream != Stream.HOST:
        yield _wrong(op, f"{op.name} synchronises on stream {op.stream}", "only the host synchronises")
    elif op.kind == Kind.UPDATE and op.stream in DRIVE_STREAMS:
        # one thread would run what is predicted of all
        yield _wrong(op, f"{op.name} ({op.phase}) is queued on {op.stream}", "queue it on cpu: a drive's streams copy")
    if op.kind == Kind.COMPUTE and (
        op.layer not in schedule.model.layers or op.microbatch not in schedule.workload.microbatches
    ):
        yield _wrong(op, f"{op.name} computes layer {op.layer}, micro-batch {op.microbatch}", "name both")
        return
    blocks = schedule.model.blocks if schedule.workload.multiplies_to_update else ()
    if op.phase == Phase.ADAM and op.stream != Stream.COMPUTE and op.layer in blocks:  # it takes workspace as they do
        what = f"{op.name} multiplies matrices, as {schedule.workload.optimizer} does, on {op.stream}"
        yield _wrong(op, what, "queue it on compute, with what it touches on the device")
    yield from (_wrong(op, message, fix) for message, fix in misused(schedule, op))
    if op.kind == Kind.COMPUTE:
        for access in dict.fromkeys(op.accesses):
            if schedule.buffer[access.buffer].tier != Tier.DEVICE:
                fix = _to_the_device(op, access.tensor)
                yield _wrong(op, f"{op.name} computes with {access.buffer}, not on the device", fix)
    if op.phase in (Phase.COPY, Phase.CAST):
        if len(op.reads) != 1 or len(op.writes) != 1:
            yield _wrong(
                op, f"{op.name} is a copy with {len(op.reads)} sources and {len(op.writes)} targets", "name one"
            )
            return
        if op.phase == Phase.COPY:
            yield from _copied(schedule, op)
            return
    if op.phase in (Phase.ACCUMULATE, Phase.NORM, Phase.SCALE) and len(op.writes) != 1:
        yield _wrong(op, f"{op.name} ({op.phase}) writes {len(op.writes)} buffers", "write one")
    if op.microbatch is not None and op.microbatch not in schedule.workload.microbatches:
        yield _wrong(op, f"{op.name} is of micro-batch {op.microbatch}", "number micro-batches from 0")
    if op.layer is not None and op.layer not in schedule.model.layers:
        yield _wrong(op, f"{op.name} is of layer {op.layer}", f"number layers from -1 to {schedule.model.head}")
    elif op.kind == Kind.UPDATE and op.phase != Phase.SYNC:
        of = "" if op.layer is None else schedule.model.layer_name(op.layer)
        for access in op.writes:
            if parse(access.tensor).layer != of:
                whose = f"layer {of}" if of else "no layer"
                yield _wrong(op, f"{op.name} is of {whose} and writes {describe(access.tensor)}", "name its layer")
    if op.phase == Phase.NORM and all(access.tensor == NORM for access in op.reads):
        yield _wrong(op, f"{op.name} (norm) reads no gradient", "name those whose squares it adds")


def _copied(schedule: Schedule, op: Op) -> Iterator[Violation]:
    """A copy keeps the tensor's name, has its layer and micro-batch, and the kind of its way: pictures go by them.

    Of a gradient it may take a part.
    """
    (source,), (target,) = op.reads, op.writes
    name = parse(source.tensor)
    if source.tensor != target.tensor:
        if name.cls not in tensors.GRADIENTS or source.tensor != tensors.whole(target.tensor):
            yield _wrong(op, f"{op.name} copies {source.tensor} into {target.tensor}", "a copy keeps the tensor's name")
            return
        if source.buffer == target.buffer:
            what = f"{op.name} copies a part of {source.tensor} over the rest of it, in {source.buffer}"
            yield _wrong(op, what, "copy it into another buffer")
        if schedule.buffer[source.buffer].tier == Tier.NVME:
            what = f"{op.name} reads a part of {source.tensor} from {source.buffer}, which is read as a whole"
            yield _wrong(op, what, "write its parts there, each into a buffer of its own")
    layer = schedule.model.layer_index(name.layer) if name.layer else None
    if (op.layer, op.microbatch) != (layer, name.microbatch):
        of = f"layer {op.layer}, micro-batch {op.microbatch}"
        fix = f"give it layer {layer}, micro-batch {name.microbatch}"
        yield _wrong(op, f"{op.name} is of {of}, and copies {describe(source.tensor)}", fix)
    here, there = schedule.route(op)
    kind = Kind.PREFETCH if _AWAY.index(there) < _AWAY.index(here) else Kind.OFFLOAD
    if here != there and op.kind != kind:
        yield _wrong(op, f"{op.name} is called {op.kind} and copies from {here} to {there}", f"call it {kind}")


def _amounts(schedule: Schedule, op: Op, amounts: Amounts) -> dict[str, Collection[int]]:
    """What each amount of an op may be; 0 where it is left out."""
    if op.phase == Phase.SYNC:
        return {}
    if op.phase == Phase.COPY:
        return {"nbytes": (amounts.tensor(op.writes[0].tensor),)}
    if op.kind == Kind.UPDATE:
        touched = (access.tensor for access in op.accesses)
        params, multiplied, nbytes = amounts.update(op.layer, op.phase, touched, trained.part(op))
        # a plain store of a gradient may go into memory that the process has only now been given
        stores = op.phase == Phase.ACCUMULATE and len(op.reads) == 1
        fresh = {0, amounts.tensor(op.writes[0].tensor)} if stores else {0}
        return {"nbytes": (nbytes,), "flops": (multiplied,), "params": (params,), "fresh": fresh}
    assert op.layer is not None
    # whether a system's kernels are fused is its own affair
    ways = [
        amounts.compute(op.layer, op.phase, output=op.makes_output, fused=fused, quantised=op.reads_quantised)
        for fused in (True, False)
    ]
    flops, nbytes_of = zip(*ways, strict=True)
    return {"nbytes": set(nbytes_of), "flops": set(flops), "params": (schedule.model.params(op.layer),)}


def _to_the_device(op: Op, tensor: str) -> str:
    cls, kept = parse(tensor).cls, "keep it there with keep_on_device()"
    if cls in tensors.MICROBATCH_CLASSES:
        return "restore() it first"
    if op.phase == Phase.LOSS and parse(tensor).layer == "embed":  # tied embeddings
        return f"name a buffer of the device, loss(embed_weights=..., embed_grad=...), or {kept}"
    if cls in tensors.GRADIENTS:
        return f"name a buffer of the device to add it up in, as slots() makes them, or {kept}"
    return f"prefetch() it first, or {kept}"


def _op_reach(schedule: Schedule, op: Op) -> Iterator[Violation]:
    """Whoever runs an op must be able to wait for the memory that it works on.

    The GPU runs its streams' ops long after the host has queued them, so host memory is in their reach as one end of a
    copy only, and device memory is in no reach of a thread of the host. The global norm, one number, is in both where
    it is on the host, beside what is on the device: by itself it would be read before the GPU has written it.
    """
    if op.kind == Kind.COMPUTE or op.phase == Phase.SYNC:
        return
    copies, on_gpu = op.phase == Phase.COPY, op.on_device
    tiers = {
        access.buffer: tier
        for access in op.accesses
        if (tier := schedule.buffer[access.buffer].tier) != Tier.HOST or access.tensor != NORM
    }
    if on_gpu and (copies or not tiers) and Tier.DEVICE not in tiers.values():
        fix = "name a buffer on the device, or queue it on cpu"
        yield _wrong(op, f"{op.name} copies on {op.stream}, but nothing to or from the device", fix)
    # saved activations are bound to memory as they move; a drive reads and writes memory, not another drive
    moves_saved = (copies or op.phase == Phase.CAST) and any(parse(a.tensor).cls == SAVED for a in op.accesses)
    if len(set(tiers.values())) == 1 and (moves_saved or (copies and Tier.NVME in tiers.values())):
        tier, fix = next(iter(tiers.values())), "copy between device and host, or between host and NVMe"
        tensor = op.accesses[0].tensor
        yield _wrong(op, f"{op.name} ({op.phase}) moves {describe(tensor)} from {tier} to {tier}", fix)
    in_reach = {Tier.DEVICE} if on_gpu else {Tier.HOST}
    if copies:
        in_reach.add(Tier.HOST if on_gpu else Tier.NVME)
    beyond = [buffer for buffer, tier in tiers.items() if tier not in in_reach]
    if beyond:
        who = "a stream of the GPU" if on_gpu else "a thread of the host"
        where = " and ".join(
            f"{some(b for b in beyond if tiers[b] == tier)}, on {tier}"
            for tier in dict.fromkeys(tiers[buffer] for buffer in beyond)
        )
        fix = _to_reach(tiers, copies)
        yield _wrong(op, f"{op.name} ({op.phase}) runs on {op.stream}, {who}, and touches {where}", fix, beyond[0])


def _to_reach(tiers: Mapping[str, Tier], copies: bool) -> str:
    """What to do with an op on these buffers, of which its stream does not reach all."""
    there = set(tiers.values())
    if copies and there == {Tier.DEVICE, Tier.NVME}:
        return "copy it to a buffer of the host first, and on from there: a drive and the device have no link"
    if copies:
        return f"queue it on {'h2d or d2h' if Tier.DEVICE in there else 'nvme_read or nvme_write'}"
    if there == {Tier.DEVICE}:
        return "queue it on compute"
    if there == {Tier.HOST}:
        return "queue it on cpu, or keep what it touches on the device"
    off_host, off_device = (some(b for b, at in tiers.items() if at != tier) for tier in (Tier.HOST, Tier.DEVICE))
    return f"copy {off_host} to the host and queue it on cpu, or {off_device} to the device and queue it on compute"


_AWAY = (Tier.DEVICE, Tier.HOST, Tier.NVME)  # each farther from the GPU than the one before
_AMOUNTS = {"nbytes": "bytes", "flops": "FLOPs", "params": "parameters", "fresh": "fresh bytes"}
_PHASES_OF = {
    Kind.PREFETCH: (Phase.COPY, Phase.SYNC),
    Kind.OFFLOAD: (Phase.COPY, Phase.SYNC),
    Kind.COMPUTE: COMPUTE,
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


def _wrong(op: Op | None, message: str, fix: str, buffer: str = "", on: str = "") -> Violation:
    """`op`: where it shows; None where it is about no op that there is."""
    return Violation(rule="structure", op=op.name if op else "", on=on, buffer=buffer, message=message, fix=fix)


def _list(phases: tuple[Phase, ...]) -> str:
    return ", ".join(phases)
