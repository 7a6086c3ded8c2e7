"""What each op does: the one table of (kind, phase).

An op's accesses say which memory it works on; that is looked up once, before the first step. What is left for
every step are calls without lookups. Nothing here knows a policy, a stream or an order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatrain import autograd, nf4, update
from megatrain.adam import Adam
from megatrain.backend import Work
from megatrain.carried import Carried
from megatrain.documents import Documents
from megatrain.float_types import float_type
from megatrain.lifetime import released
from megatrain.sink import Sink
from megatrain.store import Store
from megatrain.template import Templates, sinks, views
from schedules import tensor as tensors
from schedules import trained
from schedules.op import Access, Kind, Op, Phase, Tier
from schedules.schedule import Schedule
from schedules.tensor import parse

NORM_CHUNK = {"cpu": 1 << 18, "cuda": 1 << 24}  # elements of one fp32 norm; norms add up in fp64

# step, layer, which of its trained parameters, the gradient of these that the optimizer applies
OnGradient = Callable[[int, int, slice, Tensor], None]


@dataclass(frozen=True)
class Batch:
    """What a step reads, on the device.

    inputs, targets: int64 [accumulation, micro_batch_size, seq_len].
    shares: what each target counts for in the loss, fp32, as they.
    documents: of each micro-batch, where no token attends to another document's; empty where any may.
    """

    inputs: Tensor
    targets: Tensor
    shares: Tensor
    documents: tuple[Documents, ...] = ()

    def documents_in(self, m: int) -> Documents | None:
        """Of a micro-batch."""
        return self.documents[m] if self.documents else None


@dataclass(frozen=True, kw_only=True)
class Actions:
    """What ops need beside their buffers: layers, hyperparameters of each step, tokens, a place for losses."""

    schedule: Schedule
    store: Store
    templates: Templates
    device: torch.device
    hyper: Callable[[int], Adam]
    carried: Carried
    on_gradient: OnGradient | None = None
    batches: dict[int, Batch] = field(default_factory=dict)  # by step
    losses: dict[int, dict[int, Tensor]] = field(default_factory=dict)  # step -> micro-batch -> its part of the mean
    squares: dict[int, Tensor] = field(default_factory=dict)  # step -> sum of the squares of all gradients, if taken

    def works(self) -> list[Work]:
        """Per op of the schedule, what it does in a given step; all memory looked up."""
        return [
            self._ending(op, _TABLE[op.kind, op.phase](self, op), ended)
            for op, ended in zip(self.schedule.ops, released(self.schedule), strict=True)
        ]

    def _ending(self, op: Op, work: Work, ended: tuple[str, ...]) -> Work:
        if not ended:
            return work
        queued = op.on_device

        def run(step: int) -> None:
            work(step)
            for buffer in ended:
                self.store.release(buffer, queued=queued)

        return run

    # ---- lookups

    def read(self, op: Op, cls: str) -> Tensor:
        """The memory of the only tensor of a class that `op` reads."""
        return self.store.tensor(_one(op.reads, cls))

    def written(self, op: Op, cls: str) -> Tensor:
        """The memory of the only tensor of a class that `op` writes."""
        return self.store.tensor(_one(op.writes, cls))

    def shapes(self, i: int) -> Mapping[str, tuple[int, ...]]:
        """Names and shapes of layer i's parameters."""
        return self.schedule.model.parameter_shapes(i)

    def trained_shapes(self, i: int) -> Mapping[str, tuple[int, ...]]:
        """Names and shapes of what is trained of layer i."""
        return trained.shapes(self.schedule.model, self.schedule.workload, i)

    def weights(self, op: Op, i: int) -> dict[str, Tensor]:
        """Layer i's parameters, adapters among them, in the buffers that `op` reads them from."""
        name = self.schedule.model.layer_name(i)
        if op.reads_quantised:
            nf4.prepare(self.device)
            dtype = float_type(self.schedule.workload.bytes.weight)
            found = nf4.packed(self.read(op, tensors.QUANTISED), self.shapes(i), dtype)
        else:
            found = views(self.store.tensor(_named(op.reads, f"{tensors.WEIGHT}.{name}")), self.shapes(i))
        if adapters := [access for access in op.reads if access.tensor == f"{tensors.ADAPTER}.{name}"]:
            found |= views(self.store.tensor(adapters[0]), self.trained_shapes(i))
        return found

    def grads(self, op: Op, i: int) -> dict[str, Sink]:
        """Where the gradient of what is trained of layer i goes: added if `op` also reads it."""
        access = _named(op.writes, f"{tensors.GRAD}.{self.schedule.model.layer_name(i)}")
        return sinks(self.store.tensor(access), self.trained_shapes(i), accumulate=access in op.reads)

    def span(self, op: Op) -> slice:
        """The trained parameters that an update is of, or a copy of a part."""
        return trained.span(self.schedule.model, self.schedule.workload, _layer(op), trained.part(op))

    def taken(self, op: Op) -> Tensor:
        """What a copy of one tensor takes: all that it reads, or the part of it that it writes."""
        (source,), (target,) = op.reads, op.writes
        memory = self.store.tensor(source)
        return memory if source.tensor == target.tensor or op.phase == Phase.CAST else memory[self.span(op)]

    def clipping(self, op: Op) -> Callable[[torch.device], Tensor | None]:
        """The factor that clips to the workload's largest norm, fp32 []; None where `op` reads no norm."""
        limit = self.schedule.workload.grad_clip
        if limit is None or not _all(op.reads, tensors.NORM):
            return lambda device: None
        squares = self.read(op, tensors.NORM)

        return lambda device: update.clipping(squares.to(device, non_blocking=True), limit)


# ---- finding accesses


def _all(accesses: tuple[Access, ...], *classes: str) -> list[Access]:
    return [access for access in accesses if parse(access.tensor).cls in classes]


def _one(accesses: tuple[Access, ...], *classes: str) -> Access:
    (found,) = _all(accesses, *classes)  # verified: there is one
    return found


def _named(accesses: tuple[Access, ...], tensor: str) -> Access:
    return next(access for access in accesses if access.tensor == tensor)


def _layer(op: Op) -> int:
    assert op.layer is not None  # verified: ops of this phase have one
    return op.layer


def _microbatch(op: Op) -> int:
    assert op.microbatch is not None
    return op.microbatch


# ---- copies


def _copy(a: Actions, op: Op) -> Work:
    (source,), (target,) = op.reads, op.writes
    move: Work | None = None
    if slab := a.store.on_drive(source):
        move = functools.partial(_on_drive, slab.read, a.store.tensor(target))
    elif slab := a.store.on_drive(target):
        move = functools.partial(_on_drive, slab.write, a.taken(op))
    if move is not None:
        return _carry_saved(a, source, target, move) if parse(source.tensor).cls == tensors.SAVED else move
    if parse(source.tensor).cls == tensors.SAVED:
        return _copy_saved(a, op)
    return functools.partial(_copy_tensor, a.taken(op), a.store.tensor(target))


def _cast(a: Actions, op: Op) -> Work:
    (source,), (target,) = op.reads, op.writes
    if parse(source.tensor).cls != tensors.QUANTISED:
        return _copy(a, op)
    run = nf4.dequantising(a.store.tensor(source), a.store.tensor(target), a.shapes(_layer(op)))
    return lambda step: run()


def _copy_tensor(source: Tensor, target: Tensor, step: int) -> None:
    target.copy_(source, non_blocking=True)


def _on_drive(move: Callable[[Tensor], None], memory: Tensor, step: int) -> None:
    move(memory)


def _carry_saved(a: Actions, source: Access, target: Access, move: Work) -> Work:
    """Bytes of activations between host and drive, with what is needed to bind them again."""

    def carry(step: int) -> None:
        move(step)
        a.store.put_saved(target, a.store.saved(source))

    return carry


def _copy_saved(a: Actions, op: Op) -> Work:
    """Activations saved in a layer leave the device as bytes, and come back into the buffer's memory."""
    (source,), (target,) = op.reads, op.writes
    store = a.store

    def leave(step: int) -> None:
        saved = store.saved(source)
        saved.copy_to(store.tensor(target))
        store.put_saved(target, saved)

    def come(step: int) -> None:
        saved, held = store.saved(source), store.tensor(source)
        if not saved.restore(held, store.memory_of_saved(target)):
            store.vacate(target)
            memory = torch.empty(saved.nbytes, dtype=torch.uint8, device=a.device)
            memory.copy_(held[: saved.nbytes], non_blocking=True)
            saved.bind(memory)
        store.put_saved(target, saved)

    return come if a.schedule.route(op)[1] == Tier.DEVICE else leave


# ---- compute


def _embed(a: Actions, op: Op) -> Work:
    table, out = a.weights(op, _layer(op))["embed_tokens.weight"], a.written(op, tensors.OUTPUT)
    m = _microbatch(op)

    def run(step: int) -> None:
        out.copy_(a.templates.embed.forward(table, a.batches[step].inputs[m]))

    return run


def _forward(a: Actions, op: Op) -> Work:
    i, m = _layer(op), _microbatch(op)
    block = a.templates.blocks[a.schedule.model.layer_kind(i)]
    params, x = a.weights(op, i), a.read(op, tensors.OUTPUT)
    outputs = [a.store.tensor(access) for access in _all(op.writes, tensors.OUTPUT)]
    kept = _all(op.writes, tensors.SAVED)
    names = a.trained_shapes(i).keys()

    def run(step: int) -> None:
        layer = block.within(a.batches[step].documents_in(m))
        if kept:
            a.store.vacate(kept[0])
            y, saved = autograd.forward(layer, params, x, trained=names, output=bool(outputs))
            a.store.put_saved(kept[0], saved)
        else:
            with torch.no_grad():
                y = layer.forward(params, x)
        for output in outputs:
            output.copy_(y)

    return run


def _loss(a: Actions, op: Op) -> Work:
    model, m, workload = a.schedule.model, _microbatch(op), a.schedule.workload
    head = a.weights(op, model.head)
    owner, name = (model.embed, "embed_tokens.weight") if model.tie_word_embeddings else (model.head, "lm_head.weight")
    table = (a.weights(op, owner) if owner != model.head else head)[name]
    hidden = a.read(op, tensors.OUTPUT)
    if workload.task == "evaluate":

        def evaluate(step: int) -> None:
            read = a.batches[step]
            losses = a.templates.head.loss(head["norm.weight"], table, hidden, read.targets[m], read.shares[m])
            a.losses[step][m] = losses

        return evaluate
    updated = trained.layers(model, workload)
    norm_sink = a.grads(op, model.head)["norm.weight"] if model.head in updated else None
    table_sink = a.grads(op, owner)[name] if owner in updated else None
    d_hidden = a.written(op, tensors.OUTPUT_GRAD)

    def run(step: int) -> None:
        read = a.batches[step]
        with torch.no_grad():
            loss = a.templates.head.loss_and_grads(
                head["norm.weight"],
                table,
                hidden,
                read.targets[m],
                read.shares[m],
                d_hidden=d_hidden,
                norm_sink=norm_sink,
                table_sink=table_sink,
            )
        a.losses[step][m] = loss

    return run


def _backward(a: Actions, op: Op) -> Work:
    i, m = _layer(op), _microbatch(op)
    grads, dy = a.grads(op, i), a.read(op, tensors.OUTPUT_GRAD)
    if i == a.schedule.model.embed:

        def run_embed(step: int) -> None:
            a.templates.embed.backward(a.batches[step].inputs[m], dy, grads["embed_tokens.weight"])

        return run_embed
    params, x, dx = a.weights(op, i), a.read(op, tensors.OUTPUT), a.written(op, tensors.OUTPUT_GRAD)
    kept = _one(op.reads, tensors.SAVED)

    def run(step: int) -> None:
        dx.copy_(autograd.backward(a.store.saved(kept), params, x, dy, grads))

    return run


# ---- passes over gradients, and the optimizer


def _accumulate(a: Actions, op: Op) -> Work:
    (target,) = op.writes
    source = next(access for access in op.reads if access != target)
    sink = Sink(a.store.tensor(target), accumulate=target in op.reads)
    return functools.partial(_put, sink, a.store.tensor(source))


def _put(sink: Sink, grad: Tensor, step: int) -> None:
    sink.put(grad)


def _zero(a: Actions, op: Op) -> Work:
    targets = [a.store.tensor(access) for access in op.writes]

    def run(step: int) -> None:
        for target in targets:
            target.zero_()

    return run


def _norm(a: Actions, op: Op) -> Work:
    (target,) = op.writes
    total, add = a.store.tensor(target), target in op.reads
    grads = [a.store.tensor(access) for access in _all(op.reads, *tensors.GRADIENTS)]
    device = grads[0].device  # of all: verified
    last = op == [each for each in a.schedule.ops if each.phase == Phase.NORM][-1]

    def run(step: int) -> None:
        parts = [part for grad in grads for part in torch.split(grad, NORM_CHUNK[device.type])]
        norms = torch.stack(torch._foreach_norm(parts, 2, torch.float32))  # read once, by few kernels on a GPU
        squares = norms.double().square_().sum().view(total.shape)
        if add:
            squares += total.to(device, non_blocking=True)
        total.copy_(squares, non_blocking=True)  # in the stream's order, and its readers wait for the op
        if last:
            a.squares[step] = squares

    return run


def _scale(a: Actions, op: Op) -> Work:
    grad, clipping = a.store.tensor(op.writes[0]), a.clipping(op)

    def run(step: int) -> None:
        factor = clipping(grad.device)
        grad.mul_(1.0 if factor is None else factor)

    return run


def _adam(a: Actions, op: Op) -> Work:
    i = _layer(op)
    source, of = _one(op.reads, *tensors.GRADIENTS), a.span(op)
    grad = a.store.tensor(source) if parse(source.tensor).part else a.store.tensor(source)[of]
    weights, state = a.written(op, trained.cls(a.schedule.workload)), a.written(op, tensors.STATE)
    clipping, apply = a.clipping(op), update.update(a.schedule, i, of)
    weights = weights[of]

    def run(step: int) -> None:
        factor = clipping(grad.device)
        if a.on_gradient is not None:
            a.on_gradient(step, i, of, grad.clone() if factor is None else grad * factor)
        apply(weights, grad, state, a.hyper(step), step, factor)

    if op not in a.carried:
        return run

    def run_of_step_before(step: int) -> None:
        if step > a.carried.applied:
            run(step - 1)

    return run_of_step_before


def _sync(a: Actions, op: Op) -> Work:
    return lambda step: None


_TABLE: dict[tuple[Kind, Phase], Callable[[Actions, Op], Work]] = {
    (Kind.PREFETCH, Phase.COPY): _copy,
    (Kind.OFFLOAD, Phase.COPY): _copy,
    (Kind.COMPUTE, Phase.EMBED): _embed,
    (Kind.COMPUTE, Phase.FORWARD): _forward,
    (Kind.COMPUTE, Phase.RECOMPUTE): _forward,
    (Kind.COMPUTE, Phase.LOSS): _loss,
    (Kind.COMPUTE, Phase.BACKWARD): _backward,
    (Kind.UPDATE, Phase.ACCUMULATE): _accumulate,
    (Kind.UPDATE, Phase.CAST): _cast,
    (Kind.UPDATE, Phase.ZERO): _zero,
    (Kind.UPDATE, Phase.NORM): _norm,
    (Kind.UPDATE, Phase.SCALE): _scale,
    (Kind.UPDATE, Phase.ADAM): _adam,
    **{(kind, Phase.SYNC): _sync for kind in Kind},
}
