"""Host memory that a GPU's copy engines reach by themselves: pinned, exact in size, touched, on the GPU's side.

torch's own pinned allocator rounds every block up to a power of two. Here a slab is a private mapping of its own,
in huge pages where the kernel gives them, touched by several threads that run on the cores beside the GPU, so
that its pages lie in the memory of that side, and only then registered with CUDA, which finds them in place.

The memory of some virtual machines grows as it is used, but not as fast as several threads use it up, and Linux ends a
process that finds none. So where little is left, touching waits for more to come.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatrain.ram import available_memory
from schedules.errors import Refused

HUGE_PAGE = 1 << 21
TOUCHING_THREADS = 16  # more gain nothing: they wait for the kernel's lock of the address space
PIECE = 1 << 26  # bytes that a thread touches before it looks again whether there is memory
LITTLE = 1 << 31  # bytes of memory: where no more are left, threads wait
PATIENCE_S, LOOK_S = 5.0, 0.02  # how long at most since there was more, and how often they look
PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context
NORESERVE = 0x4000  # Linux' MAP_NORESERVE, which `mmap` has from Python 3.13 on


class Runtime(Protocol):
    """The two calls of the CUDA runtime that pin memory, as `torch.cuda.cudart()` has them; 0 is success."""

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> Any: ...

    def cudaHostUnregister(self, address: int) -> Any: ...


class PinError(Refused):
    """The system had no such memory, or CUDA refused to pin it, often because of a limit on locked memory."""


def pinned(nbytes: int, runtime: Runtime, *, cpus: Sequence[int] = ()) -> Tensor:
    """A slab, uint8 [nbytes], aligned to a huge page; unpinned when the last view of it is gone.

    It is zeroed, unless it was kept from before (`kept_pinned`). `cpus` are the cores whose memory it should lie in,
    any if empty. Raises PinError.
    """
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    region = _kept.take(nbytes) or _pin(nbytes, runtime, cpus)
    _kept.use(region)
    slab = (ctypes.c_ubyte * nbytes).from_buffer(region.mapping, region.offset)
    # the finalizer holds the mapping, which must outlive the registration
    weakref.finalize(slab, _kept.give_back, region).atexit = False
    return torch.frombuffer(slab, dtype=torch.uint8)


@dataclass(frozen=True)
class _Region:
    """Pinned memory: of a mapping, what begins at `offset`."""

    mapping: mmap.mmap
    offset: int
    address: int
    nbytes: int
    runtime: Runtime

    def unpin(self) -> None:
        self.runtime.cudaHostUnregister(self.address)


def _pin(nbytes: int, runtime: Runtime, cpus: Sequence[int]) -> _Region:
    # Address space for the alignment costs nothing: what is not touched takes no memory. Without a reservation, since
    # Linux refuses one of more than the memory that it sees, which on some virtual machines grows as it is used.
    try:
        mapping = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    except OSError as error:
        raise PinError(f"{nbytes / 1e9:.2f} GB of host memory could not be had: {error}") from error
    base = ctypes.addressof(ctypes.c_ubyte.from_buffer(mapping))
    offset = -base % HUGE_PAGE
    # A process that is forked gets nothing of it: the kernel would copy pinned pages for it at once, all of them.
    mapping.madvise(mmap.MADV_DONTFORK)
    _advise(mapping, offset, nbytes)
    _touch((ctypes.c_ubyte * nbytes).from_buffer(mapping, offset), cpus)
    status = int(runtime.cudaHostRegister(base + offset, nbytes, PORTABLE))
    if status:
        raise PinError(f"{nbytes / 1e9:.2f} GB of host memory could not be pinned: CUDA error {status}")
    return _Region(mapping, offset, base + offset, nbytes, runtime)


def _advise(mapping: mmap.mmap, offset: int, nbytes: int) -> None:
    """Ask for huge pages, only where whole ones fit, so that no byte more is taken than asked for."""
    whole = nbytes // HUGE_PAGE * HUGE_PAGE
    if whole and hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            mapping.madvise(mmap.MADV_HUGEPAGE, offset, whole)
        except OSError:
            return  # a kernel without them


def _touch(memory: ctypes.Array[ctypes.c_ubyte], cpus: Sequence[int]) -> None:
    """Write every page, several threads a part each, on the cores named."""
    address, nbytes = ctypes.addressof(memory), len(memory)
    count = max(1, min(TOUCHING_THREADS, len(cpus) or os.cpu_count() or 1, nbytes // HUGE_PAGE))
    part = -(-nbytes // count // HUGE_PAGE) * HUGE_PAGE if count > 1 else nbytes
    ended = threading.Event()

    def write(start: int, held: object) -> None:
        """`held` lives as long as the thread does, which an interrupt of this one does not end."""
        if cpus:
            with contextlib.suppress(OSError):  # a container may have been given other cores meanwhile
                os.sched_setaffinity(0, cpus)  # of this thread alone
        stop = min(start + part, nbytes)
        for at in range(start, stop, PIECE):
            if ended.is_set():
                return
            _MEMORY.wait()
            ctypes.memset(address + at, 0, min(PIECE, stop - at))  # without Python's lock

    threads = [threading.Thread(target=write, args=(start, memory)) for start in range(0, nbytes, part)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        ended.set()


class _Growing:
    """Memory that may grow while several threads use it up."""

    def __init__(self) -> None:
        self._patience_s, self._turn = PATIENCE_S, threading.Lock()

    def wait(self) -> None:
        """Return where more than LITTLE is left, or none has come for PATIENCE_S; then not again before there was."""
        with self._turn:
            while available_memory() <= LITTLE:
                if self._patience_s <= 0:
                    return
                time.sleep(LOOK_S)
                self._patience_s -= LOOK_S
            self._patience_s = PATIENCE_S


_MEMORY = _Growing()  # of this machine


# ---- slabs for the next training


class _Kept:
    """Regions in use and, within `limit` bytes together with these, those that stay pinned though nothing views them.

    Garbage is collected on any thread, within these methods too: what comes back then is sorted in by whoever is there.
    """

    def __init__(self) -> None:
        self._limit, self._used = 0, 0
        self._free = list[_Region]()  # the oldest first
        self._back, self._turn = deque[_Region](), threading.Lock()

    def take(self, nbytes: int) -> _Region | None:
        """One of exactly this size if there is one; otherwise there is room for it."""
        with self._turn:
            self._sort_in()
            found = next((region for region in self._free if region.nbytes == nbytes), None)
            if found is not None:
                self._free.remove(found)
            self._unpin_beyond(self._limit - nbytes)
            return found

    def use(self, region: _Region) -> None:
        with self._turn:
            self._used += region.nbytes

    def give_back(self, region: _Region) -> None:
        self._back.append(region)
        while self._back and self._turn.acquire(blocking=False):
            try:
                self._sort_in()
            finally:
                self._turn.release()

    @contextlib.contextmanager
    def within(self, limit: int) -> Iterator[None]:
        before, self._limit = self._limit, max(self._used + limit, self._limit)
        try:
            yield
        finally:
            with self._turn:
                self._limit = before
                self._unpin_beyond(before)

    def _sort_in(self) -> None:
        while self._back:
            self._free.append(self._back.popleft())
            self._used -= self._free[-1].nbytes
        self._unpin_beyond(self._limit)

    def _unpin_beyond(self, limit: int) -> None:
        while self._free and self._used + sum(region.nbytes for region in self._free) > limit:
            self._free.pop(0).unpin()


_kept = _Kept()


def kept_pinned(limit: int) -> contextlib.AbstractContextManager[None]:
    """Within, slabs that nothing views any more stay pinned, each for the next one of exactly its size.

    Those in use and those kept are at most `limit` bytes more than are in use now; the oldest that are kept go first.
    """
    return _kept.within(limit)


# ---- which side of the machine a GPU is on


def cpus_beside(pci_address: str, sys: Path = Path("/sys")) -> tuple[int, ...]:
    """The cores that this process may use on the NUMA node of a PCI device ("0000:1b:00.0"); all if unknown."""
    allowed = os.sched_getaffinity(0)
    try:
        node = int((sys / "bus/pci/devices" / pci_address.lower() / "numa_node").read_text())
        listed = (sys / f"devices/system/node/node{node}/cpulist").read_text() if node >= 0 else ""
    except (OSError, ValueError):
        return tuple(sorted(allowed))
    return tuple(sorted(allowed & _numbers(listed))) or tuple(sorted(allowed))


def _numbers(listed: str) -> set[int]:
    """{0, 1, 2, 8} from "0-2,8"."""
    found: set[int] = set()
    for part in listed.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return found
