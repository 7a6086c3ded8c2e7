"""A grid of runs on this machine, to lay beside their predictions: a profile, and other shapes than it saw.

Everything is written as it is measured, so that the same command goes on where it was stopped. In each round
over the whole grid every model is profiled and then run: what the machine does meanwhile falls on the profile and the
runs alike, and what differs between rounds is the machine's own noise.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from megatrain.adam import Adam
from megatrain.demo import POLICIES
from megatrain.measured_parts import claim, kept_in
from megatrain.preflight import require_drive
from megatrain.profile import measure, time_ops, workspaces
from megatrain.representatives import covering, shapes_between
from megatrain.session import train
from megatrain.this_machine import backend_of, machine_here
from megatrain.way import PLAINLY, Way
from schedules import policies, presets
from schedules.errors import InputError
from schedules.files import write_text
from schedules.model import ModelSpec
from schedules.schedule import Schedule
from schedules.trace import Trace
from schedules.verify import verify
from schedules.workload import MemoryBudget, Workload
from sim import hardware
from sim.interpolation import TERMS, Shape, between
from sim.machine import HardwareProfile

Progress = Callable[[float, str], None]  # done in [0, 1], what is being done

CALIBRATED: tuple[Shape, ...] = ((1, 64), (4, 64), (2, 128), (1, 256), (4, 256))
HELD_OUT: tuple[Shape, ...] = ((3, 64), (2, 96), (1, 192), (3, 128), (2, 224))
ROUNDS = 2
STEPS = 10
WARMUP = 3  # steps of every run left out: threads and caches settle
ROOM = MemoryBudget(device_bytes=1 << 33, host_bytes=1 << 33)


GPU_MODELS = ("qwen2.5-0.5b", "llama-3.2-1b", "qwen2.5-1.5b")
GPU_CALIBRATED: tuple[Shape, ...] = ((1, 1024), (8, 1024), (4, 2048), (1, 4096), (4, 4096))
GPU_HELD_OUT: tuple[Shape, ...] = ((4, 1024), (2, 2048), (1, 3072), (3, 2560))


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
    """What is profiled, and what is run to check predictions: no run is of a shape that the profile saw.

    A policy may be followed by knobs: "streamed nvme=4". `nvme` is a folder on the drive for those that use one. The
    profile and the runs compute in the same `way`.
    """

    models: tuple[ModelSpec, ...]
    policies: tuple[str, ...] = POLICIES
    calibrated: tuple[Shape, ...] = CALIBRATED
    held_out: tuple[Shape, ...] = HELD_OUT
    precision: str = "fp32"
    rounds: int = ROUNDS
    steps: int = STEPS
    backend: str = "cpu"
    room: MemoryBudget = ROOM
    nvme: Path | None = None
    way: Way = PLAINLY

    def __post_init__(self) -> None:
        if shared := set(self.calibrated) & set(self.held_out):
            raise InputError(
                f"shapes are both profiled and validated: {', '.join(map(named, sorted(shared)))}; hold them out of one"
            )
        for shape in self.held_out:
            if between(dict.fromkeys(self.calibrated, 1.0), shape) is None:
                raise InputError(
                    f"shape {named(shape)} is not among the profiled ones ({', '.join(map(named, self.calibrated))}): "
                    f"profile at least {TERMS}, with tokens and sequences from below it to above it"
                )
        if self.steps <= WARMUP + 1:
            raise InputError(f"a run of {self.steps} steps is too short: {WARMUP} of them are left out")

    def schedules(self, model: ModelSpec, shapes: Sequence[Shape]) -> list[Schedule]:
        """Every policy on a model, shape by shape."""
        room = replace(self.room, nvme_bytes=self.room.host_bytes if self.nvme else 0)
        chosen = [policies.with_knobs(text) for text in self.policies]
        return [
            policies.build(name, model, self._workload(shape), room, **knobs)
            for shape in shapes
            for name, knobs in chosen
        ]

    def points(self) -> list[Schedule]:
        """What is run, all of it."""
        return [schedule for model in self.models for schedule in self.schedules(model, self.held_out)]

    def measured(self) -> dict[str, str]:
        """What all results in a folder have in common, by name. Shapes to be run may be added to those there."""
        return {
            "models": ", ".join(model.name for model in self.models),
            "policies": ", ".join(self.policies),
            "profiled shapes": ", ".join(map(named, self.calibrated)),
            "precision": self.precision,
            "rounds": str(self.rounds),
            "steps of a run": str(self.steps),
        }

    def _workload(self, shape: Shape) -> Workload:
        try:
            return Workload(micro_batch_size=shape[0], seq_len=shape[1], precision=self.precision)
        except ValueError as error:
            raise InputError(str(error)) from error


def named(shape: Shape) -> str:
    """As commands take it: 2x128."""
    return f"{shape[0]}x{shape[1]}"


def usual(backend: str | None) -> Grid:
    """What is worth validating: on a CPU models that train in a blink, on a GPU, where there is one, real ones.

    Raises:
        InputError: the backend is not on this machine.
    """
    here = machine_here(partial(backend_of, backend), None)
    if not here.on_gpu:
        return Grid(models=tuple(models()))
    return Grid(
        models=tuple(presets.load(name) for name in GPU_MODELS),
        calibrated=GPU_CALIBRATED,
        held_out=GPU_HELD_OUT,
        precision="bf16",
        backend="cuda",
        room=here.budget,
    )


@dataclass(frozen=True, kw_only=True)
class Point:
    """A schedule and its measured runs, a trace per round; the largest workspace of its ops, bytes."""

    schedule: Schedule
    rounds: tuple[Trace, ...]
    workspace: int


def profile_and_run(
    grid: Grid, folder: Path, profiling: Progress, running: Progress
) -> tuple[HardwareProfile, list[Point]]:
    """Profile the calibrated shapes and train by every point's schedule.

    Both take turns, model by model, in every round, or the machine would have one pace for the profile and another for
    the runs. What is in `folder` is not measured or run again.

    Raises:
        InputError: ops cannot be computed in the grid's way here, there is no such policy or precision, two points have
            one name, or there is no folder on a drive where a schedule needs one.
        Refused: what is in `folder` is of another machine, drive, way or grid; or what `train` refuses.
    """
    here = machine_here(partial(backend_of, grid.backend), grid.nvme)
    grid.way.require(on_gpu=here.on_gpu)
    calibrated = {model.name: grid.schedules(model, grid.calibrated) for model in grid.models}
    schedules = grid.points()
    names = [name_of(schedule) for schedule in schedules]
    if twice := next((name for at, name in enumerate(names) if name in names[:at]), None):  # one run would be two
        raise InputError(f"two points are called {twice}: name each model, policy and shape once, and rename a file")
    for schedule in schedules:
        require_drive(verify(schedule), grid.nvme)
    claim(folder, here, grid.way, grid.measured())  # not before it is known that there is something to measure
    machine, parts, path = partial(backend_of, grid.backend), folder / "parts", folder / "profile.json"
    found: dict[str, list[Trace]] = {name_of(schedule): [] for schedule in schedules}
    turns = list(itertools.product(range(grid.rounds), grid.models))
    for turn, (number, model) in enumerate(turns):

        def told(progress: Progress, done: float, note: str, of: int = len(turns), turn: int = turn) -> None:
            progress((turn + done) / of, f"round {turn // len(grid.models) + 1}, {note}")

        if not path.is_file():
            time_ops(
                calibrated[model.name],
                number,
                progress=partial(told, profiling, of=len(turns) + 1),
                machine=machine,
                nvme=grid.nvme,
                way=grid.way,
                parts=parts,
            )
        chosen = grid.schedules(model, grid.held_out)
        for index, schedule in enumerate(chosen):
            told(running, index / len(chosen), name_of(schedule))
            found[name_of(schedule)].append(_trained(grid, schedule, number, folder / "traces"))
    if not path.is_file():
        held = {batch * seq for batch, seq in grid.held_out}
        unseen = [shape for shape in shapes_between(grid.calibrated) if shape[0] * shape[1] not in held]
        measure(
            [schedule for of_model in calibrated.values() for schedule in of_model],
            progress=profiling,
            machine=machine,
            nvme=grid.nvme,
            way=grid.way,
            parts=parts,
            out=path,
            memory=covering([s for model in grid.models for s in grid.schedules(model, unseen)], "computed"),
            rounds=grid.rounds,
        )
    workspaces = _workspaces(grid, schedules, folder / "workspace.json", running)
    profiling(1.0, "")
    running(1.0, "")
    return hardware.load(path), [
        Point(schedule=schedule, rounds=tuple(found[name_of(schedule)]), workspace=workspaces[name_of(schedule)])
        for schedule in schedules
    ]


def _trained(grid: Grid, schedule: Schedule, number: int, folder: Path) -> Trace:
    """The trace of a point's run in a round, which is run if the folder has none."""
    path = folder / f"{name_of(schedule)}.{number + 1}.json"
    if not path.is_file():
        run = train(
            verify(schedule),
            steps=grid.steps,
            hyper=Adam(lr=1e-4),
            seed=number,
            backend=grid.backend,
            nvme=grid.nvme,
            way=grid.way,
        )
        run.trace.save(path)
    trace = Trace.read(path)
    trace.check(schedule)
    return trace


def _workspaces(grid: Grid, schedules: Sequence[Schedule], path: Path, progress: Progress) -> dict[str, int]:
    """By point, from a step apart: to watch memory takes time."""
    found: dict[str, int] = kept_in(path) or {}
    for schedule in schedules:
        if (name := name_of(schedule)) not in found:
            progress(1.0, f"memory of {name}")
            on = partial(backend_of, grid.backend)
            found[name] = max(workspaces(schedule, on, grid.nvme, grid.way).values())
            write_text(path, json.dumps(found))
    return found


def policy_of(schedule: Schedule) -> str:
    """Its policy, as in Grid."""
    return " ".join([schedule.policy, *policies.changed(schedule)])


def name_of(schedule: Schedule) -> str:
    """A point's name, also of its files."""
    workload = schedule.workload
    return (
        f"{schedule.model.name}-{policy_of(schedule).replace(' ', '-')}-{workload.micro_batch_size}x{workload.seq_len}"
    )
