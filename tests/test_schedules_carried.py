"""Gradients carried from one step to the next: exact training, and each way to get it wrong is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hand_written import small
from hypothesis import given
from hypothesis import strategies as st

from schedules import policies
from schedules.carried import carried
from schedules.errors import ProgramError
from schedules.hazards import minimal_waits
from schedules.op import Op, Phase, Stream, Tier
from schedules.program import Program
from schedules.schedule import Schedule
from schedules.tensor import parts
from schedules.verify import ScheduleError, verify
from schedules.violation import Violation
from schedules.workload import MemoryBudget, Workload

MODEL = small(blocks=3)
PLAIN = Workload(micro_batch_size=1, seq_len=8, precision="fp32")
CLIPPED = replace(PLAIN, grad_clip=1.0)
ROOM = MemoryBudget(device_bytes=1 << 40, host_bytes=1 << 40, nvme_bytes=1 << 40)


def fused(workload: Workload, *, of: int = 1, scaled: bool = False, norm_first: bool = False) -> Schedule:
    """Blocks stream, and are updated on the device before their forward, in so many parts; the others on the CPU.

    `scaled`: gradients are clipped where they are; `norm_first`: the step begins by taking their norm.
    """
    p, clips = Program(MODEL, workload), workload.grad_clip is not None
    weights, grads, states = p.slots("weight", 2), p.slots("grad", 2), p.slots("state", 2)
    if norm_first:
        p.norm(p.at_home(p.grad(i)) for i in MODEL.layers)
        for i in (MODEL.embed, MODEL.head):
            p.update(i, carried=True)
    for i in MODEL.layers[:-1]:
        slot = p.load(p.weight(i), weights)
        if i in MODEL.blocks:
            came = p.prefetch(p.grad(i), into=grads.next())
            if scaled:
                p.scale(i, grad=(came, p.grad(i)), stream=Stream.COMPUTE)
            for part in parts(of):
                state = p.prefetch(p.state(i, part), into=states.next())
                where = {"grad": (came, p.grad(i)), "weights": slot, "state": state, "part": part, "scaled": scaled}
                p.update(i, stream=Stream.COMPUTE, carried=True, **where)
                p.offload(p.state(i, part), out_of=state)
            p.offload(p.weight(i), out_of=slot)
        for m in workload.microbatches:
            p.forward(i, m, weights=slot)
    for i in reversed(MODEL.layers):
        slot, grad = p.load(p.weight(i), weights), grads.next()
        for m in workload.microbatches:
            if i == MODEL.head:
                p.loss(m, weights=slot, grad=grad)
            elif i == MODEL.embed:
                p.backward(i, m, grad=grad)
            else:
                p.backward(i, m, weights=slot, grad=grad)
        p.offload(p.grad(i), out_of=grad)
    if norm_first:
        return p.build(policy="fused")
    if clips:
        p.norm(p.at_home(p.grad(i)) for i in MODEL.layers)
    for i in (MODEL.embed, MODEL.head):
        p.update(i)
    return p.build(policy="fused")


def problems(schedule: Schedule) -> list[Violation]:
    with pytest.raises(ScheduleError) as error:
        verify(schedule)
    return error.value.violations


def changed(schedule: Schedule, change: Callable[[list[Op]], None]) -> Schedule:
    """The schedule with other ops, or in another order, and the waits that these need."""
    ops = list(schedule.ops)
    change(ops)
    return replace(schedule, ops=tuple(ops), waits=minimal_waits(ops))


def place(ops: list[Op], name: str) -> int:
    return next(at for at, op in enumerate(ops) if op.name == name)


WAYS = [{"of": 1}, {"of": 3}, {"scaled": True}, {"norm_first": True}]


@pytest.mark.parametrize("workload", [PLAIN, CLIPPED, replace(CLIPPED, accumulation=3)], ids=str)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_step_may_begin_with_the_updates_of_the_step_before(workload: Workload, way: dict[str, int]) -> None:
    if workload.grad_clip is None and way != {"of": 1}:
        way = {"of": 2}
    schedule = fused(workload, **way)
    verified = verify(schedule)
    assert set(verified.behind.values()) == {0}, "training is exact"
    grads = {f"host.g.{i}": f"g.{i}" for i in MODEL.blocks}
    if "norm_first" in way:  # which then takes all of them
        grads |= {"host.g.embed": "g.embed", "host.g.head": "g.head"}
    norm = {"norm": "norm"} if workload.grad_clip is not None and "norm_first" not in way else {}
    assert verified.carried == grads | norm
    assert not {tensor[0] for tensor in verified.initial.values()} - {"w", "o"}


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_wait_matters(way: dict[str, int]) -> None:
    schedule = fused(CLIPPED, **way)
    for i, wait in enumerate(schedule.waits):
        found = problems(replace(schedule, waits=schedule.waits[:i] + schedule.waits[i + 1 :]))
        assert {v.rule for v in found} == {"race"}, wait


def test_which_gradients_are_carried_and_until_when() -> None:
    schedule = fused(CLIPPED)
    made = {MODEL.layer_name(i): schedule.index[f"B.{i}.0"] for i in MODEL.blocks}
    assert carried(MODEL, schedule.ops) == made
    assert carried(MODEL, policies.build("streamed", MODEL, CLIPPED, ROOM).ops) == {}


def test_an_update_after_the_forward_comes_too_late() -> None:
    def late(ops: list[Op]) -> None:
        ops.insert(place(ops, "F.1.0"), ops.pop(place(ops, "U.1")))

    found = {v.op: v for v in problems(changed(fused(CLIPPED), late)) if v.rule == "stale read"}
    assert "without the gradient of the step before, due first; P.w.1 wrote it" in found["F.1.0"].message
    assert found["F.1.0"].fix.startswith("bring w.1 up to date between P.w.1 and F.1.0")


def test_a_gradient_that_waits_must_not_be_cleared_before_it_is_used() -> None:
    def cleared(ops: list[Op]) -> None:
        p = Program(MODEL, CLIPPED)
        p.zero(1, grad=p.at_home(p.grad(1)))
        ops[:0] = p.build(policy="zero").ops

    found = {v.op: v for v in problems(changed(fused(CLIPPED), cleared))}
    assert "in version 0 where version -1 is due (counted in steps); Z.g.1 wrote it" in found["P.g.1"].message


def test_a_norm_that_an_update_clips_by_is_of_the_gradients_that_it_applies() -> None:
    """Blocks are updated by the norm of the step before; the embedding at the end of a step by that step's."""

    def last(ops: list[Op]) -> None:
        ops.append(ops.pop(place(ops, "N")))

    found = problems(changed(fused(CLIPPED), last))
    assert ("stale read", "U.embed", "norm") in {(v.rule, v.op, v.buffer) for v in found}
    found = problems(changed(fused(CLIPPED), lambda ops: ops.pop(place(ops, "N"))))
    assert {(v.rule, v.op) for v in found} == {("gradient clipping", "U.0")}, "told once"


def staying(change: Callable[[Op], Op] = lambda op: op) -> Schedule:
    """All on the device; the first thing in a step is what the step before left to be done."""
    p = Program(MODEL, PLAIN)
    for i in MODEL.layers:
        p.keep_on_device(p.weight(i), p.state(i), p.grad(i))
        p.update(i, stream=Stream.COMPUTE, carried=True)
    for i in MODEL.layers[:-1]:
        p.forward(i)
    p.loss()
    for i in reversed(MODEL.layers[:-1]):
        p.backward(i)
    schedule = p.build(policy="staying")
    return changed(schedule, lambda ops: ops.__setitem__(slice(None), [change(op) for op in ops]))


def test_a_new_gradient_is_not_added_to_the_one_that_was_applied() -> None:
    verify(staying())

    def adds(op: Op) -> Op:
        kept = [access for access in op.writes if access.tensor == "g.1"]
        return replace(op, reads=(*op.reads, *kept)) if op.name == "B.1.0" else op

    found = problems(staying(adds))
    assert ("stale read", "B.1.0", "device.g.1") in {(v.rule, v.op, v.buffer) for v in found}


def stored(passes: int) -> Schedule:
    """Each micro-batch's gradient of block 0 goes to a buffer of its own; the next step begins by adding them up."""
    p = Program(MODEL, replace(PLAIN, accumulation=passes))
    slot, grad, total = p.buffer("weight"), p.buffer("grad"), p.buffer("sum", Tier.HOST)
    found = [p.buffer(f"host.{m}", Tier.HOST) for m in p.workload.microbatches]
    others = [i for i in MODEL.layers if i != 0]
    p.keep_on_device(*(t for i in others for t in (p.weight(i), p.state(i), p.grad(i))))
    for buffer in found:
        p.accumulate(0, out_of=buffer, into=total, wide=True)
    p.update(0, grad=(total, p.grad(0, wide=True)), carried=True)
    p.load(p.weight(0), slot)
    for m, buffer in zip(p.workload.microbatches, found, strict=True):
        for i in MODEL.layers[:-1]:
            p.forward(i, m, weights=slot if i == 0 else None)
        p.loss(m)
        for i in reversed(MODEL.layers[:-1]):
            p.backward(i, m, weights=slot if i == 0 else None, grad=grad if i == 0 else None)
        p.offload(p.grad(0), out_of=grad, into=buffer)
        p.discard(grad)
    for i in others:
        p.update(i, stream=Stream.COMPUTE)
    return p.build(policy="stored")


def test_a_gradient_of_the_step_before_may_be_stored_before_it_is_applied() -> None:
    assert verify(stored(1)).carried == {"host.0": "g.0"}


def test_what_is_left_of_a_gradient_is_all_of_it() -> None:
    """What is applied between two steps is one gradient, not several to be added up."""
    found = {v.op: v for v in problems(stored(2))}
    assert "with 0.0, 0.1 more than once" in found["U.0"].message


def test_an_update_says_that_its_gradient_is_carried() -> None:
    p = Program(MODEL, PLAIN)
    with pytest.raises(ProgramError, match=r'update\(1\) reads the gradient of layer 1 from .* offload\("g.1"'):
        p.update(1)


def test_who_says_that_exact_weights_are_stale_is_told() -> None:
    found = problems(replace(fused(PLAIN), staleness=1))
    assert [v.rule for v in found] == ["staleness"] and "found one of 0" in found[0].message


@st.composite
def clipped_steps(draw: st.DrawFn) -> tuple[Schedule, dict[str, int]]:
    """Steps of `streamed` with clipping."""
    blocks = draw(st.integers(1, 6))
    workload = replace(CLIPPED, accumulation=draw(st.integers(1, 4)))
    ways = draw(st.integers(1, 4))
    knobs = {name: draw(st.integers(0, blocks)) for name in ("hold", "through", "singly", "resident", "offload")}
    knobs |= {name: draw(st.integers(1, 3)) for name in ("slots", "grad_slots", "slabs", "slack", "every")}
    knobs |= {"parts": ways, "stay": draw(st.integers(0, blocks * ways)), "nvme": draw(st.integers(0, blocks))}
    order = draw(st.sampled_from(["layers", "microbatches"]))
    return policies.build("streamed", small(blocks=blocks), workload, ROOM, order=order, keep=0, **knobs), knobs


@given(clipped_steps())
def test_with_clipping_blocks_are_updated_on_the_device_before_their_forward(
    case: tuple[Schedule, dict[str, int]],
) -> None:
    schedule, knobs = case
    verified = verify(schedule)
    model, index = schedule.model, schedule.index
    before, after = set[int](), set[int]()
    for op in schedule.ops:
        if op.phase == Phase.ADAM and op.layer is not None and op.stream == Stream.COMPUTE:
            forward = "L.head.0" if op.layer == model.head else f"F.{model.layer_name(op.layer)}.0"
            (before if index[op.name] < index[forward] else after).add(op.layer)
    assert after == set(model.layers[: knobs["resident"]]), "resident layers as soon as the norm is known"
    assert {f"g.{i}" for i in before} == set(verified.carried.values()) - {"norm"}


@given(clipped_steps())
def test_gradients_that_come_back_need_no_buffers_of_their_own(case: tuple[Schedule, dict[str, int]]) -> None:
    schedule, knobs = case
    coming = [op for op in schedule.ops if op.stream == Stream.H2D and op.reads[0].tensor.startswith("g.")]
    slots = {b.name for b in schedule.buffers if b.tier == Tier.DEVICE and b.name.startswith("grad")}
    assert {access.buffer for op in coming for access in op.writes} <= slots
    assert len(slots) <= max(knobs["grad_slots"], 2)
