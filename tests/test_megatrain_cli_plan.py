"""`megatrain plan` and `megatrain profile` as a user meets them: on measured profiles, and where there is no plan."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command import ROOT, megatrain, python
from timed_profile import timed

from megatrain import cli, plan_tables
from megatrain.cli import profile as profile_command
from schedules import codec, policies, presets
from schedules.schedule import Schedule
from schedules.workload import RECOMPUTED, MemoryBudget, Workload
from sim import hardware, whatif
from sim.plan import plan
from sim.prediction import memory_of

STEP = ("-t", "256", "-s", "64")
BESIDE = {**os.environ, "PYTHONPATH": str(ROOT)}
SHORT = ("-t", "128", "-s", "64")  # half as many ways to split it


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A measured profile's file: the whole step as one micro-batch, with all activations kept or recomputed."""
    file = tmp_path_factory.mktemp("measured") / "here.json"
    hardware.save(timed(presets.load("tiny"), [Workload(micro_batch_size=4, seq_len=64)]), file)
    return str(file)


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> str:
    """`tiny` with two of its blocks: on what was measured all placements are tried, of four six times as many."""
    file = tmp_path_factory.mktemp("shallow") / "tiny.json"
    config = json.loads((ROOT / "schedules" / "models" / "tiny.json").read_text())
    file.write_text(json.dumps(config | {"num_hidden_layers": 2}))
    return str(file)


def test_a_plan_on_a_measured_profile_says_what_it_leaves_out(here: str, shallow: str) -> None:
    told = megatrain("plan", shallow, "-H", here, *STEP)
    assert told.returncode == 0, told.stderr
    assert re.search(r"best [\d,.]+ tokens/s; \d+ tried$", " ".join(told.stderr.split()))
    assert "  2 x 2, 4 x 1 sequences with recompute none" in told.stdout
    assert "  1 x 4, 2 x 2, 4 x 1 sequences with recompute pointwise, mlp" in told.stdout
    assert "to measure it: megatrain profile tiny --batch 4 --seq 64 --precision bf16 --recompute none" in told.stdout


@pytest.mark.parametrize("command", ["simulate", pytest.param("plan", marks=pytest.mark.slow), "compare"])
def test_more_than_all_of_a_peak_is_not_told_without_a_word(command: str, here: str, shallow: str) -> None:
    """A profile's peak may have been read while others used the machine, and its ops when they had gone."""
    step = [shallow, "-H", here, "-b", "4", "-a", "1", "-s", "64", *(["-p", "resident"] if command != "plan" else [])]
    told = " ".join(megatrain(command, *step, "--set", "gpu.matmul_flops=1e9FLOP/s").stderr.split())
    assert "HFU is above 100 %: the peak of made up with gpu.matmul_flops=1e9FLOP/s, 1.0 GFLOP/s, is less than" in told
    assert told.count("measure it again") == 1
    assert "100 %" not in megatrain(command, *step).stderr


@pytest.mark.parametrize("command", ["simulate", "compare"])
def test_more_than_all_of_the_bf16_peak_is_nothing_to_note_where_products_are_in_fp8(command: str) -> None:
    step = ["qwen2.5-7b", "-H", "rtx4090", "-b", "4", "-p", "flexgen_block resident=30", "--matmul", "fp8"]
    told = megatrain(command, *step, "--json")
    found = json.loads(told.stdout)
    assert (found["mfu"] if command == "simulate" else found[0]["mfu"]) > 1
    assert "100 %" not in told.stderr
    table = megatrain(command, *step).stdout
    assert re.search(r"MFU (is )?of\s+the\s+bf16\s+peak", table)
    assert command == "compare" or "HFU of the bf16 peak" in table


@pytest.mark.parametrize("name", policies.names())
def test_activations_are_counted_once_whatever_becomes_of_them(name: str) -> None:
    step, room = Workload(micro_batch_size=2, accumulation=2, seq_len=16), MemoryBudget(device_bytes=0, host_bytes=0)
    told = dict(plan_tables.placement(policies.build(name, presets.load("demo"), step, room)))
    kept, away, again, runs = map(int, re.findall(r"-?\d+", told["activations kept, to the host, recomputed"]))
    assert kept >= 0 and kept + away + again == runs


def test_weights_are_loaded_on_whatever_stream_a_policy_queues_them() -> None:
    """Each layer once in a step, by ZeRO-Offload on the compute stream. What is copied within the device is no load."""
    step, room = Workload(micro_batch_size=1, seq_len=16), MemoryBudget(device_bytes=1 << 30, host_bytes=1 << 30)
    for name, loads in (("zero_offload", "6"), ("megatrain_released", "14")):
        told = dict(plan_tables.placement(policies.build(name, presets.load("tiny"), step, room)))
        assert told["loads of weights in a step"] == loads


def test_a_placement_in_words_by_hand() -> None:
    """Embedding and block 0 stay; 1 to 3 and the head stream, of which a block is still in a slot at its second use."""
    step, room = Workload(micro_batch_size=1, accumulation=2, seq_len=8), MemoryBudget(device_bytes=0, host_bytes=0)
    knobs = {"keep": 1, "offload": 2, "nvme_offload": 1, "resident": 2, "through": 1, "nvme": 1}
    assert plan_tables.placement(policies.build("streamed", presets.load("tiny"), step, room, **knobs)) == [
        ("layers whose weights never leave the device", "2 of 6"),
        ("layers whose optimizer state does not", "2 of 6"),
        ("optimizer state on NVMe", "1 of 6 layers"),
        ("weights on NVMe", "0 of 6 layers"),
        ("layers updated on the device, on the CPU", "3, 3"),
        ("loads of weights in a step", "5"),
        ("activations kept, to the host, recomputed", "2, 4, 2 of 8"),
        ("of those on the host, on to NVMe", "2"),
    ]


@pytest.mark.slow
def test_the_same_for_programs_with_what_if(here: str, shallow: str) -> None:
    told = megatrain("plan", shallow, "-H", here, *STEP, "--what-if", "--json")
    assert told.returncode == 0, told.stderr
    record = json.loads(told.stdout)
    assert record["fits"] and record["profile"] == "measured"
    assert record["measure_with"].startswith("megatrain profile tiny --batch 4")
    assert {left["recompute"] for left in record["left_out"]} == set(RECOMPUTED)
    assert "link, host to device, +25%" in record["what_if"]["gains"]


def test_what_if_is_in_words_and_narrow_enough_for_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(presets.load("tiny"), hardware.load("h200"), seq_len=64, tokens_per_step=256)
    answers = plan_tables.WhatIf(
        criticality={"d2h s": 0.3, "compute forward": 0.2, "h2d w": 0.0},
        gains={"link, +25%": -0.012, "GPU, +25%": -0.0001},
        planned_gains={"link, +25%": 0.0, "GPU, +25%": 0.5},
        required_bandwidth={"H2D": None},
        least_memory={"device": None, "host": 10**9},
        longest_sequence=128,
        largest_micro_batch=4,
    )
    plan_tables.show(found, whatif.spread(found.prediction, 0.02), answers, None)
    told = capsys.readouterr().out
    assert " d2h, saved activations  " in told and " compute, forward  " in told and "h2d, weights" not in told
    assert "-1.2%" in told and "Below zero: this schedule as it is would be slower" in told and "-0.0%" not in told
    named = told.partition("policies without knobs")[2].partition("what more would bring")[0]
    assert re.search(r"^ zero3_offload  +-  cannot take less than", named, re.MULTILINE)
    assert max(map(len, named.splitlines())) < 80


@pytest.mark.parametrize(
    "how",
    [
        {"micro_batch_size": 2, "accumulation": 2, "grad_clip": 1.0},
        {"tokens_per_step": 256, "optimizer": "muon"},
        {"tokens_per_step": 256, "precision": "bf16", "matmul": "fp8"},
    ],
    ids=["as split", "however split", "in fp8"],
)
def test_what_more_memory_would_bring_is_planned_anew_for_the_same_step(
    how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any micro-batches where any were asked for: these are what a lack of memory decides."""
    machine, step = hardware.load("h200"), {"seq_len": 64, "precision": "fp32", **how}
    found = plan(presets.load("tiny"), machine, effort=1, **step)
    asked: list[dict[str, Any]] = []
    known: list[Any] = []
    least_of: list[Workload] = []

    def again(*model: Any, **more: Any) -> Any:
        asked.append(more)
        period_ns = found.prediction.period_ns * (0.8 if len(asked) == 1 else 1.25)
        return replace(found, prediction=replace(found.prediction, period_ns=period_ns))

    def smallest(model: Any, machine: Any, workload: Workload, **more: Any) -> whatif.Smallest:
        known.append(more["known"])
        least_of.append(workload)
        return whatif.Smallest(device_bytes=1, host_bytes=2)

    monkeypatch.setattr(plan_tables, "plan", again)
    monkeypatch.setattr(whatif, "smallest_memory", smallest)
    monkeypatch.setattr(whatif, "faster", lambda profile: {})
    for limit in ("longest_sequence", "largest_micro_batch"):
        monkeypatch.setattr(whatif, limit, lambda *model: 1)
    answers = plan_tables.what_if(found, lambda what: None)
    have = memory_of(machine)
    assert [more["memory"] for more in asked] == [
        replace(have, device_bytes=have.device_bytes + 16 * 2**30),
        replace(have, host_bytes=have.host_bytes + 64 * 10**9),
    ]
    fixed = how.get("micro_batch_size")
    step = {"tokens_per_step": 256, "micro_batch_size": fixed, "seq_len": 64}
    step |= {"precision": how.get("precision", "fp32"), "matmul": how.get("matmul")}
    step |= {"grad_clip": how.get("grad_clip"), "optimizer": how.get("optimizer", "adamw")}
    assert all(step.items() <= more.items() for more in asked)
    assert [of.micro_batch_size for of in least_of] == [fixed or 1]
    assert answers.planned_gains == {
        "device memory, +16 GiB": pytest.approx(0.25),
        "host memory, +64 GB": 0.0,  # a plan that loses is not taken
    }
    assert known == [found.prediction.peak_bytes]


def test_an_interrupted_what_if_is_no_answer_and_the_plan_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*model: Any, **step: Any) -> Any:
        return replace(plan(*model, **step), finished=False)

    file = tmp_path / "plan.json"
    monkeypatch.setattr(plan_tables, "plan", interrupted)
    monkeypatch.setattr(sys, "argv", ["megatrain", "plan", "tiny", *SHORT, "--what-if", "--out", str(file)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    told = capsys.readouterr()
    assert left.value.code == 130 and told.err.endswith("megatrain: interrupted; left out: what if\n")
    assert f"written to {file}" in told.out and "what more would bring" not in told.out
    assert codec.read(file).policy == "streamed"


def test_an_interrupted_search_keeps_its_best_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*model: Any, **step: Any) -> Any:
        return replace(plan(*model, **step), finished=False)

    file = tmp_path / "plan.json"
    monkeypatch.setattr("sim.plan.plan", interrupted)
    monkeypatch.setattr(sys, "argv", ["megatrain", "plan", "tiny", *SHORT, "--out", str(file)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 130 and codec.read(file).policy
    assert "interrupted; this is the best of " in capsys.readouterr().err


def test_a_plan_on_a_datasheet_leaves_nothing_out() -> None:
    told = megatrain("plan", "tiny", *SHORT, "--json")
    record = json.loads(told.stdout)
    assert record["left_out"] == [] and record["measure_with"] is None
    named = {row["policy"]: row for row in record["policies_without_knobs"]}
    assert set(policies.comparable()) <= set(named) and named["streamed"]["step_s"] >= record["step_s"]
    lacking = named["zero3_offload"]
    assert lacking["step_s"] is None and lacking["reason"].startswith("cannot take less than")


def test_what_a_profile_lacks_is_told_with_the_command(here: str) -> None:
    told = megatrain("simulate", "tiny", "-H", here)
    assert told.returncode == 2 and "it covers tiny at 4x64 in bf16" in told.stderr
    assert "megatrain profile tiny --batch 8 --seq 1024 --precision bf16 --nvme FOLDER --out FILE" in told.stderr


def test_a_number_that_measured_times_do_not_follow_is_noted(here: str) -> None:
    for change, noted in (("gpu.matmul_flops=1TFLOP/s", True), ("links.h2d.bandwidth=10GB/s", False)):
        told = megatrain("simulate", "tiny", "-H", here, "--batch", "4", "--seq", "64", "--set", change)
        assert told.returncode == 0, told.stderr
        assert ("were measured, and take as long whatever gpu.matmul_flops may be" in told.stderr) is noted


@pytest.mark.slow
def test_a_sweep_plans_on_a_measured_profile(here: str, shallow: str, tmp_path: Path) -> None:
    prices = tmp_path / "prices.yaml"
    text = (ROOT / "docs" / "prices.yaml").read_text()
    own = f"  {here}: {{rent_per_hour: 1, watts: 50, source: here}}\n"
    prices.write_text(text.replace("machines:\n", f"machines:\n{own}"))
    told = megatrain(
        "sweep", "-m", shallow, "-H", here, *STEP, "--prices", str(prices), "-o", str(tmp_path / "s"), "--json"
    )
    assert told.returncode == 0, told.stderr
    (row,) = json.loads(told.stdout)
    assert row["fits"] and row["micro_batch_size"] == 4 and row["recompute"] == "none"


def test_a_plan_that_nothing_fits_is_json_too() -> None:
    room = ["--set", "gpu.memory=1kB", "--set", "host.memory=1kB"]
    told = megatrain("plan", "tiny", "-H", "rtx4090", *room, "-t", "64", "-s", "16", "--json")
    assert told.returncode == 1
    record = json.loads(told.stdout)
    assert record["fits"] is False and record["model"] == "tiny"
    assert record["machine"] == "rtx4090 with gpu.memory=1kB, host.memory=1kB"
    assert record["reason"] in told.stderr.replace("megatrain: ", "")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--out", "/nonexist/dir/p.json"], "cannot write /nonexist/dir/p.json: no such folder"),
        (["--batch", "3"], "4 sequences a step do not divide into micro-batches of 3"),
        (["--accumulation", "5"], "4 sequences a step do not divide into 5 micro-batches"),
        (["--set", "gpu.matmul_flops=1FLOP/s"], "no op may take more than"),
    ],
)
def test_what_cannot_be_planned_is_told_before_the_search(options: list[str], told: str) -> None:
    """A search would show its progress."""
    done = megatrain("plan", "tiny", *STEP, *options)
    assert done.returncode == 2 and told in done.stderr and not done.stdout
    assert "tokens/s" not in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_plan_does_without_links_over_which_copies_take_hours() -> None:
    """What fits the device needs none."""
    slow = ("--set", "links.h2d.bandwidth=1B/s", "--set", "links.d2h.bandwidth=1B/s")
    done = megatrain("plan", "tiny", *SHORT, *slow, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["peak_bytes"]["host"] == 0


def test_a_proof_without_a_solver_is_told_before_the_search() -> None:
    program = (
        "import sys\nsys.modules['ortools'] = None\nfrom megatrain import cli\n"
        "sys.argv = ['megatrain', 'plan', 'tiny', '-t', '256', '-s', '64', '--prove', '5']\ncli.main()\n"
    )
    done = python(program, environment=BESIDE)
    assert done.returncode == 2 and "pip install 'megatrain[prove]'" in done.stderr and "tokens/s" not in done.stderr


def test_a_plan_that_cannot_be_proven_is_not_lost(tmp_path: Path) -> None:
    """It has too many ops, which is known only then."""
    file = tmp_path / "p.json"
    program = (
        "import sys\nfrom sim import order_proof\nfrom megatrain import cli\n"
        "order_proof.MOST_OPS, order_proof.solver = 1, lambda: None\n"
        f"sys.argv = ['megatrain', 'plan', 'tiny', *{SHORT!r}, '--prove', '5', '-o', {str(file)!r}]\n"
        "cli.main()\n"
    )
    done = python(program, environment=BESIDE)
    assert done.returncode == 2 and "an order is proven up to 1" in done.stderr
    assert "throughput" in done.stdout and file.is_file()


def test_a_plan_is_written_before_it_is_read(tmp_path: Path) -> None:
    """`head` goes before all is printed."""
    file = tmp_path / "p.json"
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "megatrain", "plan", "tiny", *SHORT, "-o", str(file)]
    subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, cwd=ROOT, timeout=120)
    os.close(writer)
    assert megatrain("verify", str(file)).returncode == 0


def test_several_ways_to_recompute_are_measured_in_one_profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And with more than one micro-batch, whose gradients are added up."""
    timed_at: list[Workload] = []
    accounted: list[Workload] = []

    def measured(schedules: list[Schedule], *, memory: list[Schedule], **more: Any) -> Any:
        timed_at.extend(schedule.workload for schedule in schedules)
        accounted.extend(schedule.workload for schedule in memory)
        return hardware.load("h200")

    monkeypatch.setattr("megatrain.profile.measure", measured)
    profile_command.profile(
        "tiny", out=tmp_path / "p.json", batch=4, seq=64, recompute=["none", "mlp"], policy=["streamed"]
    )
    assert (
        {workload.recompute for workload in timed_at}
        == {workload.recompute for workload in accounted}
        == {"none", "mlp"}
    )
    assert {workload.accumulation for workload in timed_at} == {2}
    assert {(w.micro_batch_size, w.seq_len) for w in timed_at if w.recompute == "mlp"} >= {(4, 64), (1, 16)}
