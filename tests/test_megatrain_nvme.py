"""Buffers on a drive: what is written is read, and a drive that fails stops with a message and leaves nothing."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain import nvme
from megatrain.adam import Adam
from megatrain.backend import OpFailed
from megatrain.cpu import CpuBackend
from megatrain.data import RandomTokens
from megatrain.initial import random_parameters
from megatrain.nvme import BLOCK, Drive, DriveError, DriveSlab
from megatrain.preflight import require_drive
from megatrain.store import StoreError
from megatrain.train import Debug, Trainer
from schedules import policies, presets
from schedules.errors import InputError, Refused
from schedules.op import Buffer, Tier
from schedules.verify import Verified, verify
from schedules.workload import MemoryBudget, Workload

ROOM = MemoryBudget(device_bytes=1 << 30, host_bytes=1 << 30, nvme_bytes=1 << 30)
PIECE = 4 * BLOCK


@pytest.fixture
def drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Drive]:
    monkeypatch.setattr(nvme, "PIECE", PIECE)  # so that small slabs have several
    (tmp_path / "mine.txt").write_text("kept")
    with Drive(tmp_path) as opened:
        yield opened
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def slab(drive: Drive, nbytes: int, name: str = "nvme.o.3") -> DriveSlab:
    return drive.allocate(Buffer(name=name, tier=Tier.NVME, nbytes=nbytes))


def on_nvme() -> Verified:
    workload = Workload(micro_batch_size=1, seq_len=16, precision="fp32")
    return verify(policies.build("streamed", presets.load("tiny"), workload, ROOM, nvme=4))


def trainer(folder: Path | None, **more: Any) -> Trainer[Any]:
    verified = on_nvme()
    data = RandomTokens(vocab_size=256, workload=verified.schedule.workload)
    first = random_parameters(verified.schedule.model, 0)
    return Trainer(verified, CpuBackend(), data, Adam(lr=1e-3), initial=first, nvme=folder, **more)


@pytest.mark.parametrize("nbytes", [1, 100, BLOCK, BLOCK + 1, PIECE, 3 * PIECE - 7, 5 * PIECE + BLOCK])
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("offset", [0, 64])
def test_what_is_written_is_read(
    drive: Drive, monkeypatch: pytest.MonkeyPatch, nbytes: int, direct: bool, offset: int
) -> None:
    """Whatever its size, with direct access and without, from memory that is aligned and that is not."""
    if direct and not drive.direct:
        pytest.skip("this file system has no direct access")
    monkeypatch.setattr(drive, "direct", direct)
    memory = torch.empty(nbytes + 2 * BLOCK, dtype=torch.uint8)
    begin = -memory.data_ptr() % BLOCK + offset
    source = memory[begin : begin + nbytes]
    source.copy_(torch.randint(0, 256, (nbytes,), dtype=torch.uint8))
    held, back = slab(drive, nbytes), torch.zeros(nbytes, dtype=torch.uint8)
    assert bool(fcntl.fcntl(held._file, fcntl.F_GETFL) & os.O_DIRECT) == direct
    with monkeypatch.context() as patched:
        if not offset and nbytes % BLOCK == 0:
            patched.setattr(drive, "bounce", lambda: pytest.fail("aligned memory is copied for nothing"))
        held.write(source)
    held.read(back)
    assert torch.equal(back, source)
    assert os.fstat(held._file).st_blocks * 512 >= nbytes  # allocated, not a hole


def test_a_drive_without_direct_access_is_used_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = fcntl.fcntl

    def without(file: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return told(file, command, flags)

    monkeypatch.setattr(fcntl, "fcntl", without)
    with Drive(tmp_path) as drive:
        held, found = slab(drive, 3 * BLOCK), torch.empty(3 * BLOCK, dtype=torch.uint8)
        held.write(torch.full_like(found, 7))
        held.read(found)
        assert not drive.direct and (found == 7).all()


def test_blocks_are_allocated_where_the_file_system_itself_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the C library writes a byte into each of them, which direct access would refuse."""

    def by_writing(file: int, offset: int, length: int) -> None:
        assert offset == 0
        for at in range(0, length, BLOCK):
            os.pwrite(file, bytes(1), at + BLOCK - 1)

    monkeypatch.setattr(os, "posix_fallocate", by_writing)
    with Drive(tmp_path) as drive:
        if not drive.direct:
            pytest.skip("this file system has no direct access")
        held, found = slab(drive, 3 * BLOCK), torch.ones(3 * BLOCK, dtype=torch.uint8)
        held.read(found)
        assert not found.any() and fcntl.fcntl(held._file, fcntl.F_GETFL) & os.O_DIRECT


def test_on_macos_blocks_are_written_and_the_cache_is_told_to_keep_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = list[tuple[int, int]]()
    monkeypatch.delattr(os, "posix_fallocate")
    monkeypatch.delattr(os, "O_DIRECT")
    monkeypatch.setattr(fcntl, "F_NOCACHE", 48, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", lambda file, command, value: told.append((command, value)))
    monkeypatch.setattr(nvme, "PIECE", PIECE)
    with Drive(tmp_path) as drive:
        held, found = slab(drive, 2 * PIECE + 1), torch.ones(2 * PIECE + 1, dtype=torch.uint8)
        assert drive.direct and told == [(48, 1)] * 2  # a first file only tries it
        assert os.fstat(held._file).st_blocks * 512 >= os.fstat(held._file).st_size == 2 * PIECE + BLOCK
        held.read(found)
        assert not found.any()
        held.write(found + 3)
        held.read(found)
        assert (found == 3).all()


def test_slabs_are_zero_until_written_and_nan_when_poisoned(drive: Drive) -> None:
    held, found = slab(drive, 3 * PIECE), torch.ones(3 * PIECE // 4)
    held.read(found)
    assert not found.any()
    held.poison()
    held.read(found)
    assert found.isnan().all()


def test_a_slab_that_ends_within_a_block_is_zero_until_written(drive: Drive) -> None:
    found = torch.ones(BLOCK + 1, dtype=torch.uint8)
    slab(drive, BLOCK + 1).read(found)
    assert not found.any()


def test_a_slab_without_bytes_is_written_and_read(drive: Drive) -> None:
    held, nothing = slab(drive, 0), torch.empty(0, dtype=torch.uint8)
    held.write(nothing)
    held.read(nothing)


def test_a_part_of_a_slab_can_be_used(drive: Drive) -> None:
    held, small = slab(drive, 4 * PIECE), torch.arange(PIECE, dtype=torch.float32)
    held.write(small)
    found = torch.empty_like(small)
    held.read(found)
    assert torch.equal(found, small)


def test_memory_with_gaps_and_memory_that_is_not_the_hosts_are_refused(drive: Drive) -> None:
    """The one would be read into a copy that nobody sees, the other has no address."""
    held, every_second = slab(drive, BLOCK), torch.zeros(BLOCK, 2, dtype=torch.uint8)[:, 0]
    for memory in (every_second, torch.empty(BLOCK, dtype=torch.uint8, device="meta")):
        for move in (held.read, held.write):
            with pytest.raises(ValueError, match="contiguous memory of the host"):
                move(memory)


def test_a_closed_drive_has_no_threads_and_no_files(tmp_path: Path) -> None:
    with Drive(tmp_path, piece=BLOCK, depth=3) as drive:
        held = slab(drive, 5 * BLOCK)
        held.poison()
        assert any(thread.name.startswith("drive") for thread in threading.enumerate())
    assert not any(thread.name.startswith("drive") for thread in threading.enumerate())
    drive.close()
    with pytest.raises(OSError, match="Bad file descriptor"):  # its blocks are the drive's again
        os.fstat(held._file)


def test_a_drive_that_is_closed_again_leaves_alone_what_was_opened_since(tmp_path: Path) -> None:
    drive = Drive(tmp_path)
    number = slab(drive, BLOCK)._file
    drive.close()
    os.dup2(2, number)
    drive.close()
    os.fstat(number)
    os.close(number)


def test_a_drive_that_nothing_is_kept_on_leaves_no_file_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    Drive(tmp_path).close()
    assert len(os.listdir("/proc/self/fd")) <= before


def failing(number: int) -> Any:
    def call(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    return call


def test_a_full_drive_is_told_before_the_first_step_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.ENOSPC))
    with pytest.raises(DriveError, match=r"no room for nvme\.o\.\d.*make room there or choose another folder"):
        trainer(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_an_error_of_the_drive_stops_the_run_and_names_op_and_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    with trainer(tmp_path) as running:
        running.run(1)
        monkeypatch.setattr(os, call, failing(errno.EIO))
        with pytest.raises(OpFailed, match=r"\.o\.\d.* failed on stream nvme_(read|write)") as told:
            running.run(2)
        assert isinstance(told.value.__cause__, DriveError) and "nvme.o." in str(told.value.__cause__)
    assert not list(tmp_path.iterdir())


def test_there_may_be_more_buffers_than_a_shell_allows_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))
    try:
        with Drive(tmp_path) as opened:
            assert len([slab(opened, BLOCK) for _ in range(100)]) == 100
            monkeypatch.setattr(nvme, "_open_nameless", failing(errno.EMFILE))
            with pytest.raises(DriveError, match=r"cannot make .*: Too many open files; allow more with ulimit -n"):
                slab(opened, BLOCK)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, most))


def test_no_limit_of_files_is_asked_for_as_macos_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[tuple[int, tuple[int, int]]]()
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: asked.append((kind, limits)))
    with Drive(tmp_path):
        assert asked == [(resource.RLIMIT_NOFILE, (10240, resource.RLIM_INFINITY))]


def test_a_file_that_was_cut_off_is_told(drive: Drive) -> None:
    held = slab(drive, 3 * PIECE)
    os.truncate(held._file, PIECE)
    with pytest.raises(DriveError, match=r"0 of .* bytes done; the file is cut off"):
        held.read(torch.empty(3 * PIECE, dtype=torch.uint8))


def test_a_run_leaves_nothing_in_the_folder_however_it_ends_and_the_loss_falls(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("kept")
    with trainer(tmp_path, debug=Debug(poison=True, delay_s=1e-4)) as running:
        assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]  # if the process were killed now
        losses = running.run(12)
    assert losses[-1] < losses[0]
    assert (tmp_path / "mine.txt").read_text() == "kept" and len(list(tmp_path.iterdir())) == 1


def test_a_schedule_on_nvme_without_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="--nvme FOLDER"):
        trainer(None)
    with pytest.raises(InputError, match="give a folder on a drive"):
        require_drive(on_nvme(), None)
    with pytest.raises(InputError, match="there is no folder"):
        require_drive(on_nvme(), tmp_path / "nowhere")
    with pytest.raises(InputError, match="cannot write /proc"):  # before memory is allocated, as of what is saved
        require_drive(on_nvme(), Path("/proc"))
    with pytest.raises(DriveError, match="cannot keep buffers in"):
        Drive(tmp_path / "nowhere")


def test_a_folder_without_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 10})())
    with pytest.raises(Refused, match="are free in"):
        require_drive(on_nvme(), tmp_path)
