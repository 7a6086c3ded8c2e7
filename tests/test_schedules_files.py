"""Where results cannot be written is told before the work, in one way, and leaves nothing behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from schedules.errors import InputError
from schedules.files import require_file, require_folder, whole, write_text, writing


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("nowhere/x.json", "cannot write {}: no such folder"),
        ("folder", "cannot write {}: it is a folder"),
        ("file/x.json", "cannot write {}: a part of the path is a file"),
    ],
)
def test_a_file_that_cannot_be_written(tmp_path: Path, path: str, told: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("kept")
    with pytest.raises(InputError) as error:
        require_file(tmp_path / path)
    assert str(error.value) == told.format(tmp_path / path)
    require_file(tmp_path / "file")
    require_file(tmp_path / "new")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]
    assert (tmp_path / "file").read_text() == "kept"


def test_links_in_a_circle_lead_to_no_file(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    for write in (require_file, lambda path: write_text(path, "text")):
        with pytest.raises(InputError, match=r"cannot write .*a: Too many levels of symbolic links"):
            write(tmp_path / "a")
    (tmp_path / "c").symlink_to(tmp_path / "not yet there")
    require_file(tmp_path / "c")


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    for path, told in (("file", "it is a file"), ("file/a/b", "a part of the path is a file")):
        with pytest.raises(InputError, match=f"cannot write .*{path}: {told}"):
            require_folder(tmp_path / path)
    require_folder(tmp_path / "a" / "b")
    require_folder(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_write_that_fails_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="folder: it is a folder"):
        write_text(tmp_path / "folder", "text")
    with pytest.raises(InputError, match="x: no such folder"), writing(tmp_path / "no" / "x"):
        (tmp_path / "no" / "x.partial").write_text("text")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_two_may_write_one_file_at_once(tmp_path: Path) -> None:
    """Two sweeps in one folder, say: each file is one's or the other's, and whole."""
    file = tmp_path / "file"
    with whole(file) as partial:
        partial.write_text("half ")
        write_text(file, "of another")
        assert file.read_text() == "of another"
        partial.write_text("half and half")
    assert file.read_text() == "half and half"
    assert list(tmp_path.iterdir()) == [file]


def test_a_link_stays_one_and_what_is_no_file_is_not_replaced_by_one(tmp_path: Path) -> None:
    """Root may rename a file over /dev/null, and then nobody has one any more."""
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    require_file(tmp_path / "link")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "new"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        require_file(tmp_path / "pipe")
        write_text(tmp_path / "pipe", "text")
        assert os.read(reader, 100) == b"text" and (tmp_path / "pipe").is_fifo()
    finally:
        os.close(reader)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link", "pipe"]
