"""Which of many cases run where not all tests are asked for."""

from __future__ import annotations

import itertools
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import pytest_collection_modifyitems


class Item:
    """As much of a test's case as is looked at."""

    def __init__(self, n: int | None, **params: object) -> None:
        self.function, self.callspec = "a test", SimpleNamespace(params=params)
        self.marks, self.slow = [] if n is None else [SimpleNamespace(args=(n,))], False

    def iter_markers(self, name: str) -> list[Any]:
        return self.marks if name == "one_in" else []

    def add_marker(self, name: str) -> None:
        self.slow = name == "slow"


@pytest.mark.parametrize(("n", "cases", "of_each_name", "of_each_case"), [(2, 4, 2, 3), (3, 6, 2, 2), (2, 2, 1, 3)])
def test_one_in_n_cases_runs_as_many_with_any_one_value(
    n: int, cases: int, of_each_name: int, of_each_case: int
) -> None:
    items: list[Any] = [Item(n, name=name, case=case) for name, case in itertools.product("abcdef", range(cases))]
    pytest_collection_modifyitems(items)
    params = [item.callspec.params for item in items if not item.slow]
    assert Counter(chosen["name"] for chosen in params) == dict.fromkeys("abcdef", of_each_name)
    assert Counter(chosen["case"] for chosen in params) == dict.fromkeys(range(cases), of_each_case)


def test_all_cases_run_of_a_test_without_that_mark() -> None:
    items: list[Any] = [Item(None, case=case) for case in range(5)]
    pytest_collection_modifyitems(items)
    assert not any(item.slow for item in items)
