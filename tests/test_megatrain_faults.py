"""What goes wrong is seen: a missing wait in the result, an error or an interrupt at once and with no thread left."""

from __future__ import annotations

import dataclasses
import faulthandler
import signal
import threading
from collections.abc import Iterator, Sequence
from functools import cache

import pytest
import torch
from hand_written import WRITERS, small
from torch import Tensor

from megatrain import initial
from megatrain.adam import Adam
from megatrain.autograd import SavedError
from megatrain.backend import OpFailed, Task, Work
from megatrain.cpu import CpuBackend, CpuEvent
from megatrain.data import RandomTokens
from megatrain.store import StoreError
from megatrain.train import Debug, Trainer
from schedules.op import Stream, Wait
from schedules.schedule import Schedule
from schedules.verify import ScheduleError, Verified, verify
from schedules.workload import Workload

MODEL = small()
WORKLOAD = Workload(micro_batch_size=2, accumulation=2, seq_len=8, precision="fp32", grad_clip=0.1)
STEPS = 3


@pytest.fixture(autouse=True)
def _nothing_hangs() -> Iterator[None]:
    """A run that hangs ends the whole session, with every thread's stack."""
    faulthandler.dump_traceback_later(120, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("stream ")] == []


class Adverse(CpuBackend):
    """The op waited on starts only when the one that should have waited for it has finished.

    The worst that can happen without this wait, and without luck: no sleep decides it.
    """

    def __init__(self, wait: Wait, steps: int) -> None:
        super().__init__()
        self._wait, self._steps = wait, steps
        self._done = [threading.Event() for _ in range(steps)]

    def submit(self, task: Task, waits: Sequence[CpuEvent]) -> CpuEvent:
        return super().submit(dataclasses.replace(task, work=self._ordered(task)), waits)

    def run_on_host(self, task: Task) -> CpuEvent:
        return super().run_on_host(dataclasses.replace(task, work=self._ordered(task)))

    def _ordered(self, task: Task) -> Work:
        def work(step: int) -> None:
            if task.op.name == self._wait.on and step + self._wait.distance < self._steps:
                assert self._done[step + self._wait.distance].wait(timeout=60), "the wait was not necessary"
            try:
                task.work(step)
            finally:
                if task.op.name == self._wait.op:
                    self._done[step].set()

        return work


class Batches(RandomTokens):
    """Random tokens; the batch of `bad_step` cannot be had."""

    bad_step = -1
    error: BaseException = RuntimeError()

    def batch(self, step: int) -> Tensor:
        if step == self.bad_step:
            raise self.error
        return super().batch(step)


def trainer(verified: Verified, backend: CpuBackend, **options: object) -> Trainer[CpuEvent]:
    data = options.pop("data", RandomTokens(vocab_size=256, workload=WORKLOAD))
    start = initial.random_parameters(MODEL, 0)
    return Trainer(verified, backend, data, Adam(lr=1e-2), initial=start, **options)  # type: ignore[arg-type]


def result(verified: Verified, backend: CpuBackend) -> tuple[list[float], list[Tensor]]:
    with trainer(verified, backend, debug=Debug(poison=True)) as run:
        losses = run.run(STEPS)
        return losses, [run.parameters(i) for i in MODEL.layers]


# ---- a missing wait


def unproven(schedule: Schedule) -> Verified:
    """What `verify` would return, had it not refused the schedule; only a test may do this."""
    whole = verify(WRITERS[schedule.policy](schedule.model, schedule.workload))
    return dataclasses.replace(whole, schedule=schedule, fingerprint=schedule.fingerprint, behind={})


def without(schedule: Schedule, wait: Wait) -> Schedule:
    broken = dataclasses.replace(schedule, waits=tuple(w for w in schedule.waits if w != wait))
    with pytest.raises(ScheduleError, match="race"):
        verify(broken)
    return broken


@cache
def right(writer: str) -> tuple[list[float], list[Tensor]]:
    return result(verify(WRITERS[writer](MODEL, WORKLOAD)), CpuBackend())


WAITS = [
    pytest.param(writer, wait, id=f"{writer}: {wait.op} on {wait.on} {wait.distance}")
    for writer in WRITERS
    for wait in WRITERS[writer](MODEL, WORKLOAD).waits
]


@pytest.mark.parametrize(("writer", "wait"), WAITS)
def test_run_without_a_necessary_wait_goes_wrong(writer: str, wait: Wait) -> None:
    schedule = WRITERS[writer](MODEL, WORKLOAD)
    try:
        losses, parameters = result(unproven(without(schedule, wait)), Adverse(wait, STEPS))
    except OpFailed as failure:
        assert isinstance(failure.__cause__, (StoreError, SavedError))  # saved activations were not there
        return
    same = all(torch.equal(*pair) for pair in zip(parameters, right(writer)[1], strict=True))
    assert losses != right(writer)[0] or not same


# ---- errors


@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("writer", WRITERS)
def test_error_of_an_op_surfaces_with_its_name_and_stops_all_threads(writer: str, step: int) -> None:
    def broken(at: int, layer: int, of: slice, grad: Tensor) -> None:
        if (at, layer) == (step, 1):
            raise ArithmeticError("out of numbers")

    verified = verify(WRITERS[writer](MODEL, WORKLOAD))
    run = trainer(verified, CpuBackend(), on_gradient=broken)
    with pytest.raises(OpFailed, match=rf"U\.1 of step {step} failed on stream \w+: .*out of numbers") as caught:
        run.run(10)
    assert isinstance(caught.value.__cause__, ArithmeticError)
    assert run.step == 0
    # the threads are gone without a close(), and nothing runs after it
    with pytest.raises((OpFailed, RuntimeError)):
        run.run(1)


def test_first_error_is_told_when_several_ops_fail() -> None:
    def broken(step: int, layer: int, of: slice, grad: Tensor) -> None:
        raise ArithmeticError(layer)

    verified = verify(WRITERS["two_slots"](MODEL, WORKLOAD))
    with pytest.raises(OpFailed, match=r"U\.embed of step 0"):
        trainer(verified, CpuBackend(), on_gradient=broken).run(2)


def test_no_op_runs_after_one_that_failed() -> None:
    seen: list[int] = []

    def broken(step: int, layer: int, of: slice, grad: Tensor) -> None:
        seen.append(layer)
        if layer == 0:
            raise ArithmeticError

    verified = verify(WRITERS["two_slots"](MODEL, WORKLOAD))
    with pytest.raises(OpFailed):
        trainer(verified, CpuBackend(), on_gradient=broken).run(2)
    assert seen == [MODEL.embed, 0]


def test_error_of_the_data_stops_all_threads() -> None:
    data = Batches(vocab_size=256, workload=WORKLOAD)
    object.__setattr__(data, "bad_step", 2)
    object.__setattr__(data, "error", OSError("no more text"))
    verified = verify(WRITERS["two_slots"](MODEL, WORKLOAD))
    with pytest.raises(OSError, match="no more text"):
        trainer(verified, CpuBackend(), data=data).run(4)


# ---- interrupts


def test_interrupt_while_the_host_waits_stops_all_threads() -> None:
    waiting = threading.Event()

    class Waiting(CpuBackend):
        def host_wait(self, event: CpuEvent) -> None:
            waiting.set()
            super().host_wait(event)

    def interrupt(step: int, layer: int, of: slice, grad: Tensor) -> None:
        if (step, layer) == (0, 0):  # the host waits for this step first
            assert waiting.wait(timeout=60)
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, signal.SIGINT)

    run = trainer(verify(WRITERS["two_slots"](MODEL, WORKLOAD)), Waiting(), on_gradient=interrupt)
    with pytest.raises(KeyboardInterrupt):
        run.run(1000)


def test_interrupt_between_two_issues_stops_all_threads() -> None:
    class Interrupting(CpuBackend):
        def issue(self, task: Task) -> int:
            if (task.step, task.op.stream) == (1, Stream.D2H):
                raise KeyboardInterrupt
            return super().issue(task)

    run = trainer(verify(WRITERS["two_slots"](MODEL, WORKLOAD)), Interrupting())
    with pytest.raises(KeyboardInterrupt):
        run.run(3)
