"""How a training is asked to stop: once, and it saves; twice, and it ends."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

TOGETHER_S = 0.5  # `timeout` signals a process and then its group, a shell that ends does as much: that is one wish


class Interrupt:
    """Ctrl-C, SIGTERM and a terminal that closes during a training, while open.

    The first asks it to stop after the steps under way and to save, where that is of use; any other ends it at once.
    Those that come afterwards, while the process ends for the sake of one, are ignored: its exit code is to be told.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self, useful: Callable[[], bool]) -> None:
        self.asked = False
        self._useful = useful
        self._before: dict[int, Any] = {}
        self._at = -math.inf  # when the last one came

    def __enter__(self) -> Interrupt:
        for number in self.SIGNALS:
            before = signal.getsignal(number)
            if before not in (signal.SIG_IGN, None):  # a shell in the background has Ctrl-C ignored
                self._before[number] = before
                signal.signal(number, self._heard)
        return self

    def __exit__(self, *error: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, signal.SIG_IGN if self._at > -math.inf else before)

    def _heard(self, number: int, frame: object) -> None:
        before, now = self._at, time.monotonic()
        if now - before < TOGETHER_S:
            return
        self._at = now
        if self.asked or not self._useful():
            raise KeyboardInterrupt
        self.asked = True
        # not print: what the signal has interrupted may be a print itself
        with suppress(OSError):  # Ctrl-C has ended a `tee` behind us, too
            os.write(2, b"\nmegatrain: the steps under way are finished and saved; interrupt again to end at once\n")
