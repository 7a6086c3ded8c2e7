"""torch's whole CUDA side without a GPU: on_played_gpu.py in processes whose GPU is the host."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
BENCHMARKS = HERE.parent / "benchmarks"


@pytest.mark.parametrize("more", [{}, {"TORCH_CUDA_SANITIZER": "1"}], ids=["plain", "sanitized"])
def test_trainings_on_a_gpu_that_the_host_plays(more: dict[str, str], tmp_path: Path) -> None:
    sys.path.append(str(BENCHMARKS))
    try:
        import played_gpu
    finally:
        sys.path.remove(str(BENCHMARKS))
    try:
        environment = played_gpu.environment(played_gpu.build(tmp_path))
    except played_gpu.NotHere as error:
        pytest.skip(str(error))
    path = os.pathsep.join(map(str, (HERE.parent, BENCHMARKS)))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "0", str(HERE / "on_played_gpu.py")],
        env={**environment, "PYTHONPATH": path, **more},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
