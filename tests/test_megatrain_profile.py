"""The profiler: everything a schedule needs is measured, says where from, and survives its file."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from quick_readings import hurry

from megatrain import profile, rates, readings
from megatrain.cpu import CpuBackend
from megatrain.demo import POLICIES
from megatrain.measured_parts import FORMAT
from megatrain.native import adam as native
from megatrain.profile_numbers import profile_of
from megatrain.this_machine import Here
from megatrain.way import PLAINLY
from megatrain.workspace import peak_bytes
from schedules import policies
from schedules.errors import InputError, Refused
from schedules.op import Kind, Phase, Stream, Tier
from schedules.presets import load
from schedules.schedule import Schedule
from schedules.workload import MemoryBudget, Workload
from sim import hardware, machine
from sim.cost import MissingCost
from sim.machine import HardwareProfile
from sim.prediction import peak_bytes as peak_bytes_of
from sim.prediction import predict
from sim.signature import signature

MODEL = replace(load("tiny"), num_hidden_layers=2)
ROOM = MemoryBudget(device_bytes=1 << 30, host_bytes=1 << 30)


def workload(seq_len: int = 16, precision: str = "fp32") -> Workload:
    return Workload(micro_batch_size=1, seq_len=seq_len, accumulation=2, precision=precision)


def schedules(seq_len: int = 16) -> list[Schedule]:
    return [policies.build(name, MODEL, workload(seq_len), ROOM) for name in POLICIES]


def measured_quickly(chosen: list[Schedule], told: list[float]) -> HardwareProfile:
    with pytest.MonkeyPatch.context() as patch:
        hurry(patch)
        return profile.measure(chosen, progress=lambda done, note: told.append(done))


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
    with pytest.raises(InputError, match="NVMe"):
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
    for path, ceiling in machine.CEILINGS:
        low, high = machine.lookup(measured[0], path), machine.lookup(measured[0], ceiling)
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
    rows = machine.listing(measured[0])
    assert len(rows) > 15
    for path, _, _, source in rows:
        assert "measured on" in source and "1 thread a stream" in source, path
        assert measured[0].date in source, path


def test_an_optimizer_without_its_kernel_is_told_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "why_not", lambda: "g++ refused adam.cpp: it is no program\nand more")
    source = measured_quickly(schedules()[:1], []).host.adam_efficiency.source
    assert "the optimizer in several passes (g++ refused adam.cpp: it is no program)" in source and "\n" not in source


def test_progress_moves_forward(measured: tuple[HardwareProfile, list[float]]) -> None:
    told = measured[1]
    assert told == sorted(told) and told[0] == 0 and told[-1] == 1


def test_ops_are_timed_alone() -> None:
    """In a serialised step no op starts before the one issued before it has ended."""
    schedule = schedules()[1]
    found = profile.alone(schedule)
    durations, gaps = np.array(found["durations_ns"]), np.array(found["gaps_ns"])
    assert durations.shape == (profile.ALONE_STEPS, len(schedule.ops))
    working = [op.phase != Phase.SYNC for op in schedule.ops]
    assert (durations[:, working] > 0).all() and (gaps >= 0).all()


def test_an_interrupted_measurement_goes_on_where_it_was(tmp_path: Path) -> None:
    """What was measured stays until its profile is written; another machine's parts are refused."""
    parts, chosen = tmp_path / "parts", schedules()[:2]
    with pytest.MonkeyPatch.context() as patch:
        hurry(patch)
        patch.setattr(readings, "dram", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            profile.measure(chosen, progress=lambda done, note: None, parts=parts)
    kept = sorted(path.name for path in parts.iterdir())
    assert f"ops {chosen[0].digest} 0.{FORMAT}.json" in kept and any(name.startswith("links ") for name in kept)
    assert f"products.{FORMAT}.json" in kept and f"dram.{FORMAT}.json" not in kept
    with pytest.MonkeyPatch.context() as patch:
        hurry(patch)
        patch.setattr(profile, "alone", lambda *a: pytest.fail("measured again"))
        patch.setattr(readings, "links", lambda *a: pytest.fail("measured again"))
        with pytest.raises(InputError, match="cannot write"):  # as on a full drive
            profile.measure(chosen, progress=lambda done, note: None, parts=parts, out=tmp_path)
        found = profile.measure(chosen, progress=lambda done, note: None, parts=parts, out=tmp_path / "profile.json")
    assert predict(chosen[0], found).period_ns > 0 and not parts.exists()
    assert hardware.load(tmp_path / "profile.json") == found
    parts.mkdir()
    (parts / "machine.txt").write_text("another one")
    with pytest.raises(Refused, match="another machine"):
        profile.measure(chosen, progress=lambda done, note: None, parts=parts)


def test_a_drive_is_measured_and_its_schedules_with_it(tmp_path: Path) -> None:
    room = replace(ROOM, nvme_bytes=1 << 30)
    on_nvme = policies.build("zero_infinity", MODEL, workload(), room)
    with pytest.MonkeyPatch.context() as patch:
        hurry(patch)
        found = profile.measure([on_nvme], progress=lambda done, note: None, nvme=tmp_path)
    assert found.nvme is not None and found.nvme.read.value > 0 and found.nvme.capacity.value > 1e6
    assert 1 <= found.nvme.both.value <= 2
    assert found.measured is not None and found.measured.nvme is not None
    assert {name.split("/")[0] for name in found.measured.nvme.values} == {"read", "write"}
    assert predict(on_nvme, found).period_ns > 0
    assert list(tmp_path.iterdir()) == []


def test_readings_hold_every_case_in_order(measured: tuple[HardwareProfile, list[float]]) -> None:
    found = measured[0].measured
    assert found is not None
    for part, some in {
        "links": "h2d/65536/both",
        "dram": "fresh/1/alone",
        "adam": "bf16_8bit/",
        "products": "fp32",
        "host": "issue/copy",
    }.items():
        values = getattr(found, part).values
        assert any(name.startswith(some) for name in values), part
        assert all(0 <= least <= median <= most for least, median, most in values.values()), part
    assert found.op_times is not None and found.op_noise is not None
    assert set(found.op_noise.values) == set(found.op_times.values)


def test_workspace_is_what_an_op_allocates_and_does_not_keep() -> None:
    kept: list[torch.Tensor] = []
    cpu = torch.device("cpu")
    few = 64  # bytes of scalars
    assert 0 <= peak_bytes(lambda: kept.append(torch.ones(1000) + 1), cpu) - 4000 <= few  # the operand; the sum stays
    assert 0 <= peak_bytes(lambda: torch.ones(1000).add_(1).add_(1), cpu) - 4000 <= few
    assert peak_bytes(lambda: kept.clear(), cpu) == 0


def test_the_largest_workspace_of_a_step_is_the_profiles(measured: tuple[HardwareProfile, list[float]]) -> None:
    schedule = schedules()[0]
    predicted = peak_bytes_of(schedule, measured[0])[Tier.DEVICE] - schedule.allocated_bytes(Tier.DEVICE)
    assert max(profile.workspaces(schedule).values()) == pytest.approx(predicted, rel=0.03)


def test_rates_of_two_streams_count_only_what_ran_together() -> None:
    """A sleep of 2 ms takes as long beside another one: both streams keep their own pace."""
    backend = CpuBackend()
    try:
        load = [rates.Load(stream=s, work=lambda: time.sleep(0.002), amount=7) for s in (Stream.H2D, Stream.CPU)]
        alone, both = rates.rates(backend, load[:1])[0], rates.rates(backend, load)
        assert all(0 < rate.median < 7 / 0.002 for rate in (alone, *both))
        with pytest.raises(ValueError, match="a stream each"):
            rates.rates(backend, [load[0], load[0]])
    finally:
        backend.close()


def test_a_rate_is_that_of_five_windows_of_neighbouring_tasks() -> None:
    """Ten tasks of three each, two in a window, which lasts 100 ns, 200, 300, 400 and 600."""
    tasks = list(itertools.pairwise([0, 50, 100, 200, 300, 450, 600, 800, 1000, 1300, 1600]))
    assert rates._rate(tasks, 3) == pytest.approx((6 / 600e-9, 6 / 300e-9, 6 / 100e-9))
    assert rates._rate(tasks[:1], 3) == pytest.approx((3 / 50e-9,) * 3)
    assert rates._rate([(5, 5)], 3) == pytest.approx((3 / 1e-9,) * 3)  # too quick for the clock


def test_signatures_of_all_policies_are_covered_by_them() -> None:
    """What decides an op's time is in its signature: no two kinds of work share one."""
    for schedule in schedules():
        by_signature: dict[str, set[tuple[Phase, int]]] = {}
        for op in schedule.ops:
            if op.kind == Kind.COMPUTE:
                key = signature(op, schedule.model, schedule.workload)
                by_signature.setdefault(key, set()).add((op.phase, op.flops))
        assert all(len(kinds) == 1 for kinds in by_signature.values())


def test_a_gpu_is_described_as_one() -> None:
    """From the same kinds of readings: copy engines instead of threads, and links that share what both have."""
    schedule = schedules()[1]
    with pytest.MonkeyPatch.context() as patch:
        hurry(patch)
        backend = CpuBackend()
        arenas = readings.Arenas(backend)
        compute = readings.block_load(MODEL, schedule.workload, backend.device)
        whole = {
            "links": readings.links(backend, arenas, compute),
            "products": readings.products(backend),
            "dram": readings.dram(backend, arenas, [1]),
            "adam": readings.optimizer(backend, arenas, [1]),
        }
        shares = [readings.shares(backend, arenas, compute, readings.adam_load(backend, 1000, "fp32"))]
        backend.close()
        here = Here(
            device="a GPU",
            on_gpu=True,
            device_bytes=1 << 36,
            host_bytes=1 << 37,
            free_bytes=1 << 37,
            optimizer_threads=14,
        )
        streams = [profile.in_a_run(schedule)]
        found = profile_of([(schedule, profile.alone(schedule))], streams, [], shares, whole, here, PLAINLY)
    assert "1 thread a stream, 14 on the optimizer's, " in found.host.cores.source
    assert "less 2 GiB, or 3% if more" in found.gpu.memory.source
    assert found.gpu.name == "a GPU" and found.gpu.memory.value == 1 << 36 and found.gpu.copy_slowdown.value >= 0
    assert found.host.copy_threads is None and found.host.compute_threads is None and found.host.adam_threads is None
    for path, ceiling in machine.CEILINGS:
        low, high = machine.lookup(found, path), machine.lookup(found, ceiling)
        assert low is None or high is None or low.value <= high.value, path
    assert predict(schedule, found).period_ns > 0
