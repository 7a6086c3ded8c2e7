"""A text evaluated between steps, by the training's own schedule and memory: its loss, and a training that goes on."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import reference
from fake_cuda import Some
from hand_written import WRITERS
from test_megatrain_parity import CASES, FOUR_BLOCKS, HYPER, SCHEDULES, Case, schedule_of, text
from torch import Tensor

from megatrain import initial
from megatrain.cpu import CpuBackend
from megatrain.data import DataError, TokenSource
from megatrain.train import Debug, Trainer
from schedules import policies, trained
from schedules.errors import Refused
from schedules.evaluation import evaluation
from schedules.op import Kind, Phase, Stream, Tier
from schedules.program import Program
from schedules.schedule import Schedule
from schedules.verify import Verified, verify
from schedules.workload import PRECISIONS, Workload


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", SCHEDULES)
def test_it_is_what_makes_the_losses_and_no_more(name: str, case: Case) -> None:
    training = verify(schedule_of(name, FOUR_BLOCKS if name in WRITERS else case.model, case.workload))
    found = evaluation(training)
    schedule = found.schedule
    assert schedule.workload.task == "evaluate" and schedule.staleness == 0
    names = [op.name for op in training.schedule.ops]
    assert [op.name for op in schedule.ops] == sorted((op.name for op in schedule.ops), key=names.index)
    assert sum(op.phase == Phase.LOSS for op in schedule.ops) == case.accumulation
    computed = [op for op in schedule.ops if op.kind == Kind.COMPUTE]
    assert len(computed) == case.accumulation * (schedule.model.num_hidden_layers + 2)
    assert {op.phase for op in schedule.ops} <= {Phase.EMBED, Phase.FORWARD, Phase.LOSS, Phase.COPY, Phase.CAST}
    assert set(schedule.buffers) <= set(training.schedule.buffers)
    assert found.initial.items() <= training.initial.items()


def trainer(verified: Verified, folder: str, debug: bool) -> Trainer:  # type: ignore[type-arg]
    return Trainer(
        verified,
        CpuBackend(),
        text(verified.schedule.workload),
        HYPER,
        initial=initial.random_parameters(verified.schedule.model, 0),
        debug=Debug(poison=debug, delay_s=0.001 if debug else 0.0),
        nvme=Path(folder),
    )


MORE = [
    "streamed, singly=2",
    "streamed, nvme=4, nvme_weights=3",
    "greedysnake, activations=host",
    "gemini, every=4",
    "lora_streamed, nvme=3",
]


def held_out(workload: Workload) -> TokenSource:
    return Some(vocab_size=256, workload=workload, seed=9)


def mean(losses: Sequence[float]) -> float:
    return sum(losses) / len(losses)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", [*policies.names(), *WRITERS, *MORE])
def test_the_loss_is_that_of_the_weights_as_they_are_and_training_goes_on_as_if_nothing_had_been(name: str) -> None:
    """Beside plain PyTorch before a step and after two, poisoned and delayed."""
    case = CASES[2]  # two micro-batches
    schedule = schedule_of(name, FOUR_BLOCKS if name in WRITERS else case.model, case.workload)
    verified, model = verify(schedule), schedule.model
    of = evaluation(verified).schedule.workload
    start = initial.random_parameters(model, 0)
    adapters = initial.random_adapters(model, of.lora_rank, 0) if of.lora_rank is not None else None
    source = held_out(of)

    def right(found: dict[int, Tensor]) -> float:
        """Of these parameters or adapters."""
        now = {"initial": lambda i: found.get(i, start(i))} if adapters is None else {"initial": start}
        if adapters is not None:
            now["adapters"] = lambda i: found.get(i, adapters(i))
        return mean(reference.train(model, of, source, HYPER, steps=2, **now).losses)

    with tempfile.TemporaryDirectory() as folder:
        with trainer(verified, folder, debug=True) as run:
            first = run.evaluate(source)
            losses = run.run(2)
            now = {i: run.parameters(i) for i in trained.layers(model, schedule.workload)}
            second = run.evaluate(source)
            assert second == run.evaluate(source)
            losses += run.run(1)
        with trainer(verified, folder, debug=False) as run:
            assert run.run(3) == pytest.approx(losses, rel=1e-6)
    assert first == (pytest.approx(right({}), rel=1e-6), 8 * of.seq_len)
    if not schedule.staleness:
        assert second[0] == pytest.approx(right(now), rel=1e-6)
    assert (second != first) == bool(now)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_bit_of_a_training_is_as_without(precision: str) -> None:
    work = Workload(micro_batch_size=2, seq_len=16, precision=precision)
    verified = verify(schedule_of("streamed", FOUR_BLOCKS, work))
    with trainer(verified, "", debug=False) as run, trainer(verified, "", debug=False) as plain:
        losses = []
        for _ in range(3):
            losses += run.run(1)
            run.evaluate(held_out(evaluation(verified).schedule.workload))
        assert losses == plain.run(3)
        for i in FOUR_BLOCKS.layers:
            assert run.parameters(i).equal(plain.parameters(i))


def one_slot(*, kept_too: bool) -> Schedule:
    """All blocks by one slot, in which the first block's weights are when a step begins; at home too if `kept_too`."""
    model, work = FOUR_BLOCKS, Workload(micro_batch_size=2, seq_len=16, precision="fp32")
    p = Program(model, work)
    slot, away = p.buffer("slot"), p.buffer("away", Tier.HOST)
    p.keep_on_device(*(t for i in model.layers for t in (p.grad(i), p.state(i))))
    p.keep_on_device(*(p.weight(i) for i in (model.embed, model.head)))
    p.forward(model.embed)
    for i in model.blocks:
        if i:
            p.prefetch(p.weight(i), into=slot)
        p.forward(i, weights=slot)
        if not i and not kept_too:
            p.offload(p.weight(i), out_of=slot, into=away)
    p.loss()
    p.update(model.head, stream=Stream.COMPUTE)
    for i in reversed(model.blocks):
        if i != model.blocks[-1]:
            p.prefetch(p.weight(i), into=slot, out_of=None if i or kept_too else away)
        p.backward(i, weights=slot)
        p.update(i, weights=slot, stream=Stream.COMPUTE)
        if i or kept_too:
            p.offload(p.weight(i), out_of=slot)
    p.backward(model.embed)
    p.update(model.embed, stream=Stream.COMPUTE)
    return p.build(policy="one slot")


def test_what_a_step_carries_over_in_a_slot_is_brought_again() -> None:
    verified = verify(one_slot(kept_too=True))
    assert verified.initial["slot"] == "w.0"
    found = evaluation(verified)
    assert found.schedule.ops[-1].name == "P.w.0.again" and found.initial.items() <= verified.initial.items()
    for debug in (False, True):
        with trainer(verified, "", debug=debug) as run, trainer(verified, "", debug=False) as plain:
            losses = []
            for _ in range(3):
                run.evaluate(held_out(found.schedule.workload))
                losses += run.run(1)
            assert losses == plain.run(3)


def test_what_is_nowhere_else_is_not_overwritten() -> None:
    verified = verify(one_slot(kept_too=False))
    told = r"one slot cannot be evaluated between steps: P\.w\.1 writes into slot, which keeps w\.0 .* no other buffer"
    with pytest.raises(Refused, match=told):
        evaluation(verified)
    with trainer(verified, "", debug=False) as run:
        with pytest.raises(Refused, match="cannot be evaluated"):
            run.evaluate(held_out(replace(verified.schedule.workload, task="evaluate")))
        assert run.run(1)  # it is none the worse


def test_a_stale_copy_is_not_brought_up_to_date() -> None:
    """The second micro-batch computes with newer weights, by the buffer that the next step's first is to find stale."""
    model, work = replace(FOUR_BLOCKS, num_hidden_layers=1), Workload(micro_batch_size=2, accumulation=2, seq_len=16)
    p = Program(model, replace(work, precision="fp32"), staleness=1)
    p.keep_on_device(*(t for i in (model.embed, model.head) for t in (p.weight(i), p.grad(i), p.state(i))))
    away, slot, sums = p.buffer("away", Tier.HOST), p.buffer("slot"), p.buffer("sums")
    for m in work.microbatches:
        if m:
            p.offload(p.weight(0), out_of=p.load(p.weight(0), p.buffer("newest")), into=away)
        p.forward(model.embed, m)
        p.forward(0, m, weights=p.prefetch(p.weight(0), into=slot, out_of=away))
        p.loss(m)
        p.backward(0, m, weights=slot, grad=sums)
        p.backward(model.embed, m)
    p.offload(p.grad(0), out_of=sums)
    for i in model.layers:
        p.update(i, **({"stream": Stream.COMPUTE} if i else {}))
    with pytest.raises(Refused, match=r"O\.w\.0 writes into away, which keeps w\.0"):
        evaluation(verify(p.build(policy="two versions")))


def test_a_text_that_is_no_step_long_is_refused() -> None:
    verified = verify(schedule_of("streamed", FOUR_BLOCKS, Workload(micro_batch_size=11, seq_len=16, precision="fp32")))
    with (
        trainer(verified, "", debug=False) as run,
        pytest.raises(DataError, match=r"10 sequences of 16 .* a step of 11"),
    ):
        run.evaluate(held_out(evaluation(verified).schedule.workload))
