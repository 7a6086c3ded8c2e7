"""A GPU that the host plays, below torch (played_gpu.cpp): where it can be, and how a process gets it.

It needs torch built for CUDA 13, no newer than those that it was made for, a compiler, and no GPU. What kernels compute
is not computed; what the host does for them is done.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import torch

SOURCE = Path(__file__).with_suffix(".cpp")
LIBRARY = "libcuda.so.1"  # by this name Triton finds the driver, too
PLAYED = ("2.11", "2.12")  # what later ones ask for besides is not played: torch 2.14 crashes
GPUS = {"h100": ("NVIDIA H100 80GB HBM3", 79.2), "h200": ("NVIDIA H200", 139.8)}  # CUDA's name, GiB that it tells


class NotHere(Exception):
    """Why no GPU can be played on this machine."""


def build(folder: Path) -> Path:
    """Compile the library into the folder. Raises NotHere."""
    if not (torch.version.cuda or "").startswith("13."):
        raise NotHere(f"torch {torch.__version__} is not built for CUDA 13")
    if not torch.__version__.startswith(PLAYED):
        raise NotHere(f"torch {torch.__version__} may ask for more than torch {' or '.join(PLAYED)} does")
    if torch.cuda.is_available():
        raise NotHere("there is a GPU")
    if shutil.which("g++") is None:
        raise NotHere("there is no g++")
    headers = [folder / "include" for folder in (_of("nvidia") / "cu13", _of("triton") / "backends" / "nvidia")]
    if not all(header.is_dir() for header in headers):
        raise NotHere(f"CUDA's headers are not in {' and '.join(map(str, headers))}")
    folder.mkdir(parents=True, exist_ok=True)
    command = ["g++", "-std=c++20", "-O2", "-shared", "-fPIC", *(f"-I{header}" for header in headers), str(SOURCE)]
    subprocess.run([*command, "-o", str(folder / LIBRARY)], check=True)
    return folder / LIBRARY


def _of(package: str) -> Path:
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise NotHere(f"there is no package {package}")
    return Path(next(iter(found.submodule_search_locations)))


def environment(library: Path, gpu: str = "h100", *, still: bool = False) -> Mapping[str, str]:
    """Of a process that finds this GPU. `still`: copies move nothing, and so take no memory that nobody else writes."""
    name, gib = GPUS[gpu]
    return {
        **os.environ,
        "LD_PRELOAD": str(library),
        "LD_LIBRARY_PATH": str(library.parent),
        "TRITON_LIBCUDA_PATH": str(library.parent),
        "PLAYED_GPU_NAME": name,
        "PLAYED_GPU_GIB": str(gib),
        **({"PLAYED_GPU_STILL": "1"} if still else {}),
    }


# ---- in such a process


def begin() -> None:
    """Before anything is computed: cuDNN's attention asks a real GPU, so torch is to take its own."""
    torch.backends.cuda.enable_cudnn_sdp(False)


def count(what: str) -> int:
    """How often it happened since last asked; the words are those of the library."""
    return int(_library().played_gpu_count(what.encode()))


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(os.environ["LD_PRELOAD"])
    library.played_gpu_count.restype = ctypes.c_longlong
    return library
