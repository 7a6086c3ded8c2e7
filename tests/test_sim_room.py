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
from schedules.sizes import tensor_bytes
from schedules.workload import Workload
from sim import hardware
from sim.candidate import OURS, Candidate
from sim.prediction import memory_of
from sim.room import Room, state_of_block

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
