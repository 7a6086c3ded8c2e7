"""From one C++ file to a loaded library: compiled with the system's compiler at first use, then kept.

Libraries are kept in the user's cache folder under a name that changes with the source, the compiler, its flags
and the processor, so that a home directory may be shared among machines. Several processes may build at once:
a library appears whole or not at all. One that a drive or a loss of power has damaged is built again.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from schedules.files import sync

COMPILERS = ("g++", "c++", "clang++")
# no contraction: which operations are fused is written in the source
FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off",
    "-fPIC", "-shared", "-pthread",
)  # fmt: skip
FLAGS_OF = {"x86_64": ("-mprefer-vector-width=512",)}  # compilers avoid the widest vectors unless told
TIMEOUT_S = 120


class NotBuilt(RuntimeError):
    """There is no library, and the message says why."""


def load(source: Path) -> ctypes.CDLL:
    """The library of `source`, compiled if it is not yet in the cache. Raises NotBuilt."""
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise NotBuilt(f"no C++ compiler ({', '.join(COMPILERS)}) is on the path")
    command = [compiler, *FLAGS, *FLAGS_OF.get(platform.machine(), ())]
    try:
        path = cache_folder() / f"{source.stem}-{_key(source, command)}.so"
        if not _is_whole(path):
            _compile(source, command, path)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        raise NotBuilt(f"{source.name} could not be built with {compiler}: {error}") from None


def cache_folder() -> Path:
    """Where libraries are kept: megatrain/native in $XDG_CACHE_HOME, or else in ~/.cache. Raises NotBuilt."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a container's user may be a mere number
        raise NotBuilt("this user has no home folder for it: set HOME or XDG_CACHE_HOME") from None
    return cache / "megatrain" / "native"


def _key(source: Path, command: list[str]) -> str:
    version = subprocess.run([command[0], "--version"], capture_output=True, timeout=TIMEOUT_S, check=True).stdout
    parts = [source.read_bytes(), "\0".join(command).encode(), version, _processor().encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _processor() -> str:
    """What `-march=native` looks at, near enough: the name and the instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(("model name", "flags", "Features"))))


def _compile(source: Path, command: list[str], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        partial = Path(folder) / path.name
        command = [*command, str(source), "-o", str(partial)]
        # a compiler may speak in any encoding
        done = subprocess.run(command, capture_output=True, text=True, errors="backslashreplace", timeout=TIMEOUT_S)
        if done.returncode:
            raise NotBuilt(f"{command[0]} refused {source.name}: {done.stderr.strip()[:500]}")
        digest = Path(folder) / _digest_of(path).name
        digest.write_bytes(_sha256(partial))
        for file in (partial, digest):
            sync(file)
            file.replace(path.parent / file.name)


def _is_whole(path: Path) -> bool:
    """Whether a library is as it was built: of a damaged one the loader dies, with this process."""
    try:
        return _digest_of(path).read_bytes() == _sha256(path)
    except FileNotFoundError:
        return False


def _digest_of(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _sha256(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).hexdigest().encode()
