"""Plans for adapters: nothing that fits is faster, no schedule is below the bound, and what is lacking is told."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command import ROOT, megatrain
from timed_profile import timed

from megatrain import adapter_plan_tables as tables
from schedules import policies, presets
from schedules.errors import InputError
from schedules.op import Tier
from schedules.quantised import quantised_bytes
from schedules.workload import MemoryBudget, Workload
from sim import adapter_plan, hardware
from sim.adapter_plan import POLICY, AdapterPlan, bound, plan_adapters
from sim.cost import MissingCost
from sim.machine import HardwareProfile
from sim.prediction import predict
from sim.refine import WORTH_A_STEP
from sim.search import NothingFits

MODEL = replace(presets.load("qwen2.5-0.5b"), num_hidden_layers=4, vocab_size=4096)
STEP: dict[str, Any] = {"rank": 4, "seq_len": 512, "tokens_per_step": 2048}


def machine(*changes: str) -> HardwareProfile:
    return hardware.override(hardware.load("rtx4090"), ["links.h2d.bandwidth=3GB/s", *changes])


def planned(*changes: str, **options: Any) -> AdapterPlan:
    return plan_adapters(MODEL, machine(*changes), **{**STEP, **options})


@pytest.mark.parametrize(("device", "quantised"), [("140MB", None), ("200MB", "nf4"), ("1GB", "nf4")])
def test_no_schedule_that_fits_is_faster(device: str, quantised: str | None) -> None:
    found = planned(f"gpu.memory={device}", quantised=quantised)
    budget = MemoryBudget(
        device_bytes=int(hardware.override(machine(), [f"gpu.memory={device}"]).gpu.memory.value), host_bytes=10**12
    )
    profile = found.prediction.profile
    assert found.prediction.fits and found.lower_bound_ns <= found.prediction.period_ns
    wholes = ("blocks", "matrices") if quantised else ("blocks",)
    kinds = itertools.product((1, 4), ("none", "pointwise"), adapter_plan.PLACES, wholes, (0, 3, 5), (1, 2))
    for count, recompute, activations, whole, resident, slots in kinds:
        step = Workload(
            micro_batch_size=4 // count, accumulation=count, seq_len=512, recompute=recompute, lora_rank=4,
            quantised=quantised,
        )  # fmt: skip
        knobs: dict[str, Any] = {"activations": activations, "whole": whole, "resident": resident, "slots": slots}
        one = predict(policies.build(POLICY, MODEL, step, budget, **knobs), profile)
        assert not one.fits or one.period_ns >= found.lower_bound_ns
        assert not one.fits or one.period_ns >= found.prediction.period_ns * (1.0 - WORTH_A_STEP), knobs


def test_slots_take_no_room_where_all_layers_are_on_the_device() -> None:
    """Beside slots the last block has none, so that only smaller micro-batches had all layers there."""
    changes = ["gpu.memory=180MB", "gpu.memory_bandwidth=300GB/s", "links.h2d.bandwidth=5GB/s"]
    profile = hardware.override(hardware.load("h200"), changes)
    model = replace(MODEL, num_hidden_layers=2)
    found = plan_adapters(model, profile, rank=64, seq_len=16, tokens_per_step=256)
    assert found.chosen.knobs["resident"] == 4 and found.chosen.workload.accumulation == 1


def test_a_step_that_lacks_less_than_a_slot_is_tried_with_one() -> None:
    """A step in more micro-batches has room for two, and takes longer."""
    tiny = replace(presets.load("tiny"), num_hidden_layers=2)
    profile = hardware.override(
        hardware.load("rtx4090"),
        ["gpu.memory=184825bytes", "gpu.memory_bandwidth=50GB/s", "links.h2d.bandwidth=1GB/s"],
    )
    found = plan_adapters(tiny, profile, rank=1, seq_len=16, tokens_per_step=128)
    assert found.chosen.knobs["slots"] == 1 and found.chosen.workload.accumulation == 4


def test_the_bound_by_hand() -> None:
    """Twice what the device cannot hold comes by the link; of a fast link what is computed counts."""
    step = Workload(micro_batch_size=4, seq_len=512, lora_rank=4)
    frozen = 2 * MODEL.total_params
    budget = MemoryBudget(device_bytes=frozen // 4, host_bytes=10**12)
    loaded_ns, what = bound(MODEL, machine(), budget, [step])
    assert what == "h2d" and loaded_ns == pytest.approx(2 * (frozen - frozen // 4) / 3e9 * 1e9, rel=1e-6)
    packed = replace(step, quantised="nf4")
    kept = sum(quantised_bytes(MODEL, i, packed) for i in MODEL.blocks) + 2 * sum(map(MODEL.params, (-1, 4)))
    slow = machine("links.h2d.bandwidth=1GB/s")
    assert bound(MODEL, slow, budget, [packed])[0] == pytest.approx(2 * (kept - frozen // 4), rel=1e-6)
    compute_ns, what = bound(MODEL, machine(), replace(budget, device_bytes=frozen), [step])
    assert what == "compute"
    room = MemoryBudget(device_bytes=10**12, host_bytes=10**12)
    kept_all = policies.build(POLICY, MODEL, step, room, resident=6, activations="keep")
    assert compute_ns == pytest.approx(predict(kept_all, machine()).period_ns, rel=0.01)
    of_both = bound(MODEL, machine(), budget, [replace(step, micro_batch_size=1, accumulation=4), step])
    assert of_both == (loaded_ns, "h2d"), "a step of many micro-batches computes longer, and loads no less"


def test_what_the_host_has_no_room_for_lives_on_a_drive() -> None:
    found = planned("gpu.memory=140MB", "host.memory=60MB")
    assert found.schedule.allocated_bytes(Tier.NVME) > 0 and found.prediction.fits
    assert found.chosen.knobs["nvme"] == min(
        tried.knobs["nvme"]
        for tried in found.tried
        if tried.period_ns is not None and tried.cost_ns == found.chosen.cost_ns
    )


def test_what_does_not_fit_anywhere_is_told() -> None:
    with pytest.raises(
        NothingFits, match=r"nothing fits rtx4090: the closest of \d+ schedules lacks [\d.]+ MB of device"
    ):
        planned("gpu.memory=60MB")
    with pytest.raises(InputError, match="quantised 'int3' is unknown; known are nf4"):
        planned(quantised="int3")


def test_a_measured_profile_that_lacks_an_op_says_which() -> None:
    step = Workload(micro_batch_size=4, seq_len=512, lora_rank=4)
    asked: dict[str, Any] = {"rank": 4, "seq_len": 512, "micro_batch_size": 4}
    room = timed(MODEL, [step], "rtx4090", [POLICY])
    assert plan_adapters(MODEL, room, **asked).chosen.workload.recompute == "none"
    with pytest.raises(MissingCost, match=r"made up has no measured time for .*lora8.* --policy 'lora_streamed rank=8"):
        plan_adapters(MODEL, room, **{**asked, "rank": 8})


def test_a_plan_says_how_to_measure_what_it_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """With the rank that was asked for: a profile of another has no times for it."""
    step = Workload(micro_batch_size=4, seq_len=512, lora_rank=4)
    found = plan_adapters(MODEL, timed(MODEL, [step], "rtx4090", [POLICY]), **STEP)
    left_out = sum(not tried.measured for tried in found.tried)
    command = "--batch 4 --seq 512 --precision bf16 --recompute pointwise --policy 'lora_streamed rank=4 resident=6'"
    assert left_out and found.measure_with == f"megatrain profile qwen2.5-0.5b {command} --nvme FOLDER --out FILE"
    tables.show(found)
    assert f"{left_out} of the candidates tried were left out, for the profile has no" in capsys.readouterr().out
    assert tables.record(found)["measure_with"] == found.measure_with
    assert planned().measure_with is None


def test_an_interrupted_search_has_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_alone(found: Any, steps: Any) -> None:
        found.evaluate(next(adapter_plan._starts(found, steps[0])))
        raise KeyboardInterrupt

    monkeypatch.setattr(adapter_plan, "_search", first_alone)
    found = planned()
    assert not found.finished and len(found.tried) == 1


def test_a_plan_for_adapters_is_told_and_run(tmp_path: Path) -> None:
    config = json.loads((ROOT / "schedules" / "models" / "tiny.json").read_text())
    (tmp_path / "tiny.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    file = str(tmp_path / "step.json")
    options = ["--precision", "fp32", "--rank", "2", "--quantised", "nf4"]
    step = ("plan-adapters", str(tmp_path / "tiny.json"), "-b", "2", "-a", "2", "-s", "32", *options)
    told = megatrain(*step, "-o", file)
    assert told.returncode == 0, told.stderr
    for words in ("adapters of rank 2 beside nf4", "the best of each kind that was tried", "above the bound of any"):
        assert words in told.stdout
    assert told.stdout.endswith(f"written to {file}; run it with: megatrain run {file}\n")
    found = json.loads(megatrain(*step, "--json").stdout)
    assert found["fits"] and found["bound_of_any_schedule_s"] <= found["step_s"] and found["finished"]
    assert {each["whole"] for each in found["best_of_each_kind"]} == {"blocks", "matrices"}
    assert megatrain("run", file, "--steps", "2").returncode == 0
    refused = megatrain(*step, "--json", "--set", "gpu.memory=100kB")
    assert refused.returncode == 1 and json.loads(refused.stdout)["fits"] is False
