"""What an op of each phase has to touch, and what it may: the part of its meaning that it shows by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from schedules import tensor as tensors
from schedules import trained
from schedules.op import Access, Op, Phase
from schedules.schedule import Schedule
from schedules.tensor import Tensor, parse

COMPUTE = (Phase.EMBED, Phase.FORWARD, Phase.RECOMPUTE, Phase.LOSS, Phase.BACKWARD)


def needed(schedule: Schedule, op: Op) -> tuple[list[str], list[str]]:
    """Tensors that a compute op must read and write, whatever else it touches."""
    model, i, m = schedule.model, op.layer, op.microbatch
    assert i is not None and m is not None
    name = model.layer_name

    def at(cls: str, layer: int, microbatch: int | None = None) -> str:
        return str(Tensor(cls, name(layer), microbatch))

    workload = schedule.workload
    updated = trained.layers(model, workload)
    weights = [at(tensors.WEIGHT, i)]
    if workload.lora_rank is not None and model.is_block(i):
        weights.append(at(tensors.ADAPTER, i))
    if op.phase == Phase.EMBED:
        return weights, [at(tensors.OUTPUT, i, m)]
    if op.phase == Phase.BACKWARD and i == model.embed:
        return [at(tensors.OUTPUT_GRAD, i, m)], [at(tensors.GRAD, i)]
    source = at(tensors.OUTPUT, i - 1, m)
    if op.phase == Phase.FORWARD:
        return [*weights, source], [at(tensors.OUTPUT, i, m)]
    if op.phase == Phase.RECOMPUTE:
        return [*weights, source], []
    if op.phase == Phase.LOSS:
        tables = [model.embed] if model.tie_word_embeddings else []
        back = [at(tensors.OUTPUT_GRAD, i - 1, m)] if workload.task == "train" else []
        return (
            [*weights, source, *(at(tensors.WEIGHT, t) for t in tables)],
            [*back, *(at(tensors.GRAD, layer) for layer in (i, *tables) if layer in updated)],
        )
    return (
        [*weights, source, at(tensors.SAVED, i, m), at(tensors.OUTPUT_GRAD, i, m)],
        [at(tensors.OUTPUT_GRAD, i - 1, m), at(tensors.GRAD, i)],
    )


def misused(schedule: Schedule, op: Op) -> Iterator[tuple[str, str]]:
    """What is wrong with the accesses of one op of a known layer, whatever the others do: in words, and what to do."""
    for side, accesses in (("reads", op.reads), ("writes", op.writes)):
        for access, times in Counter(accesses).items():
            if times > 1 and op.phase != Phase.SYNC:  # what is waited for twice is waited for once
                yield f"{op.name} {side} {access.tensor} in {access.buffer} {times} times", "name it once"
    if op.phase in COMPUTE:
        yield from _compute(schedule, op)
    elif op.phase == Phase.ACCUMULATE:
        yield from _accumulate(op)
    elif op.phase == Phase.CAST:
        yield from _cast(op)
    elif op.phase == Phase.SCALE and not set(op.writes) <= set(op.reads):
        yield f"{op.name} scales {_names(op.writes)} without reading it", "read what it writes"
    elif op.phase == Phase.ADAM:
        yield from _adam(schedule, op)


def _compute(schedule: Schedule, op: Op) -> Iterator[tuple[str, str]]:
    model, i, m = schedule.model, op.layer, op.microbatch
    assert i is not None and m is not None
    phases: tuple[Phase, ...] = (Phase.EMBED, Phase.BACKWARD) if i == model.embed else (Phase.LOSS,)
    if model.is_block(i):
        phases = (Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD)
    if op.phase not in phases:
        yield f"{op.name} computes {op.phase} of layer {model.layer_name(i)}", f"that layer has {', '.join(phases)}"
        return
    may = needed(schedule, op)[1]
    if op.phase in (Phase.FORWARD, Phase.RECOMPUTE):
        may += [str(Tensor(cls, model.layer_name(i), m)) for cls in (tensors.OUTPUT, tensors.SAVED)]
    if made := [access for access in op.writes if access.tensor not in may]:
        yield f"{op.name} ({op.phase} of layer {model.layer_name(i)}) writes {_names(made)}", "it makes no such tensor"
    read = {access.buffer: access.tensor for access in op.reads}
    for access in op.writes:
        over = read.get(access.buffer, access.tensor)
        # a gradient is written while the op still reads; an output is when it has read all
        if over != access.tensor and parse(access.tensor).cls in tensors.GRADIENTS:
            yield f"{op.name} writes {access.tensor} over {over}, which it reads, in {access.buffer}", "write elsewhere"


def _accumulate(op: Op) -> Iterator[tuple[str, str]]:
    sources = set(op.reads) - set(op.writes)
    if len(sources) != 1:
        yield f"{op.name} adds {len(sources)} gradients to {_names(op.writes)}", "add one"
    if len({parse(access.tensor).layer for access in op.accesses}) > 1 or not all(
        parse(access.tensor).cls in tensors.GRADIENTS for access in op.accesses
    ):
        yield f"{op.name} adds {_names(tuple(sources))} to {_names(op.writes)}", "add up gradients of one layer"


def _cast(op: Op) -> Iterator[tuple[str, str]]:
    classes = {parse(access.tensor).cls for access in op.accesses}
    if len(classes) > 1 and not classes <= tensors.GRADIENTS:
        yield f"{op.name} makes {_names(op.writes)} of {_names(op.reads)}", "a cast keeps what a tensor is"


def _adam(schedule: Schedule, op: Op) -> Iterator[tuple[str, str]]:
    """Gradient, weights and state must be those of one layer, which is the op's."""
    layers = {name.layer for access in op.accesses if (name := parse(access.tensor)).cls != tensors.NORM}
    if op.layer is not None and op.layer in schedule.model.layers:
        layers.add(schedule.model.layer_name(op.layer))
    if op.layer is None or len(layers) > 1:
        whose = ", ".join(sorted(layers))
        yield f"{op.name} updates with tensors of layers {whose}", "name gradient, weights and state of its own layer"


def _names(accesses: Sequence[Access]) -> str:
    return ", ".join(sorted({access.tensor for access in accesses}))
