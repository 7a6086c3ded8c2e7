"""What an op asks of a machine: how long it runs alone, and how much of each shared resource it then uses.

The ladder of terms is here too: each can be switched off, to show how much accuracy it buys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from schedules import policies, trained
from schedules.errors import InputError, Refused
from schedules.flops import attention_flops, attention_padding, op_flops
from schedules.model import FP32, ModelSpec
from schedules.op import Kind, Op, Phase, Stream, Tier
from schedules.schedule import Schedule
from schedules.traffic import product_bytes
from schedules.workload import PRECISIONS, Workload
from sim.interpolation import between
from sim.machine import HardwareProfile, Nvme, Value
from sim.profile_coverage import command, covered, is_of_another, lacks_kind
from sim.signature import in_words, is_timed, needs_time, signature, tabulated

# Resources, each of capacity 1. Ops that use one together share it.
H2D, D2H, DUPLEX = "link.h2d", "link.d2h", "link.duplex"
DRAM, CORES = "dram", "cores"
GPU, HBM = "gpu", "hbm"
NVME_READ, NVME_WRITE, NVME_BOTH = "nvme.read", "nvme.write", "nvme.both"

# FLOP a parameter, at a GPU's fp32 rate, that an update with 8-bit moments takes: their codes are looked up and rounded
# to. An H200, of 67 TFLOP/s, updates 140 Gparam/s, where its memory would allow 420 (analysis/results/gpu/h200).
FLOPS_OF_8BIT = 478

# Times that products in TF32, which linear attention's are, take longer than in 16 bits (NVIDIA's datasheets of A100,
# H100 and B200).
TF32 = 2.0

HOUR_NS = 3.6e12
LONGEST_NS = 1e13  # that an op may take: the sum over many steps of many ops still fits 64 bits


@dataclass(frozen=True, kw_only=True)
class Unmeasured:
    """An op that a measured profile has no time for, and what that profile covers, in words.

    signature: as `sim.signature` makes it.
    kind: what kind of op it is, in words, where the profile has times of such steps but of no op of this kind; else "".
    command: what measures the missing ops: all of such a step, or where the kind is lacking, those of this policy.
    workload: the schedule's.
    """

    signature: str
    kind: str
    machine: str
    covered: str
    command: str
    workload: Workload

    def __str__(self) -> str:
        return f"no measured time for {self.signature}{f', {self.kind}' if self.kind else ''}"


class MissingCost(InputError):
    """A measured profile has no time for an op; the message says how to measure it, by `measure_with` if given."""

    def __init__(self, what: Unmeasured, measure_with: str | None = None) -> None:
        covers = f"{what.covered}, but no such op" if what.kind else what.covered
        super().__init__(
            f"profile {what.machine} has {what}; it covers {covers}; measure it with: {measure_with or what.command}"
        )
        self.what, self.measure_with = what, measure_with

    def __reduce__(self) -> tuple[type[MissingCost], tuple[Unmeasured, str | None]]:
        return type(self), (self.what, self.measure_with)  # it may come from another process


class TooLong(InputError):
    """An op would take longer than LONGEST_NS."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What the simulation counts. With all off, ops run as if alone, issued for free, at full bandwidth.

    issue: the host thread spends time on every op it issues, and a stream takes time to notice what releases its ops.
    size_dependent_bandwidth: copies have a latency, and small ones do not reach the full bandwidth.
    sharing: ops that run at once share link, host memory, cores and GPU.
    compute_slowdown: GPU work goes slower while a copy over the link runs.
    noise: standard deviation of the logarithm of each op's duration; 0 is none.
    """

    issue: bool = True
    size_dependent_bandwidth: bool = True
    sharing: bool = True
    compute_slowdown: bool = True
    noise: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """What one op asks for.

    duration_ns: its time running alone.
    usage: the share in [0, 1] of each resource that it uses while it runs alone.
    issue_ns: the host thread's time until the op is in its queue.
    wake_ns: how long its stream takes to notice that the op is issued, or that what it waits for on another stream has
        ended.
    """

    duration_ns: int
    usage: Mapping[str, float] = field(default_factory=dict)
    issue_ns: int = 0
    wake_ns: int = 0


def demands(schedule: Schedule, profile: HardwareProfile, terms: Terms = Terms()) -> tuple[Demand, ...]:
    """The demand of every op, in program order.

    The time that the host takes to wake up from a wait is counted as issue of the op that follows.

    Raises:
        MissingCost: the profile is a measured one and lacks an op's time.
        Refused: the schedule uses NVMe and the profile has none.
        TooLong: an op would take longer than LONGEST_NS.
    """
    if any(buffer.tier == Tier.NVME for buffer in schedule.buffers):
        _drive(profile)  # tells that there is none before it tells of an op that was not measured
    waits = {wait.op for wait in schedule.waits}
    found = []
    for position, op in enumerate(schedule.ops):
        before = schedule.ops[position - 1]  # of the first op: the last op of the step before
        host_waited = before.blocking or (before.stream == Stream.HOST and before.name in waits)
        issue = (_issue_ns(op, profile) + host_waited * profile.issue.sync.value) if terms.issue else 0.0
        duration, usage = _work(op, schedule, profile, terms)
        # what the host itself takes to wake up is in the issue of what follows
        wake = profile.issue.wake if terms.issue and op.stream != Stream.HOST else None
        wake_ns = 0 if wake is None else round(_bounded(wake.value, op, profile))
        issue_ns = round(_bounded(issue, op, profile))
        found.append(Demand(duration_ns=duration, usage=usage, issue_ns=issue_ns, wake_ns=wake_ns))
    return tuple(found)


def peak_flops(profile: HardwareProfile, workload: Workload) -> float:
    """Peak matrix rate, FLOP/s, in the element type that the workload computes with.

    MFU refers to it. Where blocks multiply in fewer bits it is still the rate of the activations' type.
    """
    fp32 = workload.bytes.activation == 4
    return (profile.gpu.fp32_flops if fp32 else profile.gpu.matmul_flops).value


def issue_kind(op: Op) -> str:
    """The field of a profile's `issue` that says what the op costs to issue; an update on the device is a compute."""
    if op.phase == Phase.COPY:
        return "copy"
    return "compute" if op.on_device else "update"


def _issue_ns(op: Op, profile: HardwareProfile) -> float:
    if op.stream == Stream.HOST:
        return 0.0  # the host thread does the work itself: nothing is handed over
    cost: Value = getattr(profile.issue, issue_kind(op))
    return cost.value


def _work(op: Op, schedule: Schedule, profile: HardwareProfile, terms: Terms) -> tuple[int, Mapping[str, float]]:
    if op.phase == Phase.SYNC:
        return 0, {}
    if op.phase == Phase.COPY:
        return _copy(op, schedule, profile, terms)
    if op.kind == Kind.COMPUTE:
        return _compute(op, schedule, profile)
    return _update(op, schedule, profile)


# ---- copies


def _copy(op: Op, schedule: Schedule, profile: HardwareProfile, terms: Terms) -> tuple[int, Mapping[str, float]]:
    """A copy goes at the pace of the slowest resource on its way, and uses all of that one.

    A copy within a tier may have been timed: then it takes as long as measured.
    """
    rates, latency_ns, half_size = _way(*schedule.route(op), profile)
    slowest = min(rates, key=lambda resource: rates[resource])  # the first of equals: the copy engine
    if not terms.size_dependent_bandwidth:
        latency_ns, half_size = 0.0, 0.0
    known = _tabulated_ns(op, schedule, profile)
    duration = latency_ns + (op.nbytes + half_size) / rates[slowest] * 1e9 if known is None else known
    usage = {resource: _share(op.nbytes, duration, rate) for resource, rate in rates.items()}
    if known is None:
        usage[slowest] = 1.0
    if profile.host.copy_threads is not None:
        usage[CORES] = min(1.0, profile.host.copy_threads.value / profile.host.cores.value)
    return _whole(duration, op, profile), usage


def _way(source: Tier, target: Tier, profile: HardwareProfile) -> tuple[dict[str, float], float, float]:
    """From tier to tier: bytes/s of the payload through each resource, latency in ns, half size in bytes."""
    rates: dict[str, float] = {}
    latency_ns = half_size = 0.0
    if (source == Tier.DEVICE) != (target == Tier.DEVICE):
        name, link = (H2D, profile.links.h2d) if target == Tier.DEVICE else (D2H, profile.links.d2h)
        rates |= {name: link.bandwidth.value, DUPLEX: profile.links.duplex.value}
        latency_ns, half_size = link.latency.value, link.half_size.value
    if Tier.NVME in (source, target):
        drive = _drive(profile)
        latency_ns += drive.latency.value
        # a drive that takes turns has one capacity, of which whoever reads or writes alone has all
        name, alone = (NVME_READ, drive.read) if source == Tier.NVME else (NVME_WRITE, drive.write)
        rates |= {name: alone.value, NVME_BOTH: alone.value * drive.both.value}
    in_dram = {Tier.HOST, Tier.DEVICE} if profile.one_memory else {Tier.HOST}
    if passes := (source in in_dram) + (target in in_dram):
        rates[DRAM] = profile.host.memory_bandwidth.value / passes
    if source == target == Tier.DEVICE:
        rates[HBM] = profile.gpu.memory_bandwidth.value * profile.gpu.memory_efficiency.value / 2
    return rates, latency_ns, half_size


def _drive(profile: HardwareProfile) -> Nvme:
    if profile.nvme is None:
        measure = "; megatrain profile --nvme FOLDER measures one" if profile.mode == "measured" else ""
        raise Refused(f"does not fit: the schedule keeps tensors on NVMe, and {profile.name} has none{measure}")
    return profile.nvme


# ---- compute


def _compute(op: Op, schedule: Schedule, profile: HardwareProfile) -> tuple[int, Mapping[str, float]]:
    model, workload = schedule.model, schedule.workload
    duration = _measured(op, schedule, profile)
    if duration is None:
        duration = _roofline_ns(op, model, workload, profile)
    return _whole(duration, op, profile), _of_device(op, duration, profile)


def _of_device(op: Op, duration_ns: float, profile: HardwareProfile) -> dict[str, float]:
    """What an op that computes on the device uses: the GPU, without one the host's cores, and what memory is one."""
    usage = {GPU: 1.0}
    if profile.host.compute_threads is not None:
        usage[CORES] = min(1.0, profile.host.compute_threads.value / profile.host.cores.value)
    if profile.one_memory:
        usage[DRAM] = _share(op.nbytes, duration_ns, profile.host.memory_bandwidth.value)
    return usage


def _measured(op: Op, schedule: Schedule, profile: HardwareProfile) -> float | None:
    """The measured time of an op in ns, between measured shapes if need be; None in a datasheet profile."""
    time_ns = _tabulated_ns(op, schedule, profile)
    if time_ns is None and profile.mode == "measured":
        raise MissingCost(_unmeasured(op, schedule, profile))
    return time_ns


def _unmeasured(op: Op, schedule: Schedule, profile: HardwareProfile) -> Unmeasured:
    key = signature(op, schedule.model, schedule.workload)
    lacks, known = lacks_kind(profile, key), schedule.policy in policies.names()
    other = is_of_another(profile, schedule.model, op.layer)
    return Unmeasured(
        signature=key,
        kind=in_words(key) if lacks else "",
        machine=profile.name,
        covered=f"another model called {schedule.model.name}" if other else covered(profile),
        command=command(schedule.model.name, [schedule.workload], to_measure(schedule), profile, alone=lacks and known),
        workload=schedule.workload,
    )


def to_measure(schedule: Schedule) -> str:
    """Its policy with its knobs, as `megatrain profile --policy` takes them.

    Of a policy of a user's file it is YOURS.py: nothing here says where that is, and no policy has its name.
    """
    name = schedule.policy if schedule.policy in policies.names() else "YOURS.py"
    return " ".join([name, *policies.changed(schedule)])


def _tabulated_ns(op: Op, schedule: Schedule, profile: HardwareProfile) -> float | None:
    """The measured time of an op in ns, None if the profile has none. A part of a layer takes its part of the time."""
    if profile.mode == "datasheet" or profile.measured is None or profile.measured.op_times is None:
        return None
    if not is_timed(op, schedule) or is_of_another(profile, schedule.model, op.layer):
        return None
    table, key = profile.measured.op_times, signature(op, schedule.model, schedule.workload)
    time_ns = tabulated(table, key, schedule.workload, between)
    if time_ns is None and (part := trained.part(op)) is not None:
        of_layer = tabulated(table, key.rpartition("/")[0], schedule.workload, between)
        return None if of_layer is None else of_layer / part.of
    return time_ns


def _roofline_ns(op: Op, model: ModelSpec, workload: Workload, profile: HardwareProfile) -> float:
    """An estimate where nothing is measured: matrix products, attention, and the pointwise kernels between them.

    Products take as long as their FLOPs, or as the traffic of their operands and results if that is longer; attention
    has an efficiency of its own. Pointwise kernels move the rest of the op's bytes.
    """
    gpu, peak = profile.gpu, peak_flops(profile, workload)
    attention = op.flops * _attention_share(op, model, workload)
    products_s = (op.flops - attention) / _product_rate(op, model, workload, profile)
    bandwidth = gpu.memory_bandwidth.value * gpu.memory_efficiency.value
    of_products = min(op.nbytes, _product_bytes(op, model, workload))
    return 1e9 * (
        max(products_s, of_products / bandwidth)
        + attention * _attention_passes(op, model, workload) / (peak * gpu.attention_efficiency.value)
        + (op.nbytes - of_products) / bandwidth
    )


def _product_rate(op: Op, model: ModelSpec, workload: Workload, profile: HardwareProfile) -> float:
    """FLOP/s that an op's matrix products sustain. Raises as `fp8_rate` does."""
    if workload.matmul is None or op.layer is None or not model.is_block(op.layer):
        return peak_flops(profile, workload) * profile.gpu.matmul_efficiency.value
    return fp8_rate(profile, workload)


def fp8_rate(profile: HardwareProfile, workload: Workload) -> float:
    """FLOP/s that the blocks' products sustain in the workload's 8 bits. Raises Refused where nothing states it."""
    gpu = profile.gpu
    if gpu.fp8_flops is None or gpu.fp8_efficiency is None:
        rates = {"gpu.fp8_flops": gpu.fp8_flops, "gpu.fp8_efficiency": gpu.fp8_efficiency}
        lacks = " and ".join(path for path, value in rates.items() if value is None)
        raise Refused(
            f"{profile.name} states no rate of {workload.matmul} products: leave out matmul, or give it {lacks}"
        )
    return gpu.fp8_flops.value * gpu.fp8_efficiency.value


def _product_bytes(op: Op, model: ModelSpec, workload: Workload) -> int:
    if op.layer is None:
        return 0
    return product_bytes(model, op.layer, op.phase, workload, output=op.makes_output)


def _attention_passes(op: Op, model: ModelSpec, workload: Workload) -> float:
    """Times that attention's rate, which is of 16 bits where activations have so many, is needed for its FLOPs."""
    if op.layer is None or op.layer not in model.blocks:
        return 1.0
    if model.recurrence(op.layer) is not None:
        return TF32 if workload.bytes.activation < FP32 else 1.0
    return attention_padding(model, op.layer)


def _attention_share(op: Op, model: ModelSpec, workload: Workload) -> float:
    """The fraction of a block op's FLOPs that is attention's: two products forward, four backward."""
    if op.layer is None or op.layer not in model.blocks:
        return 0.0
    attention = attention_flops(model, op.layer, workload) * (2 if op.phase == Phase.BACKWARD else 1)
    return attention / op_flops(model, op.layer, op.phase, workload, output=op.makes_output)


# ---- updates


def _update(op: Op, schedule: Schedule, profile: HardwareProfile) -> tuple[int, Mapping[str, float]]:
    """As measured; else a step of the optimizer by its rate, and any other pass over memory by its traffic.

    Writing into pages that the system has yet to provide goes at one thread's pace, where the profile has that, and
    where the op was not timed with such pages.
    """
    gpu, host = profile.gpu, profile.host
    known = duration = _tabulated_ns(op, schedule, profile)
    if duration is None and needs_time(op):
        if op.phase == Phase.ADAM and host.adam_params_per_s is not None and not op.on_device:
            duration = op.params / host.adam_params_per_s.value * 1e9
        else:
            duration = _measured(op, schedule, profile)
    if duration is None and op.on_device:
        duration = op.nbytes / (gpu.memory_bandwidth.value * gpu.memory_efficiency.value) * 1e9
        if op.phase == Phase.ADAM and PRECISIONS[schedule.workload.precision].state_per_block:
            duration = max(duration, op.params * FLOPS_OF_8BIT / gpu.fp32_flops.value * 1e9)
        # Muon's products, in bf16 whatever the weights are, come between its passes over memory
        duration += op.flops / (gpu.matmul_flops.value * gpu.matmul_efficiency.value) * 1e9
    elif duration is None:
        duration = op.nbytes / (host.memory_bandwidth.value * host.adam_efficiency.value) * 1e9
    if op.on_device:
        return _whole(duration, op, profile), _of_device(op, duration, profile)
    if known is None:  # a rate of parameters is no leave to move more than memory can
        duration = max(duration, op.nbytes / host.memory_bandwidth.value * 1e9)
    if known is None and host.fresh_pages is not None:
        duration = max(duration, op.fresh / host.fresh_pages.value * 1e9)
    usage = {DRAM: _share(op.nbytes, duration, host.memory_bandwidth.value)}
    if host.adam_threads is not None:
        usage[CORES] = min(1.0, host.adam_threads.value / host.cores.value)
    return _whole(duration, op, profile), usage


def _share(nbytes: int, duration_ns: float, bandwidth: float) -> float:
    """The part of a bandwidth (bytes/s) that `nbytes` in `duration_ns` take up."""
    return min(1.0, nbytes / bandwidth * 1e9 / duration_ns) if duration_ns else 0.0


def _whole(duration_ns: float, op: Op, profile: HardwareProfile) -> int:
    return math.ceil(_bounded(duration_ns, op, profile))


def _bounded(ns: float, op: Op, profile: HardwareProfile) -> float:
    if ns > LONGEST_NS:
        long = f"{ns / HOUR_NS:,.1f} hours" if math.isfinite(ns) else "longer than can be counted"
        raise TooLong(
            f"{op.name} alone would take {long} on {profile.name}, and no op may take more than "
            f"{LONGEST_NS / HOUR_NS:.1f} hours: give a smaller batch or shorter sequences, or a faster machine"
        )
    return ns
