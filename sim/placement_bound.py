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
  drive         state and weights that are not always in memory, read and written at least once; activations sent on
                to it
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

Without clipping there are three, of which the middle one is empty with one micro-batch: from the last turn to the
moment between two steps, from there to the next first turn, and from the first turn to the last. A micro-batch that is
in flight at the first turn has run forward before it, one in flight at the last runs backward after it, and in the
middle the GPU runs the others, and all losses but one. There is no update in it, for an update needs the gradient of
all micro-batches, and the first forward needs all updates. (The head's may begin before the last block's backward.) So
the CPU's time comes on top of it. And what is on a drive alone at one of the three moments is read and written in
windows that allow for it (`sim.drive_windows`), while all else is in the two memories then: a state is read before its
update and written after it, weights are written after it and read for every backward and forward that finds them gone,
and of what is updated after the last backward the gradient waits.

With a > 1 micro-batches each has a turn, and the budget of device memory is that of their average (`sim.turns`). Let f
be how many micro-batches' activations of a block are in flight there on average, of k that are kept, or, wherever they
are then, of k that are kept or sent away; held ones' weights are on the device at their turns. Squares are replaced by
tangents, x^2 >= 2 t x - t^2, which keeps all this linear.

  loads         where a micro-batch's turn finds weights gone, its forward was before they went, and its backward is
                after they come: all whose turns fall into one such gap are in flight at all these turns. With L gaps,
                each ended by a load, for k' micro-batches, a f >= k'^2 / L + the held ones
  between turns of two micro-batches with turns one after the other, if only the first is in flight at the first turn,
                and only the second at the second, a block runs backward for the one and forward for the other between.
                One goes from the last block to the first, the other from the first to the last, so that there is a
                moment which, for every such block, is after one of the two and before the other. Weights are on the
                device then, or gone after the one, and come once more for the other
  sums          until the first backward there is no sum of gradients; if J turns pass before it, the last y of them in
                spite of stored activations, a f >= (y^2 + y) / 2 + k - y. At the others the sum is on the device, or
                has been sent down since the backward before: S times for A turns, a f >= (A^2 / S + A) / 2

Latencies and issue cost are left out, and so is every other effect of order: the bound is not always attained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from schedules.model import ModelSpec
from schedules.op import Kind, Phase, Tier
from schedules.saved import hidden_bytes
from schedules.tensor import GRAD, SAVED, STATE, WEIGHT
from schedules.workload import MemoryBudget, Workload
from schedules.workspace import workspace_bytes
from sim import drive_windows, turns
from sim.areas import OPTIMIZER, Areas, LayerAreas, together
from sim.cost import D2H, GPU, H2D
from sim.machine import HardwareProfile
from sim.placement_program import (
    BACKWARD,
    BOTH_BETWEEN,
    BOTH_FIRST,
    BOTH_LAST,
    DEVICE,
    DEVICE_AMID,
    DEVICE_BETWEEN,
    DEVICE_END,
    DEVICE_FIRST,
    DEVICE_LAST,
    DRIVE_END,
    FORWARD,
    HOST,
    MIDDLE,
    NVME,
    VARIABLES,
    WINDOWS,
    PlacementProgram,
    in_window,
    only_in,
)
from sim.prediction import memory_of

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

    model = costs.model
    lp, fixed = PlacementProgram(), _always(costs, turn)
    for layers in _alike(model, turn):
        _place(lp, costs, layers[0], len(layers), turn, has_nvme=profile.nvme is not None)
    columns = len(lp.areas)  # and the VARIABLES, in units of `scale`
    scale = max(fixed.values())
    rows: list[np.ndarray] = []
    limits: list[float] = []
    for parts, limited in _limits(costs, [fixed, *lp.areas], profile, turn):
        row = np.zeros(columns + VARIABLES)
        row[:columns] = [_weighed(areas, parts) / scale for areas in lp.areas]
        row[columns:] = [-limited.get(window, 0.0) for window in ("", *WINDOWS)]
        rows.append(row)
        limits.append(-_weighed(fixed, parts) / scale)
    for taken, free in _in_memory(lp, costs, profile, budget, turn):
        rows.append(np.append(taken, np.zeros(VARIABLES)) / 1e9)
        limits.append(free / 1e9)
    for terms, limit in lp.at_most:
        rows.append(lp.row(terms))
        limits.append(limit)

    def solve(costs: Sequence[float], longest: float | None) -> Any:
        return linprog(
            costs,
            A_ub=np.array(rows),
            b_ub=limits,
            A_eq=np.array([lp.row(terms) for terms, _ in lp.exactly]),
            b_eq=[value for _, value in lp.exactly],
            bounds=[(0.0, 1.0)] * columns + [(0.0, longest)] + [(0.0, None)] * len(WINDOWS),
            method="highs",
        )

    solved = solve([0.0] * columns + [1.0] + [0.0] * len(WINDOWS), None)
    if solved.status == INFEASIBLE:
        raise NoPlacement(f"{model.name} does not fit {profile.name}")
    if not solved.success:  # which is no word on what fits
        raise ArithmeticError(f"the bound of {model.name} on {profile.name} could not be solved: {solved.message}")
    period = float(solved.x[columns])
    # of all placements with that period, the one that does least: what it is busy with is what it must do
    work = [sum(ns for name, ns in areas.items() if not name.startswith(MIDDLE)) / scale for areas in lp.areas]
    least = solve([*work, *[0.0] * VARIABLES], period * (1 + AS_SHORT))
    shares = [float(share) for share in np.clip((least if least.success else solved).x[:columns], 0.0, 1.0)]
    found = Counter[str](fixed)
    for of_column, share in zip(lp.areas, shares, strict=True):
        _add(found, of_column, share)
    return PlacementBound(
        period_ns=period * scale * (1 - SOLVED_TO),
        areas_ns={name: ns for name, ns in sorted(found.items()) if not name.startswith(WINDOWS)},
        placed=_placed(lp, shares),
    )


def _always(costs: LayerAreas, turn: int) -> Counter[str]:
    """What every schedule is busy with."""
    model, workload, fixed = costs.model, costs.workload, Counter[str]()
    windows, clips = workload.accumulation == 1, workload.grad_clip is not None
    before = (Phase.EMBED, Phase.FORWARD, *([Phase.LOSS] if turn != model.head else []))
    for layers in _alike(model, turn):
        for phase in (Phase.EMBED, Phase.FORWARD, Phase.LOSS, Phase.BACKWARD):
            areas = costs.compute(layers[0], phase, len(layers) * workload.accumulation)
            window = FORWARD if phase in before else BACKWARD
            _add(fixed, in_window(areas, window) if windows else areas)
            if clips and not windows:
                first = 1.0 / workload.accumulation if window == FORWARD else 1.0
                _add(fixed, only_in(areas, window), first)
            if phase == Phase.LOSS and turn == model.head:  # but for the last one's
                _add(fixed, {MIDDLE + GPU: areas.get(GPU, 0.0)}, 1.0 - 1.0 / workload.accumulation)
    return fixed


def _in_memory(
    lp: PlacementProgram, costs: LayerAreas, profile: HardwareProfile, budget: MemoryBudget, turn: int
) -> Iterator[tuple[np.ndarray, float]]:
    """What the columns take of the memories at the moments that count, and the bytes there are beside what always is.

    Of a memory that is also the host's, what host buffers take is not there: they are allocated for all of the step.
    """
    model, workspace, hidden = costs.model, _workspace(costs, profile), hidden_bytes(costs.model, costs.workload)
    at_turn = _at_turn(costs, turn) + workspace
    for memory, always in (
        (DEVICE, at_turn),
        (DEVICE_FIRST, at_turn),
        (DEVICE_LAST, at_turn),
        (DEVICE_AMID, 0.0),
        (DEVICE_BETWEEN, costs.nbytes(WEIGHT, model.embed) + hidden + workspace),
        (DEVICE_END, 0.0),
    ):
        taken = lp.bytes_in(memory)
        yield taken, float(budget.device_bytes) - always
        if budget.unified_bytes is not None:
            yield taken + lp.bytes_in(HOST), float(budget.unified_bytes) - always
    both = float(budget.device_and_host_bytes)
    if costs.workload.grad_clip is not None:
        everything = sum(costs.nbytes(cls, i) for cls in (WEIGHT, STATE, GRAD) for i in model.layers)
        yield -lp.bytes_in(DRIVE_END), both - everything
    else:
        states = sum(costs.nbytes(STATE, i) for i in model.layers)
        others = sum(costs.nbytes(WEIGHT, i) for i in model.layers if i != turn)
        for memory, always in ((BOTH_FIRST, at_turn), (BOTH_LAST, at_turn), (BOTH_BETWEEN, hidden + workspace)):
            yield lp.bytes_in(memory), both - states - others - always
    yield lp.bytes_in(HOST), float(budget.host_bytes)
    yield lp.bytes_in(NVME), float(budget.nvme_bytes)


def _limits(
    costs: LayerAreas, all_areas: Sequence[Areas], profile: HardwareProfile, turn: int
) -> Iterator[tuple[dict[str, float], dict[str, float]]]:
    """Sums of resources, as factor by resource, and the windows that they do not exceed, "" being all of the period."""
    names = sorted({name for areas in all_areas for name in areas})
    slower = profile.gpu.copy_slowdown.value
    for name in names:
        yield {name: 1.0}, {next((window for window in WINDOWS if name.startswith(window)), ""): 1.0}
    if turn == costs.model.head:  # whose update may run before the last block's backward
        yield {OPTIMIZER: 1.0}, {"": 1.0, MIDDLE: -1.0}
    for window in ("", *WINDOWS):
        for link in (H2D, D2H):
            if slower and window + GPU in names and window + link in names:
                yield {window + GPU: 1.0, window + link: slower / (1.0 + slower)}, {window: 1.0}
    # one after another; with clipping BACKWARD begins with the first turn
    clips = costs.workload.grad_clip is not None
    yield {}, {"": 1.0, FORWARD: -1.0, BACKWARD: -1.0, **({} if clips else {MIDDLE: -1.0})}
    if costs.workload.accumulation == 1:
        yield {}, {MIDDLE: -1.0}


def _weighed(areas: Areas, parts: Mapping[str, float]) -> float:
    return sum(areas.get(name, 0.0) * factor for name, factor in parts.items())


def _place(lp: PlacementProgram, costs: LayerAreas, i: int, n: int, turn: int, *, has_nvme: bool) -> None:
    """The choices for `n` layers like layer i. What the op at the turn touches is among what is always there."""
    block, passes = costs.model.is_block(i), costs.workload.accumulation
    windows, clips = passes == 1, costs.workload.grad_clip is not None
    weight, state = (n * costs.nbytes(t, i) for t in (WEIGHT, STATE))
    if block:
        activations = _activations(lp, costs, i, n, turn, has_nvme=has_nvme)
    held = 0.0 if i == turn else weight
    at_turn = {DEVICE: held, DEVICE_FIRST: held} if windows else {DEVICE: held}
    retained = lp.column(None, at_turn, label="weights on device", nbytes=weight)
    elsewhere = lp.column(None, {HOST: weight}, label="weights on host", nbytes=weight)
    places = [retained, elsewhere]
    if has_nvme:
        areas = costs.drive(WEIGHT, i, n) if clips else {}
        drive = lp.column(areas, {NVME: weight, DRIVE_END: weight}, label="weights on NVMe", nbytes=weight)
        places.append(drive)
    lp.exactly.append((dict.fromkeys(places, 1.0), 1.0))
    reload = dict.fromkeys(places[1:], 1.0)
    on_device, on_cpu = (costs.update(i, tier, n) for tier in (Tier.DEVICE, Tier.HOST))
    if clips:
        on_device, on_cpu = (in_window(areas, FORWARD) for areas in (on_device, on_cpu))
    always = (DEVICE, DEVICE_FIRST, DEVICE_LAST, DEVICE_AMID, DEVICE_BETWEEN, DEVICE_END)
    resident = lp.column(on_device, dict.fromkeys(always, state), label="state on device", nbytes=state)
    through = lp.column(together(on_device, costs.round_trip(i, n)), label="state through device", nbytes=state)
    landed = together(on_cpu, costs.copy(GRAD, i, Kind.OFFLOAD, n))
    cpu = lp.column(landed, label="state on CPU", nbytes=state)
    lp.exactly.append(({resident: 1, through: 1, cpu: 1}, 1.0))
    if block and costs.workload.multiplies_to_update:
        lp.no_more([cpu], than=[])
    # at the turns; it may be on the device, having come back, or to be fetched from there by the CPU
    in_host, there_too = lp.column(None, {HOST: state}), lp.column(None, {DEVICE: state})
    fetched = lp.column(costs.round_trip(i, n))
    lp.no_more([there_too], than=[through, fetched])
    kept_state = {through: 1.0, cpu: 1.0, in_host: -1.0, there_too: -1.0}
    if has_nvme:
        areas = costs.drive(STATE, i, n) if clips else {}
        state_there = lp.column(areas, {NVME: state, DRIVE_END: state})
        kept_state[state_there] = -1.0
        if clips:  # others go there for the end of the last backward
            more = {
                cls: lp.column(costs.drive(cls, i, n), {DRIVE_END: n * costs.nbytes(cls, i)})
                for cls in (WEIGHT, STATE, GRAD)
            }
            lp.at_most += [({drive: 1, more[WEIGHT]: 1}, 1.0), ({state_there: 1, more[STATE]: 1}, 1.0)]
        else:
            drive_windows.use(lp, costs, i, n, turn, weights=drive, states=state_there)
    lp.exactly.append((kept_state, 0.0))
    if clips:
        _after_the_norm(lp, costs, i, n, resident=resident, through=through)
    # what the device has made is sent to the host if it is gone between the steps, or at the turn
    between = lp.column(None, {} if i == costs.model.embed else {DEVICE_BETWEEN: weight})
    sent = lp.column(costs.copy(WEIGHT, i, Kind.OFFLOAD, n))
    for there_then in (between, retained):
        lp.at_most.append(({cpu: -1, there_then: -1, sent: -1}, -1.0))
    # they come once for the forward if the CPU has made them or they are gone between the steps
    load = costs.copy(WEIGHT, i, Kind.PREFETCH, n)
    once = lp.column(in_window(load, FORWARD) if clips else load)
    lp.no_more([cpu], than=[once])
    lp.at_most.append(({between: -1, once: -1}, -1.0))
    if not block:
        lp.at_most.append(({**reload, once: -1}, 0.0))
    elif i != turn:  # once more if they are gone at the turn
        # in units of one load in each of the micro-batches' backwards
        loads = costs.copy(WEIGHT, i, Kind.PREFETCH, n * passes)
        returned = lp.column(in_window(loads, BACKWARD) if windows or clips else loads)
        lp.at_most.append(({**reload, returned: -passes}, 0.0))
        if passes > 1:
            lp.at_most.append(({lp.column(None, {DEVICE_FIRST: weight}): -1, returned: -passes}, -1.0))
            turns.at_turns(lp, costs, i, n, activations, retained=retained, returned=returned)
            turns.first_and_last(lp, costs, i, n, activations)


def _activations(
    lp: PlacementProgram, costs: LayerAreas, i: int, n: int, turn: int, *, has_nvme: bool
) -> turns.Activations:
    """What may become of what `n` blocks like block i keep for their backward."""
    passes, saved = costs.workload.accumulation, n * costs.nbytes(SAVED, i)
    windows, clips = passes == 1, costs.workload.grad_clip is not None
    beside = {DEVICE: saved, DEVICE_FIRST: saved, BOTH_FIRST: saved, BOTH_LAST: saved}
    keep = lp.column(None, beside if windows and i != turn else {}, label="activations kept", nbytes=saved)
    leave, come = (costs.copy(SAVED, i, kind, n * passes) for kind in (Kind.OFFLOAD, Kind.PREFETCH))
    twice = costs.compute(i, Phase.RECOMPUTE, n * passes)
    if windows:
        leave, come, twice = in_window(leave, FORWARD), in_window(come, BACKWARD), in_window(twice, BACKWARD)
    alone = windows or i == turn  # elsewhere as many take room as are in flight
    in_both = {BOTH_FIRST: saved, BOTH_LAST: saved} if windows and i != turn else {}
    in_host = {HOST: saved, **in_both} if alone else {}
    away = lp.column(together(leave, come), in_host, label="activations on host", nbytes=saved)
    again = lp.column(twice, label="activations recomputed", nbytes=saved)
    on_drive = None
    if has_nvme:
        further = together(leave, come, costs.drive(SAVED, i, n * passes))
        on_drive = lp.column(further, {NVME: saved} if alone else {}, label="activations on NVMe", nbytes=saved)
    found = turns.Activations(kept=keep, away=away, on_drive=on_drive, again=again)
    lp.exactly.append((dict.fromkeys([*found.stored, again], 1.0), 1.0))
    if clips and not windows:
        # what is not kept from its forward on is made again or comes back after the first turn, or is there by then
        there_first = n * costs.nbytes(SAVED, i) * (passes - (i == turn))
        for column, areas in ((away, come), (again, twice), *([(on_drive, come)] if on_drive is not None else [])):
            after, by_then = lp.column(only_in(areas, BACKWARD)), lp.column(None, {DEVICE_FIRST: there_first})
            lp.all_of([after, by_then], of=column)
    return found


def _after_the_norm(lp: PlacementProgram, costs: LayerAreas, i: int, n: int, *, resident: int, through: int) -> None:
    """What of these layers has to move between the last backward and the first turn, since their updates do not begin
    before and are made by then."""
    state, grad = (n * costs.nbytes(cls, i) for cls in (STATE, GRAD))
    come, leave = (only_in(costs.copy(STATE, i, kind, n), FORWARD) for kind in (Kind.PREFETCH, Kind.OFFLOAD))
    lp.all_of([lp.column(None, {DEVICE_END: state}), lp.column(come)], of=through)
    lp.no_more([through], than=[lp.column(leave), lp.column(None, {DEVICE_FIRST: state})])
    back = in_window(costs.copy(GRAD, i, Kind.PREFETCH, n), FORWARD)
    returns = lp.column(together(costs.copy(GRAD, i, Kind.OFFLOAD, n), back))
    lp.exactly.append(({resident: 1, through: 1, lp.column(None, {DEVICE_END: grad}): -1, returns: -1}, 0.0))


def _at_turn(costs: LayerAreas, turn: int) -> float:
    """Bytes that every schedule has on the device in the op at the turn."""
    classes = (WEIGHT, GRAD, SAVED) if costs.model.is_block(turn) else (WEIGHT, GRAD)
    return sum(costs.nbytes(cls, turn) for cls in classes) + hidden_bytes(costs.model, costs.workload)


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


def _placed(lp: PlacementProgram, shares: Sequence[float]) -> dict[str, float]:
    totals: dict[str, float] = {}
    parts: dict[str, float] = {}
    for (label, nbytes), share in zip(lp.labels, shares, strict=True):
        if label:
            group = label.split()[0]
            totals[group] = totals.get(group, 0.0) + nbytes * share
            parts[label] = parts.get(label, 0.0) + nbytes * share
    return {label: part / totals[label.split()[0]] for label, part in parts.items() if totals[label.split()[0]]}


def _add(total: Counter[str], areas: Areas, times: float = 1.0) -> None:
    for name, ns in areas.items():
        total[name] += ns * times  # type: ignore[assignment]
