"""Schedules written by hand for the tests of execution: between them, every phase and every stream but NVMe.

They are no systems anyone should use. Policies have tests of their own; these stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable

from schedules import trained
from schedules.model import ModelSpec
from schedules.op import Stream, Tier
from schedules.program import Program
from schedules.schedule import Schedule
from schedules.workload import Workload

Writer = Callable[[ModelSpec, Workload], Schedule]


def small(*, tied: bool = False, blocks: int = 2) -> ModelSpec:
    """A model that trains in milliseconds: bytes for a vocabulary, grouped queries."""
    return ModelSpec(
        name="small-tied" if tied else "small",
        vocab_size=256,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=blocks,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=tied,
    )


def on_device(model: ModelSpec, workload: Workload) -> Schedule:
    """Everything on the device all the time; the optimizer runs there."""
    p, updated = Program(model, workload), trained.layers(model, workload)
    for i in model.layers:
        adapters = [p.adapter(i)] if workload.lora_rank and model.is_block(i) else []
        p.keep_on_device(p.weight(i), *adapters, p.state(i), p.grad(i))
    for m in workload.microbatches:
        for i in model.layers[:-1]:
            p.forward(i, m, keep="all" if updated else "nothing")
        p.loss(m)
        for i in reversed(model.layers[:-1]):
            if i in updated:
                p.backward(i, m)
        if updated and model.embed not in updated:
            p.free(p.output_grad(model.embed, m))
    if updated and workload.grad_clip is not None:
        p.norm([p.at_home(p.grad(i)) for i in updated], stream=Stream.COMPUTE)
    for i in updated:
        p.update(i, stream=Stream.COMPUTE)
    return p.build(policy="on_device")


def two_slots(model: ModelSpec, workload: Workload) -> Schedule:
    """Weights through two slots; gradients added up on the host, where the optimizer runs; half is recomputed."""
    p = Program(model, workload)
    weights, grads, slabs = p.slots("weight", 2), p.slots("grad", 2), p.slots("slab", 2, Tier.HOST)
    kept = set(model.blocks[: len(model.blocks) // 2])

    def leave(i: int, slot: str) -> None:
        slab = slabs.next()
        p.offload(p.grad(i), out_of=slot, into=slab)
        p.accumulate(i, out_of=slab)

    for m in workload.microbatches:
        for i in model.layers[:-1]:
            p.forward(i, m, weights=p.load(p.weight(i), weights), keep="all" if i in kept else "input")
        _streamed_loss(p, m, weights.next, grads.next, leave)
        for i in reversed(model.blocks):
            slot = p.load(p.weight(i), weights)
            if i not in kept:
                p.recompute(i, m, weights=slot)
            p.backward(i, m, weights=slot, grad=grads.next())
            leave(i, grads.current)
        p.backward(model.embed, m, grad=grads.next())
        leave(model.embed, grads.current)
    if workload.grad_clip is not None:
        p.norm([p.at_home(p.grad(i)) for i in model.layers])
    for i in model.layers:
        p.update(i)
    return p.build(policy="two_slots")


def _streamed_loss(
    p: Program, m: int, weights: Callable[[], str], grads: Callable[[], str], leave: Callable[[int, str], None]
) -> None:
    head, embed = p.model.head, p.model.embed
    slot, grad = p.prefetch(p.weight(head), into=weights()), grads()
    if not p.model.tie_word_embeddings:
        p.loss(m, weights=slot, grad=grad)
    else:
        table, table_grad = p.prefetch(p.weight(embed), into=weights()), grads()
        p.loss(m, weights=slot, grad=grad, embed_weights=table, embed_grad=table_grad)
        leave(embed, table_grad)
    leave(head, grad)


def stop_and_go(model: ModelSpec, workload: Workload) -> Schedule:
    """Blocking copies, passes over fp32 gradients on the host thread, and a host that waits for the device."""
    p = Program(model, workload)
    weight, grad = p.buffer("weight"), p.buffer("grad")
    table, table_grad = p.buffer("table"), p.buffer("table.grad")
    for i in model.layers:
        p.zero(i, grad=p.at_home(p.grad(i)), stream=Stream.HOST)

    def leave(i: int, source: str) -> None:
        slab = p.buffer("slab", Tier.HOST)
        p.offload(p.grad(i), out_of=source, into=slab, blocking=True)
        p.accumulate(i, out_of=slab, stream=Stream.HOST)

    for m in workload.microbatches:
        for i in model.layers[:-1]:
            p.prefetch(p.weight(i), into=weight, blocking=True)
            p.forward(i, m, weights=weight, blocking=i == 0)
        p.prefetch(p.weight(model.head), into=weight)
        tied = model.tie_word_embeddings
        if tied:
            p.prefetch(p.weight(model.embed), into=table)
        p.discard(grad)
        p.discard(table_grad)
        both = {"embed_weights": table, "embed_grad": table_grad} if tied else {}
        p.loss(m, weights=weight, grad=grad, **both)
        p.synchronize((grad, p.grad(model.head)))
        leave(model.head, grad)
        if tied:
            leave(model.embed, table_grad)
        for i in reversed(model.blocks):
            p.prefetch(p.weight(i), into=weight)
            p.discard(grad)
            p.backward(i, m, weights=weight, grad=grad)
            leave(i, grad)
        p.discard(grad)
        p.backward(model.embed, m, grad=grad)
        leave(model.embed, grad)
    wide = {i: p.at_home(p.grad(i, wide=True)) for i in model.layers}
    for i in model.layers:
        p.cast(p.at_home(p.grad(i)), wide[i], stream=Stream.CPU)
        if workload.grad_clip is not None:
            p.norm([wide[i]])
    for i in model.layers:
        p.scale(i, grad=wide[i])
        p.update(i, grad=wide[i], scaled=True, stream=Stream.HOST)
    return p.build(policy="stop_and_go")


def moved_out(model: ModelSpec, workload: Workload) -> Schedule:
    """Activations leave for the host after forward and come back for backward; optimizer state streams in."""
    p = Program(model, workload)
    for i in model.layers:
        p.keep_on_device(p.weight(i), p.grad(i))
    moments = p.slots("moments", 2)
    for m in workload.microbatches:
        for i in model.layers[:-1]:
            p.forward(i, m)
            if i in model.blocks:
                p.evict(p.saved(i, m))
                p.evict(p.output(i - 1, m))
        p.loss(m)
        for i in reversed(model.blocks):
            p.restore(p.output(i - 1, m))
            p.restore(p.saved(i, m))
            p.backward(i, m)
        p.backward(model.embed, m)
    if workload.grad_clip is not None:
        p.norm([p.at_home(p.grad(i)) for i in model.layers], stream=Stream.COMPUTE)
    for i in model.layers:
        state = p.prefetch(p.state(i), into=moments.next())
        p.update(i, state=state, stream=Stream.COMPUTE)
        p.offload(p.state(i), out_of=state)
    return p.build(policy="moved_out")


def summed_wide(model: ModelSpec, workload: Workload) -> Schedule:
    """Gradients of all micro-batches are added up in fp32, on the device, where the optimizer runs."""
    p, grads = Program(model, workload), {}
    buffers = p.slots("grad", 2)
    for i in model.layers:
        grads[i] = p.grad(i, wide=True)
        p.keep_on_device(p.weight(i), p.state(i), grads[i])

    def add(i: int, grad: str) -> None:
        p.accumulate(i, out_of=grad, wide=True, stream=Stream.COMPUTE)

    for m in workload.microbatches:
        for i in model.layers[:-1]:
            p.forward(i, m)
        if model.tie_word_embeddings:
            p.loss(m, grad=buffers.next(), embed_grad=(table := p.buffer("table.grad")))
            add(model.embed, table)
            p.discard(table)
        else:
            p.loss(m, grad=buffers.next())
        add(model.head, buffers.current)
        for i in reversed(model.layers[:-1]):
            p.backward(i, m, grad=buffers.next())
            add(i, buffers.current)
    sums = {i: p.at_home(grad) for i, grad in grads.items()}
    if workload.grad_clip is not None:
        p.norm(sums.values(), stream=Stream.COMPUTE)
    for i in model.layers:
        p.update(i, grad=sums[i], stream=Stream.COMPUTE)
    return p.build(policy="summed_wide")


WRITERS: dict[str, Writer] = {w.__name__: w for w in (on_device, two_slots, stop_and_go, moved_out, summed_wide)}
