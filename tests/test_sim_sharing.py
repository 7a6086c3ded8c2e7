"""Max-min sharing: hand cases, and the properties that define the allocation."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.sharing import speeds

RESOURCES = ["link.h2d", "link.d2h", "link.duplex", "dram", "cores"]
SHARES = st.one_of(st.sampled_from([0.0, 0.1, 0.25, 0.3, 0.5, 1.0]), st.floats(min_value=0.001, max_value=1.0))
USAGES = st.lists(st.dictionaries(st.sampled_from(RESOURCES), SHARES, max_size=4), max_size=7)


def load_of(usages: list[dict[str, float]], speed: list[float], resource: str) -> float:
    return math.fsum(s * usage.get(resource, 0.0) for usage, s in zip(usages, speed, strict=True))


# ------------------------------------------------------------------------------------------------ hand cases


def test_nothing_running_has_no_speeds() -> None:
    assert speeds([]) == []


def test_an_op_alone_runs_at_full_speed() -> None:
    assert speeds([{"link.h2d": 1.0, "dram": 0.3}]) == [1.0]
    assert speeds([{}]) == [1.0]


def test_a_resource_that_is_exactly_full_slows_nobody() -> None:
    assert speeds([{"dram": 0.5}, {"dram": 0.5}]) == [1.0, 1.0]
    assert speeds([{"dram": 0.1}] * 10) == [1.0] * 10
    assert speeds([{"dram": 0.7}, {"dram": 0.2}, {"dram": 0.1}]) == [1.0] * 3


def test_equal_ops_share_equally() -> None:
    assert speeds([{"dram": 1.0}] * 2) == [0.5, 0.5]
    assert speeds([{"dram": 1.0}] * 4) == [0.25] * 4


def test_all_ops_on_a_full_resource_slow_by_the_same_factor() -> None:
    """A copy that uses 0.25 of the DRAM and an optimizer that uses all of it both run at 1 / 1.25."""
    assert speeds([{"link.h2d": 1.0, "dram": 0.25}, {"dram": 1.0}]) == [0.8, 0.8]


def test_ops_that_touch_no_full_resource_are_left_alone() -> None:
    assert speeds([{"dram": 1.0}, {"dram": 1.0}, {"gpu": 1.0}, {}]) == [0.5, 0.5, 1.0, 1.0]


def test_what_a_slowed_op_leaves_behind_goes_to_the_others() -> None:
    """Four copies get 1/4 of the link each and so use 4 x 1/8 of the DRAM; the optimizer gets the rest."""
    copies = [{"link.h2d": 1.0, "dram": 0.5}] * 4
    assert speeds([*copies, {"dram": 0.5}]) == [0.25] * 4 + [1.0]
    assert speeds([*copies, {"dram": 1.0}]) == [0.25] * 4 + [0.5]


def test_duplex_limits_both_directions_together() -> None:
    """PCIe 5: 50 GB/s each way alone, 80 GB/s together: each direction runs at 0.8."""
    copies = [{"link.h2d": 1.0, "duplex": 50 / 80}, {"link.d2h": 1.0, "duplex": 50 / 80}]
    assert speeds(copies) == [0.8, 0.8]


@pytest.mark.parametrize("bad", [-0.1, 1.0000001, math.nan, math.inf])
def test_a_usage_that_is_not_a_fraction_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="op 1: use of dram must be from 0 to 1"):
        speeds([{"dram": 1.0}, {"dram": bad}])


# ------------------------------------------------------------------------------------------------- properties


@given(USAGES)
def test_speeds_are_positive_and_never_above_full(usages: list[dict[str, float]]) -> None:
    assert all(0.0 < speed <= 1.0 for speed in speeds(usages))


@given(USAGES)
def test_no_resource_carries_more_than_its_capacity(usages: list[dict[str, float]]) -> None:
    speed = speeds(usages)
    for resource in RESOURCES:
        assert load_of(usages, speed, resource) <= 1.0 + 1e-12


@given(USAGES)
def test_a_slowed_op_is_among_the_fastest_on_some_full_resource(usages: list[dict[str, float]]) -> None:
    """The bottleneck condition, which is equivalent to max-min fairness (Bertsekas and Gallager, 6.5.2)."""
    speed = speeds(usages)
    for i, usage in enumerate(usages):
        if speed[i] == 1.0:
            continue
        bottlenecks = [
            resource
            for resource, share in usage.items()
            if share > 0.0
            and load_of(usages, speed, resource) >= 1.0 - 1e-9
            and all(speed[i] >= speed[j] * (1 - 1e-9) for j in range(len(usages)) if usages[j].get(resource))
        ]
        assert bottlenecks, f"op {i} at {speed[i]} could be raised"


@given(USAGES)
def test_only_an_over_subscribed_resource_slows_anyone(usages: list[dict[str, float]]) -> None:
    totals = {r: math.fsum(usage.get(r, 0.0) for usage in usages) for r in RESOURCES}
    for usage, speed in zip(usages, speeds(usages), strict=True):
        if all(totals[r] <= 1.0 for r, share in usage.items() if share > 0.0):
            assert speed == 1.0


@given(USAGES, st.randoms())
def test_the_order_of_the_ops_does_not_matter(usages: list[dict[str, float]], random: object) -> None:
    order = list(range(len(usages)))
    random.shuffle(order)  # type: ignore[attr-defined]
    shuffled = speeds([usages[i] for i in order])
    assert shuffled == [speeds(usages)[i] for i in order]


@given(st.lists(SHARES.filter(lambda share: share > 0.0), min_size=1, max_size=6))
def test_on_one_resource_everyone_slows_by_its_total_demand(shares: list[float]) -> None:
    """True of one resource only: with several, a new op can slow one op and so free capacity for another."""
    total = sum(Fraction(share) for share in shares)
    expected = 1.0 if math.fsum(shares) <= 1.0 else float(1 / total)
    assert speeds([{"dram": share} for share in shares]) == pytest.approx([expected] * len(shares), rel=1e-12)


def test_a_new_op_can_speed_up_another() -> None:
    """The reason why 'more ops, lower speeds' is not among the properties above."""
    before = speeds([{"link.h2d": 1.0, "dram": 1.0}, {"dram": 1.0}])
    after = speeds([{"link.h2d": 1.0, "dram": 1.0}, {"dram": 1.0}, {"link.h2d": 1.0}, {"link.h2d": 1.0}])
    assert before == [0.5, 0.5]
    assert after[0] < before[0]
    assert after[1] > before[1]
