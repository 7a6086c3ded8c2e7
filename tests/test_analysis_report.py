"""The report: everything handed to it is in it, and its links lead to files."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest

from analysis import figure, plots, report
from analysis.compare import compare, ranked
from schedules import presets
from schedules.errors import InputError
from schedules.workload import MemoryBudget, Workload
from sim.hardware import load

ORIGIN = report.Origin(
    machine="two cores", date="2026-11-20", command="make demo", versions={"torch": "2.10", "simpy": "4.1"}
)


@pytest.fixture(scope="module")
def comparison() -> pd.DataFrame:
    step = Workload(micro_batch_size=2, seq_len=64)
    budget = MemoryBudget(device_bytes=60 * 10**6, host_bytes=10**9)
    return compare([presets.load("demo")], ["resident", "streamed", "zero3_offload"], load("h200"), [step], budget)


@pytest.fixture
def measured(comparison: pd.DataFrame) -> pd.DataFrame:
    fitting = comparison[comparison["fits"]]
    return ranked(fitting.assign(predicted_s=fitting["step_s"], measured_s=fitting["step_s"] * 1.25, spread=0.01))


def test_the_report_names_origin_digests_errors_and_what_does_not_fit(
    comparison: pd.DataFrame, measured: pd.DataFrame, tmp_path: Path
) -> None:
    path = report.write_report(tmp_path / "demo", "Demo", ORIGIN, comparison=comparison, predicted_measured=measured)
    text = path.read_text()
    for fact in ("two cores", "2026-11-20", "`make demo`", "torch 2.10, simpy 4.1", "Largest error: 20.0%", "-20.0%"):
        assert fact in text
    for digest in comparison["digest"]:
        assert f"`{digest}`" in text
    for reason in comparison.loc[~comparison["fits"], "reason"]:
        assert reason in text
    assert len(pd.read_csv(path.parent / "comparison.csv")) == len(comparison)


def test_what_was_not_measured_is_not_said_not_to_fit(
    comparison: pd.DataFrame, measured: pd.DataFrame, tmp_path: Path
) -> None:
    unknown = comparison[comparison["fits"]].assign(fits=None, reason="no measured time for it").head(1)
    both = pd.concat([comparison, unknown])
    text = report.write_report(tmp_path, "Demo", ORIGIN, comparison=both, predicted_measured=measured).read_text()
    does_not_fit, not_predicted = text.split("What does not fit, and why:")[1].split("What is not predicted, and why:")
    assert "no measured time for it" not in does_not_fit and not_predicted.count(": no measured time for it") == 1
    assert does_not_fit.count("\n- ") == (~comparison["fits"]).sum()


def test_every_link_leads_to_a_file(comparison: pd.DataFrame, measured: pd.DataFrame, tmp_path: Path) -> None:
    picture = tmp_path / "demo" / "pictures" / "throughput"
    figure.save(figure.figure_of(plots.throughput(comparison)), picture, comparison)
    (tmp_path / "timeline.json").write_text("{}")
    section = report.Section(
        title="Pictures", text="Look.", pictures=[picture.with_suffix(".png")], files=[tmp_path / "timeline.json"]
    )
    path = report.write_report(
        tmp_path / "demo", "Demo", ORIGIN, comparison=comparison, predicted_measured=measured, sections=[section]
    )
    links = re.findall(r"\]\(([^)]+)\)", path.read_text())
    assert len(links) == 6  # picture thrice, timeline, and the two tables
    assert all((path.parent / link).is_file() for link in links)


def test_without_measurements_there_is_no_such_table(comparison: pd.DataFrame, tmp_path: Path) -> None:
    none = pd.DataFrame(columns=["model", "policy", "predicted_s", "measured_s", "digest"])
    path = report.write_report(tmp_path, "Plan", ORIGIN, comparison=comparison, predicted_measured=none)
    assert "measured" not in path.read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["README.md", "comparison.csv"]


def test_a_folder_that_is_a_file_is_told(comparison: pd.DataFrame, measured: pd.DataFrame, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(InputError, match="cannot write"):
        report.write_report(tmp_path / "taken", "Demo", ORIGIN, comparison=comparison, predicted_measured=measured)
