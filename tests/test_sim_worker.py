"""Processes that help to plan: gone with the one that plans, and told where one of them is gone before it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import sim.candidate
from schedules.errors import Refused
from sim.candidate import judges

ROOT = Path(__file__).parents[1]
SLOW = """
import os, signal, time
import sim.candidate

def slow(case, candidate, best_ns):
    os.write(1, b"%d\\n" % os.getpid())
    time.sleep(60)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background has it ignored
sim.candidate.judge = slow
with sim.candidate.judges(None, 2) as judge:
    list(judge([1, 2], 0.0))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_processes_that_judge_end_with_the_one_that_plans(number: signal.Signals) -> None:
    """At once. The signal is for the parent alone, as from a scheduler, or from Linux where memory runs out."""
    with subprocess.Popen([sys.executable, "-c", SLOW], stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        workers = [int(process.stdout.readline()) for _ in range(2)]
        process.send_signal(number)
        assert process.wait(timeout=20) == -number
        deadline = time.monotonic() + 20
        while any(map(_runs, workers)) and time.monotonic() < deadline:
            time.sleep(0.05)
        left = [pid for pid in workers if _runs(pid)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left


def test_a_process_that_is_ended_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(sim.candidate, "judge", ended)
    nothing: Any = None
    with pytest.raises(Refused, match="a process that helped was ended"), judges(nothing, 2) as judge:
        list(judge([nothing, nothing], 0.0))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
