"""The demonstration: one model trained by five policies on this machine, each predicted before it is run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatrain.adam import Adam
from megatrain.here import backend_of
from megatrain.profile import measure
from megatrain.session import Trained, train
from schedules import codec, policies, presets
from schedules.model import ModelSpec
from schedules.schedule import Schedule
from schedules.verify import Verified, verify
from schedules.workload import Workload
from sim import hardware
from sim.machine import HardwareProfile
from sim.prediction import Prediction, memory_of, predict

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


def measure_machine(folder: Path, progress: Progress, backend: str | None = None) -> HardwareProfile:
    """Profile this machine for the demo's model and policies; write it to `profile.json`."""
    chosen = setting(backend)
    profile = measure(
        presets.load(chosen.model),
        [verified.schedule for verified in _schedules(chosen, None)],
        progress=progress,
        machine=partial(backend_of, backend),
        parts=folder / "parts",
    )
    hardware.save(profile, folder / "profile.json")
    return profile


def run_all(folder: Path, profile: HardwareProfile, steps: int, progress: Progress, backend: str | None = None) -> Demo:
    """Build, verify and predict each policy's schedule, then train by it; files are written as they come."""
    chosen = setting(backend)
    proven = _schedules(chosen, profile)
    predictions = []
    for verified in proven:
        schedule = verified.schedule
        codec.save(schedule, folder / "schedules" / f"{schedule.policy}.json")
        predictions.append(predict(schedule, profile))
        predictions[-1].trace.save(folder / "traces" / f"{schedule.policy}.predicted.json")
    runs = []
    for number, (verified, prediction) in enumerate(zip(proven, predictions, strict=True)):
        schedule = verified.schedule

        def told(step: int, loss: float, number: int = number, policy: str = schedule.policy) -> None:
            progress((number + (step + 1) / steps) / len(proven), f"{policy}, loss {loss:.2f}")

        trained = train(verified, steps=steps, hyper=Adam(lr=chosen.lr), backend=backend, on_loss=told)
        trained.trace.save(folder / "traces" / f"{schedule.policy}.measured.json")
        runs.append(Run(schedule=schedule, prediction=prediction, trained=trained))
    return Demo(model=proven[0].schedule.model, workload=chosen.workload, lr=chosen.lr, profile=profile, runs=runs)


def _schedules(chosen: Setting, profile: HardwareProfile | None) -> list[Verified]:
    """Each policy's schedule; without a profile yet, for the memory of an H200."""
    memory = memory_of(profile or hardware.load("h200"))
    model = presets.load(chosen.model)
    return [verify(policies.build(name, model, chosen.workload, memory)) for name in POLICIES]
