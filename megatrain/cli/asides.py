"""What commands say on stderr beside their results: that nobody can hear it any longer ends none of them."""

from __future__ import annotations

import io
from contextlib import suppress


class Asides(io.TextIOWrapper):
    """A stream to say things on that raises nothing, neither for a reader who is gone nor for a full drive.

    A training of days would else end for a line of its progress, and Ctrl-C ends the `tee` that reads this first.
    """

    def write(self, text: str) -> int:
        with suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()
