"""`megatrain ...` as a process of its own, forked from one with all imports, which take longer than most commands."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired

ROOT = Path(__file__).parent.parent
TIMEOUT_S = 120.0
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tests.preloaded"])


def megatrain(*arguments: str, cwd: Path | None = None) -> CompletedProcess[str]:
    """What it wrote and how it ended. Raises TimeoutExpired."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("stdout", "stderr")]
        process = SERVER.Process(target=_run, args=(arguments, cwd or ROOT, files, dict(os.environ)))
        process.start()
        process.join(TIMEOUT_S)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise TimeoutExpired(arguments, TIMEOUT_S)
        out, err = (file.read_text() for file in files)
    return CompletedProcess(arguments, process.exitcode, out, err)


def _run(arguments: tuple[str, ...], cwd: Path, files: list[Path], environment: Mapping[str, str]) -> None:
    from megatrain.cli import main

    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.argv = ["megatrain", *arguments]
    main()
