"""Buffers on a drive: a file each, of its exact size, read and written in large pieces by a small pool of threads.

Files lose their names as soon as they are open, so that the system frees them with the process, however that ends: what
a killed run left could fill the drive. `df` counts them, `du` does not. Their blocks are allocated before the first
step, so that a drive without room is told then and not in the middle of a run. Where the file system has direct access
(O_DIRECT, or F_NOCACHE on macOS), pages do not pass through the kernel's cache, which would take the memory that
training needs and hide the drive's speed; elsewhere access is through the cache.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import resource
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from megatrain.backend import POISON
from schedules.errors import Refused
from schedules.op import Buffer

PIECE = 4 << 20  # bytes of one read or write: enough for a drive's full bandwidth
DEPTH = 16  # pieces under way at once; one file's pieces go in parallel
BLOCK = 4096  # what direct access aligns memory, length and place to
MOST_FILES = 10240  # open at once, on macOS: it has no limit, and takes no larger one (OPEN_MAX, by its setrlimit(2))


class DriveError(Refused):
    """A drive that has no room, fails, or is not there; the message names the file and what to do."""


class Drive:
    """Slabs on the drive of a folder, and the threads that move them. Close it, or use it as a context manager.

    What is read or written goes in pieces of `piece` bytes, `depth` of them under way at once.

    Raises:
        DriveError: the folder is not there or cannot be written.
    """

    def __init__(self, folder: Path, *, piece: int | None = None, depth: int = DEPTH) -> None:
        self.piece = PIECE if piece is None else piece
        self.folder = folder
        try:
            self.direct = _has_direct_access(folder)
        except OSError as error:
            raise DriveError(f"cannot keep buffers in {folder}: {error.strerror}") from None
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        files = MOST_FILES if most == resource.RLIM_INFINITY else most
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))  # a buffer is an open file: 1,504 for a 70B's step
        self._workers = ThreadPoolExecutor(depth, thread_name_prefix="drive")
        self._bounce = threading.local()
        self._files: list[int] = []

    def __enter__(self) -> Drive:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def allocate(self, buffer: Buffer) -> DriveSlab:
        """A file of the buffer's size, its blocks allocated, full of zeros. Raises DriveError."""
        length = -(-buffer.nbytes // BLOCK) * BLOCK
        try:
            file = _open_nameless(self.folder)
            self._files.append(file)
            if length:
                _fill(file, length)
            if self.direct:  # not before: where a file system cannot allocate, the C library writes single bytes
                _go_direct(file)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise DriveError(
                    f"no room for {buffer.name}, {buffer.nbytes / 1e9:.3g} GB, in {self.folder}: "
                    f"{error.strerror}; make room there or choose another folder"
                ) from None
            hint = "; allow more with ulimit -n" if error.errno == errno.EMFILE else ""
            raise DriveError(f"cannot make {buffer.name} in {self.folder}: {error.strerror}{hint}") from None
        return DriveSlab(self, file, buffer)

    def close(self) -> None:
        """Wait for what is under way and close the files, which are gone then. May be called twice."""
        self._workers.shutdown()
        for file in self._files:
            with suppress(OSError):
                os.close(file)
        self._files = []

    def each(self, work: Callable[[int, int], None], nbytes: int) -> None:
        """Call work(start, stop) for pieces that cover [0, nbytes), several at once; raises what any raised."""
        pieces = [(start, min(start + self.piece, nbytes)) for start in range(0, nbytes, self.piece)]
        if len(pieces) == 1:
            work(*pieces[0])
            return
        for done in [self._workers.submit(work, *piece) for piece in pieces]:
            done.result()

    def bounce(self) -> tuple[mmap.mmap, Tensor]:
        """This thread's aligned memory of one piece, as memory and as a tensor, uint8 [piece]."""
        if not hasattr(self._bounce, "memory"):
            self._bounce.memory = mmap.mmap(-1, self.piece)
            self._bounce.tensor = torch.frombuffer(self._bounce.memory, dtype=torch.uint8)
        return self._bounce.memory, self._bounce.tensor


class DriveSlab:
    """One buffer on a drive."""

    def __init__(self, drive: Drive, file: int, buffer: Buffer) -> None:
        self._drive, self._file, self.nbytes = drive, file, buffer.nbytes
        self._name = f"{buffer.name} in {drive.folder}"

    def read(self, target: Tensor) -> None:
        """Fill contiguous CPU memory from the slab's first byte on. Raises DriveError."""
        memory = _bytes(target)

        def piece(start: int, stop: int) -> None:
            if self._aligned(memory, start, stop):
                self._whole(os.preadv, [_view(memory, start, stop)], start, stop - start, "read")
                return
            bounce, tensor = self._drive.bounce()
            length = -(-(stop - start) // BLOCK) * BLOCK
            self._whole(os.preadv, [memoryview(bounce)[:length]], start, length, "read")
            memory[start:stop].copy_(tensor[: stop - start])

        self._drive.each(piece, memory.numel())

    def write(self, source: Tensor) -> None:
        """Store contiguous CPU memory from the slab's first byte on. Raises DriveError."""
        memory = _bytes(source)

        def piece(start: int, stop: int) -> None:
            if self._aligned(memory, start, stop):
                self._whole(os.pwritev, [_view(memory, start, stop)], start, stop - start, "write")
                return
            bounce, tensor = self._drive.bounce()
            length = -(-(stop - start) // BLOCK) * BLOCK
            tensor[: stop - start].copy_(memory[start:stop])
            self._whole(os.pwritev, [memoryview(bounce)[:length]], start, length, "write")

        self._drive.each(piece, memory.numel())

    def poison(self) -> None:
        """Make every byte that of a NaN."""
        self.write(torch.full((self.nbytes,), POISON, dtype=torch.uint8))

    def _aligned(self, memory: Tensor, start: int, stop: int) -> bool:
        return (memory.data_ptr() + start) % BLOCK == 0 and (stop - start) % BLOCK == 0

    def _whole(
        self, call: Callable[[int, list[memoryview], int], int], views: list[memoryview], at: int, count: int, verb: str
    ) -> None:
        try:
            done = call(self._file, views, at)
        except OSError as error:
            raise DriveError(f"cannot {verb} {self._name} at byte {at}: {error.strerror}") from error
        if done != count:
            raise DriveError(
                f"cannot {verb} {self._name} at byte {at}: {done} of {count} bytes done; the file is cut off"
            )


def _bytes(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError("a drive reads and writes contiguous memory of the host")
    return tensor.reshape(-1).view(torch.uint8)


def _view(memory: Tensor, start: int, stop: int) -> memoryview:
    array = (ctypes.c_ubyte * (stop - start)).from_address(memory.data_ptr() + start)
    return memoryview(array).cast("B")


def _has_direct_access(folder: Path) -> bool:
    """Raises OSError where no file can be made."""
    file = _open_nameless(folder)
    try:
        with suppress(OSError):
            _go_direct(file)
            return True
        return False
    finally:
        os.close(file)


def _fill(file: int, length: int) -> None:
    """Zeros, on blocks of the file's own. Raises OSError where there is no room."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, length)
        return
    zeros = memoryview(bytes(min(PIECE, length)))
    for at in range(0, length, PIECE):  # macOS
        os.pwrite(file, zeros[: length - at], at)


def _go_direct(file: int) -> None:
    """What is read and written from now on passes the kernel's cache by. Raises OSError where that cannot be."""
    if hasattr(fcntl, "F_NOCACHE"):  # macOS
        fcntl.fcntl(file, fcntl.F_NOCACHE, 1)
        return
    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_DIRECT)


def _open_nameless(folder: Path) -> int:
    """A new file on the folder's drive, open to read and write."""
    # over a network a file keeps a name until it is closed, and its folder with it
    with tempfile.TemporaryDirectory(prefix="megatrain-", dir=folder, ignore_cleanup_errors=True) as own:
        return os.open(Path(own) / "buffer", os.O_RDWR | os.O_CREAT, 0o600)
