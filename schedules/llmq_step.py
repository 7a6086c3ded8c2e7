"""The step of LLM.Q: what lives on the host passes through device buffers, and the GPU updates all layers."""

from __future__ import annotations

from collections.abc import Collection

from schedules.buffers import Held
from schedules.end_layers import end_buffers
from schedules.kept_activations import Kept
from schedules.model import ModelSpec
from schedules.op import Stream
from schedules.program import Program
from schedules.sweep import Window, sweep, visits
from schedules.tensor import Part, parts
from schedules.workload import Workload

END_PARTS = 8  # in which the moments of embedding and head pass, which its kernels read where they lie
HALVES = 2  # in which a block's moments are where only half of them pass


class LlmqStep:
    """The step under construction; `away` names what lives on the host: "moment", "states", "weights" and so on."""

    def __init__(self, model: ModelSpec, workload: Workload, kept: Kept, *, away: Collection[str]) -> None:
        self._program = p = Program(model, workload)
        self._kept = kept
        self._moments = 2 if "states" in away else int("moment" in away)  # how many of the two pass through the device
        self._weights = "weights" in away
        self._away = set(model.blocks) if "gradients" in away else set[int]()  # blocks whose gradients live there
        p.keep_on_device(*(p.grad(i) for i in model.layers if i not in self._away))
        p.keep_on_device(*(p.state(i, part) for i in model.layers for part, passes in self._states(i) if not passes))
        if not self._weights:
            p.keep_on_device(*map(p.weight, model.layers))
        self._block = p.slots("weight", 2)
        self._end = end_buffers(p, "weight")
        if not model.tie_word_embeddings:  # the embedding is not needed while the head is
            self._end = dict.fromkeys(self._end, p.buffer("end.weight"))
        self._grads, self._sum = p.slots("grad", 2), p.buffer("sum")
        self._state, self._part = p.slots("state", 2), p.slots("end.state", 2)

    def whole(self) -> Program:
        """All micro-batches, and the update."""
        p, blocks = self._program, self._program.model.blocks
        order = visits(self._kept, blocks) * p.workload.accumulation
        window = Window(order, ahead=2)

        def fetch(i: int) -> str:
            return p.load(p.weight(i), self._block)

        def weights(i: int) -> str | None:
            if not self._weights:
                return None
            return p.load(p.weight(i), self._end[i]) if i in self._end else window.weights(i, fetch)

        def done(i: int, buffer: str) -> None:
            if i in self._away:
                self._land(i, buffer, first=m == 0)

        for m in p.workload.microbatches:
            sweep(
                p,
                [m],
                weights=weights,
                grad=lambda i: self._grads.next() if i in self._away else None,
                done=done,
                kept=self._kept,
            )
        for i in p.model.layers:  # whether it clips or not
            p.norm([self._grad(i)], stream=Stream.COMPUTE, name=f"N.{p.model.layer_name(i)}")
        for i in p.model.layers:
            self._update(i)
        p.synchronize(*(p.at_home(p.weight(i)) for i in p.model.layers), name="H.step")
        return p

    def _land(self, i: int, buffer: str, *, first: bool) -> None:
        """A block's gradient of one micro-batch to its sum on the host."""
        p, grad = self._program, self._program.grad(i)
        if first:
            p.offload(grad, out_of=buffer, stream=Stream.COMPUTE)
        else:
            p.accumulate(i, out_of=self._up(grad, self._sum), into=buffer, stream=Stream.COMPUTE)
            p.offload(grad, out_of=buffer)
        p.discard(buffer)

    def _grad(self, i: int) -> Held:
        """Where the GPU finds a layer's whole gradient."""
        p, grad = self._program, self._program.grad(i)
        return self._up(grad, self._grads.next()) if i in self._away else p.home(grad), grad

    def _update(self, i: int) -> None:
        """One layer's step on the GPU; what was fetched for it goes back beside the next one's."""
        p, weight, end = self._program, self._program.weight(i), i in self._end
        place = p.home(weight)
        if self._weights:
            place = self._up(weight, self._end[i]) if end else p.prefetch(weight, into=self._block.next())
        grad = self._grad(i)
        for part, passes in self._states(i):
            state, buffer = p.state(i, part), None
            if passes:
                buffer = self._up(state, self._part.next()) if end else p.prefetch(state, into=self._state.next())
            p.update(i, grad=grad, weights=place, state=buffer, part=part, stream=Stream.COMPUTE)
            if buffer is not None:
                p.offload(state, out_of=buffer)
        if self._weights:
            p.offload(weight, out_of=place)

    def _states(self, i: int) -> list[tuple[Part | None, bool]]:
        """The parts in which a layer's moments are, and whether each passes through the device or lives there."""
        model = self._program.model
        small = model.tie_word_embeddings and i == model.head  # a norm is all of such a head
        if model.is_block(i):
            ways = HALVES if self._moments == 1 else 1
        else:
            ways = END_PARTS if self._moments and not small else 1
        staying = ways * (2 - self._moments) // 2
        return [(part, number >= staying) for number, part in enumerate(parts(ways))]

    def _up(self, tensor: str, into: str) -> str:
        """What a kernel reads of the host's memory, as a copy in its stream."""
        return self._program.prefetch(tensor, into=into, stream=Stream.COMPUTE)
