"""State that passes through the device: it comes before its block is updated there, a part at a time."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedules import policies, presets
from schedules.model import ModelSpec
from schedules.op import Kind, Op, Phase, Stream, Tier
from schedules.schedule import Knob, Schedule
from schedules.state_passing import AHEAD, _spaced
from schedules.tensor import parse
from schedules.verify import verify
from schedules.workload import MemoryBudget, Workload

ROOM = MemoryBudget(device_bytes=1 << 30, host_bytes=1 << 30, nvme_bytes=1 << 30)
BLOCKS = 16


def model() -> ModelSpec:
    return replace(presets.load("tiny"), num_hidden_layers=BLOCKS)


def passing(
    *, accumulation: int = 1, precision: str = "bf16", clip: float | None = None, keep: int = 0, **knobs: Knob
) -> Schedule:
    step = Workload(micro_batch_size=1, accumulation=accumulation, seq_len=8, precision=precision, grad_clip=clip)
    schedule = policies.build("streamed", model(), step, ROOM, keep=keep, **knobs)
    verify(schedule)
    return schedule


def slots(schedule: Schedule, kind: str) -> int:
    """Device buffers of a ring."""
    return sum(b.tier == Tier.DEVICE and b.name.startswith(kind) for b in schedule.buffers)


def updated_between(schedule: Schedule, block: int, visits: int = 1) -> list[list[str]]:
    """Updates of a block on the device: after its backward, and after each micro-batch of the next blocks', so many;
    with clipping after each forward of the block before."""
    ops = schedule.streams[Stream.COMPUTE]
    place = {op.name: at for at, op in enumerate(ops)}
    last = schedule.workload.accumulation - 1
    then = [(block - n, m) for n in range(1, visits + 1) for m in range(last + 1)]
    ends = [place[f"B.{block}.{last}"], *(place[f"B.{i}.{m}"] for i, m in then)]
    if schedule.workload.grad_clip is not None:
        ends = [*(place[f"F.{block - 1}.{m}"] for m in range(last + 1)), place[f"F.{block}.0"]]
    names = {op.name for op in ops if op.phase == Phase.ADAM and op.layer == block}
    found = [[op.name for op in ops[a:b] if op.name in names] for a, b in pairwise(ends)]
    assert sum(map(len, found)) == len(names)
    return found


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
        assert slots(passing(through=4, parts=parts), "state") == parts + 1


@pytest.mark.parametrize("parts", [4, 11])
def test_with_clipping_it_is_updated_as_gradually_before_its_forward(parts: int) -> None:
    """The last part just before; no slot more, since its weights are there for its forward anyway."""
    schedule = passing(accumulation=4, through=4, parts=parts, clip=1.0)
    at_once = -(-parts // 4)
    assert [slots(schedule, kind) for kind in ("state", "weight")] == [2 * at_once + 1, 2]
    blocks = {op.layer for _, op in states_up(schedule)}
    assert len(blocks) == 4
    for block in blocks - {0}:
        found = updated_between(schedule, block)
        names = [f"U.{block}.{part}of{parts}" for part in range(parts)]
        assert found == [names[n : n + at_once] for n in range(0, parts, at_once)]


def test_gradients_that_add_up_on_the_device_stay_there_until_the_next_forward() -> None:
    schedule = passing(accumulation=4, hold=4, through=4, order="microbatches", clip=1.0)
    updated = {op.layer for _, op in states_up(schedule)}
    home = {b.name for b in schedule.buffers if b.tier == Tier.HOST}
    assert len(updated) == 4 and not {f"host.g.{i}" for i in updated} & home
    assert {f"N.{i}" for i in updated} <= {op.name for op in schedule.streams[Stream.COMPUTE]}


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


def test_beside_micro_batches_a_state_passes_through_few_buffers_a_part_before_each() -> None:
    """Four parts beside four micro-batches: one at a time, the next to come, and one that leaves."""
    schedule = passing(accumulation=4, through=BLOCKS, parts=4)
    assert [slots(schedule, kind) for kind in ("state", "weight", "grad")] == [3, 3, 2]
    for block in range(1, BLOCKS):
        assert updated_between(schedule, block) == [[f"U.{block}.{part}of4"] for part in range(4)]


@pytest.mark.parametrize("parts", [1, 2, 4, 16])
def test_with_room_for_one_gradient_a_state_has_passed_before_the_next_block_runs(parts: int) -> None:
    schedule = passing(accumulation=4, through=BLOCKS, parts=parts, grad_slots=1)
    verify(schedule)
    assert [slots(schedule, kind) for kind in ("state", "weight", "grad")] == [min(parts, 2) + 1, 2, 1]
    place = {op.name: at for at, op in enumerate(schedule.ops)}
    for block in range(1, BLOCKS):
        of_part = [f"U.{block}.{n}of{parts}" for n in range(parts)] if parts > 1 else [f"U.{block}"]
        of_block = [place[name] for name in of_part]
        backward = [place[f"B.{i}.{m}"] for i in (block, block - 1) for m in range(4)]
        assert max(backward[:4]) < min(of_block) <= max(of_block) < min(backward[4:])


@pytest.mark.parametrize(("through", "parts", "counts"), [(4, 4, [1, 0] * 4), (8, 4, [1, 0] * 4), (4, 16, [2] * 8)])
def test_where_the_next_is_two_visits_away_or_more_an_update_takes_two(
    through: int, parts: int, counts: list[int]
) -> None:
    """So that links are as busy beside blocks that the CPU updates. No slot more: what is in use is passed over."""
    schedule = passing(accumulation=4, through=through, parts=parts)
    assert [slots(schedule, kind) for kind in ("weight", "grad")] == [3, 2]
    blocks = sorted({op.layer for _, op in states_up(schedule) if op.layer is not None})
    assert len(blocks) == through and min(b - a for a, b in pairwise(blocks)) >= 2
    for block in [block for block in blocks if block > 1]:
        found = updated_between(schedule, block, visits=2)
        assert [len(names) for names in found] == counts
        assert [name for names in found for name in names] == [f"U.{block}.{part}of{parts}" for part in range(parts)]


@pytest.mark.parametrize("through", [4, BLOCKS // 2, BLOCKS])
def test_what_is_updated_last_has_the_turns_that_are_left(through: int) -> None:
    schedule = passing(accumulation=4, through=through, parts=4)
    place = {op.name: at for at, op in enumerate(schedule.streams[Stream.COMPUTE])}
    block = min(op.layer for _, op in states_up(schedule) if op.layer)
    assert block in (1, 2) or through == 4
    assert place[f"U.{block}.3of4"] < place["B.embed.0"]


def test_of_more_parts_than_micro_batches_several_are_updated_before_each() -> None:
    schedule = passing(accumulation=4, through=BLOCKS, parts=11)  # three at a time, and two of the last
    assert slots(schedule, "state") == 7
    for block in range(1, BLOCKS):
        assert [len(names) for names in updated_between(schedule, block)] == [3, 3, 3, 2]


@pytest.mark.parametrize("through", [1, BLOCKS])
def test_what_is_brought_for_a_gradual_update_comes_two_micro_batches_before_or_three(through: int) -> None:
    schedule = passing(accumulation=4, through=through, parts=4)
    micro_batches = [at for at, op in enumerate(schedule.ops) if op.phase == Phase.BACKWARD]
    place = {op.name: at for at, op in enumerate(schedule.ops)}
    ahead = Counter[int]()
    for at, op in states_up(schedule):
        update = place[op.name.replace("P.o", "U")]
        ahead[sum(at < ran < update for ran in micro_batches)] += 1
    # where all come, there is no buffer before, but for the first three; and the last block is updated at once
    assert ahead == ({AHEAD + 1: 4} if through == 1 else {AHEAD + 1: 3, AHEAD: 4 * BLOCKS - 6, 1: 1, 0: 2})


@pytest.mark.parametrize(
    ("accumulation", "parts", "precision"),
    [
        (4, 2, "bf16"),  # all of a state would be there anyway
        (2, 4, "bf16"),
        (4, 4, "bf16_8bit"),  # two parts of the state take less than the weights, which stay longer
        (1, 8, "bf16"),
    ],
)
def test_where_that_spares_no_memory_a_block_is_updated_at_once(accumulation: int, parts: int, precision: str) -> None:
    schedule = passing(accumulation=accumulation, through=4, parts=parts, precision=precision)
    assert (slots(schedule, "state"), slots(schedule, "weight")) == (parts + 1, 2)
    for block in {op.layer for _, op in states_up(schedule)}:
        assert [len(names) for names in updated_between(schedule, block)] == [parts] + [0] * (accumulation - 1)


def test_nor_beside_held_weights_which_need_no_slot() -> None:
    schedule = passing(accumulation=2, through=4, hold=4, parts=4)
    for block in {op.layer for _, op in states_up(schedule)} - {0}:  # beside whose update no block runs
        assert [len(names) for names in updated_between(schedule, block)] == [4, 0]


def test_weights_leave_before_the_states_that_were_updated_with_them() -> None:
    """Others come into their slot next; for a state's buffer nothing waits as soon."""
    schedule = passing(through=4, parts=4)
    down = [op.name for op in schedule.streams[Stream.D2H]]
    for block in {op.layer for _, op in states_up(schedule)}:
        states = [down.index(f"O.o.{block}.{part}of4") for part in range(4)]
        assert down.index(f"O.w.{block}") < min(states) and states == sorted(states)


@pytest.mark.parametrize("knobs", [{"accumulation": 4}, {"accumulation": 4, "order": "microbatches"}, {"singly": 9}])
def test_held_weights_whose_states_pass_never_move(knobs: dict[str, Knob]) -> None:
    schedule = passing(**{"accumulation": 2, **knobs}, through=5, hold=5, parts=4, defer=2)  # type: ignore[arg-type]
    held = {op.layer for _, op in states_up(schedule)}
    assert len(held) == 5
    moved = [parse(op.reads[0].tensor) for op in schedule.ops if op.phase == Phase.COPY]
    assert not [name for name in moved if name.cls == "w" and name.layer in {str(i) for i in held}]
    homes = {b.name for b in schedule.buffers if b.tier == Tier.DEVICE}
    assert homes >= {f"device.w.{i}" for i in held}
    # their gradients do not leave either, and states come and go once
    assert not [name for name in moved if name.cls.startswith("g") and name.layer in {str(i) for i in held}]
    assert Counter(name.layer for name in moved if name.cls == "o") == dict.fromkeys(map(str, held), 8)


def test_held_weights_need_no_slot_more_while_their_block_is_updated_gradually() -> None:
    held = passing(accumulation=4, through=4, hold=4, parts=4)
    assert [slots(held, kind) for kind in ("state", "weight", "grad")] == [3, 2, 2]
    for block in {op.layer for _, op in states_up(held)} - {0, 1}:
        found = updated_between(held, block, visits=2)
        assert found == [names for part in range(4) for names in ([f"U.{block}.{part}of4"], [])]
    both = passing(accumulation=4, through=6, hold=4, parts=4)
    assert [slots(both, kind) for kind in ("state", "weight", "grad")] == [3, 3, 2]


@pytest.mark.parametrize(("hold", "gradually"), [(4, 3), (3, 4), (0, 5)])
def test_a_block_whose_state_stays_is_updated_at_once_beside_others_that_are_not(hold: int, gradually: int) -> None:
    """One of which a half stays is, too, where its weights would need a slot more that no other has."""
    schedule = passing(accumulation=4, through=4, hold=hold, parts=4, stay=6)
    updated = [op for op in schedule.ops if op.phase == Phase.ADAM and op.stream == Stream.COMPUTE]
    blocks = {op.layer for op in updated if op.layer}
    found = [tuple(map(len, updated_between(schedule, block, visits=2))) for block in blocks if block > 1]
    found += [tuple(map(len, updated_between(schedule, 1))) for block in blocks if block == 1]
    assert Counter(counts[0] for counts in found) == {1: gradually, 4: len(blocks) - gradually}
    assert len(blocks) > gradually and all(max(counts) == counts[0] for counts in found)


def test_of_one_block_a_few_parts_pass_through_two_buffers() -> None:
    schedule = passing(parts=4, stay=5)
    assert len(states_up(schedule)) == 3 and slots(schedule, "state") == 2


def test_held_blocks_that_run_micro_batches_one_by_one_are_updated_at_once() -> None:
    """There would be too few turns for all: after the last of them block 0 alone runs."""
    schedule = passing(accumulation=3, singly=BLOCKS - 1, hold=BLOCKS - 1, through=BLOCKS - 2, parts=8)
    ops = [op.name for op in schedule.streams[Stream.COMPUTE]]
    for block in {op.layer for _, op in states_up(schedule)}:
        at = ops.index(f"B.{block}.2")
        assert ops[at + 1 : at + 9] == [f"U.{block}.{part}of8" for part in range(8)]


@pytest.mark.parametrize(("accumulation", "first"), [(1, [0]), (2, [0, 1])])
def test_held_blocks_whose_states_pass_begin_with_the_first(accumulation: int, first: list[int]) -> None:
    """The next forward begins with these, and what the CPU updates has longer."""
    schedule = passing(accumulation=accumulation, hold=4, through=3, parts=4)
    passed = sorted({op.layer for _, op in states_up(schedule) if op.layer is not None})
    assert len(passed) == 3 and passed[: len(first)] == first and passed[len(first)] > len(first)
    assert sum(buffer.name.startswith("device.w") for buffer in schedule.buffers) == 3


@pytest.mark.parametrize("every", [1, 2])
def test_the_block_that_runs_last_is_updated_before_the_embedding_runs_backward(every: int) -> None:
    """No micro-batch of a block follows: the weights go back first, since the next step begins with them."""
    schedule = passing(accumulation=4, through=BLOCKS, parts=4, every=every)
    names = [op.name for op in schedule.streams[Stream.COMPUTE]]
    assert names.index("U.0.3of4") < names.index("B.embed.0")


def test_weights_on_a_drive_are_updated_gradually_where_they_stand_in_the_host() -> None:
    """Not read again for that: what comes from the drive is a block's weights for both directions, and its state."""
    drive = passing(accumulation=4, through=BLOCKS, parts=4, nvme=4 * BLOCKS, nvme_weights=BLOCKS, slots=1)
    read = Counter(op.reads[0].tensor for op in drive.ops if op.stream == Stream.NVME_READ)
    assert all(read[f"w.{i}"] <= 2 and read[f"o.{i}.{part}of4"] == 1 for i in range(BLOCKS) for part in range(4))


@given(st.lists(st.integers(0, 30), max_size=40), st.integers(1, 20))
def test_what_is_due_comes_as_late_as_can_be_in_its_order(due: list[int], turns: int) -> None:
    most, begin = -(-len(due) // turns), _spaced(due, turns)
    due = [min(due[n:]) for n in range(len(due))]  # what comes first must be there before what follows it
    assert begin == sorted(begin) and len(begin) == len(due)
    assert all(at <= needed for at, needed in zip(begin, due, strict=True))
    assert all(begin.count(at) <= most for at in begin)
    for n, (at, needed) in enumerate(zip(begin, due, strict=True)):  # later by one would be too late, or too many
        assert at == needed or begin[n + 1 :].count(at + 1) == most
