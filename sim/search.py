"""The search of the planner: over the knobs of `streamed`, and every exact policy beside it.

A candidate is a policy with knobs and a split of the step into micro-batches. It is built; dropped if it does not fit;
dropped if a bound of it (area, then cycle ratio: the limit of the longest-path engine) already exceeds the best period
known; otherwise simulated. Where there are few placements, all of them are candidates (`sim.few_placements`). Elsewhere
the first candidates are a coarse grid and what the bound over all placements suggests, and from the best of these the
search goes on: one knob at a time, in the end several together, until no change helps or the effort is spent. If that
ends far above the bound, it goes on from the best of other splits as well.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

from schedules import policies
from schedules.errors import InputError, Refused
from schedules.model import ModelSpec
from schedules.schedule import Knob, Schedule
from schedules.verify import verify
from schedules.workload import RECOMPUTED, MemoryBudget, Workload
from sim import few_placements
from sim.candidate import OURS, Candidate, Case, Judge, judge
from sim.findings import Findings, Progress
from sim.machine import HardwareProfile
from sim.placement_bound import PlacementBound
from sim.prediction import Prediction
from sim.refine import fewer_micro_batches, refine, send_away, shake
from sim.room import orders, state_of_block, ways_to_part
from sim.splits import NEARLY_LEAST, Bounded, by_bound, worth_searching

EXHAUSTIVE = 2700  # placements of all splits and modes together; no more are all tried
SHALLOW = 8  # blocks; of a deeper model each takes too long for that
FAR_OFF = 0.1  # a best schedule that is further above the least bound, by this fraction, may be in a wrong place
WORTH_A_LOOK = 1.0  # in the likeliest mode of recompute a split is tried if its bound is below this, of the best period
WORTH_A_LOOK_TOO = 0.97  # the same in the other modes
ASIDE = 3  # one in so many parts of the remaining effort is kept for the less likely modes
LAST = 6  # one in so many parts of the effort is kept for a last refinement
MORE = 2  # at the end there is so many times as much effort again, to improve what is best by then
FAR_MORE = 4  # so many times as much to improve others where the best is then FAR_OFF
ELSEWHERE = 3  # others, each the best of its split and mode of recompute
MORE_STRIDE = 4  # values by which a knob is changed at first in that
LONG = 16  # micro-batches of a step of which a part is planned first
PART = 4  # that part has a PARTth of the micro-batches
STARTS = 3  # of the part's splits, the best so many are tried for the whole step
GRID = 4  # values of residency on the coarse grid
# Knobs that a candidate starts from, before it is refined:
MANY_SLABS = 16  # slabs, where blocks are updated late
FEW_PARTS = 4  # parts of a state that passes through the device
PASSING = (1 / 3, 1 / 2, 3 / 4, 1)  # of the blocks whose states pass in the bound's placement
EARLY = 4  # slots for weights, where states come by the same link
TIGHT = ((1, 2), (2, 1), (1, 1))  # slots for weights, and for gradients, where no more have room
BESIDE_HELD = 3  # the same where those blocks' weights are held
LATE_OF_FEWER = 3  # of the blocks left to the CPU one in so many is updated late
SLACK = 4  # visits that activations may take to leave or to come
ALL = 1e-6  # if no more than this fraction of activations is not kept, all are
SHORT_OF_ROOM = ("pointwise", "none", "mlp")  # the modes of recompute, likeliest first, where not all can be kept
# Where a drive is the limit, memory that buffers and blocks' inputs do not take holds state that then stays off it:
FEW_BUFFERS: tuple[dict[str, Knob], ...] = (
    {"slabs": 2},
    {"slabs": 1, "grad_slots": 1, "nvme_slots": 3},
    {"slabs": 1, "grad_slots": 1, "nvme_slots": 3, "slots": 1},
)
# how many blocks run forward again from one kept input, by whether that is nested
SHARED_INPUTS: dict[bool, tuple[int, ...]] = {False: (1, 2, 4), True: (4, 8)}
THRIFTIEST = {False: 6, True: 3}  # of these, so many are tried: those that leave least on the drive
MANY = 100  # candidates judged at once where few are expected to beat the best
LATE = (24, 8)  # one block in so many is updated late; or none is
EFFORT = 90  # simulations at most, each of a candidate of one micro-batch; one that is only bounded counts half

_NO_STEP = Workload(micro_batch_size=1, seq_len=1)


class NothingFits(Refused):
    """No schedule fits; the message says what is lacking."""


def _words(workload: Workload) -> str:
    clip = "no clipping" if workload.grad_clip is None else f"clipped to {workload.grad_clip:g}"
    size = f"{workload.accumulation} x {workload.micro_batch_size} sequences of {workload.seq_len:,} tokens"
    multiplied = "" if workload.matmul is None else f", {workload.matmul} products"
    return f"{size}, {workload.precision}{multiplied}, {workload.optimizer}, {clip}"


def _likeliest_first(bounded: list[Bounded]) -> list[str]:
    """The modes of recompute, in the order in which they are searched.

    If even the bound's placement cannot keep all activations, what costs next to nothing goes first: to compute
    pointwise outputs again.
    """
    plain = [found for found, workload in bounded if workload.recompute == "none"]
    best = min(plain, key=lambda found: found.period_ns, default=None)
    ample = best is not None and best.placed["activations kept"] > 1.0 - ALL
    return sorted({workload.recompute for _, workload in bounded}, key=(RECOMPUTED if ample else SHORT_OF_ROOM).index)


class Search:
    """Where to look, in which order, and for how long; what comes of it is in `found`.

    `effort` is how many candidates may be simulated, counted as if each were of a single micro-batch; then MORE times
    as many again to improve the best of them.
    """

    def __init__(
        self,
        model: ModelSpec,
        profile: HardwareProfile,
        budget: MemoryBudget,
        judge: Judge,
        progress: Progress | None = None,
        effort: int = EFFORT,
    ) -> None:
        ops = len(policies.build_without_waits(OURS, model, _NO_STEP, budget).ops)
        self.effort = effort * ops
        self.found = Findings(model, profile, budget, judge, self.effort, progress)
        self.thorough = effort >= EFFORT  # few placements are all tried
        self.start = Candidate(policy=OURS, workload=_NO_STEP)
        self.ways = 1  # splits of the step, times modes of recompute
        # how many layers must live on the device, and may, beside the buffers of `start`
        self.least_resident = self.most_resident = 0
        self.start_fits = False  # whether `start` has been found, and has room
        self.one_block = False  # whether weights and gradients may come one block at a time

    def all_of(self, steps: list[Workload], bounded: list[Bounded]) -> None:
        """Search the splits that could fit, `bounded`, and at the end every named policy."""
        some, begun_ns = worth_searching(bounded), self.found.cost_ns  # of the schedules that the search began with
        if max((workload.accumulation for _, workload in some), default=1) >= LONG:
            self.a_part_first([workload for _, workload in some])
        aside = self.found.effort // LAST
        self.found.effort -= aside
        self.splits(some)
        if self.found.best is None:
            self.thriftiest([workload for _, workload in bounded])
        self.found.effort = max(self.found.effort, 0) + aside
        self.refine(hold=True, stride=1)  # what is best by now may have been found as the effort ran out
        if bounded:
            self.improve(bounded)
            fewer_micro_batches(self.found, [workload for _, workload in bounded], most_ns=begun_ns)
        self.found.share = 0.9
        of_best = self.found.workload or steps[0]
        of_bound = bounded[0][1] if bounded else of_best
        modes = ["none"] if self.found.at is not None else list(self.found.model.recompute_modes)
        if of_bound.accumulation != of_best.accumulation:  # ours need more micro-batches than others might
            modes.append(self.found.model.recompute_modes[-1])
        self.named(of_best, replace(of_best, recompute="none"), *(replace(of_bound, recompute=mode) for mode in modes))

    def begin_with(self, schedule: Schedule, steps: list[Workload]) -> None:
        """Try a schedule as it is, and what its policy makes of its knobs here.

        Raises InputError where it is of another model or step, or its knobs are none; ScheduleError if it is not safe.
        """
        if schedule.model != self.found.model:
            other = schedule.model.name
            raise InputError(f"cannot begin with a schedule of {other}: the plan is for {self.found.model.name}")
        if schedule.workload.trains != "weights":
            trains = schedule.workload.trains
            raise InputError(f"cannot begin with a schedule that trains {trains}: a plan trains all weights")
        if schedule.workload not in steps:
            raise InputError(f"cannot begin with a schedule of another step: {_words(schedule.workload)}")
        verify(schedule)
        if schedule.policy == OURS:  # which is searched from
            try:
                policies.build_without_waits(
                    OURS, schedule.model, schedule.workload, self.found.budget, **schedule.knobs
                )
            except policies.PolicyError as error:
                raise InputError(f"cannot begin with a schedule of knobs that its policy refuses: {error}") from error
        as_it_is = Candidate(
            policy=schedule.policy, workload=schedule.workload, knobs=tuple(sorted(schedule.knobs.items()))
        )
        case = Case(self.found.model, self.found.profile, self.found.budget)
        self.found.add(as_it_is, judge(case, as_it_is, self.found.cost_ns, schedule))
        if schedule.policy == OURS:
            self.found.evaluate(as_it_is.with_knobs({}))

    def splits(self, bounded: list[Bounded]) -> None:
        """Search these splits with our own knobs; if none fits, once more with weights coming one block at a time."""
        self.modes(bounded)
        if not self._has_begun(bounded):
            self.one_block = True
            self.modes(bounded)

    def thriftiest(self, steps: list[Workload]) -> None:
        """Try what takes the least memory, the smallest micro-batches first, until something fits."""
        for workload in reversed(steps):
            for least in self.found.room.thriftiest(workload):
                self.found.evaluate(*dict.fromkeys((least, *self.found.room.filled(least))))
            if self.found.best is not None:
                return

    def modes(self, bounded: list[Bounded]) -> None:
        """Search all modes of recompute, the likeliest first."""
        modes = _likeliest_first(bounded)
        self.ways = len(bounded)
        for place, mode in enumerate(modes):
            aside = self.found.effort // ASIDE if mode != modes[-1] else 0
            self.found.effort -= aside
            worth_it = self.found.effort > 0 or not self._has_begun(bounded) or self.few(bounded[0][1])
            if self.found.at is not None:
                self.as_before(mode)
            if worth_it:
                self.in_mode(place, [(limit, workload) for limit, workload in bounded if workload.recompute == mode])
            self.found.effort = max(self.found.effort, 0) + aside

    def _has_begun(self, bounded: list[Bounded]) -> bool:
        """Whether a candidate of ours fits and, unless all placements are tried, `start` does.

        If `start` does not, what fits was only found from a schedule to begin with, or from a part of the step.
        """
        return self.found.at is not None and (self.start_fits or not bounded or self.few(bounded[0][1]))

    def in_mode(self, place: int, some: list[Bounded]) -> None:
        """Search the splits of one mode of recompute, which is the `place`th to be searched.

        Once the best of the likeliest mode is known, the bound rules out most splits of the others.
        """
        for number, (limit, workload) in enumerate(some):
            self.found.share = (place + number / (2 * len(some))) / len(RECOMPUTED)
            hope = WORTH_A_LOOK_TOO if place > 0 and not self.few(workload) else WORTH_A_LOOK
            if limit.period_ns < hope * self.found.cost_ns:
                if self.start_fits and self.found.at is not None and self.found.at.value("nvme"):
                    self.as_best(workload)
                else:
                    self.look(workload, whole=self.found.best is None or not self.start_fits)
                    self.as_placed(workload, limit)
                if not number:
                    self.refine(hold=False)  # fewer of the other splits are worth a look then
        if self.found.at is None or self.found.at.workload not in [workload for _, workload in some]:
            return
        self.refine(hold=False)
        at = self.found.at
        for _, workload in some:  # the same with micro-batches of twice or half the size
            if at.workload.accumulation in (2 * workload.accumulation, workload.accumulation / 2):
                self.found.evaluate(replace(at, workload=workload))
        for limit, workload in some:
            if self.found.effort > 0 and limit.period_ns < WORTH_A_LOOK_TOO * self.found.cost_ns:
                self.hold(workload)
        self.refine(hold=True)

    def a_part_first(self, steps: list[Workload]) -> None:
        """Search a step of a PARTth of the micro-batches, in a PARTth of the time, and try its best knobs here."""
        parts = [replace(w, accumulation=w.accumulation // PART) for w in steps if w.accumulation % PART == 0]
        progress, share = self.found.progress, 0.1

        def told(best: Prediction | None, done: float, note: str) -> None:
            if progress is not None:
                progress(best, share * done, f"1 / {PART} of the step: {note}")

        of_part = Search(self.found.model, self.found.profile, self.found.budget, self.found.judge, told)
        of_part.found.effort = self.found.effort // 2
        bounded, _ = by_bound(self.found.model, self.found.profile, self.found.budget, parts)
        of_part.splits(worth_searching(bounded))
        self.found.effort -= self.found.effort // 2 - of_part.found.effort
        best: dict[Workload, Candidate] = {}
        for candidate, tried in sorted(of_part.found.tried.items(), key=lambda item: item[1].cost_ns):
            if tried.period_ns is not None:
                best.setdefault(candidate.workload, candidate)
        for workload, candidate in list(best.items())[:STARTS]:
            whole = replace(candidate, workload=replace(workload, accumulation=workload.accumulation * PART))
            self.found.evaluate(*(whole.with_knobs({"order": order}) for order in ("layers", "microbatches")))

    def as_before(self, mode: str) -> None:
        """Try the best schedule in another mode of recompute, and activations of fewer and of more blocks offloaded."""
        at = self.found.at
        assert at is not None
        other = replace(at, workload=replace(at.workload, recompute=mode))
        away = at.count("offload")
        blocks = self.found.model.num_hidden_layers
        offloads = {away, away // 2, away * 3 // 4, min(away * 4 // 3, blocks), min(away + blocks // 4, blocks)}
        self.found.evaluate(*(other.with_knobs({"offload": offload}) for offload in sorted(offloads)))

    def as_best(self, workload: Workload) -> None:
        """Try the best schedule, which waits for a drive, with micro-batches of another size, and with as many states
        on the device as these leave room for.

        Their size makes little difference to a drive, so no more candidates are worth the time.
        """
        assert self.found.at is not None
        same = replace(self.found.at, workload=workload)
        self.found.evaluate(same, same.with_knobs({"stay": self.found.room.stays(same)}))

    def few(self, workload: Workload) -> bool:
        """Whether all placements of this split are tried; not where each would take long to simulate."""
        every = few_placements.placements(self.found.model, workload, begun=self.start)
        placements = math.prod(map(len, every.values()))
        quick = workload.accumulation < LONG and self.found.model.num_hidden_layers <= SHALLOW
        return self.thorough and quick and placements * self.ways <= EXHAUSTIVE

    def look(self, workload: Workload, *, whole: bool) -> None:
        """Try one split of the step: all candidates if they are few, else a coarse grid, or only its corners."""
        if self.few(workload):
            few_placements.try_all(self.found, workload, begun=self.start, one_block=self.one_block)
            return
        start, blocks = Candidate(policy=OURS, workload=workload), self.found.model.num_hidden_layers
        if whole:
            self.start = self.found.room.begin(start, one_block=self.one_block)
            self.least_resident, self.most_resident = self.found.room.residents(self.start)
            # if not, these micro-batches have no room, and smaller ones may
            self.start_fits = self.least_resident <= self.most_resident
        start = replace(self.start, workload=workload)
        least, most = self.least_resident, max(self.least_resident, self.most_resident)
        # smaller micro-batches leave room for more: all but the head
        residents = [most, blocks + 1]
        if blocks <= SHALLOW:  # where it takes no time to know, what these have room for
            residents.append(self.found.room.most_residents(start))
        if whole:
            residents = [least + round((most - least) * part / (GRID - 1)) for part in range(GRID)]
        away = {"offload": blocks // 2 if whole else blocks // 4, "slack": SLACK}
        chosen = itertools.product(
            orders(workload), dict.fromkeys(residents), ({}, away), (0, blocks // 4) if whole else (0,)
        )
        # and where even buffers are tight, all that can leave the device
        all_away = [(order, least, {"offload": blocks, "slack": 1}, 0) for order in orders(workload)]
        self.found.evaluate(
            *(
                start.with_knobs({"order": order, "resident": resident, "defer": defer, **offload})
                for order, resident, offload, defer in (*chosen, *all_away)
                if self._hopeful(workload, resident, order)
            )
        )

    def as_placed(self, workload: Workload, bound: PlacementBound) -> None:
        """Try what the bound's placement would be in whole blocks; of several micro-batches, both orders at once."""
        if self.most_resident < self.least_resident:
            return  # not even what must be on the device has room there
        blocks, placed = self.found.model.num_hidden_layers, bound.placed
        start = replace(self.start, workload=workload)
        on_device = round(placed.get("state on device", 0.0) * len(self.found.model.layers))
        resident = min(self.most_resident, max(self.least_resident, on_device))
        late: dict[str, Knob] = {"defer": blocks * 3 // 8, "slabs": MANY_SLABS}
        sent = placed.get("activations on host", 0.0) + placed.get("activations on NVMe", 0.0)
        away: dict[str, Knob] = {"offload": math.floor(sent * blocks)}
        passing = round(placed.get("state through device", 0.0) * blocks)
        through: dict[str, Knob] = {"through": passing}
        # fractions need no buffers to pass through: less of what needs them until there is room
        for knobs in ({**away, **through, "slack": SLACK}, {**away, "slack": SLACK}, away):
            (tried,) = self.found.evaluate(start.with_knobs({"resident": resident, **late, **knobs}))
            if not tried.over:
                break
        on_device = round(placed.get("state on device", 0.0) * blocks * start.count("parts"))
        self.stay(start, on_device, late)
        if not start.value("nvme"):
            self._stay_and_pass(start, passing)
        # most blocks are then loaded twice for every micro-batch
        if len(orders(workload)) > 1 and self._hopeful(workload, 0, "microbatches"):
            both = {"resident": resident, **late, "singly": blocks * 7 // 8, "slots": 4, "slabs": 32}
            self.found.evaluate(*(start.with_knobs({**both, "hold": hold}) for hold in (0, blocks // 6)))

    def stay(self, start: Candidate, most: int, late: dict[str, Knob]) -> None:
        """Try one split with parts of blocks' states on the device, while these blocks' weights and gradients stream:
        `most` parts if they have room there, and as many as have room.

        Where a drive holds what has no room elsewhere, only as many as have room are tried: each part spares the drive
        a read and a write.
        """
        if not start.value("nvme"):
            there = start.with_knobs({"resident": self.least_resident, **late})
            room = self.found.room.stays(there) if most else 0
            self.found.evaluate(*(there.with_knobs({"stay": n}) for n in sorted({min(most, room), room} - {0})))
            return
        thrifty: list[Candidate] = []
        for nested, inputs in SHARED_INPUTS.items():
            ways = itertools.product(sorted({0, 1, self.least_resident}), inputs, FEW_BUFFERS)
            some = [
                self._staying(start.with_knobs({"resident": resident, "every": every, "nested": nested, **few}))
                for resident, every, few in ways
            ]
            thrifty += sorted(some, key=self.found.room.on_the_drive)[: THRIFTIEST[nested]]
        usual = [self._staying(start.with_knobs({"resident": self.least_resident, **few})) for few in FEW_BUFFERS]
        effort, blocks = self.found.effort, self.found.model.num_hidden_layers
        for there in dict.fromkeys((*usual, *thrifty)):
            self.found.evaluate(*(there.with_knobs({"defer": n}) for n in (0, *(blocks // of for of in LATE))))
        self.found.effort = effort  # there are few: what follows may still take its own

    def _stay_and_pass(self, start: Candidate, passing: int) -> None:
        """Try as many states on the device as have room beside those of `passing` blocks, or fewer, that pass.

        States that pass come in parts: their buffers take room from what stays, and weights need the same link, unless
        those of the blocks whose states pass are held.
        """
        some, fit = sorted({math.ceil(passing * share) for share in PASSING} - {0}), False
        parts = min(FEW_PARTS, ways_to_part(self.found.model, start.workload)[-1])
        in_parts = start.with_knobs({"parts": parts, "resident": self.least_resident, "slabs": MANY_SLABS * parts})
        for through in some:
            for held, slots in ((0, EARLY), (through, BESIDE_HELD), (through, 2)):
                there = self._staying(in_parts.with_knobs({"through": through, "hold": held, "slots": slots}))
                (tried,) = self.found.evaluate(self._some_late(there))
                fit = fit or not tried.over
                if held and not tried.over:
                    break
        if not fit:
            self._pass_beside_few(start, some)

    def _pass_beside_few(self, start: Candidate, passing: list[int]) -> None:
        """Try states of so many blocks that pass while weights or gradients are there one block at a time.

        Few blocks of a large mixture, say, have room at once.
        """
        blocks, parts = self.found.model.num_hidden_layers, ways_to_part(self.found.model, start.workload)[-1]
        in_parts = start.with_knobs({"parts": parts, "slabs": MANY_SLABS * parts, "inputs": blocks})
        residents = range(min(self.least_resident, 1) + 1)
        for slots, gradients in TIGHT:
            tight = in_parts.with_knobs({"slots": slots, "grad_slots": gradients})
            there = [tight.with_knobs({"through": n, "resident": of}) for n in reversed(passing) for of in residents]
            if not all(tried.over for tried in self.found.evaluate(*map(self._some_late, there))):
                break

    def _some_late(self, candidate: Candidate) -> Candidate:
        """With some of the blocks that are left to the CPU updated late."""
        on_device = candidate.count("through") + candidate.count("stay") // candidate.count("parts")
        by_cpu = self.found.model.num_hidden_layers - on_device
        return candidate.with_knobs({"defer": by_cpu // LATE_OF_FEWER})

    def _staying(self, candidate: Candidate) -> Candidate:
        """The candidate with as many parts of blocks' states on the device as have room there."""
        return candidate.with_knobs({"stay": self.found.room.stays(candidate)})

    def _hopeful(self, workload: Workload, resident: int, order: str) -> bool:
        """Whether so many resident layers could fit, and the others' weights arrive sooner than the best period.

        A sum of bytes, before any schedule is built.
        """
        layers, model = len(self.found.model.layers), self.found.model
        weights = model.params(model.largest_block) * workload.bytes.weight
        if (resident - 2) * (weights + state_of_block(model, workload)) > self.found.budget.device_bytes:
            return False
        loads = (layers - resident) * (2 * workload.accumulation if order == "microbatches" else 1)
        return loads * weights / self.found.profile.links.h2d.bandwidth.value * 1e9 < self.found.cost_ns

    def hold(self, workload: Workload, *residents: int) -> None:
        """Try one split with as many blocks' weights held on the device as have room beside each number of resident
        layers; beside the fewest if left out.
        """
        for resident, order in itertools.product(residents or (self.least_resident,), orders(workload)):
            start = replace(self.start, workload=workload).with_knobs({"order": order, "resident": resident})
            self.found.evaluate(*(start.with_knobs({"hold": hold}) for hold in self.found.room.holds(start)))

    def refine(self, *, hold: bool, stride: int | None = None) -> None:
        """From the best candidate on, see `sim.refine`."""
        refine(self.found, begun=self.start, hold=hold, stride=stride)

    def improve(self, bounded: list[Bounded]) -> None:
        """Improve the best candidate by larger changes of one knob, then by several knobs together, unless it is near
        the bound; and where it stays far from it, the best of other splits.

        Where it is far from the bound, each split is first tried with as many blocks' weights held as have room:
        changing one knob at a time does not lead there from a candidate with many resident layers.
        """
        least_ns = min(found.period_ns for found, _ in bounded)
        if self.found.cost_ns > least_ns * (1.0 + FAR_OFF) and self.start_fits and self.effort:
            effort = self.found.effort
            # of few blocks, two more that are resident are many: one knob at a time does not get that far
            more = 3 if self.found.model.num_hidden_layers <= SHALLOW else 1
            for limit, workload in bounded:
                if limit.period_ns < self.found.cost_ns:
                    self.hold(workload, *range(self.least_resident, self.least_resident + more))
            self.found.effort = effort  # there are few
        if self.found.cost_ns > least_ns * (1.0 + NEARLY_LEAST):
            self.found.effort = MORE * self.effort
            self.refine(hold=True, stride=MORE_STRIDE)
            self.together()
        if self.found.cost_ns > least_ns * (1.0 + FAR_OFF) and self.effort:
            some = worth_searching(bounded)
            self.elsewhere([workload for found, workload in some if found.period_ns < self.found.cost_ns])

    def together(self) -> None:
        """Change several knobs of the best candidate together."""
        shake(self.found, begun=self.start)
        self.found.effort = max(self.found.effort, self.effort)
        send_away(self.found)

    def elsewhere(self, steps: list[Workload]) -> None:
        """Improve the best candidates of the other `steps`, too: a long step leaves time for few, all of one kind.

        Not those that wait for a drive, to which the size of micro-batches makes little difference.
        """
        at = self.found.at
        if at is None or at.value("nvme"):
            return
        others = [workload for workload in steps if workload != at.workload]
        small: dict[str, Knob] = {"slack": 1, "slots": min(at.count("slots"), 2), "offload": 0}
        for workload in others:
            there = replace(at, workload=workload)
            self.found.evaluate(there, there.with_knobs(small))
        best: dict[Workload, Candidate] = {}
        for candidate, tried in sorted(self.found.tried.items(), key=lambda item: item[1].cost_ns):
            if tried.period_ns is not None and candidate.policy == OURS and candidate.workload in others:
                best.setdefault(candidate.workload, candidate)
        for start in list(best.values())[:ELSEWHERE]:
            self.found.effort = FAR_MORE * self.effort // ELSEWHERE
            refine(self.found, begun=self.start, hold=True, stride=MORE_STRIDE, at=start)
        if self.found.at != at:
            self.found.effort = MORE * self.effort
            self.together()

    def named(self, *workloads: Workload) -> None:
        """Every exact policy with the knobs it comes with."""
        known = itertools.product(workloads, policies.comparable())
        # few of them are a new best, so that nothing is lost by judging all against the one so far
        self.found.evaluate(*(Candidate(policy=name, workload=workload) for workload, name in known), at_once=MANY)
