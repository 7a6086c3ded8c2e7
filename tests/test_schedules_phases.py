"""What each phase may touch: schedules that would run, and train something else, are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hand_written import on_device, small, two_slots

from schedules import policies
from schedules.amounts import Amounts
from schedules.flops import op_flops
from schedules.hazards import minimal_waits
from schedules.op import Access, Buffer, Kind, Op, Phase, Stream, Tier
from schedules.schedule import Schedule
from schedules.tensor import parse
from schedules.verify import ScheduleError, verify
from schedules.workload import MemoryBudget, Workload

MODEL = small(blocks=3)
WORK = Workload(micro_batch_size=2, seq_len=8, precision="fp32", grad_clip=0.1)
ROOM = MemoryBudget(device_bytes=10**9, host_bytes=10**9)


def with_ops(schedule: Schedule, ops: list[Op]) -> Schedule:
    """With these ops, the waits that they need, and updates of what they then touch."""
    amounts = Amounts(schedule.model, schedule.workload)
    for at, op in enumerate(ops):
        if op.kind == Kind.UPDATE:
            params, _, nbytes = amounts.update(op.layer, op.phase, (access.tensor for access in op.accesses), None)
            ops[at] = replace(op, params=params, nbytes=nbytes)
    return replace(schedule, ops=tuple(ops), waits=minimal_waits(ops))


def edited(schedule: Schedule, name: str, **changes: Any) -> Schedule:
    return with_ops(schedule, [replace(op, **changes) if op.name == name else op for op in schedule.ops])


def op_of(schedule: Schedule, name: str) -> Op:
    return next(op for op in schedule.ops if op.name == name)


def after(schedule: Schedule, name: str, *new: Op) -> Schedule:
    ops = list(schedule.ops)
    at = [op.name for op in ops].index(name) + 1
    return with_ops(schedule, [*ops[:at], *new, *ops[at:]])


def on(tensor: str) -> Access:
    return Access(f"device.{tensor}", tensor)


def swapped(accesses: tuple[Access, ...], old: str, new: Access) -> tuple[Access, ...]:
    return tuple(new if access.tensor == old else access for access in accesses)


def scaling(schedule: Schedule, name: str = "S.g.1") -> Op:
    norm = Access("norm", "norm")
    update = op_of(schedule, "U.1")
    return replace(update, name=name, phase=Phase.SCALE, reads=(on("g.1"), norm), writes=(on("g.1"),))


def another_layers_gradient(s: Schedule) -> Schedule:
    return edited(s, "U.1", reads=swapped(op_of(s, "U.1").reads, "g.1", on("g.2")))


def another_layers_state(s: Schedule) -> Schedule:
    for mine, other in (("1", "2"), ("2", "1")):
        op = op_of(s, f"U.{mine}")
        state = on(f"o.{other}")
        s = edited(
            s, op.name, reads=swapped(op.reads, f"o.{mine}", state), writes=swapped(op.writes, f"o.{mine}", state)
        )
    return s


def another_layers_update(s: Schedule) -> Schedule:
    return edited(s, "U.1", layer=2)


def norm_of_a_gradient_twice(s: Schedule) -> Schedule:
    norm = op_of(s, "N")
    return edited(s, "N", reads=(*norm.reads, norm.reads[0]))


def clipped_and_clipped_in_the_update(s: Schedule) -> Schedule:
    return after(s, "N", scaling(s))


def without_clipping(s: Schedule) -> Schedule:
    return edited(s, "U.1", reads=tuple(a for a in op_of(s, "U.1").reads if a.tensor != "norm"))


def clipped_twice(s: Schedule) -> Schedule:
    return without_clipping(after(s, "N", scaling(s), scaling(s, "S2.g.1")))


def norm_of_a_clipped_gradient(s: Schedule) -> Schedule:
    return without_clipping(after(s, "N", scaling(s), replace(op_of(s, "N"), name="N2")))


def scaled_without_reading(s: Schedule) -> Schedule:
    return without_clipping(after(s, "N", replace(scaling(s), reads=(Access("norm", "norm"),))))


def scaled_by_no_norm(s: Schedule) -> Schedule:
    return without_clipping(after(s, "N", replace(scaling(s), reads=(on("g.1"),))))


def scaled_by_half_of_the_norm(s: Schedule) -> Schedule:
    norm = op_of(s, "N")
    half = len(norm.reads) // 2
    s = before(s, "N", replace(norm, name="N0", reads=norm.reads[:half]))
    s = edited(s, "N", reads=(*norm.reads[half:], norm.writes[0]))
    return without_clipping(after(s, "N0", scaling(s)))


def another_layers_output(s: Schedule) -> Schedule:
    output = next(access for access in op_of(s, "F.1.0").writes if access.tensor == "x.1.0")
    return edited(s, "F.0.0", writes=(*op_of(s, "F.0.0").writes, output))


def recompute_as_backward(s: Schedule) -> Schedule:
    return edited(s, "B.1.0", phase=Phase.RECOMPUTE, flops=op_flops(MODEL, 1, Phase.RECOMPUTE, s.workload))


def embedding_of_a_block(s: Schedule) -> Schedule:
    return edited(s, "F.1.0", phase=Phase.EMBED)


def forward_of_the_embedding(s: Schedule) -> Schedule:
    return edited(s, "F.embed.0", phase=Phase.FORWARD)


def loss_of_a_block(s: Schedule) -> Schedule:
    return edited(s, "B.1.0", phase=Phase.LOSS)


def a_cast_into_another_kind(s: Schedule) -> Schedule:
    backward = op_of(s, "B.2.0")
    source = next(access for access in backward.reads if access.tensor == "x.1.0")
    target = next(access for access in backward.writes if access.tensor == "d.1.0")
    stream = Stream.COMPUTE
    cast = Op(name="C", kind=Kind.UPDATE, phase=Phase.CAST, stream=stream, layer=1, reads=(source,), writes=(target,))
    return after(s, "B.2.0", cast)


def spare(s: Schedule, like: Access, name: str = "spare", tier: Tier | None = None) -> tuple[Schedule, Access]:
    """With one more buffer, for the same tensor."""
    buffer = s.buffer[like.buffer]
    more = replace(buffer, name=name, tier=tier or buffer.tier)
    return replace(s, buffers=(*s.buffers, more)), Access(name, like.tensor)


def access_of(s: Schedule, name: str, tensor: str) -> Access:
    return next(access for access in op_of(s, name).accesses if access.tensor == tensor)


def also(s: Schedule, name: str, side: str, tensor: str) -> Schedule:
    """An op reads or writes a tensor in one more buffer, where it is."""
    s, more = spare(s, access_of(s, name, tensor))
    s = edited(s, name, **{side: (*getattr(op_of(s, name), side), more)})
    return s if side == "writes" else before(s, name, copy_to(access_of(s, name, tensor), more, s))


def copy_to(source: Access, target: Access, s: Schedule, stream: Stream = Stream.COMPUTE, name: str = "copy") -> Op:
    of = parse(source.tensor)
    return Op(
        name=name,
        kind=Kind.OFFLOAD if s.buffer[target.buffer].tier != Tier.DEVICE else Kind.PREFETCH,
        phase=Phase.COPY,
        stream=stream,
        layer=s.model.layer_index(of.layer),
        microbatch=of.microbatch,
        reads=(source,),
        writes=(target,),
        nbytes=Amounts(s.model, s.workload).tensor(source.tensor),
    )


def before(s: Schedule, name: str, *new: Op) -> Schedule:
    ops = list(s.ops)
    at = [op.name for op in ops].index(name)
    return with_ops(s, [*ops[:at], *new, *ops[at:]])


def both_gradients_applied(s: Schedule) -> Schedule:
    s, wide = spare(s, on("g.1"))
    cast = replace(scaling(s, "C"), phase=Phase.CAST, reads=(on("g.1"),), writes=(Access(wide.buffer, "g32.1"),))
    s = before(s, "U.1", cast)
    return edited(s, "U.1", reads=(*op_of(s, "U.1").reads, cast.writes[0]))


def another_output_read(s: Schedule) -> Schedule:
    return edited(s, "F.2.0", reads=(*op_of(s, "F.2.0").reads, access_of(s, "F.1.0", "x.0.0")))


def a_cast_over_itself(s: Schedule) -> Schedule:
    wide = Access(on("g.1").buffer, "g32.1")
    cast = replace(scaling(s, "C"), phase=Phase.CAST, reads=(on("g.1"),), writes=(wide,))
    s = edited(before(s, "N", cast), "U.1", reads=swapped(op_of(s, "U.1").reads, "g.1", wide))
    return edited(s, "N", reads=swapped(op_of(s, "N").reads, "g.1", wide))


def a_sum_over_itself(s: Schedule) -> Schedule:
    s = a_cast_over_itself(s)
    return edited(s, "C", phase=Phase.ACCUMULATE)


def norm_added_to_another(s: Schedule) -> Schedule:
    """The executor adds to what it writes: what the first op counted would be lost."""
    norm = op_of(s, "N")
    s, first = spare(s, norm.writes[0])
    half = len(norm.reads) // 2
    s = edited(s, "N", reads=(*norm.reads[half:], first))
    return before(s, "N", replace(norm, name="N0", reads=norm.reads[:half], writes=(first,)))


def norm_on_a_drive(s: Schedule) -> Schedule:
    return replace(s, buffers=tuple(replace(b, tier=Tier.NVME) if b.name == "norm" else b for b in s.buffers))


def scaled_output(s: Schedule) -> Schedule:
    output = access_of(s, "F.1.0", "x.0.0")
    return after(s, "F.0.0", replace(scaling(s, "S"), layer=0, reads=(output,), writes=(output,)))


def cleared_weights(s: Schedule) -> Schedule:
    s, copy = spare(s, on("w.1"))
    return after(s, "N", replace(scaling(s, "Z"), phase=Phase.ZERO, reads=(), writes=(copy,)))


def backward_twice(s: Schedule) -> Schedule:
    op = op_of(s, "B.1.0")
    writes: list[Access] = []
    for access in op.writes:
        s, more = spare(s, access, f"spare.{access.tensor}")
        writes.append(more)
    return after(s, "B.1.0", replace(op, name="B2", reads=op.reads, writes=tuple(writes)))


def read_where_they_were_before_they_moved(s: Schedule) -> Schedule:
    saved = access_of(s, "F.1.0", "s.1.0")
    s, host = spare(s, saved, "host.s", Tier.HOST)
    s, other = spare(s, saved, "other.s")
    away = copy_to(saved, host, s, Stream.D2H, "away")
    return after(s, "F.1.0", away, copy_to(host, other, s, Stream.H2D, "back"))


def read_where_they_were_before_they_left(s: Schedule) -> Schedule:
    saved = access_of(s, "F.1.0", "s.1.0")
    s, host = spare(s, saved, "host.s", Tier.HOST)
    return after(s, "F.1.0", copy_to(saved, host, s, Stream.D2H, "away"))


def left_for_two_places(s: Schedule) -> Schedule:
    """What comes back from the first place would not wait for the copy to the second."""
    saved = access_of(s, "F.1.0", "s.1.0")
    s, first = spare(s, saved, "host.s", Tier.HOST)
    s, second = spare(s, first, "host.t")
    away, again = (copy_to(saved, to, s, Stream.D2H, name) for to, name in ((first, "away"), (second, "again")))
    return after(s, "F.1.0", away, again, copy_to(first, saved, s, Stream.H2D, "back"))


def saved_within_the_device(s: Schedule) -> Schedule:
    saved = access_of(s, "F.1.0", "s.1.0")
    s, other = spare(s, saved)
    return edited(after(s, "F.1.0", copy_to(saved, other, s)), "B.1.0", reads=replaced(s, "B.1.0", saved, other))


def saved_within_the_host(s: Schedule) -> Schedule:
    saved = access_of(s, "F.1.0", "s.1.0")
    s, first = spare(s, saved, "host.s", Tier.HOST)
    s, second = spare(s, first, "host.t")
    return after(s, "F.1.0", copy_to(saved, first, s, Stream.D2H, "away"), copy_to(first, second, s, Stream.CPU))


def saved_by_a_cast(s: Schedule) -> Schedule:
    s = saved_within_the_device(s)
    return edited(s, "copy", kind=Kind.UPDATE, phase=Phase.CAST, layer=1)


def from_drive_to_drive(s: Schedule) -> Schedule:
    s, first = spare(s, on("w.1"), "drive.w", Tier.NVME)
    s, second = spare(s, first, "drive.v")
    return before(s, s.ops[0].name, copy_to(first, second, s, Stream.NVME_READ))


def from_device_to_drive(s: Schedule) -> Schedule:
    s, drive = spare(s, on("w.1"), "drive.w", Tier.NVME)
    return before(s, s.ops[0].name, copy_to(on("w.1"), drive, s, Stream.NVME_WRITE))


def two_tensors_in_one_buffer(s: Schedule) -> Schedule:
    gradient = access_of(s, "B.1.0", "g.1")
    back = next(access for access in op_of(s, "B.1.0").writes if access.tensor == "d.0.0")
    moved = Access(gradient.buffer, back.tensor)
    writes = tuple(moved if access == back else access for access in op_of(s, "B.1.0").writes)
    return edited(s, "B.1.0", writes=writes)


def saved_and_others_in_turn(s: Schedule) -> Schedule:
    saved = access_of(s, "F.1.0", "s.1.0")
    norm = Access(saved.buffer, "norm")  # when the backward has used them up

    def moved(accesses: tuple[Access, ...]) -> tuple[Access, ...]:
        return tuple(norm if access.tensor == "norm" else access for access in accesses)

    return with_ops(s, [replace(op, reads=moved(op.reads), writes=moved(op.writes)) for op in s.ops])


def a_wait_that_writes(s: Schedule) -> Schedule:
    """The weights that stand there are read again by backward, and would be void by then."""
    wait = Op(name="H", kind=Kind.UPDATE, phase=Phase.SYNC, stream=Stream.HOST, writes=(on("w.1"),))
    return after(s, "F.1.0", wait)


def a_wait_of_the_device(s: Schedule) -> Schedule:
    wait = Op(name="H", kind=Kind.UPDATE, phase=Phase.SYNC, stream=Stream.COMPUTE, reads=(on("w.1"),))
    return after(s, "F.1.0", wait)


def a_wait_of_no_layer(s: Schedule) -> Schedule:
    wait = Op(name="H", kind=Kind.PREFETCH, phase=Phase.SYNC, stream=Stream.HOST, layer=99, reads=(on("w.1"),))
    return after(s, "F.1.0", wait)


def a_copy_of_another_micro_batch(s: Schedule) -> Schedule:
    output = access_of(s, "F.1.0", "x.1.0")
    s, host = spare(s, output, "host.x", Tier.HOST)
    return after(s, "F.1.0", replace(copy_to(output, host, s, Stream.D2H), microbatch=None))


def an_update_that_writes_more(s: Schedule) -> Schedule:
    update = op_of(s, "U.1")
    return edited(s, "U.1", writes=(*update.writes, Access("device.g.2", "g.1")))


def a_gradient_of_what_is_frozen(s: Schedule) -> Schedule:
    """The executor has no place for it, of no bytes as it is."""
    s = on_device(MODEL, replace(s.workload, lora_rank=2, grad_clip=None))
    back = next(access for access in op_of(s, "B.0.0").writes if access.tensor == "d.embed.0")
    s = replace(s, buffers=(*s.buffers, Buffer(name="none", tier=Tier.DEVICE, nbytes=0)))
    gradient = (Access("none", "g.embed"),)
    op = replace(op_of(s, "B.0.0"), name="B.embed.0", layer=MODEL.embed, reads=(back,), writes=gradient)
    return after(s, "B.0.0", op)


def added_to_a_gradient(s: Schedule, more: str) -> Schedule:
    add = replace(scaling(s, "A"), phase=Phase.ACCUMULATE, reads=(on("g.1"), on(more)))
    return after(s, "B.1.0", add)


def weights_added_to_a_gradient(s: Schedule) -> Schedule:
    return added_to_a_gradient(s, "w.1")


def another_layers_gradient_added(s: Schedule) -> Schedule:
    return added_to_a_gradient(s, "g.2")


def an_output_added_to(s: Schedule) -> Schedule:
    """As gradients are: but it is written over."""
    forward, output = op_of(s, "F.1.0"), access_of(s, "F.1.0", "x.1.0")
    again = replace(forward, name="R", phase=Phase.RECOMPUTE, reads=(*forward.reads, output), writes=(output,))
    return after(s, "F.1.0", again)


def activations_saved_by_a_backward(s: Schedule) -> Schedule:
    s, saved = spare(s, access_of(s, "F.1.0", "s.1.0"))
    return edited(s, "B.1.0", writes=(*op_of(s, "B.1.0").writes, saved))


def weights_cleared_as_a_gradient(s: Schedule) -> Schedule:
    """In every step, the first too, before they are read: they are not what the step begins with."""
    clear = replace(scaling(s, "Z"), phase=Phase.ZERO, reads=(), writes=(Access(on("w.1").buffer, "g.1"),))
    return before(s, "F.1.0", clear)


def a_recompute_of_nothing(s: Schedule) -> Schedule:
    """It would run all of the block, and be taken to leave out what only its output needs."""
    again = replace(op_of(s, "F.1.0"), name="R", phase=Phase.RECOMPUTE, writes=())
    return after(s, "F.1.0", again)


def an_update_that_reads_more(s: Schedule) -> Schedule:
    s, kept = spare(s, access_of(s, "F.1.0", "s.1.0"))
    return edited(s, "U.1", reads=(*op_of(s, "U.1").reads, kept))


def a_scale_that_reads_more(s: Schedule) -> Schedule:
    scale = scaling(s)
    return without_clipping(after(s, "N", replace(scale, reads=(*scale.reads, on("w.1")))))


def a_zero_that_reads(s: Schedule) -> Schedule:
    clear = replace(scaling(s, "Z"), phase=Phase.ZERO, reads=(on("g.1"),))
    return after(s, "U.1", clear)


def a_norm_on_a_drives_stream(s: Schedule) -> Schedule:
    """One thread would run what is predicted of all."""
    return edited(two_slots(MODEL, s.workload), "N", stream=Stream.NVME_READ)


def replaced(s: Schedule, name: str, old: Access, new: Access) -> tuple[Access, ...]:
    return tuple(new if access == old else access for access in op_of(s, name).reads)


def nothing_added(s: Schedule) -> Schedule:
    gradient = on("g.1")
    return after(s, "B.1.0", replace(scaling(s, "A"), phase=Phase.ACCUMULATE, reads=(gradient,), writes=(gradient,)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (another_layers_gradient, "U.1 updates with tensors of layers 1, 2"),
        (another_layers_state, "U.1 updates with tensors of layers 1, 2"),
        (another_layers_update, "U.1 updates with tensors of layers 1, 2"),
        (norm_of_a_gradient_twice, r"N reads g\.\w+ in device\.g\.\w+ 2 times"),
        (clipped_and_clipped_in_the_update, "U.1 reads the norm for the gradient of layer 1, which S.g.1 has clipped"),
        (clipped_twice, "S2.g.1 reads the norm for the gradient of layer 1, which S.g.1 has clipped"),
        (norm_of_a_clipped_gradient, "N2 takes the norm of the gradient of layer 1, which S.g.1 has clipped"),
        (scaled_by_no_norm, r"S\.g\.1 clips by no global norm"),
        (scaled_by_half_of_the_norm, r"S\.g\.1 clips by a norm without layers \w"),
        (scaled_without_reading, "S.g.1 scales g.1 without reading it"),
        (another_layers_output, r"F.0.0 \(forward of layer 0\) writes x.1.0"),
        (recompute_as_backward, r"B.1.0 \(recompute of layer 1\) writes d.0.0, g.1"),
        (embedding_of_a_block, "F.1.0 computes embed of layer 1"),
        (forward_of_the_embedding, "F.embed.0 computes forward of layer embed"),
        (loss_of_a_block, "B.1.0 computes loss of layer 1"),
        (a_cast_into_another_kind, "C makes d.1.0 of x.1.0"),
        (nothing_added, "A adds 0 gradients to g.1"),
        (both_gradients_applied, r"U\.1 updates with g\.1, g32\.1"),
        (another_output_read, r"F\.2\.0 \(forward of layer 2\) reads x\.0\.0"),
        (a_cast_over_itself, r"C makes g32\.1 of g\.1 in device\.g\.1"),
        (a_sum_over_itself, r"C makes g32\.1 of g\.1 in device\.g\.1"),
        (norm_added_to_another, "N reads the norm in spare and does not write it there"),
        (norm_on_a_drive, r"N \(norm\) runs on compute, a stream of the GPU, and touches norm, on nvme"),
        (scaled_output, r"S \(scale\) writes x\.0\.0"),
        (cleared_weights, r"Z \(zero\) writes w\.1"),
        (backward_twice, r"B2 reads the saved activations of layer 1, micro-batch 0 where they ended with B\.1\.0"),
        (read_where_they_were_before_they_moved, r"B\.1\.0 reads the saved activations .* ended with back"),
        (read_where_they_were_before_they_left, r"B\.1\.0 reads the saved activations .* ended with away"),
        (left_for_two_places, r"again reads the saved activations .* ended with away"),
        (a_wait_that_writes, r"H \(sync\) writes w\.1"),
        (an_update_that_writes_more, r"U\.1 \(adam\) writes g\.1\n"),
        (saved_within_the_device, "copy .* moves the saved activations of .* from device to device"),
        (saved_within_the_host, "copy .* moves the saved activations of .* from host to host"),
        (saved_by_a_cast, "copy .* moves the saved activations of .* from device to device"),
        (two_tensors_in_one_buffer, r"B\.1\.0 writes (g\.1 and d\.0\.0|d\.0\.0 and g\.1) into device\.g\.1\n"),
        (
            saved_and_others_in_turn,
            r"structure on saved\d: F\.\d\.0 touches the saved activations .* in saved\d, N the global gradient norm",
        ),
        (from_drive_to_drive, r"copy \(copy\) moves the weights of layer 1 from nvme to nvme"),
        (from_device_to_drive, "a drive and the device have no link"),
        (weights_added_to_a_gradient, r"A adds w\.1 to g\.1\n +add up gradients of one layer"),
        (another_layers_gradient_added, r"A adds g\.2 to g\.1\n +add up gradients of one layer"),
        (an_output_added_to, r"R \(recompute of layer 1\) reads x\.1\.0\n"),
        (activations_saved_by_a_backward, r"B\.1\.0 \(backward of layer 1\) writes s\.1\.0\n"),
        (
            weights_cleared_as_a_gradient,
            r"F\.1\.0 reads the weights .*, which then holds the gradient of layer 1, put .* Z",
        ),
        (a_gradient_of_what_is_frozen, r"B\.embed\.0 computes the gradient of layer embed, which is not trained"),
    ],
)
def test_what_would_train_something_else_is_refused(change: Callable[[Schedule], Schedule], message: str) -> None:
    right = on_device(MODEL, WORK)
    verify(right)
    with pytest.raises(ScheduleError, match=message):
        verify(change(right))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (a_wait_of_the_device, "H synchronises on stream compute\n"),
        (a_wait_of_no_layer, "H is of layer 99\n"),
        (a_copy_of_another_micro_batch, "copy is of layer 1, micro-batch None, and copies the output of layer 1"),
    ],
)
def test_what_would_be_drawn_as_something_else_is_refused(change: Callable[[Schedule], Schedule], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        verify(change(on_device(MODEL, WORK)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (an_update_that_reads_more, r"U\.1 \(adam\) reads s\.1\.0\n"),
        (a_scale_that_reads_more, r"S\.g\.1 \(scale\) reads w\.1\n"),
        (a_zero_that_reads, r"Z \(zero\) reads g\.1\n"),
        (a_recompute_of_nothing, r"R \(recompute of layer 1\) does not write its output, or what its backward needs"),
        (a_norm_on_a_drives_stream, r"N \(norm\) is queued on nvme_read\n +queue it on cpu: a drive's streams copy"),
    ],
)
def test_what_would_be_predicted_as_something_else_is_refused(
    change: Callable[[Schedule], Schedule], message: str
) -> None:
    with pytest.raises(ScheduleError, match=message):
        verify(change(on_device(MODEL, WORK)))


def test_a_buffer_of_the_host_that_held_activations_may_hold_something_else() -> None:
    """Which does not end with the backward that uses the activations up."""
    s = on_device(MODEL, WORK)
    saved, output = access_of(s, "F.1.0", "s.1.0"), access_of(s, "F.0.0", "x.0.0")
    s, host = spare(s, saved, "host.s", Tier.HOST)
    s, elsewhere = spare(s, output)
    kept = Access(host.buffer, output.tensor)
    s = after(s, "F.1.0", copy_to(saved, host, s, Stream.D2H, "away"), copy_to(host, saved, s, Stream.H2D, "back"))
    s = after(s, "back", copy_to(output, kept, s, Stream.D2H, "keep"))
    assert verify(after(s, "B.1.0", copy_to(kept, elsewhere, s, Stream.H2D, "again")))


def test_a_gradient_clipped_by_itself_is_clipped_once() -> None:
    s = on_device(MODEL, WORK)
    assert verify(without_clipping(after(s, "N", scaling(s))))


@pytest.mark.parametrize(
    ("name", "side", "tensor", "message"),
    [
        ("B.1.0", "writes", "g.1", r"B\.1\.0 writes g\.1 in device\.g\.1 and spare"),
        ("L.head.0", "writes", "g.head", r"L\.head\.0 writes g\.head in device\.g\.head and spare"),
        ("F.1.0", "writes", "s.1.0", r"F\.1\.0 writes s\.1\.0 in \w+ and spare"),
        ("F.embed.0", "writes", "x.embed.0", r"F\.embed\.0 writes x\.embed\.0 in \w+ and spare"),
        ("F.1.0", "reads", "x.0.0", r"F\.1\.0 reads x\.0\.0 in \w+ and spare"),
        ("B.1.0", "reads", "d.1.0", r"B\.1\.0 reads d\.1\.0 in \w+ and spare"),
        ("U.1", "writes", "w.1", r"U\.1 writes w\.1 in device\.w\.1 and spare"),
        ("U.1", "reads", "g.1", r"U\.1 reads g\.1 in device\.g\.1 and spare"),
    ],
)
def test_an_op_has_one_buffer_of_a_tensor(name: str, side: str, tensor: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        verify(also(on_device(MODEL, WORK), name, side, tensor))


@pytest.mark.parametrize("back", [False, True])
def test_a_clipped_gradient_and_one_that_is_not_are_no_sum_in_either_order(back: bool) -> None:
    s, rest = spare(on_device(MODEL, WORK), on("g.1"))
    reads = (on("g.1"), rest) if back else (rest, on("g.1"))
    added = replace(scaling(s, "A"), phase=Phase.ACCUMULATE, reads=reads)
    wrong = without_clipping(after(s, "N", copy_to(on("g.1"), rest, s), scaling(s), added))
    with pytest.raises(ScheduleError, match="A adds up the gradient of layer 1 from one that is clipped and one that"):
        verify(wrong)


def test_part_of_a_gradient_is_not_clipped() -> None:
    s = on_device(MODEL, replace(WORK, accumulation=2, grad_clip=None))
    half = replace(scaling(s), reads=(on("g.1"),))
    assert verify(after(s, "B.1.1", half))
    with pytest.raises(ScheduleError, match=r"S\.g\.1 uses the gradient of layer 1 without backward of 1\.1"):
        verify(after(s, "B.1.0", half))


def test_a_micro_batch_does_not_take_the_place_of_another() -> None:
    """By a cast, which keeps names; else micro-batch 1 would be trained on the data of micro-batch 0."""
    model, work = small(blocks=1), replace(WORK, accumulation=2, grad_clip=None)
    s = policies.build("streamed", model, work, ROOM)
    mine, other = access_of(s, "F.0.0", "x.embed.0"), access_of(s, "F.0.1", "x.embed.1")
    cast = replace(op_of(s, "U.0"), name="C", phase=Phase.CAST, stream=Stream.COMPUTE, layer=model.embed)
    with pytest.raises(ScheduleError, match=r"C makes x\.embed\.1 of x\.embed\.0"):
        verify(before(s, "F.0.1", replace(cast, reads=(mine,), writes=(other,))))


@pytest.mark.parametrize(("tied", "over"), [(False, "w.head"), (True, "w.head"), (True, "w.embed"), (True, "x.2.0")])
def test_the_loss_does_not_write_over_weights_that_it_reads_chunk_after_chunk(tied: bool, over: str) -> None:
    s = two_slots(small(tied=tied, blocks=3), replace(WORK, grad_clip=None))
    place, back = access_of(s, "L.head.0", over), access_of(s, "L.head.0", "d.2.0")
    there = Access(place.buffer, back.tensor)

    def moved(accesses: tuple[Access, ...]) -> tuple[Access, ...]:
        return tuple(there if access == back else access for access in accesses)

    ops = [replace(op, reads=moved(op.reads), writes=moved(op.writes)) for op in s.ops]
    wrong = with_ops(s, ops)
    if over == "x.2.0":
        assert verify(wrong)
        return
    with pytest.raises(ScheduleError, match=rf"L\.head\.0 writes d\.2\.0 over {over}, which it reads, in weight"):
        verify(wrong)


def test_two_gradients_are_not_added_at_once() -> None:
    s = two_slots(MODEL, replace(WORK, accumulation=2))
    first, last = (op for op in s.ops if op.phase == Phase.ACCUMULATE and op.layer == 1)
    kept = [Buffer(name=f"kept{m}", tier=Tier.HOST, nbytes=10**6) for m in range(2)]
    s = replace(with_ops(s, [op for op in s.ops if op is not first]), buffers=(*s.buffers, *kept))
    for m, op in enumerate([op for op in s.ops if op.name.startswith("O.g.1")]):
        s = edited(s, op.name, writes=(Access(f"kept{m}", "g.1"),))
    s = edited(s, last.name, reads=(Access("kept0", "g.1"), Access("kept1", "g.1")))
    with pytest.raises(ScheduleError, match=r"adds 2 gradients to g\.1"):
        verify(s)


def test_a_gradient_over_weights_that_its_op_reads_is_refused() -> None:
    s = policies.build("lora_streamed", MODEL, replace(WORK, lora_rank=2, grad_clip=None), ROOM, resident=0, rank=2)
    backward = op_of(s, "B.1.0")
    slot = next(access.buffer for access in backward.reads if access.tensor == "w.1")
    own, over = next(access for access in backward.writes if access.tensor == "g.1"), Access(slot, "g.1")

    def moved(accesses: tuple[Access, ...]) -> tuple[Access, ...]:
        return tuple(over if access == own else access for access in accesses)

    ops = [replace(op, reads=moved(op.reads), writes=moved(op.writes)) for op in s.ops]
    with pytest.raises(ScheduleError, match="B.1.0 writes g.1 over w.1, which it reads, in " + slot):
        verify(with_ops(s, ops))


@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_weights_that_are_never_updated_are_found_whatever_the_staleness(staleness: int) -> None:
    s = on_device(MODEL, replace(WORK, grad_clip=None))
    update = op_of(s, "U.1")
    elsewhere = Access("device.other", "w.1")
    s = replace(s, staleness=staleness, buffers=(*s.buffers, replace(s.buffer["device.w.1"], name="device.other")))
    wrong = edited(
        s, "U.1", reads=swapped(update.reads, "w.1", elsewhere), writes=swapped(update.writes, "w.1", elsewhere)
    )
    with pytest.raises(ScheduleError, match="reads the weights of layer 1 in version 0 where"):
        verify(wrong)
    with pytest.raises(ScheduleError, match="declared is a staleness of 1000000000000, found one of"):
        verify(replace(wrong, staleness=10**12))  # which is not waited for


def test_the_cpu_runs_its_updates_on_one_stream() -> None:
    """On two they would be counted twice: an update takes all threads already."""
    schedule = policies.build("streamed", MODEL, replace(WORK, grad_clip=None), ROOM)
    verify(schedule)
    told = r"U\.0 updates on host and U\.\w+ on cpu|U\.\w+ updates on cpu and U\.0 on host"
    with pytest.raises(ScheduleError, match=told):
        verify(edited(schedule, "U.0", stream=Stream.HOST))
