"""The GPU's benchmark from end to end on a CPU: no error of its own may cost time on a GPU."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import command
import pytest

ROOT = Path(__file__).parent.parent
PARTS = [
    "block",
    "links",
    "gemm",
    "attention",
    "dram",
    "adam",
    "ways",
    "steps",
    "rivals",
    "kernels",
]  # and not the tests, which would run these
BESIDE = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}", "OMP_NUM_THREADS": "1"}


def rehearse(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "benchmarks/gpu.py", "--rehearse", "--out", str(folder), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the code beside the benchmark's modules, in a process of its own: they replace parts of torch."""
    return command.python(code, *arguments, environment=BESIDE)


@pytest.mark.slow
def test_rehearsal_measures_everything_once(tmp_path: Path) -> None:
    stopped = rehearse(tmp_path, "--budget-s", "0", "--parts", *PARTS)
    assert " ..." not in stopped.stderr  # nothing is begun after the budget
    assert "the time is over: the same command goes on" in stopped.stderr
    first = rehearse(tmp_path, "--parts", *PARTS, "--traces")
    body = json.loads((tmp_path / "gpu.json").read_text())
    rows = {part: body["rows"][part].values() for part in PARTS}
    errors = [row["error"] for part in PARTS for row in rows[part] if "error" in row]
    assert [error for error in errors if not error.startswith("left out")] == []
    assert len(rows["ways"]) == 4 and len(rows["steps"]) == 14 and len(rows["rivals"]) == 10
    assert body["rows"]["steps"]["tiny resident 1x2x16 bf16_16bit"] in rows["ways"]  # it is not measured again
    (kernels,) = rows["kernels"]
    assert kernels["run"] == 0 and "longest" in kernels
    for row in [*rows["ways"], *rows["steps"]]:
        assert row["host_threads"] == max(1, len(os.sched_getaffinity(0)) - 2)
        assert row["alloc_retries"] == 0 and "gpu_reserved_GB" in row
        assert all(isinstance(row[way], bool) for way in ("fused", "graphs"))
        assert 0 <= row["run"] < len(body["runs"])
        step_s, predicted_s, bound_s = row["step_s"]["median"], row["predicted_step_s"], row["bound_step_s"]
        assert row["tokens_per_s"] == pytest.approx(row["tokens_per_step"] / step_s) and min(predicted_s, bound_s) > 0
        assert row["prediction_error"] == pytest.approx(predicted_s / step_s - 1)
        assert row["above_bound"] == pytest.approx(step_s / bound_s - 1)
        assert row["step_s"]["least"] <= step_s <= row["step_s"]["most"]
        assert row["startup_s"] > 0 and row["handing_over_us"] and row["host_peak_GB"] > 0
        assert len(row["losses"]) == 7
    assert sum("spin_step_s" in row for row in rows["steps"]) == 3
    traces = [file.name for file in (tmp_path / "traces").iterdir()]
    assert len(traces) >= 10 and all(re.fullmatch("[A-Za-z0-9._-]+", name) for name in traces)
    page = (tmp_path / "gpu.md").read_text()
    assert first.stdout.strip() == page.strip()
    run = body["runs"][0]
    assert all(run[what] in page for what in ("gpu", "host", "date", "command")) and run["versions"]["torch"] in page
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "notes.md").write_text("What a person has to say.\n")
    words = [sys.executable, "benchmarks/gpu_page.py", str(tmp_path), "--out", str(tmp_path / "page")]
    subprocess.run(words, cwd=ROOT, env=BESIDE, capture_output=True, timeout=100, check=True)
    told = (tmp_path / "page" / "README.md").read_text()
    assert told.splitlines()[2] == "What a person has to say." and "(predicted_measured.png)" in told
    assert "(policies.png)" in told and (tmp_path / "page" / "policies.png").stat().st_size > 10_000
    assert "\n".join(page.splitlines()[1:30]) in told
    of_ops = told.partition("Ops on the GPU that take more")[2].splitlines()
    assert any(line.startswith("| tiny streamed 1x2x16 bf16 | head/loss/") for line in of_ops)
    lines = [line.strip("| ").split(" | ") for line in told.splitlines() if line.startswith("| tiny ")]
    anew = lines[: len(rows["steps"])]
    assert [(key, then) for key, then, *_ in anew] == [
        (key, f"{row['prediction_error']:+.1%}") for key, row in body["rows"]["steps"].items()
    ]
    assert (tmp_path / "page" / "gpu.json").read_text() == (tmp_path / "gpu.json").read_text()
    assert len((tmp_path / "page" / "predicted_measured.csv").read_text().splitlines()) == 1 + len(rows["steps"])
    again = rehearse(tmp_path, "--parts", *PARTS)
    assert " ..." not in again.stderr  # it goes on where it was, and here that is the end
    # those that measured something: to the first rival and to the second, whose engines begin in a process of their
    # own, to the kernels' end, and one that went on
    assert len(json.loads((tmp_path / "gpu.json").read_text())["runs"]) == 4


def test_what_was_measured_on_a_gpu_is_still_predicted_so() -> None:
    """Whoever changes a policy or the simulator sees here what it means for steps that were measured."""
    body = ROOT / "analysis" / "results" / "gpu" / "h200" / "gpu.json"
    code = """import json, statistics, sys
import gpu_anew
body = json.load(open(sys.argv[1]))
steps, now = body["rows"]["steps"], gpu_anew.predicted(body)
assert len(now) == sum("step_s" in row for row in steps.values()) >= 10
def off(what):
    return {key: abs(getattr(anew, what) / steps[key]["step_s"]["median"] - 1) for key, anew in now.items()}

assert statistics.median(off("step_s").values()) < 0.035, off("step_s")
# with ops on the GPU as slow as they were in the step; but for one that waits for launches, and for MegaTrain's code
but = off("slower_step_s")
del but["llama-3.1-8b planned 2x1x4096 bf16_16bit in 12 GiB"], but["llama-3.2-3b megatrain_released 1x8x1024 bf16"]
assert max(but.values()) < 0.05 and statistics.median(but.values()) < 0.005, but
slow = gpu_anew.predicted(body, ["host.adam_params_per_s=0.8Gparams/s"])
updated = {"llama-3.1-8b planned 16x1x4096 bf16_16bit in 12 GiB", "llama-3.2-3b streamed 1x8x1024 bf16"}
assert all(slow[key].step_s > now[key].step_s * 1.5 for key in updated)
assert slow["llama-3.2-3b planned 1x2x1024 bf16"] == now["llama-3.2-3b planned 1x2x1024 bf16"]  # all on the GPU
steps["llama-3.2-3b planned 1x2x1024 bf16"]["digest"] = "0" * 64
try:
    gpu_anew.predicted(body)
except ValueError as error:
    assert "no longer makes the schedule 00000000 that was run" in str(error)
else:
    raise AssertionError"""
    done = python(code, str(body))
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_what_is_expected_is_written_down_for_every_step_that_will_be_measured(tmp_path: Path) -> None:
    words = [sys.executable, "benchmarks/gpu_expected.py", "--gpu", "h200", "--models", "llama-3.2-1b"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*words, "--out", str(tmp_path)], cwd=ROOT, env=environment, capture_output=True, timeout=300, check=True
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
assert [case.key for case in cases][: len(g.AIMS)] == list(g.AIMS)
for gpu in ("h100", "h200"):
    times, pinned_GB, engine = [], 0.0, None
    for case in cases[: len(g.AIMS)]:
        times.append(g.seconds(case, gpu, pinned_GB=pinned_GB, engine=engine))
        engine = (case.model, case.precision) if case.policy == g.ZERO3 else None
        pinned_GB = 0.0 if engine else max(pinned_GB, g.expected(gpu).get(case.key, {"host_GB": 0.0})["host_GB"])
    assert all(time > g.STARTUP_S for time in times), times
    assert 18 * 60 < sum(times) < 26 * 60, (gpu, sum(times))  # a lease of half an hour, less what else is measured
    seven = [case for case in cases if case.key.startswith(f"qwen2.5-7b {g.ZERO3}") and case.precision == "bf16"]
    begun = [g.seconds(case, gpu) for case in seven]  # a new process starts the engine, whichever batch comes first
    going = [g.seconds(case, gpu, engine=("qwen2.5-7b", "bf16")) for case in seven]
    assert all(a - b > g.ENGINE_S for a, b in zip(begun, going, strict=True)), (begun, going)
    streamed = next(case for case in cases if case.key == "llama-3.2-3b streamed 1x2x1024 bf16")
    assert g.seconds(streamed, gpu) - g.seconds(streamed, gpu, pinned_GB=33.68) > 8.0"""
    done = python(code)
    assert done.returncode == 0, done.stderr


def rows_of(page: Path) -> list[str]:
    return [line.strip("| ") for line in page.read_text().splitlines() if line.startswith("| ")][1:]


def test_the_table_says_what_is_true_of_every_row() -> None:
    code = """import gpu_rows, gpu_table
def step(case, seconds, **more):
    times = {"median": seconds, "least": seconds, "most": seconds}
    return {"case": case, "step_s": times, "tokens_per_s": 2048 / seconds, "model_TFLOP_s": 100.0, "gpu_peak_GB": 1.0,
            "run": 0, **more}
def ours(case, seconds, error, losses=(1.0,), **more):
    told = {"prediction_error": error, "above_bound": 0.5, "losses": list(losses), "host_buffers_GB": 2.0}
    return step(case, seconds, **told, **more)
def rows(*found):
    return {row["case"]: row for row in found}
three, one = "llama-3.2-3b {} 1x2x1024 bf16", "llama-3.2-1b {} 1x2x1024 bf16_16bit"
body = {
    "runs": [{"gpu": "NVIDIA H100 80GB HBM3", "host": "", "date": "", "versions": {}, "command": ""}],
    "rows": {
        "gemm": {"a": {"case": "a", "run": 0, "TFLOP_s": {"median": 400.0, "least": 390.5}},
                 "b": {"case": "b", "run": 1, "TFLOP_s": {"median": 500.0, "least": 499.0}},
                 "c": {"case": "c", "run": 1, "GB_s": 4188.2, "said": ["much"]}},
        "checks": {"d": {"case": "d | e", "passed": False, "run": 1}},
        "steps": rows(
            ours(three.format("planned"), 0.1, 0.02), ours(three.format("streamed"), 0.5, -0.2, [1.0, float("nan")]),
            ours(three.format("megatrain_released"), 2.0, 0.05), ours(one.format("resident"), 0.033, 0.0),
            ours("llama-3.1-8b planned 2x1x4096 bf16 in 12 GiB", 1.0, 0.0, disturbed=None),
            ours("llama-3.1-8b planned 4x1x4096 bf16", 1.0, 0.0, disturbed="others had 3.0 of 16 cores"),
            {"case": "torn", "error": "E: a | b\\n c", "run": 0},
        ),
        "rivals": rows(
            step(three.format(gpu_rows.ZERO3), 1.0), step(one.format(gpu_rows.TORCH), 0.066),
            step(one.format(gpu_rows.TORCH + " compiled=blocks"), 0.0495),
            step("llama-3.1-8b deepspeed zero3 2x1x4096 bf16", 3.0),
        ),
    },
}
page = gpu_table.table(body)
for empty in ({}, {"steps": {}}):
    assert gpu_table.table({"runs": [], "rows": empty}).startswith("# One GPU")
print(page)"""
    done = python(code)
    assert done.returncode == 0, done.stderr
    lines = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    steps = {line[0].strip("| "): line[1:] for line in lines if len(line) == 11}
    assert steps["llama-3.2-3b planned 1x2x1024 bf16"][3:9] == ["20.0%", "", "+2.0%", "+50.0%", "1.0", "2.0"]
    assert steps["llama-3.2-3b deepspeed zero3 1x2x1024 bf16"][3:9] == ["20.0%", "", "", "", "1.0", ""]
    assert "llama-3.2-3b streamed 1x2x1024 bf16, **losses not finite**" in steps
    assert "llama-3.1-8b planned 4x1x4096 bf16, **others had 3.0 of 16 cores**" in steps
    assert "| torn | E: a \\| b c | | | | | | | | | 0 |" in done.stdout
    beside = {line[0].strip("| "): [cell.strip(" |") for cell in line[2:]] for line in lines if len(line) == 7}
    expected = json.loads((ROOT / "analysis" / "results" / "gpu-expected" / "h100.json").read_text())
    for case, seconds, faster in (
        ("llama-3.2-3b planned 1x2x1024 bf16", 0.1, ["10.00x", "20.00x", "", ""]),
        ("llama-3.2-3b megatrain_released 1x2x1024 bf16", 2.0, ["0.50x", "", "", ""]),
        ("llama-3.2-1b resident 1x2x1024 bf16_16bit", 0.033, ["", "", "2.00x", "1.50x"]),
    ):
        assert beside[case] == [*faster, f"{expected[case]['step_s'] / seconds:.2f}x"]
    assert beside["llama-3.1-8b planned 2x1x4096 bf16 in 12 GiB"][:3] == ["", "", ""]  # the rivals had the whole GPU
    assert "Of 6 steps predicted, 4 within 4%, 5 within 10%; median error +0.0%" in done.stdout
    assert "worst -20.0% (llama-3.2-3b streamed" in done.stdout
    others = done.stdout.partition("**gemm**\n\n")[2].splitlines()
    assert others[:4] == [
        "| case | TFLOP/s | run |", "|---|---|---|", "| a | 400 (least 390.5) | 0 |", "| b | 500 (least 499) | 1 |",
    ]  # fmt: skip
    assert others[5:8] == ["| case | GB/s | run |", "|---|---|---|", "| c | 4,188 | 1 |"]
    assert others[9] == "**checks**" and others[13] == "| d \\| e | no | 1 |"


FAULTS = """import os, sys, time
from pathlib import Path
import torch, gpu_results
from megatrain.backend import Task
from schedules.errors import Refused
from schedules.op import Kind, Op, Phase, Stream
F = Op(name="F.1", kind=Kind.COMPUTE, phase=Phase.FORWARD, stream=Stream.COMPUTE)
ONE = {"median": 1.0, "least": 1.0, "most": 1.0}
torch.cuda.get_device_name = lambda: "none"
gpu_results.HANGS_AFTER_S = 0.5
left_s = 0.0 if "no time" in sys.argv else 100.0
rows = gpu_results.Results(Path(sys.argv[1]), left_s, again="again" in sys.argv, went_on="went on" in sys.argv)
rows.measure("steps", "killed", lambda: os.kill(os.getpid(), 9))
rows.measure("steps", "hangs", lambda: time.sleep(60))
rows.measure("steps", "wrong", lambda: 1 / 0)
def op(error):
    def fail(step): raise error
    try:
        fail(0)
    except Exception as error:
        raise Task(F, 0, 0, fail).failed(error)
rows.measure("steps", "fault in an op", lambda: op(RuntimeError("CUDA error: an illegal memory access")))
rows.measure("steps", "op too large", lambda: op(torch.cuda.OutOfMemoryError("no room")))
rows.measure("steps", "too large", lambda: (_ for _ in ()).throw(torch.cuda.OutOfMemoryError("no room")))
rows.measure("steps", "not here", lambda: (_ for _ in ()).throw(Refused("does not fit")))
rows.measure("checks", "fails", lambda: {"case": "fails", "passed": False})
rows.measure("steps", "right", lambda: {"case": "right", "step_s": ONE, "tokens_per_s": 1.0, "gpu_peak_GB": 1.0})"""


def test_no_row_ends_two_processes(tmp_path: Path) -> None:
    def run(*more: str) -> tuple[int, dict[str, str | None]]:
        done = python(FAULTS, str(tmp_path), *more)
        rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]["steps"]
        return done.returncode, {name: row.get("error", "")[:11] for name, row in rows.items()}

    assert run() == (-9, {"killed": "cut off: wh"})
    assert "| killed | cut off" in (tmp_path / "gpu.md").read_text()
    assert run() == (-9, {"killed": "cut off: wh"})  # a new call, not told that the row has ended the process before
    assert run("went on", "no time") == (0, {"killed": "did not end"})  # nothing is begun after it, and it is known
    assert run("went on") == (1, {"killed": "did not end", "hangs": "cut off: wh"})
    status, rows = run("went on")  # what an error has left is not trusted
    assert (rows["killed"], rows["hangs"]) == ("did not end", "did not end")
    assert status == 3 and rows["wrong"] == "ZeroDivisio" and len(rows) == 3
    status, rows = run("went on")
    assert status == 3 and rows["fault in an op"] == "F.1 of step" and len(rows) == 4
    status, rows = run()  # too little memory leaves a GPU as it was, and so does what was never begun
    assert status == 0 and rows["op too large"] == "F.1 of step" and rows["too large"] == "OutOfMemory"
    assert rows["not here"] == "does not fi" and rows["right"] == ""
    known = (tmp_path / "gpu.json").read_text()
    assert run() == (status, rows) and (tmp_path / "gpu.json").read_text() == known  # all is there, failed checks too
    status, rows = run("again")
    assert status == -9 and rows == {"right": "", "killed": "cut off: wh"}
    assert json.loads((tmp_path / "gpu.json").read_text())["rows"]["checks"] == {}


def test_another_process_goes_on_where_one_ended_with_something_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BESIDE, "TORCH_EXTENSIONS_DIR", str(tmp_path))
    child = tmp_path / "child.py"
    child.write_text("""import os, sys
from pathlib import Path
lock = Path(os.environ["TORCH_EXTENSIONS_DIR"], "kernel", "lock")
lock.parent.mkdir(exist_ok=True)
lock.touch(exist_ok=False)  # as torch does while it compiles
rows = Path(__file__).with_name("gpu.json")
done = rows.read_text() if rows.exists() else ""
rows.write_text(done + "x")
sys.exit({0: 3, 1: 1}.get(len(done), int(sys.argv[1])))""")
    code = """import sys
from pathlib import Path
import gpu
gpu.__file__ = sys.argv[1]
sys.exit(gpu.supervise([sys.argv[2]], Path(sys.argv[1]).with_name("gpu.json"), 60.0))"""
    for last in ("0", "2"):
        (tmp_path / "gpu.json").unlink(missing_ok=True)
        assert python(code, str(child), last).returncode == int(last)
        assert (tmp_path / "gpu.json").read_text() == "xxx"
    child.write_text(
        "import time\nfrom pathlib import Path\nrows = Path(__file__).with_name('gpu.json')\n"
        "rows.write_text(rows.read_text() + 'x')\ntime.sleep(1)\nraise SystemExit(3)"
    )
    over = python(code.replace("60.0", "gpu.time.monotonic() - gpu.__begun__ + 0.5"), str(child), last)
    assert over.returncode == 0 and over.stderr.endswith("the time is over: the same command goes on\n"), over.stderr
    child.write_text("raise SystemExit(1)")  # nothing is begun: it would go on for ever
    assert python(code, str(child), last).returncode == 1
    (tmp_path / "gpu.json").unlink()
    assert python(code, str(child), last).returncode == 1


@pytest.mark.one_in(2)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_whoever_ends_the_benchmark_ends_what_it_has_begun(tmp_path: Path, number: signal.Signals) -> None:
    words = [sys.executable, "benchmarks/gpu.py", "--rehearse", "--out", str(tmp_path), "--parts", "ways", "steps"]
    with subprocess.Popen(words, cwd=ROOT, env=BESIDE, stderr=subprocess.DEVNULL) as process:
        waited_until = time.monotonic() + 100
        while not (tmp_path / "gpu.json").exists() and time.monotonic() < waited_until:
            time.sleep(0.05)
        begun = under(tmp_path)
        assert len(begun) > 2  # this one, the one that measures, and its planner
        process.send_signal(number)
        assert process.wait(30) == (128 + number if number == signal.SIGTERM else -number)
    waited_until = time.monotonic() + 10
    while under(tmp_path) and time.monotonic() < waited_until:
        time.sleep(0.05)
    assert under(tmp_path) == []


def under(folder: Path) -> list[str]:
    """The processes that were given the folder."""
    found = []
    for one in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder) in (one / "cmdline").read_text():
                found.append(one.name)
        except OSError:
            continue  # it has ended
    return found


def test_rows_of_two_gpus_are_not_mixed(tmp_path: Path) -> None:
    begun = {"runs": [{"gpu": "another GPU"}], "rows": {}}
    (tmp_path / "gpu.json").write_text(json.dumps(begun))
    code = "import runpy; runpy.run_path('benchmarks/gpu.py', run_name='__main__')"
    done = python(code, "--rehearse", "--out", str(tmp_path))
    assert done.returncode == 2 and "holds rows of another GPU" in done.stderr and "Traceback" not in done.stderr
    assert json.loads((tmp_path / "gpu.json").read_text()) == begun


def test_nothing_is_measured_where_the_smoke_test_fails(tmp_path: Path) -> None:
    code = """import sys
import gpu, gpu_checks
smoke = gpu_checks.Check(name="smoke", arguments=(sys.argv[2],), takes_s=10.0)
gpu_checks.smoke = lambda: smoke
sys.argv = ["gpu.py", "--once", "--rehearse", "--parts", "smoke", "dram", "--out", sys.argv[1]]
gpu.main()"""
    failed = python(code, str(tmp_path), "no_such_module")
    assert failed.returncode == 2 and "the smoke test failed" in failed.stderr
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert rows["smoke"]["smoke"]["passed"] is False and "dram" not in rows
    passed = python(code, str(tmp_path), "platform")
    assert passed.returncode == 0, passed.stderr
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert rows["smoke"]["smoke"]["passed"] is True and rows["dram"]


def test_nothing_is_timed_beside_a_check_or_if_careful_after_one_that_failed(tmp_path: Path) -> None:
    code = """import sys, threading
import gpu, gpu_checks, gpu_machine
meeting = threading.Barrier(2, timeout=20.0)
found = {"long": True, "short": sys.argv[2] != "failed"}
gpu_checks.smoke = lambda: gpu_checks.Check(name="smoke", arguments=("platform",), takes_s=1.0)
gpu_checks.checks = lambda: (gpu_checks.Check(name=name, arguments=(name,), takes_s=60.0) for name in found)
def checked(check):
    if check.name in found:
        meeting.wait()  # each runs while the other does
    return {"case": check.name, "passed": found.get(check.name, True)}
gpu_checks.checked = checked
sys.argv = ["gpu.py", "--once", "--rehearse", *sys.argv[3:], "--parts", "smoke", "checks", "dram", "--out", sys.argv[1]]
gpu.main()"""
    for name, status, careful in (("passed", 0, True), ("failed", 2, True), ("failed", 0, False)):
        folder = tmp_path / f"{name} {careful}"
        done = python(code, str(folder), name, *(["--careful"] if careful else []))
        assert done.returncode == status, done.stderr
        rows = json.loads((folder / "gpu.json").read_text())["rows"]
        assert list(rows["checks"]) == ["long", "short", "clocks"] and ("dram" in rows) == (status == 0)
        told = "nothing more is measured, since something went wrong: checks: short\n"
        assert (told in done.stderr) == (status == 2), done.stderr
        begun = [line.split(", about ")[1] for line in done.stderr.splitlines() if line.startswith("checks: ")]
        assert begun == ["60 s ...", "0 s ...", "25 s ..."]  # who begins the first has begun all of them
    late = python(code, str(tmp_path / "late"), "passed", "--budget-s", "40")
    assert late.returncode == 0, late.stderr
    assert list(json.loads((tmp_path / "late" / "gpu.json").read_text())["rows"]["checks"]) == ["clocks"]


def test_what_is_unexpected_is_neither_no_room_nor_a_rivals(tmp_path: Path) -> None:
    code = """import sys
from pathlib import Path
import gpu, gpu_results, rehearsal
rehearsal.install(gpu)
rows = gpu_results.Results(Path(sys.argv[1]), 1.0, again=False)
broken = {"case": "a", "error": "why"}
rows.body["rows"] = {
    "checks": {"right": {"case": "a", "passed": True}, "wrong": {"case": "b", "passed": False}},
    "steps": {"fine": {"case": "a"}, "broken": broken, "large": {**broken, "refused": True}},
    "rivals": {"broken": broken},
}
assert rows.unexpected() == ["checks: wrong", "steps: broken"], rows.unexpected()
def ends(status):
    ended.append(status)
ended, gpu_results.os = [], type("os", (), {"_exit": staticmethod(ends)})
def op(cause, of=gpu_results.OpFailed):
    error = of("F.0.0 of step 0 failed")
    error.__cause__ = cause
    def work():
        raise error
    return work
rows.body["rows"] = {}
no_room = gpu_results.torch.cuda.OutOfMemoryError("no room")
for name, work in (
    ("illegal", op(RuntimeError("CUDA error: an illegal memory access"))), ("full", op(no_room)),
    ("no buffer", op(no_room, gpu_results.Refused)), ("package", op(None, gpu_results.Refused)),
):
    rows.measure("steps", name, work)
assert rows.unexpected() == ["steps: illegal"] and ended == [gpu_results.AGAIN], (rows.unexpected(), ended)"""
    done = python(code, str(tmp_path))
    assert done.returncode == 0, done.stderr


def test_rows_of_another_lease_stand_until_they_are_measured_anew(tmp_path: Path) -> None:
    code = """import datetime, sys
from pathlib import Path
import gpu, gpu_results, rehearsal
rehearsal.install(gpu)
ONE = {"median": 1.0, "least": 1.0, "most": 1.0}
def row(case, run):
    return {"case": case, "run": run, "step_s": ONE, "tokens_per_s": 1.0, "gpu_peak_GB": 1.0}
def opened(*anew):
    return gpu_results.Results(Path(sys.argv[1]), 100.0, again=False, anew=anew)
rows = opened()
now = datetime.datetime.now(datetime.UTC)
for hours in (2.0, 0.5):
    date = (now - datetime.timedelta(hours=hours)).isoformat(timespec="seconds")
    rows.body["runs"].append({**rows._run, "date": date})
rows.body["rows"] = {
    "links": {"links: of 1": {"case": "of 1", "run": 0}, "links: of 2": {"case": "of 2", "run": 0}},
    "steps": {name: row(name, run) for name, run in (("old a", 0), ("new a", 1), ("old b", 0))},
}
rows.save()
rows = opened("links", "steps: old a", "new a")
there = {name: rows.there("steps", name) for name in ("old a", "new a", "old b")}
assert there == {"old a": False, "new a": True, "old b": True} and not rows.there("links", "links")
assert rows.measure("links", "links", lambda: [{"case": "of 3"}]) and rows.there("links", "links")
assert list(rows.body["rows"]["links"]) == ["links: of 3"] and list(rows.body["rows"]["steps"]) == list(there)
assert list(rows.body["earlier"]["links"]["0"]) == ["links: of 1", "links: of 2"]  # that run's rows want them
assert not rows.measure("steps", "old b", lambda: 1 / 0) and opened("links").there("links", "links")
rows.measure("steps", "old a", lambda: {**row("old a", 2), "tokens_per_s": 2.0})
assert rows.body["rows"]["steps"]["old a"]["tokens_per_s"] == 2.0 and opened().there("steps", "old a")
for part, run in (("smoke", 1), ("block", 0)):
    rows.body["rows"][part] = {part: {"case": part, "run": run, "passed": True}}
there = {part: rows.there(part, part) for part in ("smoke", "block")}
rows.body["rows"]["smoke"]["smoke"]["run"] = 0  # another lease's
rows.body["runs"][1]["sources"] = "others"
rows.body["rows"]["block"]["block"]["run"] = 1
now = {part: rows.there(part, part) for part in ("smoke", "block")}
assert there == {"smoke": True, "block": True} and now == {"smoke": False, "block": False}, (there, now)
assert (gpu_results.Path(gpu_results.__file__).parent.parent / "megatrain" / "native" / "adam.cpp").is_file()"""
    done = python(code, str(tmp_path))
    assert done.returncode == 0, done.stderr


def test_where_a_block_is_wrong_all_goes_on_without_cudnns_attention(tmp_path: Path) -> None:
    code = """import sys
import gpu, gpu_block, gpu_machine, torch
name = sys.argv[1].rpartition("/")[2]
def right(case):
    return {"case": case, "passed": True}
def checks(models, ways):
    if models != gpu_block.DENSE:
        return []
    (way,) = ways
    if way.fused or way.graphs:
        return [{**right(str(way)), "passed": not way.fused}]
    if name == "both":
        return [{**right("a"), "passed": False}]
    if not torch.backends.cuda.cudnn_sdp_enabled():
        return [right("a"), right("b")]
    if name == "fails":
        return [right("a"), {**right("b"), "passed": False}]
    if name == "raises":
        raise RuntimeError("no plan")
    return [right("a")]
gpu_block.checks, gpu_block.fp8_checks = checks, lambda models, ways: []
enabled = lambda: {"case": "links", "enabled": torch.backends.cuda.cudnn_sdp_enabled()}
gpu_machine.links = enabled
sys.argv = ["gpu.py", "--once", "--rehearse", "--parts", *sys.argv[2:], "--out", sys.argv[1]]
gpu.main()"""
    first, second = "attention as torch chooses", "attention without cuDNN"
    cases = {
        "right": [f"{first}: a"],
        "fails": [f"{first}: a", f"{first}: b", f"{second}: a", f"{second}: b"],
        "raises": [first, f"{second}: a", f"{second}: b"],
        "both": [f"{first}: a", f"{second}: a"],
    }
    for name, told in cases.items():
        assert python(code, str(tmp_path / name), "block").returncode == (3 if name == "raises" else 0)
        done = python(code, str(tmp_path / name), "block", "links")  # another process, which reads what was found
        assert done.returncode == 0, done.stderr
        rows = json.loads((tmp_path / name / "gpu.json").read_text())["rows"]
        ways = ["fused: fused", "graphs: graphs"]  # what is wrong in one of these is not attention's fault
        assert list(rows["block"]) == [*told, *ways] and rows["links"]["links"]["enabled"] == (
            name in ("right", "both")
        )


@pytest.mark.slow
def test_a_wrong_window_sink_expert_or_value_is_noticed() -> None:
    code = """import gpu, gpu_block, rehearsal, torch
from megatrain import experts, mamba, template
from megatrain.delta import LinearAttention
from megatrain.latent import Expansion
from megatrain.attention import Attention
rehearsal.install(gpu)
def passed():
    return [row["passed"] for row in gpu_block.checks(gpu_block.UNTIMED, gpu_block.WAYS)[:: len(gpu_block.WAYS)]]
band, attend, products = template.band, Attention.forward, experts._products
def wider(seq, window, device, dtype):
    return band(seq, window and window + (dtype == torch.bfloat16), device, dtype)
def no_sinks(attention, q, k, v, sinks):
    return attend(attention, q, k, v, None if q.dtype == torch.bfloat16 else sinks)
def others(rows, matrices, ends):
    return products(rows, matrices.roll(1, 0) if rows.dtype == torch.bfloat16 else matrices, ends)
expand = Expansion.forward
def of_other_heads(expansion, params, x, *of):
    q, k, v = expand(expansion, params, x, *of)
    return q, k, v.roll(1, 2) if x.dtype == torch.bfloat16 else v
rule = LinearAttention.forward
def of_other_tokens(linear, params, x, derived, **more):
    y = rule(linear, params, x, derived, **more)
    return y.roll(1, 1) if x.dtype == torch.bfloat16 else y
scan = mamba._Chunks.output
def without_skip(chunks, to):
    if to.dtype == torch.bfloat16:
        chunks.x.zero_()
    scan(chunks, to)
assert passed() == [True] * 9
template.band = wider
assert passed() == [False, True, False, True, True, True, True, True, True]
template.band, Attention.forward = band, no_sinks
assert passed() == [False, False, True, True, True, True, True, True, True]
Attention.forward, experts._products = attend, others
assert passed() == [False, False, False, False, True, True, True, False, False]
experts._products, Expansion.forward = products, of_other_heads
assert passed() == [True, True, True, False, True, True, True, True, True]
Expansion.forward, LinearAttention.forward = expand, of_other_tokens
assert passed() == [True, True, True, True, False, False, True, True, True]
LinearAttention.forward, mamba._Chunks.output = rule, without_skip
assert passed() == [True, True, True, True, True, True, False, True, False]"""
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_experts_are_captured_where_nothing_waits() -> None:
    code = """import gpu, gpu_block, rehearsal, torch
rehearsal.install(gpu)
def graphs(models):
    return {any(way.graphs for way in gpu_block.ways_of(model)) for model in models}
mixtures = [model for model in gpu_block.UNTIMED if model.has_experts(0)]
for capability, experts in (((8, 0), False), ((9, 0), True), ((10, 0), True)):
    torch.cuda.get_device_capability = lambda: capability
    assert graphs(gpu_block.DENSE) == {True} and graphs(mixtures) == {experts}"""
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_on_a_gpu_no_test_is_run_that_has_nothing_to_say_of_it() -> None:
    """Such as those by Triton's interpreter, which fail with some versions of NumPy: the check would seem to."""
    code = """import gpu_checks
from pathlib import Path
files = {name for check in (gpu_checks.smoke(), *gpu_checks.checks()) for name in check.arguments if ".py" in name}
assert files and all("no GPU here" in (gpu_checks.ROOT / name).read_text() for name in files), files"""
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_noise_chooses_no_way_and_a_case_has_one_name() -> None:
    code = """import dataclasses
from types import SimpleNamespace
import gpu, gpu_rows
def chosen(plain, other):
    names = [dataclasses.replace(CASE, graphs=on).key_in_way for on in (False, True)]
    known = {name: row for name, row in zip(names, (plain, other)) if row}
    return gpu.chosen(SimpleNamespace(body={"rows": {"ways": known}}), CASE, "graphs")
def took(least, most):
    return {"step_s": {"least": least, "most": most}}
for CASE in gpu.WAYS_OF.values():
    assert CASE.key in gpu_rows.AIMS  # its row is not lost
    assert chosen(took(1.0, 1.1), took(0.9, 1.0)) and chosen(took(1.0, 1.1), took(1.05, 1.2))
    assert not chosen(took(1.0, 1.1), took(1.2, 1.3))
    assert not chosen(took(1.0, 1.1), {"error": "OutOfMemoryError"}) and not chosen(None, None)
    assert chosen({"error": "did not end"}, took(1.0, 1.1))
short, long = gpu.WAYS_OF["graphs"], gpu.KERNELS_OF
both = {"fused": True, "graphs": True}
assert gpu.in_way(short, both).graphs and not gpu.in_way(long, both).graphs and gpu.in_way(long, both).fused
assert gpu.in_way(short, both).key == short.key == gpu.in_way(short, {}).key
assert gpu.in_way(short, both).key_in_way.removeprefix(short.key) == " fused graphs"
"""
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_no_step_is_measured_in_a_way_that_nobody_chose(tmp_path: Path) -> None:
    code = """import argparse, sys
from pathlib import Path
import gpu, gpu_machine, gpu_results, rehearsal
rehearsal.install(gpu)
rows = gpu_results.Results(Path(sys.argv[1]), 100.0, again=False)
options = argparse.Namespace(models=["tiny"], policies=["streamed"], host_gib=None, traces=False, parts=gpu.PARTS)
ways = rows.body["rows"].setdefault("ways", {})
def told():
    return [part.name for part in gpu.parts(options, rows) if part.part not in (*gpu.PARTS[:5], "checks")]
for count in (2, 2, 4, 4):  # of the first way, then of both: one row is not enough
    assert told() == [*ways, *told()][-count:] and len(told()) == count, told()
    ways[told()[len(ways)]] = {"case": "a", "error": "none"}
assert len(told()) > 4
options.parts = ["steps"]  # who leaves them out has steps in the plain way
ways.clear()
assert len(told()) > 4
options.parts = gpu.PARTS
rows.body["runs"].append(rows._run)
rows.body["rows"]["block"] = {"fused: a": {"case": "a", "passed": False, "run": 0}}
assert len(told()) == 2 and "fused" not in told()[1]  # a way that computes a block wrongly is not tried"""
    done = python(code, str(tmp_path))
    assert done.returncode == 0, done.stderr


def test_importing_counts_as_time_of_the_budget(tmp_path: Path) -> None:
    code = """import sys, time
import gpu, gpu_results
found = []
gpu.Results = lambda folder, budget_s, **more: found.append(budget_s) or gpu_results.Results(folder, budget_s, **more)
gpu.parts = lambda options, results: []
gpu.leave = lambda status: None
gpu.__begun__ = time.monotonic() - 20.0
sys.argv = ["gpu.py", "--once", "--rehearse", "--budget-s", "100", "--out", sys.argv[1]]
gpu.main()
assert 0 < found[0] < 80.0, found
assert gpu.supervise(["no such option"], gpu.Path(sys.argv[-1]) / "gpu.json", 15.0) == 0  # the time is over"""
    done = python(code, str(tmp_path))
    assert done.returncode == 0, done.stderr


def test_a_part_begins_on_a_machine_where_nothing_is_left(tmp_path: Path) -> None:
    code = """import argparse, sys
from pathlib import Path
from types import SimpleNamespace
import torch
import gpu, gpu_arena, gpu_machine, gpu_results, gpu_rows, gpu_steps, gpu_table, rehearsal
from schedules.errors import Refused
from schedules.op import Buffer, Tier
rehearsal.install(gpu)
rows = gpu_results.Results(Path(sys.argv[1]), 100.0, again=False)
options = argparse.Namespace(models=["tiny"], policies=["streamed"], host_gib=None, traces=False, parts=["steps"])
for part in gpu.parts(options, rows):
    alone = part.part not in gpu_table.STEPS and (part.part != "checks" or part.name == "clocks")
    assert (getattr(part.work, "func", None) is gpu.alone) == alone, part
whole = []
torch.cuda.set_per_process_memory_fraction = whole.append
large = SimpleNamespace(buffers=[Buffer(name="a", tier=Tier.HOST, nbytes=1 << 20)])
small = SimpleNamespace(buffers=[Buffer(name="a", tier=Tier.HOST, nbytes=1 << 14)])
for schedule in (large, small):
    backend = gpu_arena.ArenaBackend(schedule)
    backend.allocate(schedule.buffers[0])
    backend.close()
assert gpu_arena.ArenaBackend.pinned() == 1 << 20 and backend.unused == (1 << 20) - (1 << 14)
torch.set_num_threads(7)
assert gpu.alone(lambda: {"case": "a"}) == {"case": "a"}
assert gpu_arena.ArenaBackend.pinned() == 0
options.host_gib = None
first = gpu.host_bytes_of(options, rows)
assert gpu.host_bytes_of(options, rows) == first  # a later call of the folder plans for the same
large, other = {"case": "large", "error": "does not fit", "refused": True}, {"case": "other"}
rows.body["rows"]["steps"] = {"large": large, "other": other}
options.host_gib = 1.0
assert gpu.host_bytes_of(options, rows) == 1 << 30 and list(rows.body["rows"]["steps"]) == ["other"]
options.host_gib = None
assert gpu.host_bytes_of(options, rows) == 1 << 30
steps, spare = [], gpu.SPARE
def short_of_memory(case, device, *more):
    steps.append(device)
    if len(steps) == 1:
        raise torch.cuda.OutOfMemoryError("no room")
    if len(steps) == 2:
        raise Refused("the GPU has no room for a buffer") from torch.cuda.OutOfMemoryError("no room")
    return {"case": case.key}
gpu_steps.measure = short_of_memory
part = next(part for part in gpu.parts(options, rows) if part.part == "ways")
try:
    part.work()
except Refused:
    assert steps[0] - steps[1] == spare
else:
    raise AssertionError
del steps[0]
assert part.work()["planned_for_GB"] == steps[2] / 1e9
assert whole and set(whole) == {1.0} and torch.get_num_threads() != 7
counts = []
median = gpu_machine.statistics.median
gpu_machine.statistics = SimpleNamespace(median=lambda found: counts.append(len(found)) or median(found))
gpu_machine.rates([(torch.cuda.Stream(), lambda: torch.ones(1000).sum(), 1.0)] * 2, 0.001)
assert counts == [gpu_machine.WINDOWS] * 2, counts"""
    done = python(code, str(tmp_path))
    assert done.returncode == 0, done.stderr


def test_what_deepspeed_leaves_behind_goes_with_its_process(tmp_path: Path) -> None:
    """It replaces functions of torch for good, and holds the memory of engines that were ended."""
    code = """import sys
import gpu
of, others, then = ("tiny", "bf16"), ("tiny", "bf16_fp32"), sys.argv[2]
def begun():
    gpu.gpu_rivals.Zero3._begun, gpu.gpu_rivals.Zero3._kept = True, (of, None)
    return {"case": "first", "error": "none"}
def fails():
    gpu.gpu_rivals.Zero3.failed()
    return {"case": "fails", "error": "none"}
def row(name):
    return lambda: {"case": name, "error": "none"}
gpu.parts = lambda options, results: [
    gpu.Part("rivals", "first", begun, 0.0, of),
    gpu.Part("steps", "too long", row("too long"), 1e9),
    gpu.Part("rivals", "second", row("second"), 0.0, of),
    *([gpu.Part("rivals", "fails", fails, 0.0, of)] if then == "fails" else []),
    gpu.Part("rivals", "of others", row("of others"), 0.0, {"fails": of, "others": others, "none": None}[then]),
]
sys.argv = ["gpu.py", "--once", "--rehearse", "--out", sys.argv[1]]
gpu.main()"""
    for then in ("others", "none", "fails"):
        first = python(code, str(tmp_path / then), then)
        rows = json.loads((tmp_path / then / "gpu.json").read_text())["rows"]["rivals"]
        assert first.returncode == 3 and list(rows) == ["first", "second", *(["fails"] if then == "fails" else [])]
        second = python(code, str(tmp_path / then), then)
        assert second.returncode == 0 and "no time for 1 rows or more" in second.stderr
        rows = json.loads((tmp_path / then / "gpu.json").read_text())["rows"]["rivals"]
        assert rows["of others"]["error"] == "none"


def test_an_engine_that_does_not_begin_is_tried_with_one_batch() -> None:
    code = """import gpu, gpu_results, gpu_rivals, gpu_rows
first, second, third = (
    gpu.Case(model="tiny", policy=gpu_rows.ZERO3, seq_len=seq, micro_batch_size=micro, accumulation=count)
    for seq, micro, count in gpu_rows.BATCHES
)
gpu_rivals.zero3 = lambda case, host_bytes: {"case": case.key}
def begun(case, build):
    try:
        raise OSError("no compiler")
    except OSError as error:
        raise RuntimeError("which failed to build") from error
gpu_rivals._begun = begun
try:
    gpu_rivals.Zero3.engine(first, None)
except gpu_rivals.NotBegun as error:
    failed = f"{type(error).__name__}: {error}"
assert failed == "NotBegun: RuntimeError: which failed to build (from OSError('no compiler'))", failed
assert gpu_rivals.Zero3.kept() is None
for error in (failed, gpu_results.DID_NOT_END):
    try:
        gpu.rival(third, 0, {first.key: {"error": error}, third.key: {"error": gpu_results.CUT_OFF}})
        raise AssertionError
    except gpu_rivals.LeftOut as left_out:
        assert str(left_out) == f"left out: with another batch, {error}"
for error in ("RuntimeError: out of luck", gpu_results.CUT_OFF):
    assert gpu.rival(third, 0, {first.key: {"error": error}, second.key: {"step_s": {}}}) == {"case": third.key}
other = gpu_rows.of_batch(first, gpu_rows.BATCHES[-1])
assert other == third and gpu_rows.engine(third) == gpu_rows.engine(first) == ("tiny", "bf16")"""
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_a_rival_that_cannot_be_imported_is_left_out() -> None:
    code = """import sys
import gpu, gpu_rivals, gpu_rows
class Torn:
    def find_spec(self, name, path, target=None):
        if name in ("deepspeed", "transformers"):
            raise RuntimeError("torn")
sys.meta_path.insert(0, Torn())
case = gpu.Case(model="tiny", policy=gpu_rows.ZERO3, seq_len=16, micro_batch_size=2)
for work in (lambda: gpu_rivals.zero3(case, 0), lambda: gpu_rivals.builder(None)):
    try:
        work()
        raise AssertionError
    except gpu_rivals.LeftOut as error:
        assert str(error).endswith(" cannot be imported: torn"), error"""
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_what_a_rival_pins_is_exact_and_goes_with_its_data() -> None:
    code = """import gc
import torch
import gpu_machine
import gpu_rivals
pinned = {}
class Runtime:
    def cudaHostRegister(self, address, nbytes, flags):
        pinned[address] = nbytes
        return 0
    def cudaHostUnregister(self, address):
        del pinned[address]
torch.cuda.cudart = Runtime
beside = []
gpu_machine.pci_address = lambda index: "0000:1b:00.0"
gpu_machine.cpus_beside = lambda address: beside.append(address) or ()
wanted = torch.randn(3, 5).bfloat16()
found = gpu_rivals.exactly_pinned(wanted)
assert torch.equal(found, wanted) and list(pinned.values()) == [30]
assert beside == ["0000:1b:00.0"]  # as ours
found.data = torch.empty(0)  # as DeepSpeed does, when it moves a parameter to where all are
gc.collect()
assert not pinned"""
    done = python(code)
    assert done.returncode == 0, done.stderr
