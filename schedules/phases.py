"""What an op of each phase has to touch, and what it may: the part of its meaning that it shows by itself."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from schedules import tensor as tensors
from schedules import trained
from schedules.op import Access, Op, Phase
from schedules.schedule import Schedule
from schedules.tensor import describe, named, parse
from schedules.traffic import phases_of

COMPUTE = (Phase.EMBED, Phase.FORWARD, Phase.RECOMPUTE, Phase.LOSS, Phase.BACKWARD)


def needed(schedule: Schedule, op: Op) -> tuple[list[str], list[str]]:
    """Tensors that a compute op must read and write, whatever else it touches.

    Quantised weights stand for whole ones: an op that reads them makes of them what it multiplies with.
    """
    model, i, m = schedule.model, op.layer, op.microbatch
    assert i is not None and m is not None
    name = model.layer_name

    def at(cls: str, layer: int, microbatch: int | None = None) -> str:
        return named(cls, name(layer), microbatch)

    workload = schedule.workload
    updated = trained.layers(model, workload)
    weights = [at(tensors.QUANTISED if op.reads_quantised else tensors.WEIGHT, i)]
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
    if op.phase == Phase.SYNC:
        yield from _sync(op)
        return
    yield from _in_one_place(op)
    if op.phase in COMPUTE:
        yield from _compute(schedule, op)
    elif op.phase == Phase.ACCUMULATE:
        yield from _accumulate(op)
    elif op.phase == Phase.CAST:
        yield from _cast(op)
    elif op.phase == Phase.NORM:
        yield from _norm(op)
    elif op.phase in (Phase.SCALE, Phase.ZERO):
        yield from _in_place(op)
    elif op.phase == Phase.ADAM:
        yield from _adam(schedule, op)


def _sync(op: Op) -> Iterator[tuple[str, str]]:
    # what is waited for twice is waited for once; a write would end what the buffer holds, and put nothing in its place
    if op.writes:
        yield f"{op.name} (sync) writes {_names(op.writes)}", "let it read what it waits for"


def _in_one_place(op: Op) -> Iterator[tuple[str, str]]:
    """Who runs an op looks for one buffer of each tensor, and a buffer holds one tensor at a time."""
    for side, accesses in (("reads", op.reads), ("writes", op.writes)):
        if len({access.tensor for access in accesses}) == len(accesses):
            continue
        buffers = defaultdict[str, list[str]](list)
        for access, times in Counter(accesses).items():
            if times > 1:
                yield f"{op.name} {side} {access.tensor} in {access.buffer} {times} times", "name it once"
            buffers[access.tensor].append(access.buffer)
        for tensor, places in buffers.items():
            if len(places) > 1 and (side, op.phase, parse(tensor).cls) not in _IN_SEVERAL:
                yield f"{op.name} {side} {tensor} in {' and '.join(places)}", "name one of these buffers"
    written = {access.buffer: access.tensor for access in reversed(op.writes)}
    for access in op.writes:
        if (other := written[access.buffer]) != access.tensor:
            yield f"{op.name} writes {other} and {access.tensor} into {access.buffer}", "use two buffers"


_IN_SEVERAL = {  # what an op may name in several buffers
    *(("writes", phase, tensors.OUTPUT) for phase in (Phase.FORWARD, Phase.RECOMPUTE)),  # an output and its copies
    *(("reads", Phase.ACCUMULATE, cls) for cls in tensors.GRADIENTS),  # what is added, and what it is added to
    *(("writes", Phase.ZERO, cls) for cls in tensors.GRADIENTS),
}


def _compute(schedule: Schedule, op: Op) -> Iterator[tuple[str, str]]:
    model, i, m = schedule.model, op.layer, op.microbatch
    assert i is not None and m is not None
    if op.phase not in (phases := phases_of(model, i)):
        yield f"{op.name} computes {op.phase} of layer {model.layer_name(i)}", f"that layer has {', '.join(phases)}"
        return
    if op.phase == Phase.BACKWARD and i not in trained.layers(model, schedule.workload):
        yield f"{op.name} computes the gradient of layer {model.layer_name(i)}, which is not trained", "leave it out"
        return
    must, may = needed(schedule, op)
    summed = {access for access in op.writes if parse(access.tensor).cls in tensors.GRADIENTS}
    if read := [access for access in op.reads if access.tensor not in must and access not in summed]:
        what = f"{op.name} ({op.phase} of layer {model.layer_name(i)}) reads {_names(read)}"
        yield what, "name what it computes with, and a gradient where it adds to it"
    if op.phase in (Phase.FORWARD, Phase.RECOMPUTE):
        may += [named(cls, model.layer_name(i), m) for cls in (tensors.OUTPUT, tensors.SAVED)]
    if made := [access for access in op.writes if access.tensor not in may]:
        yield f"{op.name} ({op.phase} of layer {model.layer_name(i)}) writes {_names(made)}", "it makes no such tensor"
    held = {access.buffer: access.tensor for access in op.reads}
    for access in op.writes:
        over = held.get(access.buffer, access.tensor)
        # an output is written when the op has read all, a gradient of weights while it still reads; the loss writes
        # chunk after chunk of tokens, and needs the weights for the next
        early = parse(access.tensor).cls in tensors.GRADIENTS or (
            op.phase == Phase.LOSS and parse(over).cls in tensors.PARAMETERS
        )
        if over != access.tensor and early:
            yield f"{op.name} writes {access.tensor} over {over}, which it reads, in {access.buffer}", "write elsewhere"


def _accumulate(op: Op) -> Iterator[tuple[str, str]]:
    yield from _over_itself(op)
    sources = set(op.reads) - set(op.writes)
    if len(sources) != 1:
        yield f"{op.name} adds {len(sources)} gradients to {_names(op.writes)}", "add one"
    if not _of_the_same(op) or not all(parse(access.tensor).cls in tensors.GRADIENTS for access in op.accesses):
        what = f"{op.name} adds {_names(tuple(sources))} to {_names(op.writes)}"
        yield what, "add up gradients of one layer, or of the same part of it"


def _cast(op: Op) -> Iterator[tuple[str, str]]:
    yield from _over_itself(op)
    named = {parse(access.tensor) for access in op.accesses}
    from_to = [parse(access.tensor).cls for access in op.accesses]
    # a gradient has two names, one for each of its types, and so have quantised weights; all else keeps its name
    renamed = set(from_to) <= tensors.GRADIENTS or from_to == [tensors.QUANTISED, tensors.WEIGHT]
    if not (renamed and _of_the_same(op)) and (len(named) > 1 or tensors.QUANTISED in from_to):
        yield f"{op.name} makes {_names(op.writes)} of {_names(op.reads)}", "a cast keeps what a tensor is"
    elif tensors.QUANTISED in from_to and not op.on_device:
        yield f"{op.name} makes {_names(op.writes)} whole on {op.stream}", "queue it on compute"


def _over_itself(op: Op) -> Iterator[tuple[str, str]]:
    """Elements of another size would be written over those that are yet to be read."""
    for source in op.reads:
        for target in op.writes:
            if source.buffer == target.buffer and source.tensor != target.tensor:
                yield f"{op.name} makes {target.tensor} of {source.tensor} in {source.buffer}", "use two buffers"


def _norm(op: Op) -> Iterator[tuple[str, str]]:
    for access in op.reads:
        if access.tensor == tensors.NORM and access not in op.writes:
            yield f"{op.name} reads the norm in {access.buffer} and does not write it there", "add to it where it is"


def _in_place(op: Op) -> Iterator[tuple[str, str]]:
    """A gradient that is scaled where it is, by the norm if there is one, or gradients that are cleared."""
    if others := [access for access in op.writes if parse(access.tensor).cls not in tensors.GRADIENTS]:
        yield f"{op.name} ({op.phase}) writes {_names(others)}", "name a gradient"
    if op.phase == Phase.SCALE and not set(op.writes) <= set(op.reads):
        yield f"{op.name} scales {_names(op.writes)} without reading it", "read what it writes"
    used = {tensors.NORM, *(access.tensor for access in op.writes)} if op.phase == Phase.SCALE else set[str]()
    if others := [access for access in op.reads if access.tensor not in used]:
        yield f"{op.name} ({op.phase}) reads {_names(others)}", "leave out what it has no use for"


def _adam(schedule: Schedule, op: Op) -> Iterator[tuple[str, str]]:
    """Gradient, weights and state must be those of one layer, which is the op's."""
    layers = {name.layer for access in op.accesses if (name := parse(access.tensor)).cls != tensors.NORM}
    if op.layer is not None and op.layer in schedule.model.layers:
        layers.add(schedule.model.layer_name(op.layer))
    if op.layer is None or len(layers) > 1:
        whose = ", ".join(sorted(layers))
        yield f"{op.name} updates with tensors of layers {whose}", "name gradient, weights and state of its own layer"
    made = {trained.cls(schedule.workload), tensors.STATE}
    if others := tuple(access for access in op.writes if parse(access.tensor).cls not in made):
        yield f"{op.name} (adam) writes {_names(others)}", "it makes what is trained and its optimizer state"
    read = made | tensors.GRADIENTS | {tensors.NORM}
    if others := tuple(access for access in op.reads if parse(access.tensor).cls not in read):
        yield f"{op.name} (adam) reads {_names(others)}", "leave out what it has no use for"
    for accesses in (op.reads, op.writes):
        for classes in (tensors.GRADIENTS, {tensors.STATE}):
            found = [access for access in accesses if parse(access.tensor).cls in classes]
            if len({access.tensor for access in found}) > 1:
                yield f"{op.name} updates with {_names(found)}", "name one gradient, and one part of the state"
    of = trained.part(op)
    for access in op.reads:
        name = parse(access.tensor)
        if name.cls in tensors.GRADIENTS and name.part not in (None, of):
            what = f"{op.name} updates {'all' if of is None else f'part {of}'} of a layer by {describe(access.tensor)}"
            yield what, "name the whole gradient, or the part of it that the state is of"


def _of_the_same(op: Op) -> bool:
    """Whether all that an op touches is of one layer, or of one part of it."""
    return len({(name.layer, name.part) for name in (parse(access.tensor) for access in op.accesses)}) == 1


def _names(accesses: Sequence[Access]) -> str:
    return ", ".join(sorted({access.tensor for access in accesses}))
