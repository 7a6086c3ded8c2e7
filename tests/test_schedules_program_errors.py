"""What a policy's author gets wrong is told where it is written, in words that help."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from schedules import buffers, codec, most_ops
from schedules.errors import InputError, ProgramError
from schedules.op import Access, Stream, Tier
from schedules.presets import load
from schedules.program import Program
from schedules.ring import Ring
from schedules.verify import ScheduleError, verify
from schedules.workload import Workload

MODEL = replace(load("tiny"), num_hidden_layers=3)
STEP = Workload(micro_batch_size=1, seq_len=8, precision="fp32")
EMBED = MODEL.embed


def resident(**kwargs: int) -> Program:
    """All on the device; the forward has run."""
    p = Program(MODEL, STEP, **kwargs)
    p.keep_on_device(*(t for i in MODEL.layers for t in (p.weight(i), p.grad(i), p.state(i))))
    for i in MODEL.layers[:-1]:
        p.forward(i)
    return p


def finished() -> Program:
    p = resident()
    p.loss()
    for i in reversed(MODEL.layers[:-1]):
        p.backward(i)
    for i in MODEL.layers:
        p.update(i, stream=Stream.COMPUTE)
    return p


def test_a_step_in_the_right_order_is_safe() -> None:
    assert verify(finished().build(policy="resident"))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda p: p.offload(p.grad(1), out_of="slot0", blocking="x"), "O.g.1: blocking is True or False, not 'x'"),
        (lambda p: p.norm([], stream="gpu"), "N: a stream is h2d, compute, d2h, cpu, nvme_read, nvme_write or host"),
        (lambda p: p.update(1), "layer 1 from device.g.1, where nothing has put it: backward is missing"),
        (lambda p: p.slots("more", 2, "gpu"), "buffer more0: a tier is device, host or nvme, not 'gpu'"),
        (lambda p: p.evict(p.output(1, 0), tier="disk"), "a tier is device, host or nvme, not 'disk'"),
        (lambda p: p.synchronize(kind="wait"), "H: a kind is prefetch, compute, offload or update, not 'wait'"),
        (lambda p: p.synchronize(name=3), "the name of an op must be text that can be shown, not 3"),
        (lambda p: p.norm([p.at_home(p.grad(1))], name="N\n"), r"the name of an op must be text .*, not 'N\\n'"),
        (lambda p: p.buffer("more\x1b[31m"), r"the name of a buffer must be text .*, not 'more\\x1b\[31m'"),
        (lambda p: p.reserve("", 8), "the name of a buffer must be text that can be shown, not ''"),
        (lambda p: p.slots("more", 0), "more: the length of a ring must be a whole number of at least 1, not 0"),
        (lambda p: p.slots("more", 2.0), "more: the length of a ring must be a whole number of at least 1, not 2.0"),
        (lambda p: p.slots("more", 2).use("zz"), r"use\('zz'\): the ring has more0, more1"),
        (lambda p: p.forward(97), "tiny has no layer 97"),
        (lambda p: p.recompute(-2, output=True), "tiny has no layer -2"),
        (lambda p: p.forward(MODEL.head), r"the head has no forward of its own"),
        (lambda p: p.backward(MODEL.head), r"the head has no backward of its own"),
        (lambda p: p.recompute(-1, keep="nothing", output=True), r"recompute\(embed, 0\): only blocks run again"),
        (lambda p: p.slots("more", 10**11), "more: a ring has up to 10,000 slots, not 100,000,000,000"),
        (lambda p: p.slots("slot", 2), r"slots\('slot', 2\): there is a buffer slot0 already; give the ring another"),
        (lambda p: p.forward(1, keep="inputs"), "keep is all, input or nothing, not 'inputs'"),
        (lambda p: p.evict(p.weight(1)), r"only activations are evicted.*offload\(\) copy the weights of layer 1"),
        (lambda p: p.free(p.state(1)), "only activations are evicted, restored and freed"),
        (
            lambda p: p.reserve("logits", 1e6),
            r"reserve\('logits'\): bytes must be a whole number of at least 0, not 1000000.0",
        ),
        (lambda p: p.reserve("logits", True), "a whole number of at least 0, not True"),
        (lambda p: p.prefetch(p.weight(1), into="slot9"), "P.w.1: there is no buffer slot9; declare it with buffer"),
        (lambda p: p.reserve("logits", -1), "a whole number of at least 0, not -1"),
        (lambda p: p.recompute(1, keep="out"), "keep is all, input or nothing, not 'out'"),
        (
            lambda p: p.recompute(1, keep="input"),
            r"recompute\(1, 0\) would make nothing: call it with keep=\"all\", output=",
        ),
        (
            lambda p: p.recompute(1),
            r'micro-batch 0, are kept already: call forward\(1, 0\) with keep="input", or leave out recompute\(1, 0\)',
        ),
        (lambda p: p.keep_on_device("w.99"), "has no layer '99'"),
        (lambda p: p.keep_on_device("foo"), "unknown tensor 'foo'"),
        (lambda p: p.keep_on_nvme("o.9"), "has no layer '9'"),
        (lambda p: p.keep_on_nvme(p.output(1, 0)), "the output of layer 1, micro-batch 0 has no home"),
        (
            lambda p: p.prefetch(p.adapter(0), into="slot0"),
            "layer 0 has no adapters a.0: the workload has no lora_rank",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(wrong: Callable[[Program], object], told: str) -> None:
    p = resident()
    p.slots("slot", 2)
    with pytest.raises(InputError, match=told):
        wrong(p)


PAIR = "{} takes a (buffer, tensor) pair, as at_home() gives, not {}"
BUFFER = "{} takes a buffer for {}, as .next() or load() of a ring gives, not {}"
RING = "a ring of 2 slots such as more1"


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda p, ring: p.update(1, grad="slot0"), PAIR.format("update(grad=...)", "'slot0'")),
        (lambda p, ring: p.update(1, grad=ring), PAIR.format("update(grad=...)", RING)),
        (lambda p, ring: p.update(1, grad=(ring, "g.1")), PAIR.format("update(grad=...)", f"({RING}, 'g.1')")),
        (lambda p, ring: p.scale(1, grad="slot0"), PAIR.format("scale(grad=...)", "'slot0'")),
        (lambda p, ring: p.zero(1, grad="slot0"), PAIR.format("zero(grad=...)", "'slot0'")),
        (lambda p, ring: p.norm([p.grad(1)]), PAIR.format("norm([...])", "'g.1'")),
        (lambda p, ring: p.norm(p.at_home(p.grad(1))), PAIR.format("norm([...])", "'device.g.1'")),
        (lambda p, ring: p.synchronize("host.w.1"), PAIR.format("synchronize(...)", "'host.w.1'")),
        (lambda p, ring: p.cast("host.w.1", ("slot0", "w.1"), stream="cpu"), PAIR.format("cast(...)", "'host.w.1'")),
        (lambda p, ring: p.cast(p.at_home("w.1"), "slot0", stream="cpu"), PAIR.format("cast(...)", "'slot0'")),
        (lambda p, ring: p.loss(weights=ring), BUFFER.format("L.head.0", "w.head", RING)),
        (lambda p, ring: p.loss(grad=("slot0", "g.head")), BUFFER.format("L.head.0", "g.head", "('slot0', 'g.head')")),
        (lambda p, ring: p.prefetch(p.weight(1), into=ring), BUFFER.format("P.w.1", "w.1", RING)),
        (lambda p, ring: p.offload(p.weight(1), out_of=ring), BUFFER.format("O.w.1", "w.1", RING)),
        (
            lambda p, ring: p.load(p.at_home(p.weight(1)), ring),
            "a tensor is due, by its name as weight() makes it, not ('device.w.1', 'w.1')",
        ),
    ],
)
def test_buffers_pairs_rings_and_tensors_are_told_apart(wrong: Callable[[Program, Ring], object], told: str) -> None:
    p = resident()
    p.slots("slot", 2)
    with pytest.raises(InputError) as raised:
        wrong(p, p.slots("more", 2))
    assert str(raised.value) == told


def test_a_state_is_named_by_its_buffer_alone() -> None:
    p = finished()
    p.offload(p.grad(1), out_of=p.home(p.grad(1)))
    with pytest.raises(InputError) as raised:
        p.update(1, state=p.at_home(p.state(1)))
    assert str(raised.value) == BUFFER.format("U.1", "o.1", "('device.o.1', 'o.1')")


def test_a_ring_does_not_share_its_slots_with_activations() -> None:
    """These would overwrite what was loaded there, and only `verify` would tell, of a stale read."""
    p = Program(MODEL, STEP)
    slots = p.slots("hidden", 1)
    with pytest.raises(InputError, match="activations need a buffer hidden0, and there is one already"):
        p.forward(EMBED, weights=p.load(p.weight(EMBED), slots))


def test_streams_and_tiers_may_be_given_as_words() -> None:
    p = finished()
    p.slots("more", 1, "host")  # type: ignore[arg-type]
    p.offload(p.weight(1), out_of="device.w.1", into="more0", stream="d2h")  # type: ignore[arg-type]
    schedule = p.build(policy="words")
    assert schedule.ops[-1].stream is Stream.D2H and schedule.buffer["more0"].tier is Tier.HOST
    assert verify(schedule)


def test_adapters_where_none_are_trained_are_told_of_a_file_too() -> None:
    schedule = finished().build(policy="resident")
    ops = tuple(
        replace(op, reads=(*op.reads, Access("device.w.1", "a.1"))) if op.name == "F.1.0" else op for op in schedule.ops
    )
    with pytest.raises(ScheduleError, match=r"layer 1 has no adapters a\.1: the workload has no lora_rank"):
        verify(replace(schedule, ops=ops))
    lora = Program(MODEL, replace(STEP, lora_rank=2))
    with pytest.raises(InputError, match=r"layer embed has no adapters a\.embed: only blocks have"):
        lora.keep_on_device(lora.adapter(EMBED))


def test_numbers_of_numpy_are_numbers() -> None:
    """They were stored as they are, and no file could be written of them."""

    def step(one: Callable[[int], int]) -> str:
        p = resident()
        p.loss(one(0))
        for i in reversed(MODEL.layers[:-1]):
            p.backward(one(i), one(0))
        for i in MODEL.layers:
            p.update(one(i), stream=Stream.COMPUTE)
        return codec.dumps(p.build(policy="resident"))

    assert step(np.int64) == step(int)


@pytest.mark.parametrize("number", ["0", 0.0, True, None])
@pytest.mark.parametrize(
    "call", ["forward", "recompute", "backward", "accumulate", "dequantise", "scale", "zero", "update", "weight"]
)
def test_what_is_no_number_of_a_layer_is_told_with_its_call(call: str, number: object) -> None:
    more = {"accumulate": {"out_of": ""}, "dequantise": {"into": ""}, "scale": {"grad": ()}, "zero": {"grad": ()}}
    with pytest.raises(ProgramError) as raised:
        getattr(resident(), call)(number, **more.get(call, {}))
    assert str(raised.value) == f"{call}() takes layers and micro-batches by their numbers, not {number!r}"


def after_loss() -> Program:
    p = resident()
    p.loss()
    return p


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda p: p.backward(0), "the gradient of layer 0's output, micro-batch 0, is made by loss() or the backward"),
        (lambda p: [p.backward(2), p.backward(2)], "the gradient of layer 2's output, micro-batch 0, is used up"),
        (
            lambda p: p.free(p.saved(2, 0)) or p.backward(2),
            "the saved activations of layer 2, micro-batch 0, are used up: backward(2, 0) has run, or free them later",
        ),
        (
            lambda p: p.recompute(0, 1),
            "the output of layer embed, micro-batch 1, is not made yet: call forward(embed, 1)",
        ),
        (lambda p: p.loss(), "the output of layer 2, micro-batch 0, is no longer kept: let the layer after keep it"),
    ],
)
def test_an_activation_that_is_nowhere_is_told_with_the_call_that_makes_it(
    wrong: Callable[[Program], object], told: str
) -> None:
    with pytest.raises(InputError) as error:
        wrong(after_loss())
    assert told in str(error.value)


def test_a_block_that_kept_nothing_inside_must_run_again() -> None:
    p = Program(MODEL, STEP)
    p.forward(EMBED)
    for i in MODEL.blocks:
        p.forward(i, keep="input")
    p.loss()
    with pytest.raises(InputError, match=r"keep them by forward\(2, 0\) .*or call recompute\(2, 0\) first"):
        p.backward(2)


def test_what_is_never_freed_is_told_with_the_call_that_is_missing() -> None:
    p = after_loss()
    for i in reversed(MODEL.blocks):
        p.backward(i)
    with pytest.raises(InputError) as error:
        p.build(policy="no embedding")
    assert str(error.value) == (
        "never freed: the gradient of layer embed's output, micro-batch 0, made by B.0.0: backward(embed, 0) is missing"
    )
    with pytest.raises(InputError) as error:
        resident().build(policy="no backward")
    assert "layer 1, micro-batch 0, made by F.1.0: backward(1, 0) is missing" in str(error.value)
    assert "made by F.2.0: backward(2, 0) is missing" in str(error.value)
    assert str(error.value).endswith("; and 4 more")
    inputs = Program(MODEL, STEP)
    for i in MODEL.layers[:-1]:
        inputs.forward(i, **({} if i == EMBED else {"keep": "input"}))  # type: ignore[arg-type]
    inputs.free(*(inputs.output(i, 0) for i in MODEL.layers[:-2] if i != 0))
    with pytest.raises(InputError) as error:
        inputs.build(policy="no loss")
    output = "the output of layer {0}, micro-batch 0, made by F.{0}.0: {1} is missing".format
    assert str(error.value) == f"never freed: {output(0, 'backward(1, 0)')}; {output(2, 'loss(0)')}"
    evaluated = Program(MODEL, replace(STEP, task="evaluate"))
    evaluated.forward(EMBED)
    with pytest.raises(InputError, match=r"free\('x\.embed\.0'\) is missing"):
        evaluated.build(policy="no loss")


def misplaced(state: Tier, stream: Stream) -> str:
    """What is told of an update on that stream of block 1, weights and gradient on the device."""
    p = resident()
    p.loss()
    for i in reversed(MODEL.layers[:-1]):
        p.backward(i)
    at = p.buffer("state", state)
    for i in MODEL.layers:
        p.update(i, state=at if i == 1 else None, stream=stream if i == 1 else Stream.COMPUTE)
    with pytest.raises(ScheduleError) as error:
        verify(p.build(policy="misplaced"))
    (found,) = error.value.violations
    return str(found)


def test_where_to_queue_an_update_is_told_right_in_every_direction() -> None:
    to_device = "state to the device and queue it on compute"
    told = misplaced(Tier.HOST, Stream.CPU)
    assert "runs on cpu, a thread of the host, and touches device.g.1, device.w.1, on device" in told
    assert told.endswith(f"copy device.g.1, device.w.1 to the host and queue it on cpu, or {to_device}")
    assert misplaced(Tier.HOST, Stream.COMPUTE).endswith(f"to the host and queue it on cpu, or {to_device}")
    assert misplaced(Tier.DEVICE, Stream.CPU).endswith("on device\nqueue it on compute")
    assert "touches device.g.1, device.w.1, on device and state, on nvme" in misplaced(Tier.NVME, Stream.CPU)


def test_a_tied_head_is_told_to_name_the_table_and_its_gradient() -> None:
    p = Program(replace(MODEL, tie_word_embeddings=True), STEP)
    p.keep_on_device(*(t for i in MODEL.layers[1:] for t in (p.weight(i), p.grad(i), p.state(i))))
    p.forward(EMBED, weights=p.load(p.weight(EMBED), p.buffer("table")))
    for i in MODEL.blocks:
        p.forward(i)
    p.loss()
    for i in reversed(MODEL.blocks):
        p.backward(i)
    p.backward(EMBED)
    for i in MODEL.layers:
        p.update(i, stream=Stream.CPU if i == EMBED else Stream.COMPUTE)
    with pytest.raises(ScheduleError) as raised:
        verify(p.build(policy="tied"))
    told = [str(v) for v in raised.value.violations if v.op == "L.head.0"]
    cure = "name a buffer of the device, loss(embed_weights=..., embed_grad=...), or keep it there"
    assert [cure in text for text in told] == [True, True]


def test_a_step_of_absurdly_many_ops_is_refused_before_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    many = replace(STEP, accumulation=100_000)
    with pytest.raises(InputError, match="a step of 100,000 micro-batches has more than 200,000 ops, too many to sim"):
        most_ops.require_few_ops(MODEL, many)
    monkeypatch.setattr(most_ops, "MOST_OPS", 5)
    with pytest.raises(
        InputError, match="a step of 1 micro-batch has more than 200,000 ops, too many to simulate: giv"
    ):
        most_ops.require_few_ops(MODEL, replace(many, accumulation=1))


def test_a_loop_that_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    written = len(finished().build(policy="resident").ops)
    monkeypatch.setattr(most_ops, "MOST_OPS", written)
    assert len(finished().build(policy="resident").ops) == written
    monkeypatch.setattr(most_ops, "MOST_OPS", written - 1)
    monkeypatch.setattr(buffers, "MOST_BUFFERS", 100)
    told = "the policy writes more than 200,000 ops, too many to simulate: see that its loops end; if they do, give few"
    with pytest.raises(InputError, match=told):
        finished()
    p = Program(MODEL, STEP)
    with pytest.raises(InputError, match="the policy makes more than 100 buffers: see that its loops end"):
        for number in range(1000):
            p.slots(f"ring{number}", 2)


def test_a_number_that_is_none_names_nothing_for_those_that_come_after() -> None:
    """0.0 equals 0, and names are remembered: once it was the name of micro-batch 0 in all programs of a process."""
    for number in (0.0, False, 1.0, True):
        with pytest.raises(InputError):
            Program(MODEL, STEP).forward(EMBED, number)
    assert [Program(MODEL, STEP).output(EMBED, m) for m in (0, 1)] == ["x.embed.0", "x.embed.1"]
    with pytest.raises(InputError, match="staleness must be a whole number of at least 0, not -1"):
        Program(MODEL, STEP, staleness=-1)
