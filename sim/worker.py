"""A process that works for another: deaf to Ctrl-C, which is for the other, and gone when the other is."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import wait

from schedules.errors import Refused


def begin_to_work() -> None:
    """To be called by the process that works, as it begins."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A process that is killed tells its workers nothing, and they would wait for work, with their memory, for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a parent"
    wait([parent.sentinel])
    os._exit(1)


@contextmanager
def lost_ones_told(remedy: str) -> Iterator[None]:
    """Raises Refused where a process of a pool is ended from outside."""
    try:
        yield
    except BrokenProcessPool:
        raise Refused(f"a process that helped was ended, as Linux does where memory runs out; {remedy}") from None
