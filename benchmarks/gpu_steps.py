"""Steps of real models by schedule on the GPU: measured, told apart by spinning, and predicted from single ops.

Nothing is fitted to a step that is then predicted: the profile holds what links, memory and each op do alone.
"""

from __future__ import annotations

import contextlib
import gc
import math
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import gpu_machine
import torch
from gpu_arena import ArenaBackend
from gpu_case import Case, schedule_of
from gpu_machine import Row
from gpu_profile import machine_of, op_times, profile_of
from torch.autograd import DeviceType

from megatrain import adam
from megatrain.adam import Adam
from megatrain.backend import Work
from megatrain.busy_work import spinning
from megatrain.cuda import LOADED_S, CudaBackend, handed_over, kept_at_work
from megatrain.data import RandomTokens
from megatrain.executor import Executor, in_turn
from megatrain.initial import repeated_parameters
from megatrain.native import adam as native
from megatrain.neighbours import Neighbours
from megatrain.train import Trainer
from schedules import codec
from schedules.flops import model_flops_per_step
from schedules.op import Kind, Stream, Tier
from schedules.schedule import Schedule
from schedules.trace import Trace
from schedules.verify import Verified, verify
from sim.machine import HardwareProfile
from sim.prediction import predict
from sim.signature import timed

Prepare = Callable[[Schedule, Sequence[Work]], Sequence[Work]]
B = TypeVar("B", bound=CudaBackend)

PLANNING_S = 120.0  # at most
WARM_UP, STEPS = 2, 5  # steps that are left out, but for the end of the last; the fewest periods that count
LASTS_S, MOST = 3.0, 500  # what is run after the warm-up, of which the later half counts: clocks settle under load
LONGEST = 10  # kernels that are told
PROFILED = torch.profiler.ProfilerActivity.CUDA


def measure(
    case: Case,
    device_bytes: int,
    host_bytes: int,
    machine: dict[str, list[Row]],
    plans: Path | None,
    traces: Path | None,
    spin: bool,
) -> Row:
    """Train by the case's schedule; its times, memory, and what was predicted for it. Raises Refused.

    A plan that the folder `plans` has is taken as it is.

    What ops take alone is timed for each schedule anew: how fast a GPU computes depends on what it did before.
    """
    verified = _verified(case, device_bytes, host_bytes, machine, plans)
    schedule = verified.schedule
    kernel = gpu_machine.attention_kernel(schedule.model, case.seq_len).name.lower()
    begun = time.perf_counter()
    backend, trainer = trainer_of(case, verified, ArenaBackend, case.way.prepare)
    backend.events, pace = [], Pace()
    with trainer:
        startup_s = time.perf_counter() - begun
        with undisturbed():
            losses = trainer.run(MOST, on_step=pace.on_step, stop=pace.enough)
        disturbed = pace.neighbours.told()
        retried = retries() - pace.retried
        trace = trainer.trace()
        handing_ns = _handing_over(backend, trace.steps)
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        if traces is not None:
            name = re.sub("[^A-Za-z0-9._-]+", "_", case.key_in_way)
            trace.save(traces / f"{name}.json")
            codec.save(schedule, traces / f"{name}.schedule.json")
        row = _row(case, schedule, trace, losses)
        alone_ns = op_times(schedule, _alone(trainer, backend, schedule, case, row["step_s"]["median"]))
        profile = profile_of(schedule, machine_of(machine), alone_ns, handing_ns)
        row |= {
            "alone_ns": alone_ns,
            "disturbed": disturbed,
            "attention": kernel,
            "startup_s": startup_s,
            "gpu_peak_GB": peak / 1e9,
            "gpu_reserved_GB": reserved / 1e9,
            "alloc_retries": retried,
            "gpu_buffers_GB": schedule.allocated_bytes(Tier.DEVICE) / 1e9,
            "host_buffers_GB": schedule.allocated_bytes(Tier.HOST) / 1e9,
            "host_peak_GB": None if (most := _high_water()) is None else (most - backend.unused) / 1e9,
            "host_threads": torch.get_num_threads(),
            "adam_gpu": gpu_machine.DEVICE.type != "cuda" or adam.kernels_on(gpu_machine.DEVICE) is not None,
            "adam_host": native.why_not() is None,
            "handing_over_us": {name: ns / 1e3 for name, ns in handing_ns.items()},
            "clock_us": backend.clock_ns / 1e3,
        }
        row |= _predicted(schedule, profile, row["step_s"]["median"])
        if spin:
            row["spin_step_s"] = _spin(trainer, backend, verified, alone_ns)
    return row


def kernels(case: Case, device_bytes: int, host_bytes: int, machine: dict[str, list[Row]], plans: Path | None) -> Row:
    """What lasts longest on the GPU in one step of the case: name, calls and total ms of a few. Raises Refused."""
    verified = _verified(case, device_bytes, host_bytes, machine, plans)
    _, trainer = trainer_of(case, verified, ArenaBackend, case.way.prepare)
    with trainer:
        trainer.run(WARM_UP)
        with torch.profiler.profile(activities=[PROFILED]) as profiler:
            trainer.run(1)
    longest = sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total)
    told = [
        {"name": event.key[:200], "calls": event.count, "ms": event.self_device_time_total / 1e3}
        for event in longest
        if event.device_type != DeviceType.CPU
    ]
    return {"case": case.key, "fused": case.fused, "graphs": case.graphs, "longest": told[:LONGEST]}


def _verified(
    case: Case, device_bytes: int, host_bytes: int, machine: dict[str, list[Row]], plans: Path | None
) -> Verified:
    known, memory = machine_of(machine), {"device_bytes": device_bytes, "host_bytes": host_bytes}
    return verify(schedule_of(case, known, **memory, planning_s=PLANNING_S, plans=plans))


def trainer_of(
    case: Case, verified: Verified, backend_of: Callable[[Schedule], B], prepare: Prepare
) -> tuple[B, Trainer[Any]]:
    """Who trains by the schedule from here on, the most memory that anything took forgotten."""
    schedule = verified.schedule
    gpu_machine.clear()
    with contextlib.suppress(OSError):  # then the most memory is that of the whole process
        Path("/proc/self/clear_refs").write_text("5")
    if case.device_gib:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(case.device_gib * 2**30 / total)
    backend = backend_of(schedule)
    trainer = Trainer(
        verified,
        backend,
        RandomTokens(vocab_size=schedule.model.vocab_size, workload=schedule.workload),
        Adam(lr=1e-5),
        initial=repeated_parameters(schedule.model, 0),
        record=True,
        pointwise=case.way.pointwise,
        prepare=prepare,
    )
    torch.cuda.empty_cache()  # what made the weights
    torch.cuda.reset_peak_memory_stats()
    return backend, trainer


class Pace:
    """How many steps a row is made of, and from the end of its warm-up what torch's allocator waits for, and others do.

    Before, processes of its own may compile.
    """

    def __init__(self) -> None:
        self.retried, self.neighbours, self._asked = 0, Neighbours(), 0
        self._since = math.inf

    def on_step(self, step: int, loss: float, norm: float | None) -> None:
        """A step has ended."""
        if step == WARM_UP - 1:
            self.retried, self.neighbours = retries(), Neighbours(long_s=LASTS_S)
            self._since = time.perf_counter()

    def enough(self) -> bool:
        """Whether no further step is wanted; asked before each."""
        self._asked += 1
        return self._asked > WARM_UP + STEPS and time.perf_counter() - self._since >= LASTS_S


def first_counted(steps: int) -> int:
    """Of so many steps, the first whose period counts: from there on they are STEPS, or half of all that are warm."""
    return steps - max(STEPS, (steps - WARM_UP) // 2)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """No collection of garbage, which holds Python's lock for tenths of a second once torch's compiler has run."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def retries() -> int:
    """How often torch's allocator found too little and had to wait for the GPU: no schedule knows of that."""
    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))


def _row(case: Case, schedule: Schedule, trace: Trace, losses: list[float]) -> Row:
    before = first_counted(trace.steps) - 1
    steps_s = (trace.step_ns(before) / 1e9).tolist()
    step_s, window = statistics.median(steps_s), trace.window(before)
    model, workload = schedule.model, schedule.workload
    executed = sum(op.flops for op in schedule.ops if op.kind == Kind.COMPUTE)
    span = window[1] - window[0]
    return {
        "case": case.key,
        "fused": case.fused,
        "graphs": case.graphs,
        **schedule.describe(),
        "tokens_per_step": workload.tokens_per_step,
        "step_s": {"median": step_s, "least": min(steps_s), "most": max(steps_s)},
        "tokens_per_s": workload.tokens_per_step / step_s,
        "model_TFLOP_s": model_flops_per_step(model, workload) / step_s / 1e12,
        "executed_TFLOP_s": executed / step_s / 1e12,
        "busy": {str(s): trace.busy_ns(schedule, s, window) / span for s in schedule.streams},
        "compute_idle_ns": trace.idle_causes_ns(schedule, Stream.COMPUTE, window),
        "op_ns": in_step_ns(schedule, trace),
        "losses": losses,
    }


def in_step_ns(schedule: Schedule, trace: Trace) -> dict[str, float]:
    """Median ns of each op that is timed alone, too, by signature: in the steps that count."""
    found, keys = defaultdict[str, list[int]](list), timed(schedule)
    counted = trace.step >= first_counted(trace.steps)
    for place, ns in zip(trace.op[counted].tolist(), (trace.end_ns - trace.start_ns)[counted].tolist(), strict=True):
        if place in keys:
            found[keys[place]].append(ns)
    return {key: statistics.median(times) for key, times in found.items()}


def _handing_over(backend: CudaBackend, steps: int) -> dict[str, float]:
    """Median host time, ns, to hand over an op, by its kind; of those of so many steps that count."""
    events, backend.events = backend.events or [], None
    found = handed_over(events[len(events) * first_counted(steps) // steps :])
    return {name: statistics.median(times) for name, times in found.items()}


def alone_steps(case: Case) -> int:
    """Steps of one op after another, up to one that counts; one has enough of each op where it holds many."""
    return 1 if case.accumulation >= 4 and not case.graphs else case.way.warm_up + 1


def _alone(trainer: Trainer[Any], backend: CudaBackend, schedule: Schedule, case: Case, step_s: float) -> list[int]:
    """Each op's time, ns, with nothing beside it, on a GPU as busy as in a step, which lasts about `step_s`."""
    counted = max(1, int(LOADED_S / step_s))
    steps = alone_steps(case) + 2 * int(LOADED_S / step_s)
    works = case.way.prepare(schedule, trainer.works())
    trainer.issue_by(Executor(verify(in_turn(schedule)), backend, works, record=True))
    with kept_at_work(backend, schedule, graphs=case.graphs):
        trainer.run(steps)
    trace = trainer.trace()
    spans = (trace.end_ns - trace.start_ns).reshape(-1, len(schedule.ops))
    return [int(statistics.median(times)) for times in spans[-counted:].T]


def _predicted(schedule: Schedule, profile: HardwareProfile, step_s: float) -> Row:
    prediction = predict(schedule, profile)
    predicted_s, bound_s = prediction.period_ns / 1e9, prediction.bound_ns / 1e9
    return {
        "predicted_step_s": predicted_s,
        "prediction_error": predicted_s / step_s - 1,
        "bound_step_s": bound_s,
        "above_bound": step_s / bound_s - 1,
        "binding": prediction.binding,
    }


def _spin(trainer: Trainer[Any], backend: CudaBackend, verified: Verified, alone_ns: Mapping[str, float]) -> float:
    """The median step, s, when kernels merely last as long as they do alone. The weights are worthless after it.

    What is not timed by itself takes none: copies of saved activations. The steps that are spun have none of these.
    """
    schedule = verified.schedule
    durations_ns, keys = [0] * len(schedule.ops), timed(schedule)
    for place, key in keys.items():
        durations_ns[place] = int(alone_ns[key])
    works = spinning(schedule, trainer.works(), durations_ns, backend.spin)
    trace = Executor(verified, backend, works).run(WARM_UP + STEPS)
    return float(statistics.median(trace.step_ns(WARM_UP - 1))) / 1e9


def _high_water() -> int | None:
    """The most memory that this process has had resident since it was last cleared, bytes; None where nobody tells."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None
