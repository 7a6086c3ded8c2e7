"""How a training is asked to stop: once, and it saves; twice, and it ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any


class Interrupt:
    """Ctrl-C and SIGTERM during a training, while open.

    The first asks it to stop after the steps under way and to save, where that is of use; any other ends it at once.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, useful: Callable[[], bool]) -> None:
        self.asked = False
        self._useful = useful
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        for number in self.SIGNALS:
            before = signal.getsignal(number)
            if before not in (signal.SIG_IGN, None):  # a shell in the background has Ctrl-C ignored
                self._before[number] = before
                signal.signal(number, self._heard)
        return self

    def __exit__(self, *error: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _heard(self, number: int, frame: object) -> None:
        if self.asked or not self._useful():
            raise KeyboardInterrupt
        self.asked = True
        # not print: what the signal has interrupted may be a print itself
        os.write(2, b"\nmegatrain: the steps under way are finished and saved; interrupt again to end at once\n")
