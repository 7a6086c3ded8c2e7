"""AdamW's kernels for a GPU, by Triton's interpreter: the CPU's numbers, to a few units in the last place."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from test_megatrain_adam import (
    DTYPES,
    HYPER,
    SIZES,
    WHOLE,
    adam64,
    bits,
    make,
    rounded,
    special_values,
)

from megatrain import adam, adam_state
from megatrain.adam import Adam, step
from megatrain.adam_state import initialise, master_weights, split_state
from schedules.workload import PRECISIONS

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
TritonError = pytest.importorskip("triton.runtime.errors").TritonError
ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.filterwarnings(
    "ignore:.* encountered in:RuntimeWarning"
)  # of numpy, the interpreter's processor


def _counting(n, at):
    for i in range(n):
        tl.store(at, i)


@pytest.fixture(scope="module")
def interpreted():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")  # read where a kernel is declared
        try:
            triton.jit(_counting)[(1,)](2, torch.zeros(1, dtype=torch.int32))
        except TritonError as error:  # of Triton 3.6 from NumPy 2.4 on, triton#9171
            pytest.skip(f"Triton {triton.__version__} cannot interpret a loop with NumPy {np.__version__}: {error}")
        module = importlib.import_module("megatrain.native.adam_gpu")
        yield importlib.reload(module)
    importlib.reload(module)


@pytest.fixture
def as_on_gpu(interpreted, monkeypatch):
    """`step` takes slabs on the CPU for a GPU's."""
    monkeypatch.setattr(adam, "kernels_on", lambda device: interpreted)


@pytest.mark.parametrize("precision", WHOLE)
@pytest.mark.parametrize("n", SIZES)
def test_every_element_agrees_with_fp64(n, precision, as_on_gpu):
    _, weights, state, grads = make(n, precision)
    w = master_weights(weights, state, precision).double()
    m = v = torch.zeros(n, dtype=torch.float64)
    for number, grad in enumerate(grads, 1):
        step(weights, grad, state, HYPER, number, precision=precision)
        w, m, v = adam64(w, grad.double(), m, v, number, HYPER, HYPER.weight_decay)
        parts = split_state(state, n, precision)
        after = master_weights(weights, state, precision).double()
        torch.testing.assert_close(after, w, rtol=rounded(precision), atol=1e-6)
        moments = 2**-7 if precision == "bf16_16bit" else 1e-6
        torch.testing.assert_close(parts.m.double(), m, rtol=moments, atol=1e-7)
        torch.testing.assert_close(parts.v.double(), v, rtol=moments, atol=1e-9)
        w, m, v = after, parts.m.double(), parts.v.double()  # what was rounded away is lost


@pytest.mark.one_in(2)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.3, 0.0)])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_the_cpus_numbers(precision, betas, scale, interpreted, monkeypatch):
    """Decay of some ranges, a wide gradient, a scale; blocks of 8-bit moments that end before they are full."""
    n, hyper = 2100, Adam(lr=1e-2, betas=betas, weight_decay=0.1)
    decay = [(0, 700), (1000, 2050)]
    found = []
    for kernels in (None, interpreted):
        monkeypatch.setattr(adam, "kernels_on", lambda device, kernels=kernels: kernels)
        generator = torch.Generator().manual_seed(1)
        weights = torch.empty(n, dtype=DTYPES[precision])
        state = torch.full((PRECISIONS[precision].state_bytes(n),), 0xFF, dtype=torch.uint8)
        initialise(weights, state, precision, torch.randn(n, generator=generator))
        for number in (1, 2, 3):
            grad = torch.randn(n, generator=generator)
            step(
                weights, grad, state, hyper, number, precision=precision, decay=decay, layer=2, start=300,
                grad_scale=None if scale is None else torch.tensor(scale),
            )  # fmt: skip
        found.append((master_weights(weights, state, precision), weights.float(), state))
    (master, weights, state), (master_there, weights_there, state_there) = found
    # a moment that falls on the other side of a limit between two codes moves a weight by a little of the step
    tolerance = {"bf16_8bit": 5e-2, "bf16": 2**-7, "bf16_16bit": 2**-7}.get(precision, 1e-5)
    torch.testing.assert_close(master_there, master, rtol=tolerance, atol=1e-6)
    torch.testing.assert_close(weights_there, weights, rtol=max(tolerance, 2**-7), atol=1e-6)
    assert (master_there != master).float().mean() < (
        0.4 if precision in adam_state.MASTERS or precision == "fp32" else 0.01
    )
    if precision == "bf16_8bit":
        assert (state_there[: 2 * n] != state[: 2 * n]).float().mean() < 0.01


@pytest.mark.parametrize("precision", WHOLE)
def test_special_values_go_where_fp64_sends_them(precision, as_on_gpu):
    weights, after, expected = special_values(precision)
    torch.testing.assert_close(after, expected, rtol=rounded(precision), atol=1e-7, equal_nan=True)
    assert torch.equal(weights.isnan(), expected.isnan())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_nothing_beyond_a_slab_is_touched_and_a_nan_reaches_the_weights(precision, as_on_gpu):
    """Slabs lie side by side in an arena."""
    n = 100
    nbytes = PRECISIONS[precision].state_bytes(n)
    arena = torch.full((nbytes + 64,), 0x5A, dtype=torch.uint8)
    weights = torch.full((n + 64,), 7.0, dtype=DTYPES[precision])
    initialise(weights[:n], arena[:nbytes], precision, torch.ones(n))
    grad = torch.ones(n, dtype=DTYPES[precision])
    bits(grad)[3] = -1  # as a poisoned buffer holds
    step(weights[:n], grad, arena[:nbytes], HYPER, 1, precision=precision)
    assert (arena[nbytes:] == 0x5A).all() and (weights[n:] == 7.0).all()
    assert weights[:n].isnan().tolist() == [i == 3 for i in range(n)]
    assert (weights[:3] < 1).all()


def test_moments_of_eight_bits_shrink_and_stay_zero_as_on_the_cpu(interpreted, monkeypatch):
    """The last block is not full: what lies beyond it is not its largest."""
    n, found = 300, []
    for kernels in (None, interpreted):
        monkeypatch.setattr(adam, "kernels_on", lambda device, kernels=kernels: kernels)
        weights = torch.ones(n, dtype=torch.bfloat16)
        state = torch.empty(PRECISIONS["bf16_8bit"].state_bytes(n), dtype=torch.uint8)
        initialise(weights, state, "bf16_8bit")
        for number, value in enumerate((1.0, -1.0), 1):
            grad = torch.full((n,), value)
            grad[::3] = 0.0
            step(weights, grad, state, HYPER, number, precision="bf16_8bit")
        found.append(state)
    assert torch.equal(found[0][: 2 * n], found[1][: 2 * n])
    largest = [state[2 * n :].clone().view(torch.float32) for state in found]
    torch.testing.assert_close(*largest, rtol=1e-5, atol=0.0)


def test_a_tie_goes_to_even(as_on_gpu):
    master = 1 + torch.arange(256) * 2.0**-8  # every other one lies between two numbers of bf16
    weights, state = torch.ones(256, dtype=torch.bfloat16), torch.zeros(12 * 256, dtype=torch.uint8)
    split_state(state, 256, "bf16_fp32").master.copy_(master)
    step(weights, torch.ones(256), state, Adam(lr=0.0), 1, precision="bf16_fp32")
    assert torch.equal(weights, master.to(torch.bfloat16))


def test_where_triton_cannot_compile_torch_does_it(interpreted, monkeypatch):
    def fails(*args, **kwargs):
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(interpreted, "update", fails)
    monkeypatch.setattr(interpreted.torch, "zeros", lambda *shape, device: torch.empty(*shape))
    with pytest.warns(UserWarning, match=r"several passes.*C compiler"):
        assert adam.kernels_on.__wrapped__(torch.device("cuda")) is None
    assert adam.kernels_on(torch.device("cpu")) is None


def test_kernels_are_tried_out_before_a_slab_depends_on_them(interpreted, monkeypatch):
    tried = []
    monkeypatch.setattr(interpreted, "try_out", tried.append)
    assert adam.kernels_on.__wrapped__(torch.device("cuda")) is interpreted and len(tried) == 1
    monkeypatch.undo()
    interpreted.try_out(torch.device("cpu"))


COMPILED = """
import sys
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction
from triton.runtime.driver import driver
from megatrain import adam
from megatrain.native import adam_gpu, nf4_gpu
from schedules.workload import PRECISIONS


class Absent:
    "The driver of a GPU that is not here."

    def get_current_target(self):
        return GPUTarget("cuda", int(sys.argv[1]), 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0


def compiled(kernel, grid):
    def launch(*args, **options):
        assert "ptx" in kernel.run(*args, grid=grid, warmup=True, **options).asm
        launches.append(kernel)

    return launch


driver.set_active(Absent())
JITFunction.__getitem__ = compiled
adam.kernels_on = lambda device: adam_gpu
launches = []
for precision in PRECISIONS:
    for n, scale, decay in ((1, None, None), (4096, torch.tensor(0.5), [(0, 128), (256, 4096)]), (4097, None, [])):
        weights = torch.zeros(n, dtype=torch.float32 if precision == "fp32" else torch.bfloat16)
        state = torch.zeros(PRECISIONS[precision].state_bytes(n), dtype=torch.uint8)
        for grad in (torch.zeros_like(weights), torch.zeros(n)):
            adam.step(weights, grad, state, adam.Adam(lr=1e-3), 1, precision=precision, grad_scale=scale, decay=decay)
assert len(launches) == 6 * len(PRECISIONS)
for whole in (torch.zeros(65), torch.zeros(65, dtype=torch.bfloat16)):
    nf4_gpu.dequantise(torch.zeros(33, dtype=torch.uint8), torch.zeros(2), torch.zeros(16), whole)
assert len(launches) == 6 * len(PRECISIONS) + 2
"""


@pytest.mark.one_in(3)
@pytest.mark.parametrize("generation", [80, 90, 100])
def test_kernels_compile_for_gpus_that_are_not_here(generation):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILED, str(generation)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
