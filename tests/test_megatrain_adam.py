"""AdamW: torch's own bits in fp32, an exact master in bf16_split, and fp64 as the judge of all."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from torchs_bits import of_torch

from megatrain.adam import Adam, decayed, step, within
from megatrain.adam_state import initialise, master_weights, matched, split_state
from megatrain.stochastic_rounding import Draws, round_to
from schedules.workload import PRECISIONS

WHOLE = [
    name for name in PRECISIONS if name != "bf16_8bit"
]  # moments with their own exponents; see test_megatrain_moments8.py
NO_MASTER = ("bf16", "bf16_16bit")

SIZES = [1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 255, 257, 1000, 4095, 4096, 4097]
HYPER = Adam(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
DTYPES = {name: torch.float32 if name == "fp32" else torch.bfloat16 for name in PRECISIONS}


@pytest.fixture(autouse=True)
def one_thread():
    """A chunk split among threads has other vector tails, whose last bits may differ."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make(n, precision, seed=0):
    generator = torch.Generator().manual_seed(seed)
    source = torch.randn(n, generator=generator)
    weights = torch.empty(n, dtype=DTYPES[precision])
    state = torch.full((n * PRECISIONS[precision].state,), 0xFF, dtype=torch.uint8)
    initialise(weights, state, precision, source)
    grads = [torch.randn(n, generator=generator).to(DTYPES[precision]) for _ in range(3)]
    return source, weights, state, grads


def adam64(w, g, m, v, t, hyper, weight_decay):
    """One step in fp64, straight from the definition."""
    b1, b2 = hyper.betas
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g * g
    w = w * (1 - hyper.lr * weight_decay)
    return w - hyper.lr * (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + hyper.eps), m, v


def bits(x):
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.itemsize])


@of_torch
@pytest.mark.parametrize("n", SIZES)
def test_fp32_has_the_bits_of_torch_adamw(n):
    source, weights, state, grads = make(n, "fp32")
    parameter = torch.nn.Parameter(source.clone())
    theirs = torch.optim.AdamW(
        [parameter],
        lr=HYPER.lr,
        betas=HYPER.betas,
        eps=HYPER.eps,
        weight_decay=HYPER.weight_decay,
        fused=True,
    )
    for number, grad in enumerate(grads, 1):
        parameter.grad = grad.clone()
        theirs.step()
        step(weights, grad, state, HYPER, number, precision="fp32")
    assert torch.equal(bits(weights), bits(parameter.detach()))
    parts = split_state(state, n, "fp32")
    assert torch.equal(bits(parts.m), bits(theirs.state[parameter]["exp_avg"]))
    assert torch.equal(bits(parts.v), bits(theirs.state[parameter]["exp_avg_sq"]))


@of_torch
@pytest.mark.parametrize("precision", NO_MASTER)
@pytest.mark.parametrize("n", SIZES)
def test_without_a_master_the_bits_are_those_of_torch_adamw_in_fp32_and_then_rounded(n, precision):
    _, weights, state, grads = make(n, precision)
    parts = split_state(state, n, precision)
    for number, grad in enumerate(grads, 1):
        parameter = torch.nn.Parameter(weights.float())
        theirs = torch.optim.AdamW(
            [parameter], lr=HYPER.lr, betas=HYPER.betas, eps=HYPER.eps, weight_decay=HYPER.weight_decay, fused=True
        )
        moments = {"exp_avg": parts.m.to(torch.float32, copy=True), "exp_avg_sq": parts.v.to(torch.float32, copy=True)}
        theirs.state[parameter] = {"step": torch.tensor(number - 1.0), **moments}
        parameter.grad = grad.float()
        theirs.step()
        step(weights, grad, state, HYPER, number, precision=precision, layer=5, start=300)
        for_weights, for_moments = Draws.of(5, number).after(300).bits(n, weights.device)
        drawn_for = (for_weights, for_moments, for_moments)
        for found, right, drawn in zip(
            (weights, parts.m, parts.v), (parameter.detach(), *moments.values()), drawn_for, strict=True
        ):
            expected = right if found.dtype == torch.float32 else torch.empty_like(found)
            if expected is not right:
                round_to(expected, right, drawn)
            assert torch.equal(bits(found), bits(expected))


@pytest.mark.parametrize("precision", WHOLE)
@pytest.mark.parametrize("n", [7, 15, 250])
def test_a_gradient_that_was_widened_gives_the_same_bits(n, precision):
    """As schedules have it that add gradients up, or cast them, and others not."""
    for seed in range(40):
        torch.manual_seed(seed)
        source, grads = torch.randn(n), [torch.randn(n).to(DTYPES[precision]) for _ in range(4)]
        found = []
        for wide in (False, True):
            weights = torch.empty(n, dtype=DTYPES[precision])
            state = torch.zeros(PRECISIONS[precision].state_bytes(n), dtype=torch.uint8)
            initialise(weights, state, precision, source)
            for number, grad in enumerate(grads, 1):
                step(weights, grad.float() if wide else grad, state, HYPER, number, precision=precision)
            found.append((weights, state))
        assert all(torch.equal(*pair) for pair in zip(*found, strict=True)), seed


@pytest.mark.parametrize("precision", WHOLE)
@pytest.mark.parametrize("n", SIZES)
def test_every_element_agrees_with_fp64(n, precision):
    _, weights, state, grads = make(n, precision)
    w = master_weights(weights, state, precision).double()
    m = v = torch.zeros(n, dtype=torch.float64)
    for number, grad in enumerate(grads, 1):
        step(weights, grad, state, HYPER, number, precision=precision)
        w, m, v = adam64(w, grad.double(), m, v, number, HYPER, HYPER.weight_decay)
        parts = split_state(state, n, precision)
        if precision in NO_MASTER:
            # what a step rounds away is lost: the fp64 weight restarts from the rounded one
            torch.testing.assert_close(weights.double(), w, rtol=2**-7, atol=1e-7)
            w = weights.double()
        if precision == "bf16_16bit":
            torch.testing.assert_close(parts.m.double(), m, rtol=2**-7, atol=1e-7)
            torch.testing.assert_close(parts.v.double(), v, rtol=2**-7, atol=1e-9)
            m, v = parts.m.double(), parts.v.double()
    torch.testing.assert_close(parts.m.double(), m, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(parts.v.double(), v, rtol=1e-6, atol=1e-9)
    if precision not in NO_MASTER:
        torch.testing.assert_close(master_weights(weights, state, precision).double(), w, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("precision", ["bf16_split", "bf16_fp32"])
@pytest.mark.parametrize("n", SIZES)
def test_a_kept_master_is_updated_as_fp32_weights_are(n, precision):
    source, weights, state, grads = make(n, precision)
    plain, plain_state = source.clone(), torch.zeros(8 * n, dtype=torch.uint8)
    for number, grad in enumerate(grads, 1):
        step(weights, grad, state, HYPER, number, precision=precision)
        step(plain, grad.float(), plain_state, HYPER, number, precision="fp32")
    assert torch.equal(bits(master_weights(weights, state, precision)), bits(plain))
    assert torch.equal(state[: 8 * n], plain_state)
    # nearest, so never further than half a unit in the last place
    assert ((weights.double() - plain.double()).abs() <= plain.double().abs() * 2**-8).all()


def test_a_split_keeps_every_bit_pattern():
    low = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    # signs, zero, denormals, the least and largest normals, and the neighbours of infinity and of a tie
    tops = [0x0000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x3F81, 0x7F7F, 0x7F80]
    patterns = torch.cat([low + (top << 16) for top in tops])
    patterns = torch.cat([patterns, patterns ^ -(2**31)])
    source = patterns.view(torch.float32)
    source = source[~source.isnan()]
    weights = torch.empty(len(source), dtype=torch.bfloat16)
    state = torch.empty(10 * len(source), dtype=torch.uint8)
    initialise(weights, state, "bf16_split", source)
    assert torch.equal(bits(master_weights(weights, state, "bf16_split")), bits(source))
    finite = source.isfinite() & weights.isfinite()
    even = source.to(torch.bfloat16)
    tie = (bits(source) & 0xFFFF) == 0x8000
    assert torch.equal(weights[finite & ~tie], even[finite & ~tie])
    assert (weights[tie & finite].abs() > source[tie & finite].abs()).all()


def rounded(precision):
    """Relative error of a weight that a step has rounded."""
    return 2**-7 if precision in NO_MASTER else 1e-6


def special_values(precision):
    """Weights that a step updated, the masters of them, and what fp64 makes of these."""
    values = [0.0, -0.0, 1e-45, -1e-45, 1e-39, 1e-30, 1.0, -1.0, 3e38, math.inf, -math.inf, math.nan]
    grads = [0.0, 1e-40, 1e-20, 1.0, 1e18, math.inf, math.nan]
    pairs = torch.cartesian_prod(torch.tensor(values), torch.tensor(grads))
    grad = pairs[:, 1].to(DTYPES[precision]).contiguous()
    n = len(pairs)
    weights = torch.empty(n, dtype=DTYPES[precision])
    state = torch.empty(n * PRECISIONS[precision].state, dtype=torch.uint8)
    initialise(weights, state, precision, pairs[:, 0])
    before = master_weights(weights, state, precision).double()
    step(weights, grad, state, HYPER, 1, precision=precision)
    zero = torch.zeros(n, dtype=torch.float64)
    expected, _, _ = adam64(before, grad.double(), zero, zero, 1, HYPER, HYPER.weight_decay)
    return weights, master_weights(weights, state, precision).double(), expected


@pytest.mark.parametrize("precision", WHOLE)
def test_special_values_go_where_fp64_sends_them(precision):
    weights, after, expected = special_values(precision)
    torch.testing.assert_close(after, expected, rtol=rounded(precision), atol=1e-7, equal_nan=True)
    # 1e18 squared overflows neither type; a NaN must reach the weights that are streamed
    assert torch.equal(weights.isnan(), expected.isnan())


@pytest.mark.parametrize("precision", WHOLE)
def test_a_nan_of_all_ones_reaches_the_weights(precision):
    _, weights, state, _ = make(5, precision)
    grad = torch.full((5,), -1, dtype=torch.int32).view(torch.float32)  # as a poisoned buffer holds
    step(weights, grad, state, HYPER, 1, precision=precision)
    assert weights.isnan().all() and master_weights(weights, state, precision).isnan().all()


def test_chunks_and_ranges_change_nothing_but_the_decay(monkeypatch):
    n = 4097
    source, weights, state, grads = make(n, "bf16_split")
    monkeypatch.setattr("megatrain.adam.CHUNK", {"cpu": 256})
    _, small, small_state, _ = make(n, "bf16_split")
    step(small, grads[0], small_state, HYPER, 1, precision="bf16_split")
    monkeypatch.undo()
    step(weights, grads[0], state, HYPER, 1, precision="bf16_split")
    assert torch.equal(small, weights) and torch.equal(small_state, state)

    _, ranged, ranged_state, _ = make(n, "bf16_split")
    step(ranged, grads[0], ranged_state, HYPER, 1, precision="bf16_split", decay=[(16, 1024), (2048, 2064)])
    mask = torch.zeros(n, dtype=torch.bool)
    mask[16:1024] = mask[2048:2064] = True
    zero = torch.zeros(n, dtype=torch.float64)
    yes, _, _ = adam64(source.double(), grads[0].double(), zero, zero, 1, HYPER, HYPER.weight_decay)
    no, _, _ = adam64(source.double(), grads[0].double(), zero, zero, 1, HYPER, 0.0)
    after = master_weights(ranged, ranged_state, "bf16_split").double()
    torch.testing.assert_close(after, torch.where(mask, yes, no), rtol=1e-6, atol=1e-7)
    assert ((yes - no).abs() > 1e-5).any()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("n", [1000, 4096, 4097])
def test_a_part_by_itself_has_the_bits_of_the_whole(n, precision):
    """Weights and state, decay of a range that two parts share included; and both ways between slabs.

    Ranges end where vectors do, as in models: elsewhere a vector's tail is computed apart, and its last bit may differ.
    """
    state_bytes, decay = PRECISIONS[precision].state_bytes, [(96, 704), (800, 896)]
    cuts = [0, 256, 768, n]
    source = torch.randn(n)
    weights, grad = torch.empty(n, dtype=DTYPES[precision]), torch.randn(n).to(DTYPES[precision])
    state = torch.empty(state_bytes(n), dtype=torch.uint8)
    initialise(weights, state, precision, source)
    step(weights, grad, state, HYPER, 1, precision=precision)  # so that moments differ
    parted = weights.clone()
    slabs = []
    for a, b in itertools.pairwise(cuts):
        part = torch.empty(state_bytes(b - a), dtype=torch.uint8)
        for in_whole, in_part in matched(state, part, n, slice(a, b), precision):
            in_part.copy_(in_whole)
        slabs.append(part)
    assert sum(len(part) for part in slabs) == len(state)
    step(weights, grad, state, HYPER, 2, precision=precision, decay=decay)
    back = torch.full_like(state, 0xFF)
    for (a, b), part in zip(itertools.pairwise(cuts), slabs, strict=True):
        of = slice(a, b)
        step(parted[of], grad[of], part, HYPER, 2, precision=precision, decay=within(decay, of), start=a)
        for in_whole, in_part in matched(back, part, n, of, precision):
            in_whole.copy_(in_part)
    assert torch.equal(bits(parted), bits(weights))
    assert torch.equal(back, state)


def test_decay_is_for_matrices():
    shapes = {"norm": (4,), "q": (4, 4), "k": (2, 4), "bias": (2,), "o": (4, 4), "last": (4,)}
    assert decayed(shapes) == [(4, 28), (30, 46)]


@pytest.mark.parametrize("precision", WHOLE)
def test_the_gradient_is_scaled_and_left_alone(precision):
    _, weights, state, grads = make(100, precision)
    _, other, other_state, _ = make(100, precision)
    grad = grads[0].clone()
    step(weights, grad, state, HYPER, 1, precision=precision, grad_scale=torch.tensor(0.25))
    assert torch.equal(grad, grads[0])
    step(other, grads[0] * 0.25, other_state, HYPER, 1, precision=precision)  # exact: a power of two
    assert torch.equal(weights, other) and torch.equal(state, other_state)


def test_a_wider_gradient_is_used_as_it_is():
    _, weights, state, _ = make(64, "bf16_split")
    grad = torch.full((64,), 1.0 + 2**-12)  # not a bf16 number
    step(weights, grad, state, HYPER, 1, precision="bf16_split")
    assert split_state(state, 64, "bf16_split").m[0].item() == pytest.approx(0.1 * (1 + 2**-12), rel=1e-6)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_steps_below_a_bf16_unit_add_up(precision):
    """In the master, or in the mean of what has none: a hundredth of a unit is one unit in one of a hundred weights."""
    n, hyper = 4096, dataclasses.replace(HYPER, lr=1e-4, weight_decay=0.0)
    weights = torch.ones(n, dtype=DTYPES[precision])
    state = torch.empty(PRECISIONS[precision].state_bytes(n), dtype=torch.uint8)
    initialise(weights, state, precision)
    for number in range(1, 101):
        step(weights, torch.ones(n, dtype=weights.dtype), state, hyper, number, precision=precision)
    assert weights.double().mean().item() == pytest.approx(0.99, abs=2e-4 if precision in NO_MASTER else 2**-8)
    if precision in NO_MASTER:  # as far from each other as so many coins
        assert weights.double().std().item() == pytest.approx(math.sqrt(0.01 * 2**-8), rel=0.1)


def test_a_second_moment_of_16_bits_follows_its_gradient():
    """It moves by a thousandth of the way in a step, which is less than its rounding."""
    n, hyper = 4096, dataclasses.replace(HYPER, betas=(0.9, 0.999))
    _, weights, state, _ = make(n, "bf16_16bit")
    for number in range(1, 1001):
        step(weights, torch.ones(n, dtype=torch.bfloat16), state, hyper, number, precision="bf16_16bit")
    found = split_state(state, n, "bf16_16bit").v.double()
    assert found.mean().item() == pytest.approx(1 - 0.999**1000, rel=1e-2)


@pytest.mark.parametrize("precision", [*NO_MASTER, "bf16_8bit"])
def test_layers_and_steps_are_rounded_each_their_own_way(precision):
    n, found = 1024, []
    for layer, number in ((0, 1), (1, 1), (0, 2), (0, 1)):
        weights = torch.ones(n, dtype=torch.bfloat16)
        state = torch.empty(PRECISIONS[precision].state_bytes(n), dtype=torch.uint8)
        initialise(weights, state, precision)
        step(weights, torch.ones(n), state, Adam(lr=2**-9), number, precision=precision, layer=layer)
        found.append(weights)
    assert torch.equal(found[0], found[3])
    for a, b in itertools.combinations(found[:3], 2):
        assert 0.2 < (a != b).float().mean() < 0.8


def test_sizes_and_types_that_disagree_are_refused():
    weights, grad = torch.zeros(4), torch.zeros(4)
    with pytest.raises(ValueError, match=r"is uint8 \[32\]"):
        step(weights, grad, torch.zeros(40, dtype=torch.uint8), HYPER, 1, precision="fp32")
    with pytest.raises(ValueError, match=r"updates torch\.bfloat16"):
        step(weights, grad, torch.zeros(40, dtype=torch.uint8), HYPER, 1, precision="bf16_split")
    with pytest.raises(ValueError, match="from a gradient"):
        step(weights, torch.zeros(5), torch.zeros(32, dtype=torch.uint8), HYPER, 1, precision="fp32")
    with pytest.raises(ValueError, match="count from 1"):
        step(weights, grad, torch.zeros(32, dtype=torch.uint8), HYPER, 0, precision="fp32")
    with pytest.raises(ValueError, match="contiguous"):
        step(weights, torch.zeros(4, 2)[:, 0], torch.zeros(32, dtype=torch.uint8), HYPER, 1, precision="fp32")
    with pytest.raises(ValueError, match="contiguous"):
        gaps = torch.zeros(32, 2, dtype=torch.uint8)[:, 0]
        step(weights, grad, gaps, HYPER, 1, precision="fp32")
    with pytest.raises(ValueError, match="betas"):
        Adam(lr=1e-3, betas=(0.9, 1.0))
    for name in ("lr", "eps", "weight_decay"):
        Adam(**{"lr": 1e-3, name: 0.0})
        with pytest.raises(ValueError, match="negative"):
            Adam(**{"lr": 1e-3, name: -1e-3})
