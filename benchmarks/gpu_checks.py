"""Whether what `gpu.py` measures is right: the tests on this GPU, and small trainings that would show a race."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from schedules.errors import Refused

ROOT = Path(__file__).parent.parent
BACKEND = "cuda"  # of the smaller trainings
PATIENCE = 2.5  # times as long as it should take, after which a check is stopped
NEEDS = {"pytest": ("pytest", "hypothesis"), "megatrain": ("typer", "rich")}  # packages that nothing else needs here
# Statuses of pytest that tell nothing about what is tested; 1 is that of tests that failed.
NOT_TESTED = {
    2: "the tests could not be collected, or were interrupted",
    3: "an error inside pytest",
    4: "pytest could not begin",
    5: "no tests were found",
}
TOLD = {True: 15, False: 120}  # lines of what a check said that are kept, where it passed and where not
PROCESSES = 4  # of tests, where pytest can have several
# Tests of times, which turns with other processes on the GPU would spoil.
TIMED = "spin_lasts or trace_of_a_gpu"
ON_GPU = "test_gpu_"  # how the names of tests begin that compute on the GPU; the others tell the same anywhere


@dataclass(frozen=True, kw_only=True)
class Check:
    """A command that must succeed. `takes_s` is about how long it takes; it is stopped after PATIENCE times that."""

    name: str
    arguments: tuple[str, ...]
    takes_s: float
    environment: dict[str, str] = field(default_factory=dict)


def tests(name: str, chosen: str, *, takes_s: float) -> Check:
    options = ("-p", "no:cacheprovider", "-p", "no:benchmark", "--disable-warnings", "-q", "--tb=short", "-k", chosen)
    if importlib.util.find_spec("xdist"):
        options += ("-n", str(PROCESSES))
    # not those by Triton's interpreter, which no GPU runs: it is sensitive to NumPy's version
    return Check(name=name, arguments=("pytest", *options, "tests/test_megatrain_cuda.py"), takes_s=takes_s)


def smoke() -> Check:
    """The least that must work before anything is worth measuring."""
    return tests("smoke", "test_gpu_trains_as_the_cpu_does and two_slots", takes_s=60.0)


def checks() -> Iterator[Check]:
    """All others: losses and gradients beside plain PyTorch's, the optimizer's kernels, and small trainings in which a
    missing wait would show, by the stream sanitizer, and by poison and delays. Those that last longest come last: they
    go on while blocks are computed."""
    yield _sanitized("streamed")
    yield _sanitized("streamed", "-k", "offload=2", "-k", "keep=1")
    yield _sanitized("megatrain")
    yield Check(name="poisoned and delayed", arguments=_train("streamed", 5, "--debug"), takes_s=30.0)
    yield tests("tests", ON_GPU, takes_s=100.0)


def clocks() -> Check:
    """The tests that want the GPU for themselves."""
    return tests("clocks", TIMED, takes_s=25.0)


class Beside:
    """Checks that run beside each other, since all they tell is right from wrong; each begins with the first asked."""

    def __init__(self, checks: Iterable[Check]) -> None:
        self.checks, self._rows = tuple(checks), dict[str, Future[dict[str, Any]]]()

    @property
    def takes_s(self) -> float:
        """About how long it takes until any of them has ended for whom none has begun yet; 0 from then on."""
        return 0.0 if self._rows else max(check.takes_s for check in self.checks)

    def row(self, check: Check) -> dict[str, Any]:
        """As `checked`; who asks for one has begun them all."""
        if not self._rows:
            pool = ThreadPoolExecutor(len(self.checks))
            self._rows = {one.name: pool.submit(checked, one) for one in self.checks}
            pool.shutdown(wait=False)
        return self._rows[check.name].result()


def _sanitized(policy: str, *more: str) -> Check:
    return Check(
        name=f"stream sanitizer, {' '.join((policy, *more))}",
        arguments=_train(policy, 3, *more),
        takes_s=30.0,
        environment={"TORCH_CUDA_SANITIZER": "1"},
    )


def _train(policy: str, steps: int, *more: str) -> tuple[str, ...]:
    on = ("--backend", BACKEND, "--precision", "bf16")
    return ("megatrain", "run", "demo", *on, "--policy", policy, "--steps", str(steps), *more)


def checked(check: Check) -> dict[str, Any]:
    """Run it; the row says whether it passed, and the end of what it said.

    Raises Refused where a package is missing, or pytest does not come to test anything.
    """
    module = check.arguments[0]
    if missing := [name for name in NEEDS.get(module, ()) if importlib.util.find_spec(name) is None]:
        raise Refused(f"left out: not installed: {', '.join(missing)}")
    command, begun = [sys.executable, "-m", *check.arguments], time.monotonic()
    environment = {**os.environ, **check.environment}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE * check.takes_s
        )
    except subprocess.TimeoutExpired as error:
        text = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else ""
        passed, text = False, f"{text}\nstopped after {error.timeout:.0f} s"
    else:
        passed, text = done.returncode == 0, done.stdout + done.stderr
        if module == "pytest" and done.returncode in NOT_TESTED:
            raise Refused(f"left out: {NOT_TESTED[done.returncode]}:\n{_end(text, passed)}")
    return {
        "case": f"{check.name}: {' '.join(command[1:])}",
        "passed": passed,
        "check_s": time.monotonic() - begun,
        "said": _end(text, passed).splitlines(),
    }


def _end(text: str, passed: bool) -> str:
    return "\n".join(text.strip().splitlines()[-TOLD[passed] :])
