"""Stream blocks through device slots; embedding and head live on the device. Does not clip gradients."""

from schedules.op import Stream
from schedules.program import Program


def policy(model, workload, memory, *, slots: int = 2) -> Program:
    p, ends = Program(model, workload), (model.embed, model.head)
    p.keep_on_device(*(t for i in ends for t in (p.weight(i), p.grad(i), p.state(i))))
    w, g = p.slots("weight", slots), p.slots("grad", 2)
    for m in workload.microbatches:
        p.forward(model.embed, m)
    for i in model.blocks:
        for m in workload.microbatches:
            p.forward(i, m, weights=p.load(p.weight(i), w), keep="input")
    for m in workload.microbatches:
        p.loss(m)
    for i in reversed(model.blocks):
        slot, grad = p.load(p.weight(i), w), g.next()
        for m in workload.microbatches:
            p.recompute(i, m, weights=slot)
            p.backward(i, m, weights=slot, grad=grad)
        p.offload(p.grad(i), out_of=grad)
        p.update(i)
    for m in workload.microbatches:
        p.backward(model.embed, m)
    for i in ends:
        p.update(i, stream=Stream.COMPUTE)
    return p
