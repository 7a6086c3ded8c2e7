"""DeepSpeed ZeRO-3 with parameters and optimizer offloaded to the CPU, on one GPU.

What it does. The weights of the next layer are fetched while the present one computes, and the host waits
for each layer's before it launches that layer. With checkpointing (the usual way to run it) a block keeps its
input and runs forward again before its backward, so that weights cross the link twice per micro-batch. A
gradient crosses it three times: down, the same values up again, and down widened to fp32; at most two are
under way, the host waits for the older before a third. After the last backward the host waits for all of
them and then, alone, makes three passes over host memory per layer: scale, Adam, cast to the compute type.
With overlap_comm=false fetches and gradients queue on the compute stream, and nothing overlaps.
Under accumulation later micro-batches bring the sum up, add on the device and take it down again; fp32
gradients are made by the last one only.

Where states live, in bytes per parameter, all on the host (20): weights 2, gradient sum 2, fp32 gradients 4,
fp32 master 4, moments 8. There always is an fp32 master: precisions bf16 and bf16_split are built as
bf16_fp32. On the device: slots for max_live parameters, two gradient buckets, one gradient on its way back
and one widened.

Exact in its training. Approximated: a layer is fetched and its gradient handed over as a whole, where DeepSpeed
goes by module and by bucket; tensors below its persistence threshold are not resident; embedding and head
have device buffers of their own, and the embedding is not fetched again for its backward; Adam writes the
compute-type weights itself and the cast reads and writes them in place, 36 bytes per parameter together
where DeepSpeed has 34; the norm is computed only with gradient clipping.
Source: DeepSpeed edaa722 (0.19.6 development), stage3.py, partitioned_param_coordinator.py.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from schedules.model import ModelSpec
from schedules.op import Kind, Stream
from schedules.program import Program
from schedules.workload import MemoryBudget, Workload


def policy(
    model: ModelSpec,
    workload: Workload,
    memory: MemoryBudget,
    *,
    overlap_comm: bool = True,
    checkpointing: bool = True,
    max_live: int = 1_000_000_000,
) -> Program:
    """Build the step.

    Args:
        overlap_comm: fetches and gradients have streams of their own (DeepSpeed's default for stage 3).
        checkpointing: blocks keep only their input and run forward again.
        max_live: stage3_max_live_parameters, how many parameters may be on the device at once.
    """
    if workload.precision in ("bf16", "bf16_split"):
        workload = replace(workload, precision="bf16_fp32")
    step = _Step(model, workload, overlap_comm, max_live)
    p, embed, head = step.program, model.embed, model.head
    for m in workload.microbatches:
        step.begin()
        p.forward(embed, m, weights=step.weights(embed))
        for i in model.blocks:
            p.forward(i, m, weights=step.weights(i), keep="input" if checkpointing else "all")
        table = step.weights(embed) if step.tied else None
        bucket = step.buckets.next()
        p.loss(m, weights=step.weights(head), grad=bucket, embed_weights=table, embed_grad=step.tied)
        step.reduce(head, m, bucket)
        for i in reversed(model.blocks):
            slot, bucket = step.weights(i), step.buckets.next()
            if checkpointing:
                p.recompute(i, m, weights=slot)
            p.backward(i, m, weights=slot, grad=bucket)
            step.reduce(i, m, bucket)
        bucket = step.tied or step.buckets.next()
        p.backward(embed, m, grad=bucket)
        step.reduce(embed, m, bucket)
        p.synchronize(step.outstanding[-1], kind=Kind.OFFLOAD, name="H.epilogue")
    for i in model.layers:
        grad, weights = p.grad(i, wide=True), (p.home(p.weight(i)), p.weight(i))
        p.scale(i, grad=(p.home(grad), grad), stream=Stream.HOST)
        p.update(i, grad=(p.home(grad), grad), scaled=True, stream=Stream.HOST)
        p.cast(weights, weights, stream=Stream.HOST)
    return p


class _Step:
    """The step under construction: the weights on the device, and the gradients under way."""

    def __init__(self, model: ModelSpec, workload: Workload, overlap_comm: bool, max_live: int) -> None:
        self.program = p = Program(model, workload)
        self.fetching = Stream.H2D if overlap_comm else Stream.COMPUTE
        self.reducing = Stream.D2H if overlap_comm else Stream.COMPUTE
        # room for the layer that computes and the one on its way, whatever max_live says
        slots = max(2, min(max_live // model.params(0), model.num_hidden_layers))
        self.slots = p.slots("weight", slots)
        self.ends = {i: p.buffer(f"{model.layer_name(i)}.weight") for i in (model.embed, model.head)}
        self.buckets = p.slots("bucket", 2)
        self.sum, self.wide = p.buffer("sum"), p.buffer("wide")
        self.tied = p.buffer("embed.grad") if model.tie_word_embeddings else None
        self.visits: deque[int] = deque()
        self.fetched: str | None = None
        self.outstanding: list[tuple[str, str]] = []

    def begin(self) -> None:
        """A micro-batch starts with nothing fetched and no gradient under way."""
        model = self.program.model
        again = [model.embed] if self.tied else []
        self.visits = deque([model.embed, *model.blocks, *again, model.head, *reversed(model.blocks)])
        self.slots.clear()
        self.fetched = None
        self.outstanding = []

    def weights(self, i: int) -> str:
        """The device buffer with layer i's weights: the host waits for them, then fetches the next layer's."""
        assert self.visits.popleft() == i, "layers are visited in the order of the trace"
        buffer = self.fetched or self._fetch(i)
        p = self.program
        p.synchronize((buffer, p.weight(i)), kind=Kind.PREFETCH, name=f"H.{p.model.layer_name(i)}")
        self.fetched = self._fetch(self.visits[0]) if self.visits else None
        return buffer

    def _fetch(self, i: int) -> str:
        p = self.program
        if i in self.ends:
            return p.prefetch(p.weight(i), into=self.ends[i], stream=self.fetching)
        return p.load(p.weight(i), self.slots, stream=self.fetching)

    def reduce(self, i: int, m: int, bucket: str) -> None:
        """Layer i's gradient to the host, back to the device, and, when it is the last one, down in fp32."""
        p, stream, grad = self.program, self.reducing, self.program.grad(i)
        if len(self.outstanding) >= 2:
            p.synchronize(self.outstanding[-2], kind=Kind.OFFLOAD, name="H.bucket")
        if m == 0:
            p.offload(grad, out_of=bucket, stream=stream)
            p.prefetch(grad, into=self.sum, stream=stream)
        else:
            p.prefetch(grad, into=self.sum, stream=stream)
            p.accumulate(i, out_of=bucket, into=self.sum, stream=stream)
            p.offload(grad, out_of=self.sum, stream=stream)
        p.discard(bucket)
        landed = (p.home(grad), grad)
        if m == p.workload.microbatches[-1]:
            if p.workload.grad_clip is not None:
                p.norm([(self.sum, grad)], stream=stream, name=f"N.{p.model.layer_name(i)}")
            wide = p.grad(i, wide=True)
            p.cast((self.sum, grad), (self.wide, wide), stream=stream)
            landed = (p.offload(wide, out_of=self.wide, stream=stream), wide)
        self.outstanding.append(landed)
