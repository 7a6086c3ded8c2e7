"""What a schedule hangs on: which ops, which resources, and how its time spreads when ops do not all run alike.

All by changing one thing and evaluating again: ops by longest path, in one batch; resources by the engine.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from schedules.fp8 import ALIGNED
from schedules.model import ModelSpec
from schedules.op import Op, Phase, Tier
from schedules.trace import Ints
from schedules.workload import Workload
from sim.cost import demands
from sim.frugal import HUGE, frugal, least_together
from sim.hardware import override
from sim.longest_path import periods
from sim.machine import CEILINGS, TIMED, HardwareProfile, lookup
from sim.one_memory import partitions
from sim.prediction import Prediction, memory_of, predict

MORE = 1.25  # what a resource is multiplied with to see what more of it would bring
FASTER = 0.9  # what the ops of a class are multiplied with to see what they hold up
SAMPLES = 200  # of a noisy step
USUAL_NOISE = 0.02  # of an op on a quiet machine, for `spread` where it was not measured
PRODUCTS, DEVICE_MEMORY = ("gpu.matmul_flops", "gpu.fp32_flops", "gpu.fp8_flops"), ("gpu.memory_bandwidth",)
HOST_ADAM = "host.adam_params_per_s"
# a number -> what is in the signatures of passes over the memory that it is about, whose measured times go with it
PASSES = {HOST_ADAM: ("/host/", "/issuer/"), "gpu.memory_bandwidth": ("/device/",)}
HOST_MEMORY = ("host.memory_bandwidth", HOST_ADAM)
RATES = (
    ("GPU, matrix products", PRODUCTS),
    ("GPU, memory bandwidth", DEVICE_MEMORY),
    ("link, host to device", ("links.h2d.bandwidth", "links.duplex")),
    ("link, device to host", ("links.d2h.bandwidth", "links.duplex")),
    ("host memory bandwidth", HOST_MEMORY),
    ("NVMe, read and write", ("nvme.read", "nvme.write")),
)
RATES_OF_ONE_MEMORY = (
    *(rate for rate in RATES if rate[1] not in (DEVICE_MEMORY, HOST_MEMORY)),
    ("memory bandwidth", (*DEVICE_MEMORY, *HOST_MEMORY)),
)
LINKS = (("H2D", "links.h2d.bandwidth"), ("D2H", "links.d2h.bandwidth"))
NO_STALL = 1.01  # a step no longer than this, against one with the fastest link, is not held up


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Tokens/s at the 5th, 50th and 95th percentile of steps whose ops vary."""

    p5: float
    p50: float
    p95: float
    noise: float  # standard deviation of the logarithm of each op's duration


def spread(prediction: Prediction, noise: float) -> Spread:
    """How throughput varies if every op's duration does, independently; a step takes the mean of several."""
    base = _durations(prediction)
    factors = np.random.default_rng(0).lognormal(0.0, noise, (SAMPLES, len(base)))
    first, *found = _periods(prediction, np.vstack([base, base * factors]))
    scale = prediction.period_ns / first
    tokens = prediction.schedule.workload.tokens_per_step / (np.array(found) * scale / 1e9)
    p5, p50, p95 = (float(value) for value in np.percentile(tokens, (5, 50, 95)))
    return Spread(p5=p5, p50=p50, p95=p95, noise=noise)


def op_noise(profile: HardwareProfile) -> float | None:
    """The noise of a measured machine's ops, for `spread`: the median over its ops; None where it was not measured."""
    measured = profile.measured
    if measured is None or measured.op_noise is None or measured.op_times is None:
        return None
    times = measured.op_times.values
    return float(np.median([noise / times[key] for key, noise in measured.op_noise.values.items() if times[key]]))


def criticality(prediction: Prediction) -> dict[str, float]:
    """Class of op -> by what share of its own speed-up the step gets faster: 1 all critical, 0 hidden.

    A class is stream and phase, and of copies what they carry. Longest path at the durations that the simulated
    ops had, sharing included; the largest share of the step first.
    """
    schedule = prediction.schedule
    base = _durations(prediction)
    classes: dict[str, list[int]] = {}
    for position, op in enumerate(schedule.ops):
        classes.setdefault(stream_class(op), []).append(position)
    rows = np.tile(base, (1 + len(classes), 1)).astype(np.float64)
    for row, members in enumerate(classes.values(), start=1):
        rows[row, members] *= FASTER
    found = _periods(prediction, rows)
    gains = {
        name: float(1.0 - period / found[0]) / (1.0 - FASTER) for name, period in zip(classes, found[1:], strict=True)
    }
    return dict(sorted(gains.items(), key=lambda item: -item[1]))


def stream_class(op: Op) -> str:
    """Ops that one would speed up together: "h2d w", "compute backward", "cpu adam"."""
    what = op.reads[0].tensor.partition(".")[0] if op.phase == "copy" and op.reads else str(op.phase)
    return f"{op.stream} {what}"


def faster(profile: HardwareProfile) -> dict[str, HardwareProfile]:
    """What is more of a resource -> the machine with it; without what it lacks, and what no measured time is made of.

    A quarter more, or as much as what it cannot exceed leaves: "link, host to device, +8%".
    """
    machines = {}
    for name, paths in RATES if profile.unified_memory is None else RATES_OF_ONE_MEMORY:
        if profile.mode == "datasheet" or not set(paths) <= set(TIMED):
            machine = _scaled(profile, paths, MORE)
            before, after = lookup(profile, paths[0]), machine and lookup(machine, paths[0])
            if machine and before and after and after.value > before.value:
                machines[f"{name}, +{after.value / before.value - 1:.0%}"] = machine
    return machines


def marginal_gains(prediction: Prediction) -> dict[str, float]:
    """What is more of a resource, see `faster` -> by what fraction tokens/s grow, the schedule as it is."""
    return {
        name: prediction.period_ns / _again(prediction, machine) - 1.0
        for name, machine in faster(prediction.profile).items()
    }


def required_bandwidth(prediction: Prediction) -> dict[str, float | None]:
    """Link -> bytes/s from which on the schedule hardly waits for it, to 1 %; the other link as it is.

    The measure is a link as fast as host memory, or the present one where that is better: a faster link takes more of
    the memory's bandwidth from the optimizer. None where the schedule does not use the link.
    """
    needed: dict[str, float | None] = {}
    fastest = prediction.profile.host.memory_bandwidth.value
    schedule = prediction.schedule
    moved = Counter[str]()  # bytes by link: whatever comes to the device or leaves it, a drive's too
    for op in schedule.ops:
        if op.phase == Phase.COPY:
            source, to = schedule.route(op)
            if (source == Tier.DEVICE) != (to == Tier.DEVICE):
                moved["H2D" if to == Tier.DEVICE else "D2H"] += op.nbytes
    for name, path in LINKS:
        have = lookup(prediction.profile, path)
        assert have is not None, "every machine has links"
        if not moved[name]:
            needed[name] = None
            continue

        def period(bandwidth: float, path: str = path, have: float = have.value) -> float:
            wider = _scaled(prediction.profile, ("links.duplex",), max(bandwidth / have, 1.0))
            changed = _scaled(wider or prediction.profile, (path,), bandwidth / have)
            assert changed is not None
            return _again(prediction, changed)

        best, high = min((period(bandwidth), bandwidth) for bandwidth in (have.value, fastest))
        target = NO_STALL * best
        # with less, copies alone take longer than the step
        low = min(moved[name] / target * 1e9, high)
        if period(low) <= target:
            high = low
        while high / low > 1.01:
            middle = math.sqrt(low * high)
            low, high = (low, middle) if period(middle) <= target else (middle, high)
        needed[name] = high
    return needed


# ---- memory


@dataclass(frozen=True, kw_only=True)
class Smallest:
    """The least memory with which the model still trains, in bytes, the other tiers being as they are.

    None where no amount is enough; `unified_bytes`, of both together, also where they are not one memory.
    """

    device_bytes: int | None
    host_bytes: int | None
    unified_bytes: int | None = None


def smallest_memory(
    model: ModelSpec, profile: HardwareProfile, workload: Workload, *, known: Mapping[Tier, int] | None = None
) -> Smallest:
    """Of the device and of the host; where these are one memory, of that, and of each as all of it can be.

    `known` are the peak bytes of a schedule that fits, such as the plan's: no more than those is needed.
    """
    budget = memory_of(profile)
    if budget.unified_bytes is not None:
        both = [peaks for peaks in (least_together(model, profile, workload, budget), known) if peaks is not None]
        least = min((peaks[Tier.DEVICE] + peaks[Tier.HOST] for peaks in both), default=None)
        return Smallest(device_bytes=least, host_bytes=least, unified_bytes=least)
    devices = [peaks[Tier.DEVICE] for peaks in frugal(model, profile, workload, replace(budget, device_bytes=HUGE))]
    hosts = [peaks[Tier.HOST] for peaks in frugal(model, profile, workload, replace(budget, host_bytes=HUGE))]
    if known is not None:
        devices.append(known[Tier.DEVICE])
        hosts.append(known[Tier.HOST])
    return Smallest(device_bytes=min(devices, default=None), host_bytes=min(hosts, default=None))


def longest_sequence(model: ModelSpec, profile: HardwareProfile, workload: Workload) -> int:
    """Tokens of the longest sequence that can be trained, one at a time, a multiple of 1,024; 0 if none can.

    In whichever mode of recompute takes least memory, as all of these limits; at least, as not all schedules are tried.
    """
    one = replace(workload, micro_batch_size=1, accumulation=1)
    return 1024 * _largest(lambda n: _trains(model, profile, replace(one, seq_len=1024 * n)))


def largest_micro_batch(model: ModelSpec, profile: HardwareProfile, workload: Workload) -> int:
    """Sequences of the largest micro-batch that can be trained, at least; 0 if none can.

    Of products in 8 bits those micro-batches count that have as many tokens as these need, see `schedules.fp8`.
    """
    each = 1 if workload.matmul is None else ALIGNED // math.gcd(workload.seq_len, ALIGNED)
    one = replace(workload, accumulation=1)
    return each * _largest(lambda n: _trains(model, profile, replace(one, micro_batch_size=n * each)))


def _trains(model: ModelSpec, profile: HardwareProfile, workload: Workload) -> bool:
    if model.unmet_length(workload.seq_len):
        return False
    return any(True for part in partitions(memory_of(profile)) for _ in frugal(model, profile, workload, part))


def _largest(fits: Callable[[int], bool]) -> int:
    """The largest n for which `fits(n)`, which holds up to it and not beyond."""
    if not fits(1):
        return 0
    high = 2
    while fits(high) and high < 1 << 24:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


# ---- evaluation


def _durations(prediction: Prediction) -> Ints:
    """What each op took in the last whole step simulated, sharing included; ns, [ops]."""
    trace, count = prediction.trace, len(prediction.schedule.ops)
    took: Ints = (trace.end_ns - trace.start_ns).reshape(trace.steps, count)[-2].astype(np.int64)
    return took


def _periods(prediction: Prediction, durations: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of the schedule with these durations in ns, [batch, ops], and what issuing and noticing take on its machine."""
    costs, batch = demands(prediction.schedule, prediction.profile), (len(durations), 1)
    issue = np.tile(np.array([cost.issue_ns for cost in costs], dtype=np.int64), batch)
    wake = np.tile(np.array([cost.wake_ns for cost in costs], dtype=np.int64), batch)
    return periods(prediction.schedule, _whole(durations), issue, wake)


def _whole(durations: NDArray[np.float64]) -> Ints:
    whole: Ints = np.rint(durations).astype(np.int64)
    return whole


def _again(prediction: Prediction, profile: HardwareProfile) -> float:
    return predict(prediction.schedule, profile, memory_of(prediction.profile)).period_ns


def _scaled(profile: HardwareProfile, paths: tuple[str, ...], factor: float) -> HardwareProfile | None:
    """The machine with these numbers multiplied, and the times of passes over memory that are faster then; None if it
    has none of them.
    """
    changes = list(_assignments(profile, paths, factor))
    if not changes:
        return None
    scaled = override(profile, changes)
    passes = [word for path in paths for word in PASSES.get(path, ())]
    if not passes or scaled.measured is None or scaled.measured.op_times is None:
        return scaled
    table = scaled.measured.op_times
    times = {key: round(ns / factor) if any(word in key for word in passes) else ns for key, ns in table.values.items()}
    return replace(scaled, measured=replace(scaled.measured, op_times=replace(table, values=times)))


def _assignments(profile: HardwareProfile, paths: tuple[str, ...], factor: float) -> Iterator[str]:
    for path in paths:
        if (value := lookup(profile, path)) is not None:
            ceilings = [(limit, lookup(profile, limit)) for limited, limit in CEILINGS if limited == path]
            most = min(
                (value.value * (factor if limit in paths else 1.0) for limit, value in ceilings if value is not None),
                default=math.inf,
            )
            yield f"{path}={min(value.value * factor, most)!r}{value.unit}"
