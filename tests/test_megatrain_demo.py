"""The demonstration from end to end, on a tiny model: what it writes, and what an interrupt leaves."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from command import begun, megatrain
from quick_readings import hurry

from analysis import demo_report
from megatrain import demo
from megatrain.this_machine import Here, usable_bytes
from schedules.errors import Refused
from schedules.op import Tier
from schedules.trace import Trace
from schedules.workload import Workload
from sim import hardware
from sim.prediction import peak_bytes

GIB = 1 << 30


def test_a_small_demo_writes_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = demo.Setting(model="tiny", workload=Workload(micro_batch_size=1, seq_len=16, precision="fp32"), lr=1e-3)
    monkeypatch.setitem(demo.SETTINGS, "cpu", small)
    hurry(monkeypatch)
    monkeypatch.setattr(demo_report, "SIMULATED_MODELS", ("qwen2.5-0.5b",))
    schedules, left = demo.schedules_here()
    assert not left
    measured = demo.measure_machine(tmp_path, schedules, lambda done, note: None)
    results = demo.run_all(tmp_path, schedules, measured, 6, lambda done, note: None)
    index = demo_report.write(tmp_path, results, "the command", lambda done, note: None)

    names = set(demo.POLICIES)
    assert {run.schedule.policy for run in results.runs} == names
    first = results.runs[0].trained.losses
    for run in results.runs:
        assert run.trained.losses == pytest.approx(first, rel=1e-5), "all policies train the same model"
        trace = Trace.read(tmp_path / "traces" / f"{run.schedule.policy}.measured.json")
        trace.check(run.schedule)
    text = index.read_text()
    assert all(name in text for name in names) and "the command" in text
    for picture in ("throughput", "predicted_measured", "loss", "gantt", "memory"):
        for suffix in (".png", ".svg", ".csv"):
            assert (tmp_path / "pictures" / (picture + suffix)).stat().st_size > 0
    timeline = json.loads((tmp_path / "timelines" / "streamed.json").read_text())
    assert {"X", "C", "s", "f"} <= {event["ph"] for event in timeline["traceEvents"]}


@pytest.mark.parametrize("gib", [16, 24, 80])
def test_the_demo_is_built_for_the_memory_that_is_here(gib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    at = Here(
        device="a GPU", on_gpu=True, device_bytes=usable_bytes(gib * GIB), host_bytes=60 * GIB, free_bytes=60 * GIB
    )
    monkeypatch.setattr(demo, "machine_here", lambda machine, nvme: at)
    monkeypatch.setattr(demo, "setting", lambda backend: demo.SETTINGS["cuda"])
    found, left = demo.schedules_here()
    names = {schedule.policy for schedule in found}
    assert names | {schedule.policy for schedule, _ in left} == set(demo.POLICIES)
    assert {"streamed", "zero3_offload"} <= names and ("resident" in names) == (gib > 16)
    for schedule in found:
        assert peak_bytes(schedule, hardware.load("h200"))[Tier.DEVICE] <= at.device_bytes
    monkeypatch.setattr(demo, "machine_here", lambda machine, nvme: replace(at, device_bytes=GIB))
    with pytest.raises(
        Refused, match=r"no step of llama-3\.2-1b fits this machine: resident is not measured: it lacks"
    ):
        demo.schedules_here()


def test_larger_models_are_compared_with_the_same_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeRO-3's usual master of fp32 would make 20 bytes a parameter on the host; without it there are 16."""
    monkeypatch.setattr(demo_report, "SIMULATED_MODELS", ("qwen2.5-3b",))
    table = demo_report.larger_models().set_index("policy")
    row = table.loc["zero3_offload"]
    assert row["host_peak_gb"] / row["params_b"] == pytest.approx(16, abs=1)


def test_an_interrupt_ends_the_demo_and_leaves_no_half_file(tmp_path: Path) -> None:
    with begun("demo", "--out", str(tmp_path / "out")) as run:
        deadline = time.monotonic() + 60
        while not (tmp_path / "out").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(1.0)
        run.signal(signal.SIGINT)
        done = run.ended()
    assert done.returncode == 130
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("*.partial"))


def test_an_output_folder_that_cannot_be_written_is_told_before_anything_is_measured() -> None:
    done = megatrain("demo", "--out", "/proc/nowhere")
    assert done.returncode == 2
    assert "/proc/nowhere" in done.stderr and "Traceback" not in done.stderr
