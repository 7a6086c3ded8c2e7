"""One forward and backward over all layers, and the buffers it runs through: what policies have in common.

A policy says where a layer's weights and gradient are, what its blocks keep between forward and backward, and
what becomes of a gradient. A sweep over one micro-batch is the usual order; a sweep over all of them is the
vertical one, in which a layer runs every micro-batch before the next layer comes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from schedules import trained
from schedules.buffers import Held
from schedules.end_layers import end_buffers
from schedules.kept_activations import Kept, Travel
from schedules.model import ModelSpec
from schedules.op import Stream
from schedules.program import Keep, Program
from schedules.ring import Ring
from schedules.tensor import Part

T = TypeVar("T")
Place = Callable[[int], str | None]  # layer -> its device buffer; None is the tensor's home


def sweep(
    p: Program,
    group: Sequence[int],
    *,
    weights: Place,
    grad: Place,
    done: Callable[[int, str], None],
    kept: Kept,
    singly: int = 0,
    turn: Callable[[], None] = lambda: None,
) -> None:
    """Forward and backward of a group of micro-batches over all layers.

    A layer runs all of the group before the next one comes, but for the last `singly` blocks and the loss: these run
    one micro-batch after another, there and back.

    `weights(i)` and `grad(i)` are asked when layer i is about to run, for each direction again; with tied
    embeddings the embedding's are asked before the loss too, and that gradient stays where it is until the
    embedding's backward. `done(i, buffer)` is called when the gradient of layer i, of the group or of one of its
    micro-batches, is in `buffer`. Layers that are not trained have no gradient: neither `grad` nor `done` is called
    for them. `turn()` is called before a block runs a micro-batch, in either direction.
    """
    model, updated = p.model, trained.layers(p.model, p.workload)
    blocks = model.blocks
    first, last = blocks[: len(blocks) - singly], blocks[len(blocks) - singly :]
    table = weights(model.embed)
    for m in group:
        p.forward(model.embed, m, weights=table)
    below = _Sweep(p, first, group, weights, grad, done, kept, turn)
    below.forward()
    tied = model.tie_word_embeddings
    for some in [[m] for m in group] if singly else [group]:
        above = _Sweep(p, last, some, weights, grad, done, kept, turn)
        above.forward()
        above.travel.turn()
        if not singly:
            below.travel.turn()
        table = weights(model.embed) if tied else None
        sums = grad(model.embed) if tied and model.embed in updated else None
        slot = weights(model.head)
        buffer = grad(model.head) if model.head in updated else None
        for m in some:
            p.loss(m, weights=slot, grad=buffer, embed_weights=table, embed_grad=sums)
        if model.head in updated:
            done(model.head, buffer or p.home(p.grad(model.head)))
        above.backward()
    if singly:
        below.travel.turn()
    below.backward()
    if model.embed not in updated:
        p.free(*(p.output_grad(model.embed, m) for m in group))
        return
    buffer = sums if tied else grad(model.embed)
    for m in group:
        p.backward(model.embed, m, grad=buffer)
    done(model.embed, buffer or p.home(p.grad(model.embed)))


def visits(kept: Kept, blocks: Sequence[int], *, turns: int = 1, singly: int = 0) -> list[int]:
    """The blocks in the order in which `sweep` asks for their weights, if the group has so many micro-batches."""
    first, last = blocks[: len(blocks) - singly], blocks[len(blocks) - singly :]
    above = [*last, *kept.backward_visits(last)] * (turns if singly else 1)
    return [*first, *above, *kept.backward_visits(first)]


def layer_visits(model: ModelSpec, kept: Kept) -> list[int]:
    """The layers in the order in which `sweep` asks for their weights, for a group of one micro-batch."""
    table = [model.embed] if model.tie_word_embeddings else []  # which the loss multiplies with
    return [model.embed, *model.blocks, *table, model.head, *kept.backward_visits(model.blocks)]


class _Sweep:
    """Some neighbouring blocks' forward and backward of a group of micro-batches."""

    def __init__(
        self,
        p: Program,
        blocks: Sequence[int],
        group: Sequence[int],
        weights: Place,
        grad: Place,
        done: Callable[[int, str], None],
        kept: Kept,
        turn: Callable[[], None],
    ) -> None:
        self._program, self._group, self._kept, self._turn = p, group, kept, turn
        self._weights, self._grad, self._done = weights, grad, done
        self._pieces = kept.pieces(blocks)
        returns = [kept.travels(p, i, m) for i in reversed(blocks) for m in group]
        self.travel = Travel(p, returns, slack=kept.slack, deep=kept.deep(p, group))

    def forward(self) -> None:
        p, kept = self._program, self._kept
        for piece in self._pieces:
            for i in piece:
                slot = self._weights(i)
                keep: Keep = "all" if not kept.recomputes(i) else "input" if i == piece[0] else "nothing"
                for m in self._group:
                    self._turn()
                    p.forward(i, m, weights=slot, keep=keep)
                    self.travel.leave(kept.travels(p, i, m))

    def backward(self) -> None:
        p, kept = self._program, self._kept
        for piece in reversed(self._pieces):
            for i in piece[:-1]:
                slot = self._weights(i)
                for m in self._group:
                    self._turn()
                    p.recompute(i, m, weights=slot, keep="input" if kept.nested else "all", output=True)
            for i in reversed(piece):
                slot, buffer = self._weights(i), self._grad(i)
                for m in self._group:
                    self._turn()
                    self.travel.come()
                    if kept.recomputes(i) and (i == piece[-1] or kept.nested):
                        p.recompute(i, m, weights=slot, output=kept.whole)
                        if kept.whole:
                            p.free(p.output(i, m))
                    p.backward(i, m, weights=slot, grad=buffer)
                self._done(i, buffer or p.home(p.grad(i)))


class Window:
    """Blocks' weights, those of the coming visits on their way.

    `visits` are the blocks in the order in which they run; `ahead` visits, the present one included, are loaded.
    """

    def __init__(self, visits: Iterable[int], *, ahead: int) -> None:
        self._visits, self._ahead = deque(visits), ahead
        self._loaded: deque[tuple[int, str]] = deque()

    def weights(self, i: int, fetch: Callable[[int], str]) -> str:
        """The slot with block i's weights; the visits after it are asked for.

        `fetch(i)` loads block i and returns its slot.
        """
        while self._visits and len(self._loaded) < self._ahead:
            coming = self._visits.popleft()
            self._loaded.append((coming, fetch(coming)))
        visited, slot = self._loaded.popleft()
        assert visited == i, "blocks run in the order of the visits"
        return slot

    @property
    def slots(self) -> list[str]:
        """Where the weights of the visits to come are."""
        return [slot for _, slot in self._loaded]

    def loaded(self, i: int) -> str | None:
        """The slot with block i's weights, if it is one of those that are loaded for the visits to come."""
        return next((slot for coming, slot in self._loaded if coming == i), None)


class Streamed:
    """Weights and gradients of a step in which all layers only pass through the device.

    Blocks go through `slots` buffers for weights and two for gradients; what still stands in a slot is not
    loaded again. Embedding and head, of another size, have buffers of their own: their weights come once a step,
    and their gradients add up in place. `fetch(i, buffer)` loads layer i's weights into a device buffer and
    returns it; the micro-batches run in that many `groups`, one after another.
    """

    def __init__(
        self,
        p: Program,
        *,
        fetch: Callable[[int, str], str],
        groups: int = 1,
        slots: int = 2,
        kept: Kept = Kept(),
    ) -> None:
        self._program, self._fetch = p, fetch
        self._ring, self._grads = p.slots("weight", slots), p.slots("grad", 2)
        self.ends = (p.model.embed, p.model.head)
        self._end_weights, self._end_grads = end_buffers(p, "weight"), end_buffers(p, "grad")
        self._window = Window(visits(kept, p.model.blocks) * groups, ahead=slots)

    def weights(self, i: int) -> str:
        """The buffer with layer i's weights."""
        if i not in self.ends:
            return self._window.weights(i, self._block)
        buffer = self._end_weights[i]
        return buffer if self._program.holds(buffer) == self._program.weight(i) else self._fetch(i, buffer)

    def grad(self, i: int) -> str:
        """The buffer for layer i's gradient."""
        return self._end_grads[i] if i in self.ends else self._grads.next()

    def _block(self, i: int) -> str:
        return self._ring.holding(self._program.weight(i)) or self._fetch(i, self._ring.next())


def land(
    p: Program,
    i: int,
    buffer: str,
    slabs: Ring,
    *,
    first: bool = True,
    last: bool = True,
    held: bool = False,
    parts: Sequence[Part | None] = (None,),
) -> Iterator[Held]:
    """Take layer i's gradient to the host, one of these `parts` after another; yields (buffer, gradient) there.

    A slab is needed again for the parts that follow: what is yielded is to be used at once. `buffer` holds the sum over
    one group of micro-batches, the `first` or `last` of the step or both. What is complete goes into a slab, unless it
    must be `held` for an update that comes much later; what is not goes home and grows there. With clipping a complete
    gradient is added to the norm, on the device if it is complete there.
    """
    straight, landed = first and last and not held, list[Held]()
    for part in parts:
        grad = p.grad(i, part=part)
        there = p.offload(grad, out_of=buffer, into=slabs.next() if straight or not first else None)
        if not first:
            p.accumulate(i, out_of=there, part=part)
            there = p.home(grad)
        landed.append((there, grad))
        yield there, grad
    if last and p.workload.grad_clip is not None:
        name = f"N.{p.model.layer_name(i)}"
        if first:
            p.norm([(buffer, p.grad(i))], stream=Stream.COMPUTE, name=name)  # the CPU has enough to do
        else:
            p.norm(landed, name=name)


def spread_large(of: Sequence[T], count: int, size: Callable[[T], int]) -> set[T]:
    """`count` of these, evenly spread over those at least half as large as the largest; then over the others, too."""
    most = max(map(size, of), default=0)
    large, small = ([one for one in of if (2 * size(one) >= most) is then] for then in (True, False))
    return spread(large, count) | spread(small, max(count - len(large), 0))


def spread(of: Sequence[T], count: int) -> set[T]:
    """`count` of these, evenly spread; all of them where there are no more."""
    n = len(of)
    count = min(count, n)
    offset = (n - count) // 2
    # counted from the last, those at which (j * count + offset) / n passes a whole number, as a line is drawn in pixels
    return {of[n - 1 - j] for j in range(n) if (j * count + offset) % n + count >= n} if n else set()
