"""The profiler: everything a schedule needs is measured, says where from, and survives its file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatrain import profile
from megatrain.demo import POLICIES
from schedules import policies
from schedules.errors import Refused
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


def workload(seq_len: int = 16, precision: str = "fp32") -> Workload:
    return Workload(micro_batch_size=1, seq_len=seq_len, accumulation=2, precision=precision)


def schedules(seq_len: int = 16) -> list[Schedule]:
    return [policies.build(name, MODEL, workload(seq_len), ROOM) for name in POLICIES]


def measured_quickly(chosen: list[Schedule], told: list[float]) -> HardwareProfile:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile, "PAIR_SECONDS", 0.02)
        patch.setattr(profile, "SLAB", 1 << 12)
        return profile.measure(MODEL, chosen, progress=lambda done, note: told.append(done))


@pytest.fixture(scope="module")
def measured() -> tuple[HardwareProfile, list[float]]:
    told: list[float] = []
    return measured_quickly(schedules(), told), told


def test_every_op_of_the_demos_policies_has_a_cost(measured: tuple[HardwareProfile, list[float]]) -> None:
    for schedule in schedules():
        assert predict(schedule, measured[0]).period_ns > 0


def test_schedules_on_nvme_are_left_out() -> None:
    """They can be built and not yet run; profiling every policy there is must not fail on them."""
    room = replace(ROOM, nvme_bytes=1 << 30)
    on_nvme = policies.build("zero_infinity", MODEL, workload(), room)
    beside = policies.build("zero3_offload", MODEL, workload(), ROOM)
    found = measured_quickly([on_nvme, beside], [])
    assert predict(beside, found).period_ns > 0
    with pytest.raises(Refused, match="NVMe"):
        measured_quickly([on_nvme], [])


def test_the_optimizers_rate_is_told_only_where_there_is_one() -> None:
    """ZeRO-3 keeps an fp32 master where bf16 was asked for: its steps are longer than those without one."""
    names = ("megatrain", "zero3_offload")
    found = [policies.build(name, MODEL, workload(precision="bf16"), ROOM) for name in names]
    of_both = measured_quickly(found, [])
    assert {schedule.workload.precision for schedule in found} == {"bf16", "bf16_fp32"}
    assert of_both.host.adam_params_per_s is None
    assert all(predict(schedule, of_both).period_ns > 0 for schedule in found)
    assert measured_quickly(found[:1], []).host.adam_params_per_s is not None


def test_nothing_exceeds_what_it_is_part_of(measured: tuple[HardwareProfile, list[float]]) -> None:
    for path, ceiling in hardware.CEILINGS:
        low, high = hardware.lookup(measured[0], path), hardware.lookup(measured[0], ceiling)
        assert low is None or high is None or low.value <= high.value, path


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
        assert "measured on" in source and "1 thread a stream" in source, path
        assert measured[0].date in source, path


def test_progress_moves_forward(measured: tuple[HardwareProfile, list[float]]) -> None:
    told = measured[1]
    assert told == sorted(told) and told[0] == 0 and told[-1] == 1


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
