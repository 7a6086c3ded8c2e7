"""The command line as a user meets it: exit codes, messages, no traceback, no torch for planning."""

from __future__ import annotations

import json
import math
import os
import pty
import re
import resource
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import ROOT, Begun, begun, megatrain
from rich.console import Console
from rich.progress import Progress

from megatrain import INTERRUPTED
from megatrain.cli import lists, training_progress
from megatrain.cli.interrupt import TOGETHER_S, Interrupt
from megatrain.cli.options import usual_length
from schedules import presets

ENCODER = {"architectures": ["BertModel"], "model_type": "bert", "hidden_size": 8}
NO_ROOM = ["--hardware", "rtx4090", "--set", "gpu.memory=1kB", "--set", "host.memory=1kB"]
SWEEP = ["sweep", "tiny", "--prices", "docs/prices.yaml", "--out", "unused"]


@pytest.mark.parametrize("command", [["--help"], ["simulate", "--help"], ["hardware"], ["models", "demo"]])
def test_lists_and_help_print_and_end_well(command: list[str]) -> None:
    done = megatrain(*command)
    assert done.returncode == 0 and done.stdout.strip() and not done.stderr


@pytest.mark.parametrize(
    ("command", "code", "told"),
    [
        (["simulate", "qwen2.5-7"], 2, "qwen2.5-7b"),
        (["simulate", "tiny", "-p", "streamd"], 2, "streamed"),
        (["simulate", "tiny", "-H", "h2000"], 2, "h200"),
        (["simulate", "tiny", "-k", "slot=3"], 2, "slots"),
        (["simulate", "tiny", "-k", "slots=many"], 2, "whole number"),
        (["simulate", "tiny", "--set", "host.memry=1GiB"], 2, "host.memory"),
        (["simulate", "tiny", "--set", "host.memory=1"], 2, "host.memory"),
        (["simulate", "tiny", "--precision", "fp16"], 2, "bf16"),
        (["simulate", "tiny", "--clip", "-1"], 2, "--clip -1.0: give a number above 0"),
        (["simulate", "tiny", "--recompute", "all"], 2, "known are none, pointwise, mlp"),
        (["simulate", "qwen3-30b-a3b", "--recompute", "mlp"], 2, "experts are not computed again"),
        (["simulate", "tiny", "-p", "zero3_offload", "-k", "activations=disk"], 2, "'nvme'"),
        (["simulate", "tiny", "-p", "resident", "-k", "activations=host", "-k", "every=2"], 2, "share an input"),
        (["run", "tiny", "--steps", "1", "--backend", "cpu", "--graphs"], 2, "CUDA graphs need a GPU"),
        (["run", "tiny", "-p", "zero_infinity", "--steps", "1"], 2, "give a folder on a drive, with --nvme FOLDER"),
        (["run", "tiny", "--steps", "1", "--resume", "/x", "--weights", "/y"], 2, "leave out --weights"),
        (["simulate", "tiny", "-p", "streamed slots=3", "-k", "slots=2"], 2, "knob slots is set twice"),
        (["simulate", "demo", "-a", "100000", "-s", "1"], 2, "too many to simulate"),
        (["simulate", "tiny", "-a", "1" + 12 * "0", "-s", "1"], 2, "too many to simulate"),
        (["simulate", "tiny", "--batches", "2"], 2, "--batch"),
        (["simulatte", "tiny"], 2, "simulate"),
        (["simulate", "qwen2.5-72b", "-p", "resident"], 1, "device memory is"),
        (["verify", "nowhere.json"], 2, "cannot read nowhere.json"),
        (["run", "tiny", "--steps", "1", "--expect", "ffffffff"], 1, "not ffffffff"),
        (["run", "tiny", "--steps", "1", "--expect", ""], 2, "first 8 or more of a fingerprint's"),
        (["compare", "tiny", "-p", ","], 2, "no name in ','"),
        (["validate", "--hold-out", "2x128", "--calibrate", "2x128", "--model", "tiny"], 2, "validated: 2x128;"),
        (["run", "tiny", "--steps", "1", "--resume", "/proc"], 2, "there is no checkpoint in /proc"),
        (["run", "tiny", "--steps", "1", "--resume", "/no/such"], 2, "there is no folder /no/such"),
        (["run", "tiny", "--steps", "1", "--weights", "/no/such"], 2, "there is no folder /no/such"),
        (["run", "tiny", "--steps", "1", "--weights", "/proc"], 2, "/proc has neither model.safetensors.index.json"),
        (["run", "tiny", "--steps", "1", "--data", "nowhere.npy"], 2, "nowhere.npy cannot be read: No such file"),
        (["run", "tiny", "--steps", "1", "--save", "/proc/nowhere"], 2, "nowhere: the folder /proc takes no files"),
        (["simulate", "tiny", "--trace", "/proc/t.json"], 2, "cannot write /proc/t.json: the folder /proc takes no"),
        (["run", "tiny", "--seed", "99999999999999999999999"], 2, "4294967295"),
        (["run", "tiny", "--lr", "inf"], 2, "--lr inf: give a number from 0 up that is not infinite"),
        (["run", "tiny", "--lr", "nan"], 2, "--lr nan: give a number"),
        (["run", "tiny", "--weight-decay", "inf"], 2, "--weight-decay inf: give a number"),
        (["run", "tiny", "--eps", "0"], 2, "--eps 0.0: give a number above 0"),
        (["run", "tiny", "--beta2", "1"], 2, "--beta2 1.0: give a number from 0 up and below 1"),
        (["compare", "tiny", "-p", "streamd"], 2, "streamed"),
        (["compare", "tiny", "-H", "rtx3090", "--matmul", "fp8"], 1, "megatrain: rtx3090 states no rate of fp8"),
        (["adversary", "streamd", "resident"], 2, "streamed"),
        (["adversary", "streamed", "streamed"], 2, "streamed against itself: name two policies"),
        (["adversary", "streamed", "flexgen_block"], 2, "streamed trains weights and flexgen_block trains nothing"),
        (["run", "tiny", "--steps", "1", "--export", "/proc/nowhere"], 2, "/proc/nowhere"),
        (["run", "tiny", "-p", "flexgen_block", "--steps", "1", "--export", "/tmp"], 2, "nothing is trained"),
        (["run", "tiny", "--steps", "1", "--every", "1"], 2, "with --save FOLDER"),
        (["run", "tiny", "--warmup", "5", "--decay-until", "5"], 2, "decay must end after warm-up"),
        (["run", "llama-2-70b", "--steps", "1"], 1, "GB of memory are available on this machine"),
        (["run", "tiny", "-p", "resident", "-s", "20000000", "--steps", "1"], 1, "GB of memory are available"),
        (["plan", "tiny", "-t", "1000"], 2, "no whole number of sequences"),
        (["plan", "tiny", "--set", "gpu.memory=0GB"], 2, "must be above zero"),
        (["plan", "tiny", *NO_ROOM, "-t", "64", "-s", "16"], 1, "kB of device memory"),
        (["build", "tiny", "-o", "/proc/nowhere/s.json"], 2, "/proc/nowhere"),
        (["plan", "tiny", "-t", "64", "-s", "16", "--noise", "inf"], 2, "--noise"),
        (["plan", "tiny", "-b", "3", "-a", "10000000", "-s", "16"], 2, "too many to simulate"),
        ([*SWEEP, "--train-tokens", "inf"], 2, "--train-tokens"),
        ([*SWEEP, "-p", "streamed,flexgen_block"], 2, "streamed trains weights and flexgen_block trains nothing"),
        ([*SWEEP, "-p", "plan", "-p", "lora_streamed rank=4"], 2, "plan trains weights and lora_streamed rank=4"),
        ([*SWEEP, "-p", "flexgen_block"], 2, "flexgen_block trains nothing: a sweep is of what training costs"),
        (["profile", "tiny", "--shape", "1" * 5000 + "x1"], 2, "is no shape"),
        (["profile", "tiny", "-p", "streamed,streamd"], 2, "no policy is called 'streamd'"),
        (["validate", "-m", "tiny", "--calibrate", "1x16,2x"], 2, "'2x' is no shape"),
        (["models", ""], 2, "config.json"),
    ],
)
def test_bad_input_is_told_without_a_traceback(command: list[str], code: int, told: str) -> None:
    done = megatrain(*command)
    assert done.returncode == code, done.stderr
    assert told in re.sub(r"\s+", " ", done.stderr)
    assert "Traceback" not in done.stderr
    assert "━━" not in done.stderr or " tried" in done.stderr  # no bar of progress that there was not


@pytest.mark.parametrize(("shared", "told"), [(1, "from 4 of 8 groups, and 1 for all"), (0, "from 4 of 8 groups")])
def test_experts_for_all_tokens_are_told_where_there_are_any(shared: int, told: str) -> None:
    shape = dict(lists._shape(replace(presets.load("deepseek-v3"), n_shared_experts=shared)))
    assert shape["MLP"] == f"256 experts, each 2,048 wide, 8 for a token, {told}"


def test_a_model_is_described_with_its_bytes() -> None:
    told = " ".join(megatrain("models", "gpt-oss-20b").stdout.split())
    assert "MLP 32 experts, each 2,880 wide, 4 for a token" in told
    assert "64 query heads, 8 key and value heads of 64" in told and "128 tokens, in 12 blocks" in told
    assert "bf16 41.83 GB 41.83 GB 167.32 GB 250.98 GB 12 B" in told
    told = " ".join(megatrain("models", "glm-5").stdout.split())
    assert "sparse attention to 2,048 tokens: sequences of more are not trained" in told
    told = " ".join(megatrain("models", "gemma-4-31b").stdout.split())
    assert "blocks 50 of 478,959,105, 10 of 534,009,857 parameters" in told
    assert "16 key and value heads of 256; without a window 4 of 512, values made of keys" in told
    (record,) = json.loads(megatrain("models", "tiny", "--json").stdout)
    assert record["bytes"]["fp32"] == {
        "weights": 4 * record["total_params"],
        "gradients": 4 * record["total_params"],
        "optimizer_state": 8 * record["total_params"],
    }


def test_an_encoder_and_a_broken_config_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(ENCODER))
    done = megatrain("models", str(tmp_path / "config.json"))
    assert done.returncode == 2 and "encoder" in done.stderr
    (tmp_path / "config.json").write_text("{")
    done = megatrain("models", str(tmp_path))
    assert done.returncode == 2 and "Traceback" not in done.stderr


def test_a_schedule_goes_from_file_to_verifier_simulator_and_executor(tmp_path: Path) -> None:
    """One file: built, verified, simulated, run; broken, it is refused by all."""
    file = tmp_path / "step.json"
    options = ["-b", "1", "-s", "16", "--precision", "fp32"]
    assert megatrain("build", "tiny", "-o", str(file), "--show", *options).returncode == 0
    done = megatrain("verify", str(file))
    assert done.returncode == 0 and "safe" in done.stdout
    simulated = megatrain("simulate", str(file), "--json")
    ran = megatrain("run", str(file), "--steps", "3", "--json", "--trace", str(tmp_path / "trace.json"))
    assert simulated.returncode == 0 and ran.returncode == 0, ran.stderr
    assert json.loads(simulated.stdout)["digest"] == json.loads(ran.stdout)["digest"]
    assert len(json.loads(ran.stdout)["losses"]) == 3
    assert (tmp_path / "trace.json").exists()

    broken = json.loads(file.read_text())
    broken["waits"] = broken["waits"][1:]
    file.write_text(json.dumps(broken))
    for command in (["verify", str(file)], ["simulate", str(file)], ["run", str(file), "--steps", "1"]):
        done = megatrain(*command)
        assert done.returncode == 1 and "race on" in done.stderr and "add  wait" in done.stderr


def test_a_plan_is_a_schedule_that_runs(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    planned = megatrain(
        "plan", "tiny", "--profile", "h200", *["-t", "32", "-s", "16", "--precision", "fp32", "--json"], "-o", str(file)
    )  # fmt: skip
    assert planned.returncode == 0, planned.stderr
    told = json.loads(planned.stdout)
    assert told["tokens_per_s"] * told["bound_of_any_schedule_s"] <= 32
    assert told["tokens_per_s_interval"]["p5"] <= told["tokens_per_s"] <= told["tokens_per_s_interval"]["p95"]
    done = megatrain("run", str(file), "--steps", "3", "--expect", told["fingerprint"])
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_what_more_would_bring_is_found_by_planning_again() -> None:
    planned = megatrain("plan", "tiny", *["-t", "32", "-s", "16", "--precision", "fp32", "--what-if", "--json"])
    assert planned.returncode == 0, planned.stderr
    found = json.loads(planned.stdout)["what_if"]
    assert found["longest_sequence"] >= 1024
    gains, planned_gains = found["gains"], found["planned_gains"]
    assert set(gains) < set(planned_gains) and "host memory, +64 GB" in planned_gains
    assert all(gain >= max(gains.get(name, 0.0) - 1e-9, 0.0) for name, gain in planned_gains.items())


def test_json_and_timeline_of_a_simulation(tmp_path: Path) -> None:
    done = megatrain("simulate", "tiny", "--json", "--perfetto", str(tmp_path / "t.json"))
    record = json.loads(done.stdout)
    assert record["fits"] and record["step_s"] >= record["bound_s"] > 0
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


def test_a_machine_with_changed_numbers_is_told_as_one() -> None:
    changes = ("--set", "host.memory=8GB", "--set", "host.memory=9GB", "--set", "links.h2d.bandwidth=40GB/s")
    told = "h200 with host.memory=9GB, links.h2d.bandwidth=40GB/s"
    assert json.loads(megatrain("simulate", "tiny", *changes, "--json").stdout)["machine"] == told
    assert f" on {told} (datasheet profile)" in megatrain("simulate", "tiny", *changes).stdout
    (row,) = json.loads(megatrain("compare", "tiny", "-p", "streamed slots=3", *changes, "--json").stdout)
    assert (row["machine"], row["knobs"]) == (told, "slots=3")


def test_cores_that_no_op_is_said_to_occupy_are_told_to_change_nothing() -> None:
    told = "nothing says how many cores an op of h200 occupies, so host.cores changes no time"
    done = megatrain("simulate", "tiny", "-p", "streamed slots=3", "--set", "host.cores=4")
    assert done.returncode == 0 and told in done.stderr
    assert told not in megatrain("simulate", "tiny", "--set", "host.cores=4", "--set", "host.adam_threads=2").stderr


def test_planning_imports_no_torch_and_help_nothing_heavy() -> None:
    """A machine without torch plans; --help pays for none of the numeric packages."""
    program = (
        "import sys\nfrom megatrain import cli\n"
        "sys.argv = ['megatrain', *{arguments!r}]\n"
        "try:\n    cli.main()\nexcept SystemExit:\n    pass\n"
        "print('\\nloaded', *sorted(set(sys.modules) & {heavy!r}))\n"
    )
    heavy = {"torch", "numpy", "pandas", "matplotlib", "simpy", "scipy", "networkx"}
    for arguments, allowed in ((["--help"], set()), (["simulate", "tiny"], {"numpy", "simpy", "scipy"})):
        code = program.format(arguments=arguments, heavy=heavy)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
        loaded = set(done.stdout.splitlines()[-1].split()[1:])
        assert loaded <= allowed, (arguments, loaded)


def test_a_run_stops_goes_on_and_leaves_weights_that_a_run_begins_with(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.npy"
    np.save(tokens, np.arange(5000) % 256)
    folder = tmp_path / "run"
    rates = ["--lr", "0.01", "--warmup", "2", "--decay-until", "9", "--weight-decay", "0.1"]
    step = ["run", "tiny", "--batch", "8", "--seq", "32", *rates, "--data", str(tokens), "--json"]

    def losses(*options: str) -> list[float]:
        done = megatrain(*step, *options)
        assert done.returncode == 0, done.stderr
        found: list[float] = json.loads(done.stdout)["losses"]
        return found

    whole = losses("--steps", "6")
    first = losses("--steps", "4", "--save", str(folder), "--every", "3")
    rest = losses("--steps", "2", "--resume", str(folder), "--policy", "resident", "--export", str(tmp_path / "hf"))
    assert [*first, *rest] == whole and whole[-1] < whole[0] - 0.1
    assert megatrain(*step, "--steps", "1", "--save", str(folder)).returncode == 2
    assert losses("--steps", "3", "--beta1", "0.5") != whole[:3]
    assert losses("--steps", "3", "--beta1", "0.9", "--beta2", "0.95", "--eps", "1e-8") == whole[:3]  # as it comes
    settings = json.loads(next(folder.glob("*4/training.json")).read_text())["settings"]
    assert (settings["betas"], settings["eps"]) == ([0.9, 0.95], 1e-8)
    decayed = megatrain("run", "tiny", "--batch", "1", "--seq", "32", "--steps", "3", "--decay-until", "1")
    assert decayed.stderr.count("the learning rate is 0 since step 1") == 1
    (found,) = losses("--steps", "1", "--weights", str(tmp_path / "hf"))
    assert found < whole[0] - 0.1  # it begins where that training ended
    config = tmp_path / "hf" / "config.json"
    config.write_text(config.read_text().replace('"rope_theta": 10000.0', '"rope_theta": 20000.0'))
    noted = megatrain(*step, "--steps", "1", "--weights", str(tmp_path / "hf")).stderr.splitlines()
    told = "trained as: rope_theta is 20000.0, not 10000.0"  # without the place in our code that says so
    assert [line for line in noted if line.startswith("note: tiny is not quite what") and line.endswith(told)]


def test_the_same_command_begins_goes_on_and_ends(tmp_path: Path) -> None:
    """What a queue does with a job that it interrupts; and a checkpoint is exported as it is."""
    folder = str(tmp_path / "run")
    job = ["run", "tiny", "--batch", "1", "--seq", "16", "--lr", "0.01", "--save", folder, "--resume", folder, "--json"]
    begun = megatrain(*job, "--until", "2")
    assert f"note: there is no checkpoint in {folder} yet: the training begins" in begun.stderr
    rest = megatrain(*job, "--until", "5")
    assert f"resumed from {folder}/step-00000002" in rest.stderr
    losses = [loss for done in (begun, rest) for loss in json.loads(done.stdout)["losses"]]
    whole = megatrain("run", "tiny", "--batch", "1", "--seq", "16", "--lr", "0.01", "--steps", "5", "--json")
    assert losses == json.loads(whole.stdout)["losses"]
    again = megatrain(*job, "--until", "5")
    assert again.returncode == 0 and f"{folder} has 5 steps or more: nothing is left to train" in again.stderr
    assert json.loads(again.stdout)["losses"] == []
    assert megatrain(*job, "--until", "5", "--steps", "5").returncode == 2
    assert megatrain(*job, "--steps", "0").returncode == 2
    for more, hf in (["--steps", "0"], "as_it_is"), (["--until", "5"], "ended"):
        done = megatrain(*job, *more, "--export", str(tmp_path / hf))
        assert done.returncode == 0 and json.loads(done.stdout)["losses"] == [], done.stderr
    again = megatrain(*job, "--until", "5", "--export", str(tmp_path / "ended"))
    assert again.returncode == 0 and f"has 5 steps or more, and {tmp_path / 'ended'} its weights" in again.stderr
    end = ["--weights", str(tmp_path / "as_it_is"), "--policy", "flexgen_block", "--steps", "2", "--json"]
    evaluated = json.loads(megatrain("run", "tiny", "--batch", "1", "--seq", "16", *end).stdout)
    assert evaluated["tokens"] == 32 and evaluated["mean_loss"] == pytest.approx(sum(evaluated["losses"]) / 2)
    of_checkpoint = ["--resume", folder, "--policy", "flexgen_block", "--steps", "2"]
    told = megatrain("run", "tiny", "--batch", "1", "--seq", "16", *of_checkpoint).stdout
    assert f"loss {evaluated['mean_loss']:.4f}, perplexity " in told and "over 32 tokens" in told
    told = megatrain("run", "tiny", *of_checkpoint[:-2], "--until", "7")  # not two, which the checkpoint's five leave
    assert told.returncode == 2 and "an evaluation begins anew: say how many with --steps" in told.stderr
    assert megatrain(*job, "--steps", "1").returncode == 0
    other = megatrain(*job, "--until", "6", "--export", str(tmp_path / "ended"))
    assert other.returncode == 2 and "ended has weights already" in other.stderr


def test_an_evaluation_tells_the_mean_over_all_tokens_that_are_learned(tmp_path: Path) -> None:
    """Of two steps, one with a token and one with eight; and of one that has none there is no loss."""
    rows = np.random.default_rng(0).integers(256, size=(3, 17))
    np.save(tmp_path / "rows.npy", rows)
    np.save(tmp_path / "mask.npy", np.arange(17) >= np.array([[16], [9], [17]]))
    files = ["--data", str(tmp_path / "rows.npy"), "--loss-mask", str(tmp_path / "mask.npy")]
    step = ["run", "tiny", "--batch", "1", "--seq", "16", "--policy", "flexgen_block", *files]
    found = json.loads(megatrain(*step, "--steps", "3", "--json").stdout)
    one, eight, none = found["losses"]
    assert found["tokens"] == 9 and none == 0.0
    assert found["mean_loss"] == pytest.approx((one + 8 * eight) / 9) != pytest.approx((one + eight) / 2)
    np.save(tmp_path / "mask.npy", np.arange(17) >= np.array([[17], [17], [9]]))
    assert (
        "no loss, since none of the tokens that were read is to be learned" in megatrain(*step, "--steps", "2").stdout
    )
    trained = megatrain("run", "tiny", "--batch", "3", "--seq", "16", "--steps", "4", *files).stdout
    assert trained.rstrip().endswith("tokens/s, 16.7% of them learned")


def test_documents_in_a_row_are_learned_by_themselves(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.array([[*range(1, 9), 0, *range(1, 9)]] * 2))
    files = ["--data", str(tmp_path / "rows.npy"), "--document-end", "0"]
    step = ["run", "tiny", "--batch", "2", "--seq", "16", "--policy", "flexgen_block", "--steps", "1", "--json"]
    packed = json.loads(megatrain(*step, *files).stdout)
    assert packed["tokens"] == 2 * 15  # the first of the second document is not
    np.save(tmp_path / "rows.npy", np.array([[*range(1, 9), 0], [*range(1, 9), 9]]))
    np.save(tmp_path / "mask.npy", np.array([[1] * 9, [1] * 8 + [0]]))
    files = ["--data", str(tmp_path / "rows.npy"), "--loss-mask", str(tmp_path / "mask.npy")]
    step[step.index("16")] = "8"
    alone = json.loads(megatrain(*step, *files).stdout)
    assert packed["mean_loss"] == pytest.approx(alone["mean_loss"], rel=1e-5)


def test_what_stands_to_be_read_and_is_not_is_told(tmp_path: Path) -> None:
    hf, book = tmp_path / "hf", tmp_path / "book.txt"
    step = ["--batch", "1", "--seq", "16", "--steps", "1"]
    assert megatrain("run", "tiny", *step, "--export", str(hf)).returncode == 0
    noted = megatrain("run", str(hf), *step).stderr
    assert f"note: the weights in {hf} are not read: give --weights {hf} to begin with them" in noted
    assert "are not read" in megatrain("run", str(hf / "config.json"), *step).stderr
    assert "are not read" not in megatrain("run", str(hf), *step, "--weights", str(hf)).stderr
    assert "note: adapters are trained beside random" in megatrain("run", "tiny", "-p", "lora_streamed", *step).stderr
    assert "note: these are random weights that are" in megatrain("run", "tiny", "-p", "flexgen_block", *step).stderr
    config = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps({**config, "vocab_size": 300}))
    done = megatrain("run", str(hf / "config.json"), *step)
    assert done.returncode == 0 and "note: without --data Python's own sources are read, byte by byte" in done.stderr
    done = megatrain("run", str(hf / "config.json"), *step, "--weights", str(hf))
    assert done.returncode == 2 and "was trained on tokens, not on bytes of Python's own sources" in done.stderr
    book.write_text("words " * 20)
    done = megatrain("run", "tiny", "-p", "flexgen_block", *step, "--steps", "9", "--data", str(book))
    assert done.returncode == 2 and "there are 7 sequences of 16 tokens, and 9 steps would read some" in done.stderr


def test_a_training_that_diverges_is_json_and_a_no(tmp_path: Path) -> None:
    step = ["run", "tiny", "--batch", "1", "--seq", "32", "--save", str(tmp_path / "run")]
    assert megatrain(*step, "--steps", "2").returncode == 0
    export = tmp_path / "hf"
    more = ["--resume", str(tmp_path / "run"), "--every", "1", "--lr", "1e30", "--export", str(export), "--json"]
    done = megatrain(*step, "--steps", "5", *more)
    assert done.returncode == 1, done.stderr
    record = json.loads(done.stdout, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert record["losses"][0] > 0 and record["losses"][1:] == [None]
    told = "the loss of step 4 is nan: the training has diverged and stops; "
    assert told in record["reason"] and f"{told}{tmp_path / 'run' / 'step-00000002'} is kept" in done.stderr
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-00000002"] and not list(export.iterdir())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_who_interrupts_a_training_loses_no_step(how: signal.Signals, tmp_path: Path) -> None:
    with _endless(tmp_path, "--every", "5") as run:
        _wait(lambda: list(tmp_path.glob("run/*/training.json")))
        run.signal(how)
        done = run.ended()
    told = done.stderr
    assert done.returncode == 130 and "loss" in done.stdout
    log = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    saved = tmp_path / "run" / f"step-{log[-1]['step']:08d}"
    assert (
        told.endswith(f"saved {saved}\nmegatrain: interrupted after step {log[-1]['step']}; {saved} is kept\n")
        and "megatrain: the steps under way are finished and saved" in told
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "run"]  # nothing lies on the drive
    step = ["run", "tiny", "-p", "zero_infinity", "-b", "1", "-s", "16", "--nvme", str(tmp_path), "--steps"]
    after = json.loads(megatrain(*step, "1", "--resume", str(tmp_path / "run"), "--json").stdout)
    whole = json.loads(megatrain(*step, str(log[-1]["step"] + 1), "--json").stdout)
    assert after["losses"] == whole["losses"][-1:] and after["resumed"] == str(saved)


@pytest.mark.parametrize("where", ["megatrain.cli", "typer.core"])
def test_who_interrupts_before_a_command_begins_is_told_without_a_traceback(where: str) -> None:
    """While modules are imported, which takes most of the half second before one does."""
    program = (
        "import sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, *of):\n"
        f"        if name == {where!r}: raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "from megatrain.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stderr) == (130, f"{INTERRUPTED}\n")


def test_who_interrupts_again_while_a_command_ends_is_shown_no_traceback() -> None:
    """Python takes half a second for that."""
    program = (
        "import atexit, os, signal\n"
        "from megatrain import cli\n"
        "def app(): raise SystemExit(130)\n"
        "cli.app = app\n"
        "atexit.register(os.kill, os.getpid(), signal.SIGINT)\n"
        "cli.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stderr) == (130, "")


def test_who_interrupts_twice_does_not_wait(tmp_path: Path) -> None:
    with _endless(tmp_path, "--accumulation", "80", "--seq", "256") as run:  # a step takes a second or more
        _wait(lambda: (tmp_path / "log").is_file() and (tmp_path / "log").read_text())
        run.signal(signal.SIGINT)
        _read_until(run, "steps under way")
        run.signal(signal.SIGSTOP)  # or the step might end before the next, on a machine that has much to do
        time.sleep(TOGETHER_S)
        run.signal(signal.SIGINT)
        run.signal(signal.SIGCONT)
        done = run.ended()
    assert done.returncode == 130
    assert re.search(r"megatrain: interrupted after step \d+; no checkpoint was saved\n$", done.stderr)
    assert not list((tmp_path / "run").iterdir())


def test_who_interrupts_in_a_long_op_is_told_and_then_does_not_wait(tmp_path: Path) -> None:
    with _endless(tmp_path, "--seq", "60000") as run:  # an op takes seconds
        _read_until(run, "first step")
        time.sleep(2.0)
        run.signal(signal.SIGINT)
        _read_until(run, "ends after the ops under way")
        run.signal(signal.SIGINT)
        done = run.ended()
    assert done.returncode == 130 and done.stderr == "\nmegatrain: ended in the middle of an op\n"


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_signal_while_an_interrupted_process_ends_changes_nothing(interrupted: bool) -> None:
    before = {number: signal.signal(number, signal.SIG_DFL) for number in Interrupt.SIGNALS}
    try:
        with Interrupt(useful=lambda: True) as interrupt:
            if interrupted:
                signal.raise_signal(signal.SIGTERM)
        assert interrupt.asked is interrupted
        left = {signal.getsignal(number) for number in Interrupt.SIGNALS}
        assert left == {signal.SIG_IGN if interrupted else signal.SIG_DFL}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.slow
def test_a_signal_that_comes_twice_at_once_is_one(tmp_path: Path) -> None:  # as `timeout` sends it
    with _endless(tmp_path, "--accumulation", "50") as run:
        _wait(lambda: (tmp_path / "log").is_file() and (tmp_path / "log").read_text())
        run.signal(signal.SIGTERM)
        _read_until(run, "steps under way")
        run.signal(signal.SIGTERM)
        done = run.ended()
    assert done.returncode == 130 and done.stderr.endswith(" is kept\n") and list((tmp_path / "run").iterdir())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_who_interrupts_what_comes_after_a_training_loses_no_result(how: signal.Signals, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "trace")  # which waits for a reader
    files = ["--save", str(tmp_path / "run"), "--trace", str(tmp_path / "trace")]
    with begun("run", "tiny", "-b", "1", "-s", "16", "--steps", "2", *files) as run:
        _read_until(run, "saved")
        time.sleep(1.0)  # until it waits
        run.signal(how)
        done = run.ended()
    assert done.returncode == 130 and "loss" in done.stdout
    assert done.stderr == f"megatrain: interrupted after step 2; {tmp_path / 'run' / 'step-00000002'} is kept\n"


@pytest.mark.parametrize(
    "command",
    [
        "run tiny --batch 1 --seq 16 --lr 1e30",
        "plan tiny --hardware rtx4090 --set gpu.memory=1kB --set host.memory=1kB --tokens 64 --seq 16",
    ],
)
def test_json_of_a_no_does_not_go_where_the_bar_is(command: str) -> None:
    """To stderr, where that alone is a terminal."""
    reader, terminal = pty.openpty()
    arguments = [sys.executable, "-m", "megatrain", *command.split(), "--json"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=terminal, text=True, cwd=ROOT) as process:
        os.close(terminal)
        with suppress(OSError):  # Linux has an error for the end
            while os.read(reader, 1 << 16):
                pass
        os.close(reader)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and "tiny" in json.loads(out)["model"]


def test_a_training_goes_on_and_saves_where_nobody_hears_it(tmp_path: Path) -> None:
    with _endless(tmp_path) as run:  # piped to `tee`, say, which Ctrl-C ends at once
        _wait(lambda: (tmp_path / "log").is_file() and (tmp_path / "log").read_text())
        run.stderr.close()
        run.signal(signal.SIGINT)
        done = run.ended()
    last = json.loads((tmp_path / "log").read_text().splitlines()[-1])["step"]
    assert done.returncode == 130 and "loss" in done.stdout
    assert [path.name for path in (tmp_path / "run").iterdir()] == [f"step-{last:08d}"]


def test_a_full_drive_under_stderr_stops_no_training(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megatrain", "run", "tiny", "-b", "1", "-s", "16", "--steps", "2"]
    with open("/dev/full", "w") as full:
        done = subprocess.run([*command, "--save", str(tmp_path)], stdout=subprocess.PIPE, stderr=full, cwd=ROOT)
    assert done.returncode == 0 and b"loss" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def _endless(folder: Path, *options: str) -> AbstractContextManager[Begun]:
    step = ["run", "tiny", "-p", "zero_infinity", "-b", "1", "-s", "16", "--nvme", str(folder), *options]
    return begun(*step, "--save", str(folder / "run"), "--log", str(folder / "log"), "--steps", "1000000")


def _read_until(run: Begun, words: str) -> None:
    if not any(words in line for line in run.stderr):
        pytest.fail(f"it ended, and did not say {words!r}")


def _wait(until: Callable[[], object]) -> None:
    end = time.monotonic() + 120
    while not until():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.05)


def shown(steps: int, moments: list[float], monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Any, StringIO]:
    """A training's progress where there is no terminal, made at the first of these moments; what it says."""
    now, said = iter(moments), StringIO()
    monkeypatch.setattr(training_progress.time, "perf_counter", lambda: next(now))
    return training_progress.TrainingProgress(Progress(console=Console(file=said)), steps, 64, **options), said


def test_a_training_says_how_fast_and_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    of, _ = shown(100, [0.0, 10.0, 10.0, 10.1, 12.0, 18.0], monkeypatch)
    assert of.reached() == "before the first step was done"
    notes = []
    for step, loss in enumerate([5.5, 5.4, 5.3, 5.2, 5.1], 20):
        of.trained(step, loss, 1e-3)
        notes.append(of.note())
    assert notes[0] == "21/120, loss 5.500"
    assert notes[3] == "24/120, loss 5.200"  # the first come together
    assert notes[4] == "25/120, loss 5.100, 32 tokens/s, 0:03:10 left"
    assert of.reached() == "after step 25"


def test_without_a_terminal_a_training_says_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = [0.0, 1.0, 2.0, 3.0, 13.0, 14.0, 20.0, 21.0, 29.9, 30.0, 31.0]
    of, said = shown(5, moments, monkeypatch)
    for stage in ("allocating memory", *(f"filling layer {i} of 3" for i in (1, 2, 3)), "first step"):
        of.stage(stage)
    for step in range(5):
        of.trained(step, 5.5, 1e-3)
    assert said.getvalue().splitlines() == [
        "allocating memory",
        "filling layer 1 of 3",
        "filling layer 3 of 3",  # ten seconds later
        "first step",
        "step 1/5, loss 5.500",
        "step 4/5, loss 5.500",
        "step 5/5, loss 5.500, 23 tokens/s, 0:00:00 left",
    ]


def test_a_log_goes_on_where_it_ended_and_stops_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    for first in (0, 1):
        of, _ = shown(1, [10.0, 11.0, 12.5, 13.5], monkeypatch, log=log)
        of.stage("allocating memory")
        of.trained(first, math.nan if first else 5.5, 0.5, math.inf if first else 0.25)
    of.trained(2, 5.5, 0.5)
    assert [json.loads(line) for line in log.read_text().splitlines()] == [
        {"step": 1, "loss": 5.5, "lr": 0.5, "norm": 0.25, "seconds": 2.5},
        {"step": 2, "loss": None, "lr": 0.5, "norm": None, "seconds": 2.5},
        {"step": 3, "loss": 5.5, "lr": 0.5, "seconds": 3.5},
    ]
    of, said = shown(2, [0.0, 1.0, 2.0], monkeypatch, log=Path("/dev/full"))
    of.trained(0, 5.5, 0.5)
    of.trained(1, 5.5, 0.5)
    assert said.getvalue().count("note: /dev/full cannot be written any longer, and ends: No space left on device") == 1
    lines, (least, most) = log.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    of, said = shown(2, [0.0, 1.0, 2.0], monkeypatch, log=log)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(lines) + 10, most))  # in the middle of a line, as on a full drive
    try:
        of.trained(3, 5.5, 0.5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (least, most))
    assert "cannot be written any longer" in said.getvalue() and log.read_bytes() == lines
    of, _ = shown(2, [0.0, 1.0], monkeypatch, log=tmp_path)
    with pytest.raises(IsADirectoryError):
        of.stage("allocating memory")


def test_a_sequence_longer_than_the_model_was_made_for_is_noted(tmp_path: Path) -> None:
    told = "note: sequences of 129 tokens, and tiny was made for 128\n"
    assert megatrain("simulate", "tiny", "-s", "129").stderr.startswith(told)  # a slow machine has more to say
    assert "note:" not in megatrain("simulate", "tiny", "-s", "128").stderr
    assert megatrain("compare", "tiny", "-p", "streamed", "-s", "129").stderr.startswith(told)
    step = ("-p", "streamed", "-s", "129", "--tokens", "129", "--vary", "host.memory=64GiB", "-o", str(tmp_path))
    assert megatrain("sweep", "tiny", "-H", "h100", "--prices", "docs/prices.yaml", *step).stderr.startswith(told)


def test_a_training_whose_length_was_left_out_has_none_that_the_model_was_not_made_for() -> None:
    file = str(ROOT / "tests" / "golden" / "streamed.json")  # which says itself how long they are
    assert [usual_length(target, 256) for target in ("tiny", "demo", file)] == [128, 256, 256]
    assert [usual_length("glm-5", most) for most in (256, 4096)] == [256, 2048]
    done = megatrain("run", "tiny", "--batch", "1", "--steps", "1", "--json")
    assert "note:" not in done.stderr and json.loads(done.stdout)["seq_len"] == 128


def test_the_version() -> None:
    assert re.fullmatch(r"megatrain \d+\.\d+\S*\n", megatrain("--version").stdout)


def test_every_command_of_the_readme_exists() -> None:
    """Its commands, and those on training, are parsed; those that only plan are run, where they compare all policies of
    one.
    """
    text = "".join((ROOT / page).read_text() for page in ("README.md", "docs/training.md"))
    commands = [shlex.split(line, comments=True) for line in re.findall(r"^megatrain (.+)$", text, re.MULTILINE)]
    assert len(commands) >= 5
    told = {name: megatrain(name, "--help") for name in {command[0] for command in commands}}
    for command in commands:
        done = told[command[0]]
        assert done.returncode == 0, command
        options = [word for word in command if word.startswith("--")]
        assert all(option in done.stdout for option in options), (command, done.stdout)
        if command[0] in ("simulate", "compare") and not any(word.endswith(".json") for word in command):
            all_policies = command[0] == "compare" and "-p" not in command
            assert megatrain(*command, *(["-p", "streamed"] if all_policies else [])).returncode == 0, command


def test_the_readme_shows_the_example_policy_as_it_is() -> None:
    policy = (ROOT / "docs" / "my_policy.py").read_text()
    assert f"```python\n{policy}```" in (ROOT / "README.md").read_text()
    assert len(policy.splitlines()) < 30
    assert megatrain("simulate", "tiny", "--policy", "docs/my_policy.py").returncode == 0


def test_the_readme_shows_what_verify_says_of_that_policy_without_a_wait(tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    assert megatrain("build", "tiny", "-p", "docs/my_policy.py", "-s", "128", "-o", str(file)).returncode == 0
    step = json.loads(file.read_text())
    step["waits"].remove({"op": "P.w.2", "on": "F.0.0", "distance": 0})
    file.write_text(json.dumps(step))
    told = megatrain("verify", str(file)).stderr.partition("\n\n")[2]
    assert f"```\n{textwrap.dedent(told)}```" in (ROOT / "README.md").read_text()


def test_a_text_that_is_held_out_is_told_beside_the_training(tmp_path: Path) -> None:
    np.save(tmp_path / "text.npy", np.random.default_rng(0).integers(256, size=16 * 3 + 1))
    folder, log = str(tmp_path / "run"), tmp_path / "log"
    job = ["run", "tiny", "--batch", "1", "--seq", "16", "--held-out", str(tmp_path / "text.npy"), "--json"]
    done = megatrain(*job, "--steps", "3", "--held-out-every", "2", "--log", str(log), "--save", folder)
    found = json.loads(done.stdout)["held_out"]
    assert [each["after_step"] for each in found] == [0, 2, 3] and {each["tokens"] for each in found} == {48}
    told = [line for line in done.stderr.splitlines() if line.startswith("held-out loss")]
    when = ("before the first step", "after step 2", "after step 3")
    assert told == [f"held-out loss {each['loss']:.4f} {at}" for each, at in zip(found, when, strict=True)]
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["held_out_loss"] for line in lines if "held_out_loss" in line] == [each["loss"] for each in found]
    assert [line["step"] for line in lines] == [0, 1, 2, 2, 3, 3]
    again = megatrain(*job, "--until", "3", "--save", folder, "--resume", folder, "--export", str(tmp_path / "hf"))
    assert again.returncode == 0 and "note: nothing is trained, and what is held out is not evaluated" in again.stderr
    assert any((tmp_path / "hf").glob("*.safetensors"))
    diverged = megatrain(*job, "--steps", "1", "--lr", "1e30")
    assert diverged.returncode == 1 and [e["after_step"] for e in json.loads(diverged.stdout)["held_out"]] == [0, 1]
    shown = megatrain(*job[:-1], "--steps", "1").stdout.splitlines()[1]
    assert shown.startswith(f"held out: loss {found[0]['loss']:.4f} -> ") and shown.endswith("over 48 tokens")


def test_what_has_no_use_is_told(tmp_path: Path) -> None:
    step = ["run", "tiny", "--batch", "1", "--seq", "16", "--steps", "1"]
    refused = megatrain(*step, "--min-lr", "1e-5")
    assert refused.returncode == 2 and "--min-lr is where a decay ends: say when, with --decay-until" in refused.stderr
    log = tmp_path / "log"
    evaluated = megatrain(*step, "--policy", "flexgen_block rank=4", "--log", str(log))
    assert "note: no checkpoint's adapters are evaluated, but some that change nothing" in evaluated.stderr
    assert "lr" not in json.loads(log.read_text())
