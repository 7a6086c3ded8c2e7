"""The GPU's benchmark from end to end on a CPU: no error of its own may cost time on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PARTS = ["links", "gemm", "dram", "adam", "ways", "steps", "rivals"]  # and not the tests, which would run these


def rehearse(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/gpu.py", "--rehearse", "--out", str(folder), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done


def test_rehearsal_measures_everything_once(tmp_path: Path) -> None:
    stopped = rehearse(tmp_path, "--budget-s", "0", "--parts", *PARTS)
    assert " ..." not in stopped.stderr  # nothing is begun after the budget
    first = rehearse(tmp_path, "--parts", *PARTS, "--traces")
    body = json.loads((tmp_path / "gpu.json").read_text())
    rows = {part: body["rows"][part].values() for part in PARTS}
    errors = [row["error"] for part in PARTS for row in rows[part] if "error" in row]
    assert [error for error in errors if not error.startswith("left out")] == []
    assert len(rows["ways"]) == 4 and len(rows["steps"]) == 14 and len(rows["rivals"]) == 7
    for row in [*rows["ways"], *rows["steps"]]:
        assert row["tokens_per_s"] > 0 and row["predicted_step_s"] > 0 and row["bound_step_s"] > 0
        assert row["startup_s"] > 0 and row["handing_over_us"] and row["host_peak_GB"] > 0
        assert len(row["losses"]) == 7
    assert sum("spin_step_s" in row for row in rows["steps"]) == 3
    assert len(list((tmp_path / "traces").iterdir())) >= 10
    assert first.stdout.strip() == (tmp_path / "gpu.md").read_text().strip()
    again = rehearse(tmp_path, "--parts", *PARTS)
    assert " ..." not in again.stderr  # it goes on where it was, and here that is the end
    assert len(json.loads((tmp_path / "gpu.json").read_text())["runs"]) == 1  # those that measured something


def test_what_is_expected_is_written_down_for_every_step_that_will_be_measured(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/gpu_expected.py", "--out", str(tmp_path), "--models", "llama-3.2-1b"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=300, check=True)
    keys = "import gpu_rows as g; print(*(c.key for c in g.cases(g.MODELS) if not g.is_rival(c)), sep='\\n')"
    environment["PYTHONPATH"] += f":{ROOT / 'benchmarks'}"
    done = subprocess.run([sys.executable, "-c", keys], env=environment, capture_output=True, text=True, check=True)
    expected = [row.split(" | ")[0] for row in rows_of(ROOT / "analysis" / "results" / "gpu-expected" / "README.md")]
    assert expected == done.stdout.splitlines()
    found = rows_of(tmp_path / "README.md")
    assert [row.split(" | ")[0] for row in found] == [key for key in expected if key.startswith("llama-3.2-1b ")]
    assert all("does not fit" in row or float(row.split(" | ")[2].replace(",", "")) > 1000 for row in found)


def test_what_comes_first_on_a_gpu_is_among_the_rows_and_fits_a_lease() -> None:
    code = """import gpu_rows as g
cases = g.cases(g.MODELS)
assert len({case.key for case in cases}) == len(cases)
assert [case.key for case in cases][: len(g.FIRST)] == list(g.FIRST)
times = [g.seconds(case) for case in cases[: len(g.FIRST)]]
assert all(time > g.STARTUP_S for time in times), times
print(sum(times))"""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 23 * 60, done.stdout  # a lease of half an hour, less what else is measured


def rows_of(page: Path) -> list[str]:
    return [line.strip("| ") for line in page.read_text().splitlines() if line.startswith("| ")][1:]
