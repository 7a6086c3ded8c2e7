"""Other processes beside a measurement: told if they had much of the machine, and only then."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatrain import cli, neighbours
from megatrain.neighbours import told_of_neighbours

TICKS = os.sysconf("SC_CLK_TCK")


def stat(folder: Path, busy_s: float) -> None:
    """As Linux writes it, each core idle for a long time beside it."""
    (folder / "stat").write_text(f"cpu  {round(busy_s * TICKS)} 0 0 987654 0 0 0 0 0 0\ncpu0 1 2 3 4 5 6 7 8 9 10\n")


def test_others_that_had_much_of_the_machine_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "LONG_S", 0.0)
    stat(tmp_path, 100.0)
    with (
        pytest.warns(UserWarning, match=r"others had [\d.]+ of \d+ cores while this was measured"),
        told_of_neighbours(tmp_path),
    ):
        time.sleep(0.05)
        stat(tmp_path, 100.0 + 5 * (os.cpu_count() or 1))


@pytest.mark.parametrize("lines", [None, "", "cpu  1 2 3\n", "cpu  a b c d e f g h\n"])
def test_where_nothing_is_known_nothing_is_told(
    lines: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(neighbours, "LONG_S", 0.0)
    if lines is not None:
        (tmp_path / "stat").write_text(lines)
    with told_of_neighbours(tmp_path):
        pass
    assert not recwarn.list


def test_a_run_beside_others_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its first loss on: what compiled for the first step was its own."""
    monkeypatch.setattr(neighbours, "LONG_S", 0.0)
    begun = list[Path]()

    class Loud(neighbours.Neighbours):
        def __init__(self) -> None:
            begun.append(tmp_path)
            stat(tmp_path, 100.0)
            super().__init__(tmp_path)
            stat(tmp_path, 100.0 + 500 * (os.cpu_count() or 1))

    monkeypatch.setattr(neighbours, "Neighbours", Loud)
    done = CliRunner().invoke(cli.app, ["run", "tiny", "-b", "1", "-s", "8", "--steps", "3"])
    assert done.exit_code == 0 and len(begun) == 1
    note = r"note: others had [\d.]+ of \d+ cores while this was measured: it may be faster when the machine is quiet"
    assert len(re.findall(note, done.stderr)) == 1


def test_what_this_process_does_itself_is_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(neighbours, "LONG_S", 0.0)
    stat(tmp_path, 100.0)
    with told_of_neighbours(tmp_path):
        begun = sum(os.times()[:4])
        while sum(os.times()[:4]) < begun + 0.3:
            pass
        stat(tmp_path, 100.3)
    assert not recwarn.list
