"""Where a policy loses most: a search over machines and shapes for the points that another policy does better.

A seeded search in a stated box, at random and around the worst points found: numbers of the machine are varied by
factors (MACHINE), and shapes over what people train (SHAPES). What it finds is a lower bound of how bad it can get.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from schedules import policies, presets
from schedules.errors import InputError
from schedules.model import ModelSpec
from schedules.verify import verify
from schedules.workload import Workload
from sim.cost import TooLong
from sim.hardware import override
from sim.machine import CEILINGS, NUMBERS, HardwareProfile, lookup
from sim.prediction import memory_of, predict
from sim.units import in_largest_unit

if TYPE_CHECKING:
    import pandas as pd

HEAD = 128  # elements of an attention head, as in most models
MACHINE: Mapping[str, float] = {  # number of the machine -> by what factor it may be larger or smaller
    "gpu.matmul_flops": 4.0,
    "gpu.memory": 4.0,
    "links.h2d.bandwidth": 8.0,
    "links.d2h.bandwidth": 8.0,
    "host.memory_bandwidth": 4.0,
}
SHAPES: Mapping[str, tuple[int, ...]] = {
    "hidden": (1024, 2048, 4096, 8192),
    "blocks": (4, 8, 16),
    "seq_len": (512, 2048, 8192, 32768),
    "micro_batch_size": (1, 2, 4, 8, 16, 32),
    "accumulation": (1, 2, 4),
}
AROUND = 0.5  # of the points are looked for near the worst known
NEAR = 5  # worst points that are looked around
USUAL = Workload(micro_batch_size=1, seq_len=1)  # but for its shape
Point = dict[str, float]
Progress = Callable[[int, float], None]  # points tried, the largest ratio so far


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A point at which both policies fit: by what factor the first takes longer, and where.

    `first` and `second` are the policies with their knobs, marked where their training is not exact.
    """

    first: str
    second: str
    ratio: float
    first_s: float
    second_s: float
    hidden: int
    blocks: int
    seq_len: int
    micro_batch_size: int
    accumulation: int
    precision: str  # that is asked for
    optimizer: str
    grad_clip: float | None
    recompute: str
    matmul: str  # "none" where products are in the activations' type
    around: str  # the machine
    machine: str  # what is changed of it
    first_binds: str
    second_binds: str
    first_state: str  # the precision that it keeps, which may be more than it is asked to
    second_state: str

    def words(self) -> str:
        """The point as a sentence."""
        return (
            f"{self.first} takes {self.ratio:.2f} times as long as {self.second} ({self.first_s:.3g} s against "
            f"{self.second_s:.3g} s): {self.blocks} blocks of width {self.hidden:,}, {self.accumulation} x "
            f"{self.micro_batch_size} x {self.seq_len:,} tokens{self._how()}; {self.machine}; {self.first} is held up "
            f"by {self.first_binds}"
        )

    def _how(self) -> str:
        """What is not as usual of the step."""
        told = (
            (self.precision != USUAL.precision, self.precision),
            (self.matmul != "none", f"{self.matmul} products"),
            (self.optimizer != USUAL.optimizer, self.optimizer),
            (self.grad_clip is not None, f"gradients clipped to {self.grad_clip}"),
            (self.recompute != USUAL.recompute, f"recompute {self.recompute}"),
        )
        return "".join(f", {words}" for unusual, words in told if unusual)


def search(
    first: str,
    second: str,
    machine: HardwareProfile,
    *,
    points: int,
    seed: int = 0,
    like: Workload = USUAL,
    progress: Progress,
) -> list[Loss]:
    """The points at which `first` loses most to `second`, the worst one first; at most one per shape.

    Both are policies with any knobs: "streamed slots=3". Steps are `like` this one but for their shape.

    Raises:
        InputError: fewer than one point, a policy or knob that is not known, a policy that refuses every point, two
            that do not do the same or are called alike, a measured profile, or a machine on which every point takes
            too long.
        Refused: the machine states no rate of products in that format.
        ScheduleError: a policy's schedule is not safe.
    """
    if points < 1:
        raise InputError("an adversary needs at least one point to try")
    if machine.mode == "measured":
        raise InputError(
            f"{machine.name} is a measured profile, which knows the shapes and the speeds it was measured with and no "
            "others: an adversary needs a datasheet; megatrain hardware lists them"
        )
    policies.require_apart([first, second])
    policies.require_alike({text: policies.trains(policies.with_knobs(text)[0]) for text in (first, second)})
    chance = random.Random(seed)
    found: list[tuple[float, Point, Loss]] = []
    refused: list[InputError] = []
    for number in range(points):
        worst = sorted(found, key=lambda entry: -entry[0])[:NEAR]
        near = worst and chance.random() < AROUND
        point = _moved(chance.choice(worst)[1], chance) if near else _drawn(chance)
        try:
            loss = _compared(first, second, machine, point, like)
        except (policies.PolicyError, TooLong) as error:
            refused.append(error)
            loss = None
        if loss is not None:
            found.append((loss.ratio, point, loss))
        progress(number + 1, max((ratio for ratio, _, _ in found), default=0.0))
    if len(refused) == points:
        raise refused[-1]
    best: dict[tuple[int, ...], Loss] = {}
    for _, _, loss in sorted(found, key=lambda entry: -entry[0]):
        best.setdefault((loss.blocks, loss.hidden, loss.seq_len, loss.micro_batch_size, loss.accumulation), loss)
    return list(best.values())


def unlike(found: Sequence[Loss]) -> str:
    """What is unfair about it, in a sentence: policies that keep another state; empty if nothing is."""
    pair = next(
        ((loss.first_state, loss.second_state) for loss in found if loss.first_state != loss.second_state), None
    )
    if pair is None:
        return ""
    return f"They do not keep the same state: {found[0].first} {pair[0]}, {found[0].second} {pair[1]}."


def frame(found: Sequence[Loss]) -> pd.DataFrame:
    """A row per point."""
    import pandas as pd

    return pd.DataFrame([asdict(loss) for loss in found], columns=list(Loss.__dataclass_fields__))


def _drawn(chance: random.Random) -> Point:
    """Any point of the box: machines are factors, evenly spread over their logarithm."""
    point: Point = {path: factor ** chance.uniform(-1.0, 1.0) for path, factor in MACHINE.items()}
    return point | {name: chance.choice(values) for name, values in SHAPES.items()}


def _moved(point: Point, chance: random.Random) -> Point:
    """A point that differs in one number."""
    name = chance.choice(list(point))
    if name in SHAPES:
        return point | {name: chance.choice(SHAPES[name])}
    limit = MACHINE[name]
    return point | {name: min(max(point[name] * 1.5 ** chance.uniform(-1.0, 1.0), 1 / limit), limit)}


def _compared(first: str, second: str, machine: HardwareProfile, point: Point, like: Workload) -> Loss | None:
    """Both policies at a point, with a step that is like that one; None where one of them does not fit.

    Raises PolicyError where one refuses, TooLong where an op takes too long to be predicted.
    """
    changes = _changes(machine, point, like.matmul)
    profile = override(machine, changes)
    model = _model(int(point["hidden"]), int(point["blocks"]))
    workload = replace(
        like,
        micro_batch_size=int(point["micro_batch_size"]),
        seq_len=int(point["seq_len"]),
        accumulation=int(point["accumulation"]),
    )
    predictions, labels, states = [], [], []
    for text in (first, second):
        name, knobs = policies.with_knobs(text)
        schedule = policies.build(name, model, workload, memory_of(profile), **knobs)
        labels.append(" ".join([schedule.label, *(f"{knob}={value}" for knob, value in knobs.items())]))
        if name not in policies.names():
            verify(schedule)  # ours are safe at every shape, and a proof takes as long as a simulation
        states.append(schedule.workload.precision)
        predictions.append(predict(schedule, profile))
    if not all(prediction.fits for prediction in predictions):
        return None
    times = [prediction.period_ns / 1e9 for prediction in predictions]
    return Loss(
        first=labels[0],
        second=labels[1],
        ratio=times[0] / times[1],
        precision=like.precision,
        optimizer=like.optimizer,
        grad_clip=like.grad_clip,
        recompute=like.recompute,
        matmul=like.matmul or "none",
        first_s=times[0],
        second_s=times[1],
        around=machine.name,
        machine=", ".join(change.replace("=", " ") for change in changes),
        first_binds=predictions[0].binding,
        second_binds=predictions[1].binding,
        first_state=states[0],
        second_state=states[1],
        **{name: int(point[name]) for name in SHAPES},
    )


def _model(hidden: int, blocks: int) -> ModelSpec:
    """A Llama-like model of that width; its vocabulary is small, so that few blocks say what many would."""
    heads = hidden // HEAD
    return replace(
        presets.load("llama-3.1-8b"),
        name=f"width {hidden}",
        hidden_size=hidden,
        intermediate_size=7 * hidden // 2,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        num_key_value_heads=max(heads // 4, 1),
        vocab_size=32000,
    )


def _duplex(machine: HardwareProfile, h2d: float, d2h: float) -> float:
    """What directions of these bandwidths have together; no less than either."""
    links = machine.links
    share = links.duplex.value / (links.h2d.bandwidth.value + links.d2h.bandwidth.value)
    return max((h2d + d2h) * share, h2d, d2h)


def _changes(machine: HardwareProfile, point: Point, matmul: str | None = None) -> list[str]:
    """The machine's numbers times their factors, to three digits; the duplex as large a share of both directions.

    What cannot exceed the host's memory bandwidth, such as a drive's rates, is no more than that. Where blocks multiply
    in fewer bits, that rate has the factor of the usual one.
    """
    values: dict[str, float] = {}
    factors = {path: point[path] for path in MACHINE}
    if matmul is not None and lookup(machine, "gpu.fp8_flops") is not None:
        factors["gpu.fp8_flops"] = point["gpu.matmul_flops"]
    for path, factor in factors.items():
        value = lookup(machine, path)
        assert value is not None, "every machine has these"
        values[path] = float(f"{value.value * factor:.3g}")
    memory = values["host.memory_bandwidth"]
    for path, limit in CEILINGS:
        if limit == "host.memory_bandwidth":
            own = lookup(machine, path)
            if values.get(path, 0.0 if own is None else own.value) > memory:
                values[path] = memory
    values["links.duplex"] = _duplex(machine, values["links.h2d.bandwidth"], values["links.d2h.bandwidth"])
    return [f"{path}={_told(value, NUMBERS[path].unit)}" for path, value in values.items()]


def _told(value: float, dimension: str) -> str:
    """A number in the unit people use for its size."""
    number, unit = in_largest_unit(value, dimension)
    return f"{number:g}{unit}"
