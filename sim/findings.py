"""What a search has tried so far, the best of it, and how much more may be tried."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from schedules.model import ModelSpec
from schedules.op import Tier
from schedules.workload import MemoryBudget, Workload
from sim.candidate import OURS, ROUND, Candidate, Judge, Tried, Verdict
from sim.cost import TooLong, Unmeasured
from sim.machine import HardwareProfile
from sim.prediction import Prediction
from sim.room import Room

Progress = Callable[["Prediction | None", float, str], None]  # best so far, share done, how many are tried


@dataclass
class Findings:
    """What became of candidates: each is judged once, against the best of those before it.

    `effort` is how many ops may still be looked at. Whoever searches has to heed it; here it may become negative.
    """

    model: ModelSpec
    profile: HardwareProfile
    budget: MemoryBudget
    judge: Judge
    effort: int
    progress: Progress | None = None
    share: float = 0.0  # of the search that is done, for `progress`
    best: Prediction | None = None
    chosen: Tried | None = None  # the candidate that it is of
    at: Candidate | None = None  # the best with our own knobs
    tried: dict[Candidate, Tried] = field(default_factory=dict)
    moved: dict[Candidate, Candidate] = field(default_factory=dict)  # to a drive, or off it, as much as must be
    shortest: tuple[int, Tier] | None = None  # bytes that the closest candidate lacked, and where
    unmeasured: Unmeasured | None = None  # the first op that a candidate needs and the profile has no time for
    too_long: TooLong | None = None  # the first op that takes too long, of a candidate that has room
    room: Room = field(init=False)

    def __post_init__(self) -> None:
        self.room = Room(self.model, self.profile, self.budget)

    @property
    def cost_ns(self) -> float:
        """Of the best schedule so far."""
        return math.inf if self.chosen is None else self.chosen.cost_ns

    @property
    def workload(self) -> Workload | None:
        """Of the best schedule so far."""
        return None if self.best is None else self.best.schedule.workload

    def evaluate(self, *candidates: Candidate, at_once: int = ROUND) -> list[Tried]:
        """What becomes of candidates. Ours get as much on a drive as must be there, see `placed`.

        A candidate that cannot beat the best of the rounds before is not simulated.
        """
        for asked in candidates:
            if _on_a_drive(asked) and asked not in self.moved:
                self.moved[asked] = self.room.rebalanced(asked)
        some = dict.fromkeys(map(self.placed, candidates))
        new = [candidate for candidate in some if candidate not in self.tried]
        for first in range(0, len(new), at_once):
            self._judge_round(new[first : first + at_once])
        return [self.tried[self.placed(asked)] for asked in candidates]

    def placed(self, asked: Candidate) -> Candidate:
        """A candidate as it is judged."""
        there = self.moved.get(asked, asked)
        return self.moved.get(there, there)

    def _judge_round(self, candidates: list[Candidate]) -> None:
        """Add what becomes of candidates, all measured against the best before them.

        One that turns out to lack room on the host is judged again with a drive, in place of what it was: to know
        before takes a schedule more for each, and most have that room.
        """
        best_ns, again = self.cost_ns, list[Candidate]()
        for candidate, verdict in zip(candidates, self.judge(candidates, best_ns), strict=True):
            if verdict.tried.lacking == Tier.HOST and candidate.policy == OURS and not _on_a_drive(candidate):
                self.moved[candidate] = moved = self.room.rebalanced(candidate)
                if moved != candidate:
                    again.append(moved)
                    continue
            self.add(candidate, verdict)
        new = [candidate for candidate in dict.fromkeys(again) if candidate not in self.tried]
        for candidate, verdict in zip(new, self.judge(new, best_ns), strict=True):
            self.add(candidate, verdict)

    def prefer(self, candidates: Sequence[Candidate], most_ns: float) -> bool:
        """Take the cheapest of these for the best, even if it costs more than the best so far, but less than `most_ns`.

        Returns whether it was taken.
        """
        judged = zip(candidates, self.judge(list(candidates), most_ns), strict=True)
        (candidate, verdict), *others = sorted(judged, key=lambda one: one[1].tried.cost_ns)
        for one in ((candidate, verdict), *others):
            self._note(*one)
        if verdict.prediction is not None:
            self._take(candidate, verdict.prediction, verdict.tried)
        return verdict.prediction is not None

    def add(self, candidate: Candidate, verdict: Verdict) -> None:
        """What became of one more candidate."""
        if verdict.prediction is not None and verdict.tried.cost_ns < self.cost_ns:
            self._take(candidate, verdict.prediction, verdict.tried)
        self._note(candidate, verdict)

    def _take(self, candidate: Candidate, prediction: Prediction, tried: Tried) -> None:
        self.best, self.chosen = prediction, tried
        self.at = candidate if candidate.policy == OURS else self.at

    def _note(self, candidate: Candidate, verdict: Verdict) -> None:
        self.tried[candidate] = tried = verdict.tried
        self.effort -= verdict.effort
        self.unmeasured = self.unmeasured or verdict.unmeasured
        self.too_long = self.too_long or verdict.too_long
        if verdict.tried.lacking is not None and (self.shortest is None or tried.over < self.shortest[0]):
            self.shortest = tried.over, verdict.tried.lacking
        if self.progress is not None:
            self.progress(self.best, self.share, f"{len(self.tried)} tried")


def promise(found: Findings) -> tuple[float, int]:
    """What tells the better of two searches, which has less: of its best schedule, or of what that lacks to be one."""
    return found.cost_ns, 0 if found.shortest is None else found.shortest[0]


def within(progress: Progress | None, before: float, part: float) -> Progress | None:
    """What tells the progress of a search that is so large a part of another, of which so much was done before."""
    if progress is None:
        return None
    return lambda best, share, note: progress(best, before + share * part, note)


def _on_a_drive(candidate: Candidate) -> bool:
    """Whether some of a candidate of ours is: how much must be there depends on its other knobs."""
    return candidate.policy == OURS and bool(candidate.value("nvme") or candidate.value("nvme_offload"))
