"""Which schedules a machine has room for: only these are profiled, and the others are named."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatrain.cli import profile as profile_command
from megatrain.fitting import that_fit, told_left_out
from megatrain.this_machine import Here
from schedules import policies
from schedules.errors import Refused
from schedules.op import Tier
from schedules.presets import load
from schedules.schedule import Schedule
from schedules.workload import Workload
from sim import hardware
from sim.prediction import peak_bytes

LLAMA, GIB = load("llama-3.1-8b"), 1 << 30
H100 = Here(device="H100", on_gpu=True, device_bytes=77 * GIB, host_bytes=200 * GIB, free_bytes=200 * GIB)


def built(at: Here, *shapes: tuple[int, int]) -> list[Schedule]:
    """All policies, each for the memory there is."""
    workloads = [Workload(micro_batch_size=batch, seq_len=seq) for batch, seq in shapes]
    return [policies.build(name, LLAMA, w, at.budget) for w in workloads for name in policies.comparable()]


def test_room_is_what_is_free_while_weights_are_made() -> None:
    """On a CPU, and beside a GPU that has no memory of its own, both tiers share it."""
    schedule = policies.build("megatrain", LLAMA, Workload(micro_batch_size=1, seq_len=64), H100.budget)
    free, needed = 200 * GIB - 8 * LLAMA.params(LLAMA.head), schedule.allocated_bytes(Tier.HOST)
    room = H100.room_for(schedule)
    assert (room.device_bytes, room.host_bytes) == (H100.device_bytes, free)
    room = replace(H100, on_gpu=False).room_for(schedule)
    assert (room.device_bytes, room.host_bytes) == (free - needed, free)
    integrated = replace(H100, integrated=True)
    assert integrated.room_for(schedule) == replace(H100.room_for(schedule), unified_bytes=free)
    assert integrated.budget == replace(H100.budget, unified_bytes=200 * GIB)
    room = replace(H100, on_gpu=False, free_bytes=GIB).room_for(schedule)
    assert (room.device_bytes, room.host_bytes) == (0, 0)


def test_schedules_that_have_no_room_are_left_out_and_named() -> None:
    at, datasheet = replace(H100, host_bytes=130 * GIB, free_bytes=130 * GIB), hardware.load("h100")
    found, left = that_fit(built(at, (4, 1024)), at)
    assert {"streamed", "megatrain", "fsdp_offload"} <= {schedule.policy for schedule in found}
    assert {"resident", "zero3_offload", "zero_infinity"} <= {schedule.policy for schedule, _ in left}
    assert all(peak_bytes(s, datasheet)[Tier.DEVICE] <= at.device_bytes for s in found)
    assert all(s.allocated_bytes(Tier.HOST) <= at.host_bytes and not s.allocated_bytes(Tier.NVME) for s in found)
    told = {line.split()[0]: line for line in told_left_out(found, left)}
    assert len(told) == len(left) == len(policies.comparable()) - len(found)
    assert told["resident"].startswith("resident is not measured: it lacks ") and "device memory" in told["resident"]
    assert "at least" not in told["resident"]
    assert "of host memory" in told["zero3_offload"] and "(--nvme FOLDER)" in told["zero_infinity"]


def test_workspace_needs_room_too() -> None:
    (schedule,) = (s for s in built(H100, (4, 1024)) if s.policy == "streamed")
    needed = peak_bytes(schedule, hardware.load("h100"))[Tier.DEVICE]
    assert needed > schedule.allocated_bytes(Tier.DEVICE)
    for device_bytes, left in ((needed, 0), (needed - 1, 1)):
        assert len(that_fit([schedule], replace(H100, device_bytes=device_bytes))[1]) == left


def test_a_policy_that_has_room_for_smaller_shapes_is_told_with_those_it_has_not() -> None:
    small = replace(H100, device_bytes=9 * GIB)
    found, left = that_fit([s for s in built(small, (1, 256), (16, 1024)) if s.policy == "megatrain"], small)
    assert [(s.workload.micro_batch_size, s.workload.seq_len) for s in found] == [(1, 256)]
    assert told_left_out(found, left)[0].startswith("megatrain is not measured at 16x1024: it lacks ")
    ((schedule, lacking),) = left
    again = replace(schedule, workload=replace(schedule.workload, recompute="mlp"))
    (told,) = told_left_out(found, [(again, lacking)])
    assert told.startswith("megatrain is not measured at 16x1024 with recompute mlp: it lacks ")


@pytest.mark.parametrize("room", [9, 1])
def test_only_what_has_room_is_profiled(
    room: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a pretended GPU of 9 GiB, and on one of 1 GiB."""
    at = replace(H100, device_bytes=room * GIB)
    timed: list[Schedule] = []

    def measured(schedules: list[Schedule], *, memory: list[Schedule], **more: Any) -> Any:
        timed.extend([*schedules, *memory])
        return hardware.load("h200")

    monkeypatch.setattr("megatrain.this_machine.machine_here", lambda machine, nvme: at)
    monkeypatch.setattr("megatrain.profile.measure", measured)
    options: dict[str, Any] = {
        "batch": 4,
        "seq": 512,
        "precision": "bf16",
        "policy": ["resident", "streamed", "megatrain"],
    }
    command = partial(profile_command.profile, LLAMA.name, out=tmp_path / "p.json", **options)
    if room == 1:
        with pytest.raises(Refused, match=r"no step of llama-3[.]1-8b fits this machine"):
            command()
        assert not timed
    else:
        command()
        assert {"streamed", "megatrain"} & {schedule.policy for schedule in timed}
        datasheet = hardware.load("h100")
        assert all(peak_bytes(s, datasheet)[Tier.DEVICE] <= at.device_bytes for s in timed)
    assert "note: resident is not measured: it lacks at least" in capsys.readouterr().err
