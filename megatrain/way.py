"""In which way ops are computed: kernels as torch has them or compiled, launched one by one or replayed as graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatrain.backend import Work
from megatrain.graphs import replayed
from megatrain.pointwise import PLAIN, Pointwise, compiled
from schedules.errors import InputError
from schedules.schedule import Schedule
from sim.machine import HardwareProfile


@dataclass(frozen=True, kw_only=True)
class Way:
    """`fused` compiles what multiplies no matrices, `graphs` replays blocks as CUDA graphs."""

    fused: bool = False
    graphs: bool = False

    def __str__(self) -> str:
        return " ".join(name for name in ("fused", "graphs") if getattr(self, name)) or "plain"

    @property
    def warm_up(self) -> int:
        """The steps before those that count: in the first kernels are compiled, in the second graphs are captured."""
        return 2 if self.graphs else 1

    @property
    def pointwise(self) -> Pointwise:
        """For Trainer."""
        return compiled() if self.fused else PLAIN

    def prepare(self, schedule: Schedule, works: Sequence[Work]) -> Sequence[Work]:
        """For Trainer."""
        return replayed(schedule, works) if self.graphs else works

    def require(self, *, on_gpu: bool) -> None:
        """Raises InputError unless ops can be computed so here."""
        if self.graphs and not on_gpu:
            raise InputError("CUDA graphs need a GPU; leave them out")


PLAINLY = Way()


def measured_in(profile: HardwareProfile) -> str | None:
    """The way of the times in a profile, by name; None for a datasheet's, which has none."""
    if profile.mode != "measured":
        return None
    return profile.way or str(PLAINLY)  # which an older file does not say
