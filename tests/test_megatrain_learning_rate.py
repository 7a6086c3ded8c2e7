"""Learning rates by step: against figures computed by hand, and through a run that stops and goes on."""

from __future__ import annotations

import pytest

from megatrain.adam import Adam
from megatrain.learning_rate import by_step

HYPER = Adam(lr=8.0, weight_decay=0.1)


def test_it_rises_in_equal_parts_and_falls_along_a_cosine() -> None:
    at = by_step(HYPER, warmup=4, until=10)
    assert [at(step).lr for step in range(5)] == [2.0, 4.0, 6.0, 8.0, 8.0]
    assert [at(step).lr for step in (6, 7, 8)] == pytest.approx([6.0, 4.0, 2.0])  # cos 60, 90 and 120 degrees
    assert at(10).lr == at(11).lr == 0.0
    assert at(3).weight_decay == HYPER.weight_decay


def test_it_may_end_above_zero() -> None:
    at = by_step(HYPER, until=6, least=2.0)
    assert [at(step).lr for step in (0, 2, 3, 4, 6, 7)] == pytest.approx([8.0, 6.5, 5.0, 3.5, 2.0, 2.0])
    with pytest.raises(ValueError, match="decays from 8, and cannot end at 9"):
        by_step(HYPER, until=6, least=9.0)


def test_without_more_said_it_stays() -> None:
    assert {by_step(HYPER)(step) for step in (0, 1, 1000)} == {HYPER}
    assert [by_step(HYPER, warmup=2)(step).lr for step in (0, 1, 2, 99)] == [4.0, 8.0, 8.0, 8.0]


@pytest.mark.parametrize(("warmup", "until"), [(-1, None), (4, 4), (0, 0)])
def test_what_means_nothing_is_refused(warmup: int, until: int | None) -> None:
    with pytest.raises(ValueError, match="decay must end after warm-up"):
        by_step(HYPER, warmup=warmup, until=until)
