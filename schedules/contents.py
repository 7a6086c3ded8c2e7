"""What every buffer holds while a schedule is read op by op: the meaning of a step, checked.

Tensors carry what makes them right or wrong: a weight how many updates it has had, a gradient the passes
that contributed to it and their step, an activation its step. Each phase has one rule that says what it
needs and what it leaves behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from schedules import tensor as tensors
from schedules import trained
from schedules.carried import carried
from schedules.gradient_coverage import Coverage, put_together
from schedules.op import Access, Op, Phase
from schedules.phases import COMPUTE, needed
from schedules.quantised import is_quantised
from schedules.schedule import Schedule
from schedules.tensor import Part, describe, parse
from schedules.violation import Violation


class Content(NamedTuple):
    """A tensor in a buffer. `version` counts updates (weights, state) or is the step (everything else)."""

    tensor: str
    version: int
    passes: tuple[str, ...] = ()  # gradients: the backward passes in it, sorted
    scaled: bool = False  # gradients: multiplied by the clipping coefficient
    layers: tuple[str, ...] = ()  # norm: layers whose gradients are in it, sorted; parts, where not all parts are
    updated: tuple[str, ...] = ()  # weights: the parts that have had one update more than `version` says, sorted
    ended_by: str = ""  # saved activations: the op that used them up, or moved them elsewhere
    writer: str = ""  # the op that wrote it, for messages

    def updated_in(self, part: Part | None) -> Content:
        """These weights after an update of `part` of them, or of all: the next version, once every part is updated."""
        due = sorted(map(str, tensors.parts(part.of))) if part else []
        updated = sorted({*self.updated, str(part)}) if part else []
        whole = updated == due
        return self._replace(version=self.version + whole, updated=() if whole else tuple(updated))


class Contents:
    """Reads a schedule step by step and yields what is wrong with what the ops find in their buffers."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._model = schedule.model
        self._trained_cls = trained.cls(schedule.workload)
        self._coverage = Coverage(schedule)
        self._held: dict[str, Content] = {}
        self._may_hold: dict[str, set[str]] = {}  # saved activations -> all buffers that they are written to in a step
        for op in schedule.ops:
            for access in op.writes:
                if parse(access.tensor).cls == tensors.SAVED:
                    self._may_hold.setdefault(access.tensor, set()).add(access.buffer)
        self._step = 0
        # layer updated with the gradient of the step before -> the place of the op that makes its next
        self._next_gradient = carried(schedule.model, schedule.ops)
        # layer -> the most steps by which weights that it was computed with were behind the newest
        self.behind = dict.fromkeys(self._coverage.layers, 0)
        # (step, weights, micro-batch) -> the version that its forward read
        self._forward_version: dict[tuple[int, str, int], int] = {}
        self.initial: dict[str, str] = {}  # buffer -> the tensor it must hold before the first step
        self.carried: dict[str, str] = {}  # buffer -> the gradient or norm in it that a step leaves to the next

    def check(self) -> Iterator[Violation]:
        """Violations in program order; of one op and kind only the first, since later steps repeat it.

        Three steps are read, and further ones for as long as each finds weights a step older than the step before did:
        weights that are n steps behind are seen in step n at the earliest. That ends. An update leaves no old version
        in its own buffer, so every older version has a buffer of its own, and the oldest cannot be further behind than
        there are buffers.
        """
        seen: set[tuple[str, str, str]] = set()
        most = min(self._schedule.staleness, len(self._schedule.buffers)) + 2
        yield from self._coverage.some_norm()
        while self._step < 3 or (self._step < most and self._oldest() == self._step - 1):
            for violation in self._one_step():
                key = (violation.rule, violation.op, violation.about)
                if key not in seen:
                    seen.add(key)
                    yield violation
            self._step += 1
        declared, oldest = self._schedule.staleness, self._oldest()
        if oldest < declared and not seen and not self._coverage.no_norm:
            yield Violation(
                rule="staleness",
                op="",
                message=f"declared is a staleness of {declared}, found one of {oldest}: "
                "no op computes with weights that are further behind",
                fix=f"declare staleness={oldest}",
            )

    def _oldest(self) -> int:
        return max(self.behind.values(), default=0)

    def newest(self) -> frozenset[str]:
        """Of the buffers in `initial`, those that hold the newest version of their tensor when a step ends.

        The others hold an older copy: the update was made in another buffer.
        """

        def age(buffer: str) -> tuple[int, int]:
            return self._held[buffer].version, len(self._held[buffer].updated)

        latest: dict[str, tuple[int, int]] = {}
        for buffer, tensor in self.initial.items():
            latest[tensor] = max(latest.get(tensor, age(buffer)), age(buffer))
        return frozenset(buffer for buffer, tensor in self.initial.items() if age(buffer) == latest[tensor])

    def _one_step(self) -> Iterator[Violation]:
        for place, op in enumerate(self._schedule.ops):
            self._before = self._is_of_step_before(place, op)
            found: dict[Access, Content] = {}
            for access in op.reads:
                yield from self._read(op, access, found)
            yield from _RULES[op.phase](self, op, found)
        yield from self._coverage.end_of_step()

    # ---- reading

    def _read(self, op: Op, access: Access, found: dict[Access, Content]) -> Iterator[Violation]:
        """Check one read, and note in `found` what it finds, or else what it should have: so one fault is told once."""
        held = self._held.get(access.buffer)
        if held is None and self._step == 0 and (held := self._initially(access)) is not None:
            self._held[access.buffer] = held
        if held is not None and held.tensor == access.tensor:
            found[access] = held
            if (problem := self._age(op, access.buffer, held)) is not None:
                yield problem
            return
        found[access] = self._expected(access.tensor)
        if access.tensor == tensors.NORM and self._coverage.no_norm:
            return
        what = (
            f"{describe(held.tensor)}, put there by {held.writer}"
            if held
            else f"nothing: {self._unwritten(op, access)}"
        )
        yield _stale_read(
            op,
            access.buffer,
            held.writer if held else "",
            f"{describe(access.tensor)} from {access.buffer}, which then holds {what}",
            f"write {access.tensor} into {access.buffer} before {op.name}, or read it where it is",
        )

    def _initially(self, access: Access) -> Content | None:
        """What a buffer holds before the first step, if it must: what is kept between steps, or carried over."""
        cls, layer = parse(access.tensor).cls, parse(access.tensor).layer
        if self._is_kept(access.tensor):
            self.initial[access.buffer] = access.tensor
            due = layer in self._next_gradient and cls in (self._trained_cls, tensors.STATE)
            return Content(access.tensor, -due, writer="the state before the first step")
        if self._before and (cls in tensors.GRADIENTS or (cls == tensors.NORM and not self._coverage.no_norm)):
            self.carried[access.buffer] = access.tensor
            return self._expected(access.tensor)
        return None

    def _is_of_step_before(self, place: int, op: Op) -> bool:
        """Whether the gradients that an op reads, or the norm, are those of the step before."""
        layers = {parse(access.tensor).layer for access in op.reads if parse(access.tensor).cls in tensors.GRADIENTS}
        return any(place < self._next_gradient.get(layer, -1) for layer in layers)

    @property
    def _due(self) -> int:
        """The step whose gradients, or norm, the op that is looked at has to read."""
        return self._step - 1 if self._before else self._step

    def _is_kept(self, tensor: str) -> bool:
        """Whether a tensor is carried from one step to the next. Weights that are made of quantised ones are not."""
        name = parse(tensor)
        return name.cls in tensors.PERSISTENT and not (
            name.cls == tensors.WEIGHT
            and is_quantised(self._model, self._model.layer_index(name.layer), self._schedule.workload)
        )

    def _unwritten(self, op: Op, access: Access) -> str:
        """Why a buffer is still empty where an op reads it, though a later op of each step may write to it."""
        name = parse(access.tensor)
        if name.cls == tensors.WEIGHT and not self._is_kept(access.tensor):
            packed = tensors.named(tensors.QUANTISED, name.layer)
            return f"it is quantised, and kept as {packed} until a cast makes it whole"
        for later in self._schedule.ops[self._schedule.index[op.name] :]:
            if access in later.writes:
                lasting = (
                    "only weights, adapters, optimizer state and the gradients of updates that a step begins with are "
                    "kept from one step to the next"
                )
                return f"{later.name} writes it later in the step, and {lasting}"
        return f"no op wrote it before {op.name}"

    def _age(self, op: Op, buffer: str, held: Content) -> Violation | None:
        """What is wrong with the version that an op reads: of weights it must be the one that this step trains, or as
        stale as declared; anything else must be of this step.
        """
        cls = parse(held.tensor).cls
        if cls == tensors.STATE or (cls in tensors.PARAMETERS and op.phase not in COMPUTE):
            return None  # only moved here; checked where it is computed with or updated
        if cls in tensors.PARAMETERS and (cls != self._trained_cls or not self._coverage.layers):
            return None  # frozen: there is one version
        what = describe(held.tensor)
        if held.updated:
            return _stale_read(
                op,
                buffer,
                held.writer,
                f"{what} while only {_parts_are(held.updated)} updated",
                f"update all parts of layer {parse(held.tensor).layer} before {op.name}",
            )
        if held.ended_by:
            return _stale_read(
                op,
                buffer,
                held.ended_by,
                f"{what} where they ended with {held.ended_by}: one backward uses them up, and a copy moves them",
                "run one backward of them, and read them where they were last copied to",
            )
        if cls in tensors.PARAMETERS and parse(held.tensor).layer in self._coverage.miscounted:
            return None
        stale = self._schedule.staleness if cls in tensors.PARAMETERS else 0
        newest = self._step if cls in tensors.PARAMETERS else self._due
        if cls in tensors.PARAMETERS:
            layer = parse(held.tensor).layer
            self.behind[layer] = max(self.behind[layer], self._step - held.version)
        if newest - stale <= held.version <= newest:
            return None
        if held.version > newest and cls in tensors.PARAMETERS:
            due = f"version {newest} is the newest that is due (counted in updates)"
            fix = (
                f"update layer {parse(held.tensor).layer} after {op.name}: a step computes with weights from before "
                "its own updates"
            )
        else:
            counted = f"updates; declared staleness {stale}" if cls in tensors.PARAMETERS else "steps"
            due = f"version {newest} is due (counted in {counted})"
            fix = f"bring {held.tensor} up to date between {held.writer} and {op.name}"
            fix += ", or declare the staleness" if cls in tensors.PARAMETERS else ""
        said = f"{what} in version {held.version} where {due}; {held.writer} wrote it"
        if cls in tensors.PARAMETERS and parse(held.tensor).layer in self._next_gradient and held.version < newest:
            said = f"{what} without the gradient of the step before, due first; {held.writer} wrote it"
        return _stale_read(op, buffer, held.writer, said, fix)

    def _expected(self, tensor: str) -> Content:
        name = parse(tensor)
        passes = self._coverage.passes(name.layer) if name.cls in tensors.GRADIENTS else ()
        layers = self._coverage.layers if name.cls == tensors.NORM else ()
        return Content(tensor, self._due, passes, layers=layers)

    # ---- writing

    def _write(self, op: Op, access: Access, content: Content) -> None:
        self._held[access.buffer] = content._replace(tensor=access.tensor, writer=op.name)

    def _copy(self, op: Op, found: dict[Access, Content]) -> Iterator[Violation]:
        (source,) = op.reads
        for target in op.writes:
            if parse(target.tensor).cls == tensors.SAVED:
                self._end(op, target.tensor)
            self._write(op, target, found[source])
        yield from ()

    def _end(self, op: Op, saved: str) -> None:
        """No buffer has these activations any longer. They are one object with one memory at a time: nothing would
        order an op that used them in one buffer and an op that used them in another.
        """
        for buffer in self._may_hold.get(saved, ()):
            content = self._held.get(buffer)
            if content is not None and content.tensor == saved:
                self._held[buffer] = content._replace(ended_by=op.name)

    def _compute(self, op: Op, found: dict[Access, Content]) -> Iterator[Violation]:
        if self._step == 0:  # what an op names is the same in every step
            yield from self._complete_op(op)
        yield from self._one_version(op, found)
        for access in op.writes:
            cls = parse(access.tensor).cls
            passes: tuple[str, ...] = ()
            if cls in tensors.GRADIENTS:
                before = found[access].passes if access in found else ()
                assert op.layer is not None
                passes = tuple(sorted([*before, f"{self._model.layer_name(op.layer)}.{op.microbatch}"]))
            self._write(op, access, Content(access.tensor, self._step, passes))
        for access in found if op.phase == Phase.BACKWARD else ():
            if parse(access.tensor).cls == tensors.SAVED:
                self._end(op, access.tensor)

    def _complete_op(self, op: Op) -> Iterator[Violation]:
        """A compute op must name all that its phase needs."""
        assert op.layer is not None and op.microbatch is not None
        reads, writes = needed(self._schedule, op)
        missing = [f"read {t}" for t in reads if t not in {a.tensor for a in op.reads}]
        missing += [f"write {t}" for t in writes if t not in {a.tensor for a in op.writes}]
        if op.phase == Phase.RECOMPUTE and not op.writes:  # it would be taken to compute less than it does
            missing.append("write its output, or what its backward needs")
        if missing:
            yield Violation(
                rule="incomplete op",
                op=op.name,
                message=f"{op.name} ({op.phase} of layer {self._model.layer_name(op.layer)}) does not "
                + ", ".join(missing),
                fix="name the buffer of every tensor that the phase needs",
            )

    def _one_version(self, op: Op, found: dict[Access, Content]) -> Iterator[Violation]:
        """A micro-batch must meet the same weights in forward, recompute and backward."""
        assert op.microbatch is not None
        for access, content in found.items():
            if parse(access.tensor).cls not in tensors.PARAMETERS:
                continue
            key = (self._step, access.tensor, op.microbatch)
            first = self._forward_version.setdefault(key, content.version)
            if first != content.version:
                yield Violation(
                    rule="stale read",
                    op=op.name,
                    buffer=access.buffer,
                    message=f"{op.name} reads version {content.version} of {access.tensor}, "
                    f"its forward read version {first}",
                    fix="use one version of a layer's weights throughout a step",
                )

    def _accumulate(self, op: Op, found: dict[Access, Content]) -> Iterator[Violation]:
        (target,) = op.writes
        terms = list(found.values())
        yield from self._coverage.clipped_alike(op, target, terms)
        passes = tuple(sorted(one for term in terms for one in term.passes))
        self._write(op, target, Content(target.tensor, self._due, passes, any(term.scaled for term in terms)))

    def _norm(self, op: Op, found: dict[Access, Content]) -> Iterator[Violation]:
        (target,) = op.writes
        layers: list[str] = []
        for access, content in found.items():
            name = parse(access.tensor)
            if name.cls == tensors.NORM:
                layers += content.layers
                continue
            layers.append(name.layer if name.part is None else f"{name.layer}.{name.part}")
            yield from self._coverage.whole_gradient(op, access, content)
            yield from self._coverage.not_clipped(op, access, content)
        self._write(op, target, Content(tensors.NORM, self._due, layers=put_together(layers)))

    def _scale(self, op: Op, found: dict[Access, Content]) -> Iterator[Violation]:
        (target,) = op.writes
        gradient = found[target]
        yield from self._coverage.whole_norm(op, found)
        yield from self._coverage.whole_gradient(op, target, gradient)
        yield from self._coverage.not_clipped(op, target, gradient)
        self._write(op, target, gradient._replace(scaled=True))

    def _zero(self, op: Op, found: dict[Access, Content]) -> Iterator[Violation]:
        for access in op.writes:
            self._write(op, access, Content(access.tensor, self._step))
        yield from ()

    def _adam(self, op: Op, found: dict[Access, Content]) -> Iterator[Violation]:
        weights = next((a for a in op.writes if parse(a.tensor).cls == self._trained_cls), None)
        state = next((a for a in op.writes if parse(a.tensor).cls == tensors.STATE), None)
        gradient = next((a for a in op.reads if parse(a.tensor).cls in tensors.GRADIENTS), None)
        if weights is None or state is None or gradient is None or weights not in found or state not in found:
            yield Violation(
                rule="incomplete op",
                op=op.name,
                message=f"{op.name} must read a gradient, and read and write what is trained and its optimizer state",
                fix=f"name the buffers of g, o and {self._trained_cls} of one layer",
            )
            return
        part = parse(state.tensor).part
        updated = found[weights].updated_in(part)
        yield from self._coverage.updates_once(op, weights, part, found[weights], updated)
        yield from self._coverage.whole_gradient(op, gradient, found[gradient])
        if found[gradient].version >= 0:  # whether one from before the first step is clipped, nothing tells
            yield from self._coverage.clips_once(op, gradient, found)
        for access in (weights, state):
            yield from self._up_to_date(op, access, found[access])
        self._write(op, weights, updated)
        self._write(op, state, found[state]._replace(version=found[state].version + 1))

    def _up_to_date(self, op: Op, access: Access, content: Content) -> Iterator[Violation]:
        """What is updated must have had every update so far: otherwise copies could take turns, each having some."""
        if content.version != self._due and parse(access.tensor).layer not in self._coverage.miscounted:
            yield Violation(
                rule="stale read",
                op=op.name,
                on=content.writer,
                buffer=access.buffer,
                message=f"{op.name} updates {describe(access.tensor)} in version {content.version} where version "
                f"{self._due} is due (counted in updates); {content.writer} wrote it",
                fix="update the copy that the last update wrote; where that is another, copy it back after that update",
            )

    def _sync(self, op: Op, found: dict[Access, Content]) -> Iterator[Violation]:
        yield from ()


_RULES = {
    Phase.COPY: Contents._copy,
    Phase.CAST: Contents._copy,
    Phase.EMBED: Contents._compute,
    Phase.FORWARD: Contents._compute,
    Phase.RECOMPUTE: Contents._compute,
    Phase.LOSS: Contents._compute,
    Phase.BACKWARD: Contents._compute,
    Phase.ACCUMULATE: Contents._accumulate,
    Phase.NORM: Contents._norm,
    Phase.SCALE: Contents._scale,
    Phase.ZERO: Contents._zero,
    Phase.ADAM: Contents._adam,
    Phase.SYNC: Contents._sync,
}


def _stale_read(op: Op, buffer: str, on: str, what: str, fix: str) -> Violation:
    """An op reads what is not due; `on` names the op that left it so, if one did."""
    message = f"{op.name} reads {what}"
    return Violation(rule="stale read", op=op.name, on=on, buffer=buffer, message=message, fix=fix)


def _parts_are(parts: Sequence[str]) -> str:
    """These parts as the subject of a sentence: 'parts 0of4, 1of4 are'."""
    return f"part{'s' if len(parts) > 1 else ''} {', '.join(parts)} {'are' if len(parts) > 1 else 'is'}"
