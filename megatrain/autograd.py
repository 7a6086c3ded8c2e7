"""Late-bound weights: a layer's activations are kept for its backward, its weights and its input are not.

Autograd saves every tensor that backward reads. While a layer runs forward here, saved-tensor hooks sort these:
  - a view of a parameter or of the layer's input becomes a name, which backward looks up in whichever buffer holds that
    parameter or input by then;
  - what the layer says can be made `again` becomes a recipe;
  - all else goes into a `Saved`, whose bytes can be counted, moved to the host, and moved back.
So weights may leave after forward and come back elsewhere before backward, and nothing is recomputed but what the layer
itself asks for.

The graph's leaves still alias the buffers that forward ran in, but backward never reads them there. Autograd does not
check the versions of hooked tensors, and must not: slots are meant to be overwritten between forward and backward. That
a slot holds the right layer again is for the schedule's verifier to prove.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.utils.hooks import RemovableHandle

from megatrain.backend import POISON
from megatrain.sink import Sink

INPUT = "<input>"  # no parameter can have this name


class SavedError(RuntimeError):
    """Saved activations that are used twice, are not on the device, or do not fit a buffer; or cannot be late-bound."""


class Layer(Protocol):
    """What can be run here: a function of its parameters and its input, that owns no parameters.

    Where nothing is to be saved, `forward` is simply called, outside of this module. With `output` false only what
    backward reads is computed: the result has the output's shape and graph, and no values.

    `constants` are tensors that forward reads and that outlive every step, such as rotary tables. Forward must not
    change in place what autograd has saved.
    """

    @property
    def constants(self) -> Sequence[Tensor]: ...

    def forward(self, params: Mapping[str, Tensor], x: Tensor, *, output: bool = True) -> Tensor: ...


@dataclass(slots=True, eq=False)
class _Recipe:
    """A tensor that backward makes again from others: once for all its readers, and held until the last has read it."""

    make: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]  # what it is made of; from the first reader on, in `handles` instead
    handles: list[Tensor | _View] = field(default_factory=list)
    readers: int = 0  # that are still to come
    made: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _View:
    """Part of a named tensor (`of` is its name), of a kept storage (`of` is its number) or of what a recipe makes.

    Offset, size and stride are in elements.
    """

    of: str | int | _Recipe
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def of_base(self, base: Tensor) -> Tensor:
        return base.as_strided(self.size, self.stride, base.storage_offset() + self.offset)


class _Bag:
    """The kept storages of one forward run, and the names that its graph's handles refer to.

    The autograd graph owns this object through its hooks, so this object must not refer to the graph, or the two would
    keep each other alive for ever: storages are held as plain byte tensors.
    """

    def __init__(self, bound: Mapping[str, Tensor], constants: Sequence[Tensor], device: torch.device) -> None:
        for name, tensor in bound.items():
            if not tensor.is_contiguous():
                raise SavedError(f"{name} is not contiguous: it could not be found again in another buffer")
        # by address, not by storage: slots may be parts of one arena
        ranges = sorted((t.data_ptr(), t.data_ptr() + t.nbytes, name) for name, t in bound.items() if t.nbytes)
        self._starts = [start for start, _, _ in ranges]
        self._ranges = ranges
        self._dtypes = {name: t.dtype for name, t in bound.items()}
        self._constants = {t.untyped_storage().data_ptr() for t in constants}
        self._device = device
        self._numbers: dict[int, int] = {}  # storage address -> its number
        self.recipes: dict[int, _Recipe] = {}  # storage address -> how to make it again
        self.storages: list[Tensor] | None = []  # uint8, one dimension, whole storages; None: not on the device
        self.bound: Mapping[str, Tensor] = {}  # set for the time of a backward
        self.sinks: dict[str, Sink] = {}  # likewise: where the next term of a parameter's gradient goes
        self.given: set[str] = set()  # parameters that a term of the gradient has come for

    def sink(self, name: str) -> Sink | None:
        """Where the next term of a gradient goes: to be added, from the second on. None if nobody asks for it."""
        sink = self.sinks.get(name)
        if sink is not None:
            self.sinks[name] = sink.adding()
            self.given.add(name)
        return sink

    def pack(self, t: Tensor) -> Tensor | _View:
        if found := self._range_of(t):
            start, (begin, _, name) = t.data_ptr(), found
            if t.dtype != self._dtypes[name]:
                raise SavedError(f"{name} was saved as {t.dtype}, not {self._dtypes[name]}: it cannot be late-bound")
            return _View(name, t.dtype, (start - begin) // t.itemsize, tuple(t.shape), t.stride())
        storage = t.untyped_storage()
        address = storage.data_ptr()
        # attention on a GPU keeps the state of its random numbers, two words that may lie on the host
        few_words = storage.nbytes() <= 16 and not t.is_floating_point()
        if address in self._constants or few_words or t.device != self._device or not storage.nbytes():
            return t.detach()
        if recipe := self.recipes.get(address):
            if not recipe.readers:  # nothing is kept for what nobody reads
                recipe.handles, recipe.inputs = [self.pack(t) for t in recipe.inputs], ()
            recipe.readers += 1
            return _View(recipe, t.dtype, int(t.storage_offset()), tuple(t.shape), t.stride())
        assert self.storages is not None, "nothing is dropped while the forward runs"
        if address not in self._numbers:
            self._numbers[address] = len(self.storages)
            self.storages.append(torch.empty(0, dtype=torch.uint8, device=t.device).set_(storage))
        return _View(self._numbers[address], t.dtype, int(t.storage_offset()), tuple(t.shape), t.stride())

    def name_of(self, parameter: Tensor) -> str | None:
        """The name of a tensor that is all of a named one; None of any other."""
        begin, end, name = self._range_of(parameter) or (0, 0, "")
        return name if (begin, end) == (parameter.data_ptr(), parameter.data_ptr() + parameter.nbytes) else None

    def _range_of(self, t: Tensor) -> tuple[int, int, str] | None:
        """Begin, end and name of the named tensor in whose memory t begins."""
        at = bisect_right(self._starts, t.data_ptr()) - 1
        return self._ranges[at] if at >= 0 and t.data_ptr() < self._ranges[at][1] else None

    def unpack(self, handle: Tensor | _View) -> Tensor:
        if isinstance(handle, Tensor):
            return handle
        if isinstance(handle.of, str):
            return handle.of_base(self.bound[handle.of])
        if isinstance(handle.of, _Recipe):
            return handle.of_base(self._made(handle.of))
        if (storages := self.storages) is None:
            raise SavedError("the saved activations are not on the device: bind them to a buffer first")
        return handle.of_base(storages[handle.of].view(handle.dtype))

    def _made(self, recipe: _Recipe) -> Tensor:
        made = recipe.made
        if made is None:
            with torch.no_grad():
                made = recipe.make(*(self.unpack(handle) for handle in recipe.handles))
        recipe.readers -= 1
        recipe.made = made if recipe.readers else None
        return made


_RUNNING: ContextVar[_Bag | None] = ContextVar("_RUNNING", default=None)  # the forward that this thread runs


def sink_of(parameter: Tensor) -> Callable[[], Sink | None] | None:
    """For an op of a layer's forward that will deliver a gradient itself: what its backward calls to learn where to.

    None where no `forward` of this module runs, or `parameter` is none of the layer's: then autograd delivers it.
    """
    bag = _RUNNING.get()
    name = None if bag is None else bag.name_of(parameter)
    return None if bag is None or name is None else functools.partial(bag.sink, name)


def again(t: Tensor, make: Callable[..., Tensor], *inputs: Tensor) -> AbstractContextManager[None]:
    """Within, autograd does not keep `t` for backward, which calls `make(*inputs)` instead, once, if it reads it.

    `t` must be a whole storage, and `make` give the same numbers in the same layout. The inputs are kept if `t` is
    read. Where no `forward` of this module runs, this does nothing, and autograd keeps `t`.
    """
    bag = _RUNNING.get()
    return nullcontext() if bag is None else _with_recipe(bag, t, _Recipe(make, inputs))


@contextmanager
def _with_recipe(bag: _Bag, t: Tensor, recipe: _Recipe) -> Iterator[None]:
    # only for as long as `t` is sure to be there: its address may be another tensor's afterwards
    address = t.untyped_storage().data_ptr()
    bag.recipes[address] = recipe
    try:
        yield
    finally:
        del bag.recipes[address]


class Saved:
    """What one layer keeps from one forward run for its backward, without its weights and its input.

    To move it to the host, `copy_to` a host buffer, and `drop` it once that copy is complete. To bring it back,
    `restore` it from the host buffer into memory of the same parts; or copy the buffer to the device and `bind` the
    copy. Nothing here waits for a device or a stream.
    """

    def __init__(self, bag: _Bag, output: GradientEdge, params: dict[str, Tensor], x: Tensor) -> None:
        self._bag = bag
        self._output: GradientEdge | None = output
        self._params = params  # leaves of the graph
        self._x = x  # another leaf
        # In a flat buffer the parts whose sizes are divisible by the largest powers of two come first. Then each starts
        # at a multiple of that power, which aligns every type without padding.
        self._sizes = [storage.nbytes for storage in self.tensors]
        self._order = sorted(range(len(self._sizes)), key=lambda i: -(self._sizes[i] & -self._sizes[i]))

    @property
    def nbytes(self) -> int:
        """Bytes kept, each storage once, wherever it is by now."""
        return sum(self._sizes)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The kept storages, uint8 on the device; empty if they are not there."""
        return tuple(self._bag.storages or ())

    def copy_to(self, buffer: Tensor) -> None:
        """Copy all into `buffer`, uint8 [nbytes] or longer, asynchronously where the memory allows."""
        if (storages := self._bag.storages) is None:
            raise SavedError("the saved activations are not on the device")
        for number, part in self._parts(buffer):
            part.copy_(storages[number], non_blocking=True)

    def drop(self) -> None:
        """Let go of the device memory."""
        self._bag.storages = None

    def bind(self, buffer: Tensor) -> None:
        """From now on the activations are those in `buffer`, uint8, as `copy_to` wrote them."""
        self._bag.storages = [part for _, part in sorted(self._parts(buffer))]

    def restore(self, buffer: Tensor, memory: Sequence[Tensor]) -> bool:
        """Copy what `copy_to` wrote to `buffer` back into `memory`, asynchronously: parts as `tensors` were then.

        False, and nothing is done, where these parts have other sizes.
        """
        if [part.nbytes for part in memory] != self._sizes:
            return False
        for number, part in self._parts(buffer):
            memory[number].copy_(part, non_blocking=True)
        self._bag.storages = list(memory)
        return True

    def poison(self) -> None:
        """Overwrite all with one bits, a NaN in every floating type: whoever still reads this shows it."""
        for storage in self.tensors:
            storage.fill_(POISON)

    def _parts(self, buffer: Tensor) -> list[tuple[int, Tensor]]:
        if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
            raise SavedError(f"activations move through flat byte buffers, not {buffer.dtype} {list(buffer.shape)}")
        if buffer.nbytes < self.nbytes:
            raise SavedError(f"a buffer of {buffer.nbytes} B cannot hold {self.nbytes} B of saved activations")
        parts, start = [], 0
        for number in self._order:
            parts.append((number, buffer[start : start + self._sizes[number]]))
            start += self._sizes[number]
        return parts


def forward(
    layer: Layer,
    params: Mapping[str, Tensor],
    x: Tensor,
    *,
    trained: Collection[str] | None = None,
    output: bool = True,
) -> tuple[Tensor, Saved]:
    """Run `layer` and keep what its backward needs; without `output`, no more than that.

    `params` and `x` are contiguous; returns the output, outside any graph, and the activations saved. Only parameters
    in `trained` will have a gradient, all if None. Raises SavedError for a tensor that could not be late-bound.
    """
    chosen = params if trained is None else trained
    leaves = {name: p.detach().requires_grad_(name in chosen) for name, p in params.items()}
    leaf = x.detach().requires_grad_()
    bag = _Bag({**params, INPUT: x}, layer.constants, x.device)
    token = _RUNNING.set(bag)
    try:
        with torch.enable_grad(), saved_tensors_hooks(bag.pack, bag.unpack):
            y = layer.forward(leaves, leaf, output=output)
    finally:
        _RUNNING.reset(token)
    return y.detach(), Saved(bag, get_gradient_edge(y), leaves, leaf)


def backward(saved: Saved, params: Mapping[str, Tensor], x: Tensor, dy: Tensor, sinks: Mapping[str, Sink]) -> Tensor:
    """The gradient of the layer's input; each parameter's gradient goes to its sink as soon as it is known.

    `params` and `x` hold the values that forward saw, in the same buffers or in others; `dy` is the gradient of the
    output. This uses up `saved`. Raises SavedError if that was used up before, or is not on the device.
    """
    if saved._output is None:
        raise SavedError("the saved activations were used by a backward before")
    bag = saved._bag

    def deliver_to(name: str) -> RemovableHandle:
        def deliver(leaf: Tensor) -> None:
            if leaf.grad is not None and (sink := bag.sink(name)):  # no op of the layer has delivered it
                sink.put(leaf.grad)
                leaf.grad = None  # one parameter's gradient at a time is held outside the sinks

        leaf = saved._params[name]
        handle: RemovableHandle = leaf.register_post_accumulate_grad_hook(deliver)  # type: ignore[no-untyped-call]
        return handle

    hooks = [deliver_to(name) for name in sinks]
    bag.bound, bag.sinks = {**params, INPUT: x}, dict(sinks)
    try:
        inputs = [saved._x, *(saved._params[name] for name in sinks)]
        torch.autograd.backward(saved._output, dy, inputs=inputs)
    finally:
        bag.bound, bag.sinks = {}, {}
        for hook in hooks:
            hook.remove()
    for name in sinks.keys() - bag.given:
        sinks[name].put_zero()  # the output does not depend on this parameter
    dx = saved._x.grad
    saved._output, saved._x.grad = None, None
    saved.drop()
    return torch.zeros_like(x) if dx is None else dx
