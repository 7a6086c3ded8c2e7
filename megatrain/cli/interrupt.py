"""How a training is asked to stop: once, and it saves; twice, and it ends; three times, and that at once."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

PATIENCE_S = 1.0  # after which whoever waits for the end is told what it waits for
TOGETHER_S = 0.5  # `timeout` signals a process and then its group, a shell that ends does as much: that is one wish


class Interrupt:
    """Ctrl-C, SIGTERM and a terminal that closes during a training, while open.

    The first asks it to stop after the steps under way and to save, where that is of use. The next ends it as soon as
    the ops under way are done, and one more at once: an op may compute for minutes, and is not to be interrupted.
    Those that come afterwards, while the process ends for the sake of one, are ignored: its exit code is to be told.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self, useful: Callable[[], bool]) -> None:
        self.asked = False
        self._ending = False
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
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, before in self._before.items():
            signal.signal(number, signal.SIG_IGN if self._at > -math.inf else before)

    def _heard(self, number: int, frame: object) -> None:
        before, now = self._at, time.monotonic()
        if now - before < TOGETHER_S:
            return
        self._at = now
        if self._ending:
            _say("ended in the middle of an op")
            os._exit(130)
        if self.asked or not self._useful():
            self._ending = True
            # no thread: the signal may have interrupted the start of one, which holds a lock that this would need
            self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, _waits)
            signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)
            raise KeyboardInterrupt
        self.asked = True
        _say("the steps under way are finished and saved; interrupt again to end without")


def _waits(number: int, frame: object) -> None:
    _say("ends after the ops under way; interrupt again to end at once")


def _say(text: str) -> None:
    # not print: what the signal has interrupted may be a print itself
    with suppress(OSError):  # Ctrl-C has ended a `tee` behind us, too
        os.write(2, f"\nmegatrain: {text}\n".encode())
