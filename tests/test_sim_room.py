"""How much must be on a drive: the least that is enough, found by few schedules, whatever a part more takes away."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedules import presets
from schedules.op import Tier
from schedules.saved import saved_bytes
from schedules.sizes import tensor_bytes
from schedules.workload import MemoryBudget, Workload
from sim import hardware
from sim.candidate import OURS, Candidate
from sim.prediction import memory_of
from sim.room import Room, orders, state_of_block, ways_to_part

MODEL = replace(presets.load("qwen2.5-7b"), num_hidden_layers=20, vocab_size=8192)
BLOCKS, PARTS = MODEL.num_hidden_layers, 2
MOST = BLOCKS * (PARTS + 1)  # parts of states, then weights
STEP = Workload(micro_batch_size=1, seq_len=512)
PART, WEIGHTS = state_of_block(MODEL, STEP) // PARTS, tensor_bytes("w.0", MODEL, STEP)


class Weighed(Room):
    """Room in which a candidate lacks as many bytes of the host as `lacking` says of what it has on the drive."""

    def __init__(self, lacking: Callable[[int], int]) -> None:
        profile = hardware.load("rtx4090")
        super().__init__(MODEL, profile, memory_of(profile))
        self.lacking, self.asked = lacking, list[int]()

    def _over(self, tier: Tier, candidate: Candidate) -> int | None:
        assert tier == Tier.HOST
        self.asked.append(on_the_drive(candidate))
        return self.lacking(self.asked[-1])


def on_the_drive(candidate: Candidate) -> int:
    return candidate.count("nvme") + candidate.count("nvme_weights")


def with_on_the_drive(count: int) -> Candidate:
    of_states = min(count, BLOCKS * PARTS)
    knobs = {"nvme": of_states, "nvme_weights": count - of_states, "parts": PARTS}
    return Candidate(policy=OURS, workload=STEP).with_knobs(knobs)


@given(
    begin=st.integers(1, MOST),
    gains=st.lists(st.sampled_from([0, 0, 1, PART // 2, PART, 3 * PART]), min_size=MOST, max_size=MOST),
    spare=st.integers(0, MOST * PART),
)
def test_no_more_is_on_the_drive_than_the_host_has_no_room_for(begin: int, gains: list[int], spare: int) -> None:
    """Whatever each part more takes off the host: nothing, where its buffer has room for what another leaves."""
    room = Weighed(lambda count: sum(gains[count:]) - spare)
    found = on_the_drive(room.rebalanced(with_on_the_drive(begin)))
    enough = [count for count in range(MOST + 1) if room.lacking(count) <= 0]
    one = PART if found <= BLOCKS * PARTS else WEIGHTS  # one less would lack something, if it took as much as it is
    assert found == enough[0] or (found in enough and room.lacking(found) > -one)
    assert len(set(room.asked)) == len(room.asked) <= 2 * math.log2(MOST)


@pytest.mark.parametrize("begin", [1, 30, MOST])
def test_where_nothing_is_enough_all_stays_as_it_was(begin: int) -> None:
    room = Weighed(lambda count: (2 * MOST - count) * PART)
    assert room.rebalanced(with_on_the_drive(begin)) == with_on_the_drive(begin)
    assert len(room.asked) <= 2


def test_a_part_that_takes_nothing_off_the_host_is_not_followed_by_each_of_the_others() -> None:
    """As of 14B on an RTX 5090, at 64k tokens a step: 112 parts more had the host lack what one did."""
    room = Weighed(lambda count: PART // 8 - PART * max(count - 29, 0))
    assert on_the_drive(room.rebalanced(with_on_the_drive(2))) == 30
    assert len(room.asked) < 10


def test_of_fewer_parts_no_more_are_on_the_drive_than_there_are() -> None:
    room = Weighed(lambda count: (30 - count) * PART)
    many = with_on_the_drive(MOST).with_knobs({"nvme": 2 * PARTS * BLOCKS})
    assert on_the_drive(room.rebalanced(many)) == 30 and max(room.asked) <= MOST


# ---- what there is to choose from, and how much of it the device has room for

START = Candidate(policy=OURS, workload=STEP)


def beside(start: Candidate, spare: int) -> Room:
    """Room for a candidate that keeps no activations, and for so many bytes more on the device."""
    profile = hardware.load("rtx4090")
    peaks = Room(MODEL, profile, memory_of(profile)).peaks(start.with_knobs({"keep": 0}))
    assert peaks is not None
    return Room(MODEL, profile, MemoryBudget(device_bytes=peaks[Tier.DEVICE] + spare, host_bytes=1 << 40))


def test_micro_batches_pass_in_either_order_where_there_are_several_and_gradients_may_be_sums() -> None:
    several = replace(STEP, accumulation=2)
    assert orders(STEP) == orders(replace(several, optimizer="muon")) == ("layers",)
    assert orders(several) == ("layers", "microbatches")


def test_a_state_is_divided_until_its_parts_gain_nothing_or_are_too_many() -> None:
    assert ways_to_part(MODEL, STEP) == (1, 2, 4, 8, 16)  # 2.8 GB a block
    assert ways_to_part(presets.load("llama-3.1-70b"), STEP) == (1, 2, 4, 8)  # of 80 blocks 640 parts
    assert ways_to_part(presets.load("tiny"), STEP) == (1,)
    assert ways_to_part(MODEL, replace(STEP, optimizer="muon")) == (1,)


def test_what_cannot_be_built_has_room_nowhere() -> None:
    endless = Candidate(policy=OURS, workload=replace(STEP, accumulation=10**6))
    room = beside(START, 0)
    assert room.peaks(endless) is None and not any(room.on(tier, endless) for tier in Tier)
    assert room.holds(endless) == [] and room.stays(endless) == 0
    assert room.rebalanced(endless.with_knobs({"nvme": 1})) == endless.with_knobs({"nvme": 1})


def test_no_more_layers_live_on_the_device_than_there_are() -> None:
    assert beside(START, 1 << 40).residents(START) == (0, len(MODEL.layers))
    assert beside(START, -1).most_residents(START) == -1


@pytest.mark.parametrize("order", ["layers", "microbatches"])
def test_blocks_whose_weights_stay_are_as_many_as_have_room_beside_all_activations_and_beside_none(order: str) -> None:
    start = Candidate(policy=OURS, workload=replace(STEP, accumulation=2)).with_knobs({"order": order})
    weights, gradient = (tensor_bytes(f"{cls}.0", MODEL, STEP) for cls in "wg")
    one = weights + (gradient if order == "microbatches" else 0)
    activations = BLOCKS * saved_bytes(MODEL, 0, STEP) * (1 if order == "microbatches" else 2)
    for spare in (one - 1, one, 3 * one - 1, 3 * one, activations + one - 1, activations + 5 * one, 1 << 45):
        rooms = (spare - activations, spare)
        fitting = (max((n for n in range(BLOCKS + 1) if n * one <= room), default=0) for room in rooms)
        assert beside(start, spare).holds(start) == sorted({*fitting} - {0})


def test_what_is_left_of_a_block_whose_state_stays_in_part_passes_through_two_buffers() -> None:
    """What of a state stays needs no buffer; one block's parts stay all, or two at least must pass."""
    parted = START.with_knobs({"parts": PARTS})
    without = beside(parted, 0).stays(parted)
    assert without == 0
    for there, stay in ((2, 2), (3, 2), (4, 4), (7, 6)):
        assert beside(parted, there * PART).stays(parted) == stay
    assert beside(parted, 1 << 40).stays(parted) == BLOCKS * PARTS
    assert beside(START, 3 * PARTS * PART).stays(START) == 3


def test_no_more_is_on_a_drive_than_that_has_room_for() -> None:
    profile = hardware.load("rtx4090")
    for nbytes, count in ((5 * PART, 5), (5 * PART - 1, 4), (0, 0), (1 << 45, 12)):
        budget = MemoryBudget(device_bytes=1 << 40, host_bytes=1 << 40, nvme_bytes=nbytes)
        assert Room(MODEL, profile, budget).within_the_drive(with_on_the_drive(12)) == with_on_the_drive(count)


class Sending(Room):
    """Room in which the host lacks the activations of so many blocks, less those that are sent on."""

    def __init__(self, blocks: int) -> None:
        profile = hardware.load("rtx4090")
        super().__init__(MODEL, profile, memory_of(profile))
        self.blocks = blocks

    def _over(self, tier: Tier, candidate: Candidate) -> int | None:
        assert tier == Tier.HOST and candidate.count("keep") == 0
        return (self.blocks - candidate.count("nvme_offload")) * saved_bytes(MODEL, 0, STEP)


@pytest.mark.parametrize(("offload", "lacking", "sent_on"), [(10, 6, 6), (10, 1, 1), (10, 0, 0), (4, 6, 4), (0, 6, 0)])
def test_no_more_activations_go_on_than_the_host_has_no_room_for(offload: int, lacking: int, sent_on: int) -> None:
    for before in (0, 3):
        start = START.with_knobs({"offload": offload, "nvme_offload": before})
        assert Sending(lacking).rebalanced(start) == start.with_knobs({"nvme_offload": sent_on})
