"""Work that is shared out among processes, and its results as they come."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from typing import TypeVar

from megatrain.cores import usable_cores
from sim.worker import helpers

T = TypeVar("T")
R = TypeVar("R")


def computed(do: Callable[[T], R], left: Sequence[T], workers: int | None, remedy: str) -> Iterator[R]:
    """What `do` makes of each, in the order in which they are done.

    Args:
        workers: processes; one for every core that this process may use if None, and with 1 no other than this one.
        remedy: what helps where a process is ended for want of memory.

    Raises:
        Refused: a process was ended from outside.
    """
    if workers == 1:
        yield from map(do, left)
        return
    with helpers(workers or usable_cores(), remedy) as pool:
        for future in as_completed([pool.submit(do, point) for point in left]):
            yield future.result()
