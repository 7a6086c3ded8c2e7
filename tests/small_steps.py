"""Steps of a few real blocks, on machines with as much memory as is asked for: real costs, quickly built."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from schedules import presets
from schedules.model import ModelSpec
from schedules.schedule import Schedule
from schedules.workload import Workload
from sim import hardware
from sim.machine import HardwareProfile
from sim.prediction import memory_of, predict, shortage

MACHINES = ("h200", "gh200", "a100-pcie", "rtx4090")


def shallow(blocks: int, name: str = "qwen2.5-7b") -> ModelSpec:
    """A real model's layers, few of them and with a small vocabulary."""
    return replace(presets.load(name), num_hidden_layers=blocks, vocab_size=8192)


def state_bytes(model: ModelSpec, per_param: int = 12) -> int:
    return model.total_params * per_param


def machine(name: str, *, device_gb: float, host_gb: float) -> HardwareProfile:
    return hardware.override(hardware.load(name), [f"gpu.memory={device_gb:.3f}GB", f"host.memory={host_gb:.3f}GB"])


def step(batch: int, seq: int = 512, accumulation: int = 1, **more: Any) -> Workload:
    return Workload(micro_batch_size=batch, seq_len=seq, accumulation=accumulation, **more)


def period_if_it_fits(schedule: Schedule, profile: HardwareProfile) -> float | None:
    """What has no room is told without being simulated, which takes long."""
    return None if shortage(schedule, profile, memory_of(profile)) else predict(schedule, profile).period_ns
