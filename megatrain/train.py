"""Training by a schedule: memory, layers, data and optimizer around the executor."""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Generic

import torch
from torch import Tensor

from megatrain import checkpoint
from megatrain.actions import Actions, Batch, OnGradient
from megatrain.adam import Adam
from megatrain.backend import Backend, E, Work
from megatrain.carried import Carried
from megatrain.checkpoint import Checkpoint
from megatrain.data import TokenSource, inputs_and_targets, shares, whole_steps
from megatrain.documents import documents_of
from megatrain.executor import Executor
from megatrain.float_types import float_type
from megatrain.initial import random_adapters, with_checksums
from megatrain.nvme import Drive
from megatrain.pointwise import PLAIN, Pointwise
from megatrain.store import Store
from megatrain.template import templates
from schedules.evaluation import evaluation
from schedules.op import Tier
from schedules.schedule import Schedule
from schedules.trace import AHEAD, Trace
from schedules.verify import Verified
from schedules.workspace import MLP_CHUNK_TOKENS

# step, its loss, the norm of all gradients before they are clipped: none in a step that does not take it
OnStep = Callable[[int, float, float | None], None]


@dataclass(frozen=True, kw_only=True)
class Debug:
    """Makes schedule faults visible. `poison` fills with NaN whatever holds nothing; every op starts up to
    `delay_s` seconds late, at random by `seed`.
    """

    poison: bool = True
    delay_s: float = 0.0
    seed: int = 0


def as_they_are(schedule: Schedule, works: Sequence[Work]) -> Sequence[Work]:
    """What ops do, unchanged: how a run is prepared where nothing else is said."""
    return works


def unheard(*told: object) -> None:
    """What is told where nobody listens."""


def never() -> bool:
    """Whether a training is to stop early where nobody asks for it."""
    return False


class Trainer(Generic[E]):
    """Trains one model by one verified schedule. Use as a context manager, or `close` it.

    Args:
        hyper: the optimizer's settings, or a function from the step to them.
        initial: layer -> its parameters before step 0, fp32, flat.
        resume: go on from there in place of `initial` and `adapters`, as far as they are trained.
        adapters: block -> its adapters before step 0, fp32, flat, where adapters are trained; random ones of seed 0 if
            left out.
        on_gradient: called on the optimizer's stream with a copy of each layer's gradient, clipped, or of its parts.
        record: keep every op's times, for `trace`.
        began: the folder that `initial` is from, which a checkpoint tells whoever goes on from it.
        settings: step -> what it is trained with, in words, which a checkpoint tells as well.
        nvme: a folder on the drive where buffers on NVMe lie while the trainer is open.
        pointwise: how layers compute what multiplies no matrices.
        prepare: what to make of the ops' works before the first step, such as `megatrain.graphs.replayed`.
        on_stage: told what begins, since memory may take minutes: "allocating memory", "filling layer 3 of 34".

    Raises:
        NotVerified: see Executor.
        CheckpointError: `resume` has adapters beside other weights than those of `initial`.
        StoreError, DriveError: see Store.
        TemplateError, InputError: the model, or this step of it, cannot be trained here.
        ValueError: the data has tokens that the model does not know.
    """

    def __init__(
        self,
        verified: Verified,
        backend: Backend[E],
        data: TokenSource,
        hyper: Adam | Callable[[int], Adam],
        *,
        initial: Callable[[int], Tensor],
        adapters: Callable[[int], Tensor] | None = None,
        resume: Checkpoint | None = None,
        on_gradient: OnGradient | None = None,
        debug: Debug = Debug(poison=False),
        record: bool = False,
        began: Path | None = None,
        settings: Callable[[int], Mapping[str, object]] = lambda step: {},
        nvme: Path | None = None,
        pointwise: Pointwise = PLAIN,
        prepare: Callable[[Schedule, Sequence[Work]], Sequence[Work]] = as_they_are,
        on_stage: Callable[[str], None] = unheard,
    ) -> None:
        schedule = verified.schedule
        model, workload = schedule.model, schedule.workload
        if data.vocab_size > model.vocab_size:
            raise ValueError(f"the data has {data.vocab_size} different tokens, {model.name} {model.vocab_size}")
        self._verified, self._backend, self._data, self._began = verified, backend, data, began
        self._settings = settings
        layers = templates(
            model,
            seq_len=workload.seq_len,
            device=backend.device,
            dtype=float_type(workload.bytes.activation),
            pointwise=pointwise,
            pointwise_again=workload.recompute != "none",
            mlp_chunk=MLP_CHUNK_TOKENS if workload.recompute == "mlp" else None,
            matmul=workload.matmul,
            documents=data.document_end is not None,
        )
        with ExitStack() as opened:  # no file may be left behind
            on_stage("allocating memory")
            needed = schedule.allocated_bytes(Tier.NVME)
            self._drive = opened.enter_context(Drive(nvme)) if nvme is not None and needed else None
            self._store = Store(schedule, backend.allocate, drive=self._drive, poison=debug.poison)
            if adapters is None and workload.lora_rank is not None:
                adapters = random_adapters(model, workload.lora_rank, 0)
            checksums: dict[int, int] = {}
            source = initial if workload.lora_rank is None else with_checksums(initial, checksums)
            kept = resume.layer if resume is not None else None
            self._store.fill(verified, source, adapters, kept, on_stage)
            self._frozen = {model.layer_name(i): found for i, found in checksums.items()}
            if resume is not None:
                checkpoint.require_frozen(resume, self._frozen)
            by_step = hyper if callable(hyper) else lambda step: hyper
            self._carried = Carried(verified, self._store, by_step, on_gradient)
            self._actions = Actions(
                schedule=schedule,
                store=self._store,
                templates=layers,
                device=backend.device,
                hyper=by_step,
                carried=self._carried,
                on_gradient=on_gradient,
            )
            delays = random.Random(debug.seed)
            self._executor = Executor(
                verified,
                backend,
                prepare(schedule, self.works()),
                delay_s=(lambda: delays.uniform(0.0, debug.delay_s)) if debug.delay_s else None,
                record=record,
            )
            self._evaluation: tuple[Executor[E], Actions] | None = None  # made when it is first asked for
            # how many steps have been trained; whatever is evaluated reads the same text
            self.step = self._carried.applied = resume.step if resume is not None and workload.task == "train" else 0
            self.learned: dict[int, int] = {}  # step -> of how many tokens its loss is the mean
            opened.pop_all()

    def __enter__(self) -> Trainer[E]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the backend, and remove what lies on the drive."""
        self._backend.close()
        if self._drive is not None:
            self._drive.close()

    def run(
        self,
        steps: int,
        *,
        on_step: OnStep = unheard,
        stop: Callable[[], bool] = never,
    ) -> list[float]:
        """Train `steps` steps more; their losses, each the mean over all tokens of its step that are learned.

        `on_step` is told of each in order, AHEAD steps late so that nothing waits for it. Once `stop` says so no
        further step begins; those under way are finished.

        Raises:
            OpFailed: an op failed; the trainer is closed then, as after an interrupt.
        """
        try:
            return self._run(steps, on_step, stop)
        except BaseException:  # an interrupt too: no thread may be left behind
            self.close()
            raise

    def _run(self, steps: int, on_step: OnStep, stop: Callable[[], bool]) -> list[float]:
        losses: list[float] = []

        def finish(step: int) -> None:
            losses.append(_finished(self._executor, self._actions, step))
            squares = self._actions.squares.pop(step, None)
            on_step(step, losses[-1], None if squares is None else math.sqrt(float(squares)))

        first, last = self.step, self.step + steps
        for step in range(first, last):
            if step - AHEAD >= first:
                finish(step - AHEAD)
            if stop():
                last = step
                break
            self.learned[step] = _issued(self._executor, self._actions, self._data, step)
        for step in range(first + len(losses), last):
            finish(step)
        self.step = last
        return losses

    def evaluate(
        self, data: TokenSource, on_stage: Callable[[str], None] = unheard, stop: Callable[[], bool] = never
    ) -> tuple[float, int] | None:
        """The mean loss of a text by what is trained as it is now, and of how many tokens; nothing is trained by it.

        Whole steps of it are read, from its beginning, each sequence once. `on_stage` is told of each. Once `stop` says
        so no further one begins, and there is no loss.

        Raises:
            DataError: there are too few sequences for a step.
            OpFailed: an op failed; the trainer is closed then, as after an interrupt.
            Refused: see `schedules.evaluation`.
        """
        verified = None if self._evaluation else evaluation(self._verified)
        self._carried.apply(self.step)
        try:
            return self._evaluate(verified, data, on_stage, stop)
        except BaseException:
            self.close()
            raise

    def _evaluate(
        self,
        verified: Verified | None,
        data: TokenSource,
        on_stage: Callable[[str], None],
        stop: Callable[[], bool],
    ) -> tuple[float, int] | None:
        if self._evaluation is None:
            assert verified is not None, "the first time"
            store = self._store.within(verified.schedule)
            actions = replace(self._actions, schedule=verified.schedule, store=store, batches={}, losses={}, squares={})
            self._evaluation = Executor(verified, self._backend, actions.works()), actions
        executor, actions = self._evaluation
        steps = whole_steps(data, actions.schedule.workload)
        losses, learned = list[float](), list[int]()
        for step in range(steps):
            if step >= AHEAD:
                losses.append(_finished(executor, actions, step - AHEAD))
            if stop():
                break
            on_stage(f"evaluating step {step + 1} of {steps}")
            learned.append(_issued(executor, actions, data, step))
        losses += [_finished(executor, actions, step) for step in range(len(losses), len(learned))]
        if len(learned) < steps:
            return None
        total = sum(learned)
        return sum(map(operator.mul, losses, learned)) / total if total else 0.0, total

    def works(self) -> list[Work]:
        """What each op of the schedule does to this trainer's memory, in program order; made anew for each executor."""
        return self._actions.works()

    def issue_by(self, executor: Executor[E]) -> None:
        """Issue by another executor from the next step on: the same ops with these `works`, however it issues them.

        The one before is let go, and with it what its works hold, such as CUDA graphs.
        """
        self._executor = executor

    def trace(self) -> Trace:
        """Times of all ops since the last call, from `record`."""
        return self._executor.trace()

    def save(self, folder: Path) -> Path:
        """Write a checkpoint, see `megatrain.checkpoint.save`. Raises NotSaved, Diverged."""
        settings = self._settings(self.step - 1)
        schedule = self._verified.schedule
        return checkpoint.save(folder, schedule, self.step, self.kept, self._frozen, self._began, settings)

    def kept(self, i: int) -> tuple[Tensor, Tensor]:
        """What is trained of layer i in the type it is computed with, flat, and its optimizer state as bytes.

        Not to be written to, and good until the next step.
        """
        self._carried.apply(self.step)
        return self._store.kept(self._verified, i)

    def weights(self, i: int) -> Tensor:
        """Of `kept` what is trained, alone."""
        self._carried.apply(self.step)
        return self._store.weights(self._verified, i)

    def parameters(self, i: int) -> Tensor:
        """What is trained of layer i, parameters or adapters, as it is now, at its most exact: new fp32, flat."""
        self._carried.apply(self.step)
        return self._store.master(self._verified, i)


def _issued(executor: Executor[E], actions: Actions, data: TokenSource, step: int) -> int:
    """Issue a step of some text; how many of its tokens are learned."""
    inputs, targets = inputs_and_targets(data.batch(step))
    of_loss, end = shares(data, step, actions.schedule.workload).float(), data.document_end
    documents = () if end is None else tuple(documents_of(tokens, end, actions.device) for tokens in inputs)
    actions.batches[step] = Batch(
        inputs.to(actions.device), targets.to(actions.device), of_loss.to(actions.device), documents
    )
    if actions.device.type == "cuda":
        torch.cuda.current_stream().synchronize()  # `to` has waited; torch's stream sanitizer learns it here
    actions.losses[step] = {}
    executor.issue(step)
    return int(of_loss.count_nonzero())


def _finished(executor: Executor[E], actions: Actions, step: int) -> float:
    """Wait for a step; its loss."""
    executor.wait(step)
    del actions.batches[step]
    parts = actions.losses.pop(step)
    return sum(float(parts[m]) for m in sorted(parts))
