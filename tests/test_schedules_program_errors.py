"""What a policy's author gets wrong is told where it is written, in words that help."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from schedules.errors import InputError
from schedules.op import Access, Stream, Tier
from schedules.presets import load
from schedules.program import Program
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
        (lambda p: p.update(1, stream="gpu"), "U.1: a stream is h2d, compute, d2h, cpu, nvme_read, nvme_write or host"),
        (lambda p: p.slots("more", 2, "gpu"), "buffer more0: a tier is device, host or nvme, not 'gpu'"),
        (lambda p: p.evict(p.output(1, 0), tier="disk"), "a tier is device, host or nvme, not 'disk'"),
        (lambda p: p.synchronize(kind="wait"), "H: a kind is prefetch, compute, offload or update, not 'wait'"),
        (lambda p: p.slots("slot", 2), r"slots\('slot', 2\): there is a buffer slot0 already; give the ring another"),
        (lambda p: p.forward(1, keep="inputs"), "keep is all, input or nothing, not 'inputs'"),
        (lambda p: p.recompute(1, keep="out"), "keep is all, input or nothing, not 'out'"),
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
