"""Weights in 4 bits: the levels, the rounding, the slab's layout, and the kernel for a GPU by Triton's interpreter."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from families import MODELS
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import in_nf4
from scipy.stats import norm

from megatrain import autograd, experts, graphs, initial, nf4, session
from megatrain.adam import Adam
from megatrain.checkpoint import CheckpointError
from megatrain.sink import Sink
from megatrain.template import templates, views
from megatrain.training_files import Files
from schedules import policies, presets
from schedules.amounts import Amounts
from schedules.errors import InputError
from schedules.hazards import minimal_waits
from schedules.op import Access, Kind, Phase, Stream, Tier
from schedules.program import Program
from schedules.quantised import blocks, code_bytes, in_few_bits, quantised_bytes, whole_at_once_bytes
from schedules.saved import saved_bytes
from schedules.schedule import Schedule
from schedules.verify import ScheduleError, Verified, verify
from schedules.workload import MemoryBudget, Workload
from sim import hardware
from sim.cost import MissingCost
from sim.machine import HardwareProfile, Measured, Table
from sim.prediction import predict
from sim.signature import signature, timed

MODEL = replace(presets.load("tiny"), num_hidden_layers=2, attention_bias=True)
ROOM = MemoryBudget(device_bytes=10**9, host_bytes=10**9)
STEP = Workload(micro_batch_size=2, seq_len=16, precision="fp32")
DTYPES = [torch.float32, torch.bfloat16]


def schedule(policy: str = "lora_streamed", workload: Workload = STEP, **knobs: Any) -> Schedule:
    return policies.build(policy, MODEL, workload, ROOM, **{"quantised": "nf4", **knobs})


def verified(policy: str = "lora_streamed", **knobs: Any) -> Verified:
    return verify(schedule(policy, **knobs))


def through(values: torch.Tensor, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> torch.Tensor:
    """What is left of a layer's parameters in 4 bits."""
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    matrices = [name for name, shape in shapes.items() if in_few_bits(name, shape)]
    nbytes = sum(4 * blocks(sizes[name]) + code_bytes(sizes[name]) for name in matrices)
    nbytes += sum(dtype.itemsize * size for name, size in sizes.items() if name not in matrices)
    slab, whole = torch.full((nbytes,), 0xFF, dtype=torch.uint8), torch.full((len(values),), torch.nan, dtype=dtype)
    nf4.quantise(values, slab, shapes, dtype)
    nf4.dequantising(slab, whole, shapes)()
    return whole


def test_levels_are_quantiles_of_a_normal_distribution() -> None:
    """Of two halves that meet at zero, the outermost of which leaves 1 - 0.9677 of the probability beyond it."""
    outermost = 0.9677083
    above = norm.ppf(np.linspace(outermost, 0.5, 9)[:-1])
    below = -norm.ppf(np.linspace(outermost, 0.5, 8)[:-1])
    found = np.sort([*below, 0.0, *above]) / above.max()
    assert np.abs(found - nf4.LEVELS).max() < 2e-7
    assert all(a < b for a, b in pairwise(nf4.LEVELS))


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None)
@given(
    seed=st.integers(0, 1000),
    matrices=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=3),
    bias=st.integers(1, 70),
)
def test_each_weight_is_the_nearest_of_its_block(
    dtype: torch.dtype, seed: int, matrices: list[tuple[int, int]], bias: int
) -> None:
    """Odd sizes too, whose last byte has one code, and blocks that end before they are full; vectors stay."""
    torch.manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {f"{i}.weight": shape for i, shape in enumerate(matrices)}
    shapes = {"first.weight": (bias,), **shapes, "last.bias": (bias,)}
    parts = [torch.randn(shape) * 10.0 ** torch.randint(-6, 6, ()).item() for shape in shapes.values()]
    found = through(torch.cat([part.flatten() for part in parts]), shapes, dtype)
    for part, left in zip(parts, found.split([part.numel() for part in parts]), strict=True):
        if part.dim() == 1:
            assert torch.equal(left, part.to(dtype))
            continue
        for some, of in zip(part.flatten().split(64), left.split(64), strict=True):
            levels = torch.tensor(nf4.LEVELS) * some.abs().max()
            assert torch.equal(of, levels[(some[:, None] - levels).abs().argmin(1)].to(dtype))


def test_halfway_between_two_levels_the_lower_is_taken() -> None:
    halfway = torch.tensor([1.0, *nf4.BETWEEN])
    assert through(halfway, {"p.weight": (1, 16)}, torch.float32).tolist() == [1.0, *torch.tensor(nf4.LEVELS[:-1])]


def test_special_values_stay_in_their_block() -> None:
    values = torch.randn(4 * 64)
    values[3], values[64], values[128:192] = torch.nan, torch.inf, 0.0
    of_nan, of_inf, of_zero, other = through(values, {"p.weight": (4, 64)}, torch.float32).split(64)
    assert of_nan.isnan().all() and not of_inf.isfinite().any() and of_zero.eq(0).all()
    assert torch.equal(other, through(values[192:], {"p.weight": (1, 64)}, torch.float32))


def test_a_normal_weight_is_off_by_a_tenth() -> None:
    weights = torch.randn(1 << 16)
    found = through(weights, {"p.weight": (1 << 8, 1 << 8)}, torch.float32)
    assert 0.08 < float((found - weights).norm() / weights.norm()) < 0.1


@pytest.mark.parametrize("whole", [True, False])
def test_many_chunks_are_one_matrix(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    values, shapes = torch.randn(1001), {"p.weight": (7, 11, 13)}
    right = through(values, shapes, torch.float32)
    monkeypatch.setattr(nf4, "CHUNK", {"cpu": 1 << 20 if whole else 128})
    assert torch.equal(through(values, shapes, torch.float32), right)


# ---- the language


def test_a_block_takes_4_and_a_half_bits_a_weight() -> None:
    model, work = presets.load("llama-3.1-8b"), replace(STEP, precision="bf16", lora_rank=8, quantised="nf4")
    assert quantised_bytes(model, 0, work) / model.params(0) == pytest.approx(4.5 / 8, rel=1e-3)


def test_frozen_blocks_stay_in_4_bits_and_are_whole_for_one_block_at_a_time() -> None:
    model, machine = presets.load("llama-3.1-70b"), hardware.load("rtx4090")
    room = MemoryBudget(device_bytes=20 << 30, host_bytes=256 << 30)
    work = Workload(micro_batch_size=4, seq_len=1024)
    packed, plain = (policies.build("lora_streamed", model, work, room, quantised=of, keep=0) for of in ("nf4", None))
    ratio = packed.allocated_bytes(Tier.HOST) / plain.allocated_bytes(Tier.HOST)
    assert ratio == pytest.approx(4.5 / 16, rel=1e-3)
    weights = model.params(0) * 2
    assert packed.buffer["whole"].nbytes == weights and packed.buffer["weight0"].nbytes < 0.29 * weights
    assert packed.allocated_bytes(Tier.DEVICE) < plain.allocated_bytes(Tier.DEVICE)
    assert predict(packed, machine).period_ns < 0.95 * predict(plain, machine).period_ns
    casts = [op for op in packed.ops if op.phase == Phase.CAST]
    assert len(casts) == 2 * model.num_hidden_layers - 1  # the last block's is there when its backward begins
    for op in casts:
        moved = quantised_bytes(model, 0, packed.workload) + weights
        assert (op.kind, op.nbytes, op.params) == (Kind.UPDATE, moved, model.params(0))


def test_only_what_is_frozen_can_be_quantised() -> None:
    with pytest.raises(ValueError, match="what is quantised cannot be trained: give a lora_rank, or the task evaluate"):
        replace(STEP, quantised="nf4")
    with pytest.raises(ValueError, match="quantised 'int3' is unknown; known are nf4"):
        replace(STEP, quantised="int3", lora_rank=2)
    asked = replace(STEP, lora_rank=2, quantised="nf4")
    assert Workload.from_dict(asked.to_dict()) == asked and "quantised" not in STEP.to_dict()


def changed(of: Schedule, name: str, **values: Any) -> Schedule:
    return replace(of, ops=tuple(replace(op, **values) if op.name == name else op for op in of.ops))


@pytest.mark.parametrize(
    ("writes", "told"),
    [
        (Access("whole", "w.1"), "C.w.0 makes w.1 of q.0"),
        (Access("whole", "q.0"), "C.w.0 makes q.0 of q.0"),
        (Access("nvme.q.0", "w.0"), "buffer nvme.q.0, which is not declared"),
    ],
)
def test_a_cast_makes_the_weights_of_its_own_block(writes: Access, told: str) -> None:
    of = schedule(keep=0)
    with pytest.raises(ScheduleError, match=told):
        verify(changed(of, "C.w.0", writes=(writes,)))


def test_weights_are_not_quantised_by_a_cast() -> None:
    of = schedule(keep=0)
    (packed,) = next(op for op in of.ops if op.name == "C.w.0").reads
    with pytest.raises(ScheduleError, match=r"C\.w\.0 makes q\.0 of w\.0"):
        verify(changed(of, "C.w.0", reads=(Access("whole", "w.0"),), writes=(packed,)))


def test_what_is_computed_with_is_made_first() -> None:
    of = schedule("flexgen_block")
    without = replace(of, ops=tuple(op for op in of.ops if op.name != "C.w.0"), waits=())
    without = replace(without, waits=minimal_waits(without.ops))
    with pytest.raises(ScheduleError, match=r"holds nothing: it is quantised, and kept as q\.0 until a cast makes it"):
        verify(without)
    kept = Program(MODEL, of.workload)
    kept.keep_on_device(*(kept.weight(i) for i in MODEL.layers))
    for i in MODEL.layers[:-1]:
        kept.forward(i, keep="nothing")
    kept.loss()
    with pytest.raises(ScheduleError, match=r"F\.0\.0 reads the weights of layer 0 from device.w.0, .* kept as q.0"):
        verify(kept.build(policy="kept"))


def test_a_cast_must_be_awaited() -> None:
    """Of copies that fill a slot again while it is still read."""
    of = schedule(resident=0, slots=1, keep=0)
    for wait in (w for w in of.waits if w.on.startswith("C.w")):
        with pytest.raises(ScheduleError, match="race"):
            verify(replace(of, waits=tuple(w for w in of.waits if w != wait)))


@pytest.mark.parametrize(
    ("tensor", "told"), [("q.embed", "only blocks are quantised"), ("q.0", "the workload quantises nothing")]
)
def test_what_is_not_quantised_has_no_such_tensor(tensor: str, told: str) -> None:
    work = replace(STEP, lora_rank=2, quantised="nf4" if tensor == "q.embed" else None)
    with pytest.raises(InputError, match=told):
        Program(MODEL, work).keep_on_device(tensor)


def test_a_machine_that_was_measured_without_it_says_so() -> None:
    """Making weights whole is no copy: by its bytes it would seem too fast."""
    of = schedule(keep=0, resident=0)
    lacking = {
        signature(op, MODEL, of.workload): 1000 for op in of.ops if op.kind == Kind.COMPUTE or op.phase == Phase.ADAM
    }

    def measured(times: dict[str, int]) -> HardwareProfile:
        table = Table(values=times, unit="ns", source="made up")
        return replace(hardware.load("h200"), mode="measured", measured=Measured(op_times=table))

    machine = measured(lacking)
    with pytest.raises(MissingCost, match=r"one that makes a block's quantised weights whole.* 'lora_streamed keep=0"):
        predict(of, machine)
    (cast,) = {signature(op, MODEL, of.workload) for op in of.ops if op.phase == Phase.CAST}
    assert cast == "tiny/block/cast q to w/device/fp32" and cast in timed(of, "needed").values()
    assert predict(of, measured(lacking | {cast: 10**6})).period_ns > 3 * 10**6


def test_whole_weights_are_made_on_the_device() -> None:
    with pytest.raises(ScheduleError, match=r"C\.w\.0 makes w\.0 whole on cpu\n.*queue it on compute"):
        verify(changed(schedule(keep=0), "C.w.0", stream=Stream.CPU))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GptOssForCausalLM"])
def test_biases_of_experts_and_routers_stay_and_matrices_do_not(architecture: str) -> None:
    """Experts' biases are two-dimensional, one after another in one tensor."""
    moe = replace(
        presets.load("tiny-moe"), num_hidden_layers=1, architecture=architecture, expert_bias=True, router_bias=True
    )
    work = replace(STEP, task="evaluate", quantised="nf4")
    source = initial.random_parameters(moe, 0)(0)
    source = source + 0.01 * torch.randn(len(source))  # biases, too
    slab, whole = torch.empty(quantised_bytes(moe, 0, work), dtype=torch.uint8), torch.empty(len(source))
    nf4.quantise(source, slab, moe.parameter_shapes(0), torch.float32)
    nf4.dequantising(slab, whole, moe.parameter_shapes(0))()
    assert torch.equal(whole, in_nf4(lambda i: source, moe)(0))
    before = views(source, moe.parameter_shapes(0))
    for name, values in views(whole, moe.parameter_shapes(0)).items():
        stays = values.dim() == 1 or name.endswith("bias") or name in ("mlp.gate.weight", "mlp.router.weight")
        assert torch.equal(values, before[name]) == stays, name


# ---- matrices that ops make whole themselves

MATRICES = {"whole": "matrices", "resident": 0, "keep": 0}


def test_a_packed_matrix_is_made_the_same_whole() -> None:
    shapes = {"norm.weight": (5,), "p.weight": (7, 10), "experts.up_proj": (3, 32, 6), "p.bias": (7,)}
    values = torch.randn(sum(math.prod(shape) for shape in shapes.values()))
    sizes = [math.prod(shape) for shape in shapes.values()]
    slab = torch.empty(4 * (2 + 9) + 2 * (5 + 7) + 35 + 288, dtype=torch.uint8)
    nf4.quantise(values, slab, shapes, torch.bfloat16)
    right = through(values, shapes, torch.bfloat16).split(sizes)
    found = nf4.packed(slab, shapes, torch.bfloat16)
    assert found.keys() == {*shapes, "p.weight.largest", "experts.up_proj.largest"}
    for (name, shape), of in zip(shapes.items(), right, strict=True):
        part = found[name]
        whole = nf4.whole(part, found[nf4.largest_of(name)], torch.bfloat16) if nf4.is_packed(part) else part
        assert whole.shape == shape and torch.equal(whole.flatten(), of)


def test_ops_that_read_quantised_weights_make_them_whole() -> None:
    at_once, apart = (schedule(**{**MATRICES, "whole": whole}) for whole in ("blocks", "matrices"))
    verify(apart)
    assert "whole" in at_once.buffer and "whole" not in apart.buffer
    assert not [op for op in apart.ops if op.phase == Phase.CAST]
    more = {op.name: op for op in apart.ops if op.kind == Kind.COMPUTE}
    matrices = sum(math.prod(s) for name, s in MODEL.parameter_shapes(0).items() if in_few_bits(name, s))
    moved = matrices * (0.5 + 4 / 64 + 4)  # codes and magnitudes read, fp32 written
    computed = [op for op in at_once.ops if op.kind == Kind.COMPUTE]
    assert [op.name for op in computed] == list(more)
    for op in computed:
        assert more[op.name].nbytes - op.nbytes == (moved if op.layer in MODEL.blocks else 0)
        assert more[op.name].flops == op.flops and more[op.name].writes == op.writes


def test_what_ops_make_whole_at_once_is_counted() -> None:
    """Of a Llama gate and up; of a mixture some experts; of latent attention all that has the block's input."""
    bf16 = replace(STEP, precision="bf16", lora_rank=2, quantised="nf4")
    llama, mixture = presets.load("llama-3.1-8b"), presets.load("glm-5")
    assert whole_at_once_bytes(llama, 0, bf16) == 2 * 2 * 14336 * 4096
    assert whole_at_once_bytes(mixture, 5, bf16) == 2 * (1 << 29)
    few = replace(mixture, num_experts=8, n_group=1, topk_group=1)
    assert whole_at_once_bytes(few, 5, bf16) == 2 * 8 * 2 * 2048 * 6144
    alone = replace(few, num_experts_per_tok=1, num_experts=1)
    assert whole_at_once_bytes(alone, 5, bf16) == 2 * 64 * 256 * 6144, "the output projection"
    amounts = Amounts(llama, bf16)
    whole, packed = (amounts.workspace(0, Phase.BACKWARD, quantised=q) for q in (False, True))
    assert packed - whole == 2 * 2 * 14336 * 4096


def test_an_op_reads_its_own_blocks_quantised_weights() -> None:
    of = schedule(**MATRICES)
    (op,) = (op for op in of.ops if op.name == "F.0.0")
    others = tuple(Access(a.buffer, "q.1") if a.tensor == "q.0" else a for a in op.reads)
    with pytest.raises(ScheduleError, match=r"F\.0\.0 .* reads q\.1"):
        verify(changed(of, "F.0.0", reads=others))
    with pytest.raises(ScheduleError, match=rf"F\.0\.0 declares {op.nbytes - 1} bytes"):
        verify(changed(of, "F.0.0", nbytes=op.nbytes - 1))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"intermediate_size": 33}, r"mlp.down_proj.weight has rows of 33 weights, whose 4 bits are not apart: make"),
        ({"moe_intermediate_size": 10, "hidden_size": 36}, r"experts.gate_up_proj has experts of 720"),
    ],
)
def test_matrices_whose_bits_are_not_apart_are_made_whole_as_a_block(changes: dict[str, Any], told: str) -> None:
    preset = "tiny-moe" if "moe_intermediate_size" in changes else "tiny"
    model = replace(presets.load(preset), num_hidden_layers=1, **changes)
    with pytest.raises(InputError, match=told):
        policies.build("lora_streamed", model, STEP, ROOM, quantised="nf4", whole="matrices")
    verify(policies.build("lora_streamed", model, STEP, ROOM, quantised="nf4"))


def test_a_machine_is_measured_with_ops_that_make_matrices_whole() -> None:
    of, at_once = schedule(**MATRICES), schedule(keep=0, resident=0)
    found, others = ({*timed(each, "computed").values()} for each in (of, at_once))
    blocks = {key for key in found if "/block/" in key}
    assert blocks and all(key.endswith("/lora16/nf4") for key in blocks) and not blocks & others
    assert found - blocks <= others, "embedding and loss are the same"


@pytest.mark.parametrize("recompute", ["none", "pointwise"])
@pytest.mark.parametrize("name", ["qwen3", "phi3", "gpt-oss", "deepseek-v3", "qwen3.5-moe", "gemma4, with experts"])
def test_a_block_computes_the_same_by_matrices(name: str, recompute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients too, to the bit, with experts made whole three at a time, and nothing kept of what was made."""
    model, work = MODELS[name], replace(STEP, lora_rank=2, quantised="nf4", recompute=recompute)
    i = model.num_hidden_layers - 1
    shapes, adapters = model.parameter_shapes(i), model.adapter_shapes(i, 2)
    sizes = [math.prod(shape) for shape in shapes.values()]
    monkeypatch.setattr(experts, "EXPERTS_CHUNK", 3 * max(sizes) // max(model.num_experts, 1))
    values = 0.1 * torch.randn(sum(sizes))
    slab = torch.empty(quantised_bytes(model, i, work), dtype=torch.uint8)
    nf4.quantise(values, slab, shapes, torch.float32)
    whole, beside = (
        views(through(values, shapes, torch.float32), shapes),
        {n: torch.randn(s) for n, s in adapters.items()},
    )
    layers = templates(
        model, seq_len=16, device=torch.device("cpu"), dtype=torch.float32, pointwise_again=recompute != "none"
    )
    block = layers.blocks[model.layer_kind(i)]
    x, dy = torch.randn(2, 2, 16, model.hidden_size)
    found = []
    for params in (whole, nf4.packed(slab, shapes, torch.float32)):
        y, saved = autograd.forward(block, params | beside, x, trained=adapters)
        assert saved.nbytes == saved_bytes(model, i, work)
        grads = {name: torch.full(shape, torch.nan) for name, shape in adapters.items()}
        dx = autograd.backward(saved, params | beside, x, dy, {n: Sink(g, False) for n, g in grads.items()})
        with torch.no_grad():
            alone = block.forward(params | beside, x)
        found.append([y, alone, dx, *grads.values()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_training_and_evaluation_are_the_same_by_matrices(tmp_path: Any) -> None:
    hyper = Adam(lr=1e-2)
    losses = [
        session.train(verified(**{**MATRICES, "whole": whole}), steps=3, hyper=hyper).losses
        for whole in ("blocks", "matrices")
    ]
    assert losses[0] == losses[1]
    evaluated = [
        session.train(verified("flexgen_block", whole=whole, resident=2), steps=1, hyper=Adam(lr=0.0)).losses
        for whole in ("blocks", "matrices")
    ]
    assert evaluated[0] == evaluated[1]


def test_experts_that_ops_make_whole_are_no_cuda_graphs() -> None:
    moe = replace(presets.load("tiny-moe"), num_hidden_layers=1)
    of = policies.build("lora_streamed", moe, STEP, ROOM, quantised="nf4", whole="matrices")
    with pytest.raises(InputError, match="where ops make them whole: these wait for the GPU; leave --graphs out"):
        graphs.replayed(of, [])


# ---- training


def test_adapters_do_not_go_on_beside_weights_of_another_format(tmp_path: Any) -> None:
    hyper = Adam(lr=1e-2)
    session.train(verified(), steps=2, hyper=hyper, files=Files(save=tmp_path))
    for other, told in ((None, "quantised=nf4, the schedule's are whole"), ("nf4", "")):
        resumed = verified(quantised=other, resident=0, keep=2)
        if told:
            with pytest.raises(CheckpointError, match=f"adapters that were trained beside weights that were {told}"):
                session.train(resumed, steps=1, hyper=hyper, files=Files(resume=tmp_path))
        else:
            assert len(session.train(resumed, steps=1, hyper=hyper, files=Files(resume=tmp_path)).losses) == 1


def test_a_training_of_whole_weights_is_evaluated_in_4_bits(tmp_path: Any) -> None:
    whole = verify(policies.build("resident", MODEL, STEP, ROOM))
    session.train(whole, steps=3, hyper=Adam(lr=1e-2), files=Files(save=tmp_path))
    of = Files(resume=tmp_path)
    evaluated = session.train(verified("flexgen_block"), steps=1, hyper=Adam(lr=0.0), files=of)
    trained = session.train(verified("flexgen_block", quantised=None), steps=1, hyper=Adam(lr=0.0), files=of)
    assert evaluated.losses != trained.losses
    assert evaluated.losses == pytest.approx(trained.losses, rel=0.05)


def test_adapters_are_not_folded_into_what_is_rounded_next(tmp_path: Any) -> None:
    with pytest.raises(InputError, match="would be rounded with them: leave out quantised"):
        session.train(verified("flexgen_block"), steps=1, hyper=Adam(lr=0.0), files=Files(adapters=tmp_path))


# ---- a GPU's kernel


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Any]:
    pytest.importorskip("triton")
    names = ("adam_gpu", "nf4_gpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")  # read where a kernel is declared
        *_, module = [importlib.reload(importlib.import_module(f"megatrain.native.{name}")) for name in names]
        yield module
    for name in names:
        importlib.reload(importlib.import_module(f"megatrain.native.{name}"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 2047, 2048, 2049, 5001])
def test_a_gpu_makes_the_same_bits(
    n: int, dtype: torch.dtype, interpreted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(n)
    shapes = {"norm.weight": (3,), "p.weight": (1, n)}
    right = through(values := torch.randn(3 + n), shapes, dtype)
    monkeypatch.setattr(nf4, "_kernels_on", lambda device: interpreted)
    assert torch.equal(through(values, shapes, dtype), right)


def test_nothing_beyond_a_matrix_is_written(interpreted: Any) -> None:
    whole = torch.full((128,), 7.0)
    codes, largest = torch.zeros(33, dtype=torch.uint8), torch.ones(2)
    interpreted.dequantise(codes, largest, nf4.levels(torch.device("cpu")), whole[:65])
    assert whole[:65].eq(-1).all() and whole[65:].eq(7).all()
