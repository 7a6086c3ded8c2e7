"""Files on the command line: what a schedule file fixes, and paths that cannot be read or written."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from command import ROOT, megatrain
from timed_profile import timed
from typer.testing import CliRunner

from analysis.text_gantt import SPANS
from megatrain import cli, this_machine
from megatrain.cli.bars import goes_on, progress_bar, stages
from megatrain.cli.options import command_line
from megatrain.cli.run import _notes
from megatrain.this_machine import Here
from megatrain.way import Way
from schedules import codec, policies, presets
from schedules.errors import InputError, Refused
from schedules.hf_config import write_config
from schedules.schedule import RECORDED, Schedule
from schedules.verify import ScheduleError
from schedules.workload import MemoryBudget, Workload
from sim import hardware

MEMORY = MemoryBudget(device_bytes=10**9, host_bytes=10**9, nvme_bytes=10**9)
WORKLOAD = Workload(micro_batch_size=1, seq_len=16, precision="fp32")


def called(*arguments: str) -> tuple[str, BaseException | None]:
    """What a command prints and raises, without a process of its own."""
    result = CliRunner().invoke(cli.app, list(arguments))
    return result.stdout, result.exception


@pytest.fixture
def step(tmp_path: Path) -> Path:
    codec.save(policies.build("streamed", presets.load("tiny"), WORKLOAD, MEMORY), tmp_path / "step.json")
    return tmp_path / "step.json"


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """As `megatrain import` writes them: ops in the order they ran, without buffers."""
    built = policies.build("streamed", presets.load("tiny"), WORKLOAD, MEMORY)
    bare = Schedule(ops=built.ops, buffers=(), waits=(), model=built.model, workload=WORKLOAD, policy=RECORDED)
    codec.save(bare, tmp_path / "recorded.json")
    return tmp_path / "recorded.json"


# ---- what a file is


def test_a_schedule_is_one_in_whatever_order_its_fields_are(step: Path, tmp_path: Path) -> None:
    """As other tools write them."""
    other = tmp_path / "sorted.json"
    other.write_text(json.dumps(json.loads(step.read_text()), sort_keys=True))
    assert '"format"' not in other.read_text()[:1000]
    assert called("simulate", str(other), "--json") == called("simulate", str(step), "--json") != ("", None)
    trace = tmp_path / "trace.json"
    assert called("simulate", str(other), "--trace", str(trace))[1] is None
    assert called("timeline", str(trace), str(other), "--out", str(tmp_path / "drawn"))[1] is None


def test_a_folder_is_not_taken_for_what_was_refused(tmp_path: Path) -> None:
    """A misspelt policy or precision measures nothing: the right command may write there."""
    for wrong in (["--policy", "steamed"], ["--precision", "fp16"]):
        _, error = called("validate", *wrong, "--out", str(tmp_path / "found"))
        assert isinstance(error, InputError) and not (tmp_path / "found" / "machine.txt").exists()


def test_what_was_meant_is_named() -> None:
    _, error = called("simulate", "Qwen/Qwen2.5-7B")
    assert "there is no file Qwen/Qwen2.5-7B; a preset is called qwen2.5-7b" in str(error)
    _, error = called("hardware", "--set", "host.memory=1GB")
    assert isinstance(error, InputError) and "--set host.memory=1GB is for one machine: name it" in str(error)


# ---- what a schedule file fixes


@pytest.mark.parametrize("command", ["simulate", "run", "build"])
def test_options_that_a_schedule_file_decides_are_refused(command: str, step: Path) -> None:
    options = ["-b", "32", "-a", "2", "--seq", "8", "-p", "resident", "--precision", "fp32", "--clip", "1"]
    done = megatrain(command, str(step), *options, "-k", "slots=7", "--recompute", "none")
    assert done.returncode == 2 and not done.stdout
    named = "--policy, --batch, --accumulation, --seq, --precision, --clip, --recompute, --knob"
    assert f"step.json is a whole step: leave out {named}, or name a model" in done.stderr


def test_an_option_beside_a_file_is_not_read_with_defaults_that_are_not_the_files(step: Path) -> None:
    done = megatrain("run", str(step), "--matmul", "fp8")  # which fp32, where no precision is given, has not
    assert done.returncode == 2 and "step.json is a whole step: leave out --matmul, or name a model" in done.stderr


def test_options_that_a_schedule_file_does_not_decide_are_taken(step: Path) -> None:
    done = megatrain("simulate", str(step), "-H", "rtx4090", "--set", "host.memory=64GB", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["machine"].startswith("rtx4090")
    _, error = called("build", str(step), "-H", "rtx4090", "--set", "host.memory=64GB")
    assert isinstance(error, InputError) and "leave out --hardware, --set" in str(error)


@pytest.mark.parametrize("command", [["verify"], ["verify", "--json"], ["simulate"], ["run"], ["build"]])
def test_a_recording_is_not_proven_or_run(command: list[str], recording: Path) -> None:
    output, error = called(*command, str(recording))
    assert isinstance(error, InputError) and not output
    assert "it can be drawn and compared, not proven or run" in str(error)


def test_an_import_says_what_was_trained(tmp_path: Path) -> None:
    for given, lacking in (([], "--batch"), (["--batch", "1"], "--seq")):
        done = megatrain("import", "r.json", "--model", "tiny", "--out", str(tmp_path), *given)
        assert done.returncode == 2 and f"Missing option '{lacking}'" in done.stderr


def test_verify_tells_a_policy_from_a_schedule() -> None:
    _, error = called("verify", "docs/my_policy.py")
    told = "verify takes a schedule file: megatrain build MODEL -p docs/my_policy.py --out FILE"
    assert isinstance(error, InputError) and str(error) == told


# ---- for programs


def test_verify_and_build_have_json(step: Path, tmp_path: Path) -> None:
    output, _ = called("verify", str(step), "--json")
    proven = json.loads(output)
    assert proven["safe"] and proven["problems"] == [] and proven["allocated_bytes"]["device"] > 0
    output, _ = called("build", str(step), "-o", str(tmp_path / "again.json"), "--json")
    built = json.loads(output)
    assert built["digest"] == proven["digest"] and built["file"] == str(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == step.read_text()

    body = json.loads(step.read_text())
    step.write_text(json.dumps({**body, "waits": body["waits"][1:]}))
    done = megatrain("verify", str(step), "--json")
    broken = json.loads(done.stdout)
    assert done.returncode == 1 and not broken["safe"] and "race on" in broken["problems"][0]


def test_policies_have_json() -> None:
    listed = json.loads(called("policies", "--json")[0])
    assert [policy["policy"] for policy in listed] == policies.names()
    one = json.loads(called("policies", "streamed", "--json")[0])
    (same,) = [policy for policy in listed if policy["policy"] == "streamed"]
    assert {name: one[name] for name in same} == same
    assert one["knobs"]["slots"] == 2 and one["trains"] == "weights" and one["summary"]
    three = json.loads(called("policies", "streamed slots=3", "--json")[0])
    assert three["knobs"] == one["knobs"] and three["speed"][0]["label"] == "streamed slots=3"


def test_the_json_of_a_policy_has_what_its_text_has() -> None:
    one, text = json.loads(called("policies", "zero3_offload", "--json")[0]), called("policies", "zero3_offload")[0]
    assert one["knob_help"].keys() == one["knobs"].keys()
    for name, told in one["knob_help"].items():
        assert re.search(rf"^  {name} = .*\({re.escape(told['accepts'])}\)$", text, re.MULTILINE)
        assert told["help"] and told["help"] in text
    assert f"{one['model']}, {one['accumulation']} x {one['micro_batch_size']} sequences of {one['seq_len']}" in text
    cells = [re.split("  +", line.strip()) for line in text.splitlines()]
    held = one["bytes_per_parameter"] | {
        "activations and logits, GB": one["activations_and_logits_gb"],
        "peak with workspace, GB": one["peak_with_workspace_gb"],
    }
    for what, numbers in held.items():
        assert [what, *(f"{value:.2f}" for value in numbers.values() if value)] in cells
    assert [row["label"] for row in one["speed"]] == ["zero3_offload", "streamed"]
    for row in one["speed"]:
        step, rate, bound = f"{row['step_s']:.3f} s", f"{row['tokens_per_s']:,.0f}", f"{row['bound_s']:.3f} s"
        assert [row["label"], step, rate, bound, f"{row['gap']:.1%}", row["binding"]] in cells


# ---- paths


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("simulate tiny --trace nowhere/x", "cannot write nowhere/x: no such folder"),
        ("simulate tiny --perfetto nowhere/x", "cannot write nowhere/x: no such folder"),
        ("build tiny --out .", "cannot write .: it is a folder"),
        ("run tiny --steps 5 --trace nowhere/x", "cannot write nowhere/x: no such folder"),
        ("run tiny --steps 5 --export FILE", "cannot write FILE: it is a file"),
        ("run tiny --steps 5 --save FILE/x", "cannot write FILE/x: a part of the path is a file"),
        ("compare tiny --out FILE", "cannot write FILE: it is a file"),
        ("sweep tiny --prices prices.yaml --out FILE", "cannot write FILE: it is a file"),
        ("adversary streamed resident --out nowhere/x", "cannot write nowhere/x: no such folder"),
        ("published --out FILE", "cannot write FILE: it is a file"),
        ("validate --out FILE", "cannot write FILE: it is a file"),
        ("demo --out FILE", "cannot write FILE: it is a file"),
        ("policies --out FILE", "cannot write FILE: it is a file"),
        ("diff FILE gone --schedule FILE", "cannot read gone: there is no such file"),
        ("diff FILE FILE --schedule FILE --out nowhere/x", "cannot write nowhere/x: no such folder"),
        ("export gone --chakra x", "cannot read gone: there is no such file"),
        ("export FILE --chakra nowhere/x", "cannot write nowhere/x: no such folder"),
        ("import gone -m tiny -o out -b 1 -s 16", "cannot read gone: there is no such file"),
        ("import FILE -m tiny -o FILE -b 1 -s 16", "cannot write FILE: it is a file"),
        ("timeline gone --out out", "cannot read gone: there is no such file"),
        ("timeline FILE --out FILE", "cannot write FILE: it is a file"),
        ("verify .", "cannot read .: it is a folder"),
    ],
)
def test_a_path_is_looked_at_before_the_work(
    command: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").write_text("kept")
    output, error = called(*command.split())
    assert isinstance(error, InputError) and str(error) == told and not output
    assert [path.name for path in tmp_path.iterdir()] == ["FILE"]


@pytest.mark.parametrize(
    "command",
    [
        ["simulate", "step.json", "--trace", "./step.json"],
        ["simulate", "step.json", "--trace={}/step.json"],
        ["build", "tiny", "-p", "step.json slots=3", "--out", "step.json"],
        ["run", "tiny", "--data", "step.json", "--log", "step.json"],
        ["run", "tiny", "--weights", ".", "--trace", "step.json"],
        ["run", "tiny", "--adapters", "{}", "--log", "./step.json"],
        ["simulate", "tiny", "--trace", "new.json", "--perfetto", "new.json"],
        ["import", "step.json", "--model", "tiny", "--batch", "1", "--seq", "16", "--out", "."],
    ],
)
def test_nothing_is_written_over_what_is_read(command: list[str], step: Path, tmp_path: Path) -> None:
    if command[0] == "import":
        command[1] = str(step.rename(tmp_path / "trace.json").name)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    done = megatrain(*(word.format(tmp_path) for word in command), cwd=tmp_path)
    assert done.returncode == 2 and "would be written over" in done.stderr
    assert before == {path: path.read_bytes() for path in tmp_path.iterdir()}


def test_a_device_may_be_written_to_twice() -> None:
    assert megatrain("simulate", "tiny", "--trace", "/dev/null", "--perfetto", "/dev/null").returncode == 0


def test_results_are_printed_though_they_cannot_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, *text: str, **options: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    for command in (["simulate", "tiny"], ["run", "tiny", "--steps", "3", "-b", "1", "-s", "16"]):
        output, error = called(*command, "--trace", str(tmp_path / "x"))
        assert "tokens/s" in output
        assert isinstance(error, InputError) and str(error) == f"cannot write {tmp_path / 'x'}: the drive is full"


@pytest.mark.parametrize("command", ["export", "timeline", "diff"])
def test_what_is_shown_is_proven_first(command: str, step: Path, tmp_path: Path) -> None:
    body = json.loads(step.read_text())
    body["waits"][0]["op"] = "nowhere"
    step.write_text(json.dumps(body))
    arguments = {
        "export": [str(step), "--chakra", str(tmp_path / "x.et")],
        "timeline": [str(step), "-o", str(tmp_path / "drawn")],
        "diff": [str(step), str(step), "--schedule", str(step)],
    }
    _, error = called(command, *arguments[command])
    assert isinstance(error, ScheduleError) and "there is no op nowhere" in str(error)


def test_a_name_that_the_terminal_cannot_show_is_told_all_the_same(tmp_path: Path) -> None:
    file = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.json")
    command = [sys.executable, "-m", "megatrain", "build", "tiny", "-b", "1", "-s", "16", "-o", file]
    strict = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run(command, capture_output=True, cwd=ROOT, timeout=120, env=strict)
    assert done.returncode == 0 and rb"\udcff.json" in done.stdout, done.stderr


@pytest.mark.parametrize("option", ["--batch", "--seq"])
def test_a_number_beyond_all_measure_is_wrong_input(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["megatrain", "simulate", "tiny", option, "1" + "0" * 400])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2 and "must be a number of 64 bits, not one of 401 digits" in capsys.readouterr().err


def test_who_interrupts_before_a_training_has_begun_sees_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def interrupted(**options: bool) -> Iterator[None]:
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(sys.modules["megatrain.cli.run"], "progress_bar", interrupted)
    monkeypatch.setattr(sys, "argv", ["megatrain", "run", "tiny", "--steps", "1", "--seq", "16", "--backend", "cpu"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 130 and "Traceback" not in capsys.readouterr().err


def test_an_error_of_the_system_is_told_by_its_path(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "secret.json")

    monkeypatch.setattr(cli, "app", fails)
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2 and capsys.readouterr().err == "megatrain: secret.json: Permission denied\n"


def test_what_is_named_twice_is_compared_once(tmp_path: Path) -> None:
    twice = ["tiny", "tiny", "-p", "resident", "-p", "resident"]
    done = megatrain("compare", *twice, "-o", str(tmp_path / "out"), "--json")
    assert done.returncode == 0 and len(json.loads(done.stdout)) == 1, done.stderr


# ---- what is told first, and spellings


def test_what_does_not_fit_says_so_before_any_number() -> None:
    done = megatrain("simulate", "gpt-oss-120b", "-p", "resident", "-H", "rtx4090")
    first = done.stdout.splitlines()[0]
    assert done.returncode == 1 and "GB short when buffers are allocated" in done.stderr
    assert re.fullmatch(r"DOES NOT FIT: device \+[\d,.]+ GB; all below is as if it did", first)


def test_a_comparison_of_what_does_not_fit_is_a_no() -> None:
    done = megatrain("compare", "llama-3.1-70b", "-p", "resident", "-H", "rtx4090")
    assert done.returncode == 1 and "does not fit: device" in done.stdout
    assert done.stderr.endswith("megatrain: none of these fits rtx4090\n")


def test_a_schedule_that_is_built_says_whether_it_fits() -> None:
    built = ("build", "llama-3.1-8b", "-p", "resident")
    assert "149.25 GB device; it fits\n" in called(*built)[0]
    assert "24.80 GB device; DOES NOT FIT: device +" in called(*built, "-H", "rtx4090")[0]
    told = json.loads(called(*built, "-H", "rtx4090", "--json")[0])
    assert told["machine"] == "rtx4090" and told["fits"] is False and told["reason"].startswith("device memory is ")
    assert told["peak_bytes"]["device"] > told["allocated_bytes"]["device"] > 24e9 and told["peak_bytes"]["nvme"] == 0
    simulated = json.loads(called("simulate", *built[1:], "-H", "rtx4090", "--json")[0])
    assert told["peak_bytes"]["device"] > told["available_bytes"]["device"]
    assert round(told["available_bytes"]["device"] / 1e9, 2) == 24.80
    assert simulated["available_bytes"] == told["available_bytes"] and told["available_bytes"]["nvme"] > 0


def test_compare_names_the_policies_that_it_leaves_out() -> None:
    note = "Left out, since they do not train every weight: flexgen_block, lora_streamed. See them with --policy."
    assert note in called("compare", "tiny", "-b", "1", "-s", "16")[0]
    assert "Left out" not in called("compare", "tiny", "-b", "1", "-s", "16", "-p", "resident")[0]


@pytest.mark.parametrize(
    "spelling", [["tiny", "demo"], ["tiny,demo"], ["--models", "tiny,demo"], ["tiny", "-m", "demo"]]
)
def test_models_are_named_in_any_spelling(spelling: list[str]) -> None:
    found = json.loads(called("compare", *spelling, "-p", "resident", "-b", "1", "-s", "16", "--json")[0])
    assert [row["model"] for row in found] == ["tiny", "demo"]
    _, error = called("compare")
    assert isinstance(error, InputError) and "name at least one model" in str(error)


def test_a_sweep_takes_models_and_machines_in_any_spelling(tmp_path: Path) -> None:
    step = ["-p", "resident", "-t", "16", "-s", "16", "--prices", "docs/prices.yaml", "--workers", "1", "--json"]
    spellings = (["tiny", "-H", "h200"], ["--model", "tiny", "--profile", "h200"], ["--models", "tiny", "-H", "h200"])
    found = [json.loads(called("sweep", *words, *step, "-o", str(tmp_path / "out"))[0]) for words in spellings]
    assert found[0] == found[1] == found[2] and found[0][0]["model"] == "tiny"


def test_a_sweep_says_what_never_becomes_cheaper_than_a_rental(tmp_path: Path) -> None:
    """Steps of 16 tokens of a tiny model keep no machine busy, and rented ones are taken to be."""
    step = ["-p", "resident", "-t", "16", "-s", "16", "--prices", "docs/prices.yaml", "--workers", "1"]
    words = ["sweep", "tiny", "-H", "h200", *step, "-o", str(tmp_path / "out")]
    assert json.loads(called(*words, "--json")[0])[0]["months until cheaper than 8 x H100"] == "never"
    assert " never " in called(*words)[0]


def test_a_price_of_memory_that_is_missing_is_told_before_the_sweep(tmp_path: Path) -> None:
    """A sweep takes minutes: what it cannot be priced without is better known before."""
    example = (ROOT / "docs" / "prices.yaml").read_text(encoding="utf-8")
    (tmp_path / "prices.yaml").write_text(re.sub("(?m)^host_memory_per_gb:.*$", "", example), encoding="utf-8")
    step = ["-p", "resident", "-t", "16", "-s", "16", "-H", "h100", "--vary", "host.memory=128GB", "--workers", "1"]
    _, error = called("sweep", "tiny", *step, "--prices", str(tmp_path / "prices.yaml"), "-o", str(tmp_path / "out"))
    assert isinstance(error, InputError) and "add host_memory_per_gb to the price file" in str(error)
    assert not (tmp_path / "out" / "rows.jsonl").exists()


def test_a_machine_is_a_profile_in_build_and_run() -> None:
    assert called("build", "tiny", "--profile", "rtx4090")[1] is None
    _, error = called("run", "tiny", "--profile", "h2000")
    assert isinstance(error, InputError) and "h200" in str(error)


# ---- pipes, and one file in another's place


@pytest.mark.parametrize(
    "command",
    [
        ["build", "tiny", "--show", "--out", "{out}"],
        ["hardware"],
        ["compare", "tiny", "-p", "streamed", "--out", "{out}"],
    ],
)
def test_whoever_reads_may_end_first_and_nothing_is_lost(command: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", "megatrain", *(word.format(out=out) for word in command)]
    done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=120)
    os.close(writer)
    assert done.returncode == 1 and "roken" not in done.stderr and "Traceback" not in done.stderr
    assert out.exists() or "{out}" not in command


def test_a_file_of_another_kind_is_named_for_what_it_is(tmp_path: Path) -> None:
    schedule, trace, profile, empty = (str(tmp_path / f"{name}.json") for name in ("s", "t", "p", "e"))
    assert called("build", "tiny", "-b", "1", "-s", "16", "--out", schedule)[1] is None
    assert called("simulate", schedule, "--trace", trace)[1] is None
    Path(profile).write_text(json.dumps(hardware.to_json(hardware.load("h200")), separators=(",", ":")))
    Path(empty).write_text("")
    for command, told in (
        (["simulate", "tiny", "-H", schedule], f"{schedule} is a schedule, not a hardware profile"),
        (["verify", trace], f"{trace} is a trace, not a schedule"),
        (["plan", schedule], f"{schedule} is a schedule, not a model's config.json"),
        (["models", profile], f"{profile} is a hardware profile, not a model's config.json"),
        (["diff", schedule, trace, "--schedule", schedule], f"{schedule} is a schedule, not a trace"),
        (["verify", empty], f"{empty} is empty, not a schedule"),
    ):
        _, error = called(*command)
        assert isinstance(error, InputError) and str(error) == told, command


def test_of_two_traces_the_one_of_another_schedule_is_named(tmp_path: Path) -> None:
    step, trace, other, run = (str(tmp_path / name) for name in ("s.json", "t.json", "o.json", "r.json"))
    for schedule, seq, of_it in ((step, "16", trace), (other, "8", run)):
        assert called("build", "tiny", "-b", "1", "-s", seq, "--out", schedule)[1] is None
        assert called("simulate", schedule, "--trace", of_it)[1] is None
    for command in (["diff", trace, run, "--schedule", step], ["export", step, "--chakra", other, "--trace", run]):
        _, error = called(*command)
        assert isinstance(error, InputError) and str(error).startswith(f"{run}: the trace is of schedule "), command


def test_a_trace_of_another_version_or_of_no_step_is_not_drawn(step: Path, tmp_path: Path) -> None:
    whole, other = tmp_path / "whole.json", tmp_path / "other.json"
    assert called("simulate", str(step), "--trace", str(whole))[1] is None
    document = json.loads(whole.read_text())
    nothing = {column: [] for column in document["columns"]}
    for changed, told in (
        ({"format": "megatrain-trace/9"}, "megatrain-trace/9"),
        ({"columns": nothing}, "other.json holds no op of any step"),
    ):
        other.write_text(json.dumps(document | changed))
        _, error = called("timeline", str(other), str(step), "--out", str(tmp_path / "beside"))
        assert isinstance(error, InputError) and told in str(error) and "not a schedule" not in str(error)
    assert not (tmp_path / "beside" / "gantt.png").exists()


@pytest.mark.parametrize("columns", [50, 80, None])
def test_words_are_as_wide_as_the_terminal(columns: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not cut in the middle of a word; a lane of the picture stays in a line. A pipe gets them as the file has them."""
    if columns is not None:  # as rich is told of a terminal
        for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm"), ("COLUMNS", str(columns))):
            monkeypatch.setenv(name, value)
    words, picture = policies.explain("zero_offload"), called("policies", "zero_offload")[0]
    told = picture.partition("where states live, in bytes per parameter:")[0]
    assert told.split()[: len(words.split())] == words.split()
    assert (words in told) == (columns is None)
    assert columns is None or max(map(len, told.split("\n"))) <= columns
    lanes = re.findall(r"^(?:compute|host)  +\S+$", told, re.MULTILINE)
    assert len(lanes) == 2 and {len(lane) for lane in lanes} == {columns or 9 + SPANS}


@pytest.mark.parametrize(
    ("command", "where"), [("compare", "analysis.compare.predict"), ("simulate", "sim.prediction.predict")]
)
def test_who_interrupts_a_command_is_told_that_it_was(
    command: str, where: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*of: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(where, interrupted)
    monkeypatch.setattr(sys, "argv", ["megatrain", command, "tiny", "--seq", "16"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert (left.value.code, capsys.readouterr().err) == (130, "megatrain: interrupted before it was done\n")


def test_an_interrupted_sweep_says_that_it_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as left, goes_on():
        raise KeyboardInterrupt
    assert left.value.exit_code == 130 and "the same command goes on from here" in capsys.readouterr().err


def test_a_run_tells_for_which_machine_it_was_predicted() -> None:
    step = ["run", "tiny", "-b", "1", "-s", "16", "--steps", "1", "-H", "h200"]
    assert re.search(r"predicted [\d.]+ ms a step on h200 \(datasheet profile\)", called(*step)[0])
    record = json.loads(called(*step, "--json")[0])
    assert (record["predicted_machine"], record["predicted_profile"]) == ("h200", "datasheet")


@pytest.mark.parametrize("device_bytes", [500_000, 1 << 30])
def test_a_run_of_a_policy_fills_the_memory_of_this_machine(device_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    small = Here(device="small", on_gpu=False, device_bytes=device_bytes, host_bytes=1 << 30, free_bytes=1 << 30)
    monkeypatch.setattr(this_machine, "machine_here", lambda machine, nvme: small)
    trained = json.loads(called("run", "tiny", "-b", "2", "-s", "32", "--steps", "1", "--json")[0])
    workload = Workload(micro_batch_size=2, seq_len=32, precision="fp32")
    assert trained["digest"] == policies.build("streamed", presets.load("tiny"), workload, small.budget).digest
    generous = MemoryBudget(device_bytes=1 << 34, host_bytes=1 << 34)
    more = policies.build("streamed", presets.load("tiny"), workload, generous).digest
    assert (trained["digest"] == more) == (device_bytes == 1 << 30)


def test_a_drive_that_is_not_there_is_told_before_an_op_that_was_not_measured(tmp_path: Path) -> None:
    file = tmp_path / "here.json"
    profile = replace(timed(presets.load("tiny"), [Workload(micro_batch_size=4, seq_len=64)]), nvme=None)
    hardware.save(profile, file)
    _, error = called("simulate", "tiny", "-p", "zero_infinity", "-b", "4", "-s", "64", "-H", str(file))
    assert isinstance(error, Refused) and "has none; megatrain profile --nvme FOLDER measures one" in str(error)


def test_a_full_disk_behind_the_output_is_told() -> None:
    command = f"{sys.executable} -m megatrain models > /dev/full"
    done = subprocess.run(["sh", "-c", command], cwd=ROOT, timeout=120, capture_output=True, text=True)
    assert done.returncode == 2 and "cannot write what is printed: No space left on device" in done.stderr


def test_an_adversary_ends_with_its_verdict_for_programs_too() -> None:
    search = ("adversary", "megatrain", "streamed", "--points", "8", "--top", "1")
    found = json.loads(called(*search, "--json")[0])
    words = f"{found['shapes']} shapes at which both fit; at {found['first_is_faster']} of them megatrain is faster"
    assert words in " ".join(called(*search)[0].split()) and found["shapes"] > len(found["losses"]) == 1


def test_where_two_policies_fit_nowhere_the_answer_is_no() -> None:
    _, error = called("adversary", "streamed", "resident", "--set", "gpu.memory=1MB", "--points", "2")
    assert isinstance(error, Refused) and "nothing can be said" in str(error)


def test_a_price_that_a_profiles_own_name_has_is_noted(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(hardware.to_json(hardware.load("rtx4090"))))
    options = ["--hardware", str(file), "--prices", "docs/prices.yaml", "-t", "64", "-s", "64", "-p", "streamed"]
    result = CliRunner().invoke(cli.app, ["sweep", "tiny", *options, "--workers", "1", "--out", str(tmp_path)])
    assert f"note: {file} has the price of rtx4090, which its profile is called" in result.stderr


def test_a_run_whose_profile_lacks_its_ops_does_not_train_first(tmp_path: Path) -> None:
    file = tmp_path / "here.json"
    hardware.save(timed(presets.load("tiny"), [Workload(micro_batch_size=4, seq_len=64)]), file)
    out, error = called("run", "tiny", "-b", "1", "-s", "16", "-H", str(file), "--save", str(tmp_path / "run"))
    assert isinstance(error, InputError) and not out and not (tmp_path / "run" / "step-00000020").exists()


def test_stages_are_shown_only_where_they_take_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    for patience, shown in ((60.0, False), (0.0, True)):
        monkeypatch.setattr(sys.modules[stages.__module__], "PATIENCE_S", patience)
        with stages() as begin:
            begin("building")
            time.sleep(0.3)
            begin("proving")
        assert ("building" in capsys.readouterr().err) is shown


def test_stages_are_lines_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for patience, shown in ((60.0, ""), (0.1, "building ...\nproving ...\n")):
        monkeypatch.setattr(sys.modules[stages.__module__], "PATIENCE_S", patience)
        with stages() as begin:
            begin("building")
            time.sleep(0.3)
            begin("proving")
        assert capsys.readouterr().err == shown


@pytest.mark.parametrize("command", [("compare",), ("sweep", "--prices", "docs/prices.yaml", "--out", "unused")])
def test_models_that_could_not_be_told_apart_are_refused(command: tuple[str, ...], tmp_path: Path) -> None:
    files = [tmp_path / name / "m.json" for name in "ab"]
    for heads, file in enumerate(files, start=1):
        file.parent.mkdir()
        config = write_config(replace(presets.load("tiny"), num_key_value_heads=heads).to_dict())
        file.write_text(json.dumps(config))
    out, error = called(command[0], *map(str, files), *command[1:])
    assert isinstance(error, InputError) and "two models are called m, " in str(error) and not out


def test_a_bar_on_a_narrow_terminal_cuts_nothing_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm"), ("COLUMNS", "40")):
        monkeypatch.setenv(name, value)
    with progress_bar() as bar:
        bar.update(bar.add_task("simulating", total=1.0, note=""), completed=1.0, note="a-model-of-a-long-name")
    told = re.sub(r"\x1b\[[\d;?]*\w|\s", "", capsys.readouterr().err)
    assert told.endswith("a-model-of-a-long-name")


def test_page_of_results_takes_a_folder_whose_name_is_not_utf8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a name reaches a program as half characters, which no file in UTF-8 may hold."""
    monkeypatch.setattr(sys, "argv", ["megatrain", "demo", "--out", os.fsdecode(b"caf\xe9 two"), "caf\u00e9"])
    assert command_line() == "megatrain demo --out 'caf\\xe9 two' 'caf\u00e9'"


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed_are_no_reason_to_fail(closed: str, tmp_path: Path) -> None:
    """Nor does a file that is opened get what is said on them."""
    out = tmp_path / "step.json"
    command = f"{sys.executable} -m megatrain build tiny --seq 512 --out {out} {closed}"  # with a note on stderr
    assert subprocess.run(["sh", "-c", command], cwd=ROOT, timeout=120).returncode == 0
    assert codec.read(out).model.name == "tiny"


@pytest.mark.parametrize(("way", "noted"), [((True, True), False), ((True, False), True), ((False, False), True)])
def test_short_micro_batches_are_noted_to_wait_for_launches_on_a_gpu(way: tuple[bool, bool], noted: bool) -> None:
    of = Way(fused=way[0], graphs=way[1])
    for workload, on_gpu in ((WORKLOAD, True), (WORKLOAD, False), (replace(WORKLOAD, seq_len=8193), True)):
        told = "".join(_notes(workload, of, on_gpu=on_gpu, documents=False))
        assert ("wait for launches" in told) is (noted and on_gpu and workload.seq_len == 16)
        assert ("--fused compiles" in told) is (not of.fused and on_gpu and workload.seq_len > 16)
        told = "".join(_notes(workload, of, on_gpu=on_gpu, documents=True))  # which graphs do not go with
        assert "--graphs" not in told and ("--fused compiles" in told) is (not of.fused and on_gpu)


def test_a_stale_schedule_says_how_far_behind_which_layers_are(tmp_path: Path) -> None:
    file = tmp_path / "stale.json"
    told = "weights 1 step behind in embed and blocks 0 to 2, 4 to 7 and head, up to date in block 3"
    out, error = called("build", "demo", "-p", "zenflow", "--out", str(file))
    assert told in " ".join(out.split()) and error is None
    assert told in " ".join(called("verify", str(file))[0].split())
    behind = json.loads(called("verify", str(file), "--json")[0])["behind"]
    assert behind == {"embed": 1, "head": 1, **{str(i): int(i != 3) for i in range(8)}}
    assert "behind" not in called("build", "demo")[0]


def test_muon_is_an_option_of_the_step(tmp_path: Path) -> None:
    out, error = called("compare", "tiny", "--optimizer", "muon")
    assert error is None and re.search(r"sequences of 1024 tokens.*, muon", out)
    assert "The first that is not predicted: fsdp_offload: update(0) is queued on host: muon updates blocks" in out
    out, error = called("compare", "tiny", "-p", "streamed", "--vary", "optimizer=adamw,muon", "--json")
    assert [row["optimizer"] for row in json.loads(out)] == ["adamw", "muon"] and error is None
    beside = ("-p", "resident,zero3_offload", "--vary", "optimizer=adamw,muon", "--json")
    found = json.loads(called("compare", "tiny", *beside)[0])
    ratios = {(row["policy"], row["optimizer"]): row["ratio_to_zero3_offload"] for row in found}
    assert ratios["resident", "adamw"] and ratios["resident", "muon"] is None  # whose step is another
    error = called("compare", "tiny", "-p", "streamed,megatrain", "--optimizer", "muon")[1]
    assert isinstance(error, InputError) and str(error).startswith("megatrain: update(3) is queued on cpu: muon")
    simulated = json.loads(
        called("simulate", "tiny", "-p", "resident", "--optimizer", "muon", "--clip", "1", "--json")[0]
    )
    assert simulated["optimizer"] == "muon" and simulated["grad_clip"] == 1.0
    error = called("simulate", "tiny", "--optimizer", "sgd")[1]
    assert isinstance(error, InputError) and "optimizer 'sgd' is unknown; known are adamw, muon" in str(error)
    file = tmp_path / "muon.json"
    out, error = called("plan", "tiny", "--optimizer", "muon", "-t", "64", "-s", "64", "--out", str(file))
    assert error is None and ", bf16, muon" in out
    assert codec.loads(file.read_text()).workload.optimizer == "muon"
    error = called("simulate", str(file), "--optimizer", "muon")[1]
    assert isinstance(error, InputError) and "--optimizer" in str(error)


def test_compare_tells_what_gradients_are_clipped_to() -> None:
    out, _ = called("compare", "tiny", "-p", "streamed", "--clip", "0.5")
    assert "sequences of 1024 tokens, bf16, clipped to 0.5" in out
    found = [
        json.loads(called("compare", "tiny", "-p", "streamed", *how, "--json")[0])[0]["grad_clip"]
        for how in ((), ("--clip", "0.5"))
    ]
    assert found == [None, 0.5] and "clipped" not in called("compare", "tiny", "-p", "streamed")[0]


def test_a_profile_times_the_policies_that_take_an_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    timed_of: list[Schedule] = []

    def measure(schedules: list[Schedule], **how: object) -> None:
        timed_of.extend(schedules)
        raise Refused("enough")

    monkeypatch.setattr("megatrain.profile.measure", measure)
    asked = ["profile", "tiny", "--optimizer", "muon", "--shape", "1x16", "--backend", "cpu"]
    done = CliRunner().invoke(cli.app, asked)
    policies_timed = {schedule.policy for schedule in timed_of}
    assert str(done.exception) == "enough" and "streamed" in policies_timed and "megatrain" not in policies_timed
    assert {schedule.workload.optimizer for schedule in timed_of} == {"muon"}
    assert "note: not timed, since they refuse such a step: fsdp_offload, gemini, greedysnake, " in done.stderr
    assert "muon updates blocks on the device" in str(called(*asked, "-p", "megatrain")[1])
