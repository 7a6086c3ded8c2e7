"""The sweep: hand-computed costs, rows that are kept, resumed and the same on any number of workers."""

from __future__ import annotations

import errno
import functools
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from concurrent.futures import CancelledError, ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from matplotlib.text import Text
from timed_profile import timed
from typer.testing import CliRunner

from analysis import buying, costs, pool, prices, sweep, tables
from analysis.figure import figure_of
from analysis.prices import HOURS_A_MONTH, MachinePrice, PriceError, Prices, Rental
from megatrain import cli
from schedules import policies, presets
from schedules.errors import InputError, Refused
from schedules.flops import model_flops_per_step
from schedules.workload import Workload
from sim import hardware
from sim.hardware import HardwareError
from sim.placement_bound import placement_bound
from sim.plan import plan
from sim.prediction import memory_of

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "docs" / "prices.yaml"
MODEL = replace(presets.load("tiny"), num_hidden_layers=2)


def some_prices(**changes: Any) -> Prices:
    values: dict[str, Any] = {
        "currency": "USD",
        "date": "2026-11-20",
        "electricity_per_kwh": 0.5,
        "lifetime_months": 10.0,
        "utilisation": 0.5,
        "machines": {
            "h200": MachinePrice(source="made up", watts=2000, buy=36525.0, rent_per_hour=4.0),
            "rtx4090": MachinePrice(source="made up", watts=1000, buy=3652.5, drive=120.0),
        },
    }
    return Prices(**{**values, **changes})


def some(machines: list[str], **more: Any) -> list[sweep.Point]:
    values: dict[str, Any] = {"vary": [], "names": ["resident", "streamed"], "seq_len": 16, "tokens_per_step": 64}
    return sweep.points([MODEL], machines, **{**values, **more})


def quiet(done: int, total: int, note: str) -> None:
    pass


def test_what_is_given_twice_is_one_point(tmp_path: Path) -> None:
    points = some(["h200", "h200"], vary=["gpu.memory=100GB,100 GB,90GB"], names=["resident", "resident"])
    assert [point.changes for point in points] == [("gpu.memory=100GB",), ("gpu.memory=90GB",)]
    assert len(sweep.run(points, tmp_path / "rows.jsonl", workers=1, progress=quiet)) == 2


def test_a_policy_file_that_was_edited_is_another_point(tmp_path: Path) -> None:
    file = tmp_path / "my_policy.py"
    text = (ROOT / "docs" / "my_policy.py").read_text(encoding="utf-8")
    keys = []
    for slots in (2, 3):
        file.write_text(text.replace("slots: int = 2", f"slots: int = {slots}"), encoding="utf-8")
        keys += [point.key for point in some(["h200"], names=[f"{file} slots=4", "plan"])]
    assert keys[0] != keys[2] and keys[1] == keys[3]


def test_plans_for_adapters_are_built_again_from_their_rows() -> None:
    asked = ["plan-adapters", "plan-adapters quantised=nf4 rank=4"]
    sweep.require_training([*asked, "lora_streamed rank=4"])
    for names, told in (
        (["plan", *asked], "plan trains weights and plan-adapters trains adapters"),
        (["plan-adapters slots=2"], "plan-adapters chooses slots itself: give it a rank, or quantised=nf4"),
    ):
        with pytest.raises(InputError, match=told):
            sweep.require_training(names)
    for point, given in zip(some(["rtx4090"], names=asked), ("rank=16 ", "rank=4 quantised=nf4 "), strict=True):
        row = sweep.evaluate(point)
        assert row["fits"] and f"{row['knobs']} ".startswith(given) and row["gap_to_any_schedule"] >= 0
        step = Workload(
            micro_batch_size=row["micro_batch_size"],
            accumulation=row["accumulation"],
            seq_len=16,
            recompute=row["recompute"],
        )
        knobs = policies.parse_knobs(row["schedule"], row["knobs"].split())
        built = policies.build(row["schedule"], MODEL, step, memory_of(point.profile), **knobs)
        assert built.workload.lora_rank == int(given[5:7]) and built.short_digest == row["digest"]
    (refused,) = (sweep.evaluate(point) for point in some(["rtx4090"], names=["plan-adapters"], matmul="fp8"))
    assert not refused["fits"] and refused["reason"].startswith("adapters are trained by adamw, with products in bf16")


# ---- costs by hand


def test_an_hour_of_owning_is_the_price_over_the_hours_it_trains_and_its_energy() -> None:
    found = some_prices()
    hours = 10 * HOURS_A_MONTH * 0.5  # 3,652.5
    assert found.owned_per_hour(found.machines["h200"]) == pytest.approx(36525 / hours + 2 * 0.5) == 11.0
    assert found.cheapest_per_hour(found.machines["h200"]) == (4.0, "rented")
    assert found.cheapest_per_hour(found.machines["rtx4090"]) == (pytest.approx(1.0 + 0.5), "owned")


def test_break_even_is_the_price_over_what_renting_would_have_cost() -> None:
    found = some_prices()
    # 100 tokens/s at 1e-4 a token: 36 an hour rented, 1 an hour for energy
    months = found.break_even_months(found.machines["h200"], 100.0, 1e-4)
    assert months == pytest.approx(36525 / (35 * 0.5 * HOURS_A_MONTH))
    assert found.break_even_months(found.machines["h200"], 100.0, 1e-7) == math.inf
    only_rented = MachinePrice(source="made up", watts=1, rent_per_hour=1.0)
    assert math.isnan(found.break_even_months(only_rented, 1.0, 1.0))


def test_more_host_memory_costs_what_the_file_says() -> None:
    assert some_prices(host_memory_per_gb=5.0).of("rtx4090", more_host_bytes=1e11).buy == pytest.approx(3652.5 + 500)
    with pytest.raises(PriceError, match="host_memory_per_gb"):
        some_prices().of("rtx4090", more_host_bytes=1e11)
    rented = some_prices(host_memory_per_gb=5.0, rent_host_memory_per_gb_hour=0.01)
    assert rented.of("h200", more_host_bytes=1e11).rent_per_hour == pytest.approx(5.0)
    only_rented = {"h200": MachinePrice(source="made up", watts=1, rent_per_hour=1.0)}
    for each in (None, 5.0):  # of a machine that is not for sale it matters to nobody
        found = some_prices(machines=only_rented, host_memory_per_gb=each, rent_host_memory_per_gb_hour=0.01)
        more = found.of("h200", more_host_bytes=1e11)
        assert (more.buy, more.rent_per_hour) == (None, pytest.approx(2.0))
    told = r"h200 with 1,000 GB of host memory less would cost nothing: rent_per_hour is 4, and rent_host_.* 0\.01;"
    with pytest.raises(PriceError, match=told):
        rented.of("h200", more_host_bytes=-1e12)


def test_the_memory_of_a_rented_machine_is_told_to_cost_nothing() -> None:
    rows = [sweep.evaluate(point) for point in some(["h200"], vary=["host.memory=1TB"], names=["streamed"])]
    rows += [sweep.evaluate(point) for point in some(["h200"], names=["streamed"])]
    for each, told in ((None, [True, False]), (0.001, [False, False])):
        paid = some_prices(host_memory_per_gb=1.0, rent_host_memory_per_gb_hour=each)
        table = costs.priced(rows, paid, 1e9)
        assert table["hour"].tolist() == ["rented"] * 2 and table["memory_for_nothing"].tolist() == told
        assert ("rent_host_memory_per_gb_hour" in buying.note(table)) == any(told)
        assert "| rented |" in tables.markdown(table, buying.columns(paid, table))


def test_drives_that_wear_out_are_told_to_cost_nothing_where_they_have_no_price() -> None:
    (row,) = (sweep.evaluate(point) for point in some(["rtx4090"], names=["streamed"]))
    for drive, days, rent, told in (
        (0.0, 10.0, None, True),
        (120.0, 10.0, None, False),
        (0.0, None, None, False),
        (0.0, 10.0, 0.01, False),  # whoever rents it out pays for them
    ):
        own = MachinePrice(source="made up", watts=1000, buy=3652.5, rent_per_hour=rent, drive=drive)
        table = costs.priced([{**row, "drive_days": days}], some_prices(machines={"rtx4090": own}), 1e9)
        assert ("for nothing here: give drive in the prices of: rtx4090." in buying.note(table)) == told


def test_a_machine_from_a_file_has_the_price_of_its_files_or_its_profiles_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(hardware.to_json(hardware.load("rtx4090"))))
    assert some_prices().of(str(file)).buy == 3652.5
    mine = {**some_prices().machines, "mine": MachinePrice(source="made up", watts=1, buy=7.0)}
    assert some_prices(machines=mine).of(str(file)).buy == 7.0
    with pytest.raises(PriceError, match=r"add it under machines: in the price file, as in  mine: {buy: "):
        some_prices(machines={}).of(str(file))


def test_cost_and_energy_of_training_and_the_front() -> None:
    def row(machine: str, rate: float | None) -> dict[str, Any]:
        memory = 1.5e12 if machine == "h200" else 64e9
        return {
            "model": "qwen2.5-7b", "machine": machine, "tokens_per_s": rate, "fits": rate is not None,
            "reason": "" if rate else "too large", "seq_len": 1024, "host_memory": memory,
            "drive_days": 10.0 if machine == "rtx4090" else None, "flops_per_token": flops,
            "micro_batch_size": 1, "accumulation": 1, "stale": 0, "precision": "bf16",
        }  # fmt: skip

    flops = model_flops_per_step(presets.load("qwen2.5-7b"), Workload(micro_batch_size=1, seq_len=1024)) / 1024

    rental = Rental(name="node", machine="h100", gpus=8, mfu=0.4, rent_per_hour=20.0, source="made up")
    with_rent = some_prices(rentals=(rental,), host_memory_per_gb=1.0)
    table = costs.priced([row("h200", 1000.0), row("rtx4090", 100.0), row("rtx4090", None)], with_rent, 3.6e9)
    fast, slow, nothing = table.to_dict("records")
    assert fast["days"] == pytest.approx(1000 / 24) and fast["cost"] == pytest.approx(4000)
    assert fast["energy_kwh"] == pytest.approx(2000)
    assert slow["cost"] == pytest.approx(10000 * slow["cost_per_hour"])
    assert slow["drives"] == pytest.approx(10000 / 240) and fast["drives"] == 0
    whole = costs.priced([{**row("rtx4090", 100.0), "drive_days": None}], with_rent, 3.6e9).to_dict("records")[0]
    assert slow["cost"] - whole["cost"] == pytest.approx(10000 / 240 * 120)  # what is worn out is bought again
    assert slow["cost_per_hour"] < fast["cost_per_hour"] and slow["cost"] > fast["cost"]
    assert fast["pareto"] and not slow["pareto"] and not nothing["pareto"]
    per_token = 20 / 3600 / (8 * 0.4 * 989e12 / flops)
    expected = with_rent.break_even_months(with_rent.of("h200"), 1000.0, per_token)
    assert fast[costs.months_column("node")] == pytest.approx(expected, rel=0.01)
    assert nothing["cost"] is None or math.isnan(nothing["cost"])


def test_a_rental_reaches_its_share_of_the_peak_of_the_rows_precision() -> None:
    """An H100 has 989 TFLOP/s in bf16 and 67 in fp32; of 9.89 GFLOP a token, half is 50,000 and 3,387 tokens/s."""
    (row,) = (sweep.evaluate(point) for point in some(["h200"], names=["resident"]))
    rental = Rental(name="node", machine="h100", gpus=1, mfu=0.5, rent_per_hour=36.0, source="made up")
    free = MachinePrice(source="made up", watts=0, buy=36525.0)
    for precision, rented in (("bf16", 50_000), ("fp32", 0.5 * 67e12 / 9.89e9)):
        told = {**row, "precision": precision, "tokens_per_s": 10_000.0, "flops_per_token": 9.89e9}
        table = costs.priced([told], some_prices(machines={"h200": free}, rentals=(rental,)), 1e9)
        saved_per_month = 36.0 * 10_000 / rented * 0.5 * HOURS_A_MONTH
        assert table[costs.months_column("node")].tolist() == pytest.approx([36525.0 / saved_per_month])


def test_what_never_becomes_cheaper_than_a_rental_is_told_from_what_cannot_be_bought(tmp_path: Path) -> None:
    """Energy is 100 an hour on the first, and the rental 36 for as many tokens; the second is only rented."""
    rental = Rental(name="node", machine="h100", gpus=1, mfu=0.5, rent_per_hour=36.0, source="made up")
    owned = MachinePrice(source="made up", watts=200_000, buy=1.0)
    rented = MachinePrice(source="made up", watts=0, rent_per_hour=1.0)
    found = some_prices(machines={"h200": owned, "gh200": rented}, rentals=(rental,))
    rows = [sweep.evaluate(point) for point in some(["h200", "gh200"], names=["resident"])]
    table = costs.priced([{**row, "tokens_per_s": 50_000.0, "flops_per_token": 9.89e9} for row in rows], found, 1e9)
    told = tables.records(buying.with_never(table, found))
    assert [record[costs.months_column("node")] for record in told] == ["never", None]
    page = buying.write(tmp_path, table, found, 1e9, "megatrain sweep").read_text()
    for machine, cell in (("h200", "never"), ("gh200", "-")):
        (line,) = (line for line in page.splitlines() if line.startswith(f"| {machine} "))
        assert line.endswith(f"| {cell} |  |")
    assert pd.read_csv(tmp_path / "sweep.csv")[costs.months_column("node")][0] == math.inf


def test_a_point_that_is_dearer_and_no_faster_is_not_on_the_front() -> None:
    """The fourth costs least by the hour, and most by the time that it is done; the last is as fast as the first."""
    hourly, costing = [2.0, 3.0, 4.0, 1.0, 3.0], [1.0, 2.0, 3.0, 4.0, 1.5]
    group = pd.DataFrame({"cost_per_hour": hourly, "cost": costing, "tokens_per_s": [10.0, 9.0, 20.0, 1.0, 10.0]})
    assert costs._pareto(group) == [0, 2]


# ---- files of prices


def test_the_example_is_read_and_has_a_price_for_every_machine_it_names() -> None:
    found = prices.read(EXAMPLE)
    assert found.date == "2026-11-24" and len(found.machines) >= 6 and found.rentals
    assert all("example" in price.source for price in found.machines.values())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("- a list", "holds no prices"),
        ("currency: USD", "machines: is missing"),
        ("machines: {h200: {watts: 1, source: x}}", "give buy or rent_per_hour"),
        ("machines: {h200: {wats: 1}}", "'wats' is unknown"),
        ("machines: {h200: 45000}", "h200: 45000 must be a mapping of prices"),
        ("machines: {h200: {watts: -1, source: x, buy: 1}}", "watts must be a number of at least zero"),
        (
            "lifetime_months: 0\nmachines: {h200: {watts: 1, source: x, buy: 1}}",
            "lifetime_months must be more than zero",
        ),
        (
            "machines: {h200: {watts: 1, source: x, buy: 1}}",
            "currency and date and electricity_per_kwh are missing; as in  currency: USD",
        ),
        ("machines: {h200: {source: x, buy: 1}}", "h200: watts is missing; as in  h200: {buy: 45000, watts: 1400, "),
        (f"machines: {{h200: {{watts: 1{'0' * 400}, source: x, buy: 1}}}}", "watts must be a number of at least zero"),
        (
            "rentals: 3\nmachines: {h200: {watts: 1, source: x, buy: 1}}",
            "rentals: is a list, each entry as in  - {name",
        ),
        ("a: [", "is not YAML"),
        ("date: 2026-13-45", "is not YAML: month must be in 1"),
        (
            "machines:\n  h200: {watts: 1, source: x, buy: 1}\n  h200: {watts: 1, source: x, buy: 2}",
            "h200 is given twice",
        ),
        ("machines: {h200: {watts: 1, source: x, buy: 1, buy: 2}}", "buy is given twice, line 1 and below"),
    ],
)
def test_a_price_file_that_says_too_little_is_told(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "prices.yaml"
    file.write_text(text)
    with pytest.raises(PriceError, match=told):
        prices.read(file)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ("mfu: 40", "a rental: mfu must lie above 0 and up to 1, not 40"),
        ("gpus: 8.5", "a rental: gpus must be a whole number of at least zero, not 8.5"),
        ("machine: h1000", "a rental: no hardware profile is called 'h1000'"),
    ],
)
def test_a_rental_that_means_nothing_is_told_before_a_sweep(tmp_path: Path, changed: str, told: str) -> None:
    key = changed.partition(":")[0]
    text, count = re.subn(rf"{key}: [^,]+", changed, EXAMPLE.read_text(encoding="utf-8"))
    assert count == 1
    (tmp_path / "prices.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(PriceError, match=told):
        prices.read(tmp_path / "prices.yaml")


def test_a_price_may_be_merged_from_another(tmp_path: Path) -> None:
    (tmp_path / "prices.yaml").write_text(
        "currency: USD\ndate: 2026-11-24\nelectricity_per_kwh: 0.2\nmachines:\n"
        "  h100: &server {buy: 45000, watts: 1400, source: x}\n  h200: {<<: *server, buy: 52000}\n"
    )
    found = prices.read(tmp_path / "prices.yaml").machines
    assert (found["h100"].buy, found["h200"].buy, found["h200"].watts) == (45000, 52000, 1400)


def test_two_rentals_of_one_name_would_have_one_column(tmp_path: Path) -> None:
    example = EXAMPLE.read_text(encoding="utf-8")
    rental = next(line for line in example.splitlines() if line.startswith("  - {name"))
    (tmp_path / "prices.yaml").write_text(f"{example}\n{rental}\n", encoding="utf-8")
    with pytest.raises(PriceError, match="two rentals are called '8 x H100': name them apart"):
        prices.read(tmp_path / "prices.yaml")


def test_a_price_of_a_machine_that_is_a_file_says_how_to_name_it(tmp_path: Path) -> None:
    (tmp_path / "prices.yaml").write_text(EXAMPLE.read_text(encoding="utf-8").replace("  h100: ", "  mine: "))
    words = ["sweep", "tiny", "--prices", str(tmp_path / "prices.yaml"), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(cli.app, [*words, "-p", "streamed", "--tokens", "64", "--seq", "16"])
    assert isinstance(result.exception, InputError)
    assert "has a price for mine, a machine that is not known by that name: say which" in str(result.exception)


def test_a_machine_without_a_price_is_told() -> None:
    with pytest.raises(PriceError, match="no price for machine gh200; add it"):
        some_prices().of("gh200")


# ---- rows


def test_what_does_not_fit_is_kept_with_its_reason() -> None:
    points = some(["h200"], vary=["gpu.memory=100kB,1GB"])
    rows = [sweep.evaluate(point) for point in points]
    assert [row["fits"] for row in rows] == [False, False, True, True]
    assert "device memory is" in rows[0]["reason"] and not rows[2]["reason"]
    assert list(rows[2]) == [*rows[0], *sweep.FOUND]


def test_a_policy_has_the_knobs_it_is_given() -> None:
    (as_it_comes,), (given,) = (some(["h200"], names=[name]) for name in ("streamed", "streamed slots=1"))
    rows = sweep.evaluate(as_it_comes), sweep.evaluate(given)
    assert [row["knobs"] for row in rows] == ["", "slots=1"] and rows[0]["digest"] != rows[1]["digest"]
    assert buying._as_file("tiny-my/mine.json-streamed slots=1") == "tiny-my-mine-streamed-slots-1"


def test_a_row_is_what_was_found_with_its_gap_to_the_bound_of_any_schedule() -> None:
    (point,) = some(["h200"], names=["resident"])
    row = sweep.evaluate(point)
    steps = [
        Workload(micro_batch_size=4 // n, seq_len=16, accumulation=n, recompute=mode)
        for n in (1, 2, 4)
        for mode in point.model.recompute_modes
    ]
    bound_s = min(placement_bound(point.model, workload, point.profile).period_ns for workload in steps) / 1e9
    assert row["gap_to_any_schedule"] == pytest.approx(row["step_s"] / bound_s - 1) and row["gap_to_any_schedule"] > 0
    assert row["tokens_per_s"] == pytest.approx(64 / row["step_s"])
    assert row["flops_per_token"] == pytest.approx(model_flops_per_step(point.model, steps[0]) / 64)


def test_all_policies_of_a_point_have_one_bound_however_they_split_the_step() -> None:
    rows = [sweep.evaluate(point) for point in some(["h200"], vary=["gpu.memory=0.5MB"])]
    assert [row["accumulation"] for row in rows] == [4, 1]
    assert rows[0]["bound_of_any_schedule_s"] == rows[1]["bound_of_any_schedule_s"] > 0


@pytest.mark.parametrize(
    ("name", "how", "told"),
    [
        ("streamed", {"grad_clip": 1.0}, "bf16, clipped to 1; "),
        (sweep.PLAN, {"grad_clip": 1.0}, "bf16, clipped to 1; "),
        (sweep.PLAN, {"optimizer": "muon"}, "bf16, muon; "),
        ("resident", {"optimizer": "muon", "matmul": "fp8"}, "bf16, fp8 products, muon; "),
        (sweep.PLAN, {"matmul": "fp8"}, "bf16, fp8 products; "),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value.strip("; "),
)
def test_a_step_is_as_it_is_asked_for(
    name: str, how: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "plan", functools.partial(plan, effort=1))
    (free,), (point,) = (some(["rtx4090"], names=[name], **asked) for asked in ({}, how))
    row, without = sweep.evaluate(point), sweep.evaluate(free)
    assert {key: row[key] for key in how} == how and row["bound_of_any_schedule_s"] > 0
    assert row["step_s"] > without["step_s"] or "grad_clip" not in how  # a step so short waits for its launches
    workload = Workload(
        micro_batch_size=row["micro_batch_size"], accumulation=row["accumulation"], seq_len=16,
        recompute=row["recompute"], **how,
    )  # fmt: skip
    knobs = policies.parse_knobs(row["schedule"], row["knobs"].split())
    schedule = policies.build(row["schedule"], MODEL, workload, memory_of(point.profile), **knobs)
    assert row["digest"] == schedule.short_digest
    slower = {**row, "step_s": 2 * row["step_s"]}
    assert sweep.hand_on(sweep.Handed(point, slower, (row,)))["digest"] == row["digest"]
    assert told in buying.step(pd.DataFrame([row]), 1e9)
    assert "bf16; " in buying.step(pd.DataFrame([without]), 1e9)


def test_in_fp8_a_policy_skips_micro_batches_whose_tokens_are_no_multiple() -> None:
    """Of three sequences of 8 tokens, which are not, or one, in 48 tokens: only the six together are."""
    (point,) = some(["h200"], names=["resident"], seq_len=8, tokens_per_step=48, matmul="fp8")
    assert sweep.evaluate(point)["micro_batch_size"] == 6
    (refused,) = some(["h200"], names=["resident"], seq_len=8, tokens_per_step=8, matmul="fp8")
    assert "fp8 products need a micro-batch's tokens, 8, to be a multiple" in sweep.evaluate(refused)["reason"]
    least = sweep.evaluate(point)["device_gb"]
    (short,) = some(
        ["h200"], names=["resident"], seq_len=8, tokens_per_step=48, matmul="fp8", vary=[f"gpu.memory={least * 0.9}GB"]
    )
    row = sweep.evaluate(short)  # three would fit and are left out; two are a multiple
    assert row["micro_batch_size"] == 2 if row["fits"] else row["reason"].startswith("device memory is")


def test_rows_that_were_stored_before_steps_had_these_options_are_read(tmp_path: Path) -> None:
    (point,) = some(["h200"], names=["resident"])
    row = sweep.evaluate(point)
    before = {key: value for key, value in row.items() if key not in ("grad_clip", "optimizer", "matmul")}
    (tmp_path / "rows.jsonl").write_text(json.dumps(before) + "\n")
    assert sweep.run([point], tmp_path / "rows.jsonl", workers=1, progress=quiet) == [row]


def test_what_was_measured_for_one_policy_fits_without_a_bound() -> None:
    (point,) = some(["h200"], names=["resident"])
    point = replace(point, profile=timed(MODEL, [Workload(micro_batch_size=4, seq_len=16)], names=["resident"]))
    row = sweep.evaluate(point)
    assert row["fits"] and row["gap_to_any_schedule"] is None and row["step_s"] > 0


def test_micro_batches_whose_ops_take_hours_are_left_to_smaller_ones() -> None:
    (point,) = some(["h200"], names=["resident"], vary=["gpu.matmul_flops=200FLOP/s"])
    row = sweep.evaluate(point)
    assert row["fits"] and row["micro_batch_size"] < 4


def test_rows_are_the_same_in_one_process_and_in_two(tmp_path: Path) -> None:
    points = some(["h200", "rtx4090"])
    alone = sweep.run(points, tmp_path / "one.jsonl", workers=1, progress=quiet)
    two = sweep.run(points, tmp_path / "two.jsonl", workers=2, progress=quiet)
    assert alone == two and len({row["key"] for row in alone}) == 4


def test_an_interrupted_sweep_goes_on_and_a_line_cut_off_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, points, computed = tmp_path / "rows.jsonl", some(["h200", "rtx4090"]), list[str]()
    real = sweep.evaluate

    def counted(point: sweep.Point) -> sweep.Row:
        if len(computed) == 2:
            raise KeyboardInterrupt
        computed.append(point.key)
        return real(point)

    monkeypatch.setattr(sweep, "evaluate", counted)
    with pytest.raises(KeyboardInterrupt):
        sweep.run(points, file, workers=1, progress=quiet)
    lacking = {**json.loads(file.read_text().splitlines()[0]), "key": points[2].key}
    del lacking["tokens_per_s"]
    with file.open("ab") as out:  # neither what is no row nor one that tells too little is taken for one
        out.write(b'3\n[]\n{}\n{"key": []}\n\xff\n' + json.dumps(lacking).encode() + b'\n{"key": "cut o')
    monkeypatch.setattr(sweep, "evaluate", lambda point: (computed.append(point.key), real(point))[1])
    rows = sweep.run(points, file, workers=1, progress=quiet)
    assert computed == [point.key for point in points]
    lines = file.read_text(errors="replace").splitlines()
    assert [json.loads(line)["key"] for line in [*lines[:2], *lines[-2:]]] == computed
    assert [row["key"] for row in rows] == computed
    sweep.run(points, file, workers=1, progress=quiet)
    assert len(computed) == 4


def test_the_key_of_a_point_changes_with_whatever_decides_its_row() -> None:
    base = some(["h200"])[0]
    others = [
        *some(["rtx4090"])[:1],
        *some(["h200"], vary=["host.memory=1TB"])[:1],
        *some(["h200"], tokens_per_step=128)[:1],
        some(["h200"])[1],
        replace(base, precision="fp32"),
        replace(base, grad_clip=1.0),
        replace(base, optimizer="muon"),
        replace(base, matmul="fp8"),
        replace(base, machine="mine.json"),  # the same numbers, perhaps at another price
    ]
    assert len({point.key for point in [base, *others]}) == 10


def test_a_row_that_tells_less_than_rows_do_now_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    base = some(["h200"])[0]
    now = base.key
    monkeypatch.setattr(sweep, "FOUND", sweep.FOUND[1:])
    assert base.key != now


def planned(machine: str, vary: list[str]) -> list[sweep.Point]:
    return some([machine], vary=vary, names=[sweep.PLAN])


def test_neighbours_differ_in_one_number_by_one_value() -> None:
    points = planned("h200", ["host.memory=1GB,2GB,3GB", "links.h2d.bandwidth=10GB/s,50GB/s"])
    named = {point.key: point.changes for point in points}
    beside = {named[key]: [named[other] for other in others] for key, others in sweep.neighbours(points).items()}
    slow, fast = "links.h2d.bandwidth=10GB/s", "links.h2d.bandwidth=50GB/s"
    assert beside[("host.memory=2GB", slow)] == [
        ("host.memory=1GB", slow), ("host.memory=3GB", slow), ("host.memory=2GB", fast)
    ]  # fmt: skip
    assert len(beside[("host.memory=1GB", fast)]) == 2
    assert sweep.neighbours(some(["h200", "rtx4090"])) == {}  # named policies are what they are
    assert all(others == [] for others in sweep.neighbours(some(["h200", "rtx4090"], names=[sweep.PLAN])).values())


@pytest.mark.slow
def test_a_schedule_that_a_neighbour_found_is_handed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a search that finds the worst schedule on all machines but the first, all end with the first one's."""
    points = planned("h200", ["host.memory=1GB,2GB,3GB"])
    monkeypatch.setattr(sweep, "plan", functools.partial(plan, effort=1))  # which schedule it finds is no matter
    real = sweep.evaluate

    def poor(point: sweep.Point) -> sweep.Row:
        row = real(point)
        if point.changes == points[0].changes:
            return row
        worst = real(replace(point, policy="megatrain_released"))
        return {**worst, "key": point.key, "policy": sweep.PLAN}

    monkeypatch.setattr(sweep, "evaluate", poor)
    first, second, third = sweep.run(points, tmp_path / "rows.jsonl", workers=1, progress=quiet)
    assert first["schedule"] != "megatrain_released" and poor(points[1])["step_s"] > first["step_s"]
    for row in (second, third):
        assert row["step_s"] == first["step_s"] and row["schedule"] == first["schedule"]
        assert row["gap_to_any_schedule"] == pytest.approx(row["step_s"] / row["bound_of_any_schedule_s"] - 1.0)
    monkeypatch.setattr(sweep, "hand_on", None)  # a second run has nothing left to try
    assert sweep.run(points, tmp_path / "rows.jsonl", workers=1, progress=quiet) == [first, second, third]


SLOW = """
import os, time
from analysis import sweep

def slow(point):
    os.write(1, b"%d\\n" % os.getpid())
    time.sleep(60)

list(sweep._computed(slow, [1, 2], 2, None))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_the_sweep(number: signal.Signals) -> None:
    """The signal is for the parent alone, as from a scheduler."""
    with subprocess.Popen([sys.executable, "-c", SLOW], stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        workers = [int(process.stdout.readline()) for _ in range(2)]
        process.send_signal(number)
        assert process.wait(timeout=20) != 0
        deadline = time.monotonic() + 20
        while any(map(_runs, workers)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(_runs, workers))


def test_there_are_no_more_workers_than_cores_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler may give a few cores of a hundred, and memory for as many processes."""
    asked: list[int] = []

    def no_pool(workers: int, remedy: str) -> Any:
        asked.append(workers)
        raise InputError("enough")

    monkeypatch.setattr(pool, "helpers", no_pool)
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5, 7})
    with pytest.raises(InputError, match="enough"):
        list(sweep._computed(_ended, [1, 2], None, None))
    assert asked == [3]


def test_a_worker_that_is_ended_is_told() -> None:
    with pytest.raises(Refused, match=r"a process that helped was ended.*; the same command goes on from here"):
        list(sweep._computed(_ended, [1, 2], 2, None))


def test_workers_that_are_interrupted_as_they_begin_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    submit, begun = ProcessPoolExecutor.submit, list[float]()

    def interrupted(pool: ProcessPoolExecutor, *work: Any) -> Any:
        if begun:
            raise KeyboardInterrupt
        begun.append(time.monotonic())
        return submit(pool, *work)

    monkeypatch.setattr(ProcessPoolExecutor, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(pool.computed(time.sleep, [10.0, 10.0], 2, ""))
    assert time.monotonic() - begun[0] < 5.0


def test_what_keeps_workers_from_beginning_is_not_taken_for_a_full_drive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: Any) -> Any:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(sweep, "computed", none)
    with pytest.raises(BlockingIOError):
        sweep.run(some(["h200"]), tmp_path / "rows.jsonl", progress=quiet)


def _ended(point: int) -> sweep.Row:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_where_nothing_fits_the_table_and_the_page_say_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points = some(["h200"], vary=["gpu.memory=100kB", "host.memory=1GB,2TB", "links.h2d.bandwidth=10GB/s,50GB/s"])
    rows = sweep.run(points, tmp_path / "rows.jsonl", workers=1, progress=quiet)
    assert not any(row["fits"] for row in rows)
    found = some_prices(host_memory_per_gb=1.0)
    table = costs.priced(rows, found, 1e9)
    tables.show(table, buying.columns(found, table))
    assert "device memory is" in capsys.readouterr().out
    assert "device memory is" in buying.write(tmp_path, table, found, 1e9, "megatrain sweep").read_text()


def test_where_the_policy_refuses_the_step_the_answer_says_so(tmp_path: Path) -> None:
    """Not only that nothing fits, which no more memory would change."""
    words = ["sweep", "tiny", "-H", "h200", "-p", "zero3_offload", "--optimizer", "muon", "--prices", str(EXAMPLE)]
    step = ["--tokens", "64", "--seq", "16", "--workers", "1", "--out", str(tmp_path)]
    error = CliRunner().invoke(cli.app, [*words, *step]).exception
    assert isinstance(error, Refused) and "of the first: zero3_offload: " in str(error)
    assert "muon updates blocks on the device" in str(error)


def test_whole_numbers_stay_whole_beside_a_point_that_does_not_fit(tmp_path: Path) -> None:
    vary = ["gpu.memory=100kB,1GB", "host.memory=1GB,2TB", "links.h2d.bandwidth=10GB/s,50GB/s"]
    rows = sweep.run(some(["h200"], vary=vary, names=["zenflow"]), tmp_path / "rows.jsonl", workers=1, progress=quiet)
    found = some_prices(host_memory_per_gb=1.0)
    table = costs.priced(rows, found, 1e9)
    names = ["stale", "micro_batch_size", "accumulation"]
    told = [[record[name] for name in names] for record in tables.records(table)]
    assert json.dumps(told) == json.dumps([[None, None, None]] * 4 + [[1, 4, 1]] * 4)
    buying.write(tmp_path, table, found, 1e9, "megatrain sweep")
    text = pd.read_csv(tmp_path / "sweep.csv", dtype=str, keep_default_na=False)[names]
    assert text.to_numpy().tolist() == [["" if one is None else str(one) for one in of] for of in told]
    assert "zenflow (stale by 1)" in buying.heat_map(table).get_title(loc="left")


def test_rows_computed_on_a_cluster_are_the_same(tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None
    ) as cluster:
        points = some(["h200"])
        there = sweep.run(points, tmp_path / "there.jsonl", dask=cluster.scheduler_address, progress=quiet)
        assert there == sweep.run(points, tmp_path / "here.jsonl", workers=1, progress=quiet)


def test_a_cluster_that_loses_a_worker_or_ends_is_told() -> None:
    distributed = pytest.importorskip("distributed")
    killed = distributed.KilledWorker("work", SimpleNamespace(address="tcp://there"), 3)
    lost = {killed: "a worker .* was ended", CancelledError(): "has ended"}
    with distributed.LocalCluster(
        n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None
    ) as cluster:
        for error, told in lost.items():

            def work(point: int, error: Exception = error) -> sweep.Row:
                raise error

            with pytest.raises(Refused, match=f"{told}.*; the same command goes on from here"):
                list(sweep._computed(work, [1], None, cluster.scheduler_address))


@pytest.mark.parametrize(
    ("changes", "error", "told"),
    [
        ({"vary": ["host.memory"]}, InputError, "varies nothing"),
        ({"vary": ["host.memory="]}, InputError, "varies nothing"),
        ({"vary": ["host.memory=1GB", "host.memory =2GB"]}, InputError, "host.memory is varied twice; write all"),
        ({"vary": ["host.memry=1GB"]}, HardwareError, "host.memory"),
        ({"vary": ["links.h2d.bandwidth=0GB/s"]}, HardwareError, "above zero"),
        ({"vary": ["host.memory=0GB"]}, HardwareError, "above zero"),
        ({"tokens_per_step": 65}, InputError, "no whole number of sequences"),
        ({"grad_clip": -1.0}, InputError, "grad_clip must be a positive finite number"),
    ],
)
def test_bad_input_is_told(changes: dict[str, Any], error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        some(["h200"], **changes)


def test_the_picture_of_prices_says_their_currency_and_what_every_colour_means() -> None:
    """Thirteen machines, too many to name: one of them beats all others."""
    count = buying.NAMED + 1
    table = pd.DataFrame(
        {
            "model": "tiny", "machine": [f"m{i}" for i in range(count)], "changes": "", "fits": True,
            "cost": [1.0 + i for i in range(count)], "days": [100.0 + i for i in range(count)],
            "pareto": [i == 0 for i in range(count)], "policy": sweep.PLAN,
        }
    )  # fmt: skip
    ax = buying.cost_against_days(table, "EUR", 1e9)
    assert ax.get_xlabel() == "cost of training 1,000,000,000 tokens (EUR)"
    legend = ax.get_legend()
    assert legend is not None
    told = [text.get_text() for text in legend.get_texts()]
    assert told[0] == "no other beats it" and told[1].startswith("beaten") and told[2:] == ["1  m0"]
    alone = buying.cost_against_days(table[:1], "EUR", 1e9).get_legend()
    assert alone is not None and not any("beaten" in text.get_text() for text in alone.get_texts())


def test_machines_that_cost_nothing_are_drawn_without_a_warning() -> None:
    table = pd.DataFrame(
        {
            "model": "tiny", "machine": ["a", "b"], "changes": "", "fits": True, "policy": sweep.PLAN,
            "cost": [0.0, 0.0], "days": [5.0, 6.0], "pareto": [True, False],
        }
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ax = buying.cost_against_days(table, "EUR", 1e9)
    (left, right), (low, high) = ax.get_xlim(), ax.get_ylim()
    assert left < 0 < right and low < 5 < 6 < high


def test_a_model_that_is_no_preset_is_priced(tmp_path: Path) -> None:
    """One given as a config.json has a name of its own, under which nothing can be loaded."""
    model = replace(MODEL, name="my-own")
    points = sweep.points([model], ["h200"], [], ["streamed"], seq_len=16, tokens_per_step=64)
    rental = Rental(name="node", machine="h100", gpus=8, mfu=0.4, rent_per_hour=20.0, source="made up")
    rows = sweep.run(points, tmp_path / "rows.jsonl", workers=1, progress=quiet)
    assert rows[0]["flops_per_token"] == model_flops_per_step(model, Workload(micro_batch_size=4, seq_len=16)) / 64
    table = costs.priced(rows, some_prices(rentals=(rental,)), 1e9)
    assert table["model"].tolist() == ["my-own"] and table[costs.months_column("node")].notna().all()


def test_points_are_numbered_where_they_are_within_the_axes_and_once_where_they_meet() -> None:
    table = pd.DataFrame(
        {
            "model": "tiny", "machine": list("abcdefg"), "changes": "", "fits": True, "policy": sweep.PLAN,
            "cost": [100.0, 100.001, 102.0, 103.0, 104.0, 104.001, 600.0],
            "days": [50.0, 50.01, 49.0, 50.0, 51.0, 51.01, 60.0],
            "pareto": [True, False, True, False, False, False, False],
        }
    )  # fmt: skip
    ax = buying.cost_against_days(table, "EUR", 1e9)
    bold = {text.get_text(): text.get_weight() == "bold" for text in ax.texts}
    assert bold == {"1": True, "2": False, "3": True, "4": False, "5, 6": False, "7": False}  # 2 is beaten, and near 1
    figure_of(ax).draw_without_rendering()
    inside, boxes = ax.get_window_extent(), [Text.get_window_extent(text) for text in ax.texts]
    assert all(inside.contains(x, y) for box in boxes for x, y in box.corners())
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


def test_of_several_policies_every_picture_and_table_names_which(tmp_path: Path) -> None:
    vary = ["host.memory=1GB,2TB", "links.h2d.bandwidth=10GB/s,50GB/s"]
    rows = sweep.run(some(["h200"], vary=vary), tmp_path / "rows.jsonl", workers=1, progress=quiet)
    found = some_prices(host_memory_per_gb=1.0)
    table = costs.priced(rows, found, 1e9)
    text = buying.write(tmp_path, table, found, 1e9, "megatrain sweep").read_text()
    for name in ("resident", "streamed"):
        assert f"tiny-h200-{name}-heat.png" in text
        of_policy = table[table["policy"] == name]
        ax = buying.heat_map(of_policy)
        assert name in ax.get_title(loc="left")
        assert {t.get_text() for t in ax.texts} == {f"{rate:,.0f}" for rate in of_policy["tokens_per_s"]}
    assert "of several the best" in buying.heat_map(table).get_title(loc="left")
    legend = buying.cost_against_days(table, "USD", 1e9).get_legend()
    assert legend is not None
    named = [t.get_text() for t in legend.get_texts() if "h200" in t.get_text()]
    assert len(named) == 8 and all("resident" in told or "streamed" in told for told in named)
    (schedule,) = [column for column in buying.columns(found, table) if column.heading == "schedule"]
    assert not schedule.spare


def test_what_is_not_exact_training_is_marked_and_has_no_bound_over_exact_schedules() -> None:
    """LoRA and evaluation do less than the bound takes for granted; a stale policy may be faster than it."""
    names = ["zenflow", "lora_streamed", "flexgen_block", "streamed"]
    rows = [sweep.evaluate(point) for point in some(["h200"], names=names)]
    assert all(row["fits"] for row in rows)
    assert [row["gap_to_any_schedule"] is None for row in rows] == [True, True, True, False]
    found = some_prices()
    table = costs.priced(rows, found, 1e9)
    assert "| zenflow (stale by 1) |" in tables.markdown(table, buying.columns(found, table))
    legend = buying.cost_against_days(table, "USD", 1e9).get_legend()
    assert legend is not None and any("zenflow (stale by 1)" in text.get_text() for text in legend.get_texts())


def test_the_page_has_a_heat_map_where_memory_and_link_vary(tmp_path: Path) -> None:
    points = some(
        ["h200"], vary=["host.memory=1GB,2TB", "links.h2d.bandwidth=10GB/s,50GB/s"], names=["streamed"], seq_len=64
    )
    rows = sweep.run(points, tmp_path / "rows.jsonl", workers=1, progress=quiet)
    for row in rows:
        row["model"] = "tiny"
    found = some_prices(host_memory_per_gb=1.0)
    page = buying.write(tmp_path, costs.priced(rows, found, 1e9), found, 1e9, "megatrain sweep")
    text = page.read_text()
    assert "tiny-h200-heat.png" in text and "dated 2026-11-20" in text
    assert (tmp_path / "tiny-h200-heat.png").stat().st_size > 5_000
