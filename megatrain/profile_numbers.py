"""From what was measured to the numbers of a hardware profile: means, medians, fitted lines, and where each is from."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatrain import readings, this_machine
from megatrain.cores import usable_cores
from megatrain.native import adam as native
from megatrain.rates import Rate
from megatrain.this_machine import Here, machine_name, today
from megatrain.way import Way
from schedules.op import Op, Phase, Tier
from schedules.schedule import Schedule
from sim.machine import Gpu, HardwareProfile, Host, Issue, Link, Links, Measured, Nvme, Readings, Table, Value
from sim.profile_coverage import layer_name
from sim.signature import timed

EXTREMES = 0.05  # of the samples, left out at either end
IN_CACHES = 1 << 30  # bytes: of an op that moves no more some may never reach memory

Shares = Sequence[Mapping[str, Sequence[float]]]  # what `megatrain.readings.shares` tells, each time it was read
Tell = Callable[..., Value]  # number, unit, and a note on where it came from


@dataclass(frozen=True, kw_only=True)
class _Ops:
    """What single ops showed, over all schedules. Samples and workspace are by signature."""

    samples: dict[str, list[float]]
    workspace: dict[str, int]
    layers: dict[str, int]  # what was timed of -> its parameters
    copies: dict[str, list[tuple[int, float]]]  # direction -> (bytes, ns)
    adam: list[tuple[str, Op, float]]  # precision, op on the host, ns
    gaps: list[float]


def _gather(found: Sequence[tuple[Schedule, Mapping[str, Any]]]) -> _Ops:
    ops = _Ops(samples={}, workspace={}, layers={}, copies={"h2d": [], "d2h": []}, adam=[], gaps=[])
    for schedule, part in found:
        model, durations = schedule.model, np.array(part["durations_ns"], dtype=float)
        ops.layers.update({layer_name(model, i): model.params(i) for i in model.layers})
        medians = np.median(durations, axis=0)
        ops.gaps.extend(np.median(np.array(part["gaps_ns"], dtype=float), axis=0))
        for name, nbytes in part["workspace"].items():
            ops.workspace[name] = max(nbytes, ops.workspace.get(name, 0))
        for position, key in timed(schedule).items():
            ops.samples.setdefault(key, []).extend(durations[:, position])
        for position, op in enumerate(schedule.ops):
            if op.phase == Phase.COPY and (direction := _direction(op, schedule)):
                ops.copies[direction].append((op.nbytes, medians[position]))
            if op.phase == Phase.ADAM and not op.on_device:
                ops.adam.append((schedule.workload.precision, op, medians[position]))
    return ops


def _direction(op: Op, schedule: Schedule) -> str | None:
    return {(Tier.HOST, Tier.DEVICE): "h2d", (Tier.DEVICE, Tier.HOST): "d2h"}.get(schedule.route(op))


def profile_of(
    found: Sequence[tuple[Schedule, Mapping[str, Any]]],
    streams: Sequence[Mapping[str, Any]],
    spaces: Sequence[Mapping[str, int]],
    shares: Shares,
    whole: Mapping[str, Mapping[str, Any]],
    at: Here,
    way: Way,
) -> HardwareProfile:
    """The profile of a machine.

    Args:
        found: by schedule, what `megatrain.profile.alone` tells.
        streams: what `megatrain.profile.in_a_run` tells, of some schedules.
        spaces: what `megatrain.profile.workspaces` tells, of others.
        shares: what `megatrain.readings.shares` tells, each time that it was read.
        whole: what else `megatrain.readings` tells, by what was read.
        way: in which all of it was computed.
    """
    date = today()
    others = f", {at.optimizer_threads} on the optimizer's" if at.optimizer_threads != 1 else ""
    threads = f"1 thread a stream{others}, {torch.get_num_threads()} on the issuing thread"
    if why := native.why_not():
        threads += f", the optimizer in several passes ({why.splitlines()[0]})"
    source = f"measured on {machine_name()}, {date}, torch {torch.__version__}, ops {way}, {threads}"
    ops = _gather(found)
    for part in spaces:
        ops.workspace.update({name: max(nbytes, ops.workspace.get(name, 0)) for name, nbytes in part.items()})

    def value(number: float, unit: str, note: str = "") -> Value:
        return Value(value=float(number), unit=unit, source=f"{source}{note and f'; {note}'}")

    links = _links(ops, whole, at, value)
    # a copy reads and writes memory; the machine can do at least what any of its ops was seen to do
    passes = 1 if at.on_gpu and not at.integrated else 2
    dram = max(_moved(whole, "copy"), passes * links.h2d.bandwidth.value, passes * links.d2h.bandwidth.value)
    if at.on_gpu:  # a thread that copies reads its target before it writes there; a GPU's copies move what they move
        updated = most_moved((op, ns) for _, op, ns in ops.adam)
        dram = max(dram, updated, _moved(whole, "update"), _moved_together(whole))
    return HardwareProfile(
        name=f"{at.device}, {usable_cores()} cores",
        description="a GPU and the host it is in"
        if at.on_gpu
        else "this machine's CPU as host and device: a thread per stream, both memories in RAM",
        date=date,
        versions=this_machine.versions(),
        way=str(way),
        mode="measured",
        gpu=_gpu(shares, whole, dram, at, value),
        host=_host(ops, shares, dram, at, value),
        links=links,
        issue=_issue(ops.gaps, streams, value),
        unified_memory=value(max(at.free_bytes, at.device_bytes), "bytes", "what was free") if at.integrated else None,
        nvme=_nvme(whole["nvme"], sum(whole["nvme_both"]["shares"]), dram, at, value) if "nvme" in whole else None,
        measured=_measured(ops, streams, whole, source),
    )


def _gpu(shares: Shares, whole: Mapping[str, Mapping[str, Any]], dram: float, at: Here, value: Tell) -> Gpu:
    reserve = f"what others left, less {this_machine.DEVICE_RESERVE >> 30} GiB, or {this_machine.FRAGMENTS:.0%} if more"
    reserve += ", for CUDA, libraries and fragments"
    memory, copy = (reserve, "a copy on the device") if at.on_gpu else ("half of the RAM", "the host's")
    bandwidth = _median(whole, "products", "copy") if at.on_gpu else dram
    slower = max(0.0, 1 / statistics.mean(one["copies"][0] for one in shares) - 1) if at.on_gpu else 0.0
    return Gpu(
        name=at.device,
        memory=value(at.device_bytes, "bytes", memory),
        memory_bandwidth=value(bandwidth, "B/s", copy),
        matmul_flops=value(_median(whole, "products", "bf16"), "FLOP/s", "one stream, square matrices"),
        matmul_efficiency=value(1.0, "fraction", "the peak is a measured rate"),
        attention_efficiency=value(1.0, "fraction", "in the op times"),
        memory_efficiency=value(1.0, "fraction", "the bandwidth is a measured rate"),
        fp32_flops=value(_median(whole, "products", "fp32"), "FLOP/s", "one stream, square matrices"),
        copy_slowdown=value(
            min(1.0, slower), "fraction", "forward beside copies" if at.on_gpu else "in the cores that streams share"
        ),
    )


def _host(ops: _Ops, shares: Shares, dram: float, at: Here, value: Tell) -> Host:
    thread = None if at.on_gpu else value(1.0, "cores", "one thread serves each stream")
    rate = _adam_rate(ops.adam)
    if at.on_gpu:
        cores = value(usable_cores(), "cores")
    else:
        forward = {beside: statistics.mean(sum(one[beside]) for one in shares) for beside in ("optimizer", "copies")}
        cores = value(
            min(max(1.0, statistics.mean(forward.values())), float(usable_cores())),
            "cores",
            f"what two busy threads get done, of one alone: {forward['optimizer']:.2f} forward beside the "
            f"optimizer, {forward['copies']:.2f} forward beside copies, means of {len(shares)}",
        )
    return Host(
        name=machine_name(),
        memory=value(at.host_bytes, "bytes", "what was free" if at.on_gpu else "half of the RAM"),
        memory_bandwidth=value(dram, "B/s", "read and written, the best of all readings"),
        cores=cores,
        adam_efficiency=value(_share_of(ops.adam, dram), "fraction"),
        adam_params_per_s=None if rate is None else value(rate, "params/s", "one layer after another"),
        adam_threads=thread,
        copy_threads=thread,
        compute_threads=thread,
    )


def _links(ops: _Ops, whole: Mapping[str, Mapping[str, Any]], at: Here, value: Tell) -> Links:
    """From the copies of the schedules; a direction in which none copies gets what large plain copies have."""
    plain = readings.SIZES[-1]
    found = {}
    for direction, points in ops.copies.items():
        usual = [(plain, plain / _median(whole, "links", f"{direction}/{plain}/alone") * 1e9)]
        found[direction] = _link(points or usual, value)
    alone = [link.bandwidth.value for link in found.values()]
    if at.on_gpu:
        both = sum(_median(whole, "links", f"{direction}/{plain}/both") for direction in found)
        duplex = value(max(both, *alone), "B/s", "both at once")
    else:
        note = "the sum of both: a thread each, which only the memory bandwidth and the cores hold back"
        duplex = value(sum(alone), "B/s", note)
    return Links(h2d=found["h2d"], d2h=found["d2h"], duplex=duplex)


def _moved(whole: Mapping[str, Mapping[str, Any]], what: str) -> float:
    """The best of the readings of host memory that are called so; 0 if there are none."""
    return max((float(rate[1]) for key, rate in whole["dram"].items() if key.startswith(f"{what}/")), default=0.0)


def _moved_together(whole: Mapping[str, Mapping[str, Any]]) -> float:
    """What updates and copies one way move at once, in the mean of both ways, with the best number of threads."""
    each: dict[str, list[float]] = {}
    for key, rate in whole["dram"].items():
        what, count, _ = key.split("/")
        if what == "all":
            each.setdefault(count, []).append(float(rate[1]))
    return max(map(statistics.mean, each.values()), default=0.0)


def _median(whole: Mapping[str, Mapping[str, Any]], part: str, key: str) -> float:
    return float(whole[part][key][1])


def _measured(
    ops: _Ops, streams: Sequence[Mapping[str, Any]], whole: Mapping[str, Mapping[str, Any]], source: str
) -> Measured:
    def table(values: Mapping[str, float], unit: str, note: str) -> Table:
        return Table(values={k: round(values[k]) for k in sorted(values)}, unit=unit, source=f"{source}; {note}")

    def several(part: str, unit: str) -> Readings | None:
        if part not in whole:
            return None
        values = {name: _three(rate) for name, rate in whole[part].items() if name != "copy"}
        return Readings(values=values, unit=unit, source=f"{source}; least, median and most of one reading's windows")

    of_host: dict[str, Sequence[float]] = {
        f"{told}/{kind}": times
        for told, name in (("issue", "issued"), ("handing over", "handed"))
        for kind, times in _by_kind(streams, name).items()
    }
    of_host |= {"woken": [ns for part in streams for ns in part["woken"]], "gap between serial ops": ops.gaps}
    return Measured(
        op_times=table({k: _typical(v) for k, v in ops.samples.items()}, "ns", "each op alone, in place"),
        op_noise=table({k: _noise(v) for k, v in ops.samples.items()}, "ns", "each op alone, in place"),
        workspace=table(ops.workspace, "bytes", "peak of what torch allocates during the op and frees after"),
        layers=table(ops.layers, "params", "counted"),
        links=several("links", "B/s"),
        dram=several("dram", "B/s"),
        adam=several("adam", "params/s"),
        products=several("products", "FLOP/s"),
        nvme=several("nvme", "B/s"),
        host=Readings(
            values={name: _three(np.percentile(times, (5, 50, 95))) for name, times in of_host.items() if len(times)},
            unit="ns",
            source=f"{source}; 5th, 50th and 95th percentile",
        ),
    )


def _three(values: Sequence[float] | Rate | np.ndarray) -> tuple[int, int, int]:
    least, median, most = (round(max(0.0, float(v))) for v in values)
    return least, median, most


def _typical(samples: Sequence[float]) -> float:
    """The mean of all but the extremes. A step's time is a sum of ops, so it is means that add up to it: medians leave
    out that an op is late oftener than early. The extremes are what stopped the machine, and not of the op.
    """
    cut = int(len(samples) * EXTREMES)
    return statistics.mean(sorted(samples)[cut : len(samples) - cut])


def _noise(samples: Sequence[float]) -> float:
    low, high = np.percentile(samples, (16, 84))
    return float(high - low) / 2


def _link(points: Sequence[tuple[int, float]], value: Tell) -> Link:
    """Latency and bandwidth of copies: the line through (bytes, ns) of least squared error, never below zero."""
    sizes, times = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    slope, latency = np.polyfit(sizes, times, 1) if len(set(sizes)) > 1 else (0.0, 0.0)
    if slope <= 0 or latency < 0:
        slope, latency = float(times.sum() / sizes.sum()), 0.0
    return Link(
        bandwidth=value(1e9 / slope, "B/s"),
        latency=value(latency, "ns"),
        half_size=value(0.0, "bytes", "in the latency"),
    )


def _nvme(found: Mapping[str, Any], both: float, dram: float, at: Here, value: Tell) -> Nvme:
    """As training reads and writes; of small pieces, the smallest one at a time, what each takes beyond its bytes."""
    read, write = (min(float(found[readings.as_used(verb)][1]), dram) for verb in ("read", "write"))
    piece = readings.PIECES[0]
    small = piece / float(found[f"read/{piece}/1"][1]) - piece / read
    return Nvme(
        read=value(read, "B/s", "large pieces, as many at once as in training"),
        write=value(write, "B/s", "large pieces, as many at once as in training"),
        both=value(min(2.0, max(1.0, both)), "fraction", "one of each at once, for ever"),
        capacity=value(at.drive_bytes, "bytes", "what was free"),
        latency=value(max(0.0, small * 1e9), "ns", f"reads of {piece >> 10} KiB, one at a time"),
    )


def _adam_rate(steps: Sequence[tuple[str, Op, float]]) -> float | None:
    """Parameters per second; None where precisions differ, and the op times alone tell them apart."""
    if len({precision for precision, _, _ in steps}) != 1:
        return None
    return statistics.median(op.params / duration_ns * 1e9 for _, op, duration_ns in steps)


def most_moved(timed_ns: Iterable[tuple[Op, float]]) -> float:
    """Bytes of host memory per second that one op moved, of those that no cache holds; 0 if there are none.

    An optimizer that updates in place moves more than a copy, whose target is read before it is written.
    """
    return max((op.nbytes / ns * 1e9 for op, ns in timed_ns if op.nbytes > IN_CACHES and ns), default=0.0)


def _share_of(steps: Sequence[tuple[str, Op, float]], dram: float) -> float:
    """The memory traffic of the optimizer's step over the bandwidth: what passes that were not timed attain."""
    rates = [op.nbytes / duration_ns * 1e9 for _, op, duration_ns in steps]
    return min(1.0, statistics.median(rates) / dram) if rates else 1.0


def _by_kind(streams: Sequence[Mapping[str, Any]], name: str) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for part in streams:
        for kind, times in part[name].items():
            found.setdefault(kind, []).extend(times)
    return found


def _issue(gaps: Sequence[float], streams: Sequence[Mapping[str, Any]], value: Tell) -> Issue:
    """By kind, from one issue to the next, or what handing over to a GPU takes, by threads that take turns; a blocking
    wait is the rest of the gap between serialised ops."""
    issued, handed, gap = _by_kind(streams, "issued"), _by_kind(streams, "handed"), statistics.median(gaps)
    medians = {kind: statistics.median(times) for kind, times in issued.items()}
    # a kind that no run hands over freely is taken to cost what the others do
    usual = statistics.median(ns for times in issued.values() for ns in times) if issued else gap / 2

    def handing(kind: str) -> Value:
        if launched := handed.get(kind):
            return value(statistics.median(launched), "ns", f"handing over, median of {len(launched)}")
        times = issued.get(kind)
        note = f"from issue to issue, median of {len(times)}" if times else "as other ops"
        return value(medians.get(kind, usual), "ns", note)

    woken = [ns for part in streams for ns in part["woken"]]
    return Issue(
        compute=handing("compute"),
        copy=handing("copy"),
        update=handing("update"),
        sync=value(max(0.0, gap - usual), "ns", "between serialised ops, less handing the next one over"),
        wake=value(
            statistics.mean(woken),
            "ns",
            f"mean of {len(woken)} starts of idle streams in whole steps, cores shared as in any run",
        )
        if woken
        else None,
    )
