"""Bars and stages on stderr: how far some work is while it goes on."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn

    from sim.prediction import Prediction

PATIENCE_S = 2.0  # of work that tells its stages only if it takes longer
BAR = 12  # columns
WINDOW_S = 3600.0  # the time left follows from the pace of the last hour: a step may take minutes


@contextmanager
def progress_bar(*, left: bool = True) -> Iterator[Progress]:
    """A bar for each task on stderr, drawn when there is progress: an error before that stands alone.

    It tells the time that is `left`, once that is known, in place of the time that has passed.
    """
    from rich.progress import Progress, TaskID

    class Late(Progress):
        def update(self, task_id: TaskID, **changes: Any) -> None:
            self.start()
            super().update(task_id, **changes)

    progress = Late(*_columns(left), console=_stderr(), speed_estimate_period=WINDOW_S)
    try:
        yield progress
    finally:
        if progress.live.is_started:
            progress.stop()


def planning(progress: Progress) -> Callable[[Prediction | None, float, str], None]:
    """A bar for a search: to be told the best so far, what fraction of the search is done, and how far it is."""
    from sim.units import rate

    task = progress.add_task("planning", total=1.0, note="")

    def told(best: Prediction | None, share: float, note: str) -> None:
        found = f"best {rate(best.tokens_per_s)} tokens/s" if best else "nothing fits yet"
        progress.update(task, completed=share, note=f"{found}; {note}")

    return told


def part_of(progress: Progress, name: str) -> Callable[[float, str], None]:
    """A bar for one part of some work, to be told what fraction of it is done, and what is under way."""
    task = progress.add_task(name, total=1.0, note="")
    return lambda done, note: progress.update(task, completed=done, note=note)


@contextmanager
def stages() -> Iterator[Callable[[str], None]]:
    """To be told each stage of some work as it begins, which is shown where it takes long: on a terminal until it is
    over, elsewhere as lines.
    """
    from rich.progress import Progress

    console = _stderr()
    progress = Progress(*_columns(left=False), console=console, transient=True)
    told: list[str] = []  # lines, once it takes long

    def tell(name: str) -> None:
        told.append(name)
        print(f"{name} ...", file=sys.stderr)

    def begin(name: str) -> None:
        for task in progress.tasks:
            progress.update(task.id, total=1.0, completed=1.0)
        progress.add_task(name, total=None, note="")
        if told:
            tell(name)

    def show() -> None:
        if console.is_terminal:
            progress.start()
        elif progress.tasks:
            tell(progress.tasks[-1].description)

    late = threading.Timer(PATIENCE_S, show)
    late.start()
    try:
        yield begin
    finally:
        late.cancel()
        late.join()
        if progress.live.is_started:
            progress.stop()


@contextmanager
def goes_on() -> Iterator[None]:
    """For work that keeps its parts: whoever interrupts it is told so."""
    try:
        yield
    except KeyboardInterrupt:
        print("megatrain: interrupted; the same command goes on from here", file=sys.stderr)
        raise typer.Exit(130) from None


def _columns(left: bool) -> Sequence[ProgressColumn]:
    """Of a bar. On a narrow terminal the note takes several lines, and nothing is cut off."""
    from rich.progress import BarColumn, ProgressColumn, Task, TextColumn
    from rich.table import Column
    from rich.text import Text

    class Time(ProgressColumn):
        def render(self, task: Task) -> Text:
            rest = task.time_remaining if left and not task.finished else None
            passed = task.finished_time if task.finished else task.elapsed
            seconds = timedelta(seconds=int(rest or passed or 0))
            return Text(f"{seconds} left" if rest else f"{seconds}")

    return (
        TextColumn("{task.description}", table_column=Column(no_wrap=True)),
        BarColumn(BAR, table_column=Column(no_wrap=True, width=BAR)),
        Time(table_column=Column(no_wrap=True)),
        TextColumn("{task.fields[note]}", table_column=Column(no_wrap=False, overflow="fold")),
    )


def _stderr() -> Console:
    from rich.console import Console

    return Console(stderr=True)
