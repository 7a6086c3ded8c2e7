"""Files, written whole or not at all, and where that cannot be, told so before the work."""

from __future__ import annotations

import errno
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from schedules.errors import InputError

_WHY = {
    errno.ENOENT: "no such folder",
    errno.ENOTDIR: "a part of the path is a file",
    errno.EEXIST: "it is a file",
    errno.EISDIR: "it is a folder",
    errno.EACCES: "no permission",
    errno.ENOSPC: "the drive is full",
}


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Tells what goes wrong while `path` is written as an InputError: "cannot write x/y.json: no such folder"."""
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot write {path}: {_WHY.get(error.errno or 0) or error.strerror or error}") from error


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to; takes its name when the block ends well, vanishes when it does not.

    Makes the folder if there is none. A link stays one; a device or a pipe, such as /dev/null, is written to as it is:
    root could rename a file over it.

    Raises:
        InputError: the folder cannot be made or written to.
    """
    if _takes_bytes(path):
        with writing(path):
            yield path
        return
    with writing(path):
        path = _end(path)
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")  # its own, where two write one file at once
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield partial
            partial.replace(path)
    finally:
        if partial.is_file():
            partial.unlink()


def sync(path: Path) -> None:
    """Wait until a file's bytes, or the names in a folder, are on their drive. Raises OSError if they cannot get there.

    A file that is written and closed may still be in memory alone, and only this tells that there was no room for it
    below the file system, or that the drive failed: `os.sync` tells of nothing.
    """
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8, ends of lines as they are. Raises InputError when that cannot be done."""
    with whole(path) as partial:
        partial.write_text(text, encoding="utf-8", newline="")  # Windows would write \n as \r\n


def require_file(path: Path) -> None:
    """Raises InputError unless a file can be written at `path`, in a folder that is there. Leaves nothing behind."""
    with writing(path):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "")
        if _takes_bytes(path):
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, "")
            return
        _try(_end(path).parent)


def require_folder(path: Path) -> None:
    """Raises InputError unless files can be written to the folder `path`, or it can be made. Leaves nothing behind."""
    there = path
    while not there.exists():
        there = there.parent
    with writing(path):
        if not there.is_dir():
            raise FileExistsError(errno.EEXIST if there == path else errno.ENOTDIR, "")
        _try(there)


def _takes_bytes(path: Path) -> bool:
    """Whether there is something at `path` that is neither a file nor a folder: a device or a pipe."""
    return path.exists() and not (path.is_file() or path.is_dir())


def _end(path: Path) -> Path:
    """What is written where `path` may be a link: what it leads to. Raises OSError for links in a circle."""
    if not path.is_symlink():
        return path
    with suppress(FileNotFoundError):
        path.stat()  # for which Path.resolve has another error
    return path.resolve()


def _try(folder: Path) -> None:
    """Permissions alone do not tell: a drive may be read-only, or no drive."""
    with tempfile.TemporaryFile(dir=folder):
        pass
