"""The GPU's benchmark from end to end on a CPU: no error of its own may cost time on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PARTS = [
    "links",
    "gemm",
    "attention",
    "dram",
    "adam",
    "ways",
    "steps",
    "rivals",
]  # and not the tests, which would run these


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
    command = [sys.executable, "benchmarks/gpu_expected.py", "--gpu", "h200", "--models", "llama-3.2-1b"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*command, "--out", str(tmp_path)], cwd=ROOT, env=environment, capture_output=True, timeout=300, check=True
    )
    keys = "import gpu_rows as g; print(*(c.key for c in g.cases(g.MODELS) if not g.is_rival(c)), sep='\\n')"
    environment["PYTHONPATH"] += f":{ROOT / 'benchmarks'}"
    done = subprocess.run([sys.executable, "-c", keys], env=environment, capture_output=True, text=True, check=True)
    for gpu in ("h100", "h200"):
        page = ROOT / "analysis" / "results" / "gpu-expected" / f"{gpu}.md"
        expected = [row.split(" | ")[0] for row in rows_of(page)]
        assert expected == done.stdout.splitlines()
    found = rows_of(tmp_path / "h200.md")
    assert [row.split(" | ")[0] for row in found] == [key for key in expected if key.startswith("llama-3.2-1b ")]
    assert all("does not fit" in row or float(row.split(" | ")[2].replace(",", "")) > 1000 for row in found)


def test_what_comes_first_on_a_gpu_is_among_the_rows_and_fits_a_lease() -> None:
    code = """import gpu_rows as g
cases = g.cases(g.MODELS)
assert len({case.key for case in cases}) == len(cases)
assert [case.key for case in cases][: len(g.FIRST)] == list(g.FIRST)
for gpu in ("h100", "h200"):
    times = [g.seconds(case, gpu) for case in cases[: len(g.FIRST)]]
    assert all(time > g.STARTUP_S for time in times), times
    assert sum(times) < 24 * 60, (gpu, sum(times))  # a lease of half an hour, less what else is measured"""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def rows_of(page: Path) -> list[str]:
    return [line.strip("| ") for line in page.read_text().splitlines() if line.startswith("| ")][1:]


FAULTS = """import os, sys, time
from pathlib import Path
import torch, gpu_results
torch.cuda.get_device_name = lambda: "none"
gpu_results.HANGS_AFTER_S = 0.5
rows = gpu_results.Results(Path(sys.argv[1]), 100.0, again=len(sys.argv) > 2)
rows.measure("steps", "killed", lambda: os.kill(os.getpid(), 9))
rows.measure("steps", "hangs", lambda: time.sleep(60))
rows.measure("steps", "wrong", lambda: 1 / 0)
rows.measure("steps", "too large", lambda: (_ for _ in ()).throw(torch.cuda.OutOfMemoryError("no room")))
rows.measure("steps", "right", lambda: {"case": "right"})"""


def test_no_row_ends_two_processes(tmp_path: Path) -> None:
    def run(*more: str) -> tuple[int, dict[str, str | None]]:
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}"}
        command = [sys.executable, "-c", FAULTS, str(tmp_path), *more]
        done = subprocess.run(command, env=environment, capture_output=True, timeout=60)
        rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]["steps"]
        return done.returncode, {name: row.get("error", "")[:11] for name, row in rows.items()}

    assert run() == (-9, {"killed": "did not end"})
    assert run() == (1, {"killed": "did not end", "hangs": "did not end"})
    status, rows = run()  # what an error has left is not trusted
    assert status == 3 and rows["wrong"] == "ZeroDivisio" and len(rows) == 3
    status, rows = run()
    assert status == 0 and rows["too large"] == "OutOfMemory" and rows["right"] == ""
    assert run() == (status, rows)
    status, rows = run("again")
    assert status == -9 and rows == {"right": "", "killed": "did not end"}


def test_another_process_goes_on_where_one_ended_with_something_done(tmp_path: Path) -> None:
    child = tmp_path / "child.py"
    child.write_text("""import sys
from pathlib import Path
rows = Path(__file__).with_name("gpu.json")
done = rows.read_text() if rows.exists() else ""
rows.write_text(done + "x")
sys.exit({0: 3, 1: 1}.get(len(done), int(sys.argv[1])))""")
    code = """import sys
from pathlib import Path
import gpu
gpu.__file__ = sys.argv[1]
sys.exit(gpu.supervise([sys.argv[2]], Path(sys.argv[1]).with_name("gpu.json"), 60.0))"""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}"}
    for last in (0, 2):
        (tmp_path / "gpu.json").unlink(missing_ok=True)
        command = [sys.executable, "-c", code, str(child), str(last)]
        done = subprocess.run(command, env=environment, capture_output=True, timeout=60)
        assert done.returncode == last and (tmp_path / "gpu.json").read_text() == "xxx"
    child.write_text("raise SystemExit(1)")  # nothing is begun: it would go on for ever
    assert subprocess.run(command, env=environment, capture_output=True, timeout=60).returncode == 1
    (tmp_path / "gpu.json").unlink()
    assert subprocess.run(command, env=environment, capture_output=True, timeout=60).returncode == 1
