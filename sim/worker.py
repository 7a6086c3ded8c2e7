"""A process that works for another: deaf to Ctrl-C, which is for the other, and gone when the other is."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Any

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
def helpers(
    workers: int, remedy: str, begin: Callable[..., None] = begin_to_work, *given: Any
) -> Iterator[ProcessPoolExecutor]:
    """Processes that begin with `begin`, which is to call `begin_to_work`; what they are at in the end is lost.

    Raises Refused where one of them is ended from outside; `remedy` is what helps then.
    """
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(workers, initializer=begin, initargs=given) as pool:
        try:
            yield pool
        except BrokenProcessPool:
            raise Refused(f"a process that helped was ended, as Linux does where memory runs out; {remedy}") from None
        finally:  # after a Ctrl-C they would work on; and another one, while they are waited for, makes Python hang
            for worker in set(multiprocessing.active_children()) - others:
                worker.terminate()
