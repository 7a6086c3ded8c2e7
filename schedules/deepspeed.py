"""What DeepSpeed's policies have in common: sub-groups, buckets, the fetch of weights and the way of gradients.

A layer goes as a whole where DeepSpeed goes by tensor. On one GPU nothing is partitioned and nothing gathered.
Source: DeepSpeed edaa722 (0.19.6 development), runtime/zero: stage3.py, partitioned_param_coordinator.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Literal

from schedules.buffers import Held
from schedules.end_layers import end_buffers
from schedules.errors import ProgramError
from schedules.kept_activations import Kept
from schedules.model import ModelSpec
from schedules.op import Kind, Stream, Tier
from schedules.program import Program
from schedules.sweep import Place, layer_visits, sweep
from schedules.workload import Workload

Master = Literal["fp32", "weights"]  # the optimizer's own weights and gradients: fp32, or of the weights' type


def with_master(workload: Workload) -> Workload:
    """The workload with the fp32 master and moments that these systems keep: all precisions but fp32 become bf16_fp32.

    Smaller moments come without such a master: DeepSpeed's `bf16_optimizer_states` asks for bf16 master weights
    (runtime/config.py).
    """
    return workload if workload.precision == "fp32" else replace(workload, precision="bf16_fp32")


def begin(model: ModelSpec, workload: Workload, master: Master) -> Program:
    """The program to write the step in. Raises ProgramError where a master of the weights' type has no meaning."""
    if master == "fp32":
        p = Program(model, with_master(workload))
        reserve_master(p, model.layers)
        return p
    if workload.precision not in ("bf16", "bf16_16bit"):
        raise ProgramError(
            "master=weights is for bf16 weights with moments of 32 or 16 bits, precisions bf16 and bf16_16bit, "
            f"not {workload.precision}"
        )
    p = Program(model, workload)
    p.reserve("master", model.total_params * workload.bytes.weight, Tier.HOST)
    return p


def reserve_master(p: Program, layers: Sequence[int], tier: Tier = Tier.HOST) -> None:
    """Room for the fp32 master of these layers where the weights are fp32 too: DeepSpeed keeps both, whatever the type.

    The optimizer steps the one and casts it to the other; here it steps the weights, and no op touches the master.
    """
    if layers and p.workload.precision == "fp32":
        nbytes = sum(map(p.model.params, layers)) * p.workload.bytes.weight
        p.reserve("master" if tier == Tier.HOST else f"master.{tier}", nbytes, tier)


def step_on_device(p: Program, layers: Sequence[int]) -> None:
    """What the device's step of these layers needs lives there; the master of all others has room on the host."""
    p.keep_on_device(*(t for i in layers for t in (p.weight(i), p.state(i), p.grad(i, wide=True))))
    reserve_master(p, layers, Tier.DEVICE)
    reserve_master(p, [i for i in p.model.layers if i not in layers])


def flat_grad(p: Program, i: int) -> Held:
    """The optimizer's own gradient of layer i where its master is bf16 (`bf16_master_weights_and_grads`)."""
    grad = p.grad(i)
    return p.buffer(f"flat.{grad}", Tier.HOST), grad


def sub_groups(model: ModelSpec, size: int) -> list[list[int]]:
    """The layers in order, a group closed as soon as it has `size` parameters."""
    groups: list[list[int]] = [[]]
    for i in model.layers:
        if sum(map(model.params, groups[-1])) >= size and groups[-1]:
            groups.append([])
        groups[-1].append(i)
    return groups


def optimizer_step(
    p: Program,
    group: Sequence[int],
    *,
    stream: Stream = Stream.HOST,
    at: Mapping[str, str] | None = None,
    wide: bool = True,
) -> None:
    """The optimizer's step on a sub-group, three passes over its memory: scale, Adam, cast to the compute type.

    `at` is tensor -> buffer for what is not at home. Gradients are fp32 ones, or those of `flat_grad` if not `wide`.
    """
    where = at or {}

    def held(tensor: str) -> Held:
        return where.get(tensor) or p.home(tensor), tensor

    def grad(i: int) -> Held:
        return held(p.grad(i, wide=True)) if wide else flat_grad(p, i)

    for i in group:
        p.scale(i, grad=grad(i), stream=stream)
    for i in group:
        (weights, _), (state, _) = held(p.weight(i)), held(p.state(i))
        p.update(i, grad=grad(i), weights=weights, state=state, scaled=True, stream=stream)
    for i in group:
        cast(p, held(p.weight(i)), stream)


def cast(p: Program, weights: Held, stream: Stream = Stream.HOST) -> None:
    """The pass that casts the master to the weights. Adam has written them already: it reads and writes them."""
    p.cast(weights, weights, stream=stream)


def upload(p: Program, group: Sequence[int], device: Mapping[int, str]) -> None:
    """New weights of a sub-group go up to their buffers on the device, the host waiting for each copy."""
    for i in group:
        p.prefetch(p.weight(i), into=device[i], stream=Stream.COMPUTE, blocking=True)


class Bucket:
    """Device memory in which gradients gather until the next one would make them more than `size` elements.

    Blocks' gradients take turns in `count` buckets, next to the one that backward is writing; embedding and
    head have buffers of their own. `leave` takes (layer, buffer) pairs and their micro-batch off the device.
    """

    def __init__(
        self, p: Program, *, size: int, count: int, leave: Callable[[Sequence[tuple[int, str]], int], None]
    ) -> None:
        self._program, self._size, self._leave = p, size, leave
        smallest = min(map(p.model.params, p.model.blocks))
        room = min(max(size // smallest, 1), p.model.num_hidden_layers)
        self._ring = p.slots("bucket", count * room + 1)
        self._ends = end_buffers(p, "grad")
        self._gathered: list[tuple[int, str]] = []

    def grad(self, i: int) -> str:
        """The buffer for layer i's gradient, empty."""
        return self._ends[i] if i in self._ends else self._ring.next()

    def add(self, i: int, buffer: str, m: int) -> None:
        """Micro-batch m's gradient of layer i is in `buffer`. What was there leaves if not all fits together."""
        if self._gathered and sum(map(self._program.model.params, [i, *(j for j, _ in self._gathered)])) > self._size:
            self.flush(m)
        self._gathered.append((i, buffer))

    def flush(self, m: int) -> None:
        """All that is there leaves."""
        leaving, self._gathered = self._gathered, []
        self._leave(leaving, m)
        for _, buffer in leaving:
            self._program.discard(buffer)


class Fetch:
    """ZeRO-3's weights: the host waits for each layer's, and for all on their way, then sends for the next.

    Blocks' slots hold `max_live` parameters, but never fewer layers than are in use at once; embedding and head
    have buffers of their own. With `stage`, which brings a layer's weights into a host buffer, those of the two
    layers after the ones on their way are staged too.
    """

    def __init__(
        self,
        p: Program,
        *,
        kept: Kept,
        stream: Stream,
        max_live: int,
        ahead: int = 1,
        blocking: bool = False,
        stage: Callable[[int], str] | None = None,
    ) -> None:
        model = p.model
        self._program, self._kept, self._stream, self._ahead = p, kept, stream, ahead
        self._blocking, self._stage = blocking, stage
        live = min(max_live // model.params(model.largest_block), model.num_hidden_layers)
        self._slots = p.slots("weight", max(1 + ahead, live))
        self._ends = end_buffers(p, "weight")
        self._visits: deque[int] = deque()
        self._coming: deque[Held] = deque()

    def weights(self, i: int) -> str:
        """The device buffer with layer i's weights."""
        p = self._program
        if not self._visits:
            self._begin()
        due = self._visits.popleft()  # not within the assertion, which `python -O` leaves out
        assert due == i, "layers are visited in the order of the trace"
        if not self._coming:
            self._coming.append(self._fetch(i))
        p.synchronize(*self._coming, kind=Kind.PREFETCH, name=f"H.{p.model.layer_name(i)}")
        buffer, _ = self._coming.popleft()
        for coming in islice(self._visits, len(self._coming), self._ahead):
            self._coming.append(self._fetch(coming))
        if self._stage is not None:
            for coming in self._absent(islice(self._visits, self._ahead, self._ahead + 2)):
                self._stage(coming)
        return buffer

    def _begin(self) -> None:
        """A micro-batch starts with nothing fetched."""
        self._visits = deque(layer_visits(self._program.model, self._kept))
        self._slots.clear()

    def _fetch(self, i: int) -> Held:
        p, weight = self._program, self._program.weight(i)
        slot = self._slots.holding(weight)
        if slot is None:
            source = self._stage(i) if self._stage else None
            slot = self._ends[i] if i in self._ends else self._slots.next()
            p.prefetch(weight, into=slot, out_of=source, stream=self._stream, blocking=self._blocking)
            if source is not None:
                p.discard(source)  # free for the next layer's
        return slot, weight

    def _absent(self, layers: Iterator[int]) -> list[int]:
        return [i for i in layers if self._program.weight(i) not in self._slots]


class Reduction:
    """The way of ZeRO-3's gradients: down, the same values up again, and, when whole, down once more in fp32.

    Under accumulation the sum comes up instead, and goes down with the new gradient added. At most two
    hand-overs are under way: the host waits for the older before a third (DeepSpeed before a fourth: 0.3 % faster at
    most). The fp32 gradients of layers `on_device` stay on the device. `land` takes (layer, device buffer) to the
    host, where the home of fp32 gradients is not. If not `wide`, they go down the last time as they are, to the
    buffers of `flat_grad`.
    """

    def __init__(
        self,
        p: Program,
        *,
        stream: Stream,
        on_device: Collection[int] = (),
        blocking: bool = False,
        blocking_wide: bool = False,
        land: Callable[[int, str], Held] | None = None,
        wide: bool = True,
    ) -> None:
        self._program, self._stream, self._on_device = p, stream, on_device
        self._blocking, self._blocking_wide = blocking, blocking or blocking_wide
        self._land = land or self._down
        self._sum, self._wide = p.buffer("sum"), p.buffer("wide") if wide else None
        self._outstanding: list[Held] = []

    def reduce(self, grads: Sequence[tuple[int, str]], m: int) -> None:
        """Hand over the gradients of micro-batch m in these (layer, buffer) pairs."""
        if len(self._outstanding) >= 2:
            self._program.synchronize(self._outstanding[-2], kind=Kind.OFFLOAD, name="H.bucket")
        self._outstanding.append([self._reduce(i, m, bucket) for i, bucket in grads][-1])

    def wait(self, name: str) -> None:
        """The host waits for all that is under way."""
        self._program.synchronize(self._outstanding[-1], kind=Kind.OFFLOAD, name=name)

    def finish(self) -> None:
        """A micro-batch is over: the host waits, and the next one starts with no gradient under way."""
        self.wait("H.epilogue")
        self._outstanding = []

    def _reduce(self, i: int, m: int, bucket: str) -> Held:
        p, grad = self._program, self._program.grad(i)
        if m == 0:
            p.offload(grad, out_of=bucket, stream=self._stream, blocking=self._blocking)
        p.prefetch(grad, into=self._sum, stream=self._stream, blocking=self._blocking)
        if m > 0:
            p.accumulate(i, out_of=bucket, into=self._sum, stream=self._stream)
            p.offload(grad, out_of=self._sum, stream=self._stream, blocking=self._blocking)
        p.discard(bucket)
        if m != p.workload.microbatches[-1]:
            return p.home(grad), grad
        if p.workload.grad_clip is not None:
            p.norm([(self._sum, grad)], stream=self._stream, name=f"N.{p.model.layer_name(i)}")
        if self._wide is None:
            flat, _ = flat_grad(p, i)
            return p.offload(grad, out_of=self._sum, into=flat, stream=self._stream, blocking=self._blocking_wide), grad
        wide = p.grad(i, wide=True)
        buffer = p.home(wide) if i in self._on_device else self._wide
        p.cast((self._sum, grad), (buffer, wide), stream=self._stream)
        return (buffer, wide) if i in self._on_device else self._land(i, buffer)

    def _down(self, i: int, buffer: str) -> Held:
        p, wide = self._program, self._program.grad(i, wide=True)
        return p.offload(wide, out_of=buffer, stream=self._stream, blocking=self._blocking_wide), wide


def micro_batches(
    p: Program,
    *,
    weights: Place,
    grad: Place,
    done: Callable[[int, str, int], None],
    end: Callable[[int], None],
    kept: Kept,
) -> None:
    """Forward and backward of one micro-batch after another, each of which `done` and `end` are told.

    `weights`, `grad` and `done` are as in `sweep`; `end` is called after a micro-batch's last gradient.
    """

    def run(m: int) -> None:
        sweep(p, [m], weights=weights, grad=grad, done=lambda i, buffer: done(i, buffer, m), kept=kept)
        end(m)

    for m in p.workload.microbatches:
        run(m)
