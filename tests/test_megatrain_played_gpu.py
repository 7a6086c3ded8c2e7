"""torch's whole CUDA side without a GPU: on_played_gpu.py, and a benchmark, in processes whose GPU is the host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent
BENCHMARKS = HERE.parent / "benchmarks"
BESIDE = os.pathsep.join(map(str, (HERE.parent, BENCHMARKS)))


@pytest.fixture
def played_gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import played_gpu

    return played_gpu


@pytest.mark.parametrize("more", [{}, {"TORCH_CUDA_SANITIZER": "1"}], ids=["plain", "sanitized"])
def test_trainings_on_a_gpu_that_the_host_plays(played_gpu: ModuleType, more: dict[str, str], tmp_path: Path) -> None:
    try:
        environment = played_gpu.environment(played_gpu.build(tmp_path))
    except played_gpu.NotHere as error:
        pytest.skip(str(error))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "0", str(HERE / "on_played_gpu.py")],
        env={**environment, "PYTHONPATH": BESIDE, **more},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


def test_issuing_is_measured_or_the_reason_why_not_is_told(played_gpu: ModuleType, tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "issue.py"), "--out", str(tmp_path), "--models", "llama-3.2-1b"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": BESIDE}, capture_output=True, text=True)
    try:
        played_gpu.build(tmp_path)
    except played_gpu.NotHere as error:
        assert done.returncode == 1 and done.stderr.endswith(f"no GPU can be played here: {error}\n")
        return
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^\| llama-3.2-1b .* \|$", (tmp_path / "h100.md").read_text(), re.MULTILINE)
    assert len(rows) == 5 and all(row.endswith(" 0 |") for row in rows)
