"""A folder that one training saves to, and no other at the same time: each would remove the other's checkpoints."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatrain.checkpoint import CheckpointError


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """The folder is this process' until the block ends, or the process, however that may end.

    Raises CheckpointError where it is another's.
    """
    opened = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"another training is saving to {folder}: wait for its end, or save to another folder"
            ) from None
        except OSError:
            pass  # a drive without locks, as there are over networks
        yield
    finally:
        os.close(opened)
