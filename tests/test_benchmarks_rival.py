"""A rival's measured cells beside our plans: what was measured is as published, and what the page says follows."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest

from sim.plan import plan

ROOT = Path(__file__).parent.parent


@pytest.fixture
def rival(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("rival")


def test_the_cells_are_those_of_the_source(rival: ModuleType) -> None:
    """Its own summary: 69 cells, 8 to 13 thousand tokens/s, measured 1.01 to 1.04 times the predicted step."""
    cells = pd.read_csv(rival.MEASURED)
    assert len(cells) == 69 and not cells.duplicated(list(cells.columns[:4])).any()
    assert cells["measured_over_predicted"].min() == 1.01 and cells["measured_over_predicted"].max() == 1.04
    assert cells["measured_over_predicted"].mean() == pytest.approx(1.025, abs=5e-4)
    assert (cells["tokens_per_s"] / cells["first_tokens_per_s"]).median() == pytest.approx(1 - 0.021, abs=5e-4)
    assert cells["first_tokens_per_s"].max() == 12618
    assert cells["tokens_per_s"].max() == 12511 and set(cells["seq_len"]) == {1024, 2048, 4096, 8192}
    assert (cells["tokens_per_step"] % cells["tokens_per_round"] == 0).all()


def test_a_cell_is_planned_within_its_own_memory(rival: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rival, "MODEL", "tiny")
    asked = []
    monkeypatch.setattr(rival, "plan", lambda *of, **how: asked.append((of, how)) or plan(*of, **how))
    row = rival.planned(pd.Series({"seq_len": 64, "tokens_per_step": 512, "device_GiB": 0.9}))
    (((model, profile), how),) = asked
    assert (model.name, profile.gpu.memory.value, how["precision"]) == ("tiny", 0.9 * 2**30, "bf16_16bit")
    assert 0 < row["predicted_tokens_per_s"] <= row["bound_tokens_per_s"] * (1 + 1e-6)
    accumulation, micro = map(int, str(row["micro_batches"]).split(" x "))
    assert accumulation * micro * 64 == 512


def test_the_page_counts_what_it_shows(rival: ModuleType) -> None:
    cells = pd.read_csv(rival.MEASURED)[:3]
    ours = {"predicted_tokens_per_s": [11000.0, 10302.0, 9000.0], "bound_tokens_per_s": [12000.0] * 3}
    table = cells.assign(**ours, micro_batches="4 x 16", host_GB=90.0, digest="00", planned_on="today")
    table["planned_by"] = "a machine"
    table["ratio"] = table["predicted_tokens_per_s"] / table["tokens_per_s"]
    text = rival.page(table)
    assert "these 3 cells" in text and "median 1.00, 0.87 to 1.08 of its second" in text
    assert "median 0.99, 0.86 to 1.07 of its first" in text and "rival.py`, today, on a machine." in text
    assert "| 1,024 | 64k | 8.8 | 10,302 | 10,209 | 32k | 11,000 | 4 x 16 | 1.08 | 91.7% |" in text
    assert len(rival.plot(table).axes) == 1


def test_the_page_on_disk_is_of_these_cells(rival: ModuleType) -> None:
    folder = ROOT / "analysis" / "results" / "rival"
    table = pd.read_csv(folder / "rival.csv")
    measured = pd.read_csv(rival.MEASURED)
    pd.testing.assert_frame_equal(table[measured.columns], measured)
    rows = [line for line in rival.page(table).splitlines() if line.startswith("| ")]
    assert all(row in (folder / "README.md").read_text() for row in rows)
