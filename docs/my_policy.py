"""Stream weights through device slots; embedding and head stay on the device; update as gradients land.

Without gradient clipping: ask for it, and the verifier says what is missing.
"""

from schedules.op import Stream
from schedules.program import Program


def policy(model, workload, memory, *, slots: int = 2, grad_slots: int = 2) -> Program:
    p = Program(model, workload)
    for i in (model.embed, model.head):
        p.keep_on_device(p.weight(i), p.grad(i), p.state(i))
    w, g = p.slots("weight", slots), p.slots("grad", grad_slots)
    for m in workload.microbatches:
        p.forward(model.embed, m)
    for i in model.blocks:
        p.prefetch(p.weight(i), into=w.next())
        for m in workload.microbatches:
            p.forward(i, m, weights=w.current, keep="input")
    for m in workload.microbatches:
        p.loss(m)
    for i in reversed(model.blocks):
        p.prefetch(p.weight(i), into=w.next())
        g.next()
        for m in workload.microbatches:
            p.recompute(i, m, weights=w.current)
            p.backward(i, m, weights=w.current, grad=g.current)
        p.offload(p.grad(i), out_of=g.current)
        p.update(i)
    for m in workload.microbatches:
        p.backward(model.embed, m)
    p.update(model.head, stream=Stream.COMPUTE)
    p.update(model.embed, stream=Stream.COMPUTE)
    return p
