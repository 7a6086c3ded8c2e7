"""Where two runs part, in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from analysis.trace_diff import Diff, Occurrence, Parting
from schedules.op import Op, Phase, Stream, Tier
from schedules.schedule import Schedule
from sim.units import seconds

_VERBS = {
    Phase.EMBED: "embedding",
    Phase.LOSS: "loss",
    Phase.ADAM: "update",
    Phase.ACCUMULATE: "gradient addition",
    Phase.NORM: "gradient norm",
    Phase.SYNC: "host's wait",
}
_COPIES = {
    (Tier.HOST, Tier.DEVICE): "H2D",
    (Tier.DEVICE, Tier.HOST): "D2H",
    (Tier.DEVICE, Tier.DEVICE): "copy within the device",
}


def name_of(schedule: Schedule, op: Op) -> str:
    """An op for people: "D2H of layer 12", "backward of layer 11 (micro-batch 1)"."""
    verb = _copy(schedule, op) if op.phase == Phase.COPY else _VERBS.get(op.phase, str(op.phase))
    parts = [verb]
    if op.layer is not None and op.phase not in (Phase.EMBED, Phase.LOSS):
        ends = {schedule.model.embed: "of the embedding", schedule.model.head: "of the head"}
        parts.append(ends.get(op.layer, f"of layer {op.layer}"))
    elif op.layer is None:
        parts.append(f"({op.name})")
    if op.microbatch is not None and schedule.workload.accumulation > 1:
        parts.append(f"(micro-batch {op.microbatch})")
    return " ".join(parts)


def _copy(schedule: Schedule, op: Op) -> str:
    """By where it leads, whatever it is queued on; of a recording, which does not say, by that."""
    known = None if schedule.is_recording else _COPIES.get(schedule.route(op))
    return known or str(op.stream).upper().replace("_", " ")


def sentences(found: Diff, at_most: int = 12) -> list[tuple[int, str]]:
    """(ns more, sentence) of the ops that lasted longer or shorter, largest first."""
    changed = sorted((p for p in found.partings if p.duration_ns), key=lambda p: -abs(p.duration_ns))
    return [(p.duration_ns, _lasted(found, p)) for p in changed[:at_most]]


def idle_sentences(found: Diff, at_most: int = 12) -> list[tuple[int, str]]:
    """(ns more, sentence) where a stream stood idle longer or shorter, and what it waited for; largest first."""
    changed = sorted((p for p in found.partings if p.idle_ns), key=lambda p: -abs(p.idle_ns))
    return [(p.idle_ns, _stood(found, p)) for p in changed[:at_most]]


def not_replayed(streams: Sequence[Stream]) -> str:
    """Why it is not told what moves the step, for streams whose ops overlapped; "" where there are none."""
    if not streams:
        return ""
    return (
        f"What moves the step is not told: on {' and '.join(streams)} recorded ops ran beside each other, of several "
        "CUDA streams or of a graph, and a replay would run them one after another."
    )


def _time(ns: float) -> str:
    return seconds(ns / 1e9)


def _lasted(found: Diff, parting: Parting) -> str:
    op, name = parting.op, name_of(found.schedule, parting.op)
    first, second = parting.first.duration_ns, parting.second.duration_ns
    if op.phase == Phase.COPY and first and second:
        text = f"{name} ran at {op.nbytes / second:.3g} GB/s, {found.first_called} says {op.nbytes / first:.3g}"
    else:
        text = f"{name} took {_time(second)}, {found.first_called} says {_time(first)}"
    if parting.duration_ns > 0 and parting.beside is not None:
        whole = parting.beside_ns >= second
        text += f"; {name_of(found.schedule, parting.beside)} was running"
        text += "" if whole else f" for {_time(parting.beside_ns)} more of it"
    return text


def _stood(found: Diff, parting: Parting) -> str:
    op, name = parting.op, name_of(found.schedule, parting.op)
    text = f"{op.stream} stood idle for {_time(parting.second.idle_ns)} before {name}, "
    text += f"in {found.first_called} for {_time(parting.first.idle_ns)}; "
    if parting.idle_ns > 0:
        return text + _cause(found, parting, parting.second)
    return text + "there " + _cause(found, parting, parting.first)


def _cause(found: Diff, parting: Parting, ran: Occurrence) -> str:
    on = ran.released_by
    if on is None:
        return "the host had not issued it" if ran.by_issue else "what it waited for was not recorded"
    if on.stream == parting.op.stream:
        return f"it stood behind {name_of(found.schedule, on)}"
    longer = next(p.duration_ns for p in found.partings if p.op.name == on.name)
    how = f", which ran {_time(abs(longer))} {'longer' if longer > 0 else 'shorter'}" if longer else ""
    return f"it waited for {name_of(found.schedule, on)}{how}"
