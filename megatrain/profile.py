"""Measures the machine it runs on, so that the simulator can predict it: ops in place, then what they share.

Ops are timed inside the executor itself, by schedules in which one op follows another: nothing runs beside anything
else, and each op finds its memory as cold, and a GPU as warm, as in a real step. What happens when ops do run beside
one another is measured apart, on pairs of streams. Nothing is fitted to a run that is later predicted.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megatrain import profile_numbers as numbers
from megatrain import readings
from megatrain.adam import Adam
from megatrain.backend import Backend, Work
from megatrain.cpu import CpuBackend
from megatrain.cuda import LOADED_S, CudaBackend, DeviceEvent, handed_over, kept_at_work
from megatrain.data import RandomTokens
from megatrain.executor import in_turn, serial
from megatrain.initial import repeated_parameters
from megatrain.measured_parts import Parts
from megatrain.neighbours import told_of_neighbours
from megatrain.pinned import kept_pinned
from megatrain.rates import Load
from megatrain.this_machine import machine_here, machine_name
from megatrain.train import Trainer
from megatrain.way import PLAINLY, Way
from megatrain.workspace import peak_bytes
from schedules.errors import InputError
from schedules.op import Op, Stream, Tier
from schedules.schedule import Schedule
from schedules.trace import Trace
from schedules.verify import verify
from sim import hardware
from sim.cost import issue_kind
from sim.machine import HardwareProfile
from sim.signature import timed

Progress = Callable[[float, str], None]  # done in [0, 1], what is being measured
Machine = Callable[[], Backend[Any]]  # a fresh backend; who runs on it closes it
RunOn = tuple[Machine, Path | None, Way]  # where, with which folder on a drive, and how

ALONE_STEPS = 4  # steps per schedule, one op after another, after its warm-up
ENOUGH_S = 1.0  # of such steps, on a GPU
WOKEN, WOKEN_STEPS = 5, 6  # schedules, and steps of each, in which idle streams and the issuing host are watched
OPS_SHARE = 0.8  # of the progress bar


def this_cpu() -> CpuBackend:
    """The machine to measure where nothing else is said."""
    return CpuBackend(machine=machine_name())


def measure(
    schedules: Sequence[Schedule],
    *,
    progress: Progress,
    machine: Machine = this_cpu,
    nvme: Path | None = None,
    way: Way = PLAINLY,
    parts: Path | None = None,
    out: Path | None = None,
    memory: Sequence[Schedule] = (),
    rounds: int = 1,
) -> HardwareProfile:
    """Profile this machine for the ops of these schedules, whatever their models and workloads.

    Every op of any of them that `sim.signature.timed` has is covered; schedules that use NVMe are left out where no
    folder on a drive is given, and all others must fit (`megatrain.fitting`). A policy may choose another precision
    than it was asked for (an fp32 master beside bf16). What ops share is measured with a block of every model, and the
    mean of all rounds holds for all. Takes serialised steps of each schedule, `ALONE_STEPS` or fewer and a warm-up, and
    a minute more. Of those in `memory` the workspace alone is measured, in one step. What is measured is kept in the
    folder `parts` until the profile is written to `out`, and taken from there if the same measurement was interrupted.
    Ops are computed in one `way`, and timed in so many `rounds`; those that `time_ops` has put into `parts` are not
    timed again.

    Raises:
        InputError: ops cannot be computed in this way here, every schedule needs a drive, or `out` cannot be written.
        Refused: `parts` are of another machine, drive or way.
        DriveError: the drive cannot be written.

    Warns where other processes had much of the machine meanwhile.
    """
    runnable = _runnable(schedules, nvme)
    at = machine_here(machine, nvme)
    kept, run_on = Parts(parts, at, way), (machine, nvme, way)
    streams, spaces = [], []
    ops: list[dict[str, Any]] = []
    shares: list[dict[str, Any]] = []
    with told_of_neighbours(), kept_pinned(_most_host_bytes((*runnable, *memory))):
        for schedule in runnable[:WOKEN]:
            progress(0.0, f"how long streams take to notice, {schedule.policy}")
            streams.append(kept.of(f"streams {schedule.digest}", functools.partial(in_a_run, schedule, *run_on)))
        for number in range(rounds):

            def of_round(done: float, note: str, number: int = number) -> None:
                progress(OPS_SHARE * (number + done) / rounds, note)

            ops += _time_ops(runnable, number, of_round, run_on, kept)
            shares += _read_shares(runnable, number, of_round, run_on, kept)
        for schedule in memory:
            progress(OPS_SHARE, f"workspace at {schedule.workload.tokens_per_microbatch} tokens, {schedule.policy}")
            spaces.append(kept.of(f"memory {schedule.digest}", functools.partial(workspaces, schedule, *run_on)))
        whole = _whole_machine(runnable[0], run_on, kept, progress)
    found = list(zip(runnable * rounds, ops, strict=True))
    profile = numbers.profile_of(found, streams, spaces, shares, whole, at, way)
    if out is not None:
        hardware.save(profile, out)
    kept.remove()
    progress(1.0, "")
    return profile


def time_ops(
    schedules: Sequence[Schedule],
    number: int,
    *,
    progress: Progress,
    machine: Machine = this_cpu,
    nvme: Path | None = None,
    way: Way = PLAINLY,
    parts: Path | None = None,
) -> list[dict[str, Any]]:
    """What `alone` tells of each schedule, in round `number` of a measurement in rounds; the first meters workspace.

    What streams take from one another is read, too, with each model, and kept. Arguments and errors are those of
    `measure`, which goes on with what is in `parts`.
    """
    kept = Parts(parts, machine_here(machine, nvme), way)
    runnable, run_on = _runnable(schedules, nvme), (machine, nvme, way)
    with kept_pinned(_most_host_bytes(runnable)):
        found = _time_ops(runnable, number, progress, run_on, kept)
        _read_shares(runnable, number, progress, run_on, kept)
    return found


def _time_ops(
    runnable: Sequence[Schedule], number: int, progress: Progress, run_on: RunOn, kept: Parts
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    metered: set[str] = set()
    for place, schedule in enumerate(runnable):
        progress(place / len(runnable), f"ops of {schedule.policy}, one at a time")
        ops = set(_computed(schedule).values())
        new = ops - metered if number == 0 else set[str]()
        name = f"ops {schedule.digest} {number}"
        found.append(kept.of(name, functools.partial(alone, schedule, *run_on, new)))
        if lacking := new - found[-1]["workspace"].keys():  # in another list others had them
            more = kept.of(f"memory {schedule.digest}", functools.partial(workspaces, schedule, *run_on))
            found[-1]["workspace"] |= {key: more[key] for key in lacking}
        metered |= ops
    return found


def _read_shares(
    runnable: Sequence[Schedule], number: int, progress: Progress, run_on: RunOn, kept: Parts
) -> list[dict[str, Any]]:
    """`megatrain.readings.shares` with each model, in the workload of its first schedule.

    Neighbours on the same machine take more or less of it from one minute to the next, so that every round reads anew.
    """
    machine, _, way = run_on
    first = {schedule.model.name: schedule for schedule in reversed(runnable)}

    def read(schedule: Schedule) -> dict[str, Any]:
        backend = machine()
        try:
            compute = _compute(schedule, backend, way)
            update = readings.adam_load(backend, schedule.model.params(0), schedule.workload.precision)
            return dict(readings.shares(backend, readings.Arenas(backend), compute, update))
        finally:
            backend.close()

    found = []
    for schedule in first.values():
        progress(1.0, "cores and memory under load")
        name = f"shares {_beside(schedule)} {number}"
        found.append(kept.of(name, functools.partial(read, schedule)))
    return found


def _compute(schedule: Schedule, backend: Backend[Any], way: Way) -> Load:
    """What stands beside copies and the optimizer where they share."""
    return readings.block_load(schedule.model, schedule.workload, backend.device, way.pointwise)


def _beside(schedule: Schedule) -> str:
    """That, as a part of a file's name."""
    told = json.dumps([schedule.model.to_dict(), schedule.workload.to_dict()])
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def _runnable(schedules: Sequence[Schedule], nvme: Path | None) -> list[Schedule]:
    found = [s for s in schedules if nvme is not None or not s.allocated_bytes(Tier.NVME)]
    if not found:
        raise InputError("every schedule to be measured keeps bytes on NVMe: give a folder there, with --nvme FOLDER")
    return found


def _most_host_bytes(schedules: Sequence[Schedule]) -> int:
    """What the largest of these has in the host's memory: all of them are trained, one after another."""
    return max(schedule.allocated_bytes(Tier.HOST) for schedule in schedules)


# ---- ops


def alone(
    schedule: Schedule,
    machine: Machine = this_cpu,
    nvme: Path | None = None,
    way: Way = PLAINLY,
    metered: Collection[str] = (),
) -> dict[str, Any]:
    """Ops with nothing beside them: `durations_ns` [steps][ops], and from each end to the next issue, `gaps_ns`, of as
    many steps or fewer.

    Also, by signature for those in `metered`, the `workspace` of compute ops in bytes; these are measured in a first
    step, which is warm-up and not told.
    """
    backend = machine()
    on_gpu = isinstance(backend, CudaBackend)
    steps = way.warm_up + (1 if on_gpu else ALONE_STEPS)  # a GPU's ops are not timed in these
    trace, workspace = _run(serial(schedule), steps, backend, nvme, way, metered)
    columns = (trace.issue_ns, trace.start_ns, trace.end_ns)
    issue, start, end = (column.reshape(steps, len(schedule.ops))[way.warm_up :] for column in columns)
    durations = end - start
    if on_gpu:
        durations = _under_load(schedule, machine, nvme, way, int(end[-1, -1] - start[-1, 0]))
    return {
        "durations_ns": durations.tolist(),
        "gaps_ns": (issue[:, 1:] - end[:, :-1]).tolist(),
        "workspace": workspace,
    }


def _under_load(
    schedule: Schedule, machine: Machine, nvme: Path | None, way: Way, step_ns: int
) -> npt.NDArray[np.int64]:
    """The same [steps][ops] of a GPU that has been at work for LOADED_S, as a step lasts about `step_ns`.

    Where the host waits for each op the GPU rests, and its clock rises above what it can keep in a step. Long steps are
    fewer: each holds an op many times.
    """
    counted = max(1, min(ALONE_STEPS, math.ceil(ENOUGH_S * 1e9 / step_ns)))
    steps = way.warm_up + math.ceil(LOADED_S * 1e9 / step_ns) + counted
    backend = machine()
    with kept_at_work(backend, schedule, graphs=way.graphs):
        trace, _ = _run(in_turn(schedule), steps, backend, nvme, way)
    durations: npt.NDArray[np.int64] = (trace.end_ns - trace.start_ns).reshape(-1, len(schedule.ops))[-counted:]
    return durations


def workspaces(
    schedule: Schedule, machine: Machine = this_cpu, nvme: Path | None = None, way: Way = PLAINLY
) -> dict[str, int]:
    """Signature of a compute op -> the most bytes that one takes beside its buffers, of one step."""
    launched = replace(way, graphs=False)  # a graph takes what its kernels do
    steps, ops = 1 + _compiling(way), set(_computed(schedule).values())
    return _run(serial(schedule), steps, machine(), nvme, launched, ops)[1]


def _computed(schedule: Schedule) -> dict[int, str]:
    """Place -> signature of the ops that compute; these alone take workspace."""
    return timed(schedule, "computed")


def _compiling(way: Way) -> int:
    """The steps in which an op may compile itself, which takes memory that it does not take again."""
    return 1 if way.fused else 0


def _metering(work: Work, name: str, device: torch.device, found: dict[str, int], first: int) -> Work:
    """The same, which notes how much memory it takes: once, in step `first`."""

    def metered(step: int) -> None:
        if step < first or name in found:
            work(step)
        else:
            found[name] = peak_bytes(lambda: work(step), device)

    return metered


def in_a_run(
    schedule: Schedule, machine: Machine = this_cpu, nvme: Path | None = None, way: Way = PLAINLY
) -> dict[str, Any]:
    """Of a real run, ns: `woken`, how long after what released it each op started where its stream stood idle by then;
    `issued`, by kind, what the host took from one issue to the next where it had nothing to wait for; `handed`, by
    kind, what it took to hand an op over to a GPU.

    What releases an op is its issue, or the end of an op of another stream that it waits for.
    """
    backend, events = machine(), list[tuple[Op, DeviceEvent]]()
    if isinstance(backend, CudaBackend):
        backend.events = events
    trace, _ = _run(schedule, WOKEN_STEPS, backend, nvme, way)
    count, woken = len(schedule.ops), list[int]()
    issued: dict[str, list[int]] = {}
    free: dict[Stream, int] = {}
    for row in range(len(trace)):
        step, index = divmod(row, count)
        op, before = schedule.ops[index], schedule.ops[index - 1]
        on = [(step - distance) * count + other for other, distance in schedule.waits_at[index] if distance <= step]
        released = max([int(trace.issue_ns[row]), *(int(trace.end_ns[b]) for b in on)])
        if step >= way.warm_up and op.stream != Stream.HOST and released >= free.get(op.stream, 0):
            woken.append(int(trace.start_ns[row]) - released)
        free[op.stream] = int(trace.end_ns[row])
        # between steps the host does more than issue; a host op is not handed over
        if step >= way.warm_up and index and not before.blocking and Stream.HOST not in (before.stream, op.stream):
            issued.setdefault(issue_kind(op), []).append(int(trace.issue_ns[row] - trace.issue_ns[row - 1]))
    handed = handed_over(events[len(events) * way.warm_up // WOKEN_STEPS :])
    return {"woken": woken, "issued": issued, "handed": handed}


def _run(
    schedule: Schedule,
    steps: int,
    backend: Backend[Any],
    nvme: Path | None,
    way: Way,
    metered: Collection[str] = (),
) -> tuple[Trace, dict[str, int]]:
    """The trace of some steps on tokens at random; of compute ops with `metered` signatures, the workspace in bytes."""
    data = RandomTokens(vocab_size=schedule.model.vocab_size, workload=schedule.workload)
    found: dict[str, int] = {}

    def prepare(of: Schedule, works: Sequence[Work]) -> Sequence[Work]:
        watched = list(works)
        for place, name in _computed(of).items():
            if name in metered:
                watched[place] = _metering(works[place], name, backend.device, found, _compiling(way))
        return way.prepare(of, watched)

    with Trainer(
        verify(schedule),
        backend,
        data,
        Adam(lr=1e-4),
        initial=repeated_parameters(schedule.model, 0),
        record=True,
        nvme=nvme,
        pointwise=way.pointwise,
        prepare=prepare,
    ) as trainer:
        trainer.run(steps)
        return trainer.trace(), found


# ---- the machine as a whole


def _whole_machine(schedule: Schedule, run_on: RunOn, kept: Parts, progress: Progress) -> dict[str, dict[str, Any]]:
    """Every other reading, by what was read; where copies go beside compute, that is the schedule's."""
    machine, nvme, way = run_on
    backend = machine()
    threads = readings.thread_counts()
    default = torch.get_num_threads()

    @functools.cache
    def arenas() -> readings.Arenas:
        return readings.Arenas(backend)

    works: dict[str, tuple[str, Callable[[], Mapping[str, Any]]]] = {
        "links": ("copies of all sizes", lambda: readings.links(backend, arenas(), _compute(schedule, backend, way))),
        "products": ("matrix products", lambda: readings.products(backend)),
        "dram": ("host memory", lambda: readings.dram(backend, arenas(), threads)),
        "adam": ("the optimizer by threads and precision", lambda: readings.optimizer(backend, arenas(), threads)),
    }
    if nvme is not None:
        works["nvme"] = (f"the drive at {nvme}", lambda: readings.drive(backend, nvme))
        works["nvme_both"] = (f"both ways at {nvme}", lambda: {"shares": readings.drive_both(backend, nvme)})
    found = {}
    try:
        for number, (name, (note, work)) in enumerate(works.items()):
            progress(OPS_SHARE + (1 - OPS_SHARE) * number / len(works), note)
            part = f"{name} {_beside(schedule)}" if name == "links" else name
            found[name] = kept.of(part, lambda work=work: dict(work()))  # type: ignore[misc]
    finally:
        backend.close()
        torch.set_num_threads(default)  # the readings by threads leave another one as the default
    return found
