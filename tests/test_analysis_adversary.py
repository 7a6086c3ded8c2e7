"""The adversary: seeded, inside its box, and it finds a weakness that is known."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
from timed_profile import timed

from analysis import adversary
from schedules import policies, presets
from schedules.errors import InputError, Refused
from schedules.verify import ScheduleError
from schedules.workload import Workload
from sim import hardware, machine
from sim.cost import TooLong

EMPTY = """
from schedules.program import Program

def policy(model, workload, memory):
    return Program(model, workload)
"""
H200 = hardware.load("h200")


def searched(first: str, second: str, points: int = 25, seed: int = 0) -> list[adversary.Loss]:
    return adversary.search(first, second, H200, points=points, seed=seed, progress=lambda done, worst: None)


found = functools.cache(searched)  # a search takes seconds, and always finds the same, as a test says


def test_it_finds_that_serial_offload_loses_on_slow_links_and_short_steps() -> None:
    losses = found("zero3_offload", "streamed")
    assert losses[0].ratio > 2.5
    assert [loss.ratio for loss in losses] == sorted((loss.ratio for loss in losses), reverse=True)
    told = losses[0].words()
    assert "zero3_offload takes" in told and "links.h2d.bandwidth" in told and "held up by" in told


def test_policies_may_have_knobs_and_are_named_with_them_and_with_what_is_not_exact() -> None:
    loss = found("roundpipe", "streamed slots=3", points=8)[0]
    assert (loss.first, loss.second) == ("roundpipe (stale by 1)", "streamed slots=3")
    assert loss.words().startswith("roundpipe (stale by 1) takes ")


def test_policies_that_keep_another_state_are_told() -> None:
    """DeepSpeed's keep an fp32 master, unless told not to: more to load, and to update."""
    unlike = found("zero3_offload", "streamed")
    alike = found("zero3_offload master=weights", "streamed", points=8)
    told = "They do not keep the same state: zero3_offload bf16_fp32, streamed bf16."
    assert adversary.unlike(unlike) == told and not adversary.unlike(alike)


def test_a_step_has_the_optimizer_and_the_products_that_are_asked_for() -> None:
    """And the machine's rate of such products is varied as its usual rate is."""
    both, muon = ("streamed", "resident"), replace(adversary.USUAL, optimizer="muon")
    likes = (adversary.USUAL, replace(muon, matmul="fp8"))
    usual, other = (adversary.search(*both, H200, points=4, progress=lambda *_: None, like=like) for like in likes)
    assert (usual[0].optimizer, usual[0].matmul) == ("adamw", "none") and "fp8" not in usual[0].words()
    assert (other[0].optimizer, other[0].matmul) == ("muon", "fp8")
    assert " tokens, fp8 products, muon; gpu.matmul_flops " in other[0].words()
    own, varied = (
        H200.gpu,
        hardware.override(H200, [part.replace(" ", "=", 1) for part in other[0].machine.split(", ")]),
    )
    assert own.fp8_flops is not None and varied.gpu.fp8_flops is not None
    factor = varied.gpu.matmul_flops.value / own.matmul_flops.value
    assert varied.gpu.fp8_flops.value / own.fp8_flops.value == pytest.approx(factor, rel=0.01) and factor != 1
    with pytest.raises(InputError, match="muon updates blocks on the device"):
        adversary.search("zero3_offload", "streamed", H200, points=2, progress=lambda *_: None, like=muon)
    with pytest.raises(Refused, match="states no rate of fp8 products"):
        slow = hardware.load("a100-pcie")
        adversary.search(*both, slow, points=2, progress=lambda *_: None, like=likes[1])


def test_a_step_is_as_it_is_asked_for_but_for_its_shape() -> None:
    like = replace(adversary.USUAL, precision="bf16_split", grad_clip=0.5, recompute="pointwise")
    (usual, *_), (other, *_) = (
        adversary.search("megatrain", "streamed", H200, points=3, progress=lambda *_: None, like=of)
        for of in (adversary.USUAL, like)
    )
    assert (other.precision, other.grad_clip, other.recompute) == ("bf16_split", 0.5, "pointwise")
    assert (other.first_state, other.second_state) == ("bf16_split", "bf16_split")
    assert " tokens, bf16_split, gradients clipped to 0.5, recompute pointwise; " in other.words()
    assert " tokens; " in usual.words() and other.second_s != usual.second_s


def test_a_policy_does_not_lose_to_itself() -> None:
    assert all(loss.ratio == 1.0 for loss in found("streamed", "streamed", points=8))


def test_the_same_seed_finds_the_same_and_searching_on_finds_no_less() -> None:
    few, again, more = (
        searched("megatrain", "streamed", 12),
        searched("megatrain", "streamed", 12),
        found("megatrain", "streamed"),
    )
    assert few == again
    assert more[0].ratio >= few[0].ratio


def test_a_measured_profile_is_refused_before_the_search() -> None:
    step = Workload(micro_batch_size=1, seq_len=16)
    with pytest.raises(InputError, match=r"is a measured profile, .* an adversary needs a datasheet"):
        adversary.search("megatrain", "streamed", timed(presets.load("tiny"), [step]), points=1, progress=print)


def test_every_point_lies_in_the_box() -> None:
    for loss in found("megatrain", "streamed"):
        assert loss.hidden in adversary.SHAPES["hidden"] and loss.seq_len in adversary.SHAPES["seq_len"]
        changed = hardware.override(H200, [part.replace(" ", "=", 1) for part in loss.machine.split(", ")])
        for path, factor in adversary.MACHINE.items():
            now, before = machine.lookup(changed, path), machine.lookup(H200, path)
            assert now is not None and before is not None
            assert before.value / factor * 0.99 <= now.value <= before.value * factor * 1.01


def test_both_directions_have_the_share_of_their_sum_that_the_machine_gives_them() -> None:
    """A GH200's have 320 GB/s together, which either alone exceeds by half."""
    for name in ("gh200", "a100-pcie", "h200"):
        own = hardware.load(name)
        same = hardware.override(own, adversary._changes(own, dict.fromkeys(adversary.MACHINE, 1.0)))
        assert same.links.duplex.value == pytest.approx(own.links.duplex.value, rel=0.01)
        fast = hardware.override(
            own, adversary._changes(own, {**dict.fromkeys(adversary.MACHINE, 1.0), "links.h2d.bandwidth": 0.1})
        )
        assert fast.links.duplex.value >= fast.links.d2h.bandwidth.value


def test_a_drive_is_no_faster_than_a_host_memory_that_is_made_slower() -> None:
    memory = machine.lookup(H200, "host.memory_bandwidth")
    assert memory is not None
    fast = hardware.override(H200, [f"nvme.read={memory.value / 1.5!r}B/s"])
    point = {**dict.fromkeys(adversary.MACHINE, 1.0), "host.memory_bandwidth": 0.5}
    slower = hardware.override(fast, adversary._changes(fast, point))
    assert slower.nvme is not None and slower.nvme.read.value == slower.host.memory_bandwidth.value
    assert slower.nvme.write == fast.nvme.write  # which was below it


def test_points_that_take_too_long_are_left_out() -> None:
    """On a slow machine the large shapes do, and the small ones do not."""
    slow = hardware.override(H200, ["gpu.matmul_flops=300GFLOP/s"])
    both = ("streamed", "resident")
    assert adversary.search(*both, slow, points=10, seed=2, progress=lambda *_: None)
    slower = hardware.override(H200, ["gpu.matmul_flops=1FLOP/s"])
    with pytest.raises(TooLong):
        adversary.search(*both, slower, points=2, progress=lambda *_: None)


def test_bad_input_is_told() -> None:
    with pytest.raises(InputError, match="streamed"):
        found("streamd", "zero3_offload")
    with pytest.raises(InputError, match="at least one point"):
        found("streamed", "megatrain", points=0)
    assert not adversary.frame([]).shape[0]


def test_two_policies_of_one_name_are_refused(tmp_path: Path) -> None:
    """It would tell that mine takes twice as long as mine."""
    files = [tmp_path / folder / "mine.py" for folder in ("a", "b")]
    for file in files:
        file.parent.mkdir()
        file.write_text(EMPTY)
    with pytest.raises(InputError, match="are called alike"):
        found(*map(str, files), points=1)


def test_a_policy_of_ones_own_must_work_and_be_safe(tmp_path: Path) -> None:
    """It was said to fit nowhere where it failed, and to win where it left out work."""
    mine = tmp_path / "mine.py"
    mine.write_text("def policy(model, workload, memory):\n    raise ValueError('not yet')\n")
    with pytest.raises(policies.PolicyError, match=r"mine\.py:2: ValueError: not yet"):
        found(str(mine), "streamed", points=2)
    mine.write_text(EMPTY)
    with pytest.raises(ScheduleError, match="the schedule has no ops"):
        found("streamed", str(mine), points=2)


def test_machines_far_below_todays_have_units_too() -> None:
    assert adversary._told(719_000.0, "B/s") == "719000B/s" and adversary._told(229.0, "bytes") == "229bytes"
    assert adversary._told(5.54e10, "B/s") == "55.4GB/s" and adversary._told(141e9, "bytes") == "141GB"
