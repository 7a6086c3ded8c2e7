"""Where the layers of a streamed step live between uses, and where and when they are updated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from schedules import tensor as tensors
from schedules.errors import ProgramError
from schedules.model import ModelSpec
from schedules.sizes import tensor_bytes
from schedules.sweep import spread_large
from schedules.tensor import STATE, Part, named
from schedules.workload import Workload

Sized = TypeVar("Sized", int, tuple[int, Part | None])  # a block, or a part of one


class Places:
    """What the knobs of `streamed` mean for each layer; those not named here are explained there.

    A layer is `resident`, one of the `ends` (embedding and head), `held`, or `streamed`. Of the held ones the `settled`
    are updated on the device as well, which their weights then never leave. Micro-batches run in `groups`, one after
    another. With `one_gradient` there is room for that of one block at a time.
    """

    def __init__(
        self,
        model: ModelSpec,
        workload: Workload,
        *,
        groups: int,
        singly: int,
        defer: int,
        resident: int,
        hold: int,
        through: int,
        stay: int,
        parts: int,
        nvme: int,
        nvme_weights: int,
        one_gradient: bool = False,
    ) -> None:
        clip = workload.grad_clip is not None
        self._model, self._one_gradient = model, one_gradient
        self.groups, self.singly, self.parts = groups, singly, tensors.parts(parts)
        # layer -> how often its gradient comes: once for all micro-batches of a group, or once for each
        above = {model.head, *model.blocks[len(model.blocks) - singly :]} if singly else set()
        self.landings = {i: workload.accumulation if i in above else groups for i in model.layers}
        self._micro_batches = workload.accumulation

        self.resident = model.layers[:resident]
        # resident layers whose gradient stays as well, since it is not whole, or not to be applied, when it comes
        self.adding_up = [i for i in self.resident if clip or self.landings[i] > 1]
        self.ends = [i for i in (model.embed, model.head) if i not in self.resident]
        others = [i for i in model.blocks if i not in self.resident]
        oftener = [i for i in others if self.landings[i] > groups]  # loaded again for every micro-batch
        # Muon's updates are for the device, wherever the state comes from
        passing = len(others) if workload.multiplies_to_update else through
        # of held blocks whose states pass, one is the first: the next forward begins with it while the CPU still
        # updates others, and its state passes when links are idle; two with several micro-batches, since one that is
        # updated gradually need not wait until its neighbour's state has left
        most = 0 if oftener or clip else 2 if workload.accumulation > 1 else 1
        leading = others[: min(most, hold, passing)]
        held = self._spread(oftener, hold) | {*leading}
        held |= self._spread([i for i in others if i not in held], hold - len(held))
        self.held = sorted(held)
        self.streamed = [i for i in others if i not in held]

        # blocks updated on the device while their weights and gradient are there: parts of their states are there for
        # good, or the whole state passes through
        whole = [i for i in self.streamed if self.landings[i] == 1]
        partly = self._spread(whole, -(-stay // parts))
        self.staying = set([(i, part) for i in sorted(partly) for part in self.parts][:stay])
        self.settled = {*leading} | self._spread([i for i in self.held if i not in leading], passing - len(leading))
        self.through = self.settled | self._spread([i for i in whole if i not in partly], passing - len(self.settled))
        self.on_device = self.through | partly
        # with clipping these updates must wait for the norm of all gradients, until just before their next forward
        self.carried = self.on_device if clip else set[int]()
        if workload.multiplies_to_update and len(self.on_device) < len(others):
            raise ProgramError(
                f"{workload.optimizer} updates blocks on the device while their weights and whole gradient are there: "
                "those that are neither resident nor held take no singly or order=microbatches"
            )
        self._choose_pace(model, workload)

        # updated after everything has landed, first layer first (its gradient lands before the embedding's)
        by_cpu = [i for i in self.streamed if i not in self.on_device]
        self.late = set(model.layers) - self.carried if clip else self._spread(by_cpu, defer)
        landing, first = [model.head, *reversed(model.blocks), model.embed], self.streamed[:1]
        self.updates = [i for i in landing if i not in self.late]
        self.updates += sorted(self.late, key=lambda i: (i not in first, i))

        # what of blocks' states lives on a drive, some of these blocks' weights, and gradients that have to wait; first
        # of the late ones, whose traffic falls into the forward, when the drive has nothing else to do
        elsewhere = [(i, part) for i in self.streamed for part in self.parts if (i, part) not in self.staying]
        late, soon = ([state for state in elsewhere if (state[0] in self.late) is then] for then in (True, False))
        self.nvme_states = self._spread(late, nvme)
        self.nvme_states |= self._spread(soon, nvme - len(self.nvme_states))
        on_nvme = {i for i, _ in self.nvme_states}
        self.nvme_weights = self._spread(sorted(on_nvme), nvme_weights)
        self.nvme_grads = {i for i in self.nvme_weights if i in self.late and self.landings[i] == 1}
        # embedding and head in as many parts as make these no larger than a block's
        block = model.params(model.largest_block)
        self._ways = {i: -(-model.params(i) * parts // block) if parts > 1 else 1 for i in self.ends}

    def _choose_pace(self, model: ModelSpec, workload: Workload) -> None:
        """How many parts of blocks' states are applied on the device at once, and through how many buffers they pass.

        Blocks are updated right after their backward, or right before their forward. Those of whose states some pass,
        and that run all micro-batches at a visit, are updated gradually where that spares memory: a few parts before
        each micro-batch of the next block, or of the block before. Few buffers then do for the state, and weights in
        slots, which stay so much longer after their backward, have a slot more. Where there is no room for two blocks'
        gradients, parts come and go one after another before the next block runs, while the GPU waits.
        """
        parts, block = len(self.parts), model.layer_name(model.largest_block)
        at_once = -(-parts // self.turns(model.blocks[0]))
        spared = (parts - 2 * at_once) * tensor_bytes(named(STATE, block), model, workload) // parts
        stays = self.through > self.settled and not self.carried
        costs = tensor_bytes(named("w", block), model, workload) if stays else 0
        before_next = self._one_gradient and costs > 0
        gradual = spared > 0 and spared >= costs and not before_next
        some = self.on_device if costs or self.carried else self.settled
        passing_at_last = {i for i in some if (i, self.parts[-1]) not in self.staying}
        self.gradually = {i for i in passing_at_last if self.landings[i] == 1 and gradual}
        self.more_slots = 1 if gradual and costs else 0
        self.at_once = at_once if gradual else 1 if before_next else parts
        self.state_slots = min(2 * self.at_once, parts) + 1
        if not self.through:  # all that passes is what does not stay of one block
            self.at_once = self.state_slots = 2

    def _spread(self, of: Sequence[Sized], count: int) -> set[Sized]:
        """`count` of these blocks or parts of blocks: small ones last, since with them little is placed elsewhere."""
        return spread_large(of, count, lambda one: self._model.params(one if isinstance(one, int) else one[0]))

    def turns(self, i: int) -> int:
        """The micro-batches that block i runs at a visit, before the next block comes."""
        return self._micro_batches // self.landings[i]

    def parts_of(self, i: int) -> Sequence[Part | None]:
        """The parts in which layer i is updated: one where it is resident."""
        if i in self.resident:
            return (None,)
        return tensors.parts(self._ways[i]) if i in self._ways else self.parts
