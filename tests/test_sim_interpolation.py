"""Op times between measured shapes: exact where the law holds, exact at the points, silent outside."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedules import policies, presets
from schedules.op import Phase
from schedules.schedule import Schedule
from schedules.workload import MemoryBudget, Workload
from sim import hardware
from sim.cost import MissingCost, demands
from sim.interpolation import between, largest_of_lines
from sim.machine import Measured, Table
from sim.signature import signature

GRID = tuple(itertools.product((1, 2, 8), (64, 256, 1024)))
positive = st.floats(0.01, 100.0)


def law(a: float, b: float, c: float, shape: tuple[int, int]) -> float:
    tokens = shape[0] * shape[1]
    return a * 1e4 + b * tokens + c * tokens * shape[1] / 1000


@given(a=positive, b=positive, c=positive, batch=st.integers(1, 8), seq=st.integers(64, 1024))
def test_a_machine_that_obeys_the_law_is_met(a: float, b: float, c: float, batch: int, seq: int) -> None:
    points = {shape: law(a, b, c, shape) for shape in GRID}
    assert between(points, (batch, seq)) == pytest.approx(law(a, b, c, (batch, seq)), rel=1e-5)


@given(times=st.lists(st.floats(1.0, 1e9), min_size=len(GRID), max_size=len(GRID)), place=st.sampled_from(GRID))
def test_measured_points_are_kept_whatever_they_are(times: list[float], place: tuple[int, int]) -> None:
    points = dict(zip(GRID, times, strict=True))
    assert between(points, place) == points[place]


@given(times=st.lists(st.floats(10.0, 1000.0), min_size=len(GRID), max_size=len(GRID)), seq=st.integers(64, 1024))
def test_what_lies_between_is_positive_and_finite(times: list[float], seq: int) -> None:
    found = between(dict(zip(GRID, times, strict=True)), (2, seq))
    assert found is not None and 0 < found < 1e6


@pytest.mark.parametrize("shape", [(1, 32), (1, 2048), (16, 1024), (1, 63)])
def test_nothing_is_extrapolated(shape: tuple[int, int]) -> None:
    assert between({known: law(1, 1, 1, known) for known in GRID}, shape) is None


def test_two_points_are_no_law_and_three_are() -> None:
    assert between({(1, 64): 1.0, (4, 64): 2.0}, (2, 64)) is None
    points = {shape: law(1, 1, 1, shape) for shape in ((1, 64), (8, 64), (1, 1024))}
    assert between(points, (2, 256)) == pytest.approx(law(1, 1, 1, (2, 256)), rel=1e-5)


def test_a_profile_predicts_shapes_between_those_it_measured_and_says_what_it_lacks() -> None:
    model = presets.load("tiny")
    room = MemoryBudget(device_bytes=1 << 40, host_bytes=1 << 40)

    def schedule(batch: int, seq: int) -> Schedule:
        return policies.build("resident", model, Workload(micro_batch_size=batch, seq_len=seq), room)

    times: dict[str, int] = {}
    for shape in GRID:
        built = schedule(*shape)
        for op in built.ops:
            fixed = 7 if op.phase == Phase.ADAM else round(law(1, 2, 3, shape))
            times[signature(op, model, built.workload)] = fixed
    profile = replace(
        hardware.load("h200"),
        mode="measured",
        measured=Measured(op_times=Table(values=times, unit="ns", source="made up")),
    )
    between = schedule(4, 128)
    found = dict(zip((op.name for op in between.ops), demands(between, profile), strict=True))
    assert found["F.0.0"].duration_ns == pytest.approx(law(1, 2, 3, (4, 128)), rel=1e-3)
    assert found["U.0"].duration_ns == 7
    with pytest.raises(MissingCost, match="16x16"):
        demands(schedule(16, 16), profile)


TOKENS = (64, 112, 194, 338, 588, 1024)


@given(
    start=st.floats(0, 1e6), slope=st.floats(0, 1e4), steeper=st.floats(0, 1e4),
    bend=st.floats(0, 2000), tokens=st.integers(65, 1023),
)  # fmt: skip
def test_the_larger_of_two_lines_is_found_between_its_points(
    start: float, slope: float, steeper: float, bend: float, tokens: int
) -> None:
    """Exactly, unless the bend lies in the first or the last gap: there the line through both points is taken."""

    def value(t: float) -> float:
        return start + slope * t + steeper * max(0.0, t - bend)

    found = largest_of_lines({(1, t): value(t) for t in TOKENS}, (1, tokens))
    assert found is not None
    if TOKENS[1] <= bend <= TOKENS[-2]:
        gap = next(k for k in range(len(TOKENS)) if bend <= TOKENS[k])
        if 2 <= gap <= len(TOKENS) - 2 or not TOKENS[gap - 1] < tokens < TOKENS[gap]:
            assert found == pytest.approx(value(tokens), rel=1e-6, abs=1e-3)
    assert found >= value(tokens) * (1 - 1e-6) - 1e-3


def test_what_lies_outside_is_not_told() -> None:
    assert largest_of_lines({}, (1, 4)) is None
    assert largest_of_lines({(1, 4): 1.0, (2, 4): 2.0}, (1, 9)) is None
    assert largest_of_lines({(1, 4): 1.0, (2, 4): 2.0}, (3, 2)) == pytest.approx(1.5)
    assert largest_of_lines({(1, 4): 1.0, (2, 2): 3.0}, (4, 1)) == 3.0
