"""How fast any exact schedule could be on a machine: a linear program over all placements that fit its memory.

Each layer's state is placed in fractions. What is then left of a step is work that no order of ops avoids: the
area of every resource, all perfectly overlapped. The least of the largest area is a lower bound of the period
of every schedule of the language that trains all weights exactly, because each inequality below holds for all of them:

  compute       forward, loss and backward of every micro-batch; a recompute of what is neither kept nor sent away
  H2D           weights that the CPU updates, or that are not on the device between two steps, once; weights not there
                at the turn from forward to backward, once more; state that the device updates and does not hold, or
                holds and the CPU updates; activations that come back
  D2H           gradients whose weights the CPU updates; weights that the device updates and that are not on it between
                two steps, or at the turn; such state the other way; activations sent away
  host          the optimizer of what the CPU updates, one op at a time; memory traffic of it and of all copies. Blocks
                are none of that where the optimizer multiplies matrices
  device memory at the turn all kept activations of a micro-batch are there, with the weights that are not loaded
                again, the state that lives there, what the op at the turn touches, and the largest workspace; between
                two steps the weights that do not come for the forward, that state, the embedding's weights and the
                largest workspace
  host memory   state and weights that are neither on the device nor on NVMe, activations sent away and not on to NVMe
  slowdown      GPU work is slower while a copy runs: the time that each link is busy costs the GPU its share

A step begins when the embedding is first looked up in: that needs its update, which needs the last backward of all
blocks, so that between two steps the weights of each have run backward and not yet forward.

The op at the turn from forward to backward is the loss, or the backward of the last block, which asks for more where
blocks are larger than the head: all this holds for either, and the bound is the larger of the two.

With one micro-batch a step falls into two windows that cannot overlap, since the next step's forward begins with a
layer whose gradient comes last: a forward, in which activations leave, and a backward, in which they and weights
come back.

With clipping there are two such windows whatever the number of micro-batches, since all updates follow the last
backward of a step, and precede the first turn of the next:

  forward       the first micro-batch's forward; all updates; weights that the CPU updates; of what the device updates,
                gradients that were not there as the last backward ended, states that were not, and states that are gone
                by the turn
  backward      the backward of all micro-batches, and from the first turn on their losses
  memory        as the last backward ends all weights, states and gradients are in the two memories, or on the drive

With a > 1 micro-batches each has a turn, and the budget of device memory is that of their average. Let f be how many
micro-batches' kept activations of a block are there on average, of k that are kept; held ones' weights are there at
their turns. Squares are replaced by tangents, x^2 >= 2 t x - t^2, which keeps all this linear.

  loads         weights that are not held come between a micro-batch's turn and its backward. Those served by one load
                are in flight together, one at the first of their turns, two at the next: with L loads for k' of
                them, a f >= (k'^2 / L + k') / 2 + the held ones
  sums          until the first backward there is no sum of gradients; if J turns pass before it, the last y of them in
                spite of kept activations, a f >= (y^2 + y) / 2 + k - y. At the others the sum is on the device, or
                has been sent down since the backward before: S times for A turns, a f >= (A^2 / S + A) / 2
  updates       the CPU updates nothing between the first loss and the last. What is not in flight at the last has run
                backward by then, what is not at the first has not run forward: its GPU time comes on top of the CPU's,
                and what is in flight has its kept activations on the device at that one turn

Latencies and issue cost are left out, and so is every other effect of order: the bound is not always attained.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from schedules.model import ModelSpec
from schedules.op import Kind, Phase, Tier
from schedules.saved import hidden_bytes
from schedules.tensor import GRAD, SAVED, STATE, WEIGHT
from schedules.workload import MemoryBudget, Workload
from schedules.workspace import workspace_bytes
from sim.areas import OPTIMIZER, Areas, LayerAreas, together
from sim.cost import D2H, GPU, H2D
from sim.machine import HardwareProfile
from sim.prediction import memory_of

FORWARD, BACKWARD = "forward ", "backward "  # before a resource: what is busy in that window
MIDDLE = "between the turns"  # GPU time in which the CPU updates nothing
SOLVED_TO = 1e-7  # relative: what the solver may be off by, as its tolerances are; so much is taken off the bound
AS_SHORT = 1e-9  # relative: placements of periods that differ by no more are equally good
INFEASIBLE = 2  # a status of scipy.optimize.linprog


@dataclass(frozen=True, kw_only=True)
class PlacementBound:
    """No exact schedule of this step on this machine settles at a shorter period.

    `areas_ns` is what each resource is busy in the best relaxed placement; `placed` is what fraction of the
    model's bytes, by "weights on device", "state on device", "activations kept" and so on, that placement has.
    """

    period_ns: float
    areas_ns: dict[str, float]
    placed: dict[str, float]

    @property
    def binding(self) -> str:
        """The resource with the largest area."""
        return max(self.areas_ns, key=lambda name: self.areas_ns[name])


class NoPlacement(ValueError):
    """Not even fractions of the state fit the machine's tiers together."""


@dataclass
class _Program:
    """The linear program as it grows: columns are fractions in [0, 1], each with areas and bytes."""

    areas: list[Areas] = field(default_factory=list)
    device: list[float] = field(default_factory=list)
    device_first: list[float] = field(default_factory=list)  # bytes at the first turn alone
    device_last: list[float] = field(default_factory=list)  # bytes at the last turn alone
    device_between: list[float] = field(default_factory=list)  # bytes between two steps
    device_end: list[float] = field(default_factory=list)  # bytes as the last backward of a step ends
    drive_end: list[float] = field(default_factory=list)  # bytes that may be on the drive then
    host: list[float] = field(default_factory=list)
    nvme: list[float] = field(default_factory=list)
    labels: list[tuple[str, float]] = field(default_factory=list)  # what a column places, and its bytes
    at_most: list[tuple[dict[int, float], float]] = field(default_factory=list)
    exactly: list[tuple[dict[int, float], float]] = field(default_factory=list)

    def column(
        self,
        areas: Areas | None = None,
        *,
        device: float = 0,
        device_first: float = 0,
        device_last: float = 0,
        device_between: float = 0,
        device_end: float = 0,
        drive_end: float = 0,
        host: float = 0,
        nvme: float = 0,
        label: str = "",
        nbytes: float = 0,
    ) -> int:
        self.areas.append(areas or {})
        self.device.append(device)
        self.device_first.append(device_first)
        self.device_last.append(device_last)
        self.device_between.append(device_between)
        self.device_end.append(device_end)
        self.drive_end.append(drive_end)
        self.host.append(host)
        self.nvme.append(nvme)
        self.labels.append((label, nbytes))
        return len(self.areas) - 1


def placement_bound(
    model: ModelSpec, workload: Workload, profile: HardwareProfile, budget: MemoryBudget | None = None
) -> PlacementBound:
    """The bound of a step that trains all weights, on a machine with this memory, all of its own if left out.

    Raises:
        MissingCost: the profile is a measured one and lacks a time that every schedule needs.
        NoPlacement: the model does not fit all tiers together.
        ArithmeticError: the solver found neither a bound nor that there is none.
    """
    budget = budget or memory_of(profile)
    costs = LayerAreas(model, workload, profile)
    turns = (model.head, model.blocks[-1])
    return max((_bound(costs, profile, budget, turn) for turn in turns), key=lambda found: found.period_ns)


def _bound(costs: LayerAreas, profile: HardwareProfile, budget: MemoryBudget, turn: int) -> PlacementBound:
    """The bound where memory is counted at the loss, if `turn` is the head, or at the backward of that block."""
    from scipy.optimize import linprog

    model, workload = costs.model, costs.workload
    windows, clips = workload.accumulation == 1, workload.grad_clip is not None
    lp, fixed = _Program(), Counter[str]()
    workspace = _workspace(costs, profile)
    at_end = sum(costs.nbytes(cls, i) for cls in (WEIGHT, STATE, GRAD) for i in model.layers) if clips else 0.0
    before = (Phase.EMBED, Phase.FORWARD, *([Phase.LOSS] if turn != model.head else []))
    for layers in _alike(model, turn):
        i, n = layers[0], len(layers)
        for phase in (Phase.EMBED, Phase.FORWARD, Phase.LOSS, Phase.BACKWARD):
            areas = costs.compute(i, phase, n * workload.accumulation)
            window = FORWARD if phase in before else BACKWARD
            _add(fixed, _in_window(areas, window) if windows else areas)
            if clips and not windows:
                first = 1.0 / workload.accumulation if window == FORWARD else 1.0
                _add(fixed, _only_in(areas, window), first)
            if phase == Phase.LOSS and turn == model.head:  # but for the last one's
                _add(fixed, {MIDDLE: areas.get(GPU, 0.0)}, 1.0 - 1.0 / workload.accumulation)
        _place(lp, costs, i, n, turn, has_nvme=profile.nvme is not None)
    columns = len(lp.areas)  # three more variables: the period and its windows, in units of `scale`
    scale = max(fixed.values())
    rows: list[np.ndarray] = []
    limits: list[float] = []
    for parts, limited in _limits([fixed, *lp.areas], profile):
        row = np.zeros(columns + 3)
        row[:columns] = [_weighed(areas, parts) / scale for areas in lp.areas]
        row[columns + limited] = -1.0
        rows.append(row)
        limits.append(-_weighed(fixed, parts) / scale)
    rows.append(np.array([0.0] * columns + [-1.0, 1.0, 1.0]))
    limits.append(0.0)
    for bytes_of, free in (
        *_on_device(lp, budget, _at_turn(costs, turn) + workspace, _between_steps(costs) + workspace),
        ([-nbytes for nbytes in lp.drive_end], float(budget.device_and_host_bytes) - at_end),
        (lp.host, float(budget.host_bytes)),
        (lp.nvme, float(budget.nvme_bytes)),
    ):
        rows.append(np.array([*bytes_of, 0.0, 0.0, 0.0]) / 1e9)
        limits.append(free / 1e9)
    for terms, limit in lp.at_most:
        rows.append(_row(terms, columns))
        limits.append(limit)

    def solve(costs: Sequence[float], longest: float | None) -> Any:
        return linprog(
            costs,
            A_ub=np.array(rows),
            b_ub=limits,
            A_eq=np.array([_row(terms, columns) for terms, _ in lp.exactly]),
            b_eq=[value for _, value in lp.exactly],
            bounds=[(0.0, 1.0)] * columns + [(0.0, longest), (0.0, None), (0.0, None)],
            method="highs",
        )

    solved = solve([0.0] * columns + [1.0, 0.0, 0.0], None)
    if solved.status == INFEASIBLE:
        raise NoPlacement(f"{model.name} does not fit {profile.name}")
    if not solved.success:  # which is no word on what fits
        raise ArithmeticError(f"the bound of {model.name} on {profile.name} could not be solved: {solved.message}")
    period = float(solved.x[columns])
    # of all placements with that period, the one that does least: what it is busy with is what it must do
    work = [sum(ns for name, ns in areas.items() if name != MIDDLE) / scale for areas in lp.areas]
    least = solve([*work, 0.0, 0.0, 0.0], period * (1 + AS_SHORT))
    shares = [float(share) for share in (least if least.success else solved).x[:columns]]
    found = Counter[str](fixed)
    for of_column, share in zip(lp.areas, shares, strict=True):
        _add(found, of_column, share)
    return PlacementBound(
        period_ns=period * scale * (1 - SOLVED_TO),
        areas_ns={name: ns for name, ns in sorted(found.items()) if not name.startswith((FORWARD, BACKWARD, MIDDLE))},
        placed=_placed(lp, shares),
    )


def _on_device(
    lp: _Program, budget: MemoryBudget, at_turn: float, between: float
) -> Iterator[tuple[Sequence[float], float]]:
    """What the columns take of the device at the moments that count, and the bytes there are beside what always is.

    Of a memory that is also the host's, what host buffers take is not there: they are allocated for all of the step.
    """
    for bytes_of, always in (
        (lp.device, at_turn),
        (lp.device_first, at_turn),
        (lp.device_last, at_turn),
        (lp.device_between, between),
        (lp.device_end, 0.0),
    ):
        yield bytes_of, float(budget.device_bytes) - always
        if budget.unified_bytes is not None:
            both = [there + beside for there, beside in zip(bytes_of, lp.host, strict=True)]
            yield both, float(budget.unified_bytes) - always


def _limits(all_areas: Sequence[Areas], profile: HardwareProfile) -> Iterator[tuple[dict[str, float], int]]:
    """Sums of resources that a window limits, as factor by resource; 0 is the whole period, 1 and 2 its windows."""
    names = sorted({name for areas in all_areas for name in areas})
    slower = profile.gpu.copy_slowdown.value
    for name in names:
        limited = 1 if name.startswith(FORWARD) else 2 if name.startswith(BACKWARD) else 0
        yield {name: 1.0}, limited
    yield {OPTIMIZER: 1.0, MIDDLE: 1.0}, 0
    for limited, window in enumerate(("", FORWARD, BACKWARD)):
        for link in (H2D, D2H):
            if slower and window + GPU in names and window + link in names:
                yield {window + GPU: 1.0, window + link: slower / (1.0 + slower)}, limited


def _in_window(areas: Areas, window: str) -> Areas:
    """What is busy in a window is busy in the step."""
    return {**areas, **_only_in(areas, window)}


def _only_in(areas: Areas, window: str) -> Areas:
    return {window + name: ns for name, ns in areas.items()}


def _weighed(areas: Areas, parts: Mapping[str, float]) -> float:
    return sum(areas.get(name, 0.0) * factor for name, factor in parts.items())


def _place(lp: _Program, costs: LayerAreas, i: int, n: int, turn: int, *, has_nvme: bool) -> None:
    """The choices for `n` layers like layer i. What the op at the turn touches is among what is always there."""
    block, passes = costs.model.is_block(i), costs.workload.accumulation
    windows, clips = passes == 1, costs.workload.grad_clip is not None
    weight, state = (n * costs.nbytes(t, i) for t in ("w", "o"))
    if block:
        saved = n * costs.nbytes("s", i)
        beside = saved if i != turn else 0.0
        keep = lp.column(device=beside if windows else 0.0, device_first=beside, label="activations kept", nbytes=saved)
        leave, come = (costs.copy("s", i, kind, n * passes) for kind in (Kind.OFFLOAD, Kind.PREFETCH))
        twice = costs.compute(i, Phase.RECOMPUTE, n * passes)
        if windows:
            leave, come, twice = (
                _in_window(leave, FORWARD), _in_window(come, BACKWARD), _in_window(twice, BACKWARD)
            )  # fmt: skip
        away = lp.column(together(leave, come), host=saved, label="activations on host", nbytes=saved)
        again = lp.column(twice, label="activations recomputed", nbytes=saved)
        made = [away, again]
        if has_nvme:
            on_drive = together(leave, come, costs.drive("s", i, n * passes))
            made.append(lp.column(on_drive, nvme=saved, label="activations on NVMe", nbytes=saved))
        lp.exactly.append(({keep: 1, **dict.fromkeys(made, 1)}, 1.0))
        if clips and not windows:
            # what is not kept from its forward on is made again or comes back after the first turn, or is there by then
            there_first = n * costs.nbytes("s", i) * (passes - (i == turn))
            for column, areas in zip(made, (come, twice, come), strict=False):
                after, by_then = lp.column(_only_in(areas, BACKWARD)), lp.column(device_first=there_first)
                lp.exactly.append(({column: 1, after: -1, by_then: -1}, 0.0))
    held = 0.0 if i == turn else weight
    retained = lp.column(device=held, device_first=held, label="weights on device", nbytes=weight)
    elsewhere = lp.column(host=weight, label="weights on host", nbytes=weight)
    places = {retained: 1.0, elsewhere: 1.0}
    reload = {elsewhere: 1.0}
    if has_nvme:
        drive = lp.column(costs.drive("w", i, n), nvme=weight, drive_end=weight, label="weights on NVMe", nbytes=weight)
        places[drive] = reload[drive] = 1.0
    lp.exactly.append((places, 1.0))
    on_device, on_cpu = (costs.update(i, tier, n) for tier in (Tier.DEVICE, Tier.HOST))
    if clips:
        on_device, on_cpu = (_in_window(areas, FORWARD) for areas in (on_device, on_cpu))
    resident = lp.column(
        on_device,
        device=state,
        device_first=state,
        device_last=state,
        device_between=state,
        device_end=state,
        label="state on device",
        nbytes=state,
    )
    through = lp.column(together(on_device, costs.round_trip(i, n)), label="state through device", nbytes=state)
    landed = together(on_cpu, costs.copy("g", i, Kind.OFFLOAD, n))
    cpu = lp.column(landed, label="state on CPU", nbytes=state)
    lp.exactly.append(({resident: 1, through: 1, cpu: 1}, 1.0))
    if block and costs.workload.multiplies_to_update:
        lp.at_most.append(({cpu: 1}, 0.0))
    # at the turns; it may be on the device, having come back, or to be fetched from there by the CPU
    in_host, there = lp.column(host=state), lp.column(device=state, device_first=state)
    fetched = lp.column(costs.round_trip(i, n))
    lp.at_most.append(({there: 1, through: -1, fetched: -1}, 0.0))
    kept_state = {through: 1.0, cpu: 1.0, in_host: -1.0, there: -1.0}
    if has_nvme:
        state_there = lp.column(costs.drive("o", i, n), nvme=state, drive_end=state)
        kept_state[state_there] = -1.0
        if clips:  # others go there for the end of the last backward
            more = {cls: lp.column(costs.drive(cls, i, n), drive_end=n * costs.nbytes(cls, i)) for cls in "wog"}
            lp.at_most += [({drive: 1, more["w"]: 1}, 1.0), ({state_there: 1, more["o"]: 1}, 1.0)]
    lp.exactly.append((kept_state, 0.0))
    if clips:
        _after_the_norm(lp, costs, i, n, resident=resident, through=through, there=there)
    # what the device has made is sent to the host if it is gone between the steps, or at the turn
    between = lp.column(device_between=0.0 if i == costs.model.embed else weight)
    sent = lp.column(costs.copy("w", i, Kind.OFFLOAD, n))
    for there_then in (between, retained):
        lp.at_most.append(({cpu: -1, there_then: -1, sent: -1}, -1.0))
    # they come once for the forward if the CPU has made them or they are gone between the steps
    load = costs.copy("w", i, Kind.PREFETCH, n)
    once = lp.column(_in_window(load, FORWARD) if clips else load)
    lp.at_most += [({cpu: 1, once: -1}, 0.0), ({between: -1, once: -1}, -1.0)]
    if block:  # once more if they are gone at the turn
        if i == turn:
            return
        # in units of one load in each of the micro-batches' backwards
        loads = costs.copy("w", i, Kind.PREFETCH, n * passes)
        returned = lp.column(_in_window(loads, BACKWARD) if windows or clips else loads)
        lp.at_most.append(({**reload, returned: -passes}, 0.0))
        if passes > 1:
            _in_turns(lp, costs, i, n, keep=keep, retained=retained, returned=returned)
            if turn == costs.model.head:
                _between_losses(lp, costs, i, n, keep=keep)
    else:
        lp.at_most.append(({**reload, once: -1}, 0.0))


def _after_the_norm(
    lp: _Program, costs: LayerAreas, i: int, n: int, *, resident: int, through: int, there: int
) -> None:
    """What of these layers has to move between the last backward and the first turn, since their updates do not begin
    before and are made by then."""
    state, grad = (n * costs.nbytes(cls, i) for cls in (STATE, GRAD))
    come, leave = (_only_in(costs.copy(STATE, i, kind, n), FORWARD) for kind in (Kind.PREFETCH, Kind.OFFLOAD))
    early, late = lp.column(device_end=state), lp.column(come)
    lp.exactly.append(({through: 1, early: -1, late: -1}, 0.0))
    gone, stays = lp.column(leave), lp.column(device_first=state)
    lp.at_most.append(({through: 1, gone: -1, stays: -1, there: -1}, 0.0))
    back = _in_window(costs.copy(GRAD, i, Kind.PREFETCH, n), FORWARD)
    returns = lp.column(together(costs.copy(GRAD, i, Kind.OFFLOAD, n), back))
    lp.exactly.append(({resident: 1, through: 1, lp.column(device_end=grad): -1, returns: -1}, 0.0))


def _in_turns(lp: _Program, costs: LayerAreas, i: int, n: int, *, keep: int, retained: int, returned: int) -> None:
    """What several micro-batches need at their turns, see above: all in fractions of them, loads and sends too."""
    a = costs.workload.accumulation
    saved, summed = n * costs.nbytes("s", i), n * costs.nbytes("g", i)
    flying = lp.column(device=saved * a)  # f / a
    held = lp.column()  # kept, with weights that are there
    lp.at_most += [({held: 1, keep: -1}, 0.0), ({held: 1, retained: -1}, 0.0), ({keep: 1, flying: -a}, 0.0)]
    sum_there, sum_away, before = lp.column(device=summed), lp.column(), lp.column()
    sent = lp.column(costs.copy("g", i, Kind.OFFLOAD, n * a))
    lp.at_most.append(({keep: 1, before: -1, sum_there: -1, sum_away: -1}, 0.0))
    for t in _powers_up_to(a):
        # loads: half of k'^2 / L + k', k' being what is kept and not held
        lp.at_most.append(({keep: t + 0.5, held: 0.5 - t, returned: -(t**2) / 2, flying: -a}, 0.0))
        lp.at_most.append(({keep: 1, before: t - 0.5, flying: -a}, t**2 / (2 * a)))
        lp.at_most.append(({sum_away: t + 0.5, sent: -(t**2) / 2, flying: -a}, 0.0))


def _between_losses(lp: _Program, costs: LayerAreas, i: int, n: int, *, keep: int) -> None:
    """What the GPU does of these layers between the first loss and the last, when the CPU updates nothing."""
    a, saved = costs.workload.accumulation, n * costs.nbytes("s", i)
    forward, backward = (costs.compute(i, phase, n * a).get(GPU, 0.0) for phase in (Phase.FORWARD, Phase.BACKWARD))
    lasting = lp.column(device_last=saved * a)  # kept, and in flight at the last turn, and so at the first
    ran = lp.column({MIDDLE: forward + backward})
    lp.exactly.append(({ran: 1, lasting: 1, keep: -1}, 0.0))


def _powers_up_to(limit: int) -> list[float]:
    """From 1 to the limit, each the last one's double or less."""
    return [*(2.0**k for k in range(math.ceil(math.log2(limit)))), float(limit)]


def _at_turn(costs: LayerAreas, turn: int) -> float:
    """Bytes that every schedule has on the device in the op at the turn."""
    classes = (WEIGHT, GRAD, SAVED) if costs.model.is_block(turn) else (WEIGHT, GRAD)
    return sum(costs.nbytes(cls, turn) for cls in classes) + hidden_bytes(costs.model, costs.workload)


def _between_steps(costs: LayerAreas) -> float:
    """Bytes that every schedule has there in the op that begins a step."""
    return costs.nbytes(WEIGHT, costs.model.embed) + hidden_bytes(costs.model, costs.workload)


def _workspace(costs: LayerAreas, profile: HardwareProfile) -> float:
    """The largest workspace of any op, bytes, which a device's memory must have room for beside all else."""
    if profile.measured is not None and profile.measured.workspace is not None:
        return 0.0  # it may be smaller than the estimate
    model = costs.model
    of_block = (Phase.BACKWARD, Phase.ADAM)  # by Muon
    kinds = {model.layer_kind(i): i for i in model.blocks}.values()
    phases = [(model.head, Phase.LOSS), *((i, phase) for i in kinds for phase in of_block)]
    return max(workspace_bytes(model, i, phase, costs.workload) for i, phase in phases)


def _alike(model: ModelSpec, turn: int) -> list[Sequence[int]]:
    """Layers of one kind and size, the first of each standing for all; the one at the turn by itself."""
    groups: dict[tuple[str, int, bool], list[int]] = {}
    for i in model.layers:
        groups.setdefault((model.layer_kind(i), model.params(i), i == turn), []).append(i)
    return list(groups.values())


def _placed(lp: _Program, shares: Sequence[float]) -> dict[str, float]:
    totals: dict[str, float] = {}
    parts: dict[str, float] = {}
    for (label, nbytes), share in zip(lp.labels, shares, strict=True):
        if label:
            group = label.split()[0]
            totals[group] = totals.get(group, 0.0) + nbytes * share
            parts[label] = parts.get(label, 0.0) + nbytes * share
    return {label: part / totals[label.split()[0]] for label, part in parts.items() if totals[label.split()[0]]}


def _row(terms: Mapping[int, float], columns: int) -> np.ndarray:
    row = np.zeros(columns + 3)
    for column, factor in terms.items():
        row[column] += factor
    return row


def _add(total: Counter[str], areas: Areas, times: float = 1.0) -> None:
    for name, ns in areas.items():
        total[name] += ns * times  # type: ignore[assignment]
