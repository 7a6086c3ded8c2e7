"""One forward and backward over all layers, and the buffers it runs through: what policies have in common.

A policy says where a layer's weights and gradient are, what its blocks keep between forward and backward, and
what becomes of a gradient. A sweep over one micro-batch is the usual order; a sweep over all of them is the
vertical one, in which a layer runs every micro-batch before the next layer comes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from schedules import trained
from schedules.op import Stream
from schedules.program import Program
from schedules.ring import Ring

Place = Callable[[int], str | None]  # layer -> its device buffer; None is the tensor's home


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What blocks keep for their backward, and where. A block in neither of the first two runs forward again.

    on_device: all activations stay. on_host: they go to the host and come back. inputs: the block's input
    goes to the host and comes back, whatever else the block keeps. slack: how many visits of a block lie between
    its own and the moment its buffer is needed again, or filled again.
    """

    on_device: Collection[int] = ()
    on_host: Collection[int] = ()
    inputs: Collection[int] = ()
    slack: int = 1

    def travels(self, p: Program, i: int, m: int) -> list[str]:
        """The tensors of block i, micro-batch m, that go to the host and come back."""
        found = [p.output(i - 1, m)] if i in self.inputs else []
        return [*found, p.saved(i, m)] if i in self.on_host else found


class Travel:
    """Activations on their way to the host and back, each beside the computation that follows or precedes.

    What one forward leaves behind goes once the next `slack` forwards have buffers of their own; what a backward
    needs comes while the `slack` before it run. `returns` is what each backward needs back, in their order.
    """

    def __init__(self, p: Program, returns: Iterable[Sequence[str]], *, slack: int) -> None:
        self._program, self._slack = p, slack
        self._returns = deque(returns)
        self._leaving: deque[Sequence[str]] = deque()

    def leave(self, tensors: Sequence[str]) -> None:
        """A forward has run, and leaves these behind."""
        self._leaving.append(tensors)
        if len(self._leaving) > self._slack:
            self._go()

    def turn(self) -> None:
        """The last forward has run; the first backward comes."""
        while self._leaving:
            self._go()
        for _ in range(self._slack):
            self.come()

    def come(self) -> None:
        """A backward is about to run: bring back what one of the next needs."""
        for tensor in self._returns.popleft() if self._returns else ():
            self._program.restore(tensor)

    def _go(self) -> None:
        for tensor in self._leaving.popleft():
            self._program.evict(tensor)


def sweep(
    p: Program, group: Sequence[int], *, weights: Place, grad: Place, done: Callable[[int, str], None], kept: Kept
) -> None:
    """Forward and backward of a group of micro-batches over all layers.

    `weights(i)` and `grad(i)` are asked when layer i is about to run, for each direction again; with tied
    embeddings the embedding's are asked before the loss too, and that gradient stays where it is until the
    embedding's backward. `done(i, buffer)` is called when the group's gradient of layer i is in `buffer`. Layers that
    are not trained have no gradient: neither `grad` nor `done` is called for them.
    """
    model, updated = p.model, trained.layers(p.model, p.workload)
    visits = [(i, m) for i in reversed(model.blocks) for m in group]
    travel = Travel(p, [kept.travels(p, i, m) for i, m in visits], slack=kept.slack)
    table = weights(model.embed)
    for m in group:
        p.forward(model.embed, m, weights=table)
    for i in model.blocks:
        slot, recomputed = weights(i), i not in kept.on_device and i not in kept.on_host
        for m in group:
            p.forward(i, m, weights=slot, keep="input" if recomputed else "all")
            travel.leave(kept.travels(p, i, m))
    travel.turn()
    tied = model.tie_word_embeddings
    table = weights(model.embed) if tied else None
    sums = grad(model.embed) if tied and model.embed in updated else None
    slot = weights(model.head)
    buffer = grad(model.head) if model.head in updated else None
    for m in group:
        p.loss(m, weights=slot, grad=buffer, embed_weights=table, embed_grad=sums)
    if model.head in updated:
        done(model.head, buffer or p.home(p.grad(model.head)))
    for i in reversed(model.blocks):
        slot, buffer = weights(i), grad(i)
        for m in group:
            travel.come()
            if i not in kept.on_device and i not in kept.on_host:
                p.recompute(i, m, weights=slot)
            p.backward(i, m, weights=slot, grad=buffer)
        done(i, buffer or p.home(p.grad(i)))
    if model.embed not in updated:
        p.free(*(p.output_grad(model.embed, m) for m in group))
        return
    buffer = sums if tied else grad(model.embed)
    for m in group:
        p.backward(model.embed, m, grad=buffer)
    done(model.embed, buffer or p.home(p.grad(model.embed)))


class Window:
    """Blocks' weights, those of the coming visits on their way.

    `visits` are the blocks in the order in which they run; `fetch(i)` loads block i and returns its slot;
    `ahead` visits, the present one included, are loaded.
    """

    def __init__(self, visits: Iterable[int], *, ahead: int, fetch: Callable[[int], str]) -> None:
        self._visits, self._ahead, self._fetch = deque(visits), ahead, fetch
        self._loaded: deque[tuple[int, str]] = deque()

    def weights(self, i: int) -> str:
        """The slot with block i's weights; the visits after it are asked for."""
        while self._visits and len(self._loaded) < self._ahead:
            coming = self._visits.popleft()
            self._loaded.append((coming, self._fetch(coming)))
        visited, slot = self._loaded.popleft()
        assert visited == i, "blocks run in the order of the visits"
        return slot


class Streamed:
    """Weights and gradients of a step in which all layers only pass through the device.

    Blocks go through `slots` buffers for weights and two for gradients; what still stands in a slot is not
    loaded again. Embedding and head, much larger, have buffers of their own: their weights come once a step,
    and their gradients add up in place. `fetch(i, buffer)` loads layer i's weights into a device buffer and
    returns it; `passes` is how often the blocks run forward and backward.
    """

    def __init__(self, p: Program, *, fetch: Callable[[int, str], str], passes: int = 1, slots: int = 2) -> None:
        self._program, self._fetch = p, fetch
        self._ring, self._grads = p.slots("weight", slots), p.slots("grad", 2)
        self.ends = (p.model.embed, p.model.head)
        self._end_weights = {i: p.buffer(f"{p.model.layer_name(i)}.weight") for i in self.ends}
        self._end_grads = {i: p.buffer(f"{p.model.layer_name(i)}.grad") for i in self.ends}
        there_and_back = [*p.model.blocks, *reversed(p.model.blocks)]
        self._window = Window(there_and_back * passes, ahead=slots, fetch=self._block)

    def weights(self, i: int) -> str:
        """The buffer with layer i's weights."""
        if i not in self.ends:
            return self._window.weights(i)
        buffer = self._end_weights[i]
        return buffer if self._program.holds(buffer) == self._program.weight(i) else self._fetch(i, buffer)

    def grad(self, i: int) -> str:
        """The buffer for layer i's gradient."""
        return self._end_grads[i] if i in self.ends else self._grads.next()

    def _block(self, i: int) -> str:
        return self._ring.holding(self._program.weight(i)) or self._fetch(i, self._ring.next())


def land(
    p: Program, i: int, buffer: str, slabs: Ring, *, first: bool = True, last: bool = True, held: bool = False
) -> tuple[str, str]:
    """Take layer i's gradient to the host; returns (buffer, gradient) there.

    `buffer` holds the sum over one group of micro-batches, the `first` or `last` of the step or both. What is
    whole goes into a slab, unless it must be `held` for an update that comes much later; what is not goes home
    and grows there. With clipping a whole gradient is added to the norm, on the device if it is whole there.
    """
    grad, straight = p.grad(i), first and last and not held
    landed = p.offload(grad, out_of=buffer, into=slabs.next() if straight or not first else None)
    if not first:
        p.accumulate(i, out_of=landed)
        landed = p.home(grad)
    if last and p.workload.grad_clip is not None:
        # the CPU has enough to do
        stream = Stream.COMPUTE if first else Stream.CPU
        p.norm([(buffer if first else landed, grad)], stream=stream, name=f"N.{p.model.layer_name(i)}")
    return landed, grad


def spread(blocks: Sequence[int], count: int) -> set[int]:
    """`count` of these blocks, evenly spread; all of them where there are no more."""
    n = len(blocks)
    count = min(count, n)
    offset = (n - count) // 2
    return {blocks[n - 1 - j] for j in range(n) if (j * count + offset) % n + count >= n} if n else set()
