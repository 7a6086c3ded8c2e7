"""Files of results: written whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from schedules.errors import InputError


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to; takes its name when the block ends well, vanishes when it does not.

    Makes the folder if there is none.

    Raises:
        InputError: the folder cannot be made or written to.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        partial.replace(path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        if partial.is_file():
            partial.unlink()


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8. Raises InputError when that cannot be done."""
    with whole(path) as partial:
        partial.write_text(text, encoding="utf-8")
