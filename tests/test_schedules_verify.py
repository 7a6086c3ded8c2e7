"""The verifier: what is safe passes, and each kind of fault is found and told well."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hand_written import on_device, small, two_slots

from schedules import policies
from schedules.amounts import Amounts
from schedules.hazards import minimal_waits
from schedules.op import Access, Buffer, Kind, Op, Phase, Stream, Tier, Wait
from schedules.presets import load
from schedules.program import Program
from schedules.ring import Ring
from schedules.schedule import Schedule
from schedules.tensor import GRAD, SAVED, parse
from schedules.verify import ScheduleError, verify
from schedules.violation import Violation
from schedules.workload import MemoryBudget, Workload

MODEL = replace(load("tiny"), num_hidden_layers=3)
CLIPPED = Workload(micro_batch_size=1, seq_len=8, precision="fp32", grad_clip=1.0)
PLAIN = replace(CLIPPED, grad_clip=None)
ROOM = MemoryBudget(device_bytes=1 << 30, host_bytes=1 << 30, nvme_bytes=1 << 30)


def streaming(workload: Workload = PLAIN, accumulation: int = 1) -> Program:
    """Two weight slots, two gradient slots, every layer streamed."""
    p = Program(MODEL, replace(workload, accumulation=accumulation))
    weights, grads = p.slots("weight", 2), p.slots("grad", 2)
    for i in MODEL.layers[:-1]:
        slot = p.load(p.weight(i), weights)
        for m in p.workload.microbatches:
            p.forward(i, m, weights=slot)
    backward(p, weights, grads)
    if workload.grad_clip is not None:
        p.norm(p.at_home(p.grad(i)) for i in MODEL.layers)
        for i in MODEL.layers:
            p.update(i)
    return p


def backward(p: Program, weights: Ring, grads: Ring) -> None:
    for i in reversed(MODEL.layers):
        slot = None if i == MODEL.embed else p.load(p.weight(i), weights)
        grad = grads.next()
        for m in p.workload.microbatches:
            if i == MODEL.head:
                p.loss(m, weights=slot, grad=grad)
            else:
                p.backward(i, m, weights=slot, grad=grad)
        p.offload(p.grad(i), out_of=grad)
        if p.workload.grad_clip is None:
            p.update(i)


def problems(schedule: Schedule) -> list[Violation]:
    with pytest.raises(ScheduleError) as error:
        verify(schedule)
    assert schedule.short_digest in str(error.value)
    return error.value.violations


def edit(schedule: Schedule, name: str, change: Callable[[Op], Op]) -> Schedule:
    ops = tuple(change(op) if op.name == name else op for op in schedule.ops)
    return replace(schedule, ops=ops)


def without(schedule: Schedule, name: str) -> Schedule:
    """The schedule with one op left out, and its waits handed on so that only the contents are wrong."""
    ops = tuple(op for op in schedule.ops if op.name != name)
    waits = tuple(w for w in schedule.waits if name not in (w.op, w.on))
    return replace(schedule, ops=ops, waits=waits)


@pytest.mark.parametrize("workload", [PLAIN, CLIPPED])
@pytest.mark.parametrize("accumulation", [1, 3, 11])  # of eleven, the last one's name is not the last in the alphabet
def test_a_sound_schedule_passes(workload: Workload, accumulation: int) -> None:
    schedule = streaming(workload, accumulation).build(policy="streaming")
    verified = verify(schedule)
    assert verified.fingerprint == schedule.fingerprint
    assert set(verified.initial.values()) == {f"{c}.{MODEL.layer_name(i)}" for c in "wo" for i in MODEL.layers}
    slots = 2 * max(MODEL.params(i) for i in MODEL.layers) * 4
    grads = slots
    hidden = sum(b.nbytes for b in schedule.buffers if b.name.startswith(("hidden", "saved")))
    assert verified.allocated_bytes()[Tier.DEVICE] == slots + grads + hidden


@pytest.mark.parametrize("workload", [PLAIN, CLIPPED])
def test_every_wait_matters(workload: Workload) -> None:
    schedule = streaming(workload, 2).build(policy="streaming")
    for i, wait in enumerate(schedule.waits):
        found = problems(replace(schedule, waits=schedule.waits[:i] + schedule.waits[i + 1 :]))
        assert {v.rule for v in found} == {"race"}
        assert any(wait.op == v.op and wait.on == v.on for v in found), wait


def test_a_race_names_ops_buffer_tensors_and_the_missing_wait() -> None:
    schedule = streaming().build(policy="streaming")
    wait = Wait(op="P.w.1", on="F.embed.0", distance=0)
    assert wait in schedule.waits
    with pytest.raises(ScheduleError) as error:
        verify(replace(schedule, waits=tuple(w for w in schedule.waits if w != wait)))
    told = str(error.value)
    assert "race on weight0: P.w.1 overwrites the weights of layer embed while F.embed.0 may still read it" in told
    assert "nothing orders F.embed.0 before P.w.1; add  wait P.w.1 on F.embed.0\n" in told
    assert "the same for" not in told
    assert "P.w.1 -> weight0" in told and "<-- here" in told


def test_each_kind_of_race_is_told_in_its_own_words() -> None:
    p = Program(MODEL, PLAIN)
    weights, grads = p.slots("weight", 2), p.slots("grad", 2)
    for i in MODEL.layers[:-1]:
        p.forward(i, weights=p.load(p.weight(i), weights))
    backward(p, weights, grads)
    twice = p.buffer("twice", Tier.HOST)  # written on two streams, and never read
    p.offload(p.weight(0), out_of=p.home(p.weight(0)), into=twice, stream=Stream.CPU)
    p.offload(p.weight(1), out_of=p.home(p.weight(1)), into=twice, stream=Stream.NVME_WRITE)
    # the weights are not the first that F.0.0 reads, and are named all the same
    schedule = edit(p.build(policy="twice"), "F.0.0", lambda op: replace(op, reads=op.reads[::-1]))
    verify(schedule)

    def told(op: str, on: str) -> set[str]:
        waits = tuple(wait for wait in schedule.waits if (wait.op, wait.on) != (op, on))
        assert len(waits) == len(schedule.waits) - 1, f"{op} waits for {on}"
        return {v.message for v in problems(replace(schedule, waits=waits)) if v.rule == "race"}

    assert "F.0.0 reads the weights of layer 0 while P.w.0 may still be writing" in told("F.0.0", "P.w.0")
    assert "P.w.1 overwrites the weights of layer embed while F.embed.0 may still read it" in told("P.w.1", "F.embed.0")
    assert "O.w.1 writes the weights of layer 1 while O.w.0 may still be writing there" in told("O.w.1", "O.w.0")


def test_a_race_across_the_step_is_told_with_its_distance() -> None:
    schedule = streaming().build(policy="streaming")
    wait = Wait(op="P.w.embed", on="U.embed", distance=1)
    found = problems(replace(schedule, waits=tuple(w for w in schedule.waits if w != wait)))
    assert any("U.embed of the step before" in str(v) and "at distance 1" in v.fix for v in found)


def test_reading_a_slot_that_holds_another_layer() -> None:
    schedule = streaming().build(policy="streaming")

    def other_slot(op: Op) -> Op:
        reads = tuple(Access("weight0", a.tensor) if a.tensor == "w.0" else a for a in op.reads)
        return replace(op, reads=reads)

    found = problems(edit(schedule, "F.0.0", other_slot))
    stale = [v for v in found if v.rule == "stale read"]
    assert [(v.op, v.on, v.buffer) for v in stale] == [("F.0.0", "P.w.embed", "weight0")]
    assert "reads the weights of layer 0 from weight0, which then holds the weights of layer embed" in str(stale[0])


def test_weights_that_missed_an_update_are_stale() -> None:
    """A copy that stays on the device is right in the first step and one update old in the second."""
    p = streaming()
    p2 = Program(MODEL, PLAIN)
    weights, grads = p2.slots("weight", 2), p2.slots("grad", 2)
    p2.buffer("resident")
    for i in MODEL.layers[:-1]:
        p2.forward(i, weights="resident" if i == 0 else p2.load(p2.weight(i), weights))
    backward(p2, weights, grads)
    verify(p.build(policy="fresh"))
    found = problems(p2.build(policy="stale"))
    assert [(v.rule, v.op) for v in found] == [("stale read", "F.0.0"), ("stale read", "B.0.0")]
    assert "version 0 where version 1 is due" in str(found[0])
    assert found[0].fix.startswith("bring w.0 up to date ") and found[0].fix.endswith(", or declare the staleness")
    assert "its forward read version 0" in str(found[1])
    declared = replace(p2.build(policy="stale"), staleness=1)
    assert any("version 0 where version 2" in str(v) for v in problems(declared)), "two is more than declared"


def test_what_a_step_reads_before_it_makes_it_is_told_to_be_kept_by_nothing() -> None:
    """A backward may not use what the step before computed."""
    schedule = streaming().build(policy="streaming")
    early = [op for op in schedule.ops if op.name != "B.2.0"]
    early.insert(0, schedule.ops[schedule.index["B.2.0"]])
    found = problems(replace(schedule, ops=tuple(early), waits=minimal_waits(early)))
    lacks = (
        "which then holds nothing: L.head.0 writes it later in the step, and only weights, adapters, optimizer state "
        "and the gradients of updates that a step begins with are kept from one step to the next"
    )
    assert any(v.op == "B.2.0" and v.message.endswith(lacks) for v in found)


def behind(steps: int, *, declared: int) -> Schedule:
    """Block 0 computes with weights that have gone through so many copies, one a step."""
    p = Program(MODEL, PLAIN, staleness=declared)
    weights, grads = p.slots("weight", 2), p.slots("grad", 2)
    copies = [p.buffer(f"copy{n}", Tier.HOST) for n in range(steps)]
    older = [*copies[1:], *([p.home(p.weight(0))] if copies else [])]
    for i in MODEL.layers[:-1]:
        source = copies[0] if copies and i == 0 else None
        p.forward(i, weights=p.prefetch(p.weight(i), out_of=source, into=weights.next()))
    for i in reversed(MODEL.layers):
        source = copies[0] if copies and i == 0 else None
        slot = None if i == MODEL.embed else p.prefetch(p.weight(i), out_of=source, into=weights.next())
        grad = grads.next()
        if i == MODEL.head:
            p.loss(weights=slot, grad=grad)
        else:
            p.backward(i, weights=slot, grad=grad)
        p.offload(p.grad(i), out_of=grad)
        if i == 0:
            for copy, source in zip(copies, older, strict=True):
                p.cast((source, p.weight(0)), (copy, p.weight(0)), stream=Stream.CPU)
        p.update(i)
    return p.build(policy="behind")


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
def test_a_staleness_is_declared_as_it_is_found(steps: int) -> None:
    assert verify(behind(steps, declared=steps)).behind == dict.fromkeys(map(MODEL.layer_name, MODEL.layers), 0) | {
        "0": steps
    }
    found = problems(behind(steps, declared=steps + 2))
    assert [(v.rule, v.fix) for v in found] == [("staleness", f"declare staleness={steps}")]
    assert f"declared is a staleness of {steps + 2}, found one of {steps}" in str(found[0])
    if steps:
        told = problems(behind(steps, declared=steps - 1))
        assert [(v.rule, v.op) for v in told] == [("stale read", "F.0.0"), ("stale read", "B.0.0")]


def test_a_staleness_beyond_all_reason_is_refused_at_once() -> None:
    assert problems(replace(streaming().build(policy="streaming"), staleness=10**12))[0].rule == "staleness"


def taking_turns(copies: int) -> Program:
    """Block 0 has several copies of weights and state, and each step trains another one."""
    p = Program(MODEL, PLAIN, staleness=copies - 1)
    p.keep_on_device(*(t for i in MODEL.layers for t in (p.grad(i), p.weight(i), p.state(i))))
    weights, states = p.slots("weight", copies), p.slots("state", copies)
    own, state = weights.current, states.current
    for i in MODEL.layers[:-1]:
        p.forward(i, weights=own if i == 0 else None)
    p.loss()
    for i in reversed(MODEL.layers[:-1]):
        p.backward(i, weights=own if i == 0 else None)
    for i in MODEL.layers:
        p.update(i, **({"weights": own, "state": state} if i == 0 else {}), stream=Stream.COMPUTE)
    for ring, tensor in ((weights, p.weight(0)), (states, p.state(0))):
        passing, first = p.buffer(f"passing.{tensor}"), ring.current
        p.prefetch(tensor, out_of=first, into=passing, stream=Stream.COMPUTE)
        turn = [first, *(ring.next() for _ in range(copies - 1))]
        for into, source in zip(turn, [*turn[1:], passing], strict=True):
            p.prefetch(tensor, out_of=source, into=into, stream=Stream.COMPUTE)
    return p


def test_a_staleness_that_is_not_found_for_another_reason_is_not_told() -> None:
    found = problems(without(behind(1, declared=1), "U.0"))
    assert [(v.rule, v.subject) for v in found if v.rule != "race"] == [("gradient coverage", "w.0")]


def test_the_newest_of_several_copies_is_known() -> None:
    """A checkpoint is made of it."""
    verified = verify(behind(2, declared=2))
    copies = {buffer for buffer, tensor in verified.initial.items() if tensor == "w.0"}
    assert copies == {"copy0", "copy1", "host.w.0"}
    assert verified.newest == verified.initial.keys() - {"copy0", "copy1"}


def test_copies_that_take_turns_are_no_staleness() -> None:
    """Each would have one update in so many steps, and fall behind for ever; three steps look like a staleness."""
    assert verify(taking_turns(1).build(policy="turns"))
    for copies in (2, 3, 4):
        found = problems(taking_turns(copies).build(policy="turns"))
        assert [(v.rule, v.op) for v in found] == [("stale read", "U.0"), ("stale read", "U.0")]
        assert "U.0 updates the weights of layer 0 in version 0 where version 1 is due" in str(found[0])
        assert "U.0 updates the optimizer state of layer 0 in version 0 where version 1 is due" in str(found[1])


def test_what_follows_from_a_forgotten_update_is_not_told() -> None:
    schedule = without(streaming().build(policy="streaming"), "U.1")
    assert [(v.rule, v.subject) for v in problems(schedule)] == [("gradient coverage", "w.1")]


def test_what_follows_from_a_second_update_is_not_told() -> None:
    p = streaming()
    p.update(1, grad=p.at_home(p.grad(1)))
    assert [(v.rule, v.op, v.on) for v in problems(p.build(policy="twice"))] == [("gradient coverage", "U.1#2", "U.1")]


@pytest.mark.parametrize(
    ("name", "rule", "told"),
    [
        ("U.1", "gradient coverage", "gradient of layer 1 is never applied: the step has no update of it\nadd"),
        ("O.g.1", "stale read", "reads the gradient of layer 1 from host.g.1, which then holds nothing"),
        ("F.1.0", "stale read", "reads the output of layer 1, micro-batch 0"),
        ("P.w.1", "stale read", "reads the weights of layer 1"),
    ],
)
def test_a_missing_op_is_found(name: str, rule: str, told: str) -> None:
    found = problems(without(streaming().build(policy="streaming"), name))
    assert any(v.rule == rule and told in str(v) for v in found), [str(v) for v in found]


def test_a_micro_batch_left_out_of_a_gradient() -> None:
    p = Program(MODEL, replace(PLAIN, accumulation=2))
    weights, grads = p.slots("weight", 2), p.slots("grad", 2)
    for i in MODEL.layers[:-1]:
        slot = p.load(p.weight(i), weights)
        for m in range(2):
            p.forward(i, m, weights=slot)
    grad = grads.next()
    slot = p.load(p.weight(MODEL.head), weights)
    p.loss(0, weights=slot, grad=grad)
    p.discard(grad)  # the second micro-batch overwrites the first
    p.loss(1, weights=slot, grad=grad)
    p.offload(p.grad(MODEL.head), out_of=grad)
    p.update(MODEL.head)
    for i in reversed(MODEL.layers[:-1]):
        slot = None if i == MODEL.embed else p.load(p.weight(i), weights)
        grad = grads.next()
        for m in range(2):
            p.backward(i, m, weights=slot, grad=grad)
        p.offload(p.grad(i), out_of=grad)
        p.update(i)
    found = problems(p.build(policy="lossy"))
    assert [(v.rule, v.op) for v in found] == [("gradient coverage", "U.head")]
    assert "U.head uses the gradient of layer head without backward of head.0 (layer.micro-batch)" in str(found[0])


def with_something_before_the_norm(something: Callable[[Program], object]) -> Schedule:
    p = Program(MODEL, CLIPPED)
    weights, grads = p.slots("weight", 2), p.slots("grad", 2)
    for i in MODEL.layers[:-1]:
        p.forward(i, weights=p.load(p.weight(i), weights))
    backward(p, weights, grads)
    something(p)
    p.norm(p.at_home(p.grad(i)) for i in MODEL.layers)
    for i in MODEL.layers:
        p.update(i)
    return p.build(policy="something")


def test_a_micro_batch_counted_twice_is_told() -> None:
    def add_again(p: Program) -> None:
        p.accumulate(1, out_of=p.prefetch(p.grad(1), into=p.buffer("slab", Tier.HOST), stream=Stream.CPU))

    found = problems(with_something_before_the_norm(add_again))
    assert [(v.rule, v.op) for v in found] == [("gradient coverage", "N"), ("gradient coverage", "U.1")]
    assert all("with 1.0 more than once" in v.message for v in found)


def test_a_layer_counted_twice_in_the_norm_is_told() -> None:
    def count(p: Program) -> None:
        p.norm([p.at_home(p.grad(1))], name="N1")

    found = problems(with_something_before_the_norm(count))
    updates = [f"U.{MODEL.layer_name(i)}" for i in MODEL.layers]
    assert [(v.rule, v.op) for v in found] == [("gradient clipping", update) for update in updates]
    assert all("clips by a norm that counts a layer twice" in v.message for v in found)


def test_a_cast_stays_in_its_layer() -> None:
    def cast(p: Program) -> None:
        narrow, wide = p.grad(1), p.grad(2, wide=True)
        p.cast(p.at_home(narrow), p.at_home(wide), stream=Stream.CPU)

    found = problems(with_something_before_the_norm(cast))
    assert [(v.rule, v.op) for v in found] == [("structure", "C.g32.2")]
    assert "makes g32.2 of g.1" in found[0].message


def test_a_gradient_that_was_cleared_is_none() -> None:
    found = problems(with_something_before_the_norm(lambda p: p.zero(1, grad=p.at_home(p.grad(1)))))
    assert [(v.rule, v.op, v.buffer) for v in found] == [
        ("gradient coverage", "N", "host.g.1"),
        ("gradient coverage", "U.1", "host.g.1"),
    ]


def test_every_pass_may_add_to_a_gradient_that_was_cleared() -> None:
    """As `zero_grad(set_to_none=False)` leaves it."""
    schedule = resident_with_passes(zero=True)
    verify(schedule)
    assert {v.rule for v in problems(resident_with_passes(zero=False))} == {"stale read", "gradient coverage"}


def resident_with_passes(*, zero: bool) -> Schedule:
    """Everything on the device; the first pass adds to the gradient, too, which is cleared before if `zero`."""
    whole = on_device(MODEL, PLAIN)
    clears, ops = list[Op](), list[Op]()
    for op in whole.ops:
        grads = [a for a in op.writes if parse(a.tensor).cls == GRAD and a not in op.reads and op.kind == Kind.COMPUTE]
        for access in grads:
            params, _, nbytes = Amounts(MODEL, PLAIN).update(op.layer, op.phase, [access.tensor], None)
            clear = Op(
                name=f"Z.{access.tensor}", kind=Kind.UPDATE, phase=Phase.ZERO, stream=Stream.COMPUTE, layer=op.layer,
                writes=(access,), nbytes=nbytes, params=params,
            )  # fmt: skip
            clears.append(clear)
        ops.append(replace(op, reads=(*op.reads, *grads)))
    ops = [*clears, *ops] if zero else ops
    return replace(whole, ops=tuple(ops), waits=minimal_waits(ops))


def test_of_many_passes_that_lack_a_few_are_named() -> None:
    schedule = two_slots(MODEL, PLAIN)
    found = problems(replace(schedule, workload=replace(PLAIN, accumulation=40)))
    assert all(len(v.message) < 400 for v in found) and " and 36 more (layer.micro-batch)" in found[0].message


def test_a_mode_of_recompute_that_the_model_has_not_is_told() -> None:
    experts = replace(MODEL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    schedule = two_slots(experts, replace(PLAIN, recompute="pointwise"))
    (found,) = problems(replace(schedule, workload=replace(PLAIN, recompute="mlp")))
    assert found.rule == "structure" and "have no recompute=mlp" in found.message


@pytest.mark.parametrize("tied", [False, True])
def test_no_access_of_a_compute_op_can_be_left_out(tied: bool) -> None:
    schedule = two_slots(small(tied=tied), replace(PLAIN, accumulation=2))
    for op in schedule.ops:
        if op.kind != Kind.COMPUTE:
            continue
        for n in range(len(op.reads)):
            found = problems(
                edit(schedule, op.name, lambda op, n=n: replace(op, reads=op.reads[:n] + op.reads[n + 1 :]))
            )
            assert ("incomplete op", op.name) in {(v.rule, v.op) for v in found}, op.reads[n]
        for n, access in enumerate(op.writes):
            found = problems(
                edit(schedule, op.name, lambda op, n=n: replace(op, writes=op.writes[:n] + op.writes[n + 1 :]))
            )
            # what a layer saves it need not save, but its backward finds nothing then
            rule = "stale read" if parse(access.tensor).cls == SAVED else "incomplete op"
            assert rule in {v.rule for v in found}, access


def test_clipping_needs_the_norm_of_every_layer() -> None:
    p = Program(MODEL, CLIPPED)
    backward_only = streaming(CLIPPED).build(policy="streaming")
    assert verify(backward_only)
    norm = next(op for op in backward_only.ops if op.phase == Phase.NORM)
    short = edit(backward_only, norm.name, lambda op: replace(op, reads=op.reads[1:]))
    found = problems(short)
    assert {v.rule for v in found} == {"gradient clipping"}
    assert p.workload.grad_clip == 1.0


def test_an_update_names_gradient_state_and_weights() -> None:
    """It reads all three, and writes the last two."""
    schedule = streaming(CLIPPED).build(policy="streaming")
    update = next(op for op in schedule.ops if op.name == "U.1")
    assert [a.tensor for a in (*update.reads, *update.writes)] == ["g.1", "o.1", "w.1", "norm", "o.1", "w.1"]
    for n in range(3):
        found = problems(edit(schedule, "U.1", lambda op, n=n: replace(op, reads=op.reads[:n] + op.reads[n + 1 :])))
        assert ("incomplete op", "U.1") in {(v.rule, v.op) for v in found}
    for n in range(2):
        found = problems(edit(schedule, "U.1", lambda op, n=n: replace(op, writes=op.writes[n : n + 1])))
        assert ("incomplete op", "U.1") in {(v.rule, v.op) for v in found}


def test_an_update_that_does_not_read_the_norm_is_told() -> None:
    schedule = streaming(CLIPPED).build(policy="streaming")
    found = problems(edit(schedule, "U.1", lambda op: replace(op, reads=op.reads[:-1])))
    assert [(v.rule, v.op) for v in found] == [("gradient clipping", "U.1")]
    assert "U.1 clips by no global norm" in found[0].message


def test_what_is_missing_is_told_where_it_is_read_and_nowhere_else() -> None:
    """Who reads nothing is taken to have read what was due, or one fault would be told as many."""
    found = problems(without(streaming(CLIPPED).build(policy="streaming"), "O.g.1"))
    assert [(v.rule, v.op) for v in found if v.rule != "race"] == [("stale read", "N"), ("stale read", "U.1")]


def test_a_step_that_clips_and_computes_no_norm_is_told_so_once() -> None:
    (found,) = (v for v in problems(without(streaming(CLIPPED).build(policy="streaming"), "N")) if v.rule != "race")
    assert (found.rule, found.op) == ("gradient clipping", "U.embed")
    assert "clipped to a global norm of 1.0, and no op computes that norm\ncall norm()" in str(found)
    (found,) = problems(replace(streaming(PLAIN).build(policy="streaming"), workload=CLIPPED))
    assert (found.rule, found.op) == ("gradient clipping", "U.head")
    both = problems(without(without(streaming(CLIPPED).build(policy="streaming"), "N"), "O.g.1"))
    assert {("gradient clipping", "U.embed"), ("stale read", "U.1")} <= {(v.rule, v.op) for v in both}


def test_what_is_told_of_an_old_copy_names_its_buffer() -> None:
    found, *_ = problems(behind(1, declared=0))
    assert found.op == "F.0.0" and found.buffer.startswith("weight") and not found.subject
    assert str(found).startswith(f"stale read on {found.buffer}: F.0.0 reads the weights of layer 0 in version")


def test_a_norm_of_nothing_is_told() -> None:
    schedule = edit(streaming(CLIPPED).build(policy="streaming"), "N", lambda op: replace(op, reads=()))
    assert any("N (norm) reads no gradient" in str(v) for v in problems(schedule))


def test_a_wait_for_an_op_issued_later_is_a_deadlock() -> None:
    schedule = streaming().build(policy="streaming")
    cycle = (*schedule.waits, Wait(op="F.embed.0", on="F.1.0"), Wait(op="P.w.embed", on="U.embed"))
    found = problems(replace(schedule, waits=cycle))
    assert [(v.rule, v.op, v.on) for v in found] == [
        ("deadlock", "F.embed.0", "F.1.0"),
        ("deadlock", "P.w.embed", "U.embed"),
    ]
    (itself,) = problems(replace(schedule, waits=(*schedule.waits, Wait(op="F.1.0", on="F.1.0"))))
    assert (itself.rule, itself.op, itself.on) == ("deadlock", "F.1.0", "F.1.0")
    assert (itself.message, itself.fix) == ("F.1.0 waits for itself", "remove  wait F.1.0 on F.1.0")


def test_a_wait_that_lacks_its_distance_is_told_once() -> None:
    """It keeps nothing in order, but the race would be told of the same mistake."""
    schedule = streaming().build(policy="streaming")
    waits = tuple(replace(w, distance=0) if (w.op, w.on) == ("P.w.embed", "U.embed") else w for w in schedule.waits)
    assert waits != schedule.waits
    assert [(v.rule, v.op, v.on) for v in problems(replace(schedule, waits=waits))] == [
        ("deadlock", "P.w.embed", "U.embed")
    ]


def test_a_training_that_stops_at_the_loss_is_told_what_it_does_not_update() -> None:
    schedule = streaming().build(policy="loss")
    ops = schedule.ops[: schedule.index["L.head.0"] + 1]
    left = {op.name for op in ops}
    waits = tuple(wait for wait in schedule.waits if {wait.op, wait.on} <= left)
    found = [v for v in problems(replace(schedule, ops=ops, waits=waits)) if v.rule != "race"]
    assert {v.rule for v in found} == {"gradient coverage"}
    assert {v.subject for v in found} == {f"w.{MODEL.layer_name(i)}" for i in MODEL.layers}


def test_a_step_that_only_copies_is_no_training() -> None:
    """Its tokens per second would be told like those of any other."""
    schedule = streaming().build(policy="copies")
    copies = [op for op in schedule.ops if op.name in ("P.w.0", "P.w.1")]
    found = problems(replace(schedule, ops=tuple(copies), waits=()))
    assert {v.rule for v in found} == {"gradient coverage", "loss coverage"}


def test_an_evaluation_does_not_clip() -> None:
    assert verify(on_device(small(), replace(CLIPPED, task="evaluate")))


def test_an_evaluation_has_one_loss_of_every_micro_batch() -> None:
    schedule = policies.build("flexgen_block", MODEL, replace(PLAIN, accumulation=2), ROOM)
    verify(schedule)
    losses = [op.name for op in schedule.ops if op.phase == Phase.LOSS]
    assert schedule.ops[-1].name == losses[1]
    (found,) = problems(without(schedule, losses[1]))
    assert (found.rule, found.subject, found.op) == ("loss coverage", "micro-batch 1", schedule.ops[-2].name)
    assert "the loss of micro-batch 1 is computed 0 times in a step" in found.message


def test_a_training_of_adapters_has_one_loss_of_every_micro_batch() -> None:
    """The head is frozen there: no gradient tells that its loss was computed twice."""
    schedule = policies.build("lora_streamed", MODEL, replace(PLAIN, accumulation=2), ROOM)
    verify(schedule)
    at = schedule.index["L.head.0"] + 1
    again = replace(schedule.ops[at - 1], name="again")
    (found,) = problems(replace(schedule, ops=(*schedule.ops[:at], again, *schedule.ops[at:])))
    assert (found.rule, found.subject) == ("loss coverage", "micro-batch 0")
    assert "the loss of micro-batch 0 is computed 2 times in a step" in found.message


def test_a_norm_that_is_not_there_is_told_where_it_is_read_and_nowhere_else() -> None:
    schedule = streaming(CLIPPED).build(policy="streaming")
    elsewhere = replace(schedule, buffers=(*schedule.buffers, Buffer(name="spare", tier=Tier.HOST, nbytes=8)))

    def read_there(op: Op) -> Op:
        return replace(op, reads=tuple(replace(a, buffer="spare") if a.tensor == "norm" else a for a in op.reads))

    found = problems(edit(elsewhere, "U.1", read_there))
    assert [(v.rule, v.op, v.buffer) for v in found] == [("stale read", "U.1", "spare")]


@pytest.mark.parametrize("policy", policies.names())
def test_the_order_in_which_an_op_names_its_tensors_means_nothing(policy: str) -> None:
    schedule = policies.build(policy, MODEL, replace(CLIPPED, accumulation=2, precision="bf16"), ROOM)
    backwards = (replace(op, reads=op.reads[::-1], writes=op.writes[::-1]) for op in schedule.ops)
    verify(replace(schedule, ops=tuple(backwards)))


def test_a_file_cannot_make_the_verifier_count_for_ever() -> None:
    schedule = streaming().build(policy="streaming")
    (found,) = problems(replace(schedule, workload=replace(schedule.workload, accumulation=10**9)))
    assert "structure on micro-batches: the step has 1,000,000,000 micro-batches, and may have 200,000 ops" in str(
        found
    )


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda op: replace(op, nbytes=-1), "has nbytes -1"),
        (lambda op: replace(op, nbytes=op.nbytes - 4), "bytes; this model and step need"),
        (lambda op: replace(op, phase=Phase.ADAM), "is a prefetch of phase adam"),
        (lambda op: replace(op, reads=()), "is a copy with 0 sources and 1 targets"),
        (lambda op: replace(op, writes=()), "is a copy with 1 sources and 0 targets"),
        (lambda op: replace(op, writes=(Access("nowhere", "w.1"),)), "touches buffer nowhere, which is not declared"),
        (lambda op: replace(op, writes=(Access("weight0", "z.1"),)), "unknown tensor 'z.1'"),
        (lambda op: replace(op, writes=(Access("weight0", "w.99"),)), "no layer '99'"),
        (lambda op: replace(op, writes=(Access("weight0", "w.2"),)), "copies w.1 into w.2"),
        (lambda op: replace(op, name="F.1.0"), "the name F.1.0 stands for two ops"),
        (
            lambda op: replace(op, layer=99),
            "P.w.1 is of layer 99, micro-batch None, and copies the weights of layer 1\n"
            "give it layer 1, micro-batch None",
        ),
        (lambda op: replace(op, layer=None), "P.w.1 is of layer None, micro-batch None, and copies"),
        (lambda op: replace(op, microbatch=0), "P.w.1 is of layer 1, micro-batch 0, and copies"),
        (
            lambda op: replace(op, kind=Kind.OFFLOAD),
            "P.w.1 is called offload and copies from host to device\ncall it prefetch",
        ),
    ],
)
def test_structure_is_checked(change: Callable[[Op], Op], told: str) -> None:
    schedule = streaming().build(policy="streaming")
    found = problems(edit(schedule, "P.w.1", change))
    assert any(v.rule == "structure" and told in str(v) for v in found), [str(v) for v in found]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda s: replace(s, ops=(), waits=()), "the schedule has no ops"),
        (lambda s: replace(s, buffers=(*s.buffers, s.buffers[0])), "the name weight0 stands for two buffers"),
        (
            lambda s: replace(s, buffers=(*s.buffers, Buffer(name="more", tier=Tier.HOST, nbytes=-1))),
            "buffer more has -1 bytes",
        ),
        (lambda s: replace(s, waits=(Wait(op="F.0.0", on="nobody"),)), "wait F.0.0 on nobody: there is no op nobody"),
        (
            lambda s: replace(s, waits=(Wait(op="nobody", on="F.0.0", distance=2),)),
            "wait nobody on F.0.0: there is no op nobody",
        ),
        (lambda s: replace(s, waits=(Wait(op="F.0.0", on="F.1.0", distance=2),)), "has distance 2"),
        (lambda s: edit(s, "F.0.0", lambda op: replace(op, layer=99)), "F.0.0 computes layer 99, micro-batch 0"),
        (lambda s: edit(s, "F.0.0", lambda op: replace(op, microbatch=None)), "layer 0, micro-batch None"),
        (
            lambda s: edit(s, "F.1.0", lambda op: replace(op, reads=(*op.reads[:-1], Access("hidden0", "x.0.7")))),
            "F.1.0 names x.0.7, but the step has 1 micro-batches",
        ),
        (lambda s: edit(s, "N", lambda op: replace(op, writes=op.writes * 2)), "N (norm) writes 2 buffers"),
        (lambda s: edit(s, "N", lambda op: replace(op, microbatch=7)), "N is of micro-batch 7"),
        (
            lambda s: edit(s, "O.g.1", lambda op: replace(op, kind=Kind.PREFETCH)),
            "O.g.1 is called prefetch and copies from device to host\ncall it offload",
        ),
    ],
)
def test_names_buffers_waits_and_numbers_are_checked(change: Callable[[Schedule], Schedule], told: str) -> None:
    found = problems(change(streaming(CLIPPED).build(policy="streaming")))
    assert any(v.rule == "structure" and told in str(v) for v in found), [str(v) for v in found]


def test_the_host_may_wait_for_one_thing_twice() -> None:
    p = streaming()
    weights = p.at_home(p.weight(1))
    p.synchronize(weights, weights)
    assert verify(p.build(policy="waiting"))


def test_a_buffer_that_nobody_uses_may_be_empty() -> None:
    schedule = streaming().build(policy="streaming")
    assert verify(replace(schedule, buffers=(*schedule.buffers, Buffer(name="more", tier=Tier.HOST, nbytes=0))))


def test_a_buffer_too_small_is_told_with_both_sizes() -> None:
    schedule = streaming().build(policy="streaming")
    small = tuple(replace(b, nbytes=b.nbytes - 1) if b.name == "weight1" else b for b in schedule.buffers)
    found = problems(replace(schedule, buffers=small))
    assert all(v.rule == "structure" and "into weight1" in str(v) for v in found)


def test_a_step_of_another_size_than_its_ops_is_told() -> None:
    schedule = streaming().build(policy="streaming")
    halved = replace(schedule, workload=replace(schedule.workload, seq_len=4))
    assert halved.digest == schedule.digest  # the ops are the same
    told = {(v.rule, v.op) for v in problems(halved)}
    assert ("structure", "F.0.0") in told and ("structure", "B.0.0") in told
    assert any("FLOPs; this model and step need" in v.message for v in problems(halved))


def first_of_each_phase(schedule: Schedule) -> dict[Phase, str]:
    return {op.phase: op.name for op in reversed(schedule.ops)}


@pytest.mark.parametrize(
    "name", ["streamed", "megatrain_released", "zero3_offload", "superoffload", "lora_streamed", "zero_infinity"]
)
@pytest.mark.parametrize("amount", ["nbytes", "flops", "params", "fresh"])
def test_no_amount_of_an_op_can_be_forged(name: str, amount: str) -> None:
    """A prediction is made of them: an update of no bytes and one parameter would take no time."""
    workload = replace(PLAIN, lora_rank=2 if name == "lora_streamed" else None)
    schedule = policies.build(name, MODEL, workload, ROOM)
    phases = first_of_each_phase(schedule)
    assert {Phase.COPY, Phase.EMBED, Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.ADAM} <= phases.keys()
    for op in phases.values():
        forged = edit(schedule, op, lambda op: replace(op, **{amount: getattr(op, amount) + 1}))
        assert [(v.rule, v.op) for v in problems(forged)] == [("structure", op)]


def test_updates_that_cost_nothing_are_told_with_what_they_cost() -> None:
    schedule = streaming().build(policy="streaming")
    ops = tuple(replace(op, nbytes=0, params=1) if op.phase == Phase.ADAM else op for op in schedule.ops)
    told = [v.message for v in problems(replace(schedule, ops=ops))]
    n = MODEL.params(1)
    assert len(told) == 2 * len(MODEL.layers)
    assert f"U.1 declares 1 parameters; this model and step need {n}" in told
    # weights, two moments and gradient of 4 bytes are read, all but the gradient written
    assert f"U.1 declares 0 bytes; this model and step need {7 * 4 * n}" in told


def test_layers_run_by_fused_kernels_or_by_others_but_not_for_free() -> None:
    fused, not_fused = (
        policies.build("megatrain_released", MODEL, PLAIN, ROOM, fused=fused) for fused in (True, False)
    )
    assert verify(fused) and verify(not_fused)
    few, many = (next(op for op in s.ops if op.name == "F.0.0").nbytes for s in (fused, not_fused))
    found = problems(edit(fused, "F.0.0", lambda op: replace(op, nbytes=many - 1)))
    assert f"F.0.0 declares {many - 1} bytes; this model and step need {few} or {many}" in str(found[0])


def test_an_update_is_of_the_layer_that_it_writes() -> None:
    schedule = streaming().build(policy="streaming")
    found = problems(edit(schedule, "U.1", lambda op: replace(op, layer=2)))
    assert any("U.1 is of layer 2 and writes the optimizer state of layer 1" in str(v) for v in found)
    found = problems(edit(schedule, "O.g.1", lambda op: replace(op, kind=Kind.UPDATE, phase=Phase.CAST, layer=None)))
    assert any("O.g.1 is of no layer and writes the gradient of layer 1" in str(v) for v in found)
    assert "U.1 is of layer 9" in str(problems(edit(schedule, "U.1", lambda op: replace(op, layer=9)))[0])


def test_a_copy_of_a_layer_that_there_is_not_is_told_once() -> None:
    schedule = streaming().build(policy="streaming")
    assert [v.op for v in problems(edit(schedule, "P.w.1", lambda op: replace(op, layer=9)))] == ["P.w.1"]


def test_a_layer_has_not_every_phase() -> None:
    schedule = streaming().build(policy="streaming")
    found = problems(edit(schedule, "F.embed.0", lambda op: replace(op, phase=Phase.FORWARD)))
    assert "F.embed.0 computes forward of layer embed\nthat layer has embed, backward" in str(found[0])


@pytest.mark.parametrize(
    ("name", "tensor", "fix"),
    [
        ("F.0.0", "w.0", "prefetch() it first, or keep it there with keep_on_device()"),
        ("L.head.0", "w.head", "prefetch() it first, or keep it there with keep_on_device()"),
        (
            "B.0.0",
            "g.0",
            "name a buffer of the device to add it up in, as slots() makes them, or keep it there with "
            "keep_on_device()",
        ),
        (
            "L.head.0",
            "w.embed",
            "name a buffer of the device, loss(embed_weights=..., embed_grad=...), or keep it there with "
            "keep_on_device()",
        ),
        ("F.0.0", "x.embed.0", "restore() it first"),
    ],
)
def test_compute_needs_its_tensors_on_the_device(name: str, tensor: str, fix: str) -> None:
    schedule = two_slots(small(tied=True), PLAIN)
    there = Buffer(name="there", tier=Tier.HOST, nbytes=1 << 20)

    def from_host(op: Op) -> Op:
        reads, writes = (
            tuple(Access("there", a.tensor) if a.tensor == tensor else a for a in of) for of in (op.reads, op.writes)
        )
        return replace(op, reads=reads, writes=writes)

    found = problems(edit(replace(schedule, buffers=(*schedule.buffers, there)), name, from_host))
    told = [(v.op, v.message, v.fix) for v in found if v.rule == "structure"]
    assert told == [(name, f"{name} computes with there, not on the device", fix)]


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        (
            "U.1",
            {"stream": Stream.COMPUTE},
            "U.1 (adam) runs on compute, a stream of the GPU, and touches host.g.1, host.o.1, host.w.1, on host",
        ),
        (
            "N",
            {"stream": Stream.D2H},
            "and touches host.g.embed, host.g.0, host.g.1 and 2 more, on host",
        ),
        ("O.g.1", {"stream": Stream.CPU}, "O.g.1 (copy) runs on cpu, a thread of the host, and touches grad"),
        (
            "P.w.1",
            {"stream": Stream.NVME_READ},
            "P.w.1 (copy) runs on nvme_read, a thread of the host, and touches weight",
        ),
        (
            "P.w.1",
            {"writes": (Access("host.w.1", "w.1"),)},
            "P.w.1 copies on h2d, but nothing to or from the device",
        ),
    ],
)
def test_an_op_works_on_memory_that_its_stream_can_wait_for(name: str, change: dict[str, Any], told: str) -> None:
    """Else the CPU backend would train rightly by it, and a GPU would race."""
    schedule = streaming(CLIPPED).build(policy="streaming")
    found = problems(edit(schedule, name, lambda op: replace(op, **change)))
    assert any(v.rule == "structure" and told in str(v) for v in found), [str(v) for v in found]


def test_a_gpu_does_not_copy_the_norm_within_the_host() -> None:
    """Its thread would, as it queues the op, before the GPU has written it."""
    schedule = streaming(CLIPPED).build(policy="streaming")
    copied = Op(
        name="C", kind=Kind.UPDATE, phase=Phase.CAST, stream=Stream.COMPUTE, nbytes=16,
        reads=(Access("norm", "norm"),), writes=(Access("norm2", "norm"),),
    )  # fmt: skip
    place = schedule.index["N"] + 1
    found = problems(
        replace(
            schedule,
            ops=(*schedule.ops[:place], copied, *schedule.ops[place:]),
            buffers=(*schedule.buffers, Buffer(name="norm2", tier=Tier.HOST, nbytes=8)),
        )
    )
    assert any(v.op == "C" and "nothing to or from the device" in str(v) for v in found), [str(v) for v in found]


def test_a_norm_on_the_device_is_out_of_a_host_threads_reach() -> None:
    """Its copy to the host would not have arrived when the thread divides by it."""
    schedule = streaming(CLIPPED).build(policy="streaming")
    moved = tuple(replace(b, tier=Tier.DEVICE) if b.name == "norm" else b for b in schedule.buffers)
    found = problems(replace(schedule, buffers=moved))
    assert {v.op for v in found} == {"N", *(f"U.{MODEL.layer_name(i)}" for i in MODEL.layers)}
    assert "N (norm) runs on cpu, a thread of the host, and touches norm, on device\ncopy norm to the host" in str(
        found[0]
    )


def test_an_error_of_another_process_says_the_same() -> None:
    with pytest.raises(ScheduleError) as error:
        verify(replace(streaming().build(policy="streaming"), waits=()))
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


def test_all_violations_are_told_at_once() -> None:
    schedule = streaming().build(policy="streaming")
    broken = replace(edit(schedule, "F.0.0", lambda op: replace(op, stream=Stream.H2D)), waits=())
    found = problems(broken)
    assert found and all(v.rule == "structure" for v in found)
    found = problems(replace(schedule, waits=()))
    assert len(found) > 20


def test_a_problem_of_every_step_is_told_once_and_a_message_tells_ten() -> None:
    schedule = streaming().build(policy="streaming")
    with pytest.raises(ScheduleError) as error:
        verify(replace(schedule, waits=()))
    found, told = error.value.violations, str(error.value)
    assert len({str(v) for v in found}) == len(found)
    assert told.startswith(f"{len(found)} problems in streaming")
    assert told.count("race on") == 10 and re.search(r"and \d+ more$", told)


def test_problems_of_one_kind_are_told_together() -> None:
    schedule = streaming().build(policy="streaming")
    for name in ("U.0", "U.1", "U.2"):
        schedule = without(schedule, name)
    with pytest.raises(ScheduleError) as error:
        verify(schedule)
    assert len(error.value.violations) == 3
    told = str(error.value)
    assert told.startswith("3 problems in ") and told.count("is never applied") == 1
    assert "add an update of layer 0\n  the same for w.1, w.2\n" in told
    schedule = streaming(CLIPPED).build(policy="streaming")
    for name in ("U.0", "U.1"):
        schedule = edit(schedule, name, lambda op: replace(op, reads=op.reads[:-1]))
    with pytest.raises(ScheduleError, match=r"U\.0 clips by no global norm\n.*\n  the same for U\.1\n"):
        verify(schedule)


def test_what_waits_for_the_step_before_is_told_in_plain_words() -> None:
    schedule = streaming().build(policy="streaming")
    wait = Wait(op="P.w.embed", on="U.embed", distance=1)
    found, *_ = problems(replace(schedule, waits=tuple(w for w in schedule.waits if w != wait)))
    assert found.fix == (
        "P.w.embed does not wait for U.embed of the step before; add  wait P.w.embed on U.embed at distance 1"
    )
