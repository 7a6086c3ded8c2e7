"""Muon: its step beside torch's, what it makes of a matrix, and trainings by schedule beside plain PyTorch."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import reference
import torch
from test_megatrain_checkpoint import same, train
from test_megatrain_parity import FOUR_BLOCKS, HYPER, MEMORY, assert_same_bits, error, run, text
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megatrain import adam_state, checkpoint, initial, muon
from megatrain.adam import Adam
from megatrain.stochastic_rounding import Draws, round_to
from megatrain.train import Debug
from schedules import optimizer, policies, presets
from schedules.model import ModelSpec
from schedules.optimizer import Matrices, matrices, state_bytes, step_flops
from schedules.schedule import Knob
from schedules.workload import PRECISIONS, Workload

TINY = presets.load("tiny")
MUON = Workload(micro_batch_size=2, seq_len=32, precision="fp32", optimizer="muon")
WITHOUT_8_BITS = ["bf16", "bf16_split", "bf16_fp32", "bf16_16bit", "fp32"]
# a parameter before, between and after matrices that are wide, square and tall, one of them of three experts
MIXED = (Matrices(3, 1, 8, 24), Matrices(200, 1, 16, 16), Matrices(456, 3, 12, 6))
N = 456 + 3 * 12 * 6 + 5


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def begun(precision: str, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Weights and state before the first step, and the fp32 values that they are made of."""
    values = torch.randn(N, generator=torch.Generator().manual_seed(seed)) * 0.05
    weights = torch.empty(N, dtype=torch.float32 if precision == "fp32" else torch.bfloat16)
    kept = [state_of(precision)]
    muon.initialise(weights, kept[0], MIXED, precision, values)
    return weights, kept[0], values


def state_of(precision: str) -> Tensor:
    bytes_of, inside = PRECISIONS[precision], sum(of.size for of in MIXED)
    return torch.empty(bytes_of.state_bytes(N) - inside * bytes_of.moment, dtype=torch.uint8)


def gradients(steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(N, generator=generator) * 0.1 for _ in range(steps)]


CLIPPED = (0.2, 1.0, 0.01, 0.5)  # by another factor in each step: one for all would change no update


def by_torch(values: Tensor, steps: int, hyper: Adam, *, clipped: bool) -> Tensor:
    """The same steps in fp32 by torch's optimizers, every expert by itself."""
    where = [(of.start + k * of.rows * of.columns, of.rows, of.columns) for of in MIXED for k in range(of.count)]
    inside = torch.zeros(N, dtype=torch.bool)
    for start, rows, columns in where:
        inside[start : start + rows * columns] = True
    own = [values[start : start + r * c].view(r, c).clone().requires_grad_() for start, r, c in where]
    other = values[~inside].clone().requires_grad_()
    both = [
        torch.optim.Muon(own, lr=hyper.lr, weight_decay=hyper.weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([other], lr=hyper.lr, betas=hyper.betas, eps=hyper.eps, weight_decay=0.0),
    ]
    for number, grad in enumerate(gradients(steps)):
        scale = CLIPPED[number] if clipped else 1.0
        for p, (start, r, c) in zip(own, where, strict=True):
            p.grad = scale * grad[start : start + r * c].view(r, c)
        other.grad = scale * grad[~inside]
        for each in both:
            each.step()
    found = torch.empty(N)
    found[~inside] = other.detach()
    for p, (start, r, c) in zip(own, where, strict=True):
        found[start : start + r * c] = p.detach().flatten()
    return found


def stepped(precision: str, steps: int, hyper: Adam, *, clipped: bool = False) -> Tensor:
    weights, state, _ = begun(precision)
    for number, grad in enumerate(gradients(steps)):
        muon.step(
            weights, grad, state, hyper, number + 1, matrices=MIXED, precision=precision,
            grad_scale=torch.tensor(CLIPPED[number]) if clipped else None, layer=3,
        )  # fmt: skip
    return muon.master_weights(weights, state, MIXED, precision)


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16_split", "bf16_fp32"])
def test_steps_are_those_of_torchs_optimizers(precision: str, clipped: bool) -> None:
    """With an exact master; torch's Muon works in bf16 inside, as ours, so that what is left is fp32's rounding."""
    found = stepped(precision, 4, HYPER, clipped=clipped)
    right = by_torch(begun("fp32")[2], 4, HYPER, clipped=clipped)
    moved = (right - begun("fp32")[2]).abs().max()
    assert float((found - right).abs().max() / moved) < 2e-3  # of the way
    assert float((found - begun("fp32")[2]).abs().max()) > 0.5 * float(moved)


@pytest.mark.parametrize("precision", ["bf16", "bf16_16bit"])
def test_without_a_master_steps_are_right_in_the_mean(precision: str) -> None:
    weights, state, _ = begun(precision)
    values = weights.float()
    hyper = Adam(lr=1e-4)  # an update of a tenth of a weight's last bit: nearest would lose nearly all of them
    (grad,) = gradients(1)
    means = torch.zeros(N)
    for layer in range(400):
        w, s = weights.clone(), state.clone()
        muon.step(w, grad, s, hyper, 1, matrices=MIXED, precision=precision, layer=layer)
        means += w.float() / 400
    exact, kept = values.clone(), state_of("fp32")
    muon.initialise(exact, kept, MIXED, "fp32", values)
    muon.step(exact, grad, kept, hyper, 1, matrices=MIXED, precision="fp32")
    way = float((exact - values).norm())
    assert float((means - values).norm()) == pytest.approx(way, rel=0.3)
    assert float((means - exact).norm()) < 0.5 * way


@pytest.mark.parametrize("precision", ["bf16", "bf16_16bit"])
def test_what_has_no_master_is_rounded_as_layer_step_and_place_say(precision: str) -> None:
    """Of the last matrices, by hand: the momentum by the upper bits drawn, weights by the lower."""
    weights, state, _ = begun(precision)
    before, (grad,), of, at = weights.clone(), gradients(1), MIXED[-1], MIXED[0].size + MIXED[1].size
    muon.step(weights, grad, state, HYPER, 5, matrices=MIXED, precision=precision, layer=3)
    here, bits = slice(of.start, of.stop), Draws.of(3, 5).after(of.start).bits(of.size, torch.device("cpu"))
    momentum = 0.05 * grad[here]
    wanted = torch.lerp(grad[here], momentum, 0.95).to(torch.bfloat16).view(of.count, of.rows, of.columns)
    update = muon.orthogonalised(wanted.clone(), torch.empty_like(wanted)).flatten()
    exact = before[here].float() * (1.0 - HYPER.lr * HYPER.weight_decay)
    exact = exact.add(update, alpha=-HYPER.lr * 0.2 * math.sqrt(12))
    right = torch.empty(of.size, dtype=torch.bfloat16)
    round_to(right, exact, bits[0])
    assert torch.equal(weights[here], right)
    kept = muon.split_state(state, N, MIXED, precision).momentum[at : at + of.size]
    if precision == "bf16":
        torch.testing.assert_close(kept, momentum)
    else:
        round_to(right, momentum, bits[1])
        assert float((kept.float() - right.float()).abs().max()) <= 2**-8 * float(momentum.abs().max())
        assert float((kept == right).float().mean()) > 0.99  # but for the last bit of a product in fp32


def test_a_matrix_of_tiny_numbers_is_orthogonalised_too() -> None:
    given = torch.randn(1, 16, 24, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    large, small = (muon.orthogonalised(x.clone(), torch.empty_like(x)) for x in (given, given * 2**-18))
    assert torch.equal(large, small)


@pytest.mark.parametrize("shape", [(1, 64, 64), (1, 64, 160), (1, 160, 64), (3, 48, 32)], ids=str)
def test_singular_values_come_near_one_and_vectors_stay(shape: tuple[int, int, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    given = torch.randn(shape, generator=generator).to(torch.bfloat16)
    found = muon.orthogonalised(given.clone(), torch.empty_like(given)).float()
    assert found.shape == shape and found.is_contiguous()
    for x, y in zip(given.float(), found, strict=True):
        u, s, v = torch.linalg.svd(x, full_matrices=False)
        assert float(torch.linalg.svdvals(y).min()) > 0.5 and float(torch.linalg.svdvals(y).max()) < 1.3
        turned = u.mT @ y @ v.mT  # diagonal, if it has the same vectors
        away = turned - torch.diag(turned.diagonal())
        assert float(away.norm() / turned.norm()) < 0.05 and turned.diagonal().min() > 0.4
        assert s.max() / s.min() > 3  # it had to be done


def test_a_gradient_of_zeros_moves_nothing_but_by_decay() -> None:
    weights, state, values = begun("fp32")
    muon.step(
        weights, torch.zeros(N), state, Adam(lr=0.1, weight_decay=0.5), 1, matrices=MIXED, precision="fp32"
    )  # fmt: skip
    inside = torch.zeros(N, dtype=torch.bool)
    for of in MIXED:
        inside[of.start : of.stop] = True
    torch.testing.assert_close(weights[inside], 0.95 * values[inside])
    assert torch.equal(weights[~inside], values[~inside])


@pytest.mark.parametrize("precision", WITHOUT_8_BITS)
def test_what_begins_has_the_values_given_and_no_momentum(precision: str) -> None:
    weights, state, values = begun(precision)
    exact = precision in ("fp32", "bf16_split", "bf16_fp32")
    master = muon.master_weights(weights, state, MIXED, precision)
    assert torch.equal(master, values if exact else values.to(torch.bfloat16).float())
    parts = muon.split_state(state, N, MIXED, precision)
    assert not parts.momentum.any()
    k = N - sum(of.size for of in MIXED)
    assert not adam_state.split_state(parts.others, k, precision).m.any()
    with pytest.raises(ValueError, match=f"the state of {N} parameters in {precision} is uint8"):
        muon.split_state(state[1:], N, MIXED, precision)


@pytest.mark.parametrize("precision", WITHOUT_8_BITS)
def test_a_state_begins_piece_by_piece(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = begun(precision)
    monkeypatch.setitem(adam_state.CHUNK, "cpu", 37)
    assert all(torch.equal(one, other) for one, other in zip(begun(precision), right, strict=True))


def test_experts_may_be_orthogonalised_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    together = stepped("fp32", 2, HYPER)
    monkeypatch.setattr(optimizer, "GROUP", 2 * 12 * 6)
    assert [of.together for of in MIXED] == [1, 1, 2]
    torch.testing.assert_close(stepped("fp32", 2, HYPER), together, rtol=1e-5, atol=1e-6)


def test_passes_take_a_matrix_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for precision in WITHOUT_8_BITS:
        whole = stepped(precision, 2, HYPER)
        with monkeypatch.context() as patch:
            patch.setitem(adam_state.CHUNK, "cpu", 37)
            assert torch.equal(stepped(precision, 2, HYPER), whole), precision


@pytest.mark.parametrize("model", [TINY, presets.load("tiny-moe")], ids=lambda model: model.name)
def test_a_step_multiplies_what_is_counted(model: ModelSpec) -> None:
    n = model.params(0)
    weights, state = torch.randn(n), torch.zeros(state_bytes(model, MUON, 0, n), dtype=torch.uint8)
    with FlopCounterMode(display=False) as counter:
        muon.step(weights, torch.randn(n), state, HYPER, 1, matrices=matrices(model, MUON, 0), precision="fp32")
    assert counter.get_total_flops() == step_flops(model, MUON, 0)


# ---- trainings by schedule

SCHEDULES: dict[str, dict[str, Knob]] = {
    "streamed": {},
    "streamed, resident": {"resident": 2, "keep": 0, "slots": 1, "grad_slots": 1},
    "streamed, stay, inputs": {"stay": 2, "inputs": 4, "slots": 3},
    "streamed, nvme": {"nvme": 3, "nvme_weights": 2, "resident": 1},
    "resident": {},
    "paged_optimizer": {"pressure": 1.0},
    "llmq": {},
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("accumulation", "clip"), [(1, None), (2, None), (2, 0.3)])
@pytest.mark.parametrize("name", SCHEDULES)
def test_training_by_schedule_is_plain_training(name: str, accumulation: int, clip: float | None) -> None:
    """By torch's Muon and AdamW: the first steps to fp32's rounding, later ones as near as bf16 inside leaves them."""
    workload = replace(MUON, accumulation=accumulation, grad_clip=clip)
    right = reference.train(
        FOUR_BLOCKS, workload, text(workload), HYPER, initial=initial.random_parameters(FOUR_BLOCKS, 0), steps=8
    )
    built = policies.build(name.partition(",")[0], FOUR_BLOCKS, workload, MEMORY, **SCHEDULES[name])
    found = run(built, 8)
    assert found.losses == pytest.approx(right.losses, rel=1e-4)
    for i in FOUR_BLOCKS.layers:
        assert error(found.gradients[0][i], right.gradients[0][i]) < 1e-6
        assert error(found.parameters[i], right.parameters[i]) < 2e-3, i
    assert found.losses[-1] < found.losses[0]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("precision", "clip"), [*((each, None) for each in WITHOUT_8_BITS), ("bf16", 0.3)])
@pytest.mark.parametrize("name", SCHEDULES)
def test_all_schedules_yield_the_same_bits(name: str, precision: str, clip: float | None) -> None:
    workload = Workload(micro_batch_size=2, seq_len=8, precision=precision, optimizer="muon", grad_clip=clip)
    plain = policies.build("resident", FOUR_BLOCKS, workload, MEMORY)
    built = policies.build(name.partition(",")[0], FOUR_BLOCKS, workload, MEMORY, **SCHEDULES[name])
    debug = Debug(poison=True, delay_s=0.001, seed=3)
    assert_same_bits(run(built, 3, debug), run(plain, 3))


@pytest.mark.parametrize(("before", "after"), [("streamed, nvme", "resident"), ("resident", "streamed, stay, inputs")])
def test_a_training_goes_on_from_its_checkpoint_with_the_same_bits(before: str, after: str, tmp_path: Path) -> None:
    workload = Workload(micro_batch_size=2, seq_len=8, precision="bf16_split", optimizer="muon")
    first, other = (
        policies.build(name.partition(",")[0], FOUR_BLOCKS, workload, MEMORY, **SCHEDULES[name])
        for name in (before, after)
    )
    losses, right = train(first, 4, tmp_path)
    train(first, 2, tmp_path, save=True)
    found, kept = train(other, 2, tmp_path, resume=checkpoint.read(tmp_path / "checkpoints", other))
    assert found == losses[2:] and same(kept, right)


@pytest.mark.parametrize("precision", ["bf16", "bf16_16bit"])
def test_a_trainings_updates_are_drawn_by_their_layer(precision: str) -> None:
    """The gradients that were applied, applied again beside the run."""
    workload = Workload(micro_batch_size=2, seq_len=8, precision=precision, optimizer="muon")
    found = run(policies.build("streamed", FOUR_BLOCKS, workload, MEMORY), 2)
    for i in FOUR_BLOCKS.blocks:
        n, of = FOUR_BLOCKS.params(i), matrices(FOUR_BLOCKS, workload, i)
        weights = initial.random_parameters(FOUR_BLOCKS, 0)(i).to(torch.bfloat16)
        state = torch.zeros(state_bytes(FOUR_BLOCKS, workload, i, n), dtype=torch.uint8)
        for step, of_step in enumerate(found.gradients):
            muon.step(weights, of_step[i], state, HYPER, step + 1, matrices=of, precision=precision, layer=i)
        assert torch.equal(weights.float(), found.parameters[i]), i


def test_a_checkpoint_takes_the_room_of_its_state(tmp_path: Path) -> None:
    for optimizer_name, per_matrix in (("muon", 8), ("adamw", 12)):
        of = policies.build("resident", TINY, replace(MUON, optimizer=optimizer_name), MEMORY)
        inside = sum(one.size for i in TINY.blocks for one in matrices(TINY, MUON, i))
        kept = inside * per_matrix + (TINY.total_params - inside) * 12
        assert checkpoint.require_folder(tmp_path / optimizer_name, of, None, 1) == kept


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    both = ("muon", "adamw")
    of = {name: policies.build("resident", FOUR_BLOCKS, replace(MUON, optimizer=name), MEMORY) for name in both}
    for saved, asked in (both, both[::-1]):
        train(of[saved], 1, tmp_path / saved, save=True)
        told = f"has the state of {saved}, the schedule's optimizer is {asked}: give --optimizer {saved}"
        with pytest.raises(checkpoint.CheckpointError, match=told):
            checkpoint.read(tmp_path / saved / "checkpoints", of[asked])
