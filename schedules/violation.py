"""One thing that is wrong with a schedule, as the verifier tells it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Violation:
    """The rule, what happens in words, what to add or change, and the op where it shows (`on`: the other one).

    It is about a buffer, or where there is none about a `subject`: a tensor, or a micro-batch.
    """

    rule: str
    message: str
    fix: str
    op: str
    on: str = ""
    buffer: str = ""
    subject: str = ""

    @property
    def about(self) -> str:
        """The buffer, else the subject, else nothing."""
        return self.buffer or self.subject

    def __str__(self) -> str:
        return f"{self.rule}{f' on {self.about}' if self.about else ''}: {self.message}\n{self.fix}"


def some(names: Iterable[str]) -> str:
    """A few of them, and how many more there are: a norm reads a buffer per layer."""
    told = list(names)
    return ", ".join(told[:3]) + (f" and {len(told) - 3} more" if len(told) > 3 else "")
