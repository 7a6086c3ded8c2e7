"""What a training says as it goes on: a bar on a terminal, a line now and then elsewhere, a log of every step."""

from __future__ import annotations

import json
import math
import os
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

PACED = 5  # losses from which a pace is told: the first ones come together, since steps are issued ahead
BETWEEN_LINES_S = 10.0  # at least, where there is no terminal


class TrainingProgress:
    """How far a training of so many steps is, each of so many tokens; all but the log goes to stderr.

    log: a file that gets a JSON line for each step as it finishes, after what it has already: "step", counted from 1
        over all runs that go on from each other, "loss" (null where it is not finite), "lr" if it trains, the "norm" of
        all gradients if the step takes it, and "seconds" since this object was made; and one of "step", "held_out_loss"
        and "seconds" each time that a text is evaluated.
    """

    def __init__(self, bar: Progress, steps: int, tokens: int, log: Path | None = None) -> None:
        self.losses: list[float] = []
        self.evaluated: list[dict[str, float]] = []  # what is held out, each time
        self._bar, self._task = bar, bar.add_task("starting", total=steps, note="")
        self._steps, self._tokens, self._log = steps, tokens, log
        self._step, self._began, self._said = 0, 0.0, -math.inf
        self._start = self._now = time.perf_counter()
        self._stage = ""

    def stage(self, name: str) -> None:
        """Something begins that is no step: "filling layer 3 of 34".

        Raises OSError where the log cannot be written.
        """
        if not self._stage and self._log is not None:
            self._log.open("a").close()  # better known now than after the first step
        self._paused()
        kind, self._stage = self._stage.split(" ")[0], name
        if self._drawn:
            self._bar.update(self._task, note=name)
        else:
            self._line(name, at_once=kind != name.split(" ")[0])

    def _paused(self) -> None:
        """Until now something else was done, which is no part of the pace."""
        now = time.perf_counter()
        self._began, self._now = self._began + now - self._now, now

    def trained(self, step: int, loss: float, lr: float | None, norm: float | None = None) -> None:
        """A step, counted from 0 over all runs that go on from each other, is done; `norm` as in Trainer.run.

        `lr` is None where nothing is trained.
        """
        self._step, self._now = step + 1, time.perf_counter()
        if not self.losses:
            self._began = self._now
        self.losses.append(loss)
        self._write(loss, lr, norm)
        if self._drawn:
            self._bar.update(self._task, advance=1, description="training", note=self.note())
        else:
            self._line(f"step {self.note()}", at_once=len(self.losses) in (1, self._steps))

    def held_out(self, step: int, loss: float, tokens: int) -> None:
        """What is held out has this loss after so many steps, of all runs that go on from each other."""
        self.evaluated.append({"after_step": step, "loss": loss, "tokens": tokens})
        self._paused()
        self.say(f"held-out loss {loss:.4f} {f'after step {step}' if step else 'before the first step'}")
        self._append({"step": step, "held_out_loss": loss if math.isfinite(loss) else None})

    def say(self, text: str) -> None:
        """A line for itself."""
        from rich.text import Text

        self._bar.console.print(Text(text), soft_wrap=True)

    def note(self) -> str:
        """The last step in words: "23/120, loss 5.100, 32 tokens/s, 0:03:10 left"."""
        done = len(self.losses)
        said = f"{self._step}/{self._step - done + self._steps}, loss {self.losses[-1]:.3f}"
        if done < PACED or self._now <= self._began:
            return said
        pace = (self._now - self._began) / (done - 1)  # the first step's start is not known
        left = timedelta(seconds=round(pace * (self._steps - done)))
        return f"{said}, {self._tokens / pace:,.0f} tokens/s, {left} left"

    def reached(self) -> str:
        """How far it got, for the message after an interrupt."""
        return f"after step {self._step}" if self.losses else "before the first step was done"

    @property
    def _drawn(self) -> bool:
        return self._bar.console.is_interactive

    def _line(self, text: str, at_once: bool) -> None:
        if at_once or self._now - self._said >= BETWEEN_LINES_S:
            self._said = self._now
            self.say(text)

    def _write(self, loss: float, lr: float | None, norm: float | None) -> None:
        told: dict[str, float | None] = {"step": self._step, "loss": loss if math.isfinite(loss) else None}
        told |= {} if lr is None else {"lr": lr}
        self._append(told if norm is None else told | {"norm": norm if math.isfinite(norm) else None})

    def _append(self, told: dict[str, float | None]) -> None:
        """A line of the log, with the time."""
        if self._log is None:
            return
        line = told | {"seconds": round(self._now - self._start, 3)}
        whole: int | None = None  # bytes, of whole lines
        try:
            with self._log.open("a") as file:  # each time, so that all of it is there for whoever looks
                whole = os.fstat(file.fileno()).st_size
                file.write(json.dumps(line) + "\n")
        except OSError as error:  # a full drive, say: no reason to stop training
            if whole is not None:  # a part of a line would spoil the first one of the run that goes on
                with suppress(OSError):
                    os.truncate(self._log, whole)
            self.say(f"note: {self._log} cannot be written any longer, and ends: {error.strerror}")
            self._log = None
