"""Rounding at random: to one of two neighbours, right in the mean, and always the same for the same place."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatrain.stochastic_rounding import Draws, round_to

CPU = torch.device("cpu")
N = 1 << 16


def drawn(draws: Draws, n: int = N) -> list[torch.Tensor]:
    return list(draws.bits(n, CPU))


def rounded(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    target = torch.empty(len(values), dtype=torch.bfloat16)
    round_to(target, values.clone(), bits)
    return target


def neighbours(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers of bf16 at or next to fp32 ones, towards zero and away from it."""
    towards = values.view(torch.int32) & -(1 << 16)
    away = torch.where(towards == values.view(torch.int32), towards, towards + (1 << 16))
    return towards.view(torch.float32), away.view(torch.float32)


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=50), st.integers(0, 2**16 - 1))
def test_a_number_is_rounded_to_a_neighbour_and_one_of_bf16_stays(numbers: list[float], bit: int) -> None:
    values = torch.tensor(numbers, dtype=torch.float32)
    found = rounded(values, torch.full((len(values),), bit, dtype=torch.int32)).float()
    towards, away = neighbours(values)
    assert ((found == towards) | (found == away)).all()
    assert torch.equal(found.signbit(), values.signbit())


def test_no_number_stays_none_and_infinity_infinite() -> None:
    values = torch.tensor([math.nan, math.inf, -math.inf]).repeat(2)
    values.view(torch.int32)[0] = -1  # a NaN of all ones, as a poisoned buffer holds
    for bit in (0, 0xFFFF):
        found = rounded(values, torch.full((6,), bit, dtype=torch.int32)).float()
        torch.testing.assert_close(found[1:], values[1:], equal_nan=True, rtol=0, atol=0)
        assert found[0].isnan()


@pytest.mark.parametrize("share", [0.0, 2**-16, 0.01, 0.3, 0.5, 0.99])
def test_the_mean_is_the_number(share: float) -> None:
    """Of both signs and both draws; the deviation is that of N coins."""
    unit = 2.0**-7
    for sign, bits in itertools.product((1.0, -1.0), drawn(Draws.of(3, 5))):
        value = sign * (1.0 + share * unit)
        ups = (rounded(torch.full((N,), value), bits).float() - sign).abs() / unit
        assert set(ups.unique().tolist()) <= {0.0, 1.0}
        assert ups.mean().item() == pytest.approx(share, abs=5 * math.sqrt(max(share * (1 - share), 1 / N) / N))


def test_what_is_drawn_is_uniform_and_depends_on_nothing_else() -> None:
    """Every one of 16 bits is fair, and every pair of: both draws, two steps, layers and neighbouring places."""
    found = [bits for draws in (Draws.of(0, 1), Draws.of(0, 2), Draws.of(1, 1)) for bits in drawn(draws)]
    found.append(drawn(Draws.of(0, 1).after(1))[0])
    coins = torch.stack([(bits >> i) & 1 for bits in found for i in range(16)]).double() * 2 - 1
    assert coins.mean(dim=1).abs().max() < 5 / math.sqrt(N)
    together = coins @ coins.T / N
    together.fill_diagonal_(0.0)
    assert together.abs().max() < 6 / math.sqrt(N)
    for bits in found:
        assert bits.min() >= 0 and bits.max() < 1 << 16
        counts = torch.histc(bits.float(), bins=64, min=0, max=1 << 16)
        assert ((counts - N / 64).square() / (N / 64)).sum() < 63 + 5 * math.sqrt(2 * 63)


@given(st.integers(0, 1000), st.integers(1, 10**6), st.integers(0, 2**40), st.integers(1, 300))
def test_a_part_draws_what_the_whole_does_there(layer: int, step: int, start: int, n: int) -> None:
    whole = Draws.of(layer, step).after(start)
    for all_of_it, part in zip(drawn(whole, n + 7), drawn(whole.after(7), n), strict=True):
        assert torch.equal(all_of_it[7:], part)


def test_draws_are_these() -> None:
    """A checkpoint resumed by a later version goes on as it would have."""
    assert [bits.tolist() for bits in drawn(Draws.of(2, 7), 4)] == [
        [23328, 20716, 54888, 6739],
        [31851, 11617, 40450, 49533],
    ]
