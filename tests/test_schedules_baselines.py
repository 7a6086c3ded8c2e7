"""What the baselines move, hold and wait for: each as its own system does (see the policies' files)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_schedules_policies import (
    ROOM,
    TINY,
    blocks,
    device_peak,
    home_bytes_per_param,
    moved,
    phases,
    place,
    workload,
)

from schedules import policies
from schedules.errors import ProgramError
from schedules.kept_activations import Kept, kept_as, most_that_fit
from schedules.op import Kind, Phase, Stream, Tier
from schedules.policies import PolicyError
from schedules.program import Program
from schedules.saved import saved_bytes
from schedules.schedule import Knob, Schedule
from schedules.sweep import spread, sweep, visits
from schedules.verify import ScheduleError, verify
from schedules.workload import MemoryBudget

HOST, DEVICE, NVME = Tier.HOST, Tier.DEVICE, Tier.NVME


def room(device_bytes: int) -> MemoryBudget:
    return MemoryBudget(device_bytes=device_bytes, host_bytes=10**10)


def of_blocks(counts: Counter[str], letter: str, count: int = 4) -> list[int]:
    return [counts[f"{letter}.{i}"] for i in range(count)]


def streams_of(schedule: Schedule, letter: str) -> set[tuple[Stream, bool]]:
    """The streams on which tensors of a class are copied, and whether the host waits for them."""
    return {
        (op.stream, op.blocking)
        for op in schedule.ops
        if op.phase == Phase.COPY and op.reads[0].tensor.startswith(f"{letter}.")
    }


# ---- sweeps


@given(count=st.integers(0, 20), n=st.integers(0, 12))
def test_spread_picks_as_many_as_there_are_and_leaves_even_gaps(count: int, n: int) -> None:
    found = sorted(spread(range(n), count))
    assert len(found) == min(count, n)
    gaps = [b - a for a, b in pairwise(found)]
    assert max(gaps, default=0) - min(gaps, default=0) <= 1
    assert not found or 0 <= (n - 1 - found[-1]) - found[0] <= 1  # as far from one end as from the other


def test_blocks_are_visited_by_all_micro_batches_and_the_last_ones_by_each_in_turn() -> None:
    together, pairs = Kept(on_device=range(4)), Kept(every=2)
    assert visits(together, range(4), turns=3) == [0, 1, 2, 3, 3, 2, 1, 0]
    assert visits(together, range(4), turns=3, singly=1) == [0, 1, 2, *[3, 3] * 3, 2, 1, 0]
    assert visits(pairs, range(4), turns=2) == [0, 1, 2, 3, *[2, 3, 2], *[0, 1, 0]]  # the first of a pair again first
    assert visits(pairs, range(4), turns=2, singly=3) == [0, *[1, 2, 3, 3, *[1, 2, 1]] * 2, 0]


def test_what_blocks_keep_is_said_in_one_word_but_for_the_last_ones() -> None:
    model = blocks(4)
    assert kept_as(model, "keep") == Kept(on_device=range(4))
    assert kept_as(model, "recompute", every=2, keep=1) == Kept(on_device=range(3, 4), every=2)
    assert kept_as(model, "host", keep=1) == Kept(on_device=range(3, 4), on_host=range(3))
    assert kept_as(model, "nvme") == Kept(on_device=range(4, 4), on_nvme=range(4))
    assert kept_as(model, "inputs") == Kept(on_device=range(4, 4), inputs=[0, 1, 2])  # the last is needed at once
    assert kept_as(model, "inputs", keep=2) == Kept(on_device=range(2, 4), inputs=[0, 1])
    assert kept_as(model, "keep", keep=4).on_device == range(4)
    with pytest.raises(ProgramError, match="keep=5: there are 4 blocks"):
        kept_as(model, "keep", keep=5)
    for activations in ("inputs", "keep", "host", "nvme"):
        with pytest.raises(ProgramError, match="every: blocks that share an input, 1 unless they recompute; not 2"):
            kept_as(model, activations, every=2)


@given(
    sizes=st.lists(st.integers(0, 20), min_size=1, max_size=8).map(sorted), guess=st.integers(0, 7), grows=st.booleans()
)
def test_as_many_blocks_keep_their_activations_as_fit_whatever_was_guessed(
    sizes: list[int], guess: int, grows: bool
) -> None:
    class Written(NamedTuple):
        count: int

        def device_room(self, memory: MemoryBudget) -> int:
            return memory.device_bytes - sizes[self.count]

        def blocks_that_fit(self, memory: MemoryBudget, *, copies: Sequence[int]) -> int:
            return min(guess, len(copies))

    for limit in range(21):
        copies = [1] * (len(sizes) - 1)
        found = most_that_fit(Written, TINY, workload(), room(limit), copies=copies, grows=grows)  # type: ignore[arg-type]
        assert found.count == max((n for n, size in enumerate(sizes) if size <= limit), default=0)  # type: ignore[attr-defined]


@given(blocks=st.integers(1, 100), copies=st.integers(1, 8), base=st.integers(0, 60), limit=st.integers(0, 10**3))
def test_three_programs_are_written_where_blocks_take_what_they_keep(
    blocks: int, copies: int, base: int, limit: int
) -> None:
    """With all of them, or none if that has no room; with as many as there is room for; and with one more."""
    one, seen = saved_bytes(TINY, 0, workload()), list[int]()

    class Written(NamedTuple):
        count: int

        def device_room(self, memory: MemoryBudget) -> int:
            seen.append(self.count)
            return memory.device_bytes - (base + max(self.count * copies, 1)) * one

    most_that_fit(Written, TINY, workload(), room(limit * one), copies=[copies] * blocks, grows=True)  # type: ignore[arg-type]
    assert len(seen) <= 3


@pytest.mark.parametrize(
    ("name", "knobs", "whole"),
    [
        ("roundpipe", {}, True),
        ("lohan", {"swap": 1}, True),
        ("lohan", {"inputs": "host"}, True),
        ("zero3_offload", {"reentrant": True}, True),
        ("zero3_offload", {"reentrant": True, "every": 2}, True),
        ("zero_offload", {"reentrant": True}, True),
        ("zero3_offload", {}, False),
        ("zero_offload", {}, False),
    ],
)
def test_a_block_runs_again_to_its_end_where_its_system_does(name: str, knobs: dict[str, Knob], whole: bool) -> None:
    schedule = policies.build(name, TINY, workload(), ROOM, **knobs)
    verify(schedule)
    forward, again = schedule.ops[place(schedule, "F.3.0")].flops, schedule.ops[place(schedule, "R.3.0")].flops
    # the last product of the MLP, of 16 tokens
    assert forward - again == (0 if whole else 2 * 16 * TINY.hidden_size * TINY.intermediate_size)


def test_to_run_a_block_again_to_its_end_takes_no_more_memory() -> None:
    ends, stops = (policies.build("zero3_offload", TINY, workload(), ROOM, reentrant=whole) for whole in (True, False))
    assert ends.buffers == stops.buffers  # of the hidden states, the last block's output is free by then


def test_the_gradient_of_a_tied_table_adds_up_in_one_buffer_from_the_loss_to_the_embedding() -> None:
    p = Program(blocks(2, tied=True), workload(accumulation=2))
    p.keep_on_device(*(tensor for i in p.model.layers for tensor in (p.weight(i), p.state(i))))
    ring, asked = p.slots("grad", 8), []

    def grad(i: int) -> str:
        asked.append(i)
        return ring.next()

    def done(i: int, buffer: str) -> None:
        p.update(i, grad=(buffer, p.grad(i)), stream=Stream.COMPUTE)

    sweep(p, p.workload.microbatches, weights=lambda i: None, grad=grad, done=done, kept=Kept())
    verify(p.build(policy="part"))
    assert asked == [p.model.embed, p.model.head, 1, 0]


def test_what_travels_leaves_at_once_beside_the_next_forward_and_comes_beside_the_backward_before() -> None:
    schedule = policies.build("lohan", blocks(6), workload(accumulation=1), ROOM, swap=6)
    assert sum(b.name.startswith("saved") for b in schedule.buffers) == 2  # one in use, one under way
    for i in range(5):
        assert place(schedule, f"F.{i}.0") < place(schedule, f"O.s.{i}.0") < place(schedule, f"F.{i + 1}.0")
        assert place(schedule, f"P.s.{i}.0") < place(schedule, f"B.{i + 1}.0")
    waits = {(w.op, w.on) for w in schedule.waits}
    assert ("F.3.0", "O.s.1.0") in waits  # not that of block 2, which is still on its way
    assert ("F.3.0", "O.s.2.0") not in waits


# ---- gemini


def test_gemini_static_fetches_the_master_first_and_keeps_no_chunk() -> None:
    schedule = policies.build("gemini", TINY, workload(accumulation=1), ROOM)
    # two halves of the fp32 master in the forward, the bf16 chunk in the backward
    assert of_blocks(moved(schedule, HOST, DEVICE, "w"), "w") == [3, 3, 3, 3]
    assert of_blocks(moved(schedule, DEVICE, HOST, "w"), "w") == [1, 1, 1, 1]
    assert streams_of(schedule, "w") == {(Stream.COMPUTE, True)}
    assert streams_of(schedule, "g") == {(Stream.D2H, False)}
    assert place(schedule, "O.w.1") < place(schedule, "P.w.2") < place(schedule, "F.2.0")
    assert schedule.workload.precision == "bf16_fp32"
    assert home_bytes_per_param(schedule, HOST) == 16


def test_gemini_with_fp32_has_no_cast_and_no_newer_chunk() -> None:
    schedule = policies.build("gemini", TINY, workload(accumulation=1, precision="fp32"), ROOM)
    assert of_blocks(moved(schedule, HOST, DEVICE, "w"), "w") == [2, 2, 2, 2]
    assert not moved(schedule, DEVICE, HOST, "w") and not phases(schedule)[Phase.CAST]


def test_gemini_auto_keeps_the_chunks_that_are_needed_next() -> None:
    model, step = blocks(6), workload(accumulation=1)
    everything = policies.build("gemini", model, step, ROOM, placement="auto")
    assert of_blocks(moved(everything, HOST, DEVICE, "w"), "w", 6) == [2] * 6
    assert not moved(everything, DEVICE, HOST, "w")
    size = next(b.nbytes for b in everything.buffers if b.name == "chunk0")
    for chunks in range(1, 6):
        budget = device_peak(everything) - (6 - chunks) * size
        some = policies.build("gemini", model, step, room(-(-budget * 10 // 9)), placement="auto")
        assert sum(b.name.startswith("chunk") for b in some.buffers) == chunks
        # the last ones of the forward are found by the backward; the others went down for them
        assert of_blocks(moved(some, HOST, DEVICE, "w"), "w", 6) == [3] * (6 - chunks) + [2] * chunks
        assert of_blocks(moved(some, DEVICE, HOST, "w"), "w", 6) == [1] * (6 - chunks) + [0] * chunks


def test_gemini_brings_the_sum_up_for_each_later_micro_batch() -> None:
    schedule = policies.build("gemini", TINY, workload(accumulation=3), ROOM)
    assert of_blocks(moved(schedule, DEVICE, HOST, "g"), "g") == [3] * 4
    assert of_blocks(moved(schedule, HOST, DEVICE, "g"), "g") == [2] * 4
    assert not phases(schedule)[Phase.ACCUMULATE]


@pytest.mark.parametrize("placement", ["static", "auto"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ahead", [1, 2, 9])
def test_gemini_fetches_ahead_on_request(ahead: int, tied: bool, placement: str) -> None:
    model, step = blocks(4, tied=tied), workload(accumulation=2, clip=1.0)
    schedule = policies.build("gemini", model, step, ROOM, placement=placement, max_prefetch=ahead)
    verify(schedule)
    up = [op for op in schedule.ops if op.kind == Kind.PREFETCH and op.name.startswith("P.w.")]
    assert {(op.stream, op.blocking) for op in up} == {(Stream.COMPUTE, True), (Stream.H2D, False)}
    assert {op.layer for op in up if op.blocking} == {model.embed}  # nothing runs before it
    assert place(schedule, "P.w.1") < place(schedule, "F.0.0") < place(schedule, "C.w.1") < place(schedule, "F.1.0")
    usual = policies.build("gemini", model, step, ROOM, placement=placement)
    assert phases(schedule)[Phase.CAST] == phases(usual)[Phase.CAST] == len(model.layers)
    assert moved(schedule, DEVICE, HOST, "w")["w.0"] == moved(usual, DEVICE, HOST, "w")["w.0"]


@pytest.mark.parametrize("ahead", [0, 1, 3, 5])
@pytest.mark.parametrize("count", [5, 8])
def test_gemini_brings_no_layer_twice_that_is_still_coming(count: int, ahead: int) -> None:
    schedule = policies.build("gemini", blocks(count), workload(accumulation=1), ROOM, max_prefetch=ahead)
    verify(schedule)
    loads = of_blocks(moved(schedule, HOST, DEVICE, "w"), "w")
    assert max(loads) <= 3  # the halves of the master, and once more for the backward


def test_gemini_folds_clipping_into_an_adam_that_runs_alone() -> None:
    schedule = policies.build("gemini", TINY, workload(clip=1.0), ROOM)
    assert not phases(schedule)[Phase.SCALE]
    for op in schedule.ops:
        if op.phase == Phase.ADAM:
            assert op.stream == Stream.HOST and place(schedule, op.name) > place(schedule, "H.backward")


# ---- fsdp_offload


def test_fsdp_fetches_blocks_for_both_directions_and_the_root_once() -> None:
    schedule = policies.build("fsdp_offload", TINY, workload(accumulation=3), ROOM)
    loads = moved(schedule, HOST, DEVICE, "w")
    assert of_blocks(loads, "w") == [2 * 3] * 4
    assert loads["w.embed"] == loads["w.head"] == 3
    assert home_bytes_per_param(schedule, HOST) == 12


def test_fsdp_could_fetch_one_block_ahead() -> None:
    schedule = policies.build("fsdp_offload", TINY, workload(accumulation=1), ROOM, prefetch=True)
    assert place(schedule, "P.w.1") < place(schedule, "F.0.0") < place(schedule, "P.w.2")
    assert place(schedule, "P.w.2#2") < place(schedule, "B.3.0") < place(schedule, "P.w.1#2")


def test_fsdp_waits_for_a_gradient_that_it_must_add() -> None:
    schedule = policies.build("fsdp_offload", TINY, workload(accumulation=2), ROOM)
    copies = [op for op in schedule.ops if op.phase == Phase.COPY and op.reads[0].tensor.startswith("g.")]
    assert [op.blocking for op in copies] == [False] * 6 + [True] * 6
    added = [op for op in schedule.ops if op.phase == Phase.ACCUMULATE]
    assert len(added) == 6 and {op.stream for op in added} == {Stream.HOST}


def test_fsdp_on_one_gpu_brings_a_block_when_it_is_about_to_run() -> None:
    schedule = policies.build("fsdp_offload", TINY, workload(accumulation=2, clip=1.0), ROOM)
    verify(schedule)
    assert streams_of(schedule, "w") == {(Stream.COMPUTE, False)}
    assert place(schedule, "F.0.0") < place(schedule, "P.w.1") < place(schedule, "F.1.0")
    assert of_blocks(moved(schedule, HOST, DEVICE, "w"), "w") == [4] * 4


def test_fsdp_adds_gradients_up_on_the_device_until_they_are_synchronized() -> None:
    schedule = policies.build("fsdp_offload", TINY, workload(accumulation=3, clip=1.0), ROOM, gradient_sync=False)
    verify(schedule)
    assert set(moved(schedule, DEVICE, HOST, "g").values()) == {1}
    assert streams_of(schedule, "g") == {(Stream.D2H, False)} and not phases(schedule)[Phase.ACCUMULATE]
    assert place(schedule, "B.3.2") < place(schedule, "O.g.3") < place(schedule, "B.2.2")


def test_fsdp_clips_and_updates_on_the_host_after_the_backward() -> None:
    schedule = policies.build("fsdp_offload", TINY, workload(clip=1.0), ROOM)
    tail = [op.phase for op in schedule.ops[place(schedule, "H.backward#2") + 1 :]]
    assert tail == [Phase.NORM] + [Phase.SCALE] * 6 + [Phase.ADAM] * 6
    assert {op.stream for op in schedule.ops if op.kind == Kind.UPDATE} == {Stream.HOST}


# ---- torchao_offload


def test_torchao_uploads_each_layer_beside_the_next_ones_adam_in_order_of_landing() -> None:
    schedule = policies.build("torchao_offload", TINY, workload(accumulation=1), ROOM)
    tail = [op.name for op in schedule.ops[place(schedule, "H.backward") + 1 :]]
    order = ["head", "3", "2", "1", "0", "embed"]
    assert tail == [name for layer in order for name in (f"U.{layer}", f"P.w.{layer}")] + ["H.stream"]
    assert streams_of(schedule, "w") == streams_of(schedule, "g") == {(Stream.D2H, False)}
    assert home_bytes_per_param(schedule, HOST) == 12
    assert home_bytes_per_param(schedule, DEVICE) == 4


def test_torchao_copies_the_growing_sum_after_every_micro_batch() -> None:
    schedule = policies.build("torchao_offload", TINY, workload(accumulation=3), ROOM)
    assert set(moved(schedule, DEVICE, HOST, "g").values()) == {3}
    assert not phases(schedule)[Phase.ACCUMULATE]


def test_torchao_run_ahead_starts_adam_when_the_first_gradient_has_landed() -> None:
    behind, ahead = (
        policies.build("torchao_offload", TINY, workload(accumulation=1), ROOM, run_ahead=run_ahead)
        for run_ahead in (False, True)
    )
    assert {op.name for op in behind.ops} - {op.name for op in ahead.ops} == {"H.backward"}
    assert [w.on for w in ahead.waits_of["U.head"]] == ["O.g.head"]


def test_torchao_frees_gradients_but_then_cannot_accumulate() -> None:
    model = blocks(8)
    kept, freed = (
        policies.build("torchao_offload", model, workload(accumulation=1), ROOM, offload_gradients=offload, keep=0)
        for offload in (False, True)
    )
    verify(freed)
    size = next(b.nbytes for b in kept.buffers if b.name == "device.g.0")
    assert kept.allocated_bytes(DEVICE) - freed.allocated_bytes(DEVICE) == (8 - 2) * size
    with pytest.raises(PolicyError, match="cannot accumulate"):
        policies.build("torchao_offload", model, workload(accumulation=2), ROOM, offload_gradients=True)


# ---- paged_optimizer


def test_paged_optimizer_pages_no_state_where_all_fit() -> None:
    schedule = policies.build("paged_optimizer", TINY, workload(), ROOM)
    assert home_bytes_per_param(schedule, DEVICE) == 12
    assert not moved(schedule, HOST, DEVICE, "o")


def test_paged_optimizer_moves_what_does_not_fit_once_each_way() -> None:
    model, step = blocks(6), workload()
    peak = device_peak(policies.build("paged_optimizer", model, step, ROOM, keep=0))
    for paged in range(3, 8):
        with_pages = policies.build("paged_optimizer", model, step, ROOM, keep=0, pressure=paged / 8)
        budget = device_peak(with_pages)
        schedule = policies.build("paged_optimizer", model, step, room(min(budget, peak - 1)), keep=0)
        assert schedule.digest == with_pages.digest
        states = Counter(f"o.{model.layer_name(i)}" for i in model.layers[:paged])
        assert moved(schedule, HOST, DEVICE, "o") == moved(schedule, DEVICE, HOST, "o") == states
        assert device_peak(schedule) <= budget


def test_paged_optimizer_updates_on_the_device_one_layer_after_the_other() -> None:
    schedule = policies.build("paged_optimizer", TINY, workload(clip=1.0), ROOM, pressure=1.0)
    updates = [op for op in schedule.ops if op.phase == Phase.ADAM]
    assert [op.layer for op in updates] == list(TINY.layers)
    assert {op.stream for op in updates} == {Stream.COMPUTE}
    for before, after in pairwise(TINY.layer_name(i) for i in TINY.layers):
        assert place(schedule, f"U.{before}") < place(schedule, f"H.{before}") < place(schedule, f"P.o.{after}")


@pytest.mark.parametrize(("name", "knobs"), [("paged_optimizer", {"pressure": 1.5}), ("greedysnake", {"alpha": -0.5})])
def test_a_fraction_is_between_zero_and_one(name: str, knobs: dict[str, Knob]) -> None:
    with pytest.raises(PolicyError, match="from 0 to 1"):
        policies.build(name, TINY, workload(), ROOM, **knobs)


# ---- llmq

LLMQ = ("nothing", "moment", "states", "inputs", "weights", "gradients")


@pytest.mark.parametrize("clip", [None, 1.0])
def test_llmq_updates_everything_on_the_device_once_all_gradients_are_there(clip: float | None) -> None:
    schedule = policies.build("llmq", TINY, workload(clip=clip), ROOM)
    assert home_bytes_per_param(schedule, DEVICE) == 12 and not moved(schedule, HOST, DEVICE, *"wgo")
    updates = [op for op in schedule.ops if op.phase == Phase.ADAM]
    assert [op.layer for op in updates] == list(TINY.layers)
    assert {op.stream for op in schedule.ops} == {Stream.COMPUTE, Stream.HOST}
    assert place(schedule, "B.embed.1") < place(schedule, "N.embed") < place(schedule, "N.head")
    assert place(schedule, "N.head") < place(schedule, "U.embed") < place(schedule, "H.step")
    assert phases(schedule)[Phase.SYNC] == 1


def test_llmq_fetches_states_for_the_update_those_of_embedding_and_head_in_pieces() -> None:
    schedule = policies.build("llmq", TINY, workload(), ROOM, offload="states")
    names = [f"o.{i}" for i in TINY.blocks] + [f"o.{end}.{part}of8" for end in ("embed", "head") for part in range(8)]
    assert moved(schedule, HOST, DEVICE, "o") == moved(schedule, DEVICE, HOST, "o") == Counter(names)
    assert not moved(schedule, HOST, DEVICE, *"wgx")
    copies = {op.name: op.stream for op in schedule.ops if op.kind == Kind.PREFETCH}
    assert copies["P.o.0"] == Stream.H2D and copies["P.o.head.0of8"] == Stream.COMPUTE
    assert home_bytes_per_param(schedule, DEVICE) == 4 and home_bytes_per_param(schedule, HOST) == 8


def test_llmq_fetches_one_of_two_moments_as_half_of_the_elements_of_each_layer() -> None:
    schedule = policies.build("llmq", TINY, workload(), ROOM, offload="moment")
    names = [f"o.{i}.1of2" for i in TINY.blocks]
    names += [f"o.{end}.{part}of8" for end in ("embed", "head") for part in range(4, 8)]
    assert moved(schedule, HOST, DEVICE, "o") == moved(schedule, DEVICE, HOST, "o") == Counter(names)
    # the first of two parts is as much shorter as the length of parts is rounded down
    assert home_bytes_per_param(schedule, DEVICE) == pytest.approx(8, rel=0.01)


@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_llmq_offloads_inputs_whatever_blocks_keep(activations: str) -> None:
    schedule = policies.build("llmq", TINY, workload(), ROOM, offload="inputs", activations=activations)
    names = [f"x.{layer}.{m}" for layer in ("0", "1", "2") for m in range(2)]  # not the embedding's output
    assert moved(schedule, DEVICE, HOST, "x") == moved(schedule, HOST, DEVICE, "x") == Counter(names)
    assert phases(schedule)[Phase.RECOMPUTE] == (8 if activations == "recompute" else 0)


def test_llmq_streams_weights_and_fetches_them_once_more_for_the_update() -> None:
    schedule = policies.build("llmq", TINY, workload(), ROOM, offload="weights")
    up = moved(schedule, HOST, DEVICE, "w")
    # of the two blocks at each turn the weights still stand; embedding and head take turns in one buffer
    assert of_blocks(up, "w") == [4, 4, 3, 3] and up["w.embed"] == up["w.head"] == 3
    assert set(moved(schedule, DEVICE, HOST, "w").values()) == {1}
    tied = policies.build("llmq", blocks(4, tied=True), workload(), ROOM, offload="weights")
    assert moved(tied, HOST, DEVICE, "w")["w.embed"] == 2  # it stays for the head


@pytest.mark.parametrize("clip", [None, 1.0])
def test_llmq_adds_to_sums_that_lie_on_the_host(clip: float | None) -> None:
    schedule = policies.build("llmq", TINY, workload(accumulation=3, clip=clip), ROOM, offload="gradients")
    assert of_blocks(moved(schedule, DEVICE, HOST, "g"), "g") == [3] * 4  # after each micro-batch
    assert of_blocks(moved(schedule, HOST, DEVICE, "g"), "g") == [4] * 4  # two sums, the norm and the update
    first, second = (schedule.ops[place(schedule, name)] for name in ("O.g.0", "O.g.0#2"))
    assert (first.stream, second.stream) == (Stream.COMPUTE, Stream.D2H)
    assert phases(schedule)[Phase.ACCUMULATE] == 2 * 4
    assert home_bytes_per_param(schedule, DEVICE) * sum(map(TINY.params, TINY.layers)) == 2 * (
        TINY.params(TINY.embed) + TINY.params(TINY.head)
    )


def test_llmq_offloads_no_more_than_the_device_has_no_room_for() -> None:
    model, step = blocks(12), workload(seq_len=64)
    steps = [policies.build("llmq", model, step, ROOM, offload=level) for level in LLMQ]
    peaks = [device_peak(schedule) for schedule in steps]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == len(LLMQ)
    for schedule, peak in zip(steps, peaks, strict=True):
        assert policies.build("llmq", model, step, room(peak)).digest == schedule.digest
    assert policies.build("llmq", model, step, room(1)).digest == steps[-1].digest


# ---- lohan


@pytest.mark.parametrize("swap", [0, 2, 4])
def test_lohan_swaps_some_blocks_and_recomputes_the_others(swap: int) -> None:
    schedule = policies.build("lohan", TINY, workload(accumulation=2), ROOM, swap=swap)
    out, back = moved(schedule, DEVICE, HOST, "s"), moved(schedule, HOST, DEVICE, "s")
    assert out == back and out.total() == 2 * swap
    assert phases(schedule)[Phase.RECOMPUTE] == 2 * (4 - swap)


def test_lohan_keeps_inputs_on_the_host_on_request() -> None:
    schedule = policies.build("lohan", blocks(4), workload(accumulation=2), ROOM, swap=1, inputs="host")
    verify(schedule)
    (swapped,) = spread(range(4), 1)
    assert moved(schedule, DEVICE, HOST, "x") == moved(schedule, HOST, DEVICE, "x")
    assert set(moved(schedule, DEVICE, HOST, "x")) == {
        f"x.{schedule.model.layer_name(i - 1)}.{m}" for i in range(3) if i != swapped for m in range(2)
    }


def test_lohan_holds_no_gradients_on_the_host_unless_they_must_add_up_or_wait() -> None:
    def held(accumulation: int, clip: float | None = None) -> set[str]:
        schedule = policies.build("lohan", TINY, workload(accumulation=accumulation, clip=clip), ROOM)
        return {b.name for b in schedule.buffers if b.name.startswith("host.g.")} - {"host.g.embed", "host.g.head"}

    assert held(1) == set()
    assert len(held(2)) == len(held(1, clip=1.0)) == 4


def test_lohan_updates_each_block_before_the_backward_of_the_next() -> None:
    schedule = policies.build("lohan", TINY, workload(accumulation=2), ROOM)
    assert place(schedule, "B.3.1") < place(schedule, "U.3") < place(schedule, "B.2.1")
    assert schedule.ops[-1].name == "H.step"


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("name", ["lohan", "greedysnake"])
def test_from_a_drive_weights_come_for_each_use_and_states_once(name: str, clip: float | None) -> None:
    schedule = policies.build(name, blocks(5), workload(accumulation=1, clip=clip), ROOM, ssd=True)
    verify(schedule)
    assert home_bytes_per_param(replace(schedule), HOST) < 10
    drive = sum(b.nbytes for b in schedule.buffers if b.tier == NVME)
    assert drive == 10 * schedule.model.total_params
    # forward, backward (two are still in their slots) and update
    assert of_blocks(moved(schedule, NVME, HOST, "w"), "w", 5) == [3, 3, 3, 2, 2]
    for letter in "wo":
        assert set(moved(schedule, HOST, NVME, letter).values()) == {1}
    assert set(moved(schedule, NVME, HOST, "o").values()) == {1}


# ---- greedysnake


def test_greedysnake_moves_checkpoints_in_place_of_weights_and_gradients() -> None:
    schedule = policies.build("greedysnake", TINY, workload(accumulation=3), ROOM)
    assert max(moved(schedule, HOST, DEVICE, "w").values()) == 2
    assert set(moved(schedule, DEVICE, HOST, "g").values()) == {1}
    inputs = Counter(f"x.{layer}.{m}" for layer in ("embed", "0", "1") for m in range(3))  # not the last block's
    assert moved(schedule, DEVICE, HOST, "x") == moved(schedule, HOST, DEVICE, "x") == inputs


def test_greedysnake_defers_updates_that_only_their_own_layer_waits_for() -> None:
    schedule = policies.build("greedysnake", blocks(8), workload(), ROOM, alpha=0.5)
    last_backward = place(schedule, "B.embed.1")
    late = [op for op in schedule.ops if op.phase == Phase.ADAM and place(schedule, op.name) > last_backward]
    assert [op.layer for op in late] == [-1, *sorted(spread(range(8), 4))]
    for op in late[1:]:
        waiting = {w.op for w in schedule.waits if w.on == op.name}
        # its weights are fetched from where it writes them, its gradient lands where it reads it
        assert waiting <= {f"P.w.{op.layer}", f"O.g.{op.layer}"} and f"P.w.{op.layer}" in waiting


# ---- roundpipe


def test_roundpipe_declares_its_staleness_and_is_refused_without() -> None:
    schedule = policies.build("roundpipe", TINY, workload(), ROOM)
    assert verify(schedule).schedule.label == "roundpipe (stale by 1)"
    with pytest.raises(ScheduleError, match="version 0 where version 1 is due") as raised:
        verify(replace(schedule, staleness=0))
    assert {v.rule for v in raised.value.violations} == {"stale read"}


def test_roundpipe_in_step_is_exact() -> None:
    schedule = policies.build("roundpipe", TINY, workload(clip=1.0), ROOM, is_async=False)
    assert schedule.staleness == 0 and schedule.label == "roundpipe"
    verify(schedule)


def test_roundpipe_uploads_what_the_update_does_not_touch() -> None:
    schedule = policies.build("roundpipe", TINY, workload(), ROOM)
    uploaded = {op.reads[0].buffer for op in schedule.ops if op.name.startswith("P.w.")}
    updated = {a.buffer for op in schedule.ops if op.phase == Phase.ADAM for a in op.writes}
    assert uploaded and not uploaded & updated
    for i in map(TINY.layer_name, TINY.layers):
        assert place(schedule, f"C.w.{i}") < place(schedule, f"U.{i}")
    assert home_bytes_per_param(schedule, HOST) == pytest.approx(18, rel=0.2)  # and the stages' inputs


# ---- streamed, with activations on the host


@given(
    layers=st.integers(1, 7),
    accumulation=st.integers(1, 2),
    offload=st.integers(0, 7),
    slack=st.integers(0, 10),
    order=st.sampled_from(["layers", "microbatches"]),
)
@settings(max_examples=40)
def test_streamed_fits_with_activations_on_the_host(
    layers: int, accumulation: int, offload: int, slack: int, order: str
) -> None:
    model, step = blocks(layers), workload(accumulation=accumulation, seq_len=32)
    knobs: dict[str, Knob] = {"offload": min(offload, layers), "order": order}
    least = policies.build("streamed", model, step, ROOM, keep=0, **knobs)
    budget = device_peak(least) + slack * Program(model, step).nbytes("s.0.0") // 2
    schedule = policies.build("streamed", model, step, room(budget), **knobs)
    verify(schedule)
    assert device_peak(schedule) <= budget
    again = {op.layer for op in schedule.ops if op.phase == Phase.RECOMPUTE}
    travelled = moved(schedule, DEVICE, HOST, "s")
    assert set(travelled.values()) <= {1}
    on_host = {int(tensor.split(".")[1]) for tensor in travelled}
    assert not again & on_host
    assert len(on_host) == min(offload, len(again) + len(on_host))
