"""Random schedules and demands for property tests, and a machine of round numbers for those done by hand."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from hypothesis import strategies as st

from schedules import presets
from schedules.hazards import minimal_waits
from schedules.op import Access, Buffer, Kind, Op, Phase, Stream, Tier, Wait
from schedules.schedule import Schedule
from schedules.workload import Workload
from sim import hardware
from sim.cost import D2H, DRAM, DUPLEX, GPU, H2D, Demand
from sim.machine import HardwareProfile

MODEL = presets.load("tiny")
WORKLOAD = Workload(micro_batch_size=1, seq_len=16)

SHARES = (0.1, 0.25, 0.5, 0.7, 1.0)


def schedule_of(ops: Sequence[Op], waits: Sequence[Wait] | None = None) -> Schedule:
    """A schedule of bare ops, with the waits their accesses need unless others are given."""
    names = dict.fromkeys(access.buffer for op in ops for access in op.accesses)
    return Schedule(
        ops=tuple(ops),
        buffers=tuple(Buffer(name=name, tier=Tier.DEVICE, nbytes=8) for name in names),
        waits=minimal_waits(ops) if waits is None else tuple(waits),
        model=MODEL,
        workload=WORKLOAD,
        policy="bare",
    )


def bare(name: str, stream: Stream, reads: str = "", writes: str = "", *, blocking: bool = False) -> Op:
    """An op of any kind that touches the buffers named, separated by spaces."""
    return Op(
        name=name,
        kind=Kind.COMPUTE,
        phase=Phase.FORWARD,
        stream=stream,
        reads=tuple(Access(buffer, "w.0") for buffer in reads.split()),
        writes=tuple(Access(buffer, "w.0") for buffer in writes.split()),
        blocking=blocking,
    )


@st.composite
def schedules(draw: st.DrawFn, max_ops: int = 10) -> Schedule:
    """Ops on random streams that touch random buffers, some blocking, with the waits that they need."""
    buffers = st.lists(st.sampled_from("abcd"), max_size=2, unique=True).map(" ".join)
    ops = [
        bare(
            f"op{i}",
            draw(st.sampled_from(list(Stream))),
            draw(buffers),
            draw(buffers),
            blocking=draw(st.sampled_from([False, False, False, True])),
        )
        for i in range(draw(st.integers(1, max_ops)))
    ]
    return schedule_of(ops)


@st.composite
def costs(draw: st.DrawFn, schedule: Schedule, longest: int = 50) -> list[Demand]:
    """A random demand for every op of a schedule: duration, issue and shares of up to three resources."""
    usage = st.dictionaries(st.sampled_from([H2D, D2H, DUPLEX, DRAM, GPU]), st.sampled_from(SHARES), max_size=3)
    return [
        Demand(
            duration_ns=draw(st.integers(0, longest)),
            usage=draw(usage),
            issue_ns=draw(st.integers(0, 5)),
        )
        for _ in schedule.ops
    ]


@st.composite
def loaded(draw: st.DrawFn, max_ops: int = 10, longest: int = 50) -> tuple[Schedule, list[Demand]]:
    """A random schedule with random demands."""
    schedule = draw(schedules(max_ops))
    return schedule, draw(costs(schedule, longest))


def round_profile(*assignments: str) -> HardwareProfile:
    """A machine whose every number is easy to reckon with; `assignments` as for `hardware.override`."""
    return hardware.override(
        hardware.load("h200"),
        [
            "gpu.memory_bandwidth=4TB/s",
            "gpu.memory_efficiency=0.5fraction",
            "gpu.matmul_flops=1000TFLOP/s",
            "gpu.matmul_efficiency=0.5fraction",
            "gpu.attention_efficiency=0.25fraction",
            "gpu.fp32_flops=100TFLOP/s",
            "gpu.copy_slowdown=0.25fraction",
            "host.memory_bandwidth=200GB/s",
            "host.adam_efficiency=0.5fraction",
            "links.h2d.bandwidth=50GB/s",
            "links.h2d.latency=2us",
            "links.h2d.half_size=1MB",
            "links.d2h.bandwidth=40GB/s",
            "links.d2h.latency=2us",
            "links.d2h.half_size=1MB",
            "links.duplex=80GB/s",
            "issue.compute=100us",
            "issue.copy=10us",
            "issue.update=20us",
            "issue.sync=30us",
            "nvme.read=4GB/s",
            "nvme.write=2GB/s",
            "nvme.latency=100us",
            "nvme.both=2fraction",
            *assignments,
        ],
    )


def work_done(start: int, end: int, speed: Sequence[tuple[int, int, float]]) -> Fraction:
    """Work, in ns at full speed, of an op that runs from `start` to `end` at the speeds (from, to, speed)."""
    return sum((max(0, min(end, to) - max(start, since)) * Fraction(rate) for since, to, rate in speed), Fraction(0))
