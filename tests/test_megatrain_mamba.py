"""State spaces token by token; what a block of them keeps and moves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from bytes_moved import seen
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatrain.mamba import _Scan
from megatrain.pointwise import PLAIN, Pointwise, compiled
from megatrain.recurrence import Gated
from schedules import presets, recurrence
from schedules.flops import attention_flops, forward_flops, op_flops
from schedules.mamba import Mamba2
from schedules.op import Phase
from schedules.recurrence import CHUNK
from schedules.saved import saved_bytes
from schedules.traffic import pointwise_bytes, product_bytes
from schedules.workload import Workload

WIDTHS = Mamba2(heads=4, head_dim=5, groups=2, state_dim=6, kernel=4)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def given_to(widths: Mamba2, batch: int, seq: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """mixed, dt, taps, their bias, rates, skips and biases of steps."""
    heads, mixed = (widths.heads,), widths.mixed
    shapes = ((batch, seq, mixed), (batch, seq, *heads), (mixed, 1, widths.kernel), (mixed,), heads, heads, heads)
    return [randn(*shape, seed=i, dtype=dtype).requires_grad_() for i, shape in enumerate(shapes)]


def scan(widths: Mamba2, of: list[Tensor], pointwise: Pointwise = PLAIN) -> Tensor:
    mixed, dt, *own = of
    found: Tensor = _Scan.apply(mixed, dt, widths, pointwise, *own)
    return found


def token_by_token(widths: Mamba2, of: list[Tensor]) -> Tensor:
    """As the module's docstring has it, with torch's own convolution."""
    mixed, dt, taps, conv_bias, rate, skip, bias = of
    seq = mixed.shape[1]
    convolved = F.conv1d(mixed.mT, taps, conv_bias, padding=widths.kernel - 1, groups=widths.mixed)[..., :seq]
    x, b, c = F.silu(convolved).mT.split([widths.value_width, widths.key_width, widths.key_width], dim=-1)
    x = torch.unflatten(x, -1, (-1, widths.head_dim))
    of_group = widths.heads // widths.groups
    b, c = (torch.unflatten(t, -1, (widths.groups, -1)).repeat_interleave(of_group, dim=2) for t in (b, c))
    step = F.softplus(dt + bias).clamp(min=widths.least_step)
    decay = (-rate.exp() * step).exp()
    state, found = mixed.new_zeros(len(mixed), widths.heads, widths.state_dim, widths.head_dim), []
    for t in range(seq):
        entering = torch.einsum("bhn,bhp->bhnp", step[:, t, :, None] * b[:, t], x[:, t])
        state = state * decay[:, t, :, None, None] + entering
        found.append(torch.einsum("bhnp,bhn->bhp", state, c[:, t]) + skip[:, None] * x[:, t])
    return torch.stack(found, 1).flatten(2)


@pytest.mark.parametrize(
    ("groups", "seq", "pointwise"),
    [
        *((groups, seq, PLAIN) for groups in (1, 2, 4) for seq in (1, 3, CHUNK, CHUNK + 1, 3 * CHUNK - 1)),
        (1, CHUNK + 1, compiled("aot_eager")),
        pytest.param(2, 3, compiled("aot_eager"), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("least", [0.0, 0.7])
def test_chunks_are_the_scan_token_by_token_and_so_are_gradients(
    groups: int, seq: int, pointwise: Pointwise, least: float
) -> None:
    widths = Mamba2(heads=4, head_dim=5, groups=groups, state_dim=6, kernel=4, least_step=least)
    of = given_to(widths, 2, seq)
    found, right = scan(widths, of, pointwise), token_by_token(widths, of)
    torch.testing.assert_close(found, right)
    dy = randn(*right.shape, seed=9)
    for ours, theirs in zip(*(torch.autograd.grad(y, of, dy) for y in (found, right)), strict=True):
        torch.testing.assert_close(ours, theirs)


@given(seq=st.integers(2, 200), at=st.integers(0, 198), seed=st.integers(0, 99))
@settings(max_examples=20)
def test_no_token_sees_a_later_one(seq: int, at: int, seed: int) -> None:
    at = min(at, seq - 1)
    before = given_to(WIDTHS, 1, seq)
    after = [t.detach().clone() for t in before]
    for t in after[:2]:
        t[:, at:] = randn(*t[:, at:].shape, seed=seed)
    first, second = (scan(WIDTHS, of)[:, :at] for of in (before, after))
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("at_once", "together"),
    [(1 << 25, (3, 2, 3)), (2 * 70 * 30, (2, 2, 3)), (70 * 16, (1, 1, 3)), (70 * 10, (1, 1, 2)), (1, (1, 1, 1))],
)
def test_some_sequences_groups_or_heads_at_a_time_are_all_at_once(
    at_once: int, together: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    widths = Mamba2(heads=6, head_dim=5, groups=2, state_dim=6, kernel=3)
    of = given_to(widths, 3, 70)
    right = scan(widths, of)
    expected = torch.autograd.grad(right, of, torch.ones_like(right))
    monkeypatch.setattr(recurrence, "AT_ONCE", at_once)
    assert widths.together(3, 70) == together
    found = scan(widths, of)
    torch.testing.assert_close(found, right)
    for ours, theirs in zip(torch.autograd.grad(found, of, torch.ones_like(found)), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("size", [0.0, 30.0, 1e4])
def test_no_size_of_what_is_given_ends_in_no_number(size: float) -> None:
    of = [(t.detach().float() * size).requires_grad_() for t in given_to(WIDTHS, 1, 130)]
    of[4] = of[4].detach().clamp(max=5.0).requires_grad_()  # a rate is an exponent
    found = scan(WIDTHS, of)
    grads = torch.autograd.grad(found.sum(), of)
    assert all(t.isfinite().all() for t in (found, *grads))


def test_in_bf16_all_but_what_is_given_and_returned_is_wide() -> None:
    of = [t.detach().bfloat16().requires_grad_() for t in given_to(WIDTHS, 2, 200)]
    exact = [t.detach().double().requires_grad_() for t in of]
    found, right = scan(WIDTHS, of), scan(WIDTHS, exact)
    dy = randn(*right.shape, seed=9).bfloat16()
    ours_all = found, *torch.autograd.grad(found, of, dy)
    for ours, theirs in zip(ours_all, (right, *torch.autograd.grad(right, exact, dy.double())), strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours.double() - theirs).norm() < 0.003 * theirs.norm()


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("pointwise", [PLAIN, compiled("aot_eager")], ids=["plain", "compiled"])
def test_gradients_of_the_gated_norm_are_those_of_what_was_computed(pointwise: Pointwise, groups: int) -> None:
    shapes = [(2, 3, groups, 4)] * 2 + [(groups, 4)]
    o, z, weight = (randn(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes))
    norm = pointwise.norm_of_gated_forward, pointwise.norm_of_gated_backward
    assert torch.autograd.gradcheck(lambda *of: Gated.apply(*of, 1e-6, *norm), (o, z, weight))
    gated = o * F.silu(z)
    normed = gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + 1e-6) * weight
    torch.testing.assert_close(Gated.apply(o, z, weight, 1e-6, *norm), normed)


def test_a_block_before_latent_experts_is_counted_by_hand() -> None:
    """Nemotron-3-Super's: a state space, then experts without gates, of a latent vector, one of them for all tokens."""
    model = presets.load("nemotron-3-super-120b-a12b")
    h, latent, n, k, f, shared = 4096, 1024, 512, 22, 2688, 5376
    values, mixed, heads = 128 * 64, 128 * 64 + 2 * 8 * 128, 128
    work = Workload(micro_batch_size=1, seq_len=300)
    scan = attention_flops(model, 0, work)
    of_space = h * (values + mixed + heads) + values * h
    of_experts = h * n + 2 * h * latent + 2 * latent * k * f + 2 * h * shared
    assert forward_flops(model, 0, work) == 2 * 300 * (of_space + of_experts) + scan
    unread = 2 * 300 * h * (shared + latent)
    assert op_flops(model, 0, Phase.RECOMPUTE, work, output=False) == forward_flops(model, 0, work) - unread
    kept = 3 * h + mixed + heads + 3 * values + 2 * (k * f + shared) + 2 * k * latent + latent
    words = 2 + 8 + n + 3 * k
    assert saved_bytes(model, 0, work) == 300 * (2 * kept + 4 * words)
    again = replace(work, recompute="pointwise")
    less = values + 2 * h + k * f + shared + k * latent - latent
    assert saved_bytes(model, 0, work) - saved_bytes(model, 0, again) == 300 * 2 * less
    moved = 4 * h + values + mixed + heads + values  # three products of one input each read it, and one more
    moved += h + n + 2 * (h + latent) + 2 * k * (latent + f) + 2 * (h + shared)
    assert product_bytes(model, 0, Phase.FORWARD, work) == 2 * (300 * moved + model.params(0))
    rest = moved - (h + shared) - (h + latent)
    weights = model.params(0) - h * (shared + latent)
    assert product_bytes(model, 0, Phase.RECOMPUTE, work, output=False) == 2 * (300 * rest + weights)
    alone = model.of_blocks([3])
    assert not alone.has_mlp(0)
    last = 2 * 300 * (h + values) + 2 * h * values
    there, short = (product_bytes(alone, 0, Phase.RECOMPUTE, work, output=output) for output in (True, False))
    assert there - short == last
    between = (pointwise_bytes(model, 0, Phase.RECOMPUTE, work, output=output) for output in (True, False))
    assert next(between) - next(between) == 300 * 2 * (3 * h + 3 * h)  # the last sum, and that of shared experts


def test_what_the_scan_moves_and_takes_is_counted() -> None:
    """By arguments and results of functions: what a compiler writes in between is in the counts, and seen on no CPU."""
    widths = Mamba2(heads=8, head_dim=64, groups=2, state_dim=128, kernel=4)
    for dtype in (torch.float32, torch.bfloat16):
        of = [t.detach().to(dtype).requires_grad_() for t in given_to(widths, 2, 40 * CHUNK)]
        there, back = seen(lambda pointwise, of=of: scan(widths, of, pointwise), of, widths)
        assert 0.9 < there.moved < 1 and 0.8 < there.taken < 1
        assert 0.78 < back.moved < 1 and 0.72 < back.taken < 1
