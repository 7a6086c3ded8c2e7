"""The validation report, on runs that the virtual machine made: it must find errors that were planted."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from command import ROOT
from quick_readings import hurry
from typer.testing import CliRunner

from analysis import validation, validation_report
from megatrain import cli, validate
from megatrain import profile as profiling
from megatrain.validate import Grid, Point
from schedules import policies, presets
from schedules.errors import InputError, Refused
from schedules.schedule import Schedule
from schedules.trace import COLUMNS, Trace
from schedules.workload import MemoryBudget, Workload
from sim import hardware
from sim.cost import Terms
from sim.engine import simulate

ROOM = MemoryBudget(device_bytes=1 << 36, host_bytes=1 << 36)
PROFILE = hardware.load("h200")
ALONE = Terms(sharing=False, compute_slowdown=False)


def schedule(policy: str, batch: int = 1) -> Schedule:
    model = replace(presets.load("qwen2.5-7b"), num_hidden_layers=3, vocab_size=4096)
    return policies.build(policy, model, Workload(micro_batch_size=batch, seq_len=512), ROOM)


def run(of: Schedule, terms: Terms = Terms(), slower: float = 1.0) -> Trace:
    """A "measured" trace: simulated, all of it `slower`."""
    trace = simulate(of, PROFILE, steps=8, terms=terms)
    stretched = {
        name: np.rint(getattr(trace, name) * slower).astype(np.int64) for name in ("issue_ns", "start_ns", "end_ns")
    }
    return replace(trace, source="measured", **stretched)


def points(slower: float = 1.0, planted: str = "", terms: Terms = Terms()) -> list[Point]:
    found = []
    for policy in ("streamed", "megatrain", "zero3_offload"):
        for batch in (1, 4):
            of = schedule(policy, batch)
            trace = run(of, terms, slower if policy == planted or not planted else 1.0)
            found.append(Point(schedule=of, rounds=(trace, trace), workspace=1 << 20))
    return found


def test_runs_that_are_as_predicted_have_no_error() -> None:
    table = validation.rows(points(), PROFILE)
    assert table["predict_error"].abs().max() < 1e-9
    assert table["overlap_error"].abs().max() < 0.02
    assert (table["noise"] == 0).all()
    tau, regret = validation.ranking(table)
    assert tau == 1.0 and regret == 0.0


def test_replay_of_runs_that_share_nothing_is_exact() -> None:
    """What is left in a replay is the meaning of the schedule, and that is the simulator's own."""
    table = validation.rows(points(terms=ALONE), PROFILE)
    assert table["replay_error"].abs().max() < 1e-3


def test_a_machine_that_is_a_tenth_slower_shows_as_bias_at_every_point() -> None:
    table = validation.rows(points(slower=1.1), PROFILE)
    found = validation.summary(table["predict_error"])
    assert found.bias == pytest.approx(1 / 1.1 - 1, abs=1e-3)
    assert found.worst == pytest.approx(found.bias, abs=1e-3)
    assert found.within_4 == 0.0


def test_an_error_of_one_policy_is_told_of_that_policy() -> None:
    table = validation.rows(points(slower=1.3, planted="megatrain"), PROFILE)
    biases = validation.by(table, "policy").set_index("policy")["bias"]
    assert biases["megatrain"] == pytest.approx(1 / 1.3 - 1, abs=1e-3)
    assert abs(biases["streamed"]) < 1e-3 and abs(biases["zero3_offload"]) < 1e-3


def test_a_slow_class_of_ops_is_told() -> None:
    of = schedule("streamed", 4)
    trace = run(of)
    loads = np.array([of.ops[i].name.startswith("P.w") for i in trace.op])
    slow = replace(trace, start_ns=trace.start_ns - np.where(loads, trace.end_ns - trace.start_ns, 0))
    classes = validation.by_class([Point(schedule=of, rounds=(slow,), workspace=1 << 20)], PROFILE).set_index("ops")[
        "error"
    ]
    assert classes["h2d w"] == pytest.approx(-0.5, abs=0.01)
    assert abs(classes["compute backward"]) < 0.01


def test_every_rung_of_the_ladder_brings_predictions_nearer() -> None:
    rungs = validation.ladder(points(), PROFILE)["median"].tolist()
    assert len(rungs) == len(validation.LADDER)
    assert rungs[-1] < 1e-3 < rungs[0]
    assert all(after <= before + 1e-3 for before, after in itertools.pairwise(rungs))


def test_a_summary_by_hand() -> None:
    found = validation.summary([-0.05, 0.01, 0.04, 0.02])
    assert (found.points, found.worst, found.within_4) == (4, -0.05, 0.75)
    assert (found.bias, found.median, found.p95) == pytest.approx((0.005, 0.03, 0.0485))  # 85 % from 0.04 to 0.05


def test_rounds_count_alike_and_their_first_steps_not_at_all() -> None:
    of = schedule("streamed")
    trace = run(of)
    count, first = len(of.ops), [50] * (validation.WARMUP + 1)

    def lasting(*seconds: int) -> Trace:
        columns = {name: getattr(trace, name)[: (len(first) + len(seconds)) * count] for name in COLUMNS}
        ends = np.cumsum([*first, *seconds]) * 10**9
        return replace(trace, **{**columns, "end_ns": np.repeat(ends, count)})

    rounds = lasting(1, 6, 2), lasting(6, 2, 4)
    point = Point(schedule=of, rounds=rounds, workspace=1)
    assert validation.measured_s(point) == 3.0  # of 1, 2, 2, 4, 6 and 6
    assert validation.noise(point) == pytest.approx(2 / 3)
    assert np.isnan(validation.noise(replace(point, rounds=rounds[:1])))


def test_the_time_of_a_class_is_the_mean_of_all_steps_after_the_first_ones() -> None:
    """Its ops take twice as long in the last step that does not count, and in the first that does."""
    of = schedule("streamed")
    trace = run(of, ALONE)
    twice = (trace.step == validation.WARMUP - 1) | (trace.step == validation.WARMUP)
    longer = replace(trace, start_ns=trace.start_ns - np.where(twice, trace.end_ns - trace.start_ns, 0))
    both = {
        name: validation.by_class([Point(schedule=of, rounds=rounds, workspace=1)], PROFILE).set_index("ops")
        for name, rounds in {"as it was": (trace,), "longer": (longer,)}.items()
    }
    ratio = both["longer"]["measured_s"] / both["as it was"]["measured_s"]
    assert ratio.to_numpy() == pytest.approx(1 + 1 / (trace.steps - validation.WARMUP))
    assert both["longer"]["measured_s"].is_monotonic_decreasing


@pytest.mark.parametrize("differs", ["model", "micro_batch_size", "seq_len"])
def test_a_wrong_order_of_policies_lowers_tau_and_is_regretted(differs: str) -> None:
    """At one of two shapes: what counts is the mean of both."""
    wrong = pd.DataFrame(
        {
            "model": 1, "micro_batch_size": 1, "seq_len": 8,
            "policy": ["a", "b", "c"], "measured_s": [1.0, 2.0, 3.0], "predicted_s": [2.5, 2.0, 4.0],
        }
    )  # fmt: skip
    tau, regret = validation.ranking(wrong)
    assert tau == pytest.approx(1 / 3)
    assert regret == pytest.approx(1.0)  # b is chosen, a takes half as long
    right = wrong.assign(**{differs: 2}, predicted_s=wrong["measured_s"] * 10)
    tau, regret = validation.ranking(pd.concat([wrong, right]))
    assert (tau, regret) == pytest.approx((2 / 3, 0.5))


def test_the_command_tells_the_machines_noise_beside_the_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = validation.rows(points(), PROFILE).assign(noise=[0.01, 0.03] * 3)
    monkeypatch.setattr(validate, "profile_and_run", lambda *of: (PROFILE, []))
    monkeypatch.setattr(validation_report, "write", lambda *of: found)
    told = CliRunner().invoke(cli.app, ["validate", "--out", str(tmp_path)]).stdout
    assert "between rounds of one point: median 2.0%, largest 3.0%." in " ".join(told.split())


# ---- the command's own parts, with real runs


def small(**changes: object) -> Grid:
    values: dict[str, object] = {
        "models": (replace(presets.load("tiny"), num_hidden_layers=2),),
        "policies": ("resident", "streamed"),
        "calibrated": ((1, 16), (4, 16), (2, 32), (4, 64)),
        "held_out": ((3, 32),),
        "rounds": 1,
        "steps": 5,
    }
    return Grid(**{**values, **changes})  # type: ignore[arg-type]


def test_an_interrupted_grid_goes_on_and_its_page_says_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)
    grid, told = small(), list[str]()
    train, runs = validate.train, list[str]()

    def interrupted(verified, **more):  # type: ignore[no-untyped-def]
        if len(runs) == 1:
            raise KeyboardInterrupt
        runs.append(verified.schedule.policy)
        return train(verified, **more)

    monkeypatch.setattr(validate, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        validate.profile_and_run(grid, tmp_path, lambda done, note: None, lambda done, note: told.append(note))
    monkeypatch.setattr(validate, "train", lambda verified, **more: (runs.append("again"), train(verified, **more))[1])
    monkeypatch.setattr(profiling, "alone", lambda *a: pytest.fail("timed again"))
    profile, found = validate.profile_and_run(grid, tmp_path, lambda done, note: None, lambda done, note: None)
    assert runs == ["resident", "again"] and len(found) == 2 and told[0] == "round 1, tiny-resident-3x32"
    monkeypatch.setattr(profiling, "in_a_run", lambda *a: pytest.fail("measured again"))
    assert validate.profile_and_run(grid, tmp_path, lambda done, note: None, lambda done, note: None)[0] == profile
    table = validation_report.write(tmp_path, grid, found, profile, "megatrain validate", lambda done, note: None)
    page = (tmp_path / "README.md").read_text()
    assert len(table) == 2 and "Not measured." in page and "tiny-streamed-3x32" in page
    assert (tmp_path / "predicted_measured.png").stat().st_size > 10_000
    assert len(pd.read_csv(tmp_path / "predicted_measured.csv")) == 2
    (tmp_path / "predicted_measured.png").unlink()
    (tmp_path / "README.md").write_text(page.replace("## By model", "## By mistake"))
    validation_report.rebuild(tmp_path)
    assert (tmp_path / "README.md").read_text() == page
    assert (tmp_path / "predicted_measured.png").is_file()


def test_a_schedule_that_lacks_a_drive_leaves_nothing_behind(tmp_path: Path) -> None:
    """What was refused would else be another grid's folder."""
    with pytest.raises(InputError, match=r"zero_infinity for tiny keeps .* on NVMe: give a folder on a drive"):
        validate.profile_and_run(
            small(policies=("zero_infinity",)), tmp_path, lambda done, note: None, lambda done, note: None
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "twice"),
    [
        ({"models": (presets.load("tiny"), replace(presets.load("demo"), name="tiny"))}, "tiny-resident-3x32"),
        ({"policies": ("resident", "streamed", "streamed slots=2")}, "tiny-streamed-3x32"),  # by default it has two
        ({"held_out": ((3, 32), (2, 48), (3, 32))}, "tiny-resident-3x32"),
    ],
)
def test_what_could_not_be_told_apart_is_refused_before_anything_is_measured(
    change: dict[str, object], twice: str, tmp_path: Path
) -> None:
    """One run would count as two rounds without noise, or as another model's."""
    with pytest.raises(InputError, match=f"two points are called {twice}: "):
        validate.profile_and_run(small(**change), tmp_path, lambda done, note: None, lambda done, note: None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"calibrated": ((1, 16), (4, 16), (2, 32), (8, 64))}, "profiled shapes: 1x16, 4x16, 2x32, 4x64"),
        ({"policies": ("resident",)}, "policies: resident, streamed"),
        ({"models": (presets.load("demo"),)}, "models: tiny"),
        ({"rounds": 2}, "rounds: 1"),
        ({"steps": 6}, "steps of a run: 5"),
        ({"precision": "bf16"}, "precision: fp32"),
        ({"held_out": ((3, 32), (2, 48))}, None),
    ],
)
def test_a_folder_goes_on_with_what_was_profiled_only(
    change: dict[str, object], told: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Begun(Exception):
        pass

    def begins(*schedules: object, **more: object) -> None:
        raise Begun

    monkeypatch.setattr(validate, "time_ops", begins)

    def go(grid: Grid) -> None:
        validate.profile_and_run(grid, tmp_path, lambda done, note: None, lambda done, note: None)

    with pytest.raises(Begun):
        go(small())
    if told is None:  # what is run may be more
        with pytest.raises(Begun):
            go(small(**change))
        return
    with pytest.raises(Refused, match=rf"measured of something else \({told}\)"):
        go(small(**change))


def test_a_folder_without_a_validation_cannot_be_rebuilt(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no validation"):
        validation_report.rebuild(tmp_path)


def test_the_page_explains_the_letters_of_its_classes(tmp_path: Path) -> None:
    stored = ROOT / "analysis" / "results" / "validation-nvme"
    shutil.copytree(stored, tmp_path / "copy")
    validation_report.rebuild(tmp_path / "copy")
    text = (tmp_path / "copy" / "README.md").read_text()
    assert "w: weights, g: gradients, g32: fp32 gradients, o: optimizer state, x: layer outputs." in text
    assert text == (stored / "README.md").read_text(), f"old; run: python -m analysis.validation_report {stored}"


def test_a_shape_cannot_be_both_profiled_and_held_out() -> None:
    with pytest.raises(InputError, match="both profiled and validated"):
        small(held_out=((1, 16),))


def test_a_run_of_few_steps_is_refused() -> None:
    with pytest.raises(InputError, match="too short"):
        small(steps=4)


def test_a_shape_that_no_profile_could_time_is_refused_before_anything_is_measured() -> None:
    with pytest.raises(InputError, match=r"8x128 is not among the profiled ones \(1x16, .*\): profile at least 3"):
        small(held_out=((8, 128),))


def test_of_one_round_and_one_policy_nothing_is_told_that_is_no_number() -> None:
    """And as numpy gives no number, it would warn of it."""
    alone = pd.DataFrame({"policy": ["streamed"] * 2, "noise": [float("nan")] * 2})
    assert validation_report.machine_noise(alone) == "One round says nothing of the machine's noise."
    assert validation_report._choice(alone) == "Of one policy there is none to choose."
    rounds = alone.assign(noise=[0.01, 0.03])
    assert validation_report.machine_noise(rounds).endswith("between rounds of one point: median 2.0%, largest 3.0%.")
