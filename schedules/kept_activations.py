"""What blocks keep between forward and backward, and where, and how what leaves the device travels."""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from schedules.errors import ProgramError
from schedules.model import ModelSpec
from schedules.op import Tier
from schedules.program import Program
from schedules.saved import saved_bytes
from schedules.workload import MemoryBudget, Workload

Activations = Literal["recompute", "inputs", "keep", "host", "nvme"]
KNOBS = {  # the help of knobs that many policies have
    "activations": "what a block keeps for its backward: its input, on the device (recompute) or the host (inputs), to "
    "run forward again from; or all that it needs, on the device (keep), the host or NVMe. What sends activations away "
    "is ours, for comparison, unless it is the default.",
    "every": "blocks per kept input: fewer inputs are kept, and the activations of so many blocks are there at once.",
    "keep": "how many of the last blocks keep their activations; as many as fit the device if left out.",
}


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What blocks keep for their backward, and where. A block in none of the first three runs forward again.

    on_device: all activations stay. on_host: they go to the host and come back. on_nvme: they go to the host and on
    to a drive, and come back. inputs: the block's input goes to the host and comes back, whatever else the block
    keeps. inputs_on_nvme: of these blocks, those whose inputs go on to a drive. slack: how many visits of a block lie
    between its own and the moment its buffer is needed again, or filled again. every: of so many blocks that run
    forward again one keeps its input, and they run forward again together: for all that their backwards need, or if
    `nested` for their inputs alone, so that each runs forward once more just before its backward. whole: it then makes
    its output too, which nobody reads, as torch's reentrant checkpoints do; the others stop once all that the backward
    needs is there.
    """

    on_device: Collection[int] = ()
    on_host: Collection[int] = ()
    on_nvme: Collection[int] = ()
    inputs: Collection[int] = ()
    inputs_on_nvme: Collection[int] = ()
    slack: int = 1
    every: int = 1
    nested: bool = False
    whole: bool = False

    def __post_init__(self) -> None:
        at_least_1("blocks that share an input", every=self.every)

    def recomputes(self, i: int) -> bool:
        """Whether block i runs forward again."""
        return not (i in self.on_device or i in self.on_host or i in self.on_nvme)

    def travels(self, p: Program, i: int, m: int) -> list[str]:
        """The tensors of block i, micro-batch m, that leave the device and come back."""
        found = [p.output(i - 1, m)] if i in self.inputs else []
        return [*found, p.saved(i, m)] if i in self.on_host or i in self.on_nvme else found

    def deep(self, p: Program, group: Iterable[int]) -> set[str]:
        """Those that go on to a drive, of these micro-batches."""
        return {
            *(p.saved(i, m) for i in self.on_nvme for m in group),
            *(p.output(i - 1, m) for i in self.inputs_on_nvme for m in group),
        }

    def pieces(self, blocks: Sequence[int]) -> list[list[int]]:
        """The blocks in order, those together that run forward again from one input.

        A block whose input travels has it for itself.
        """
        found: list[list[int]] = []

        def alone(i: int) -> bool:
            return not self.recomputes(i) or i in self.inputs

        for i in blocks:
            if found and len(found[-1]) < self.every and not (alone(i) or alone(found[-1][-1])):
                found[-1].append(i)
            else:
                found.append([i])
        return found

    def backward_visits(self, blocks: Sequence[int]) -> list[int]:
        """The blocks in the order in which `sweep` asks for their weights on the way back."""
        return [i for piece in reversed(self.pieces(blocks)) for i in (*piece[:-1], *reversed(piece))]


def kept_as(model: ModelSpec, activations: Activations, *, keep: int = 0, every: int = 1, whole: bool = False) -> Kept:
    """The last `keep` blocks keep their activations, the others do as `activations` says.

    recompute: their input stays and they run forward again; with `every`, one input for so many blocks. inputs: the
    same, the inputs wait on the host. keep: all stays. host, nvme: all goes there and comes back. `whole`:
    as in Kept.
    Raises ProgramError where a choice has no meaning.
    """
    if every > 1 and activations != "recompute":
        raise ProgramError(f"every: blocks that share an input, 1 unless they recompute; not {every}")
    at_most(len(model.blocks), "blocks", keep=keep)
    others = model.blocks[: len(model.blocks) - keep]
    last = model.blocks[len(others) :]
    return Kept(
        on_device=model.blocks if activations == "keep" else last,
        on_host=others if activations == "host" else (),
        on_nvme=others if activations == "nvme" else (),
        # the last block's is needed again at once
        inputs=[i for i in others if i != model.blocks[-1]] if activations == "inputs" else (),
        every=every,
        whole=whole,
    )


def at_most(limit: int, what: str, **counts: int | None) -> None:
    """Raises ProgramError for a knob that counts more than the `limit` there are, of `what`."""
    for name, count in counts.items():
        if count is not None and count > limit:
            raise ProgramError(f"{name}={count}: there are {limit} {what}")


def at_least_1(what: str, **counts: int) -> None:
    """Raises ProgramError for a knob that counts less than one, of `what`."""
    for name, count in counts.items():
        if count < 1:
            raise ProgramError(f"{name}: {what}, at least 1, not {count}")


def from_0_to_1(what: str, **shares: float | None) -> None:
    """Raises ProgramError for a knob that is a share, `what` says of what, and lies outside."""
    for name, share in shares.items():
        if share is not None and not 0 <= share <= 1:
            raise ProgramError(f"{name}: {what}, from 0 to 1, not {share}")


def most_that_fit(
    build: Callable[[int], Program],
    model: ModelSpec,
    workload: Workload,
    memory: MemoryBudget,
    *,
    copies: Sequence[int],
    grows: bool = False,
) -> Program:
    """The step that `build(n)` writes with the largest n of blocks keeping their activations that fits the device.

    The k-th of them keeps those of copies[k] micro-batches at once. It is `build(0)` where nothing fits. `grows`: with
    more of them it never takes less, so that the others need not be written to see that; where several blocks run again
    from one input it may.
    """
    one = saved_bytes(model, model.largest_block, workload)
    # where none keeps its activations, one buffer serves all that run again; it serves the first that keeps them too
    held = [max(count, 1) * one for count in itertools.accumulate(copies, initial=0)]
    written = functools.cache(build)
    fits, beyond = -1, len(held)  # the most that are known to fit, and the fewest that are known not to
    n = len(copies) if held[-1] <= memory.device_bytes else 0
    while True:
        lacking = -written(n).device_room(memory)
        if lacking <= 0 or (n == 0 and not grows):
            fits = n
        else:
            beyond = n
        if beyond - fits <= 1:
            return written(max(fits, 0))
        # if nothing else changes where more or fewer keep theirs; what does is seen when that is written
        expected = max(bisect_right(held, held[n] - lacking) - 1, n + 1 if n == fits else 0)
        n = expected if fits < expected < beyond else (fits + beyond) // 2


class Travel:
    """Activations on their way from the device and back, each beside the computation that follows or precedes.

    What one forward leaves behind goes at once, and the next `slack` forwards have buffers of their own; what a
    backward needs comes while the `slack` before it run. `returns` is what each backward needs back, in their order.
    `deep` tensors go on to a drive, and are read from there one visit earlier.
    """

    def __init__(self, p: Program, returns: Iterable[Sequence[str]], *, slack: int, deep: Collection[str]) -> None:
        self._program, self._slack, self._deep = p, slack, deep
        self._returns = deque(returns)
        self._reads = deque(self._returns)
        self._leaving: deque[Sequence[str]] = deque()  # the buffers that each of the last forwards has left

    def leave(self, tensors: Sequence[str]) -> None:
        """A forward has run, and leaves these behind."""
        self._leaving.append([self._go(tensor) for tensor in tensors])
        if len(self._leaving) > self._slack:
            self._release()

    def turn(self) -> None:
        """The last forward has run; the first backward comes."""
        while self._leaving:
            self._release()
        self._read()
        for _ in range(self._slack):
            self.come()

    def come(self) -> None:
        """A backward is about to run: bring back what one of the next needs."""
        self._read()
        for tensor in self._returns.popleft() if self._returns else ():
            self._program.restore(tensor)

    def _read(self) -> None:
        for tensor in self._reads.popleft() if self._reads else ():
            if tensor in self._deep:
                self._program.restore(tensor, tier=Tier.HOST)

    def _go(self, tensor: str) -> str:
        buffer = self._program.evict(tensor, hold=True)
        if tensor in self._deep:
            self._program.evict(tensor, tier=Tier.NVME)
        return buffer

    def _release(self) -> None:
        for buffer in self._leaving.popleft():
            self._program.release(buffer)
