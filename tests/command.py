"""Processes of their own that are forked from one with all imports, which take longer than most of what is run."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired
from typing import Any, TextIO

ROOT = Path(__file__).parent.parent
TIMEOUT_S = 120.0
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tests.preloaded"])


def megatrain(*arguments: str, cwd: Path | None = None) -> CompletedProcess[str]:
    """`megatrain ...`: what it wrote and how it ended. Raises TimeoutExpired."""
    return _forked(_megatrain, ["megatrain", *arguments], cwd or ROOT, os.environ)


@dataclass
class Begun:
    """A `megatrain ...` that runs, and what it writes."""

    process: BaseProcess
    stdout: TextIO
    stderr: TextIO

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def ended(self) -> CompletedProcess[str]:
        """Waits for its end; with what was not yet read."""
        out, err = ("" if stream.closed else stream.read() for stream in (self.stdout, self.stderr))
        self.process.join()
        assert self.process.exitcode is not None
        return CompletedProcess("megatrain", self.process.exitcode, out, err)


@contextmanager
def begun(*arguments: str) -> Iterator[Begun]:
    """`megatrain ...` that hears of signals; killed at the end, or after TIMEOUT_S, where it has not ended."""
    (out, to_out), (err, to_err) = (SERVER.Pipe(duplex=False) for _ in range(2))
    more = (ROOT, [to_out, to_err], dict(os.environ))
    process = SERVER.Process(target=_run, args=(_hearing, ["megatrain", *arguments], *more))
    process.start()
    to_out.close()
    to_err.close()
    late = threading.Timer(TIMEOUT_S, process.kill)
    late.start()
    with out, err, open(out.fileno(), closefd=False) as stdout, open(err.fileno(), closefd=False) as stderr:
        try:
            yield Begun(process, stdout, stderr)
        finally:
            late.cancel()
            process.kill()
            process.join()


def python(code: str, *arguments: str, environment: Mapping[str, str]) -> CompletedProcess[str]:
    """`python -c code ...` with one thread, likewise, but that what it began and left is not waited for."""
    return _forked(_python, ["-c", *arguments], ROOT, environment, code)


def _forked(
    run: Callable[..., None], argv: list[str], cwd: Path, environment: Mapping[str, str], *more: Any
) -> CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("stdout", "stderr")]
        process = SERVER.Process(target=_run, args=(run, argv, cwd, files, dict(environment), *more))
        process.start()
        process.join(TIMEOUT_S)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise TimeoutExpired(argv, TIMEOUT_S)
        out, err = (file.read_text() for file in files)
    return CompletedProcess(argv, process.exitcode, out, err)


def _run(
    run: Callable[..., None],
    argv: list[str],
    cwd: Path,
    files: Sequence[Path | Connection],
    environment: Mapping[str, str],
    *more: Any,
) -> None:
    for number, file in enumerate(files, 1):
        opened = (
            file.fileno() if isinstance(file, Connection) else os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        )
        os.dup2(opened, number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.argv = argv
    # that of any process, and not the one by which this came to be: a pool would begin with a server, and all imports
    multiprocessing.set_start_method(None, force=True)
    run(*more)


def _megatrain() -> None:
    from megatrain.cli import main

    main()


def _hearing() -> None:
    # those of the server may be of files, in which there are places to go to
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", closefd=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background has it ignored
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # as nohup has this
    _megatrain()


def _python(code: str) -> None:
    import torch

    torch.set_num_threads(1)  # OMP_NUM_THREADS comes too late: torch is there
    sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
    status = 0
    try:
        exec(compile(code, "-c", "exec"), {"__name__": "__main__"})
    except SystemExit as ended:
        if isinstance(ended.code, int):
            status = ended.code
        elif ended.code is not None:  # a message
            print(ended.code, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
