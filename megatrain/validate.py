"""A grid of runs on this machine, to lay beside their predictions: a profile first, then other shapes than it saw.

Everything is written as it is measured, so that the same command goes on where it was stopped. Rounds go over the
whole grid one after another: what the machine does meanwhile falls on all points alike, and what differs between
rounds is the machine's own noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatrain.profile import measure
from megatrain.session import train
from schedules import policies, presets
from schedules.errors import InputError
from schedules.model import ModelSpec
from schedules.schedule import Schedule
from schedules.trace import Trace
from schedules.verify import verify
from schedules.workload import MemoryBudget, Workload
from sim import hardware
from sim.hardware import HardwareProfile

Shape = tuple[int, int]  # micro-batch, sequence
Progress = Callable[[float, str], None]  # done in [0, 1], what is being done

POLICIES = ("resident", "streamed", "megatrain", "megatrain_released", "zero3_offload")
CALIBRATED: tuple[Shape, ...] = ((1, 64), (4, 64), (2, 128), (1, 256), (4, 256))
HELD_OUT: tuple[Shape, ...] = ((3, 64), (2, 96), (1, 192), (3, 128), (2, 224))
ROUNDS = 2
STEPS = 10
WARMUP = 3  # steps of every run left out: threads and caches settle
ROOM = MemoryBudget(device_bytes=1 << 33, host_bytes=1 << 33)


def models() -> list[ModelSpec]:
    """The demo's model, a wider and shallower one, and a narrower and deeper one."""
    demo = presets.load("demo")
    wide = replace(
        demo, name="wide", hidden_size=640, intermediate_size=1792, num_hidden_layers=4, num_attention_heads=10
    )
    deep = replace(
        demo, name="deep", hidden_size=256, intermediate_size=768, num_hidden_layers=12, num_attention_heads=4
    )
    return [demo, wide, deep]


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What is profiled, and what is run to check predictions: no run is of a shape that the profile saw."""

    models: tuple[ModelSpec, ...]
    policies: tuple[str, ...] = POLICIES
    calibrated: tuple[Shape, ...] = CALIBRATED
    held_out: tuple[Shape, ...] = HELD_OUT
    precision: str = "fp32"
    rounds: int = ROUNDS
    steps: int = STEPS

    def __post_init__(self) -> None:
        if shared := set(self.calibrated) & set(self.held_out):
            raise InputError(f"shapes are both profiled and validated: {sorted(shared)}; hold them out of one")
        if self.steps <= WARMUP + 1:
            raise InputError(f"a run of {self.steps} steps is too short: {WARMUP} of them are left out")

    def schedules(self, model: ModelSpec, shapes: Sequence[Shape]) -> list[Schedule]:
        """Every policy on a model, shape by shape."""
        return [policies.build(name, model, self._workload(shape), ROOM) for shape in shapes for name in self.policies]

    def points(self) -> list[Schedule]:
        """What is run, all of it."""
        return [schedule for model in self.models for schedule in self.schedules(model, self.held_out)]

    def _workload(self, shape: Shape) -> Workload:
        return Workload(micro_batch_size=shape[0], seq_len=shape[1], precision=self.precision)


@dataclass(frozen=True, kw_only=True)
class Point:
    """A schedule and its measured runs, a trace per round."""

    schedule: Schedule
    rounds: tuple[Trace, ...]


def calibrate(grid: Grid, folder: Path, progress: Progress) -> HardwareProfile:
    """The profile in `folder`, measured now if there is none. What ops share is measured with the first model."""
    path = folder / "profile.json"
    if path.is_file():
        return hardware.load(path)
    folder.mkdir(parents=True, exist_ok=True)
    schedules = [schedule for model in grid.models for schedule in grid.schedules(model, grid.calibrated)]
    profile = measure(grid.models[0], schedules, progress=progress)
    hardware.save(profile, path)
    return profile


def run(grid: Grid, folder: Path, progress: Progress) -> list[Point]:
    """Train by every point's schedule in every round; runs whose trace is in `folder` are not run again."""
    (folder / "traces").mkdir(parents=True, exist_ok=True)
    schedules = grid.points()
    found: list[list[Trace]] = [[] for _ in schedules]
    total = grid.rounds * len(schedules)
    for number in range(grid.rounds):
        for index, schedule in enumerate(schedules):
            progress((number * len(schedules) + index) / total, f"round {number + 1}, {name_of(schedule)}")
            path = folder / "traces" / f"{name_of(schedule)}.{number + 1}.json"
            if not path.is_file():
                train(verify(schedule), steps=grid.steps, lr=1e-4, seed=number).trace.save(path)
            trace = Trace.read(path)
            trace.check(schedule)
            found[index].append(trace)
    progress(1.0, "")
    return [Point(schedule=s, rounds=tuple(traces)) for s, traces in zip(schedules, found, strict=True)]


def name_of(schedule: Schedule) -> str:
    """A point's name, also of its files."""
    workload = schedule.workload
    return f"{schedule.model.name}-{schedule.policy}-{workload.micro_batch_size}x{workload.seq_len}"
