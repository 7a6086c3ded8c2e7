"""Which tests run where not all are asked for. No test is about time: a loaded machine must not fail one."""

from __future__ import annotations

import gc
import os
from collections import defaultdict

import pytest
from hypothesis import settings

# As many tests run at once as there are cores: torch, not yet imported, would have as many threads in each.
os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Of the cases of a test that is marked `one_in(n)` one in n is not slow, of those with any one value, too."""
    ranks = defaultdict[tuple[object, str], dict[int, int]](dict)  # by test and parameter: value -> its rank
    for item in items:
        for mark in item.iter_markers("one_in"):
            seen = [(ranks[item.function, name], id(value)) for name, value in item.callspec.params.items()]
            if sum(of.setdefault(value, len(of)) for of, value in seen) % mark.args[0]:
                item.add_marker("slow")


def pytest_collection_finish() -> None:
    """Modules and tests live to the end: the garbage collector, a fifth of some tests' time, need not walk them."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # some libraries count at the end what was never given back
