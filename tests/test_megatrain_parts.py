"""What was measured goes on on the same machine, with the same drive and in the same way only."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_megatrain_here import GIB, Gpu

from megatrain import profile
from megatrain.cpu import CpuBackend
from megatrain.here import Here
from megatrain.parts import claim
from megatrain.way import PLAINLY, Way
from schedules import policies
from schedules.errors import InputError, Refused
from schedules.presets import load
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
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * GIB))

    def interrupted(*on: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(profile, "in_a_run", interrupted)
    options: dict[str, Any] = {
        "progress": lambda done, note: None,
        "parts": tmp_path,
        "machine": lambda: CpuBackend(machine="one"),
    }
    with pytest.raises(KeyboardInterrupt):
        profile.measure(MODEL, SCHEDULES, **options)
    with pytest.raises(Refused, match="another machine or in another way"):
        profile.measure(MODEL, SCHEDULES, **(options | other))
    with pytest.raises(Refused, match="another machine or in another way"):
        profile.time_ops(SCHEDULES, 0, **(options | other))
    with pytest.raises(KeyboardInterrupt):  # it goes on here
        profile.measure(MODEL, SCHEDULES, **options)


def test_graphs_are_refused_without_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="CUDA graphs need a GPU"):
        profile.measure(
            MODEL,
            SCHEDULES,
            progress=lambda done, note: None,
            way=Way(graphs=True),
            parts=tmp_path / "parts",
        )
    assert not (tmp_path / "parts").exists()
