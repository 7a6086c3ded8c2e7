"""Gradients that a step leaves to the next: applied once, whatever happens between the steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain import checkpoint, initial
from megatrain.adam import Adam
from megatrain.checkpoint import Checkpoint
from megatrain.cpu import CpuBackend
from megatrain.data import RandomTokens
from megatrain.train import Debug, Trainer
from schedules import policies, presets
from schedules.schedule import Schedule
from schedules.verify import verify
from schedules.workload import PRECISIONS, MemoryBudget, Workload

MODEL = presets.load("tiny")
MEMORY = MemoryBudget(device_bytes=10**9, host_bytes=10**9, nvme_bytes=10**9)
CLIPPED = Workload(micro_batch_size=1, accumulation=2, seq_len=16, precision="fp32", grad_clip=0.3)
KNOBS: list[dict[str, Any]] = [
    {"through": 2, "resident": 1},
    {"through": 4, "parts": 3, "stay": 2},
    {"through": 3, "hold": 2, "parts": 2},
    {"through": 2, "hold": 3, "order": "microbatches"},
    {"through": 3, "nvme": 4, "parts": 2, "nvme_weights": 2},
]


class Few(RandomTokens):
    """A text that ends."""

    sequences = 4


Layers = dict[int, tuple[Tensor, Tensor]]


def hyper(step: int) -> Adam:
    """Other settings in each step: whoever takes those of another step makes other weights."""
    return Adam(lr=1e-2 / (step + 1), weight_decay=0.1)


def fused(workload: Workload = CLIPPED, **knobs: Any) -> Schedule:
    built = policies.build("streamed", MODEL, workload, MEMORY, **(knobs or KNOBS[0]))
    assert verify(built).carried
    return built


def plain(workload: Workload = CLIPPED) -> Schedule:
    built = policies.build("resident", MODEL, workload, MEMORY)
    assert not verify(built).carried
    return built


def trainer(of: Schedule, folder: Path, resume: Checkpoint | None = None) -> Trainer[Any]:
    data = RandomTokens(vocab_size=MODEL.vocab_size, workload=of.workload, seed=3)
    debug = Debug(poison=True, delay_s=0.001, seed=1)
    begin = initial.random_parameters(MODEL, 0)
    return Trainer(verify(of), CpuBackend(), data, hyper, initial=begin, resume=resume, debug=debug, nvme=folder)


def kept(run: Trainer[Any]) -> Layers:
    found = {i: run.kept(i) for i in MODEL.layers}
    return {i: (weights.clone(), state.clone()) for i, (weights, state) in found.items()}


def trained(of: Schedule, steps: int, folder: Path) -> tuple[list[float], Layers]:
    with trainer(of, folder) as run:
        return run.run(steps), kept(run)


def assert_same(found: Layers, right: Layers) -> None:
    for i in MODEL.layers:
        for a, b in zip(found[i], right[i], strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), i


@pytest.mark.parametrize("knobs", KNOBS, ids=str)
def test_whoever_looks_between_steps_finds_all_gradients_applied_and_changes_nothing(
    knobs: dict[str, Any], tmp_path: Path
) -> None:
    text = Few(vocab_size=MODEL.vocab_size, workload=CLIPPED, seed=9)
    losses, right = trained(plain(), 4, tmp_path)
    assert [*trained(fused(**knobs), 4, tmp_path)[0]] == losses
    with trainer(fused(**knobs), tmp_path) as run:
        assert_same(kept(run), trained(plain(), 0, tmp_path)[1])
        found = run.run(1)
        assert_same(kept(run), trained(plain(), 1, tmp_path)[1])
        run.save(tmp_path / "checkpoints")
        found += run.run(2)
        evaluated = run.evaluate(text)
        found += run.run(1)
        assert found == losses
        assert_same(kept(run), right)
        assert_same(kept(run), right)
    with trainer(plain(), tmp_path) as run:
        run.run(3)
        assert run.evaluate(text) == evaluated


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_training_goes_on_by_another_schedule_with_the_same_bits(precision: str, tmp_path: Path) -> None:
    workload = replace(CLIPPED, precision=precision)
    losses, right = trained(plain(workload), 4, tmp_path)
    found: list[float] = []
    resume = None
    for of in (fused(workload), plain(workload), fused(workload, **KNOBS[1]), fused(workload, **KNOBS[2])):
        with trainer(of, tmp_path, resume) as run:
            found += run.run(1)
            resume = checkpoint.read(run.save(tmp_path / "checkpoints"), of)
            last = kept(run)
    assert found == losses
    assert_same(last, right)


def test_gradients_are_told_once_each_with_their_own_step(tmp_path: Path) -> None:
    told = list[tuple[int, int, float]]()

    def on_gradient(step: int, i: int, of: slice, grad: Tensor) -> None:
        told.append((step, i, float(grad.double().square().sum())))

    def trained_by(of: Schedule) -> list[tuple[int, int, float]]:
        told.clear()
        data = RandomTokens(vocab_size=MODEL.vocab_size, workload=of.workload, seed=3)
        begin = initial.random_parameters(MODEL, 0)
        with Trainer(verify(of), CpuBackend(), data, hyper, initial=begin, on_gradient=on_gradient) as run:
            run.run(2)
            run.kept(0)
            run.run(1)
            run.kept(0)
        return sorted(told)

    right = trained_by(plain())
    assert [(step, i) for step, i, _ in right] == [(step, i) for step in range(3) for i in MODEL.layers]
    assert trained_by(fused()) == right
