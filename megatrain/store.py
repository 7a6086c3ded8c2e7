"""A schedule's buffers as memory: one allocation each, before the first step, and typed views into them.

Device buffers for activations saved inside layers are not allocated; they are budgets. Autograd allocates what it
saves, and the store holds it, checks that it is no larger than the buffer, and lets go of it when the schedule does.
Where copies, which run on other streams, read or write such a buffer, the store keeps the memory until the buffer's
next content comes: torch gives freed memory to whatever the allocating stream runs next, while a copy may still be
under way.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection

import torch
from torch import Tensor

from megatrain import adam_state, muon, nf4
from megatrain.autograd import Saved
from megatrain.backend import POISON
from megatrain.checkpoint import Kept
from megatrain.float_types import float_type
from megatrain.nvme import Drive, DriveSlab
from schedules import tensor as tensors
from schedules import trained
from schedules.errors import Refused
from schedules.op import Access, Buffer, Phase, Tier
from schedules.optimizer import matrices, state_bytes
from schedules.quantised import is_quantised
from schedules.schedule import Schedule
from schedules.sizes import tensor_bytes
from schedules.tensor import parse
from schedules.verify import Verified
from schedules.workload import Workload

POISON_BLOCK = 1 << 20  # bytes of POISON on the device


class StoreError(Refused):
    """A buffer that cannot be provided, or saved activations that are not where, or not as small as, said."""


class Store:
    """The memory of one run of one schedule.

    With `poison`, memory that holds nothing is filled with NaN: every buffer before its first write, and every buffer
    that is `release`d.

    Raises:
        StoreError: a buffer is on NVMe and there is no drive.
        DriveError: the drive has no room.
    """

    def __init__(
        self,
        schedule: Schedule,
        allocate: Callable[[Buffer], Tensor],
        *,
        drive: Drive | None = None,
        poison: bool = False,
    ) -> None:
        self._schedule = schedule
        # released host memory is overwritten by copies from here, queued behind the copies that may still read it
        self._poison = None if not poison else allocate(Buffer(name="poison", tier=Tier.DEVICE, nbytes=POISON_BLOCK))
        if self._poison is not None:
            self._poison.fill_(POISON)
        self._slabs: dict[str, Tensor] = {}  # uint8
        self._on_drive: dict[str, DriveSlab] = {}
        self._views: dict[Access, Tensor] = {}
        self._saved: dict[str, tuple[str, Saved]] = {}  # buffer -> (tensor, activations)
        self._copied = _copied(schedule)
        self._memory: dict[str, tuple[Tensor, ...]] = {}  # buffer -> the memory of activations, where copies touch it
        classes: dict[str, set[str]] = {buffer.name: set() for buffer in schedule.buffers}
        for op in schedule.ops:
            for access in op.accesses:
                classes[access.buffer].add(parse(access.tensor).cls)
        for buffer in schedule.buffers:
            if buffer.tier == Tier.NVME:
                if not buffer.nbytes and not classes[buffer.name]:  # reserved, of nothing: it needs no drive
                    continue
                if drive is None:
                    raise StoreError(f"buffer {buffer.name} is on NVMe: give a folder on a drive, with --nvme FOLDER")
                self._on_drive[buffer.name] = drive.allocate(buffer)
                if poison:
                    self._on_drive[buffer.name].poison()
                continue
            if buffer.tier == Tier.DEVICE and tensors.SAVED in classes[buffer.name]:
                assert classes[buffer.name] == {tensors.SAVED}, "verified: they have device buffers of their own"
                continue
            self._slabs[buffer.name] = allocate(buffer)
            if poison:
                self._slabs[buffer.name].fill_(POISON)

    def within(self, schedule: Schedule) -> Store:
        """The same memory for another schedule, which has some of the same buffers and no saved activations."""
        other = copy.copy(self)
        other._schedule = schedule
        return other

    # ---- tensors in slabs

    def tensor(self, access: Access) -> Tensor:
        """The buffer's memory as the tensor named: exactly its elements, from the buffer's first byte.

        w, a, g, g32: one dimension, the parameters of the layer or part. o, q: uint8 [bytes].
        x, d: [batch, seq, hidden]. s: uint8 [bytes of the tensor]. norm: fp64 [].
        """
        if access not in self._views:
            self._views[access] = self._view(access)
        return self._views[access]

    def _view(self, access: Access) -> Tensor:
        name, precision = parse(access.tensor), self._schedule.workload.bytes
        model, workload = self._schedule.model, self._schedule.workload
        held = self._slabs[access.buffer][: tensor_bytes(access.tensor, model, workload)]
        if name.cls == tensors.NORM:
            return held.view(torch.float64)[0]
        if name.cls in (tensors.SAVED, tensors.STATE, tensors.QUANTISED):
            return held
        if name.cls in tensors.MICROBATCH_CLASSES:
            hidden = held.view(float_type(precision.activation))
            return hidden.view(workload.micro_batch_size, workload.seq_len, model.hidden_size)
        return held.view(self._dtype(access))

    def _dtype(self, access: Access) -> torch.dtype:
        """The element type of weights, adapters or gradients."""
        precision = self._schedule.workload.bytes
        itemsize = {tensors.GRAD32: 4, tensors.GRAD: precision.grad}.get(parse(access.tensor).cls, precision.weight)
        return float_type(itemsize)

    def on_drive(self, access: Access) -> DriveSlab | None:
        """The slab that a buffer on NVMe is; None of buffers in memory."""
        return self._on_drive.get(access.buffer)

    # ---- saved activations

    def put_saved(self, access: Access, saved: Saved) -> None:
        """`saved` is now what the buffer holds. Raises StoreError when it is larger than the buffer."""
        limit = self._schedule.buffer[access.buffer].nbytes
        if saved.nbytes > limit:
            raise StoreError(
                f"{access.tensor} is {saved.nbytes} bytes of saved activations, its buffer {access.buffer} "
                f"has {limit}: the model saves more than schedules.saved.saved_bytes counts"
            )
        self._saved[access.buffer] = access.tensor, saved
        if access.buffer in self._copied and access.buffer not in self._slabs:
            self._memory[access.buffer] = saved.tensors

    def memory_of_saved(self, access: Access) -> tuple[Tensor, ...]:
        """The memory of what the buffer held last, for activations that are copied there; empty if there is none."""
        return self._memory.get(access.buffer, ())

    def vacate(self, access: Access) -> None:
        """Let go of the buffer's memory: its next content brings its own. Called on the stream that will write it.

        That stream has waited for all who used the old memory, so from here on torch may give it to others.
        """
        for part in self._memory.pop(access.buffer, ()):
            if part.is_cuda:
                part.record_stream(torch.cuda.current_stream(part.device))

    def saved(self, access: Access) -> Saved:
        """What `put_saved` put there. Raises StoreError when the buffer holds something else, or nothing."""
        tensor, saved = self._saved.get(access.buffer, ("nothing", None))
        if saved is None or tensor != access.tensor:
            raise StoreError(f"{access.buffer} holds {tensor} where {access.tensor} is to be read")
        return saved

    def release(self, buffer: str, *, queued: bool = False) -> None:
        """Nobody will read what the buffer holds any more. Called by the last op that did.

        `queued`: that op is of a device stream, and may still be under way.
        """
        _, saved = self._saved.pop(buffer, ("", None))
        # the activations of a buffer elsewhere may by now be bound to a device buffer again
        if saved is not None and buffer not in self._slabs and buffer not in self._on_drive:
            if self._poison is not None:
                saved.poison()
            saved.drop()
        if self._poison is None:
            return
        if buffer in self._on_drive:
            self._on_drive[buffer].poison()
        elif buffer in self._slabs and self._schedule.buffer[buffer].tier == Tier.HOST and queued:
            for part in torch.split(self._slabs[buffer], POISON_BLOCK):
                part.copy_(self._poison[: part.nbytes], non_blocking=True)
        elif buffer in self._slabs and (queued or self._schedule.buffer[buffer].tier == Tier.HOST):
            self._slabs[buffer].fill_(POISON)  # device memory only if queued: no stream would wait for the host's fill

    # ---- before the first step, and after the last

    def fill(
        self,
        verified: Verified,
        source: Callable[[int], Tensor],
        adapters: Callable[[int], Tensor] | None = None,
        kept: Kept | None = None,
        on_stage: Callable[[str], None] = lambda stage: None,
    ) -> None:
        """Put weights, adapters and optimizer state where the first step expects them.

        `source(i)` is layer i's parameters, fp32, flat, on the CPU; `adapters(i)` likewise block i's adapters. With
        `kept`, from a checkpoint, what is trained is taken from there instead, and so are the weights of an evaluation.
        `on_stage` is told which layer's turn it is.
        """
        model, workload = self._schedule.model, self._schedule.workload
        updated = trained.layers(model, workload)
        for number, i in enumerate(model.layers, 1):
            on_stage(f"filling layer {number} of {len(model.layers)}")
            sources = {tensors.WEIGHT: source}
            if adapters is not None and workload.lora_rank is not None and model.is_block(i):
                sources[tensors.ADAPTER] = adapters
            for cls, values in sources.items():
                in_checkpoints = cls == trained.cls(workload)
                if cls == tensors.WEIGHT and is_quantised(model, i, workload):
                    self._quantise(verified, i, kept(i)[0] if in_checkpoints and kept is not None else values(i))
                elif in_checkpoints and kept is not None:
                    self.put(verified, i, *kept(i))
                elif in_checkpoints and i in updated:
                    self._begin(verified, i, values(i))
                else:
                    self._fill(homes(verified, cls, i), values(i).to(float_type(workload.bytes.weight)))

    def _quantise(self, verified: Verified, i: int, weights: Tensor) -> None:
        """Put block i's frozen weights where they are kept, quantised."""
        places, shapes = homes(verified, tensors.QUANTISED, i), self._schedule.model.parameter_shapes(i)
        slab, others = self._place_for(places, [Tier.HOST])
        nf4.quantise(weights.float(), slab, shapes, float_type(self._schedule.workload.bytes.weight))
        self._fill(others, slab)

    def _begin(self, verified: Verified, i: int, values: Tensor) -> None:
        """Put what is trained of layer i, and its optimizer state, in place as before the first step.

        They are made where they will lie if `in_place` allows it: to allocate gigabytes for each layer takes longer.
        """
        workload = self._schedule.workload
        tiers = in_place(workload)
        weights, copies = self._place_for(homes(verified, trained.cls(workload), i), tiers)
        weights = weights.view(float_type(workload.bytes.weight))
        for of, places in states(verified, i):
            state, others = self._place_for(places, tiers)
            if found := matrices(self._schedule.model, workload, i):
                muon.initialise(weights, state, found, workload.precision, values)
            else:
                adam_state.initialise(weights[of], state, workload.precision, values[of])
            self._fill(others, state)
        self._fill(copies, weights)

    def _place_for(self, places: list[Access], tiers: Collection[Tier]) -> tuple[Tensor, list[Access]]:
        """Memory in which to make what these homes hold, and the homes that it must then be copied to.

        It is the first home's own memory if that is on one of these tiers, or else new memory of the host.
        """
        first, *others = places
        if self._schedule.buffer[first.buffer].tier in tiers:
            return self.tensor(first), others
        return torch.empty(self._bytes(first), dtype=torch.uint8), places

    def put(self, verified: Verified, i: int, weights: Tensor, state: Tensor) -> None:
        """Put what is trained of layer i, and its optimizer state, as `kept` gives them, where a step expects them."""
        self._fill(homes(verified, trained.cls(self._schedule.workload), i), weights)
        for of, places in states(verified, i):
            if (nbytes := self._bytes(places[0])) == len(state):
                self._fill(places, state)
                continue
            self._fill(places, self._part(state, len(weights), of, nbytes))

    def _part(self, state: Tensor, params: int, of: slice, nbytes: int) -> Tensor:
        """The state of these of a layer's parameters, out of all of it."""
        part = torch.empty(nbytes, dtype=torch.uint8)
        for in_whole, in_part in adam_state.matched(state, part, params, of, self._schedule.workload.precision):
            in_part.copy_(in_whole)
        return part

    def _fill(self, places: list[Access], contents: Tensor) -> None:
        for home in places:
            if slab := self.on_drive(home):
                slab.write(contents.cpu())
            else:
                self.tensor(home).copy_(contents)

    def kept(self, verified: Verified, i: int) -> tuple[Tensor, Tensor]:
        """What is trained of layer i and its optimizer state, flat, on the CPU. Only between steps.

        Not to be written to, and valid until the next step: what lies whole in the host's memory is not copied.
        """
        workload, params = self._schedule.workload, trained.params(self._schedule.model, self._schedule.workload, i)
        weights = self.weights(verified, i)
        found = [(of, self.on_cpu(home)) for of, (home, *_) in states(verified, i)]
        if len(found) == 1:
            return weights, found[0][1]
        state = torch.empty(state_bytes(self._schedule.model, workload, i, params), dtype=torch.uint8)
        for of, part in found:
            for in_whole, in_part in adam_state.matched(state, part, params, of, workload.precision):
                in_whole.copy_(in_part)
        return weights, state

    def weights(self, verified: Verified, i: int) -> Tensor:
        """As `kept`, without the optimizer state."""
        return self.on_cpu(homes(verified, trained.cls(self._schedule.workload), i)[0])

    def on_cpu(self, home: Access) -> Tensor:
        """What a home holds, on the CPU: the home's own memory if it is the host's, or else a copy.

        Of weights, optimizer state and gradients. Only between steps.
        """
        slab = self.on_drive(home)
        if slab is None:
            return self.tensor(home).cpu()
        contents = torch.empty(self._bytes(home), dtype=torch.uint8)
        slab.read(contents)
        return contents if parse(home.tensor).cls == tensors.STATE else contents.view(self._dtype(home))

    def master(self, verified: Verified, i: int) -> Tensor:
        """What is trained of layer i, at its most exact: a new tensor, fp32, flat. Only between steps."""
        precision = self._schedule.workload.precision
        if found := matrices(self._schedule.model, self._schedule.workload, i):
            return muon.master_weights(*self.kept(verified, i), found, precision)
        return adam_state.master_weights(*self.kept(verified, i), precision)

    def _bytes(self, home: Access) -> int:
        return tensor_bytes(home.tensor, self._schedule.model, self._schedule.workload)


# ---- where what is trained lies between steps, and what moving it takes for a while


def homes(verified: Verified, cls: str, i: int) -> list[Access]:
    """The buffers that hold a tensor, or its parts, between steps; those with the newest version come first."""
    layer = verified.schedule.model.layer_name(i)
    found = [
        Access(buffer, held)
        for buffer, held in verified.initial.items()
        if (name := parse(held)).cls == cls and name.layer == layer
    ]
    return sorted(found, key=lambda home: home.buffer not in verified.newest)


def states(verified: Verified, i: int) -> list[tuple[slice, list[Access]]]:
    """Per part of layer i's optimizer state: which trained parameters it is of, and its homes."""
    model, workload = verified.schedule.model, verified.schedule.workload
    found: dict[str, list[Access]] = {}
    for home in homes(verified, tensors.STATE, i):
        found.setdefault(home.tensor, []).append(home)
    return [(trained.span(model, workload, i, parse(tensor).part), of) for tensor, of in found.items()]


def filling_bytes(verified: Verified, making: int) -> int:
    """The most host memory that `Store.fill` takes beside the buffers, for a layer that begins anew.

    While the layer's parameters are made they take `making` bytes each. Then they are there in fp32, beside whatever of
    the layer cannot be made where it will lie.
    """
    model, workload = verified.schedule.model, verified.schedule.workload
    made = [making * model.params(i) for i in model.layers]
    begun = [
        4 * trained.params(model, workload, i) + _bytes_elsewhere(verified, i, in_place(workload))
        for i in trained.layers(model, workload)
    ]
    return max(made + begun)


def keeping_bytes(verified: Verified, on_gpu: bool, *, state: bool = True) -> int:
    """The most host memory that `Store.kept` takes beside the buffers for a layer; without `state`, `Store.weights`."""
    layers = trained.layers(verified.schedule.model, verified.schedule.workload)
    return max((_gathered_bytes(verified, i, _in_ram(on_gpu), state=state) for i in layers), default=0)


def applying_bytes(verified: Verified, on_gpu: bool) -> int:
    """The most host memory that applying a gradient between steps takes beside the buffers: see megatrain.carried."""
    schedule, tiers = verified.schedule, _in_ram(on_gpu)
    model, workload = schedule.model, schedule.workload
    grads: dict[int, list[Access]] = {}
    for buffer, tensor in verified.carried.items():
        if (name := parse(tensor)).cls in tensors.GRADIENTS:
            grads.setdefault(model.layer_index(name.layer), []).append(Access(buffer, tensor))

    def applied(i: int) -> int:
        copied = [of for of in grads[i] if schedule.buffer[of.buffer].tier not in tiers or len(grads[i]) > 1]
        of_grad = sum(tensor_bytes(of.tensor, model, workload) for of in copied)
        gathered, parts = _gathered_bytes(verified, i, tiers), states(verified, i)
        if len(parts) == 1:
            return gathered + of_grad
        whole, part = (
            state_bytes(model, workload, i, params)
            for params in (trained.params(model, workload, i), max(of.stop - of.start for of, _ in parts))
        )
        return max(gathered, _bytes_elsewhere(verified, i, tiers, state=False) + whole + of_grad + part)

    return max(map(applied, grads), default=0)


def bytes_within_steps(schedule: Schedule) -> int:
    """Bytes of device buffers for activations that no copy touches: these have no memory between steps."""
    held = {access.buffer for op in schedule.ops for access in op.accesses if parse(access.tensor).cls == tensors.SAVED}
    of_none = held - _copied(schedule)
    return sum(b.nbytes for b in schedule.buffers if b.tier == Tier.DEVICE and b.name in of_none)


def _copied(schedule: Schedule) -> set[str]:
    """The buffers that copies read or write."""
    return {access.buffer for op in schedule.ops if op.phase == Phase.COPY for access in op.accesses}


def _in_ram(on_gpu: bool) -> list[Tier]:
    """The tiers whose buffers the CPU reads where they are."""
    return [Tier.HOST] if on_gpu else [Tier.HOST, Tier.DEVICE]


def _gathered_bytes(verified: Verified, i: int, tiers: Collection[Tier], *, state: bool = True) -> int:
    """What layer i takes to be in memory, with its optimizer `state` in one piece, beside what is on these tiers."""
    model, workload = verified.schedule.model, verified.schedule.workload
    several = state and len(states(verified, i)) > 1
    whole = state_bytes(model, workload, i, trained.params(model, workload, i)) if several else 0
    return _bytes_elsewhere(verified, i, tiers, state=state) + whole


def _bytes_elsewhere(verified: Verified, i: int, tiers: Collection[Tier], *, state: bool = True) -> int:
    """Bytes of what is trained of layer i, and of its optimizer `state`, that are not on these tiers."""
    schedule = verified.schedule
    found = [homes(verified, trained.cls(schedule.workload), i)]
    if state:
        found += [of for _, of in states(verified, i)]
    return sum(
        tensor_bytes(home.tensor, schedule.model, schedule.workload)
        for home, *_ in found
        if schedule.buffer[home.buffer].tier not in tiers
    )


def in_place(workload: Workload) -> list[Tier]:
    """The tiers on which what is trained is made where it will lie.

    Where a master is kept that is the host alone: making one needs room that a full device does not have.
    """
    return [Tier.HOST] if workload.precision in adam_state.MASTERS else [Tier.HOST, Tier.DEVICE]
