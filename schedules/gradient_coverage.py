"""Gradients counted as a step is read: whole where they are used, once in the norm, clipped once, applied once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from schedules import tensor as tensors
from schedules import trained
from schedules.op import Access, Op, Phase
from schedules.schedule import Schedule
from schedules.tensor import Part, describe, named, parse
from schedules.violation import Violation, some

if TYPE_CHECKING:
    from schedules.contents import Content


class Coverage:
    """What is to become of each layer's gradient in a step of this schedule, and which layers have been updated.

    `layers` are those trained, by name. `miscounted` are those not updated once in a step: the age of their weights
    follows from that. `no_norm`: gradients are to be clipped, and no op of the schedule computes their norm.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule, self._workload = schedule, schedule.workload
        self._trained_cls = trained.cls(schedule.workload)
        self.layers = tuple(sorted(map(schedule.model.layer_name, trained.layers(schedule.model, schedule.workload))))
        clips = bool(self.layers) and self._workload.grad_clip is not None
        self.no_norm = clips and not any(op.phase == Phase.NORM for op in schedule.ops)
        self.miscounted: set[str] = set()
        self._updated: dict[str, str] = {}  # layer -> the op that updated it, or the last part of it, in this step
        self._begun: set[str] = set()  # layers of which something was updated in this step

    def passes(self, layer: str) -> tuple[str, ...]:
        """The passes whose sum is the gradient of a layer: one per micro-batch, two where it is tied."""
        passes = [layer]
        if layer == "embed" and self._schedule.model.tie_word_embeddings:
            passes.append("head")
        return tuple(sorted(f"{name}.{m}" for name in passes for m in self._workload.microbatches))

    # ---- of the whole step

    def some_norm(self) -> Iterator[Violation]:
        """A policy that does not clip is told so once, and not by each of its updates."""
        if self.no_norm:
            clip = self._workload.grad_clip
            yield Violation(
                rule="gradient clipping",
                op=next((op.name for op in self._schedule.ops if op.phase == Phase.ADAM), ""),
                message=f"gradients are to be clipped to a global norm of {clip}, and no op computes that norm",
                fix="call norm() with every layer's gradient before the first update, or ask for no clipping",
            )

    def end_of_step(self) -> Iterator[Violation]:
        """All ops of a step have been read: every loss has been computed, and every gradient applied."""
        yield from self._all_updated()
        yield from self._all_losses()
        self._updated.clear()
        self._begun.clear()

    def _all_updated(self) -> Iterator[Violation]:
        for layer in self.layers:
            if layer not in self._updated:
                self.miscounted.add(layer)
                yield Violation(
                    rule="gradient coverage",
                    op=self._schedule.ops[-1].name,
                    message=f"the gradient of layer {layer} is never applied: the step has no update of it"
                    + (" that is whole" if layer in self._begun else ""),
                    fix=f"add an update of layer {layer}" + (", of each part" if layer in self._begun else ""),
                    subject=named(self._trained_cls, layer),
                )

    def _all_losses(self) -> Iterator[Violation]:
        losses = Counter(op.microbatch for op in self._schedule.ops if op.phase == Phase.LOSS)
        for m in self._workload.microbatches:
            if losses[m] != 1:
                yield Violation(
                    rule="loss coverage",
                    op=self._schedule.ops[-1].name,
                    message=f"the loss of micro-batch {m} is computed {losses[m]} times in a step",
                    fix="compute the loss of every micro-batch once",
                    subject=f"micro-batch {m}",
                )

    # ---- of one op, and what it found where it reads

    def whole_gradient(self, op: Op, access: Access, content: Content) -> Iterator[Violation]:
        """A gradient that is used has every backward pass in it once."""
        due = self.passes(parse(access.tensor).layer)
        if content.passes == due:
            return
        missing = sorted(set(due) - set(content.passes))
        extra = sorted(one for one in set(content.passes) if content.passes.count(one) > due.count(one))
        told = [f"without backward of {some(missing)}"] if missing else []
        told += [f"with {some(extra)} more than once"] if extra else []
        yield Violation(
            rule="gradient coverage",
            op=op.name,
            on=content.writer,
            buffer=access.buffer,
            message=f"{op.name} uses {describe(access.tensor)} {' and '.join(told)} (layer.micro-batch)",
            fix="add every micro-batch's gradient exactly once before it is used",
        )

    def updates_once(
        self, op: Op, weights: Access, part: Part | None, before: Content, after: Content
    ) -> Iterator[Violation]:
        """An update of a layer, or of a part of it, is the first of the step."""
        layer, done = parse(weights.tensor).layer, before.updated
        what = f"layer {layer}" if part is None else f"part {part} of layer {layer}"
        if (first := self._updated.get(layer)) is not None or str(part) in done:
            self.miscounted.add(layer)
            yield Violation(
                rule="gradient coverage",
                op=op.name,
                on=first or before.writer,
                buffer=weights.buffer,
                message=f"{op.name} updates {what} a second time in one step"
                + ("" if first is None else f", after {first}"),
                fix="update every layer exactly once",
            )
        self._begun.add(layer)
        if after.version > before.version:
            self._updated[layer] = op.name

    def clipped_alike(self, op: Op, target: Access, terms: Sequence[Content]) -> Iterator[Violation]:
        """Gradients that are added up are all clipped or none of them."""
        if len({term.scaled for term in terms}) > 1:
            yield Violation(
                rule="gradient clipping",
                op=op.name,
                buffer=target.buffer,
                message=f"{op.name} adds up {describe(target.tensor)} from one that is clipped and one that is not",
                fix="add up the whole gradient before it is clipped",
            )

    def not_clipped(self, op: Op, access: Access, content: Content) -> Iterator[Violation]:
        """A gradient that is about to be clipped, or whose norm is taken, has not been clipped before."""
        does = "takes the norm of" if op.phase == Phase.NORM else "reads the norm for"
        if content.scaled:
            yield Violation(
                rule="gradient clipping",
                op=op.name,
                on=content.writer,
                buffer=access.buffer,
                message=f"{op.name} {does} {describe(access.tensor)}, which {content.writer} has clipped",
                fix="clip every gradient once, after the norm of all",
            )

    def clips_once(self, op: Op, access: Access, found: Mapping[Access, Content]) -> Iterator[Violation]:
        """An update clips its gradient by the norm, or reads one that has been clipped, and then no norm."""
        if any(read.tensor == tensors.NORM for read in op.reads):
            yield from self.not_clipped(op, access, found[access])
        if not found[access].scaled:
            yield from self.whole_norm(op, found)

    def whole_norm(self, op: Op, found: Mapping[Access, Content]) -> Iterator[Violation]:
        """What is clipped is clipped by a norm with every layer in it once."""
        if self._workload.grad_clip is None or self.no_norm:
            return
        norm = next((content for access, content in found.items() if access.tensor == tensors.NORM), None)
        layers = norm.layers if norm else ()
        if layers != self.layers:
            missing = sorted(set(self.layers) - set(layers))
            lacks = f"a norm without layers {some(missing)}" if norm else "no global norm"
            yield Violation(
                rule="gradient clipping",
                op=op.name,
                message=f"{op.name} clips by {lacks if missing or not norm else 'a norm that counts a layer twice'}",
                fix="read the norm after every layer's gradient has been added to it once",
            )


def put_together(pieces: Iterable[str]) -> tuple[str, ...]:
    """Layers and parts of layers ("7", "7.0of2"), sorted, each set of all parts as the layer that they are."""
    count = Counter(pieces)
    for layer, of in sorted({(layer, int(part.partition("of")[2])) for layer, dot, part in map(_split, count) if dot}):
        parts = [f"{layer}.{part}" for part in tensors.parts(of)]
        times = min(count[part] for part in parts)
        count.update({layer: times})
        count.subtract(dict.fromkeys(parts, times))
    return tuple(sorted(count.elements()))


def _split(piece: str) -> tuple[str, str, str]:
    return piece.partition(".")
