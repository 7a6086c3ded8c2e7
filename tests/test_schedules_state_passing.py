"""State that passes through the device: it comes before its block has run backward, a part at a time."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from schedules import policies, presets
from schedules.model import ModelSpec
from schedules.op import Kind, Op, Phase, Stream, Tier
from schedules.schedule import Schedule
from schedules.state_passing import AHEAD, _spaced
from schedules.tensor import parse
from schedules.verify import verify
from schedules.workload import MemoryBudget, Workload

ROOM = MemoryBudget(device_bytes=1 << 30, host_bytes=1 << 30, nvme_bytes=1 << 30)
BLOCKS = 16


def model() -> ModelSpec:
    return replace(presets.load("tiny"), num_hidden_layers=BLOCKS)


def passing(*, through: int, parts: int, nvme: int = 0) -> Schedule:
    step = Workload(micro_batch_size=1, seq_len=8)
    schedule = policies.build("streamed", model(), step, ROOM, keep=0, through=through, parts=parts, nvme=nvme)
    verify(schedule)
    return schedule


def of_state(op: Op) -> bool:
    return op.phase == Phase.COPY and parse(op.reads[0].tensor).cls == "o"


def states_up(schedule: Schedule) -> list[tuple[int, Op]]:
    """Copies of states to the device, each with its place in the program."""
    return [(at, op) for at, op in enumerate(schedule.ops) if op.stream == Stream.H2D and of_state(op)]


def backwards(schedule: Schedule) -> dict[int | None, int]:
    """Where each block's backward stands in the program."""
    return {op.layer: at for at, op in enumerate(schedule.ops) if op.phase == Phase.BACKWARD}


def test_the_last_part_comes_two_visits_before_its_block_runs_backward() -> None:
    schedule = passing(through=4, parts=4)
    back = backwards(schedule)
    for block in {op.layer for _, op in states_up(schedule)}:
        last = max(at for at, op in states_up(schedule) if op.layer == block)
        assert last < back[block]
        assert sum(last < at < back[block] for at in back.values()) == AHEAD


def test_few_come_between_two_visits() -> None:
    schedule = passing(through=4, parts=4)  # 16 parts, 16 blocks: one, and one more that had to wait for its buffer
    visits = sorted(backwards(schedule).values())
    up = [at for at, _ in states_up(schedule)]
    assert len(up) == 16
    assert all(sum(a < at < b for at in up) <= 2 for a, b in pairwise(visits))


def test_there_is_one_buffer_more_than_parts() -> None:
    for parts in (1, 2, 4):
        buffers = {b.name for b in passing(through=4, parts=parts).buffers if b.tier == Tier.DEVICE}
        assert sum(name.startswith("state") for name in buffers) == parts + 1


def test_where_all_pass_they_come_as_buffers_get_free() -> None:
    """The verifier has seen that none is overwritten; here: none is left out, and all go back."""
    schedule = passing(through=BLOCKS, parts=3)
    names = {f"o.{i}.{part}of3" for i in range(BLOCKS) for part in range(3)}
    assert {op.reads[0].tensor for _, op in states_up(schedule)} == names
    down = [op for op in schedule.ops if op.kind == Kind.OFFLOAD and of_state(op)]
    assert {op.reads[0].tensor for op in down} == names and len(down) == len(names)


def test_a_part_that_lives_on_the_drive_is_read_before_and_written_after() -> None:
    schedule = passing(through=4, parts=2, nvme=2 * BLOCKS)
    place = {op.name: at for at, op in enumerate(schedule.ops) if of_state(op)}
    read = {op.reads[0].tensor: at for at, op in enumerate(schedule.ops) if op.stream == Stream.NVME_READ}
    written = {op.reads[0].tensor: at for at, op in enumerate(schedule.ops) if op.stream == Stream.NVME_WRITE}
    assert states_up(schedule)
    for at, op in states_up(schedule):
        tensor = op.reads[0].tensor
        assert read[tensor] < at < place[f"O.{tensor}"] < written[tensor]


@given(st.lists(st.integers(0, 30), max_size=40), st.integers(1, 20))
def test_what_is_due_comes_as_late_as_can_be(due: list[int], blocks: int) -> None:
    due = sorted(due)
    most, begin = -(-len(due) // blocks), _spaced(due, blocks)
    assert begin == sorted(begin) and len(begin) == len(due)
    assert all(at <= needed for at, needed in zip(begin, due, strict=True))
    assert all(begin.count(at) <= most for at in begin)
    for n, (at, needed) in enumerate(zip(begin, due, strict=True)):  # later by one would be too late, or too many
        assert at == needed or begin[n + 1 :].count(at + 1) == most
