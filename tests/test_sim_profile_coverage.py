"""What a measured profile covers in words, and the command that measures what it lacks: it does."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
from timed_profile import timed

from analysis import compare
from megatrain import plan_tables
from schedules import policies, presets
from schedules.op import Tier
from schedules.workload import RECOMPUTED, MemoryBudget, Workload
from sim import hardware, whatif
from sim.cost import MissingCost
from sim.machine import HardwareProfile, Table
from sim.plan import Plan, plan
from sim.prediction import memory_of, predict
from sim.profile_coverage import command, covered, layer_name
from sim.room import Room
from sim.signature import in_words

TINY = presets.load("tiny")


def step(batch: int, seq: int = 64, accumulation: int = 1, **more: Any) -> Workload:
    return Workload(micro_batch_size=batch, seq_len=seq, accumulation=accumulation, **more)


def planned(profile: HardwareProfile, sequences: int = 4, **more: Any) -> Plan:
    return plan(TINY, profile, seq_len=64, tokens_per_step=64 * sequences, **more)


def short_of_device(profile: HardwareProfile, workload: Workload) -> MemoryBudget:
    """A byte less than the thriftiest schedule takes."""
    own = memory_of(profile)
    room = Room(TINY, profile, own)
    taken = room.peaks(room.thriftiest(workload)[0])
    assert taken is not None
    return replace(own, device_bytes=taken[Tier.DEVICE] - 1)


def splits_left_out(found: Plan) -> dict[str, set[tuple[int, int]]]:
    left: dict[str, set[tuple[int, int]]] = {}
    for what in found.left_out:
        workload = what.workload
        left.setdefault(workload.recompute, set()).add((workload.accumulation, workload.micro_batch_size))
    return left


def test_what_a_profile_covers_is_told_by_model_shape_and_element() -> None:
    steps = [step(1, 16), step(1), step(4), step(1, recompute="mlp"), step(2, precision="fp32")]
    assert (
        covered(timed(TINY, steps))
        == "tiny at 1x16, 1x64, 4x64 in bf16; tiny at 1x64 in bf16, mlp again; tiny at 2x64 in fp32"
    )
    assert covered(timed(TINY, [step(n) for n in range(1, 9)])) == "tiny at 8 shapes from 1x64 to 8x64 in bf16"
    assert covered(hardware.load("h200")) == "no model"


def test_a_missing_time_is_told_with_what_there_is_and_the_whole_command() -> None:
    asked = step(8, 1024)
    schedule = policies.build("streamed", TINY, asked, memory_of(hardware.load("h200")))
    with pytest.raises(MissingCost) as told:
        predict(schedule, timed(TINY, [step(4, precision="fp32")]))
    assert "it covers tiny at 4x64 in fp32;" in str(told.value)
    line = "megatrain profile tiny --batch 8 --seq 1024 --precision bf16 --nvme FOLDER --out FILE"
    assert str(told.value).endswith(line)
    again = pickle.loads(pickle.dumps(told.value))
    assert (str(again), again.what) == (str(told.value), told.value.what)


def test_times_of_another_model_of_the_same_name_are_not_taken() -> None:
    """A configuration may have been edited since, or lie in a folder that is called as another's."""
    older = timed(TINY, [step(4)])
    assert older.measured is not None
    sizes = {layer_name(TINY, i): TINY.params(i) for i in TINY.layers}
    layers = Table(values=sizes, unit="params", source="counted")
    profile = replace(older, measured=replace(older.measured, layers=layers))
    room = memory_of(profile)
    shorter, wider = replace(TINY, num_hidden_layers=2), replace(TINY, intermediate_size=8 * TINY.intermediate_size)
    same = policies.build("streamed", shorter, step(4), room)
    assert predict(same, profile).period_ns == predict(same, older).period_ns
    other = policies.build("streamed", wider, step(4), room)
    with pytest.raises(MissingCost, match=r"no measured time for tiny/block/.*; it covers another model called tiny;"):
        predict(other, profile)
    (row,) = compare.rows(wider, ["streamed"], profile, step(4))
    assert row.fits is None and "another model called tiny" in row.reason


@pytest.mark.parametrize(
    ("policy", "knobs", "lacks", "named"),
    [
        ("megatrain", {}, "block/forward/2x64/bf16, a forward that keeps no activations", "megatrain"),
        ("streamed", {"keep": 0}, "block/forward/2x64/bf16, a forward that keeps no activations", "'streamed keep=0'"),
        (
            "torchao_offload",
            {},
            "head/adam/issuer/bf16, an optimizer's step by the issuing thread in bf16",
            "torchao_offload",
        ),
    ],
)
def test_a_kind_of_op_that_no_timed_policy_has_is_told_in_words_with_the_policy_that_has_it(
    policy: str, knobs: dict[str, int], lacks: str, named: str
) -> None:
    """The step's shape is among those that the profile covers, and is not what is lacking."""
    profile = timed(TINY, [step(2, accumulation=2), step(4)], names=["resident"])
    schedule = policies.build(policy, TINY, step(2), memory_of(profile), **knobs)
    with pytest.raises(MissingCost) as told:
        predict(schedule, profile)
    expected = f"no measured time for tiny/{lacks}; it covers tiny at 2x64, 4x64 in bf16, but no such op; measure"
    assert expected in str(told.value)
    assert str(told.value).endswith(f" --precision bf16 --policy {named} --nvme FOLDER --out FILE")


def test_a_policy_of_a_file_is_not_named_as_one_to_measure() -> None:
    """Its name is not enough to find it by."""
    profile = timed(TINY, [step(2)], names=["resident"])
    schedule = replace(policies.build("megatrain", TINY, step(2), memory_of(profile)), policy="mine")
    with pytest.raises(
        MissingCost, match=r"no such op; measure it with: .* --precision bf16 --nvme FOLDER --out FILE$"
    ):
        predict(schedule, profile)


def test_what_measures_adapters_or_an_evaluation_names_a_policy_that_there_is_with_its_knobs() -> None:
    """Another rank's ops are other ops, and the name of a user's file is no policy."""
    profile = timed(TINY, [step(2)], names=["resident"])
    (row,) = compare.rows(TINY, ["lora_streamed rank=4"], profile, step(2))
    assert row.reason.endswith(" --policy 'lora_streamed rank=4' --nvme FOLDER --out FILE")
    built = policies.build("lora_streamed", TINY, step(2), memory_of(profile), rank=4)
    with pytest.raises(MissingCost, match=r" --policy 'YOURS.py .*rank=4.*' --nvme FOLDER --out FILE$"):
        predict(replace(built, policy="mine"), profile)


def test_a_comparison_says_how_to_measure_what_all_policies_lack() -> None:
    profile = timed(TINY, [step(2)], names=["resident"])
    (row,) = compare.rows(TINY, ["megatrain"], profile, step(2))
    assert "a forward that keeps no activations" in row.reason and "--policy" not in row.reason


def test_ops_that_differ_in_kind_have_different_words() -> None:
    """Those that have to be timed, of one layer and shape."""
    table = timed(TINY, [step(2, accumulation=2)]).measured.op_times
    kinds = [key for key in table.values if key.startswith("tiny/block/") and ("/2x64/" in key or "/adam/" in key)]
    assert len({in_words(key) for key in kinds}) == len(kinds) > 10


def test_the_command_names_what_is_computed_again_and_who_has_the_ops_and_in_which_way() -> None:
    modes = [step(2, recompute="mlp"), step(4, 32), step(1, recompute="none")]
    older, graphs = timed(TINY, [step(4)]), replace(timed(TINY, [step(4)]), way="fused graphs")
    assert command("my model", modes, "streamed", older) == (
        "megatrain profile 'my model' --batch 4 --seq 64 --precision bf16 --recompute none --recompute mlp "
        "--nvme FOLDER --out FILE"
    )
    assert "--nvme" not in command("tiny", [step(1)], "streamed", replace(older, nvme=None))
    assert "--policy lora_streamed" in command("tiny", [step(1, lora_rank=8)], "lora_streamed", older)
    assert "--recompute" not in command("tiny", [step(1)], "streamed", older)
    assert "--precision bf16 --fused --graphs --nvme FOLDER --out" in command("tiny", [step(1)], "streamed", graphs)
    assert command("tiny", [step(1)], "streamed", replace(older, way="plain")) == command(
        "tiny", [step(1)], "streamed", older
    )


def test_a_plan_considers_what_was_measured_and_tells_what_was_not() -> None:
    found = planned(timed(TINY, [step(4)]), effort=1)
    assert found.schedule.workload == step(4)
    every = {(1, 4), (2, 2), (4, 1)}
    assert splits_left_out(found) == {"none": every - {(1, 4)}, "pointwise": every, "mlp": every}
    assert found.measure_with == (
        "megatrain profile tiny --batch 4 --seq 64 --precision bf16 --recompute none --recompute pointwise "
        "--recompute mlp --nvme FOLDER --out FILE"
    )


def test_a_plan_on_all_that_its_command_measures_leaves_nothing_out() -> None:
    """Shapes between those that were timed are predicted, as in the command."""
    shapes = [(4, 64), (1, 64), (2, 32), (4, 16), (1, 16)]
    all_of_them = [step(b, s, accumulation=2, recompute=mode) for b, s in shapes for mode in RECOMPUTED]
    found = planned(timed(TINY, all_of_them))
    assert found.left_out == () and found.measure_with is None
    assert {tried.workload.recompute for tried in found.tried} == set(RECOMPUTED)
    assert all(tried.measured for tried in found.tried)


def test_a_plan_on_a_profile_with_one_mode_finds_the_best_of_that_mode() -> None:
    profile = timed(TINY, [step(4, recompute="pointwise"), step(1, recompute="pointwise", accumulation=2)])
    found = planned(profile, effort=1)
    assert found.schedule.workload.recompute == "pointwise"
    assert splits_left_out(found)["none"] == {(1, 4), (2, 2), (4, 1)}
    unmeasured = [tried for tried in found.tried if not tried.measured]
    assert unmeasured and all("no measured time for tiny/" in tried.reason for tried in unmeasured)


def test_a_candidate_whose_ops_were_not_timed_does_not_end_the_search() -> None:
    """Only the ops of what keeps everything on the device were: nothing is recomputed or updated on the host."""
    profile = timed(TINY, [step(4)], names=["resident"])
    found = planned(profile, effort=1)
    assert found.prediction.fits and found.left_out
    lacks = {tried.policy: tried.lacks for tried in found.tried if not tried.measured}
    assert lacks["zero3_offload"] == "a forward that keeps no activations"
    told = next(line for line in plan_tables._not_measured(found) if "of the candidates tried, for want of " in line)
    assert lacks["zero3_offload"] in told


def test_a_plan_for_which_nothing_was_measured_says_how_to() -> None:
    with pytest.raises(MissingCost, match="it covers tiny at 4x64 in bf16; measure it with: ") as told:
        planned(timed(TINY, [step(4)]), precision="fp32")
    assert "--batch 4 --seq 64 --precision fp32 --recompute none --recompute pointwise" in str(told.value)


def test_what_has_no_room_is_not_asked_to_be_measured() -> None:
    profile = timed(TINY, [step(1, accumulation=2)])
    found = planned(profile, 8, effort=1, memory=short_of_device(profile, step(8, recompute="mlp")))
    left_out = splits_left_out(found)
    assert (2, 4) in left_out["mlp"] and (1, 8) not in left_out["mlp"]


def test_where_what_was_measured_does_not_fit_the_rest_is_to_be_measured() -> None:
    """It is not said that nothing fits: that was asked of few."""
    profile = timed(TINY, [step(4)])
    with pytest.raises(MissingCost, match="measure it with: megatrain profile tiny"):
        planned(profile, effort=1, memory=short_of_device(profile, step(4)))


def test_what_if_of_a_measured_machine_asks_nothing_that_its_times_do_not_follow() -> None:
    measured, datasheet = whatif.faster(timed(TINY, [step(4)])), whatif.faster(hardware.load("h200"))
    assert set(datasheet) - set(measured) == {"GPU, matrix products, +25%"}
    assert {"link, host to device, +25%", "GPU, memory bandwidth, +25%"} <= set(measured)  # of copies within the GPU


def test_a_plan_may_begin_with_what_was_not_measured() -> None:
    slow = policies.build("streamed", TINY, step(4, recompute="mlp"), memory_of(hardware.load("h200")))
    found = planned(timed(TINY, [step(4)]), first=[slow], effort=1)
    assert not found.tried[0].measured and found.prediction.fits
    assert replace(found.schedule.workload, recompute="none") == step(4)
