"""The profiler: everything a schedule needs is measured, says where from, and survives its file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatrain import profile
from schedules import policies
from schedules.op import Kind, Phase
from schedules.presets import load
from schedules.schedule import Schedule
from schedules.workload import MemoryBudget, Workload
from sim import hardware
from sim.cost import MissingCost, signature
from sim.hardware import HardwareProfile
from sim.prediction import predict

MODEL = replace(load("tiny"), num_hidden_layers=2)
ROOM = MemoryBudget(device_bytes=1 << 30, host_bytes=1 << 30)


def schedules(seq_len: int = 16) -> list[Schedule]:
    workload = Workload(micro_batch_size=1, seq_len=seq_len, accumulation=2, precision="fp32")
    return [policies.build(name, MODEL, workload, ROOM) for name in ("resident", "streamed", "megatrain_released")]


@pytest.fixture(scope="module")
def measured() -> tuple[HardwareProfile, list[float]]:
    told: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile, "PAIR_SECONDS", 0.02)
        patch.setattr(profile, "SLAB", 1 << 12)
        found = profile.measure(MODEL, schedules(), progress=lambda done, note: told.append(done))
    return found, told


def test_every_op_of_the_schedules_has_a_cost(measured: tuple[HardwareProfile, list[float]]) -> None:
    for schedule in schedules():
        assert predict(schedule, measured[0]).period_ns > 0


def test_another_shape_is_an_error_and_not_a_guess(measured: tuple[HardwareProfile, list[float]]) -> None:
    with pytest.raises(MissingCost, match="megatrain profile"):
        predict(schedules(seq_len=8)[0], measured[0])


def test_the_file_holds_the_same_profile(measured: tuple[HardwareProfile, list[float]], tmp_path: Path) -> None:
    hardware.save(measured[0], tmp_path / "here.json")
    again = hardware.load(str(tmp_path / "here.json"))
    assert again == measured[0]
    assert [path.name for path in tmp_path.iterdir()] == ["here.json"]


def test_every_number_says_that_it_was_measured_and_when(measured: tuple[HardwareProfile, list[float]]) -> None:
    rows = hardware.listing(measured[0])
    assert len(rows) > 15
    for path, _, _, source in rows:
        assert "measured on" in source or source == "in the latency", path
        assert measured[0].date in source or source == "in the latency"


def test_progress_moves_forward(measured: tuple[HardwareProfile, list[float]]) -> None:
    told = measured[1]
    assert told == sorted(told) and told[0] == 0 and told[-1] < 1


def test_ops_are_timed_alone() -> None:
    """In a serialised step no op starts before the one issued before it has ended."""
    schedule = schedules()[1]
    times = profile.alone(schedule)
    assert [op for op, _, _ in times] == list(schedule.ops)
    assert all(duration > 0 for op, duration, _ in times if op.phase != Phase.SYNC)
    assert all(gap >= 0 for _, _, gap in times)


def test_signatures_of_all_policies_are_covered_by_them() -> None:
    """What decides an op's time is in its signature: no two kinds of work share one."""
    for schedule in schedules():
        by_signature: dict[str, set[tuple[Phase, int]]] = {}
        for op in schedule.ops:
            if op.kind == Kind.COMPUTE:
                key = signature(op, schedule.model, schedule.workload)
                by_signature.setdefault(key, set()).add((op.phase, op.flops))
        assert all(len(kinds) == 1 for kinds in by_signature.values())
