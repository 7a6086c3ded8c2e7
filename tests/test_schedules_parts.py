"""Optimizer state and gradients in parts: names, what each part is of, what the verifier says of those that lack."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedules import policies, presets, trained
from schedules import tensor as tensors
from schedules.errors import InputError
from schedules.gradient_coverage import put_together
from schedules.op import Phase, Stream, Tier
from schedules.program import Program
from schedules.schedule import Schedule
from schedules.sizes import tensor_bytes
from schedules.tensor import Part, TensorError, parse
from schedules.verify import ScheduleError, verify
from schedules.workload import PRECISIONS, STATE_BLOCK, MemoryBudget, Workload

MODEL = replace(presets.load("tiny"), num_hidden_layers=2)
STEP = Workload(micro_batch_size=1, seq_len=8, precision="fp32")
ROOM = MemoryBudget(device_bytes=1 << 30, host_bytes=1 << 30, nvme_bytes=1 << 30)
QUARTERS = tensors.parts(4)


def test_a_part_has_a_name_of_its_own() -> None:
    name = parse("o.head.2of3")
    assert (name.cls, name.layer, name.microbatch, name.part) == ("o", "head", None, Part(2, 3))
    assert str(name) == "o.head.2of3"
    assert tensors.whole("g32.7.1of2") == "g32.7" and tensors.whole("x.7.1") == "x.7.1"
    assert tensors.part_of(["g.7", "o.7.1of2"]) == Part(1, 2) and tensors.part_of(["g.7", "x.7.1"]) is None
    assert [str(parse(f"o.7.{part}")) for part in QUARTERS] == ["o.7.0of4", "o.7.1of4", "o.7.2of4", "o.7.3of4"]


@pytest.mark.parametrize(
    "name",
    [
        "o.3.4of4",
        "o.3.0of1",
        "o.3.0of0",
        "o.3.00of4",
        "o.3.1of04",
        "w.3.0of2",
        "a.3.0of2",
        "g.3.2of2",
        "o.3.1",
        "o.3.0of1\N{ARABIC-INDIC DIGIT ZERO}",
        "x.0.0of2",
        "x.0.00",
        "x.00.0",
        "x.0.\N{ARABIC-INDIC DIGIT ZERO}",
    ],
)
def test_what_is_no_part_is_told(name: str) -> None:
    with pytest.raises(TensorError, match=r"g\|g32\|o\.LAYER\.PARTofPARTS"):
        parse(name)


def test_a_layer_is_in_one_part_at_least() -> None:
    assert tensors.parts(1) == (None,)
    with pytest.raises(TensorError, match="one part or more, not in 0"):
        tensors.parts(0)


@given(st.sampled_from(list(PRECISIONS)), st.integers(2, 33), st.integers(1, 40), st.integers(1, 300))
def test_parts_are_of_every_parameter_once(precision: str, of: int, hidden: int, vocabulary: int) -> None:
    model = replace(MODEL, hidden_size=2 * hidden, vocab_size=vocabulary)
    workload = replace(STEP, precision=precision)
    for i in model.layers:
        n = trained.params(model, workload, i)
        if n <= (of - 1) * STATE_BLOCK:
            with pytest.raises(InputError, match=f"too few for {of} parts"):
                trained.span(model, workload, i, Part(0, of))
            continue
        spans = [trained.span(model, workload, i, part) for part in tensors.parts(of)]
        assert [j for span in spans for j in range(n)[span]] == list(range(n))
        assert all(span.start % STATE_BLOCK == 0 < span.stop - span.start for span in spans)
        name = model.layer_name(i)
        for cls in ("o", "g", "g32"):
            bytes_of = [tensor_bytes(f"{cls}.{name}.{part}", model, workload) for part in tensors.parts(of)]
            assert sum(bytes_of) == tensor_bytes(f"{cls}.{name}", model, workload)


def in_parts(updates: Sequence[Part | None], *, copied: Sequence[Part | None] = ()) -> Schedule:
    """All on the host but block 0's state, on a drive; it is updated in these parts, and these are copied besides."""
    model, p = MODEL, Program(MODEL, STEP)
    w, g, passing = p.slots("weight", 2), p.slots("grad", 2), p.slots("passing", 2, Tier.HOST)
    p.keep_on_nvme(*(p.state(0, part) for part in set(updates)))

    def update(part: Part | None) -> None:
        state = p.prefetch(p.state(0, part), into=passing.next(), stream=Stream.NVME_READ)
        p.update(0, grad=p.at_home(p.grad(0)), state=state, part=part)
        p.offload(p.state(0, part), out_of=state, stream=Stream.NVME_WRITE)

    for i in model.layers[:-1]:
        p.forward(i, weights=p.load(p.weight(i), w))
    for i in reversed(model.layers):
        grad, slot = g.next(), None if i == model.embed else p.load(p.weight(i), w)
        if i == model.head:
            p.loss(weights=slot, grad=grad)
        else:
            p.backward(i, weights=slot, grad=grad)
        p.offload(p.grad(i), out_of=grad)
        if i != 0:
            p.update(i)
            continue
        for part in updates:
            update(part)
    for part in copied:
        p.prefetch(p.state(0, part), into=p.buffer("copy", Tier.HOST), stream=Stream.CPU)
    return p.build(policy="in_parts")


def told(schedule: Schedule) -> str:
    with pytest.raises(ScheduleError) as error:
        verify(schedule)
    return str(error.value)


@pytest.mark.parametrize("updates", [(None,), tensors.parts(2), QUARTERS, QUARTERS[::-1]])
def test_parts_are_updated_in_any_order(updates: Sequence[Part | None]) -> None:
    schedule = in_parts(updates)
    initial = verify(schedule).initial
    assert {t for t in initial.values() if t.startswith("o.0")} == {f"o.0.{p}" if p else "o.0" for p in updates}
    whole = {op.name: op for op in in_parts((None,)).ops}
    parts = [op for op in schedule.ops if op.phase == Phase.ADAM and op.layer == 0]
    assert sum(op.params for op in parts) == whole["U.0"].params == MODEL.params(0)
    assert sum(op.nbytes for op in parts) == whole["U.0"].nbytes


def test_every_wait_between_parts_matters() -> None:
    schedule = in_parts(QUARTERS)
    for i, wait in enumerate(schedule.waits):
        assert "race" in told(replace(schedule, waits=schedule.waits[:i] + schedule.waits[i + 1 :])), wait


def test_a_part_left_out_is_told() -> None:
    text = told(in_parts(QUARTERS[:3]))
    assert "the gradient of layer 0 is never applied: the step has no update of it that is whole" in text
    assert "add an update of layer 0, of each part" in text
    # in the step after, it is met with in the forward
    assert "F.0.0 reads the weights of layer 0 while only parts 0of4, 1of4, 2of4 are updated" in text


def test_a_part_updated_twice_is_told() -> None:
    with pytest.raises(ScheduleError) as error:
        verify(in_parts((*QUARTERS[:2], *QUARTERS[1:])))
    (twice,) = (v for v in error.value.violations if "a second time" in v.message)
    assert (twice.op, twice.on) == ("U.0.1of4#2", "U.0.1of4")
    assert twice.message == "U.0.1of4#2 updates part 1of4 of layer 0 a second time in one step"
    assert "updates part 3of4 of layer 0 a second time in one step, after U.0.3of4" in told(
        in_parts((*QUARTERS, QUARTERS[3]))
    )


def test_a_layer_is_divided_in_one_way() -> None:
    text = told(in_parts((Part(0, 2), Part(2, 4), Part(3, 4))))
    state = "of the optimizer state of layer 0"
    assert f"P.o.0.0of2 touches part 0of2 {state}, P.o.0.2of4 part 2of4 {state}" in text
    assert "divide a layer in one way" in text and text.startswith("1 problem in ")
    assert f"touches part 0of2 {state}, P.o.0 the optimizer state of layer 0" in told(in_parts((Part(0, 2), None)))


@pytest.mark.parametrize("copied", [None, Part(1, 2)])
def test_what_is_copied_of_a_state_is_divided_as_it_is_updated(copied: Part | None) -> None:
    """A checkpoint would keep both, the one that nobody updates over the one that is trained."""
    assert "divide a layer in one way" in told(in_parts(QUARTERS, copied=[copied]))
    assert verify(in_parts(QUARTERS, copied=[Part(1, 4)]))


def test_a_state_that_did_not_go_back_is_stale() -> None:
    schedule = in_parts(QUARTERS)
    lost = "O.o.0.2of4"
    ops = tuple(op for op in schedule.ops if op.name != lost)
    waits = tuple(wait for wait in schedule.waits if lost not in (wait.op, wait.on))
    text = told(replace(schedule, ops=ops, waits=waits))
    assert "U.0.2of4 updates part 2of4 of the optimizer state of layer 0 in version 0 where version 1 is due" in text


def test_more_parts_than_there_is_of_a_layer_are_refused() -> None:
    with pytest.raises(InputError, match="too few for 1000 parts of 256 or more"):
        in_parts([Part(0, 1000)])


# ---- gradients

HALVES = tensors.parts(2)
Land = Callable[[Program, int, str], None]  # what becomes of block 0's gradient in a device buffer after a micro-batch


def landing(land: Land, *, batches: int = 1, normed: Sequence[str] | None = None) -> Schedule:
    """Everything streams and is updated from home, but for block 0, whose gradient `land`s and is then up to it.

    `normed`: gradients are clipped, by the norm of these of block 0, at home, and of the other layers'.
    """
    workload = replace(STEP, accumulation=batches, grad_clip=None if normed is None else 1.0)
    model, p = MODEL, Program(MODEL, workload)
    w, g = p.slots("weight", 2), p.slots("grad", 2)
    others = [i for i in model.layers if i != 0]
    for i in model.layers[:-1]:
        slot = p.load(p.weight(i), w)
        for m in workload.microbatches:
            p.forward(i, m, weights=slot)
    for i in reversed(model.layers):
        grad, slot = g.next(), None if i == model.embed else p.load(p.weight(i), w)
        for m in workload.microbatches:
            if i == model.head:
                p.loss(m, weights=slot, grad=grad)
            else:
                p.backward(i, m, weights=slot, grad=grad)
            if i == 0:
                land(p, m, grad)
        if i != 0:
            p.offload(p.grad(i), out_of=grad)
    if normed is not None:
        p.norm(p.at_home(grad) for grad in (*normed, *map(p.grad, others)))
        for part in HALVES:
            update(p, part, part)
    for i in others:
        p.update(i)
    return p.build(policy="landing")


def update(p: Program, part: Part | None, by: Part | None) -> None:
    """By that part of the gradient, at home."""
    grad = p.grad(0, part=by)
    p.update(0, grad=p.at_home(grad), part=part)


def at_once(p: Program, m: int, buffer: str) -> None:
    p.offload(p.grad(0), out_of=buffer)
    p.update(0)


def halves(p: Program, m: int, buffer: str) -> None:
    """One half after the other leaves through one slab and is applied there."""
    slab = p.buffer("slab", Tier.HOST)
    for part in HALVES:
        grad = p.grad(0, part=part)
        p.update(0, grad=(p.offload(grad, out_of=buffer, into=slab), grad), part=part)


def test_a_gradient_leaves_in_parts() -> None:
    schedule = landing(halves)
    assert verify(schedule)
    copies = [op for op in schedule.ops if op.name.startswith("O.g.0.")]
    assert [(op.reads[0].tensor, op.writes[0].tensor) for op in copies] == [("g.0", "g.0.0of2"), ("g.0", "g.0.1of2")]
    assert sum(op.nbytes for op in copies) == tensor_bytes("g.0", MODEL, STEP)
    assert schedule.buffer["slab"].nbytes == max(op.nbytes for op in copies) < tensor_bytes("g.0", MODEL, STEP)
    whole = next(op for op in landing(at_once).ops if op.name == "U.0")
    parts = [op for op in schedule.ops if op.phase == Phase.ADAM and op.layer == 0]
    assert (sum(op.nbytes for op in parts), sum(op.params for op in parts)) == (whole.nbytes, whole.params)
    for i, wait in enumerate(schedule.waits):
        assert "race" in told(replace(schedule, waits=schedule.waits[:i] + schedule.waits[i + 1 :])), wait


def test_parts_of_a_gradient_add_up() -> None:
    """At home, where those of the first micro-batch are put; half of the second alone is told."""

    def adds_up(p: Program, m: int, buffer: str, parts: Sequence[Part | None] = HALVES) -> None:
        for part in parts if m else HALVES:
            slab = p.offload(p.grad(0, part=part), out_of=buffer, into=p.buffer("slab", Tier.HOST))
            p.accumulate(0, out_of=slab, part=part)
        p.discard(buffer)
        for part in HALVES if m else ():
            update(p, part, part)

    schedule = landing(adds_up, batches=2)
    assert verify(schedule)
    sums = [op for op in schedule.ops if op.phase == Phase.ACCUMULATE]
    n = MODEL.params(0)
    assert [sum(op.params for op in sums), sum(op.nbytes for op in sums)] == [2 * n, 4 * n * (2 + 3)]
    text = told(landing(functools.partial(adds_up, parts=HALVES[:1]), batches=2))
    assert "U.0.1of2 uses part 1of2 of the gradient of layer 0 without backward of 0.1" in text
    assert text.startswith("1 problem in ")


def test_a_part_that_left_too_early_is_told() -> None:
    def too_early(p: Program, m: int, buffer: str) -> None:
        if m == 0:
            p.offload(p.grad(0, part=HALVES[0]), out_of=buffer)
            return
        p.offload(p.grad(0, part=HALVES[1]), out_of=buffer)
        for part in HALVES:
            update(p, part, part)

    text = told(landing(too_early, batches=2))
    assert "U.0.0of2 uses part 0of2 of the gradient of layer 0 without backward of 0.1" in text
    assert text.startswith("1 problem in ")


@pytest.mark.parametrize(
    ("part", "by", "message"),
    [
        (Part(0, 2), Part(1, 2), "U.0.0of2 updates part 0of2 of a layer by part 1of2 of the gradient of layer 0"),
        (Part(0, 2), Part(0, 3), "U.0.0of2 updates part 0of2 of a layer by part 0of3 of the gradient of layer 0"),
        (None, Part(0, 2), "U.0 updates all of a layer by part 0of2 of the gradient of layer 0"),
    ],
)
def test_an_update_is_by_the_same_part_of_the_gradient(part: Part | None, by: Part, message: str) -> None:
    def land(p: Program, m: int, buffer: str) -> None:
        p.offload(p.grad(0, part=by), out_of=buffer)
        for one in tensors.parts(part.of) if part else (None,):
            update(p, one, by)

    assert message in told(landing(land))


def test_a_part_is_taken_out_of_memory_into_another_buffer() -> None:
    def over_itself(p: Program, m: int, buffer: str) -> None:
        p.offload(p.grad(0), out_of=buffer)
        home = p.home(p.grad(0))
        p.offload(p.grad(0, part=HALVES[0]), out_of=home, into=home, stream=Stream.CPU)

    def from_a_drive(p: Program, m: int, buffer: str) -> None:
        p.keep_on_nvme(p.grad(0))
        p.offload(p.grad(0), out_of=p.offload(p.grad(0), out_of=buffer, into=p.buffer("slab", Tier.HOST)),
                  stream=Stream.NVME_WRITE)  # fmt: skip
        p.prefetch(p.grad(0, part=HALVES[0]), out_of=p.home(p.grad(0)), into="slab", stream=Stream.NVME_READ)

    text = told(landing(over_itself))
    assert "O.g.0.0of2 copies a part of g.0 over the rest of it, in host.g.0" in text
    text = told(landing(from_a_drive))
    assert "P.g.0.0of2 reads a part of g.0 from nvme.g.0, which is read as a whole" in text


def test_a_part_is_taken_out_of_a_gradient_only() -> None:
    def of_a_state(p: Program, m: int, buffer: str) -> None:
        at_once(p, m, buffer)
        state = p.prefetch(p.state(0), into=p.buffer("state"))
        p.offload(p.state(0, HALVES[0]), out_of=state)

    assert "O.o.0.0of2 copies o.0 into o.0.0of2" in told(landing(of_a_state))


def test_passes_over_gradients_keep_to_one_part() -> None:
    def widened(p: Program, m: int, buffer: str) -> None:
        whole = p.offload(p.grad(0), out_of=buffer), p.grad(0)
        part = p.grad(0, wide=True, part=HALVES[0])
        p.cast(whole, p.at_home(part), stream=Stream.CPU)

    assert "C.g32.0.0of2 makes g32.0.0of2 of g.0" in told(landing(widened))

    def mixed(p: Program, m: int, buffer: str) -> None:
        for part in HALVES:
            p.offload(p.grad(0, part=part), out_of=buffer)
        first, second = (p.grad(0, part=part) for part in HALVES)
        p._update("A", Phase.ACCUMULATE, 0, Stream.CPU, [p.at_home(t) for t in (first, second)], [p.at_home(first)])

    assert "A adds g.0.1of2 to g.0.0of2" in told(landing(mixed))


def clipped(p: Program, m: int, buffer: str) -> None:
    for part in HALVES:
        p.offload(p.grad(0, part=part), out_of=buffer)


def test_a_norm_has_every_part_once() -> None:
    parts = [f"g.0.{part}" for part in HALVES]
    assert verify(landing(clipped, normed=parts))
    text = told(landing(clipped, normed=parts[:1]))
    assert "clips by a norm without layers 0" in text

    def twice(p: Program, m: int, buffer: str) -> None:
        p.offload(p.grad(0), out_of=buffer)
        clipped(p, m, buffer)

    assert "clips by a norm that counts a layer twice" in told(landing(twice, normed=[*parts, "g.0"]))
    assert "clips by a norm that counts a layer twice" in told(landing(twice, normed=["g.0", parts[1]]))


@pytest.mark.parametrize(
    ("pieces", "together"),
    [
        (["7", "head"], ("7", "head")),
        (["7.1of2", "embed", "7.0of2"], ("7", "embed")),
        (["7.0of3", "7.1of3"], ("7.0of3", "7.1of3")),
        (["7.0of2", "7.1of2", "7.1of2"], ("7", "7.1of2")),
        (["7.0of2", "7.1of2"] * 2, ("7", "7")),
        (["7.0of2", "7.1of3", "7.2of3", "7.0of3"], ("7", "7.0of2")),
    ],
)
def test_parts_are_put_together(pieces: list[str], together: tuple[str, ...]) -> None:
    assert put_together(pieces) == together


# ---- streamed


def moved(schedule: Schedule, tensor: str) -> list[tuple[Tier, Tier]]:
    tier = {buffer.name: buffer.tier for buffer in schedule.buffers}
    return [
        (tier[op.reads[0].buffer], tier[op.writes[0].buffer])
        for op in schedule.ops
        if op.phase == Phase.COPY and op.reads[0].tensor == tensor
    ]


def test_parts_of_one_block_live_in_different_places() -> None:
    schedule = policies.build("streamed", MODEL, STEP, ROOM, parts=4, stay=5, nvme=2)
    verify(schedule)
    tier = {buffer.name: buffer.tier for buffer in schedule.buffers}
    blocks = [*map(MODEL.layer_name, MODEL.blocks)]
    homes = {
        tensor: tier[buffer]
        for buffer, tensor in verify(schedule).initial.items()
        if parse(tensor).part is not None and parse(tensor).layer in blocks
    }
    assert sorted(homes) == [f"o.{i}.{part}" for i in MODEL.blocks for part in QUARTERS]
    assert list(homes.values()).count(Tier.DEVICE) == 5
    assert list(homes.values()).count(Tier.NVME) == 2
    for tensor, home in homes.items():
        there = {
            Tier.DEVICE: [],
            Tier.HOST: [(Tier.HOST, Tier.DEVICE), (Tier.DEVICE, Tier.HOST)],
            Tier.NVME: [
                (Tier.NVME, Tier.HOST), (Tier.HOST, Tier.DEVICE), (Tier.DEVICE, Tier.HOST), (Tier.HOST, Tier.NVME)
            ],
        }  # fmt: skip
        assert moved(schedule, tensor) == there[home]
    assert {op.stream for op in schedule.ops if op.phase == Phase.ADAM and op.layer in MODEL.blocks} == {Stream.COMPUTE}


def test_what_the_cpu_updates_is_in_parts() -> None:
    """Those of embedding and head, whose vocabulary is larger than a block, are no larger than a block's."""
    model = replace(MODEL, vocab_size=1000)
    schedule = policies.build("streamed", model, STEP, ROOM, parts=4, resident=1, slabs=2)
    verify(schedule)
    updates = [op for op in schedule.ops if op.phase == Phase.ADAM]
    head = -(-model.params(model.head) * 4 // model.params(0))
    assert head > 4
    names = [*(f"head.{part}" for part in tensors.parts(head)), *(f"{i}.{part}" for i in (1, 0) for part in QUARTERS)]
    assert [op.name for op in updates] == [f"U.{name}" for name in [*names, "embed"]]
    most = max(op.params for op in updates if op.layer in model.blocks)
    assert all(op.params <= most for op in updates[:-1])
    slabs = [buffer.nbytes for buffer in schedule.buffers if buffer.name.startswith("slab")]
    assert len(slabs) == 2 and max(slabs) == most * 4
    assert not any(buffer.name.startswith("host.g") for buffer in schedule.buffers)


def test_a_gradient_that_waits_on_a_drive_does_so_in_parts() -> None:
    schedule = policies.build("streamed", MODEL, STEP, ROOM, parts=4, nvme=8, nvme_weights=2, defer=2)
    verify(schedule)
    for i in MODEL.blocks:
        assert moved(schedule, f"g.{i}") == [(Tier.DEVICE, Tier.HOST)] * 4
        for part in QUARTERS:
            assert moved(schedule, f"g.{i}.{part}") == [(Tier.HOST, Tier.NVME), (Tier.NVME, Tier.HOST)]


def test_a_resident_layers_gradient_stays_only_where_it_waits() -> None:
    """To be clipped, or for more to be added: else it passes through the buffers that all gradients do."""
    layers = [*map(MODEL.layer_name, MODEL.layers)]
    for clip, staying in ((None, []), (1.0, [f"device.g.{layer}" for layer in layers])):
        schedule = policies.build("streamed", MODEL, replace(STEP, grad_clip=clip), ROOM, resident=len(layers))
        verify(schedule)
        assert sorted(b.name for b in schedule.buffers if b.name.startswith("device.g")) == sorted(staying)


def test_a_buffer_in_passing_is_as_large_as_a_part() -> None:
    schedules = {n: policies.build("streamed", MODEL, STEP, ROOM, parts=n, nvme=2 * n) for n in (1, 4)}
    sizes = {n: schedule.buffer["update.state0"].nbytes for n, schedule in schedules.items()}
    n = MODEL.params(0)
    assert sizes[1] == n * 8
    assert abs(sizes[4] - n * 2) < 8 * STATE_BLOCK
    assert schedules[1].allocated_bytes(Tier.NVME) == schedules[4].allocated_bytes(Tier.NVME) == 2 * n * 8
