"""Every op keeps to tensors of one device, and no op makes a thread wait for a GPU: on a device made for that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


@pytest.mark.slow
def test_trainings_on_a_device_of_its_own(tmp_path: Path) -> None:
    """In a process of its own: torch knows one device of this kind, once for all."""
    library, torch_folder = tmp_path / "other_device.so", Path(torch.__file__).parent
    compiler = ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", str(HERE / "other_device.cpp"), "-o", str(library)]
    include = [f"-I{torch_folder / 'include'}", f"-I{torch_folder / 'include/torch/csrc/api/include'}"]
    link = [f"-L{torch_folder / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    subprocess.run([*compiler, *include, *link], check=True)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "0", str(HERE / "other_device.py")],
        env={**os.environ, "OTHER_DEVICE": str(library)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
