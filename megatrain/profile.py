"""Measures the machine it runs on, so that the simulator can predict it: ops in place, then what they share.

Ops are timed inside the executor itself, by schedules in which every op blocks the host: nothing runs beside
anything else, and each op finds its memory as cold as in a real step. What happens when ops do run beside one
another is measured apart, on pairs of threads. Nothing is fitted to a run that is later predicted.
"""

from __future__ import annotations

import datetime
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from megatrain import adam
from megatrain.adam import Adam
from megatrain.cpu import CpuBackend
from megatrain.data import RandomTokens
from megatrain.initial import random_parameters
from megatrain.session import machine_name
from megatrain.template import templates, views
from megatrain.train import Trainer
from schedules.errors import Refused
from schedules.model import ModelSpec
from schedules.op import Kind, Op, Phase, Stream, Tier
from schedules.schedule import Schedule
from schedules.trace import Trace
from schedules.verify import verify
from sim.cost import signature
from sim.hardware import (
    Gpu,
    HardwareProfile,
    Host,
    Issue,
    Link,
    Links,
    Measured,
    Table,
    Value,
)

Progress = Callable[[float, str], None]  # done in [0, 1], what is being measured

ALONE_STEPS = 5  # serialised steps per schedule; the first is warm-up
WOKEN, WOKEN_STEPS = 5, 6  # schedules, and steps of each, in which idle streams are watched
PAIR_SECONDS = 1.0  # how long a pair of threads runs for one reading
SLAB = 1 << 22  # elements of a measured copy: 16 MB, more than a core's share of the cache
SLABS = 16  # different ones, so that each is cold
MATRIX = 1024

Work = Callable[[], object]


def measure(model: ModelSpec, schedules: Sequence[Schedule], *, progress: Progress) -> HardwareProfile:
    """Profile this machine's CPU for the ops of these schedules, whatever their models and workloads.

    What ops share is measured with `model` and the first schedule's workload, and holds for all. Every compute op
    and optimizer step of any of them is covered, but for those only found in schedules that use NVMe: these cannot
    be run yet and are left out. A policy may choose another precision than it was asked for (an fp32 master beside
    bf16). Takes a serialised step of each schedule, `ALONE_STEPS` times, and some ten seconds more.

    Raises:
        Refused: no schedule can be run.
    """
    runnable = [schedule for schedule in schedules if not schedule.allocated_bytes(Tier.NVME)]
    if not runnable:
        raise Refused("nothing to measure: every schedule given uses NVMe, which can be planned but not yet run")
    samples: dict[str, list[float]] = {}
    copies: dict[str, list[tuple[int, float]]] = {"h2d": [], "d2h": []}
    adam_steps: list[tuple[str, Op, float]] = []  # precision, op on the host, ns
    waking: list[float] = []
    woken: list[float] = []
    for schedule in runnable[:WOKEN]:
        progress(0.0, f"how long streams take to notice, {schedule.policy}")
        woken += waking_up(schedule)
    for number, schedule in enumerate(runnable):
        progress(0.8 * number / len(runnable), f"ops of {schedule.policy}, one at a time")
        for op, duration_ns, gap_ns in alone(schedule):
            if op.phase == Phase.COPY:
                direction = _direction(op, schedule)
                if direction is not None:
                    copies[direction].append((op.nbytes, duration_ns))
            elif op.kind == Kind.COMPUTE or op.phase == Phase.ADAM:
                samples.setdefault(signature(op, schedule.model, schedule.workload), []).append(duration_ns)
            if op.phase == Phase.ADAM and op.stream in (Stream.CPU, Stream.HOST):
                adam_steps.append((schedule.workload.precision, op, duration_ns))
            waking.append(gap_ns)
    progress(0.8, "cores and memory under load")
    profile = _profile(model, runnable[0], samples, copies, adam_steps, waking, woken)
    progress(1.0, "")
    return profile


def alone(schedule: Schedule) -> list[tuple[Op, float, float]]:
    """Each op's median time with nothing beside it, and from its end to the issue of the next op: ns.

    The last op of the step has no next one in it and is told a gap of 0.
    """
    serial = replace(schedule, ops=tuple(replace(op, blocking=True) for op in schedule.ops))
    trace = _run(serial, ALONE_STEPS)
    shape = (ALONE_STEPS, len(schedule.ops))
    issue, start, end = (column.reshape(shape) for column in (trace.issue_ns, trace.start_ns, trace.end_ns))
    durations = np.median((end - start)[1:], axis=0)
    gaps = np.append(np.median((issue[:, 1:] - end[:, :-1])[1:], axis=0), 0.0)
    return list(zip(schedule.ops, durations.tolist(), gaps.tolist(), strict=True))


def waking_up(schedule: Schedule) -> list[float]:
    """How long after what released it each op started, where its stream stood idle by then: ns, of a real run.

    What releases an op is its issue, or the end of an op of another stream that it waits for.
    """
    trace = _run(schedule, WOKEN_STEPS)
    count, found = len(schedule.ops), list[float]()
    waits = [[(schedule.index[w.on], w.distance) for w in schedule.waits_of[op.name]] for op in schedule.ops]
    free: dict[Stream, int] = {}
    for row in range(len(trace)):
        step, index = divmod(row, count)
        stream = schedule.ops[index].stream
        before = [(step - distance) * count + on for on, distance in waits[index] if distance <= step]
        released = max([int(trace.issue_ns[row]), *(int(trace.end_ns[b]) for b in before)])
        if step and stream != Stream.HOST and released >= free.get(stream, 0):
            found.append(float(trace.start_ns[row]) - released)
        free[stream] = int(trace.end_ns[row])
    return found


def _run(schedule: Schedule, steps: int) -> Trace:
    """The trace of some steps on tokens at random."""
    data = RandomTokens(vocab_size=schedule.model.vocab_size, workload=schedule.workload)
    with Trainer(
        verify(schedule),
        CpuBackend(machine=machine_name()),
        data,
        Adam(lr=1e-4),
        initial=random_parameters(schedule.model, 0),
        record=True,
    ) as trainer:
        trainer.run(steps)
        return trainer.trace()


def _direction(op: Op, schedule: Schedule) -> str | None:
    source, target = (schedule.buffer[accesses[0].buffer].tier for accesses in (op.reads, op.writes))
    return {(Tier.HOST, Tier.DEVICE): "h2d", (Tier.DEVICE, Tier.HOST): "d2h"}.get((source, target))


# ---- what ops share


def together(first: Work, second: Work) -> tuple[float, float]:
    """How fast each of two kinds of work goes while the other runs, relative to running alone."""
    one, other = _rates([first])[0], _rates([second])[0]
    both = _rates([first, second])
    return both[0] / one, both[1] / other


def _rates(works: Sequence[Work]) -> list[float]:
    """Calls per second of each work, a thread each, all at once."""
    counts = [0] * len(works)
    start = threading.Barrier(len(works) + 1)
    stop = threading.Event()

    def serve(index: int) -> None:
        torch.set_num_threads(1)
        works[index]()
        start.wait()
        while not stop.is_set():
            works[index]()
            counts[index] += 1

    threads = [threading.Thread(target=serve, args=(index,)) for index in range(len(works))]
    for thread in threads:
        thread.start()
    start.wait()
    begun = time.perf_counter()
    time.sleep(PAIR_SECONDS)
    stop.set()
    elapsed = time.perf_counter() - begun
    for thread in threads:
        thread.join()
    return [count / elapsed for count in counts]


def _block_work(model: ModelSpec, schedule: Schedule) -> Work:
    """One block's forward, without activations kept."""
    workload = schedule.workload
    dtype = torch.float32 if workload.bytes.activation == 4 else torch.bfloat16
    layers = templates(model, seq_len=workload.seq_len, device=torch.device("cpu"), dtype=dtype)
    layer = layers.blocks[model.layer_kind(0)]
    params = views(random_parameters(model, 0)(0).to(dtype), model.parameter_shapes(0))
    x = torch.randn(workload.micro_batch_size, workload.seq_len, model.hidden_size, dtype=dtype)

    def work() -> None:
        with torch.no_grad():
            layer.forward(params, x)

    return work


def _adam_work(model: ModelSpec, schedule: Schedule) -> Work:
    """The optimizer's step on one block."""
    precision = schedule.workload.bytes
    values = random_parameters(model, 0)(0)
    weights = torch.empty(values.shape, dtype=torch.float32 if precision.weight == 4 else torch.bfloat16)
    state = torch.empty(precision.state_bytes(len(values)), dtype=torch.uint8)
    adam.initialise(weights, state, precision.name, values)
    grad = torch.randn(values.shape).to(weights.dtype)

    def work() -> None:
        adam.step(weights, grad, state, Adam(lr=1e-4), 1, precision=precision.name)

    return work


def _copy_work(seed: int) -> Work:
    """Copies of slabs, each different from the last, from one place in memory to another."""
    generator = torch.Generator().manual_seed(seed)
    sources = [torch.randn(SLAB, generator=generator) for _ in range(SLABS)]
    target = torch.empty(SLAB)
    turn = 0

    def work() -> None:
        nonlocal turn
        turn = (turn + 1) % SLABS
        target.copy_(sources[turn])

    return work


def _matmul_flops(dtype: torch.dtype) -> float:
    a, b = (torch.randn(MATRIX, MATRIX).to(dtype) for _ in range(2))
    return _rates([lambda: a @ b])[0] * 2 * MATRIX**3


# ---- the profile


def _link(points: Sequence[tuple[int, float]], source: str) -> Link:
    """Latency and bandwidth of copies: the line through (bytes, ns) of least squared error, never below zero."""
    sizes, times = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    slope, latency = np.polyfit(sizes, times, 1) if len(set(sizes)) > 1 else (0.0, 0.0)
    if slope <= 0 or latency < 0:
        slope, latency = float(times.sum() / sizes.sum()), 0.0
    return Link(
        bandwidth=Value(value=float(1e9 / slope), unit="B/s", source=source),
        latency=Value(value=float(latency), unit="ns", source=source),
        half_size=Value(value=0.0, unit="bytes", source=f"{source}; in the latency"),
    )


def _profile(
    model: ModelSpec,
    schedule: Schedule,
    samples: dict[str, list[float]],
    copies: dict[str, list[tuple[int, float]]],
    adam_steps: Sequence[tuple[str, Op, float]],
    waking: Sequence[float],
    woken: Sequence[float],
) -> HardwareProfile:
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    source = f"measured on {machine_name()}, {date}, torch {torch.__version__}, {_threads()}"
    block, optimizer = _block_work(model, schedule), _adam_work(model, schedule)
    copy_alone = _rates([_copy_work(1)])[0]
    copy_pair = _rates([_copy_work(1), _copy_work(2)])
    beside_adam = sum(together(block, optimizer))
    beside_copy = sum(together(block, _copy_work(1)))
    slab_copy = 4 * SLAB  # bytes
    moving = _rates_of_copies(copies, copy_alone * slab_copy, source)
    h2d, d2h = moving["h2d"], moving["d2h"]
    # a copy reads and writes memory; the machine can do at least what any single op was seen to do
    dram = max(2 * slab_copy * max(sum(copy_pair), copy_alone), 2 * h2d.bandwidth.value, 2 * d2h.bandwidth.value)
    peak, peak_fp32 = _matmul_flops(torch.bfloat16), _matmul_flops(torch.float32)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2
    rate = _adam_rate(adam_steps)

    def value(number: float, unit: str, note: str = "") -> Value:
        return Value(value=float(number), unit=unit, source=f"{source}{note and f'; {note}'}")

    thread = value(1.0, "cores", "one thread serves each stream")
    return HardwareProfile(
        name=f"{machine_name()}, {os.cpu_count()} cores",
        description="this machine's CPU as host and device: a thread per stream, both memories in RAM",
        date=date,
        mode="measured",
        gpu=Gpu(
            name=machine_name(),
            memory=value(memory, "bytes", "half of the RAM"),
            memory_bandwidth=value(dram, "B/s", "the host's"),
            matmul_flops=value(peak, "FLOP/s", f"one thread, {MATRIX} x {MATRIX} matrices"),
            matmul_efficiency=value(1.0, "fraction", "the peak is a measured rate"),
            attention_efficiency=value(1.0, "fraction", "in the op times"),
            memory_efficiency=value(1.0, "fraction", "the bandwidth is a measured rate"),
            fp32_flops=value(peak_fp32, "FLOP/s", f"one thread, {MATRIX} x {MATRIX} matrices"),
            copy_slowdown=value(0.0, "fraction", "in the cores that streams share"),
        ),
        host=Host(
            name=machine_name(),
            memory=value(memory, "bytes", "half of the RAM"),
            memory_bandwidth=value(dram, "B/s", "two threads copying"),
            cores=value(
                _cores(beside_adam, beside_copy),
                "cores",
                f"what two busy threads get done, of one alone: {beside_adam:.2f} forward beside the optimizer, "
                f"{beside_copy:.2f} forward beside copies",
            ),
            adam_efficiency=value(_share_of(adam_steps, dram), "fraction"),
            adam_params_per_s=None if rate is None else value(rate, "params/s", "one layer after another"),
            adam_threads=thread,
            copy_threads=thread,
            compute_threads=thread,
        ),
        links=Links(
            h2d=h2d,
            d2h=d2h,
            duplex=value(
                h2d.bandwidth.value + d2h.bandwidth.value,
                "B/s",
                "the sum of both: a thread each, which only the memory bandwidth and the cores hold back",
            ),
        ),
        issue=_issue(waking, woken, source),
        measured=Measured(
            op_times=Table(
                values={key: round(statistics.median(times)) for key, times in sorted(samples.items())},
                unit="ns",
                source=f"{source}; each op alone, in place",
            )
        ),
    )


def _cores(*shares: float) -> float:
    """Of the pairs of threads measured, the mean; at least one core, at most the machine's."""
    return min(max(1.0, statistics.mean(shares)), float(os.cpu_count() or 1))


def _rates_of_copies(copies: dict[str, list[tuple[int, float]]], bandwidth: float, source: str) -> dict[str, Link]:
    """A link per direction; one in which no schedule copies gets the bandwidth of a plain copy."""
    plain = [(SLAB, SLAB / bandwidth * 1e9)]
    return {direction: _link(points or plain, source) for direction, points in copies.items()}


def _threads() -> str:
    """What torch uses inside an op: of the host stream, which is this thread, and of all others."""
    return f"1 thread a stream, {torch.get_num_threads()} on the issuing thread"


def _adam_rate(steps: Sequence[tuple[str, Op, float]]) -> float | None:
    """Parameters per second; None where precisions differ, and the op times alone tell them apart."""
    if len({precision for precision, _, _ in steps}) != 1:
        return None
    return statistics.median(op.params / duration_ns * 1e9 for _, op, duration_ns in steps)


def _share_of(steps: Sequence[tuple[str, Op, float]], dram: float) -> float:
    """The memory traffic of the optimizer's step over the bandwidth: what passes over memory attain too."""
    rates = [op.nbytes / duration_ns * 1e9 for _, op, duration_ns in steps]
    return min(1.0, statistics.median(rates) / dram) if rates else 1.0


def _issue(waking: Sequence[float], woken: Sequence[float], source: str) -> Issue:
    """Between serialised ops the host wakes up and hands the next one over: half the gap each."""
    half = statistics.median(waking) / 2

    def value(note: str) -> Value:
        return Value(value=half, unit="ns", source=f"{source}; half the gap between serialised ops, {note}")

    return Issue(
        compute=value("handing over"),
        copy=value("handing over"),
        update=value("handing over"),
        sync=value("waking up"),
        wake=Value(
            value=statistics.mean(woken),
            unit="ns",
            source=f"{source}; mean of {len(woken)} starts of idle streams in whole steps, cores shared as in any run",
        )
        if woken
        else None,
    )
