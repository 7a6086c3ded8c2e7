"""Comparisons and their tables: every policy has a row, and the numbers are the predictions'."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console
from timed_profile import timed

from analysis import figure, plots, tables
from analysis.compare import COLUMNS, SAME_STATE, compare, frame, measured_row, ranked, rows
from schedules import policies, presets
from schedules.errors import InputError
from schedules.flops import model_flops_per_step
from schedules.op import Tier
from schedules.verify import ScheduleError
from schedules.workload import MemoryBudget, Workload
from sim.hardware import load, override
from sim.placement_bound import placement_bound
from sim.prediction import memory_of, predict

H200 = load("h200")
TINY = presets.load("tiny")
STEP = Workload(micro_batch_size=2, accumulation=2, seq_len=64)
NAMES = ["resident", "streamed", "zero3_offload"]


@pytest.fixture(scope="module")
def comparison() -> pd.DataFrame:
    """`resident` has too little device memory for the demo model."""
    budget = MemoryBudget(device_bytes=60 * 10**6, host_bytes=10**9)
    return compare([TINY, presets.load("demo")], NAMES, H200, [STEP, replace(STEP, accumulation=1)], budget)


def test_there_is_a_row_for_every_model_step_and_policy(comparison: pd.DataFrame) -> None:
    assert tuple(comparison.columns) == COLUMNS
    assert len(comparison) == 2 * 2 * len(NAMES)
    assert comparison["policy"].tolist() == NAMES * 4


def test_a_row_is_what_the_prediction_says() -> None:
    schedule = policies.build("streamed", TINY, STEP, memory_of(H200), slots=3)
    prediction = predict(schedule, H200)
    (row,) = rows(TINY, ["streamed slots=3"], H200, STEP)
    assert row.digest == schedule.digest
    assert row.step_s == prediction.period_ns / 1e9
    assert row.tokens_per_s == pytest.approx(STEP.tokens_per_step / row.step_s)
    assert row.model_tflops_per_s == pytest.approx(model_flops_per_step(TINY, STEP) / row.step_s / 1e12)
    assert row.bound_s * (1 + row.gap) == pytest.approx(row.step_s)
    assert row.binding == prediction.binding
    assert (row.mfu, row.hfu, row.knobs) == (prediction.mfu, prediction.hfu, "slots=3")


def test_what_is_computed_again_is_no_work_of_the_models() -> None:
    (row,) = rows(TINY, ["megatrain"], H200, STEP)
    assert row.mfu < row.hfu


def test_a_row_tells_the_peak_of_every_tier_in_gb() -> None:
    schedule = policies.build("zero_infinity", TINY, STEP, memory_of(H200))
    peak = predict(schedule, H200).peak_bytes
    (row,) = rows(TINY, ["zero_infinity"], H200, STEP)
    told = (row.device_peak_gb, row.host_peak_gb, row.nvme_peak_gb)
    assert told == pytest.approx([peak[tier] / 10**9 for tier in (Tier.DEVICE, Tier.HOST, Tier.NVME)])
    assert all(told) and row.params_b == TINY.total_params / 10**9


def test_a_machine_without_a_drive_is_told_from_a_drive_that_is_too_small() -> None:
    none = compare([TINY], ["zero_infinity", "streamed"], replace(H200, nvme=None), [STEP])
    kept = policies.build("zero_infinity", TINY, STEP, memory_of(H200)).allocated_bytes(Tier.NVME)
    assert none["fits"].tolist() == [False, True]
    assert none["reason"][0] == f"the schedule keeps {kept / 1000:.1f} kB on NVMe, and h200 has none"
    assert none["shortage"][0].startswith("does not fit: nvme +")
    small = compare([TINY], ["zero_infinity"], H200, [STEP], replace(memory_of(H200), nvme_bytes=1000))
    assert "nvme memory is" in small["reason"][0]


def test_a_policy_whose_schedule_is_not_safe_is_not_compared(tmp_path: Path) -> None:
    text = Path("docs/my_policy.py").read_text()
    assert text.count("        p.update(i)\n") == 1
    forgets = tmp_path / "forgets.py"
    forgets.write_text(text.replace("        p.update(i)\n", ""))
    with pytest.raises(ScheduleError, match="the gradient of layer 0 is never applied"):
        compare([TINY], [str(forgets)], H200, [STEP])


def test_the_fastest_measured_ranks_first_and_equals_share_a_rank() -> None:
    times = pd.DataFrame(
        {"policy": list("abcd"), "predicted_s": [2.0, 1.0, 2.0, 5.0], "measured_s": [4.0, 3.0, 1.0, 4.0]}
    )
    table = ranked(times)
    assert "".join(table["policy"]) in ("cbad", "cbda") and table.index.tolist() == [0, 1, 2, 3]
    ranks = table.set_index("policy")[["predicted_rank", "measured_rank"]]
    assert ranks.loc[list("abcd")].to_numpy().tolist() == [[2, 3], [1, 2], [2, 1], [4, 3]]


def test_what_does_not_fit_has_a_reason_and_no_rate(comparison: pd.DataFrame) -> None:
    lacking = comparison[~comparison["fits"]]
    assert set(lacking["policy"]) >= {"resident"}
    assert lacking["tokens_per_s"].isna().all()
    assert lacking["shortage"].str.fullmatch(r"does not fit: device \+[\d,.]+ [kMG]?B(, host \+.+)?").all()
    assert lacking["reason"].str.contains("memory is .* short").all()
    assert (comparison.loc[comparison["fits"], "reason"] == "").all()


def test_ratios_are_to_zero3_offload_of_the_same_model_and_step(comparison: pd.DataFrame) -> None:
    for _, same in comparison.groupby(["model", "accumulation"]):
        by_policy = same.set_index("policy")
        baseline = by_policy.loc["zero3_offload", "tokens_per_s"]
        assert by_policy.loc["zero3_offload", "ratio_to_zero3_offload"] == 1
        expected = by_policy["tokens_per_s"] / baseline
        pd.testing.assert_series_equal(by_policy["ratio_to_zero3_offload"], expected, check_names=False)


def test_ratios_are_to_the_baseline_on_the_same_machine_and_of_the_same_step() -> None:
    names, others = ["zero3_offload", "resident"], ({"seq_len": 128}, {"grad_clip": 1.0}, {"recompute": "mlp"})
    steps = ((H200, STEP), (load("gh200"), STEP), *((H200, replace(STEP, **other)) for other in others))
    ratios = frame([row for machine, step in steps for row in rows(TINY, names, machine, step)])
    assert ratios["ratio_to_zero3_offload"].tolist()[::2] == [1.0] * 5


def test_without_the_baseline_there_is_no_ratio() -> None:
    assert compare([TINY], ["streamed"], H200, [STEP])["ratio_to_zero3_offload"].isna().all()


def test_what_trains_less_than_the_baseline_has_no_ratio_to_it() -> None:
    found = compare([TINY], ["zero3_offload", "flexgen_block", "lora_streamed", "streamed"], H200, [STEP])
    assert found["fits"].all() and found["trains"].tolist() == ["weights", "nothing", "adapters", "weights"]
    assert found["ratio_to_zero3_offload"].notna().tolist() == [True, False, False, True]


def test_ratios_are_to_the_baseline_of_the_same_state_where_there_is_one() -> None:
    names = ["zero3_offload", "streamed"]
    other = compare([TINY], names, H200, [STEP])
    assert other["same_state"].tolist() == [True, False]  # by itself it keeps an fp32 master
    assert other["baseline"].tolist() == ["zero3_offload"] * 2
    same = compare([TINY], [*names, SAME_STATE], H200, [STEP])
    assert same["same_state"].all() and same["label"].tolist()[2] == "zero3_offload master=weights"
    assert same["ratio_to_zero3_offload"].iloc[1] == same["tokens_per_s"].iloc[1] / same["tokens_per_s"].iloc[2]
    for found, starred in ((other, 1), (same, 0)):
        told = tables.markdown(found, tables.comparison_columns(found), note=tables.comparison_note(found))
        assert told.count("* |") == starred and ("--policy 'zero3_offload master=weights'" in told) == bool(starred)
        assert "| bf16_fp32 |" in told


def test_moments_of_16_bits_have_a_baseline_of_their_state_and_others_say_which_they_keep() -> None:
    names = ["gemini", "zero3_offload", SAME_STATE, "streamed"]
    found = compare([TINY], names, H200, [replace(STEP, precision="bf16_16bit")])
    assert found["precision"].tolist() == ["bf16_fp32"] * 2 + ["bf16_16bit"] * 2
    assert found["baseline"].tolist() == ["zero3_offload"] * 2 + [SAME_STATE] * 2 and found["same_state"].all()


def test_ratios_to_two_rows_of_the_baseline_are_told_to_be_to_that_of_the_same_state() -> None:
    """ZeRO-Offload keeps an fp32 master as ZeRO-3 does by itself, streamed none: their ratios are to two rows."""
    told, names = "x zero3: to the row of ZeRO-3 that keeps the same state.", ["streamed", SAME_STATE]
    for more, several in ((["zero_offload", "zero3_offload"], True), ([], False)):
        found = compare([TINY], [*names, *more], H200, [STEP])
        assert found["same_state"].all() and found["baseline"].tolist()[2:] == ["zero3_offload"] * len(more)
        assert (told in tables.comparison_note(found)) == several
        written = figure.figure_of(plots.throughput(found)).get_supxlabel()
        assert written == "(x): the ratio to zero3_offload" + " of the same state" * several


def test_a_ratio_to_other_state_says_to_whose_and_how_to_have_the_same_where_that_can_be() -> None:
    """Gemini has room and ZeRO-3 with its fp32 master has none: the ratio is to the one without, and cannot but be."""
    full = policies.build("zero3_offload", TINY, STEP, memory_of(H200)).allocated_bytes(Tier.HOST)
    found = compare(
        [TINY], ["gemini", "zero3_offload", SAME_STATE], H200, [STEP], replace(memory_of(H200), host_bytes=full - 1)
    )
    assert found["baseline"].tolist() == [SAME_STATE, "", SAME_STATE] and not found["same_state"][0]
    told = "* to zero3_offload master=weights, which keeps other state than this row."
    assert tables.comparison_note(found).endswith(told)
    split = compare([TINY], ["zero3_offload", "streamed"], H200, [replace(STEP, precision="bf16_split")])
    told = "* to zero3_offload, which keeps other state than this row."
    assert tables.comparison_note(split).endswith(told)


def test_what_a_measured_profile_lacks_is_a_row_beside_the_others() -> None:
    profile = timed(TINY, [STEP], names=["streamed"])
    by_policy = compare([TINY], ["zero3_offload", "streamed"], profile, [STEP]).set_index("policy")
    assert by_policy["fits"].tolist() == [None, True]
    lacking = by_policy.loc["zero3_offload"]
    assert lacking["shortage"].startswith("not measured: tiny/") and "megatrain profile tiny" in lacking["reason"]
    assert by_policy.loc["streamed", "tokens_per_s"] > 0


def test_a_step_with_ops_of_hours_is_a_row_beside_the_others() -> None:
    """Links on which copies take hours leave out what streams; where it has no room either, that is what it lacks."""
    slow = override(load("h200"), ["links.h2d.bandwidth=1B/s"])
    names = ["streamed resident=6", "streamed"]
    found = compare([TINY], names, slow, [STEP])
    assert found["fits"].tolist() == [True, None]
    assert found["shortage"][1] == "not predicted: an op takes hours" and "alone would take" in found["reason"][1]
    budget = MemoryBudget(device_bytes=1 << 30, host_bytes=1000, nvme_bytes=0)
    assert compare([TINY], names, slow, [STEP], budget)["shortage"][1].startswith("does not fit: host")


def test_the_fastest_row_stands_first_and_nvme_only_where_it_is_used(comparison: pd.DataFrame) -> None:
    for _, group in tables.comparison_groups(comparison):
        rates, fits = group["tokens_per_s"].dropna().tolist(), group["fits"].tolist()
        assert rates == sorted(rates, reverse=True) and fits == sorted(fits, reverse=True)
        assert tables.NVME not in tables.comparison_columns(group)
    assert tables.NVME in tables.comparison_columns(compare([TINY], ["zero_infinity"], H200, [STEP]))


def test_a_measured_row_keeps_the_bound_and_scales_the_rates() -> None:
    (row,) = rows(TINY, ["streamed"], H200, STEP)
    measured = measured_row(row, 2 * row.step_s, "here")
    assert (measured.source, measured.machine, measured.bound_s) == ("measured", "here", row.bound_s)
    assert measured.tokens_per_s == pytest.approx(row.tokens_per_s / 2)
    assert measured.hfu == pytest.approx(row.hfu / 2)
    assert measured.gap == pytest.approx(2 * (1 + row.gap) - 1)
    assert measured.bound_of_any_schedule_s == row.bound_of_any_schedule_s
    assert measured.gap_to_any_schedule == pytest.approx(2 * (1 + row.gap_to_any_schedule) - 1)


def test_a_row_tells_how_far_it_is_from_any_schedule_of_its_step_where_that_is_bounded() -> None:
    names = ["streamed", "zero3_offload", "roundpipe", "streamed keep=0"]
    ours, zero3, stale, again = rows(TINY, names, H200, STEP)
    bound_s = placement_bound(TINY, STEP, H200).period_ns / 1e9  # of the modes of recompute, none is the least here
    assert ours.bound_of_any_schedule_s == again.bound_of_any_schedule_s == bound_s <= ours.step_s <= again.step_s
    assert ours.gap_to_any_schedule == pytest.approx(ours.step_s / bound_s - 1)
    assert zero3.bound_of_any_schedule_s >= bound_s  # it keeps an fp32 master too
    assert math.isnan(stale.bound_of_any_schedule_s) and math.isnan(stale.gap_to_any_schedule)
    for found, told in (([ours, stale], True), ([stale], False)):
        table = frame(found)
        assert (tables.GAP_TO_ANY in tables.comparison_columns(table)) == told
        assert (tables.TO_ANY_NOTE in tables.comparison_note(table)) == told


def test_measured_rows_are_compared_with_the_measured_baseline() -> None:
    found = list(rows(TINY, ["zero3_offload", "streamed"], H200, STEP))
    both = frame(found + [measured_row(row, step_s, "here") for row, step_s in zip(found, (4.0, 1.0), strict=True)])
    assert both["ratio_to_zero3_offload"].iloc[3] == pytest.approx(4.0)


def test_an_unknown_policy_is_told() -> None:
    with pytest.raises(InputError, match="streemed"):
        compare([TINY], ["streemed"], H200, [STEP])


# ---- tables


def test_records_are_json_without_nan(comparison: pd.DataFrame) -> None:
    records = tables.records(comparison)
    assert json.loads(json.dumps(records, allow_nan=False)) == records
    assert [record["tokens_per_s"] is None for record in records] == [not fits for fits in comparison["fits"]]
    assert {type(record["fits"]) for record in records} == {bool}


@pytest.mark.parametrize("width", [80, 160])
def test_every_row_is_printed_within_the_width(comparison: pd.DataFrame, width: int) -> None:
    out = io.StringIO()
    tables.show_comparison(comparison, Console(file=out, width=width))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    for name in NAMES:
        assert sum(line.startswith(f" {name} ") for line in lines) == 4
    assert "does not fit" in out.getvalue()
    assert ("schedule" in lines[3]) == (width == 160)
    assert "GB is 10^9 bytes" in out.getvalue()


def test_markdown_has_a_line_per_row(comparison: pd.DataFrame) -> None:
    lines = tables.markdown(comparison, tables.COMPARISON).splitlines()
    assert len(lines) == 2 + len(comparison)
    assert {line.count("|") for line in lines} == {len(tables.COMPARISON) + 1}


def test_memory_of_small_models_is_told_in_mb(comparison: pd.DataFrame) -> None:
    """The tiny model takes a megabyte or so: 0.0 GB would be no answer."""
    text = tables.markdown(comparison.assign(host_peak_gb=1234.56), tables.COMPARISON)
    assert "1,234.6 GB" in text
    for peak in comparison["device_peak_gb"]:
        assert f"| {peak * 1e3:.1f} MB |" in text


def test_sizes_of_models_have_digits_that_tell_them_apart() -> None:
    told = [tables.parameters(params / 1e9) for params in (53_536, 12_786_048, 494_032_768, 32_763_876_352)]
    assert told == ["0.0535 M parameters", "12.8 M parameters", "0.49 B parameters", "32.76 B parameters"]


def test_large_numbers_have_all_their_digits_before_the_point() -> None:
    frame = pd.DataFrame({"stream": ["cpu", "h2d"], "class": "Adam", "ops": 1, "step_s": 1.0, "moves_s": [-25.0, 0.5]})
    told = tables.markdown(frame, tables.TRACE_MOVES)
    assert "| -25,000 ms |" in told and "| +500 ms |" in told
