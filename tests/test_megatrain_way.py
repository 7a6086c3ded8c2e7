"""The way in which ops are computed: a profile is measured in one, says in which, and is compared with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quick_readings import hurry
from test_analysis_validation import small
from test_megatrain_cli_files import called

from megatrain import profile, validate, way
from megatrain.backend import Work
from megatrain.pointwise import Pointwise, compiled
from megatrain.way import PLAINLY, Way, measured_in
from schedules import policies, presets
from schedules.errors import InputError, Refused
from schedules.schedule import Schedule
from schedules.workload import MemoryBudget, Workload
from sim import hardware
from sim.machine import WAYS
from sim.prediction import predict

MODEL = replace(presets.load("tiny"), num_hidden_layers=2)
ROOM = MemoryBudget(device_bytes=1 << 30, host_bytes=1 << 30)
FUSED = Way(fused=True)


def schedule() -> Schedule:
    step = Workload(micro_batch_size=1, seq_len=16, precision="fp32")
    return policies.build("streamed", MODEL, step, ROOM)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The compiled functions that are called, by name; compiled in little time."""
    made: list[str] = []

    def counting(name: str) -> Any:
        function = getattr(compiled("aot_eager"), name)
        return lambda *args: (made.append(name), function(*args))[1]

    monkeypatch.setattr(way, "compiled", lambda: Pointwise(**{f.name: counting(f.name) for f in fields(Pointwise)}))
    return made


def test_a_way_is_told_by_name() -> None:
    assert [str(Way(fused=fused, graphs=graphs)) for fused in (False, True) for graphs in (False, True)] == [
        "plain", "graphs", "fused", "fused graphs"
    ]  # fmt: skip
    assert {str(Way(fused=fused, graphs=graphs)) for fused in (False, True) for graphs in (False, True)} == set(WAYS)
    Way(graphs=True).require(on_gpu=True)
    FUSED.require(on_gpu=False)
    with pytest.raises(InputError, match="need a GPU"):
        Way(graphs=True).require(on_gpu=False)


def test_a_profile_is_measured_in_its_way_and_says_so(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hurry(monkeypatch)
    found = profile.measure([schedule()], progress=lambda done, note: None, way=FUSED, memory=[schedule()])
    assert {"rms_forward", "rms_backward", "rotation", "cross_entropy"} <= set(calls)
    assert ", ops fused, " in found.gpu.matmul_flops.source and predict(schedule(), found).period_ns > 0
    hardware.save(found, tmp_path / "here.json")
    assert measured_in(hardware.load(str(tmp_path / "here.json"))) == "fused"
    calls.clear()
    plain = profile.measure([schedule()], progress=lambda done, note: None)
    assert not calls and measured_in(plain) == "plain" and ", ops plain, " in plain.gpu.matmul_flops.source
    assert measured_in(hardware.load("h200")) is None
    assert measured_in(replace(plain, way=None)) == "plain"  # of an older file


def test_what_compiling_takes_is_not_an_ops_workspace(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is it an op's time: a step comes first, in which nothing is measured."""
    measured_after: list[int] = []
    peak = profile.peak_bytes
    monkeypatch.setattr(profile, "peak_bytes", lambda *a: (measured_after.append(len(calls)), peak(*a))[1])
    plain = profile.workspaces(schedule())
    assert measured_after[0] == 0
    measured_after.clear()
    fused = profile.workspaces(schedule(), way=FUSED)
    assert set(fused) == set(plain) and measured_after[0] > 0
    measured_after.clear()
    calls.clear()
    found = profile.alone(schedule(), way=FUSED, metered=list(plain))
    assert set(found["workspace"]) == set(plain) and measured_after[0] > 0


def test_steps_in_which_graphs_are_captured_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[int] = set()

    def replayed(of: Schedule, works: Sequence[Work]) -> list[Work]:
        return [lambda step, work=work: (seen.add(step), work(step))[1] for work in works]  # type: ignore[misc]

    monkeypatch.setattr(way, "replayed", replayed)
    graphs = Way(graphs=True)
    found = profile.alone(schedule(), way=graphs)
    assert np.array(found["durations_ns"]).shape == (profile.ALONE_STEPS, len(schedule().ops))
    assert len(seen) == profile.ALONE_STEPS + 2
    counts = [len(profile.in_a_run(schedule(), way=of)["issued"]["compute"]) for of in (PLAINLY, graphs)]
    assert counts[0] * (profile.WOKEN_STEPS - 2) == counts[1] * (profile.WOKEN_STEPS - 1)
    seen.clear()
    profile.workspaces(schedule(), way=graphs)
    assert not seen  # a graph takes what its kernels do


def test_a_run_in_another_way_than_its_profile_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hurry(monkeypatch)
    step = schedule()
    model = presets.load("tiny")
    of_tiny = policies.build("streamed", model, step.workload, ROOM)
    measured = profile.measure([of_tiny], progress=lambda done, note: None)
    told: list[str] = []
    monkeypatch.setattr("builtins.print", lambda *words, **more: told.append(" ".join(map(str, words))))
    for way_of in (measured.way, "fused"):
        hardware.save(replace(measured, way=way_of), tmp_path / "here.json")
        command = ["run", "tiny", "-b", "1", "-s", "16", "--steps", "1", "-H", str(tmp_path / "here.json")]
        assert called(*command)[1] is None
    notes = [line for line in told if line.startswith("note:")]
    assert notes == [f"note: {tmp_path / 'here.json'} has times of fused ops, and this run computes plain ones"]


@pytest.mark.slow
def test_a_validation_profiles_and_runs_in_one_way(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hurry(monkeypatch)
    trained: list[Way] = []
    train = validate.train

    def noted(verified: Any, *, way: Way, **more: Any) -> Any:
        trained.append(way)
        return train(verified, way=PLAINLY, **more)  # the compiler that it would take is slow

    monkeypatch.setattr(validate, "train", noted)
    grid = small(policies=("resident",), calibrated=((1, 16), (2, 16), (4, 64)), way=FUSED)
    found, points = validate.profile_and_run(grid, tmp_path, lambda done, note: None, lambda done, note: None)
    assert measured_in(found) == "fused" and trained == [FUSED] and calls and len(points) == 1
    with pytest.raises(Refused, match=r"another machine or in another way .ops: fused.: remove it"):
        validate.profile_and_run(replace(grid, way=PLAINLY), tmp_path, lambda done, note: None, lambda done, note: None)
    with pytest.raises(InputError, match="CUDA graphs need a GPU"):
        validate.profile_and_run(
            replace(grid, way=Way(graphs=True)), tmp_path, lambda done, note: None, lambda done, note: None
        )
