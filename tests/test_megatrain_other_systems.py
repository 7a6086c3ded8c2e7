"""What predicts runs on macOS and Windows, too: here, on a Linux from which is taken what they do not have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Python reads a module of this name as it begins, in the processes that help to plan, too.
MACOS = """
import io, multiprocessing, os

for name in ("sched_getaffinity", "sched_setaffinity", "posix_fallocate", "O_DIRECT"):
    delattr(os, name)
opened = io.open

def not_of_linux(file, *more, **named):
    if isinstance(file, (str, os.PathLike)) and os.fspath(file).startswith(("/proc/", "/sys/")):
        raise FileNotFoundError(2, "No such file or directory", file)
    return opened(file, *more, **named)

io.open = not_of_linux
multiprocessing.set_start_method("spawn")
"""
WINDOWS = f"""
{MACOS}
import signal, sys

sys.modules["fcntl"] = sys.modules["resource"] = None
for name in ("sysconf", "preadv", "pwritev", "fork", "geteuid", "getuid", "statvfs"):
    delattr(os, name)
for name in ("SIGHUP", "SIGALRM", "SIGKILL", "SIGPIPE", "setitimer", "ITIMER_REAL"):
    delattr(signal, name)
"""
NAMED_WINDOWS = """
import sys, types
from megatrain import cli
sys.modules["megatrain.cli.options"].sys = types.SimpleNamespace(**vars(sys) | {"platform": "win32"})
cli.main()
"""


def megatrain(words: list[str], system: str, folder: Path, begin: tuple[str, str] = ("-m", "megatrain")) -> str:
    """What the command says, on that system, which is in the folder; it must end well."""
    (folder / "sitecustomize.py").write_text(system)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (folder, ROOT)))}
    done = subprocess.run(
        [sys.executable, *begin, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert not done.returncode, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("system", [MACOS, WINDOWS], ids=["macOS", "Windows"])
def test_a_step_is_planned_proven_and_predicted(system: str, tmp_path: Path) -> None:
    """With several processes, which begin with nothing of this one's."""
    step = ["--hardware", "rtx4090", "--tokens", "512", "--seq", "128"]
    assert "run it with" in megatrain(["plan", "tiny", *step, "--out", "plan.json"], system, tmp_path)
    assert "safe: no race" in megatrain(["verify", "plan.json"], system, tmp_path)
    predicts = ["simulate", "plan.json", "--hardware", "rtx4090", "--trace", "trace.json"]
    assert "tokens/s" in megatrain(predicts, system, tmp_path)
    varied = ["compare", "tiny", "-p", "streamed", "-H", "rtx4090", "--vary", "batch=1,2", "--out", "figure"]
    assert "throughput.png" in megatrain(varied, system, tmp_path)


def test_a_mac_trains(tmp_path: Path) -> None:
    words = ["run", "tiny", "--policy", "streamed", "--seq", "16", "--steps", "3", "--save", "saved"]
    assert "tokens/s" in megatrain(words, MACOS, tmp_path)


@pytest.mark.parametrize("words", [["run", "tiny"], ["profile"], ["validate"], ["demo"]], ids=lambda words: words[0])
def test_windows_is_told_where_it_trains(words: list[str], tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as told:
        megatrain(words, WINDOWS, tmp_path, ("-c", NAMED_WINDOWS))
    assert told.match("training and measuring need Linux or macOS; on Windows run them in WSL 2")
    assert "Traceback" not in str(told.value)
