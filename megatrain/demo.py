"""The demonstration: one model trained by five policies on this machine, each predicted before it is run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatrain.adam import Adam
from megatrain.fitting import LeftOut, that_fit, told_left_out
from megatrain.profile import measure
from megatrain.session import Trained, train
from megatrain.this_machine import backend_of, machine_here
from schedules import codec, policies, presets
from schedules.errors import Refused
from schedules.model import ModelSpec
from schedules.schedule import Schedule
from schedules.verify import verify
from schedules.workload import Workload
from sim.machine import HardwareProfile
from sim.prediction import Prediction, predict

POLICIES = ("resident", "streamed", "megatrain", "megatrain_released", "zero3_offload")

Progress = Callable[[float, str], None]  # done in [0, 1], what is being done


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is trained, by kind of device."""

    model: str
    workload: Workload
    lr: float


SETTINGS = {
    "cpu": Setting(model="demo", workload=Workload(micro_batch_size=2, seq_len=128, precision="fp32"), lr=1e-3),
    "cuda": Setting(
        model="llama-3.2-1b", workload=Workload(micro_batch_size=8, seq_len=1024, precision="bf16"), lr=1e-4
    ),
}


def setting(backend: str | None) -> Setting:
    """Of a backend, or of the GPU where there is one. Raises InputError for one that is not here."""
    machine = backend_of(backend)
    machine.close()
    return SETTINGS[machine.device.type]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One policy: what was predicted, and what happened."""

    schedule: Schedule
    prediction: Prediction
    trained: Trained


@dataclass(frozen=True, kw_only=True)
class Demo:
    """All of a demonstration's results. Its files are `profile.json`, `schedules/` and `traces/`."""

    model: ModelSpec
    workload: Workload
    lr: float
    profile: HardwareProfile
    runs: list[Run]


def schedules_here(backend: str | None = None) -> tuple[list[Schedule], list[LeftOut]]:
    """The policies' schedules for this machine's memory that have room in it, and those that have none.

    Raises:
        InputError: the backend is not on this machine.
        Refused: none has room.
    """
    chosen, at = setting(backend), machine_here(partial(backend_of, backend), None)
    model = presets.load(chosen.model)
    found, left = that_fit([policies.build(name, model, chosen.workload, at.budget) for name in POLICIES], at)
    if not found:
        raise Refused(f"no step of {model.name} fits this machine: {'; '.join(told_left_out(found, left))}")
    return found, left


def measure_machine(
    folder: Path, schedules: Sequence[Schedule], progress: Progress, backend: str | None = None
) -> HardwareProfile:
    """Profile this machine for these schedules; write it to `profile.json`."""
    return measure(
        schedules,
        progress=progress,
        machine=partial(backend_of, backend),
        parts=folder / "parts",
        out=folder / "profile.json",
    )


def run_all(
    folder: Path,
    schedules: Sequence[Schedule],
    profile: HardwareProfile,
    steps: int,
    progress: Progress,
    backend: str | None = None,
) -> Demo:
    """Verify and predict each schedule, then train by it; files are written as they come."""
    chosen = setting(backend)
    proven = [verify(schedule) for schedule in schedules]
    predictions = []
    for verified in proven:
        schedule = verified.schedule
        codec.save(schedule, folder / "schedules" / f"{schedule.policy}.json")
        predictions.append(predict(schedule, profile))
        predictions[-1].trace.save(folder / "traces" / f"{schedule.policy}.predicted.json")
    runs = []
    for number, (verified, prediction) in enumerate(zip(proven, predictions, strict=True)):
        schedule = verified.schedule

        def told(
            step: int, loss: float, norm: float | None, number: int = number, policy: str = schedule.policy
        ) -> None:
            progress((number + (step + 1) / steps) / len(proven), f"{policy}, loss {loss:.2f}")

        trained = train(verified, steps=steps, hyper=Adam(lr=chosen.lr), backend=backend, on_step=told)
        trained.trace.save(folder / "traces" / f"{schedule.policy}.measured.json")
        runs.append(Run(schedule=schedule, prediction=prediction, trained=trained))
    return Demo(model=proven[0].schedule.model, workload=chosen.workload, lr=chosen.lr, profile=profile, runs=runs)
