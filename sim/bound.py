"""How fast a schedule could be at best: what fills a resource, and what must follow what, step after step.

Two lower bounds on the time from step to step. The area of a resource is the time that it alone needs for
one step's work, however that is ordered. The cycle ratio is the repeating program's own: around a circle of
things that follow one another, which spans d steps and lasts t at full speed, no d steps take less than t.
The largest t / d is the period at which the schedule settles when nothing is shared and every stream notices at once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from schedules.op import Stream
from schedules.schedule import Schedule
from sim.cost import Demand, Terms, demands
from sim.longest_path import arcs, topological
from sim.machine import HardwareProfile

REAL = 0.05  # part of a circle's time: a stream that takes less of it is not what binds
Predecessors = list[list[tuple[int, int]]]  # node -> (node before it, how many steps before)


@dataclass(frozen=True, kw_only=True)
class Bound:
    """What one step of a schedule takes at least.

    `area_ns` is whole nanoseconds, rounded down, by resource. `cycle_ns` is the largest cycle ratio,
    exact; `cycle` names the ops on that circle in order, and `streams_ns` is how long each stream is busy along it, the
    longest first ("host" is issuing).
    """

    area_ns: dict[str, int]
    cycle_ns: Fraction
    cycle: tuple[str, ...]
    streams_ns: dict[str, int]

    @property
    def period_ns(self) -> float:
        """The larger of the two bounds: no run settles at a shorter period."""
        return max(float(self.cycle_ns), float(max(self.area_ns.values(), default=0)))

    @property
    def binding(self) -> str:
        """What sets the bound: a resource, a stream that is never idle, or the streams with a REAL part of a circle."""
        resource = max(self.area_ns, key=lambda name: self.area_ns[name], default="")
        if resource and self.area_ns[resource] > self.cycle_ns:
            return resource
        around = sum(self.streams_ns.values())
        return " + ".join(stream for stream, ns in self.streams_ns.items() if ns >= REAL * around)


def bound(schedule: Schedule, profile: HardwareProfile, terms: Terms = Terms()) -> Bound:
    """The bounds of a schedule on a machine; noise is left out.

    Raises:
        MissingCost: the profile is a measured one and lacks an op's time.
        Stuck: the schedule waits for itself.
    """
    return bound_of(schedule, demands(schedule, profile, terms), sharing=terms.sharing)


def bound_of(schedule: Schedule, costs: Sequence[Demand], *, sharing: bool = True) -> Bound:
    """The bounds of a schedule whose ops have the given demands. Raises Stuck."""
    weights = [ns for cost in costs for ns in (cost.issue_ns, cost.duration_ns)]  # by node
    ratio, nodes = largest_cycle_ratio(schedule, weights)
    # the circle's nodes that take time: issues are the host's, ends belong to the stream
    timed = [node for node in nodes if weights[node]]
    busy = Counter[str]()
    for node in timed:
        busy[str(schedule.ops[node // 2].stream) if node % 2 else str(Stream.HOST)] += weights[node]
    return Bound(
        area_ns=_areas(costs) if sharing else {},
        cycle_ns=ratio,
        cycle=tuple(schedule.ops[node // 2].name for node in timed if node % 2),
        streams_ns=dict(busy.most_common()),
    )


def busiest_ns(schedule: Schedule, costs: Sequence[Demand]) -> int:
    """What the busiest resource or stream takes for one step's work, which no wait changes: no more than the bound."""
    streams = Counter[str]()
    for op, cost in zip(schedule.ops, costs, strict=True):
        streams[op.stream] += cost.duration_ns
    return max([*_areas(costs).values(), *streams.values()], default=0)


def _areas(costs: Sequence[Demand]) -> dict[str, int]:
    """By resource, the time in which it could do one step's work if it were never idle."""
    whole = Counter[tuple[str, float]]()  # resource, share -> ns; few shares are used
    for cost in costs:
        for use in cost.usage.items():
            whole[use] += cost.duration_ns
    totals: dict[str, Fraction] = {}
    for (resource, share), duration_ns in whole.items():
        totals[resource] = totals.get(resource, Fraction(0)) + duration_ns * Fraction(share)
    return {resource: math.floor(total) for resource, total in totals.items()}


def largest_cycle_ratio(schedule: Schedule, weights: Sequence[int]) -> tuple[Fraction, list[int]]:
    """The largest time per step along any circle of arcs, and the nodes on that circle, in order.

    A ratio that some circle has is raised for as long as a circle exceeds it (Ahuja, Magnanti and Orlin,
    Network Flows, chapter 5): exact, and done after few rounds.

    Args:
        weights: ns that each node lasts, nodes as `longest_path.arcs` numbers them.

    Raises:
        Stuck: the schedule waits for itself.
    """
    edges = arcs(schedule)
    before: Predecessors = [[] for _ in weights]
    for arc in edges:
        before[arc.to].append((arc.start, arc.distance))
    order = topological(schedule, edges)
    # start from the busiest stream: its ops follow one another around the step
    streams = [[2 * schedule.index[op.name] + 1 for op in ops] for ops in schedule.streams.values()]
    circle = max(streams, key=lambda nodes: sum(weights[node] for node in nodes))
    ratio = Fraction(sum(weights[node] for node in circle))
    while longer := _circle_above(ratio, weights, before, order):
        circle, steps = longer
        ratio = Fraction(sum(weights[node] for node in circle), steps)
    return ratio, circle


def _circle_above(
    ratio: Fraction, weights: Sequence[int], before: Predecessors, order: Sequence[int]
) -> tuple[list[int], int] | None:
    """Some circle that takes more than `ratio` per step, and the steps it spans; None if there is none.

    With every arc shortened by the ratio times the steps it spans, such a circle is one of positive length:
    longest paths along it grow without end, and the best predecessors then close into a circle, as in the
    method of Bellman and Ford. Lengths are counted in units of 1 / ratio.denominator, as whole numbers.
    """
    scaled = [weight * ratio.denominator for weight in weights]
    length = [0] * len(weights)
    best: list[tuple[int, int] | None] = [None] * len(weights)
    grows = True
    while grows:
        grows = False
        for node in order:
            for arc in before[node]:
                longer = length[arc[0]] + scaled[node] - arc[1] * ratio.numerator
                if longer > length[node]:
                    length[node], best[node], grows = longer, arc, True
        if circle := _circle(best):
            return circle
    return None


def _circle(best: Sequence[tuple[int, int] | None]) -> tuple[list[int], int] | None:
    """A circle among the best predecessors, in the order in which time runs, and the steps it spans."""
    seen = [-1] * len(best)  # from which node the walk came by
    for first in range(len(best)):
        node = first
        while seen[node] == -1 and (arc := best[node]) is not None:
            seen[node] = first
            node = arc[0]
        if best[node] is None or seen[node] != first:
            continue
        circle: list[int] = []
        steps, at = 0, node
        while not circle or at != node:
            circle.append(at)
            arc = best[at]
            assert arc is not None  # the walk above passed here
            at, steps = arc[0], steps + arc[1]
        return circle[::-1], steps
    return None
