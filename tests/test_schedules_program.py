"""What a program knows of its buffers while it is written: which tensor each holds, and what an update makes void."""

from __future__ import annotations

from dataclasses import replace

import pytest

from schedules import presets
from schedules.errors import ProgramError
from schedules.op import Tier
from schedules.program import Program
from schedules.tensor import parts
from schedules.workload import Workload

MODEL = replace(presets.load("tiny"), num_hidden_layers=4)
STEP = Workload(micro_batch_size=1, seq_len=8, precision="fp32")


def copies(p: Program) -> list[str]:
    return [op.name for op in p.build(policy="part").ops if op.name.startswith("P.")]


def test_a_ring_hands_out_the_slot_used_longest_ago_and_empties_it() -> None:
    p = Program(MODEL, STEP)
    ring = p.slots("weight", 3)
    first, second, third = (p.load(p.weight(i), ring) for i in range(3))
    assert ring.current == third
    assert p.load(p.weight(0), ring) == ring.current == first  # it stands there still, and is now the one used last
    assert copies(p) == ["P.w.0", "P.w.1", "P.w.2"]
    assert ring.next() == second
    assert p.holds(second) is None and p.weight(1) not in ring
    assert p.load(p.weight(3), ring) == third
    assert [p.weight(i) in ring for i in range(4)] == [True, False, False, True]
    ring.clear()
    assert not any(p.weight(i) in ring for i in range(4))


def test_a_ring_passes_over_slots_that_are_to_be_kept() -> None:
    p = Program(MODEL, STEP)
    ring = p.slots("weight", 3)
    first, second, third = (p.load(p.weight(i), ring) for i in range(3))
    assert ring.next(keep={first, None}) == second
    assert p.holds(first) == p.weight(0) and p.holds(second) is None
    assert [ring.next(), ring.next(), ring.next()] == [first, third, second]
    with pytest.raises(ProgramError, match="all slots of the ring are to be kept"):
        ring.next(keep=[first, second, third])


def test_only_what_is_held_is_released() -> None:
    p = Program(MODEL, STEP)
    p.forward(p.model.embed)
    p.forward(0)
    buffer = p.evict(p.output(p.model.embed, 0), hold=True)
    p.release(buffer)
    for wrong in (buffer, "hidden9"):
        with pytest.raises(ProgramError, match="not on hold"):
            p.release(wrong)


def test_a_buffer_is_loaded_into_unless_the_tensor_stands_there() -> None:
    p = Program(MODEL, STEP)
    buffer = p.buffer("embed.weight")
    assert [p.load(p.weight(i), buffer) for i in (0, 0, 1, 0)] == [buffer] * 4
    assert copies(p) == ["P.w.0", "P.w.1", "P.w.0#2"]


def test_an_update_makes_all_copies_void_but_the_one_it_wrote() -> None:
    p = Program(MODEL, STEP)
    for i in (0, 1):
        p.zero(i, grad=p.at_home(p.grad(i)))
    ring = p.slots("weight", 2)
    slot = p.load(p.weight(0), ring)
    p.load(p.weight(1), ring)
    p.update(0)  # at home
    assert p.holds(slot) is None and p.weight(1) in ring
    assert p.load(p.weight(0), ring) == slot
    assert copies(p) == ["P.w.0", "P.w.1", "P.w.0#2"]
    p.update(1, weights=ring.holding(p.weight(1)))
    assert p.weight(1) in ring


def test_a_gradient_is_used_up_by_the_update_of_the_last_part() -> None:
    p = Program(MODEL, STEP)
    gradient = p.grad(0)
    p.prefetch(gradient, into=p.buffer("grad"))
    for part in parts(3):
        assert p.holds("grad") == gradient
        p.update(0, grad=("grad", gradient), part=part)
    assert p.holds("grad") is None


def test_a_part_of_a_gradient_is_used_up_by_its_update() -> None:
    p = Program(MODEL, STEP)
    p.prefetch(p.grad(0), into=p.buffer("grad"))
    for part in parts(2):
        slab = p.offload(p.grad(0, part=part), out_of="grad", into=p.buffer("slab", Tier.HOST))
        p.update(0, grad=(slab, p.grad(0, part=part)), part=part)
        assert p.holds(slab) is None


def test_whatever_can_block_the_host_does_so_if_asked() -> None:
    p = Program(replace(MODEL, num_hidden_layers=1), STEP)
    embed, block, head = p.model.layers
    p.keep_on_device(*(t for i in p.model.layers for t in (p.weight(i), p.grad(i))))
    p.prefetch(p.state(block), into=p.buffer("state"), blocking=True)
    p.load(p.state(head), p.slots("ring", 1), blocking=True)
    p.offload(p.state(block), out_of="state", blocking=True)
    p.forward(embed, blocking=True)
    p.forward(block, keep="input", blocking=True)
    p.loss(blocking=True)
    p.recompute(block, blocking=True)
    p.backward(block, blocking=True)
    p.backward(embed, blocking=True)
    ops = p.build(policy="part").ops
    assert len(ops) == 9 and all(op.blocking for op in ops)


def test_what_a_program_takes_can_be_asked_before_its_first_op() -> None:
    p = Program(MODEL, STEP)
    assert p.device_bytes() == 0
    p.prefetch(p.weight(0), into=p.buffer("weight"))
    assert p.device_bytes() == p.nbytes(p.weight(0))


def test_a_reservation_never_makes_a_buffer_smaller() -> None:
    p = Program(MODEL, STEP)
    p.prefetch(p.weight(0), into=p.buffer("weight"))
    p.reserve("weight", 10)
    assert p.build(policy="part").buffer["weight"].nbytes == p.nbytes(p.weight(0))
    p.reserve("weight", 10**6)
    assert p.build(policy="part").buffer["weight"].nbytes == 10**6


def test_a_gradient_is_clipped_once() -> None:
    p = Program(MODEL, replace(STEP, grad_clip=1.0))
    p.scale(0, grad=p.at_home(p.grad(0)))
    p.update(0, scaled=True)
    p.zero(1, grad=p.at_home(p.grad(1)))
    p.update(1)
    reads_norm = {op.name: op.reads_from("norm") for op in p.build(policy="part").ops}
    assert reads_norm == {"S.g.0": True, "U.0": False, "Z.g.1": False, "U.1": True}
