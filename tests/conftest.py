"""Which tests run where not all are asked for. No test is about time: a loaded machine must not fail one."""

from __future__ import annotations

import gc

import pytest
from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Of a test's cases that are marked `one_in(n)` only every nth is not slow, as many with each of its parameters."""
    for item in items:
        for mark in item.iter_markers("one_in"):
            if sum(item.callspec.indices.values()) % mark.args[0]:
                item.add_marker("slow")


def pytest_collection_finish() -> None:
    """Modules and tests live to the end: the garbage collector, a fifth of some tests' time, need not walk them."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # some libraries count at the end what was never given back
