"""No test is about time: a loaded machine must not fail one."""

from __future__ import annotations

import gc

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_collection_finish() -> None:
    """Modules and tests live to the end: the garbage collector, a fifth of some tests' time, need not walk them."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # some libraries count at the end what was never given back
