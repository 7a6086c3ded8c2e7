"""ZeRO-Infinity's traffic with the drive: optimizer state by sub-group, gradients by layer, weights on request."""

from __future__ import annotations

from collections.abc import Callable

from schedules.buffers import Held
from schedules.deepspeed import optimizer_step
from schedules.end_layers import end_buffers
from schedules.op import Kind, Stream, Tier
from schedules.program import Program

POOL_PARAMETERS = 500_000_000  # offload_param's buffer_count times buffer_size, DeepSpeed's defaults


class Swap:
    """Host buffers between the drive and what the step needs.

    The drive is the home of optimizer state and fp32 gradients, with `weights` of those too. Rings hold what `sets`
    sub-groups need at once; a pool holds weights on their way to the device.
    """

    def __init__(self, p: Program, groups: list[list[int]], weights: bool, *, sets: int) -> None:
        model = p.model
        self._program, self._groups, self._weights = p, groups, weights
        p.keep_on_nvme(*(t for i in model.layers for t in (p.state(i), p.grad(i, wide=True))))
        if weights:
            p.keep_on_nvme(*map(p.weight, model.layers))
        count = sets * max(map(len, groups))
        self._grads, self._states = p.slots("swap.grad", count, Tier.HOST), p.slots("swap.state", count, Tier.HOST)
        self._updated = p.slots("swap.weight", count, Tier.HOST)
        # room for the layer that is fetched and the two after it
        pool = min(POOL_PARAMETERS // model.params(model.largest_block), model.num_hidden_layers)
        self._pool = p.slots("pool", max(pool, 3), Tier.HOST)
        self._ends = end_buffers(p, "pool", Tier.HOST)

    def stage(self, i: int) -> str:
        """The host buffer with layer i's weights, which are read unless they are there."""
        p = self._program
        return p.load(p.weight(i), self._ends.get(i, self._pool), stream=Stream.NVME_READ)

    def land(self, i: int, buffer: str, stream: Stream) -> Held:
        """Layer i's fp32 gradient to the host, which waits for it, and from there to the drive."""
        p, wide = self._program, self._program.grad(i, wide=True)
        slab = p.offload(wide, out_of=buffer, into=self._grads.next(), stream=stream, blocking=True)
        p.offload(wide, out_of=slab, stream=Stream.NVME_WRITE)
        return p.home(p.grad(i)), p.grad(i)  # has long landed, like everything else on that stream

    def step(self, pipeline_read: bool, pipeline_write: bool) -> None:
        """The optimizer's step, sub-group by sub-group."""
        p, groups = self._program, self._groups
        last = p.grad(p.model.embed, wide=True)
        p.synchronize(p.at_home(last), kind=Kind.OFFLOAD, name="H.flush")
        read, written = self._read(groups[0]), list[Held]()
        for group, following in zip(groups, [*groups[1:], None], strict=True):
            staged = read
            p.synchronize(*((buffer, tensor) for tensor, buffer in staged.items()), kind=Kind.PREFETCH, name="H.read")
            if following and pipeline_read:
                read = self._read(following)
            optimizer_step(p, group, at=staged)
            if self._weights:
                p.synchronize(*self._write(group, staged, p.weight), kind=Kind.OFFLOAD, name="H.weights")
            if written:
                p.synchronize(*written, kind=Kind.OFFLOAD, name="H.write")
            written = self._write(group, staged, p.state)
            if not (following and pipeline_write):
                p.synchronize(*written, kind=Kind.OFFLOAD, name="H.write")
                written = []
            if following and not pipeline_read:
                read = self._read(following)

    def _read(self, group: list[int]) -> dict[str, str]:
        """Bring what the step of a sub-group needs; returns tensor -> host buffer."""
        p, staged = self._program, dict[str, str]()
        for i in group:
            for tensor, ring in (
                (p.grad(i, wide=True), self._grads),
                (p.state(i), self._states),
                *([(p.weight(i), self._updated)] if self._weights else []),
            ):
                staged[tensor] = p.prefetch(tensor, into=ring.next(), stream=Stream.NVME_READ)
        return staged

    def _write(self, group: list[int], staged: dict[str, str], of: Callable[[int], str]) -> list[Held]:
        """Write one kind of tensor of a sub-group back; returns where they go."""
        p = self._program
        return [(p.offload(of(i), out_of=staged[of(i)], stream=Stream.NVME_WRITE), of(i)) for i in group]
