"""The compiled kernel: torch's bits at any size and number of threads, or torch itself where it cannot be had."""

from __future__ import annotations

import hashlib
import math
import platform
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torchs_bits import of_torch

from megatrain import adam, adam_state
from megatrain.adam import Adam
from megatrain.native import adam as native
from megatrain.native import build
from megatrain.stochastic_rounding import Draws
from schedules.workload import PRECISIONS

WHOLE = [
    name for name in PRECISIONS if name != "bf16_8bit"
]  # moments with their own exponents; see test_megatrain_moments8.py

HYPER = Adam(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
# the last ones are longer than the piece that a thread takes, and no multiple of it
SIZES = [*range(1, 70), 255, 256, 257, 4095, 4096, 4097, 100_003]
needs_kernel = pytest.mark.skipif(native.kernel() is None, reason=str(native.why_not()))

Slabs = tuple[Tensor, Tensor, list[Tensor]]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """By more, torch splits a slab where it is not whole vectors."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def slabs(values: Tensor, grads: list[Tensor], precision: str, *, wide: bool = False) -> Slabs:
    n, dtype = len(values), torch.float32 if precision == "fp32" else torch.bfloat16
    weights, state = torch.empty(n, dtype=dtype), torch.empty(PRECISIONS[precision].state_bytes(n), dtype=torch.uint8)
    adam_state.initialise(weights, state, precision, values)
    return weights, state, [grad if wide else grad.to(dtype) for grad in grads]


def random(n: int) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(n)
    return torch.randn(n, generator=generator), [torch.randn(n, generator=generator) for _ in range(3)]


def train(made: Slabs, precision: str, hyper: Adam = HYPER, **options: object) -> tuple[Tensor, Tensor]:
    weights, state, grads = made
    for number, grad in enumerate(grads, 1):
        adam.step(weights, grad, state, hyper, number, precision=precision, **options)  # type: ignore[arg-type]
    return weights, state


def in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "kernel", lambda: None)


def same(found: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(found, right, strict=True))


@of_torch
@needs_kernel
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("precision", WHOLE)
def test_kernel_has_the_bits_of_torch(monkeypatch: pytest.MonkeyPatch, precision: str, wide: bool) -> None:
    found = {n: train(slabs(*random(n), precision, wide=wide), precision) for n in SIZES}
    in_torch(monkeypatch)
    for n in SIZES:
        assert same(found[n], train(slabs(*random(n), precision, wide=wide), precision)), n


@of_torch
@needs_kernel
@pytest.mark.parametrize("precision", WHOLE)
@pytest.mark.parametrize("betas", [(0.0, 0.0), (0.4, 0.3), (0.5, 0.999)])
def test_kernel_has_the_bits_of_torch_with_other_settings(
    monkeypatch: pytest.MonkeyPatch, precision: str, betas: tuple[float, float]
) -> None:
    hyper = Adam(lr=3e-4, betas=betas, eps=1e-6)
    options = {"grad_scale": torch.tensor(0.3), "decay": [(7, 300), (411, 1000)]}
    found = train(slabs(*random(1000), precision), precision, hyper, **options)
    in_torch(monkeypatch)
    assert same(found, train(slabs(*random(1000), precision), precision, hyper, **options))


@needs_kernel
@given(beta2=st.floats(0, 0.999999), number=st.integers(1, 10**6), seed=st.integers(0, 10**6))
def test_kernel_has_the_bits_of_torch_at_any_step(beta2: float, number: int, seed: int) -> None:
    """It multiplies where torch divides by the step's correction."""
    torch.manual_seed(seed)
    grad, values = torch.randn(4096) * 10.0 ** torch.randint(-19, 19, (4096,)), torch.randn(4096)
    hyper = Adam(lr=1e-2, betas=(0.9, beta2))
    found = []
    for of in (native.kernel(), None):
        weights, state, _ = slabs(values, [], "fp32")
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(native, "kernel", lambda of=of: of)
            adam.step(weights, grad, state, hyper, number, precision="fp32")
        found.append((weights, state))
    assert same(*found)


# SHA-256 of weights and states after three steps at each of SOME sizes, its first 8 bytes in hexadecimal digits
BITS = {
    "bf16": "a65f13a7111b0667",
    "bf16_split": "2b416ac8ed27871f",
    "bf16_fp32": "0065c32234ec76ae",
    "bf16_16bit": "1f0886d6655e2953",
    "bf16_8bit": "1dd49446185e76b6",
    "fp32": "7b90459829d263b5",
}
SOME = (256, 1024, 4352)  # whole blocks of moments: torch computes what is left


@needs_kernel
@pytest.mark.parametrize("precision", PRECISIONS)
def test_kernel_has_the_same_bits_on_every_processor(precision: str) -> None:
    """These are of an x86-64 with AVX-512; an emulated aarch64 with SVE2 has them too."""
    digest = hashlib.sha256()
    for n in SOME:
        drawn = np.random.default_rng(n).integers(-(1 << 23), 1 << 23, (4, n)) / (
            1 << 22
        )  # torch's differ by processor
        values, *grads = (torch.from_numpy(row.astype(np.float32)) for row in drawn)
        for part in train(slabs(values, grads, precision), precision):
            digest.update(part.view(torch.uint8).numpy().tobytes())
    assert digest.hexdigest()[:16] == BITS[precision]


@needs_kernel
@pytest.mark.parametrize("precision", WHOLE)
def test_number_of_threads_changes_no_bit(precision: str) -> None:
    n = 1_000_003
    one = train(slabs(*random(n), precision), precision)
    for threads in (2, 3, 7):
        torch.set_num_threads(threads)
        assert same(train(slabs(*random(n), precision), precision), one), threads


@needs_kernel
@pytest.mark.parametrize("precision", WHOLE)
def test_special_values_go_where_torch_sends_them(monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    values = [0.0, -0.0, 1e-45, -1e-45, 1e-39, 1e-30, 1.0, -1.0, 3.3e38, -3.4e38, math.inf, -math.inf, math.nan]
    grads = [0.0, 1e-40, 1e-20, 1.0, -1.0, 1e18, -3e38, math.inf, -math.inf, math.nan]
    pairs = torch.cartesian_prod(torch.tensor(values), torch.tensor(grads))
    pairs = pairs[: len(pairs) // native.VECTOR * native.VECTOR]  # all of them through the kernel
    made = [slabs(pairs[:, 0].contiguous(), [pairs[:, 1].contiguous()], precision) for _ in range(2)]
    weights, state = train(made[0], precision)
    in_torch(monkeypatch)
    other_weights, other_state = train(made[1], precision)
    torch.testing.assert_close(weights, other_weights, rtol=0, atol=0, equal_nan=True)
    parts, others = (adam_state.split_state(each, len(pairs), precision) for each in (state, other_state))
    for found, right in zip(
        (adam_state.master_weights(weights, state, precision), parts.m, parts.v),
        (adam_state.master_weights(other_weights, other_state, precision), others.m, others.v),
        strict=True,
    ):
        torch.testing.assert_close(found, right, rtol=0, atol=0, equal_nan=True)


@needs_kernel
@pytest.mark.parametrize("precision", WHOLE)
@pytest.mark.parametrize("poisoned", ["state", "gradient"])
def test_what_is_poisoned_becomes_no_number(precision: str, poisoned: str) -> None:
    """Its bits are all ones: half a unit added to these would make a number of them."""
    weights, state, _ = slabs(*random(1024), precision)
    grad = torch.ones(1024)
    (state if poisoned == "state" else grad.view(torch.uint8)).fill_(0xFF)
    adam.step(weights, grad, state, Adam(lr=1e-2), 1, precision=precision)
    assert weights.isnan().all() and adam_state.master_weights(weights, state, precision).isnan().all()


@needs_kernel
def test_kernel_does_the_work() -> None:
    weights, state, (grad, *_) = slabs(*random(1000), "bf16")
    parts, kernel = adam_state.split_state(state, 1000, "bf16"), native.kernel()
    assert kernel is not None
    of = native.Coefficients.of(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, step_number=1)
    moments = parts.m, parts.v
    options = {"precision": "bf16", "coefficients": of, "grad_scale": 1.0, "draws": Draws.of(0, 1)}
    assert kernel.update(weights, grad, *moments, None, **options) == 992
    assert parts.m[:992].all() and not parts.m[992:].any()
    wrong = grad.double()  # of a type that it does not know
    assert kernel.update(weights, wrong, *moments, None, **options) == 0


# ---- building


@needs_kernel
def test_library_is_built_once_and_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build.load(native.SOURCE)
    digest, library = sorted(build.cache_folder().iterdir())  # and nothing half-made beside them
    assert (digest.suffix, library.suffix) == (".sha256", ".so")
    before = library.stat().st_mtime_ns
    build.load(native.SOURCE)
    assert library.stat().st_mtime_ns == before and len(list(build.cache_folder().iterdir())) == 2


def test_without_a_compiler_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(build.NotBuilt, match=r"no C\+\+ compiler"):
        build.load(native.SOURCE)


@needs_kernel
def test_source_that_does_not_compile_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    broken = tmp_path / "broken.cpp"
    broken.write_text("this is not a program")
    with pytest.raises(build.NotBuilt, match=r"refused broken\.cpp"):
        build.load(broken)
    assert list(build.cache_folder().iterdir()) == []


@needs_kernel
def test_library_that_is_damaged_is_built_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "FLAGS", ("-shared", "-fPIC"))
    source = tmp_path / "small.cpp"
    source.write_text('extern "C" int three() { return 3; }')
    path = build.cache_folder() / f"small-{build._key(source, _command())}.so"
    assert build.load(source).three() == 3
    right = path.read_bytes()
    for damaged in (b"", right[: len(right) // 2], right[: len(right) // 2] + bytes(len(right) - len(right) // 2)):
        path.unlink()  # not written over: it is mapped
        path.write_bytes(damaged)
        assert build.load(source).three() == 3 and path.read_bytes() == right
    build._digest_of(path).write_bytes(b"\xff")
    assert build.load(source).three() == 3
    build._digest_of(path).unlink()  # as between the two renames
    assert build.load(source).three() == 3 and len(list(build.cache_folder().iterdir())) == 2


def _command() -> list[str]:
    compiler = next(found for name in build.COMPILERS if (found := shutil.which(name)))
    return [compiler, *build.FLAGS, *build.FLAGS_OF.get(platform.machine(), ())]


def test_compilers_message_may_be_in_any_encoding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "g++"
    compiler.write_bytes(b'#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "syst\xe8me" >&2; exit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("shutil.which", lambda name: str(compiler))
    with pytest.raises(build.NotBuilt, match=r"refused adam\.cpp: syst\\xe8me"):
        build.load(native.SOURCE)


def test_user_without_a_home_has_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may be run by a mere number, of which the system knows no name and no home."""

    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", unknown)
    with pytest.raises(build.NotBuilt, match="no home folder for it: set HOME or XDG_CACHE_HOME"):
        build.load(native.SOURCE)


def test_cache_that_cannot_be_written_is_no_error_of_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    native._built.cache_clear()
    try:
        with pytest.warns(UserWarning, match="several passes over its memory: adam.cpp could not be built"):
            assert native.kernel() is None
        assert native.why_not()  # it is told once
        weights, _ = train(slabs(*random(100), "bf16"), "bf16")
        assert weights.isfinite().all()
    finally:
        native._built.cache_clear()


# ---- against exact arithmetic


def exact(values: Tensor, grads: list[Tensor], hyper: Adam) -> tuple[Tensor, Tensor, Tensor]:
    """AdamW in fp64: weights and both moments."""
    w, (beta1, beta2) = values.double(), hyper.betas
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for number, grad in enumerate(grads, 1):
        g = grad.double()
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        mean, square = m / (1 - beta1**number), v / (1 - beta2**number)
        w = w * (1 - hyper.lr * hyper.weight_decay) - hyper.lr * mean / (square.sqrt() + hyper.eps)
    return w, m, v


@pytest.mark.one_in(2)
@pytest.mark.parametrize("by", ["kernel", "torch"])
@pytest.mark.parametrize("precision", ["fp32", "bf16_split", "bf16_fp32"])
def test_update_is_exact_to_fp32_at_every_size(monkeypatch: pytest.MonkeyPatch, precision: str, by: str) -> None:
    """Sizes 1 to 4097, each element: one slab cut into its tails, so that every remainder is seen."""
    if by == "torch":
        in_torch(monkeypatch)
    values, grads = random(4097)
    if precision != "fp32":
        grads = [grad.bfloat16().float() for grad in grads]
    right = exact(values, grads, HYPER)
    for n in [*range(1, 4097, 1 if by == "kernel" else 37), 4097]:
        weights, state = train(slabs(values[:n], [grad[:n] for grad in grads], precision), precision)
        parts = adam_state.split_state(state, n, precision)
        for found, expected in zip(
            (adam_state.master_weights(weights, state, precision), parts.m, parts.v), right, strict=True
        ):
            worst = (found.double() - expected[:n]).abs().max()
            assert worst < 2e-6, (n, float(worst))


@pytest.mark.parametrize("by", ["kernel", "torch"])
def test_special_values_are_those_of_exact_arithmetic(monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    if by == "torch":
        in_torch(monkeypatch)
    values = torch.tensor([0.0, -0.0, 1e-39, 1.0, -1.0, math.inf, -math.inf, math.nan]).repeat_interleave(8)
    grad = torch.tensor([0.0, 1e-40, 1e-20, 1.0, -1.0, math.inf, -math.inf, math.nan]).repeat(8)
    weights, state = train(slabs(values, [grad], "fp32"), "fp32")
    m, v = adam_state.split_state(state, 64, "fp32").m, adam_state.split_state(state, 64, "fp32").v
    right = exact(values, [grad], HYPER)
    for found, expected in zip((weights, m, v), right, strict=True):
        torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-12, equal_nan=True)


@needs_kernel
def test_kernel_holds_no_python_lock() -> None:
    """Another thread counts while one long update runs, far oftener than the interpreter would force a switch."""
    n = 16_000_000
    weights, state, (grad, *_) = slabs(torch.randn(n), [torch.randn(n)], "bf16")
    running, counted = threading.Event(), []

    def update() -> None:
        running.set()
        for number in range(1, 6):
            adam.step(weights, grad, state, HYPER, number, precision="bf16")

    thread = threading.Thread(target=update)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # nobody is made to give the lock up
    try:
        thread.start()
        running.wait()
        while thread.is_alive():
            counted.append(None)
            time.sleep(1e-4)
    finally:
        sys.setswitchinterval(interval)
    assert len(counted) > 5  # a call that held the lock would let this thread run between calls only


FORKED = """import os, signal, torch, warnings
from megatrain import adam
n = 1 << 20
slabs = [(torch.ones(n), torch.ones(n), torch.zeros(8 * n, dtype=torch.uint8)) for _ in range(2)]
def step(weights, grad, state):
    adam.step(weights, grad, state, adam.Adam(lr=1e-3), 1, precision="fp32")
    return weights.numpy()
torch.set_num_threads(2)
mine = step(*slabs[0])
warnings.simplefilter("ignore")  # of threads that a forked process does not have
child = os.fork()
if not child:
    signal.alarm(30)
    os._exit(0 if (step(*slabs[1]) == mine).all() else 1)  # torch has no threads here either
status = os.waitpid(child, 0)[1]
assert status == 0, status"""


# a thread's stack of some megabytes has no room in what is left of the address space
CROWDED = """import resource, torch
from pathlib import Path
from megatrain import adam
n = 1 << 20
first, second = [(torch.ones(n), torch.ones(n), torch.zeros(8 * n, dtype=torch.uint8)) for _ in range(2)]
def step(weights, grad, state):
    adam.step(weights, grad, state, adam.Adam(lr=1e-3), 1, precision="fp32")
    return weights
torch.set_num_threads(1)
step(*first)
torch.set_num_threads(4)
taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + (3 << 20), taken + (3 << 20)))
try:
    import threading
    threading.Thread(target=print).start()
except RuntimeError as error:
    assert "can't start new thread" in str(error)
else:
    raise SystemExit("a thread had room")
step(*second)
torch.set_num_threads(1)  # torch's own threads would end the process
assert (second[0] == first[0]).all()"""


@needs_kernel
@pytest.mark.parametrize("program", [FORKED, CROWDED], ids=["forked", "where no thread can be had"])
def test_a_process_needs_no_threads_of_another_and_no_more_than_it_can_have(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=Path(__file__).parent.parent, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
