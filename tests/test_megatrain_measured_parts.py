"""What was measured goes on on the same machine, with the same drive and in the same way only."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from quick_readings import hurry
from test_megatrain_this_machine import GIB, Gpu

from megatrain import profile
from megatrain.cpu import CpuBackend
from megatrain.measured_parts import Parts, claim
from megatrain.representatives import timed_in
from megatrain.this_machine import Here
from megatrain.way import PLAINLY, Way
from schedules import policies
from schedules.errors import InputError, Refused
from schedules.presets import load
from schedules.schedule import Schedule
from schedules.workload import Workload

H100 = Here(device="H100", on_gpu=True, device_bytes=77 * GIB, host_bytes=200 * GIB, free_bytes=200 * GIB)
MODEL = replace(load("tiny"), num_hidden_layers=2)
SCHEDULES = [policies.build("streamed", MODEL, Workload(micro_batch_size=1, seq_len=16, precision="fp32"), H100.budget)]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"device": "H200"}, "device: H100 as a GPU"),
        ({"on_gpu": False}, "device: H100 as a GPU"),
        ({"drive": Path("/other")}, "drive: /drive"),
        ({"drive": None}, "drive: /drive"),
    ],
)
def test_results_go_on_on_the_same_machine_only(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    at = replace(H100, drive=Path("/drive"))
    claim(tmp_path, at, PLAINLY)
    claim(tmp_path, replace(at, drive_bytes=5, free_bytes=7), PLAINLY)
    with pytest.raises(Refused, match=f"another machine or in another way .{told}.: remove it"):
        claim(tmp_path, replace(at, **change), PLAINLY)


def test_a_drive_may_have_a_name_in_another_encoding(tmp_path: Path) -> None:
    at = replace(H100, drive=Path(os.fsdecode(b"/driv\xe9")))
    claim(tmp_path, at, PLAINLY)
    claim(tmp_path, at, PLAINLY)
    with pytest.raises(Refused, match=r"drive: /driv\\xe9"):
        claim(tmp_path, H100, PLAINLY)


def test_results_go_on_in_the_same_way_only(tmp_path: Path) -> None:
    claim(tmp_path, H100, Way(graphs=True))
    with pytest.raises(Refused, match="ops: graphs"):
        claim(tmp_path, H100, PLAINLY)


def test_results_of_something_else_are_told(tmp_path: Path) -> None:
    claim(tmp_path, H100, PLAINLY, {"shapes": "1x16, 2x32", "rounds": "2"})
    claim(tmp_path, H100, PLAINLY, {"shapes": "1x16, 2x32", "rounds": "2"})
    with pytest.raises(Refused, match=r"holds what was measured of something else \(shapes: 1x16, 2x32\): remove it"):
        claim(tmp_path, H100, PLAINLY, {"shapes": "1x16", "rounds": "2"})


def test_what_older_code_measured_is_measured_again(tmp_path: Path) -> None:
    claim(tmp_path, H100, PLAINLY)
    (tmp_path / "streams.json").write_text('{"woken": []}')
    for handed in (1, 2):
        assert Parts(tmp_path, H100, PLAINLY).of("streams", lambda ns=handed: {"handed": ns}) == {"handed": 1}


@pytest.mark.parametrize("left", [b"", bytes(100), b'{"handed": ', b"\xff"])
def test_what_a_loss_of_power_left_without_its_contents_is_measured_again(left: bytes, tmp_path: Path) -> None:
    Parts(tmp_path, H100, PLAINLY).of("streams", lambda: {"handed": 1})
    (part,) = tmp_path.glob("streams*")
    part.write_bytes(left)
    for handed in (2, 3):
        assert Parts(tmp_path, H100, PLAINLY).of("streams", lambda ns=handed: {"handed": ns}) == {"handed": 2}


def test_a_profile_that_was_interrupted_gives_another_model_no_readings_beside_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def reading(name: str) -> Callable[..., dict[str, Any]]:
        return lambda *arguments: read.append(name) or {}  # type: ignore[func-returns-value]

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    for name in ("links", "shares", "products", "dram", "optimizer"):
        monkeypatch.setattr(profile.readings, name, reading(name))
    monkeypatch.setattr(profile.readings, "Arenas", lambda backend: None)
    for name in ("block_load", "adam_load"):
        monkeypatch.setattr(profile.readings, name, lambda *arguments: None)
    monkeypatch.setattr(profile, "alone", lambda *arguments: {"workspace": dict.fromkeys(arguments[-1], 1)})
    monkeypatch.setattr(profile, "in_a_run", lambda *arguments: {})
    monkeypatch.setattr(profile.numbers, "profile_of", interrupted)
    wider = replace(MODEL, hidden_size=2 * MODEL.hidden_size, num_attention_heads=2 * MODEL.num_attention_heads)
    longer = replace(SCHEDULES[0].workload, seq_len=32)
    for model, workload in ((MODEL, SCHEDULES[0].workload), (wider, SCHEDULES[0].workload), (MODEL, longer)):
        for again in (False, True):
            schedules = [policies.build("streamed", model, workload, H100.budget)]
            with pytest.raises(KeyboardInterrupt):
                profile.measure(schedules, progress=lambda done, note: None, parts=tmp_path)
            assert {"links", "shares"} <= set(read) or again
            assert not (again and read)
            read.clear()


def test_what_streams_take_from_one_another_is_read_in_every_round_with_every_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch)
    read: list[tuple[float, float]] = []

    def shares(*on: object) -> dict[str, tuple[float, float]]:
        read.append((1.0, len(read) / 10))
        return {"optimizer": read[-1], "copies": read[-1]}

    monkeypatch.setattr(profile.readings, "shares", shares)
    wider = replace(MODEL, name="wider", hidden_size=2 * MODEL.hidden_size)
    workload = replace(SCHEDULES[0].workload, seq_len=32)
    both = [*SCHEDULES, policies.build("streamed", wider, workload, H100.budget)]
    for schedule in both:  # as they take turns with runs
        profile.time_ops([schedule], 0, progress=lambda done, note: None, parts=tmp_path)
    assert len(read) == 2
    found = profile.measure(both, progress=lambda done, note: None, parts=tmp_path, rounds=2)
    assert len(read) == 4
    assert found.host.cores.value == pytest.approx(1.15)  # the mean of 1 + 0, 0.1, 0.2 and 0.3
    assert "1.15 forward beside copies, means of 4" in found.host.cores.source


def test_another_list_of_schedules_finds_the_workspace_of_all_its_ops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch)
    workload = SCHEDULES[0].workload
    first, second = SCHEDULES[0], policies.build("megatrain", MODEL, workload, H100.budget)
    timed: list[str] = []

    def alone(schedule: Schedule, *on: Any) -> dict[str, Any]:
        timed.append(schedule.policy)
        return {"workspace": dict.fromkeys(on[-1], 1)}

    def workspaces(schedule: Schedule, *on: Any) -> dict[str, int]:
        return dict.fromkeys(timed_in(schedule), 2)

    monkeypatch.setattr(profile, "alone", alone)
    monkeypatch.setattr(profile, "workspaces", workspaces)

    def found(*schedules: Schedule) -> list[dict[str, int]]:
        times = profile.time_ops(schedules, 0, progress=lambda done, note: None, parts=tmp_path)
        return [one["workspace"] for one in times]

    both = found(first, second)
    (apart,) = found(second)
    assert timed == ["streamed", "megatrain"]
    computed = {op for op in timed_in(second) if op in both[0] or op in both[1]}
    assert computed and both[1].keys() < computed == apart.keys()
    assert all(apart[op] == 1 for op in both[1])
    assert found(first, second) == both


@pytest.mark.parametrize(
    "other",
    [
        {"machine": lambda: CpuBackend(machine="another GPU")},
        {"machine": lambda: Gpu(machine="one")},
        {"nvme": Path("/")},
        {"way": Way(fused=True)},
    ],
    ids=["device", "type", "drive", "way"],
)
def test_an_interrupted_profile_does_not_go_on_elsewhere(
    other: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(total_memory=80 * GIB, is_integrated=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)

    def interrupted(*on: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(profile, "in_a_run", interrupted)
    options: dict[str, Any] = {
        "progress": lambda done, note: None,
        "parts": tmp_path,
        "machine": lambda: CpuBackend(machine="one"),
    }
    with pytest.raises(KeyboardInterrupt):
        profile.measure(SCHEDULES, **options)
    with pytest.raises(Refused, match="another machine or in another way"):
        profile.measure(SCHEDULES, **(options | other))
    with pytest.raises(Refused, match="another machine or in another way"):
        profile.time_ops(SCHEDULES, 0, **(options | other))
    with pytest.raises(KeyboardInterrupt):  # it goes on here
        profile.measure(SCHEDULES, **options)


def test_graphs_are_refused_without_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="CUDA graphs need a GPU"):
        profile.measure(
            SCHEDULES,
            progress=lambda done, note: None,
            way=Way(graphs=True),
            parts=tmp_path / "parts",
        )
    assert not (tmp_path / "parts").exists()
