"""The sequential program that a policy writes: one thing after another, over named buffers.

The program knows what each op touches and what it costs in bytes and FLOPs; hazards, waits and sizes follow.
A policy decides only order and place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, get_args

from schedules import tensor as tensors
from schedules import trained
from schedules.activations import ActivationBuffers, never_freed
from schedules.buffers import Buffers, Held, held, index
from schedules.errors import ProgramError
from schedules.hazards import minimal_waits
from schedules.model import ModelSpec
from schedules.most_ops import require_few
from schedules.op import Kind, Op, Phase, Stream, Tier
from schedules.optimizer import matrices
from schedules.quantised import is_quantised
from schedules.ring import Ring
from schedules.schedule import Knob, Schedule
from schedules.tensor import Part, describe, parse
from schedules.whole_numbers import fault
from schedules.words import listed, one_of, own_name
from schedules.workload import MemoryBudget, Workload

Keep = Literal["all", "input", "nothing"]
_KEEP = get_args(Keep)


class Program(Buffers):
    """Builds a schedule op by op, in the order in which one thread would do the work.

    Activations live in device buffers that are taken and given back as the program goes. `fused` says whether the
    system's layers run in fused kernels: it decides what their compute ops move through device memory.
    """

    def __init__(self, model: ModelSpec, workload: Workload, *, staleness: int = 0, fused: bool = True) -> None:
        super().__init__(model, workload)
        if wrong := fault(staleness):
            raise ProgramError(f"staleness {wrong}")
        self._staleness = staleness
        self._fused = fused
        self._ops: list[Op] = []
        self._names: dict[str, int] = {}
        self._parts_left: dict[int, int] = {}  # layer -> how many parts of its state are yet to be updated
        # it knows nothing of the program: in a circle of references ops would live until garbage is looked for
        self._activations = ActivationBuffers(self._amounts.tensor)

    # ---- copies

    def prefetch(
        self,
        tensor: str,
        *,
        into: str,
        out_of: str | None = None,
        stream: Stream = Stream.H2D,
        blocking: bool = False,
    ) -> str:
        """Copy `tensor` toward the GPU, from its home unless `out_of` names another buffer. Returns `into`."""
        source = out_of or self.home(tensor)
        self._copy(Kind.PREFETCH, tensor, source, into, stream, blocking)
        return into

    def load(self, tensor: str, into: Ring | str, *, stream: Stream = Stream.H2D, blocking: bool = False) -> str:
        """The slot of a ring, or the buffer, that holds `tensor`; copies it there from its home unless it is there."""
        if isinstance(into, Ring):
            if (slot := into.holding(tensor)) is not None:
                return slot
            into = into.next()
        elif self.holds(into) == tensor:
            return into
        return self.prefetch(tensor, into=into, stream=stream, blocking=blocking)

    def offload(
        self,
        tensor: str,
        *,
        out_of: str,
        into: str | None = None,
        stream: Stream = Stream.D2H,
        blocking: bool = False,
    ) -> str:
        """Copy `tensor` away from the GPU, to its home unless `into` names another buffer. Returns the target.

        If `out_of` holds a whole gradient and `tensor` is a part of it, that part is copied.
        """
        target = into or self.home(tensor)
        self._copy(Kind.OFFLOAD, tensor, out_of, target, stream, blocking)
        return target

    def _copy(self, kind: Kind, tensor: str, source: str, target: str, stream: Stream, blocking: bool) -> None:
        name, whole = parse(tensor), tensors.whole(tensor)
        self._emit(
            f"{'P' if kind == Kind.PREFETCH else 'O'}.{tensor}",
            kind,
            Phase.COPY,
            stream,
            layer=self.model.layer_index(name.layer) if name.layer else None,
            microbatch=name.microbatch,
            reads=[(source, whole if self.holds(source) == whole else tensor)],
            writes=[(target, tensor)],
            nbytes=self.nbytes(tensor),
            blocking=blocking,
        )

    def evict(self, tensor: str, *, tier: Tier = Tier.HOST, hold: bool = False) -> str:
        """Move a live activation from the device to the host, or from there to NVMe, and give its buffer back.

        With `hold` only once `release` is called with the buffer, which is returned: until then nothing else is put
        there, and so nothing has to wait for the copy.
        """
        source = self._activations.where(tensor)
        stream = Stream.NVME_WRITE if tier == Tier.NVME else Stream.D2H
        self.offload(tensor, out_of=source, into=self._take(tensor, tier, hold=hold), stream=stream)
        self.discard(source)
        return source

    def release(self, buffer: str) -> None:
        """Give back a buffer that `evict` has held. Raises ProgramError if it is none."""
        self._activations.release(buffer)

    def restore(self, tensor: str, *, tier: Tier = Tier.DEVICE) -> None:
        """Bring an evicted activation back to the device, or from NVMe to the host."""
        source = self._activations.where(tensor)
        stream = Stream.NVME_READ if tier == Tier.HOST else Stream.H2D
        self.prefetch(tensor, into=self._take(tensor, tier), out_of=source, stream=stream)
        self.discard(source)

    # ---- compute

    def forward(
        self, i: int, m: int = 0, *, weights: str | None = None, keep: Keep = "all", blocking: bool = False
    ) -> None:
        """Run layer i (the embedding or a block) on micro-batch m.

        `weights` is the device buffer holding them (their home if left out), whole or quantised: an op then makes each
        matrix whole that it multiplies with. `keep` is what stays for the
        backward: "all" the input and the activations inside, "input" only the input, "nothing" neither.
        """
        i, m = index(i, "forward"), index(m, "forward")
        if i == self.model.head:
            raise ProgramError("the head has no forward of its own: loss() is its forward and backward")
        if i == self.model.embed:
            writes = [self._new(self.output(i, m))]
            self._compute(Phase.EMBED, i, m, weights, writes=writes, output=True, blocking=blocking)
            return
        self._run_block(Phase.FORWARD, i, m, weights, keep, output=True, blocking=blocking)

    def recompute(
        self,
        i: int,
        m: int = 0,
        *,
        weights: str | None = None,
        keep: Keep = "all",
        output: bool = False,
        blocking: bool = False,
    ) -> None:
        """Run block i again for its activations (`keep="all"`), for its output, or for both."""
        i, m = index(i, "recompute"), index(m, "recompute")
        if keep == "all" and self.saved(i, m) in self._activations:
            at = f"({self.model.layer_name(i)}, {m})"
            raise ProgramError(
                f'{describe(self.saved(i, m))}, are kept already: call forward{at} with keep="input", '
                f"or leave out recompute{at}"
            )
        self._run_block(Phase.RECOMPUTE, i, m, weights, keep, output=output, blocking=blocking)

    def _run_block(
        self, phase: Phase, i: int, m: int, weights: str | None, keep: Keep, *, output: bool, blocking: bool
    ) -> None:
        if keep not in _KEEP:
            raise ProgramError(f"keep is {listed(_KEEP)}, not {keep!r}")
        if (layer := self.model.layer_name(i)) in ("embed", "head"):
            raise ProgramError(f"{phase}({layer}, {m}): only blocks run again for what they keep")
        source = self.output(i - 1, m)
        writes = [self._new(self.output(i, m))] if output else []
        if keep == "all":
            writes.append(self._new(self.saved(i, m)))
        if not writes:
            told = f"recompute({layer}, {m}) would make nothing"
            raise ProgramError(f'{told}: call it with keep="all", output=True, or both')
        reads = [(self._activations.where(source), source)]
        self._compute(phase, i, m, weights, reads=reads, writes=writes, output=output, blocking=blocking)
        if keep == "nothing":
            self.free(source)

    def loss(
        self,
        m: int = 0,
        *,
        weights: str | None = None,
        grad: str | None = None,
        embed_weights: str | None = None,
        embed_grad: str | None = None,
        blocking: bool = False,
    ) -> None:
        """Final norm, head and cross-entropy of micro-batch m, forward and backward at once.

        With tied embeddings it also reads the embedding's table and adds to its gradient. Frozen weights have no
        gradient, and a workload that only evaluates has no backward.
        """
        m = index(m, "loss")
        head, source = self.model.head, self.output(self.model.head - 1, m)
        updated = trained.layers(self.model, self.workload)
        reads = [(self._activations.where(source), source)]
        writes: list[Held] = []
        if self.model.tie_word_embeddings:
            reads.append((embed_weights or self.home(self.weight(self.model.embed)), self.weight(self.model.embed)))
            if self.model.embed in updated:
                self._add_to(self.grad(self.model.embed), embed_grad, reads, writes)
        if head in updated:
            self._add_to(self.grad(head), grad, reads, writes)
        if self.workload.task == "train":
            writes.append(self._new(self.output_grad(head - 1, m)))
        self._compute(Phase.LOSS, head, m, weights, reads=reads, writes=writes, blocking=blocking)
        self.free(source)

    def backward(
        self, i: int, m: int = 0, *, weights: str | None = None, grad: str | None = None, blocking: bool = False
    ) -> None:
        """Backward of layer i (the embedding or a block) for micro-batch m; frees what the layer kept for it.

        The gradient is added to what `grad` (its home if left out) holds if that is this layer's gradient already, and
        overwrites it otherwise.
        """
        i, m = index(i, "backward"), index(m, "backward")
        if i == self.model.head:
            raise ProgramError("the head has no backward of its own: loss() is its forward and backward")
        incoming = self.output_grad(i, m)
        reads = [(self._activations.where(incoming), incoming)]
        writes: list[Held] = []
        self._add_to(self.grad(i), grad, reads, writes)
        if i == self.model.embed:
            self._compute(Phase.BACKWARD, i, m, None, reads=reads, writes=writes, blocking=blocking, bound=False)
            self.free(incoming)
            return
        for kept in (self.output(i - 1, m), self.saved(i, m)):
            reads.append((self._activations.where(kept), kept))
        writes.append(self._new(self.output_grad(i - 1, m)))
        self._compute(Phase.BACKWARD, i, m, weights, reads=reads, writes=writes, blocking=blocking)
        self.free(incoming, self.output(i - 1, m), self.saved(i, m))

    def free(self, *activations: str) -> None:
        """Give back the buffers of activations that nobody reads any more."""
        for tensor in activations:
            self.discard(self._activations.give_back(tensor))

    def _new(self, activation: str) -> Held:
        return self._take(activation, Tier.DEVICE), activation

    def _take(self, activation: str, tier: Tier, *, hold: bool = False) -> str:
        return self._activations.take(activation, tier, self._of_activations, hold=hold)

    def _compute(
        self,
        phase: Phase,
        i: int,
        m: int,
        weights: str | None,
        *,
        reads: Sequence[Held] = (),
        writes: Sequence[Held] = (),
        output: bool = False,
        blocking: bool = False,
        bound: bool = True,
    ) -> None:
        if bound:
            adapters = [(self.home(self.adapter(i)), self.adapter(i))] if self._has_adapters(i) else []
            own = self._weights_in(weights, i)
            reads = [(weights or self.home(own), own), *adapters, *reads]
        quantised = any(parse(tensor).cls == tensors.QUANTISED for _, tensor in reads)
        flops, nbytes = self._amounts.compute(i, phase, output=output, fused=self._fused, quantised=quantised)
        letter = {Phase.RECOMPUTE: "R", Phase.BACKWARD: "B", Phase.LOSS: "L"}.get(phase, "F")
        self._emit(
            f"{letter}.{self.model.layer_name(i)}.{m}",
            Kind.COMPUTE,
            phase,
            Stream.COMPUTE,
            layer=i,
            microbatch=m,
            reads=reads,
            writes=writes,
            nbytes=nbytes,
            flops=flops,
            params=self.model.params(i),
            blocking=blocking,
        )

    def _weights_in(self, buffer: str | None, i: int) -> str:
        """Layer i's weights as a buffer has them: whole, or quantised."""
        if buffer is not None and is_quantised(self.model, i, self.workload):
            packed = self.quantised(i)
            if self.holds(buffer) == packed or self._homes.get(packed) == buffer:
                return packed
        return self.weight(i)

    def _has_adapters(self, i: int) -> bool:
        return self.workload.lora_rank is not None and self.model.is_block(i)

    def _add_to(
        self,
        grad: str,
        buffer: str | None,
        reads: list[Held],
        writes: list[Held],
    ) -> None:
        buffer = buffer or self.home(grad)
        if self.holds(buffer) == grad:
            reads.append((buffer, grad))
        writes.append((buffer, grad))

    # ---- the optimizer and its passes

    def accumulate(
        self,
        i: int,
        *,
        out_of: str,
        into: str | None = None,
        wide: bool = False,
        stream: Stream = Stream.CPU,
        fresh: bool = False,
        part: Part | None = None,
    ) -> None:
        """Add layer i's gradient in `out_of` to its sum in `into`, or at home; if there is no sum yet, store it there.

        Args:
            wide: the sum is in fp32.
            fresh: a store goes into memory that is allocated for it, whose pages the system has yet to provide.
            part: only this part of the gradient is there.
        """
        i = index(i, "accumulate")
        reads, grad = [(out_of, self.grad(i, part=part))], self.grad(i, wide=wide, part=part)
        writes: list[Held] = []
        self._add_to(grad, into, reads, writes)
        stored = self.nbytes(grad) if fresh and len(reads) == 1 else 0
        self._update(f"A.{grad}", Phase.ACCUMULATE, i, stream, reads, writes, fresh=stored)

    def cast(self, source: Held, target: Held, *, stream: Stream) -> None:
        """Copy one (buffer, tensor) to another of a different element type."""
        source, target = held(source, "cast(...)"), held(target, "cast(...)")
        layer = self.model.layer_index(parse(target[1]).layer)
        self._update(f"C.{target[1]}", Phase.CAST, layer, stream, [source], [target])

    def dequantise(self, i: int, *, into: str, out_of: str | None = None) -> str:
        """Make the whole weights of block i from its quantised ones, on the device. Returns `into`.

        The quantised weights are read at home unless `out_of` names another buffer.
        """
        i = index(i, "dequantise")
        packed = self.quantised(i)
        self.cast((out_of or self.home(packed), packed), (into, self.weight(i)), stream=Stream.COMPUTE)
        return into

    def norm(self, grads: Iterable[Held], *, stream: Stream = Stream.CPU, name: str = "N") -> None:
        """Add the squares of these (buffer, gradient) pairs to the global norm."""
        reads = [held(grad, "norm([...])") for grad in grads]
        writes: list[Held] = []
        self._add_to(tensors.NORM, self.buffer("norm", Tier.HOST), reads, writes)
        self._update(own_name(name, "an op"), Phase.NORM, None, stream, reads, writes)

    def scale(self, i: int, *, grad: Held, stream: Stream = Stream.CPU) -> None:
        """Multiply a gradient by the clipping coefficient: a pass over all of it, even if the coefficient is 1."""
        i, grad = index(i, "scale"), held(grad, "scale(grad=...)")
        self._update(f"S.{grad[1]}", Phase.SCALE, i, stream, [grad, *self._clip()], [grad])

    def zero(self, i: int, *, grad: Held, stream: Stream = Stream.CPU) -> None:
        """Clear a gradient buffer: a pass over memory that some systems make."""
        i, grad = index(i, "zero"), held(grad, "zero(grad=...)")
        self._update(f"Z.{grad[1]}", Phase.ZERO, i, stream, [], [grad])
        self.discard(grad[0])

    def update(
        self,
        i: int,
        *,
        grad: Held | None = None,
        weights: str | None = None,
        state: str | None = None,
        scaled: bool = False,
        stream: Stream = Stream.CPU,
        part: Part | None = None,
        carried: bool = False,
    ) -> None:
        """The optimizer's step on layer i, or on its adapters, in the buffers named, or at home.

        With gradient clipping it reads the global norm, unless the gradient was `scaled` before. Muon updates a block's
        matrices, and only on the device. Copies of the weights in other buffers are out of date afterwards.

        A state that is in parts is updated part by part, in any order. Each of these updates changes the same `part` of
        the weights, and reads the whole gradient or that part of it.

        With `carried` the gradient is that of the step before, which must be where this reads it: written there later
        in the program, or copied there from where it is written. It comes before the layer's forward.
        """
        i = index(i, "update")
        if stream != Stream.COMPUTE and matrices(self.model, self.workload, i):
            by = f"{self.workload.optimizer} updates blocks on the device's compute stream, by products of matrices"
            cure = "take another policy or optimizer, or write update(..., stream=Stream.COMPUTE)"
            raise ProgramError(f"update({self.model.layer_name(i)}) is queued on {stream}: {by}; {cure}")
        grad = held(grad or self.at_home(self.grad(i)), "update(grad=...)")
        if grad not in self._accesses and not carried:
            missing = "backward" if self._tiers.get(grad[0]) == Tier.DEVICE else f'offload("{grad[1]}", out_of=...)'
            raise ProgramError(
                f"update({self.model.layer_name(i)}) reads {describe(grad[1])} from {grad[0]}, where nothing has put "
                f"it: {missing} is missing"
            )
        updated = self.adapter(i) if self._has_adapters(i) else self.weight(i)
        own = [
            (state or self.home(self.state(i, part)), self.state(i, part)),
            (weights or self.home(updated), updated),
        ]
        reads = [grad, *own, *([] if scaled else self._clip())]
        name = f"U.{self.model.layer_name(i)}"
        self._update(name if part is None else f"{name}.{part}", Phase.ADAM, i, stream, reads, own)
        target, weight = own[1]
        if not self._parts_left.get(i):  # nothing of it was updated yet
            for buffer in self._holding(weight) - {target}:
                self.discard(buffer)
            self._parts_left[i] = 1 if part is None else part.of
        self._parts_left[i] -= 1
        if not self._parts_left[i] or parse(grad[1]).part is not None:
            self.discard(grad[0])

    def _clip(self) -> list[Held]:
        return [] if self.workload.grad_clip is None else [(self.buffer("norm", Tier.HOST), tensors.NORM)]

    def _update(
        self,
        name: str,
        phase: Phase,
        i: int | None,
        stream: Stream,
        reads: Sequence[Held],
        writes: Sequence[Held],
        fresh: int = 0,
    ) -> None:
        part = tensors.part_of(tensor for _, tensor in writes)
        touched = (tensor for _, tensor in [*reads, *writes])
        params, flops, nbytes = self._amounts.update(i, phase, touched, part)
        self._emit(
            name,
            Kind.UPDATE,
            phase,
            stream,
            layer=i,
            reads=reads,
            writes=writes,
            nbytes=nbytes,
            flops=flops,
            params=params,
            fresh=fresh,
        )

    def synchronize(self, *until: Held, kind: Kind = Kind.UPDATE, name: str = "H") -> None:
        """The issuing host waits until these (buffer, tensor) pairs are ready."""
        reads = [held(one, "synchronize(...)") for one in until]
        self._emit(own_name(name, "an op"), kind, Phase.SYNC, Stream.HOST, reads=reads)

    # ---- fitting

    def device_bytes(self) -> int:
        """Device bytes that the program takes as far as it is written, its largest workspace included."""
        ran = {
            (op.layer, op.phase, op.reads_quantised) for op in self._ops if op.takes_workspace and op.layer is not None
        }
        workspaces = (self._amounts.workspace(i, phase, quantised=quantised) for i, phase, quantised in ran)
        return self._allocated(Tier.DEVICE) + max(workspaces, default=0)

    def device_room(self, memory: MemoryBudget) -> int:
        """Device bytes that are left beside the program as far as it is written, negative if there are too few."""
        return memory.device_beside(self._allocated(Tier.HOST)) - self.device_bytes()

    def _allocated(self, tier: Tier) -> int:
        return sum(buffer.nbytes for buffer in self._used() if buffer.tier == tier)

    # ---- the schedule

    def build(self, *, policy: str, knobs: Mapping[str, Knob] | None = None, waits: bool = True) -> Schedule:
        """The finished schedule, with the waits that its hazards need; without `waits` it can only be weighed.

        Raises:
            ProgramError: an activation was made and never freed, so that it would grow from step to step.
        """
        if self._activations.live:
            raise ProgramError(never_freed(self._activations.live, self._ops, self.model, self.workload))
        return Schedule(
            ops=tuple(self._ops),
            buffers=self._used(),
            waits=minimal_waits(self._ops) if waits else (),
            model=self.model,
            workload=self.workload,
            policy=policy,
            knobs=dict(knobs or {}),
            staleness=self._staleness,
        )

    def _emit(
        self,
        name: str,
        kind: Kind,
        phase: Phase,
        stream: Stream,
        *,
        layer: int | None = None,
        microbatch: int | None = None,
        reads: Sequence[Held],
        writes: Sequence[Held] = (),
        nbytes: int = 0,
        flops: int = 0,
        params: int = 0,
        fresh: int = 0,
        blocking: bool = False,
    ) -> None:
        require_few(len(self._ops) + 1)
        if not isinstance(blocking, bool):
            raise ProgramError(f"{name}: blocking is True or False, not {blocking!r}")
        known = self._accesses  # most are: no call for them
        read = tuple([known.get(held) or self._access(name, *held) for held in reads])
        written = tuple([known.get(held) or self._access(name, *held) for held in writes])
        self._holds.update(writes)
        self._names[name] = times = self._names.get(name, 0) + 1
        if times > 1:
            name = f"{name}#{times}"
        self._ops.append(
            Op(
                name=name,
                kind=one_of(Kind, kind, name),
                phase=phase,
                stream=one_of(Stream, stream, name),
                layer=layer,
                microbatch=microbatch,
                reads=read,
                writes=written,
                nbytes=nbytes,
                flops=flops,
                params=params,
                fresh=fresh,
                blocking=blocking,
            )
        )
