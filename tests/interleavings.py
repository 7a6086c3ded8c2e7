"""Steps whose micro-batches take turns as chance has it, each block's weights, state and activations somewhere else."""

from __future__ import annotations

import random
from collections.abc import Iterator

from schedules.model import ModelSpec
from schedules.op import Stream, Tier
from schedules.program import Program
from schedules.schedule import Schedule
from schedules.workload import Workload

RESIDENT, HELD, STREAMED = "resident", "held", "streamed"
ORDERS = ("micro-batches", "layers", "alike", "alike")  # "alike": mostly what needs the weights that are there


def interleaved(model: ModelSpec, workload: Workload, chance: random.Random) -> Schedule:
    """A step without clipping. Embedding and head live on the device, each block there, on the host, or on a drive."""
    step = _Step(model, workload, chance)
    for place, i, m in step.order():
        if place == 0:
            step.p.forward(i, m)
        elif place <= step.half:
            step.forward(i, m)
        elif place == step.half + 1:
            step.p.loss(m)
        elif i != model.embed:
            step.backward(i, m)
        else:
            step.p.backward(i, m)
    for i in sorted(step.late):
        step.update(i)
    for i in (model.embed, model.head):
        step.p.update(i, stream=Stream.COMPUTE)
    return step.p.build(policy="interleaved")


class _Step:
    def __init__(self, model: ModelSpec, workload: Workload, chance: random.Random) -> None:
        self.chance, self.model, self.micro_batches = chance, model, workload.microbatches
        self.half = len(model.blocks)
        self.p = p = Program(model, workload)
        self.where = {i: chance.choice([RESIDENT, HELD, STREAMED, STREAMED, STREAMED]) for i in model.blocks}
        on_device = [model.embed, model.head, *(i for i in model.blocks if self.where[i] == RESIDENT)]
        p.keep_on_device(*(tensor for i in on_device for tensor in (p.weight(i), p.grad(i), p.state(i))))
        drive, others = chance.random() < 0.5, [i for i in model.blocks if i not in on_device]
        self.state_on_drive = {i for i in others if drive and chance.random() < 0.7}
        self.weights_on_drive = {i for i in self.state_on_drive if chance.random() < 0.5}
        p.keep_on_nvme(*map(p.state, self.state_on_drive), *map(p.weight, self.weights_on_drive))
        self.sums_on_host = {i for i in others if len(self.micro_batches) > 1 and chance.random() < 0.3}
        ways = chance.choice([["kept"], ["away"], ["again"], ["kept", "away", "again"]])
        ways += ["on drive"] if drive and "away" in ways else []
        self.way = {(i, m): chance.choice(ways) for i in model.blocks for m in self.micro_batches}
        self.weights, self.slabs = p.slots("weight", chance.choice([1, 1, 2, 3])), p.slots("slab", 2, Tier.HOST)
        self.states = p.slots("state", chance.choice([1, 2, 4]), Tier.HOST) if self.state_on_drive else None
        self.from_drive = p.slots("read", chance.choice([1, 2]), Tier.HOST) if self.weights_on_drive else None
        self.own = {i: p.buffer(f"held{i}") for i in others if self.where[i] == HELD}
        self.sequence = chance.choice(ORDERS)
        # where a block's gradient is whole or sent away before another block has one
        passing = others if self.sequence == "layers" else self.sums_on_host
        self.grads = {i: p.buffer("grad" if i in passing else f"grad{i}") for i in others}
        self.backwards = dict.fromkeys(model.blocks, 0)
        self.may_be_late, self.late = chance.choice([0, 0, 1, self.half]), list[int]()

    def order(self) -> Iterator[tuple[int, int, int]]:
        """Ops as place in the micro-batch's step, layer and micro-batch, no more of these in flight than is drawn."""
        most = len(self.micro_batches) if self.sequence == "layers" else self.chance.choice([1, 2, 3, 8])
        layers = [*self.model.layers, *reversed(self.model.layers[:-1])]
        done, last = dict.fromkeys(self.micro_batches, 0), self.model.embed
        while ready := [m for m in self.micro_batches if done[m] < len(layers)]:
            begun = [m for m in ready if done[m]]
            ready = begun if len(begun) >= most else ready
            if self.sequence == "micro-batches":
                m = max(ready, key=lambda m: done[m])
            elif self.sequence == "layers":
                m = min(ready, key=lambda m: done[m])
            else:
                same = [m for m in ready if layers[done[m]] == last]
                m = self.chance.choice(same if same and self.chance.random() < 0.8 else ready)
            last = layers[done[m]]
            yield done[m], last, m
            done[m] += 1

    def forward(self, i: int, m: int) -> None:
        way = self.way[i, m]
        self.p.forward(i, m, weights=self.here(i), keep="input" if way == "again" else "all")
        if way in ("away", "on drive"):
            self.p.evict(self.p.saved(i, m))
        if way == "on drive":
            self.p.evict(self.p.saved(i, m), tier=Tier.NVME)

    def backward(self, i: int, m: int) -> None:
        p, way, weights, grad = self.p, self.way[i, m], self.here(i), self.grads.get(i)
        if way == "on drive":
            p.restore(p.saved(i, m), tier=Tier.HOST)
        if way in ("away", "on drive"):
            p.restore(p.saved(i, m))
        elif way == "again":
            p.recompute(i, m, weights=weights)
        p.backward(i, m, weights=weights, grad=grad)
        self.backwards[i] += 1
        whole = self.backwards[i] == len(self.micro_batches)
        if grad is not None and i in self.sums_on_host:
            p.accumulate(i, out_of=p.offload(p.grad(i), out_of=grad, into=self.slabs.next()))
            p.discard(grad)
        elif grad is not None and whole:
            p.offload(p.grad(i), out_of=grad)
        if whole and self.where[i] == RESIDENT:
            p.update(i, stream=Stream.COMPUTE)
        elif whole and len(self.late) < self.may_be_late:
            self.late.append(i)
        elif whole:
            self.update(i)

    def here(self, i: int) -> str | None:
        """The buffer with a block's weights, which come if they are not there; None: at home."""
        p, own = self.p, self.own.get(i)
        if self.where[i] == RESIDENT:
            return None
        if i not in self.weights_on_drive:
            return p.load(p.weight(i), own or self.weights)
        there = own if own and p.holds(own) == p.weight(i) else self.weights.holding(p.weight(i))
        return there or p.prefetch(p.weight(i), into=own or self.weights.next(), out_of=self.read(i))

    def read(self, i: int) -> str:
        """The host's buffer with weights of a drive."""
        assert self.from_drive is not None
        return self.p.load(self.p.weight(i), self.from_drive, stream=Stream.NVME_READ)

    def update(self, i: int) -> None:
        p = self.p
        if i not in self.state_on_drive:
            p.update(i)
            return
        assert self.states is not None
        state = p.prefetch(p.state(i), into=self.states.next(), stream=Stream.NVME_READ)
        weights = self.read(i) if i in self.weights_on_drive else None
        p.update(i, state=state, weights=weights)
        p.offload(p.state(i), out_of=state, stream=Stream.NVME_WRITE)
        if weights is not None:
            p.offload(p.weight(i), out_of=weights, stream=Stream.NVME_WRITE)
