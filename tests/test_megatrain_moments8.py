"""Moments of eight bits: the map, its error, and training beside moments of fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchs_bits import of_torch

from megatrain import adam, adam_state, moments8
from megatrain.adam import Adam
from megatrain.cpu import CpuBackend
from megatrain.data import ByteText, read_bytes, standard_library
from megatrain.initial import random_parameters
from megatrain.native import adam as native
from megatrain.train import Trainer
from schedules import policies, presets
from schedules.verify import verify
from schedules.workload import PRECISIONS, STATE_BLOCK, MemoryBudget, Workload

CPU = torch.device("cpu")
ROOM = MemoryBudget(device_bytes=1 << 30, host_bytes=1 << 30)


def stored(values: torch.Tensor, *, signed: bool) -> torch.Tensor:
    """The values after quantisation and back."""
    codes = torch.empty(len(values), dtype=torch.uint8)
    largest = torch.empty(moments8.blocks(len(values)))
    moments8.quantise(values, codes, largest, signed=signed)
    found = torch.empty_like(values)
    moments8.dequantise(codes, largest, found, signed=signed)
    return found


@pytest.mark.parametrize("signed", [True, False])
def test_the_map_fills_a_byte_and_lies_denser_towards_zero(signed: bool) -> None:
    table = moments8.codes(signed, CPU)
    assert 250 <= len(table) <= 256
    assert table[0] == pytest.approx(-0.99, abs=0.01) if signed else table[0] == 0
    assert table[-1] == 1 and 0.0 in table
    assert (table.diff() > 0).all()
    if signed:
        assert torch.equal(table[:-1], -table[:-1].flip(0))
    positive = table[table > 0]
    assert positive[0] < 1e-6 * positive[-1]


@given(n=st.integers(1, 3 * STATE_BLOCK + 5), seed=st.integers(0, 2**20), decades=st.integers(0, 6))
def test_errors_are_of_the_size_of_the_map(n: int, seed: int, decades: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(n, generator=generator) * 10.0 ** -(decades * torch.rand(n, generator=generator))
    largest = torch.nn.functional.pad(values.abs(), (0, -n % STATE_BLOCK)).view(-1, STATE_BLOCK).amax(1)
    limit = largest.repeat_interleave(STATE_BLOCK)[:n]
    error = (stored(values, signed=True) - values).abs()
    assert (error <= limit * 0.9 / 64 / 2 * 1.01).all()  # half of the widest gap but the one below the largest
    squares = values.square()
    kept = stored(squares, signed=False)
    assert ((kept > 0) == (squares > 0)).all()  # never divided by nothing
    assert ((kept - squares).abs() <= limit.square() * 0.9 / 128 / 2 * 1.01).all()


def test_what_is_a_code_already_stays_what_it_is() -> None:
    for signed in (True, False):
        table = moments8.codes(signed, CPU)
        values = torch.cat([table, table.new_ones(1)]) * 4.0
        assert torch.allclose(stored(values, signed=signed), values, rtol=1e-6)
    assert not stored(torch.zeros(300), signed=True).any()


def slabs(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.randn(n, generator=torch.Generator().manual_seed(1))
    weights = torch.empty(n, dtype=torch.bfloat16)
    state = torch.full((PRECISIONS["bf16_8bit"].state_bytes(n),), 0xFF, dtype=torch.uint8)
    adam_state.initialise(weights, state, "bf16_8bit", source)
    assert torch.equal(weights, source.bfloat16())
    return weights, state


@pytest.mark.parametrize("whole", [False, True], ids=["half decays", "all decays"])
@pytest.mark.parametrize("n", [1, STATE_BLOCK - 1, STATE_BLOCK, 5 * STATE_BLOCK + 3])
def test_the_first_step_is_that_of_fp32_moments(n: int, whole: bool) -> None:
    """Moments start at zero, which eight bits hold exactly."""
    weights, state = slabs(n)
    other, wide = weights.clone(), torch.empty(8 * n, dtype=torch.uint8)
    adam_state.initialise(other, wide, "bf16")
    grad, decay = torch.randn(n), None if whole else [(0, n // 2)]
    hyper = Adam(lr=1e-2, weight_decay=10.0)  # so much that it shows in bf16
    for w, o, precision in ((weights, state, "bf16_8bit"), (other, wide, "bf16")):
        adam.step(w, grad, o, hyper, 1, precision=precision, decay=decay)
    assert torch.equal(weights, other)


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    n, grads = 7 * STATE_BLOCK + 9, [torch.randn(7 * STATE_BLOCK + 9) for _ in range(3)]

    def trained() -> tuple[torch.Tensor, torch.Tensor]:
        weights, state = slabs(n)
        for number, grad in enumerate(grads, start=1):
            adam.step(
                weights, grad, state, Adam(lr=1e-2, weight_decay=0.1), number, precision="bf16_8bit",
                grad_scale=torch.tensor(0.5), decay=[(100, 700), (1000, n)],
            )  # fmt: skip
        return weights, state

    whole = trained()
    monkeypatch.setitem(adam_state.CHUNK, "cpu", 2 * STATE_BLOCK)
    for found, right in zip(trained(), whole, strict=True):
        assert torch.equal(found, right)


@of_torch
@pytest.mark.skipif(native.kernel() is None, reason=str(native.why_not()))
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("grad_type", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("n", [STATE_BLOCK, 3 * STATE_BLOCK + 17, 300 * STATE_BLOCK])
def test_our_kernel_ends_with_the_bits_of_torch(
    n: int, grad_type: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with gradients of zero, of all sizes and beyond number, and with decay that begins within a block."""
    generator = torch.Generator().manual_seed(n)
    grads = []
    for _ in range(4):
        grad = torch.randn(n, generator=generator) * 10.0 ** (8 * torch.rand(n, generator=generator) - 6)
        grad[torch.rand(n, generator=generator) < 0.1] = 0.0
        grads.append(grad.to(grad_type))
    grads[2][:STATE_BLOCK] = 0.0
    grads[3][-5:] = torch.tensor([float("nan"), 1.0, float("-inf"), float("inf"), float("nan")])
    grads[1][17] = float("nan")

    def trained() -> tuple[torch.Tensor, torch.Tensor]:
        weights, state = slabs(n)
        for number, grad in enumerate(grads, start=1):
            adam.step(
                weights, grad, state, Adam(lr=1e-2, weight_decay=0.1), number, precision="bf16_8bit",
                grad_scale=torch.tensor(0.5), decay=[(3, 100), (101, 256), (261, n - 1)][: n // 256],
            )  # fmt: skip
        return weights, state

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        with monkeypatch.context() as patched:
            if n % STATE_BLOCK == 0:
                patched.setattr(adam, "_fused", lambda *slabs: pytest.fail("torch did what our kernel is for"))
            ours = trained()
    finally:
        torch.set_num_threads(before)
    monkeypatch.setattr(native, "kernel", lambda: None)
    for found, right in zip(ours, trained(), strict=True):
        torch.testing.assert_close(found, right, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("signed", [True, False])
def test_our_kernel_finds_the_code_of_every_float(signed: bool) -> None:
    """By its upper half and one comparison.

    Of each half between -1 and 1 the first, the last and 64 more; and those around each limit.
    """
    found, edges = moments8.native_map(signed, CPU), moments8.limits(signed, CPU)
    ones = torch.ones(1).view(torch.int32)
    some, firsts = (torch.arange(0, ones.item() + 1, step, dtype=torch.int32) for step in (1021, 1 << 16))
    shares = torch.cat([some, firsts, firsts[1:] - 1]).view(torch.float32)
    shares = torch.cat([shares, edges, edges.nextafter(torch.ones(1)), edges.nextafter(-torch.ones(1))])
    shares = torch.cat([shares, -shares])
    bits = shares.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    key = torch.where(shares.signbit(), 0xFFFFFFFF - bits, bits + (1 << 31))
    step = found.steps.to(torch.int64)[key >> 16]
    assert torch.equal((step >> 16) + ((key & 0xFFFF) > (step & 0xFFFF)), torch.bucketize(shares, edges))


def losses(policy: str, precision: str, steps: int = 40, **knobs: Any) -> list[float]:
    workload = Workload(micro_batch_size=2, seq_len=32, precision=precision)
    schedule = policies.build(policy, presets.load("tiny"), workload, ROOM, **knobs)
    data = ByteText(text=read_bytes(standard_library(), 1 << 16), workload=workload, seed=0)
    with Trainer(
        verify(schedule), CpuBackend(), data, Adam(lr=3e-3), initial=random_parameters(schedule.model, 0)
    ) as trainer:
        return trainer.run(steps)


def test_training_with_eight_bits_learns_what_fp32_moments_learn_by_any_policy() -> None:
    eight, wide = losses("streamed", "bf16_8bit"), losses("streamed", "bf16")
    assert wide[0] - wide[-1] > 1.0
    assert sum(eight[-5:]) / 5 == pytest.approx(sum(wide[-5:]) / 5, abs=0.08)
    assert losses("paged_optimizer", "bf16_8bit") == pytest.approx(eight, abs=1e-3)


def test_state_takes_a_quarter_and_the_scales() -> None:
    assert PRECISIONS["bf16_8bit"].state_bytes(1024) == 2 * 1024 + 4 * 8
    assert PRECISIONS["bf16_8bit"].state_bytes(1025) == 2 * 1025 + 5 * 8
    assert PRECISIONS["bf16_8bit"].per_param == 6 + 1 / 32
