"""Trainings on a GPU that the host plays (benchmarks/played_gpu.cpp): torch's whole CUDA side, without a number.

Not a test module by name: test_megatrain_played_gpu.py runs this in processes that have that GPU.
"""

from __future__ import annotations

import dataclasses
import gc
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_block
import gpu_machine
import gpu_steps
import played_gpu
import pytest
import rehearsal
import torch
from fake_cuda import CARRIED, POLICIES, WORKLOAD, Some, built, trainer
from families import MODELS, QWEN3_5
from gpu_case import Case
from hand_written import WRITERS, small
from torch._inductor import metrics

from megatrain import autograd, cuda, experts, muon, nf4, train
from megatrain.adam import Adam
from megatrain.backend import OpFailed
from megatrain.cpu import CpuEvent
from megatrain.cuda import CudaBackend
from megatrain.data import RandomTokens
from megatrain.documents import documents_of
from megatrain.embed import Embed
from megatrain.graphs import PHASES, replayed
from megatrain.head import Head
from megatrain.native import adam_gpu
from megatrain.pointwise import FUSED, PLAIN, Pointwise, _compiled, compiled
from megatrain.sink import Sink
from megatrain.template import Block, templates
from schedules import policies, presets
from schedules.amounts import Amounts
from schedules.model import ModelSpec
from schedules.op import Phase, Tier
from schedules.optimizer import matrices, state_bytes
from schedules.quantised import quantised_bytes
from schedules.saved import saved_bytes
from schedules.schedule import Schedule
from schedules.workload import PRECISIONS, RECOMPUTED, MemoryBudget, Workload
from schedules.workspace import MLP_CHUNK_TOKENS, workspace_bytes
from sim import hardware
from sim.prediction import predict
from sim.signature import timed

MODEL, MEMORY = small(blocks=4), MemoryBudget(device_bytes=10**10, host_bytes=10**10)
BY_CHANNEL = dataclasses.replace(
    MODELS["kimi-linear"], num_experts=0, n_shared_experts=0, first_k_dense_replace=0, sigmoid_router=False,
    routed_scaling_factor=1.0, head_dim=16, qk_nope_head_dim=8, v_head_dim=16,
)  # fmt: skip
HYBRID = dataclasses.replace(QWEN3_5, layer_types=("linear_attention", "full_attention") * 2, num_hidden_layers=4)
WIDER = dataclasses.replace(MODEL, head_dim=16)  # as products in fp8 need keys to be
LONG = dataclasses.replace(WORKLOAD, seq_len=32)
NAMES = [*WRITERS, *POLICIES]
WORKSPACES = 3 * 32 << 20  # of cuBLAS on an H100: one for each stream and thread that multiplies
SANITIZED = "TORCH_CUDA_SANITIZER" in os.environ

played_gpu.begin()
# it computes nothing: a sum of squares is whatever lay there, and may be negative
train.math = SimpleNamespace(sqrt=abs)  # type: ignore[assignment]
unsanitized = pytest.mark.skipif(SANITIZED, reason="the sanitizer takes long, and says nothing else of it")
sanitized = pytest.mark.skipif(not SANITIZED, reason="needs torch's stream sanitizer")


def schedule_of(name: str, workload: Workload = LONG) -> Schedule:
    return WRITERS[name](MODEL, workload) if name in WRITERS else built(name, MODEL, workload)


def waits_in_steps(schedule: Schedule, folder: Path) -> int:
    """How often threads that hand ops over waited for the GPU."""
    with trainer(schedule, CudaBackend(), nvme=folder) as run:
        run.run(2)  # libraries set themselves up; a gradient that is carried over is first applied in the second step
        played_gpu.count("waits elsewhere")
        run.run(2)
        return played_gpu.count("waits elsewhere")


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_runs_and_no_op_waits(name: str, tmp_path: Path) -> None:
    assert waits_in_steps(schedule_of(name), tmp_path) == 0
    assert played_gpu.count("kernels") > 100


@unsanitized
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("recompute", RECOMPUTED)
@pytest.mark.parametrize("name", ["on_device", "moved_out", "streamed"])
def test_so_it_does_in_every_precision(name: str, recompute: str, precision: str, tmp_path: Path) -> None:
    workload = dataclasses.replace(LONG, precision=precision, recompute=recompute)
    assert waits_in_steps(schedule_of(name, workload), tmp_path) == 0


@unsanitized
@pytest.mark.parametrize("recompute", RECOMPUTED)
@pytest.mark.parametrize("name", ["on_device", "moved_out", "streamed", "megatrain"])
def test_so_it_does_with_products_in_fp8(name: str, recompute: str, tmp_path: Path) -> None:
    workload = dataclasses.replace(LONG, precision="bf16", grad_clip=None, recompute=recompute, matmul="fp8")
    schedule = WRITERS[name](WIDER, workload) if name in WRITERS else built(name, WIDER, workload)
    assert waits_in_steps(schedule, tmp_path) == 0
    if name == "moved_out":  # whose blocks are not captured
        return
    with trainer(schedule, CudaBackend(), prepare=replayed, pointwise=compiled(), nvme=tmp_path) as run:
        run.run(2)
        played_gpu.count("graphs")
        run.run(2)
    assert played_gpu.count("graphs") > 0


@unsanitized
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("name", ["on_device", "moved_out", "streamed"])
@pytest.mark.parametrize(
    ("model", "recompute"),
    [
        pytest.param(model, recompute, id=f"{name}, {recompute}")
        for name, model in {
            "linear attention": HYBRID,
            "channels that decay apart": BY_CHANNEL,
            "state spaces": MODELS["granite-4"],
            "some without an MLP": MODELS["nemotron-h"],
        }.items()
        for recompute in model.recompute_modes
    ],
)
def test_so_it_does_with_a_recurrence(
    model: ModelSpec, name: str, recompute: str, precision: str, tmp_path: Path
) -> None:
    workload = dataclasses.replace(LONG, seq_len=96, precision=precision, recompute=recompute)
    schedule = WRITERS[name](model, workload) if name in WRITERS else built(name, model, workload)
    assert waits_in_steps(schedule, tmp_path) == 0
    assert torch.get_float32_matmul_precision() == "highest"
    if name == "moved_out":  # whose blocks are not captured
        return
    with trainer(schedule, CudaBackend(), prepare=replayed, nvme=tmp_path) as run:
        run.run(2)
        played_gpu.count("graphs")
        run.run(2)
    assert played_gpu.count("graphs") > 0


LATENT = dataclasses.replace(
    MODELS["deepseek-v3"], num_experts=0, n_shared_experts=0, first_k_dense_replace=0, n_group=1, topk_group=1,
    sigmoid_router=False, head_dim=24, qk_nope_head_dim=16,
)  # fmt: skip


@pytest.mark.parametrize("name", ["streamed", "moved_out"])
@pytest.mark.parametrize(
    "model", [MODEL, MODELS["olmo3"], dataclasses.replace(MODEL, attention_sinks=True), LATENT], ids=lambda m: m.name
)
def test_so_it_does_with_documents(
    model: ModelSpec, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RandomTokens, "document_end", 7)
    workload = dataclasses.replace(LONG, precision="bf16", seq_len=96)
    schedule = WRITERS[name](model, workload) if name in WRITERS else built(name, model, workload)
    assert waits_in_steps(schedule, tmp_path) == 0


@pytest.mark.parametrize("precision", ["bf16", "bf16_16bit", "bf16_split", "fp32"])
@pytest.mark.parametrize(("name", "clip"), [("streamed", None), ("resident", 0.1), ("paged_optimizer pressure=1", 0.1)])
def test_so_it_does_with_muon(name: str, clip: float | None, precision: str, tmp_path: Path) -> None:
    workload = dataclasses.replace(LONG, precision=precision, optimizer="muon", grad_clip=clip)
    waits = waits_in_steps(schedule_of(name, workload), tmp_path)
    assert waits == 0 or name.startswith("paged")  # whose host waits for each update


@unsanitized
@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_can_be_captured(name: str, tmp_path: Path) -> None:
    with trainer(schedule_of(name), CudaBackend(), prepare=replayed, nvme=tmp_path) as run:
        run.run(2)
        played_gpu.count("graphs")
        run.run(2)
    assert played_gpu.count("graphs") > 0 or name == "moved_out"  # whose activations are copied, those of every block


@pytest.mark.parametrize("name", ["streamed", "zero_infinity", "lora_streamed quantised=nf4", *CARRIED])
def test_a_text_is_evaluated_between_steps(name: str, tmp_path: Path) -> None:
    schedule = schedule_of(name)
    with trainer(schedule, CudaBackend(), nvme=tmp_path) as run:
        for _ in range(2):
            run.run(1)
            played_gpu.count("kernels")
            run.evaluate(Some(vocab_size=256, workload=schedule.workload))
            assert played_gpu.count("kernels") > 20


@unsanitized
def test_what_a_capture_must_not_do_is_refused() -> None:
    graph, stream, event = torch.cuda.CUDAGraph(), torch.cuda.Stream(), torch.cuda.Event()
    numbers = torch.ones(8, device="cuda")
    event.record()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        for forbidden in (lambda: numbers.sum().item(), lambda: stream.wait_event(event), stream.synchronize):
            with pytest.raises(RuntimeError, match="the GPU that the host plays"):
                forbidden()
        graph.capture_end()


@unsanitized
def test_kernels_are_compiled_and_launched() -> None:
    adam_gpu.try_out(torch.device("cuda"))
    launched = []
    for pointwise in (PLAIN, compiled()):
        with trainer(schedule_of("two_slots"), CudaBackend(), pointwise=pointwise) as run:
            run.run(1)
            played_gpu.count("kernels")
            run.run(2)
        launched.append(played_gpu.count("kernels"))
    assert 0 < launched[1] < launched[0] / 2


@unsanitized
def test_a_kernel_is_compiled_once_for_streams_and_autograds_own_thread() -> None:
    """torch compiles anew for another number of threads, and autograd's thread has that of whoever set it last."""
    made, seen = [], []

    def counting(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        made.append(graph)
        return graph.forward

    kernel, x = _compiled(FUSED.halves_forward, counting), torch.ones(4, 8, device="cuda")
    default = torch.get_num_threads()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        kernel(x)
        seen.append(torch.get_num_threads())
    torch.set_num_threads(default)
    assert len(made) == 1 and seen == [1, 1]


@unsanitized
@pytest.mark.parametrize("graphs", [False, True])
def test_the_benchmark_measures_a_step_its_ops_alone_and_a_spun_one(
    graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seconds in ("LASTS_S", "LOADED_S"):
        monkeypatch.setattr(gpu_steps, seconds, 0.0)
    case = Case(model="tiny", policy="streamed", seq_len=16, micro_batch_size=2, graphs=graphs)
    played_gpu.count("graphs")
    row = gpu_steps.measure(case, gpu_machine.free_bytes(), 1 << 33, {}, None, None, True)
    schedule = policies.build("streamed", presets.load("tiny"), case.workload, MEMORY)
    assert (
        row["alone_ns"].keys() == set(timed(schedule).values()) and row["spin_step_s"] > 0 and row["alloc_retries"] == 0
    )
    launched = gpu_steps.WARM_UP + gpu_steps.STEPS - 1 + gpu_steps.alone_steps(case) - 1  # after each's eager call
    of_blocks = [op for op in schedule.ops if op.phase in PHASES and op.layer in schedule.model.blocks]
    assert played_gpu.count("graphs") == (launched * len(of_blocks) if graphs else 0)


@unsanitized
@pytest.mark.parametrize("model", [*gpu_block.DENSE, *gpu_block.UNTIMED], ids=lambda model: model.name)
def test_the_benchmark_checks_a_block_in_every_way(model: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_block, "LENGTH", 256)
    played_gpu.count("graphs")
    rows = gpu_block.checks([rehearsal.small(model)], gpu_block.ways_of(model))
    assert [row["case"] for row in rows] == [f"{model.name} {way}" for way in ("plain", "fused", "graphs")]
    assert all(row["kept_bytes"] == row["counted_bytes"] for row in rows) and played_gpu.count("graphs") == 1


@unsanitized
@pytest.mark.parametrize("model", gpu_block.DENSE, ids=lambda model: model.name)
def test_the_benchmark_checks_a_block_in_fp8_in_every_way(model: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_block, "LENGTH", 256)
    played_gpu.count("graphs")
    rows = gpu_block.fp8_checks([rehearsal.small(model)], gpu_block.WAYS)
    assert [row["case"] for row in rows] == [f"{model.name} {way}" for way in ("plain", "fused", "graphs")]
    assert all(row["kept_bytes"] == row["counted_bytes"] for row in rows) and played_gpu.count("graphs") == 1


@unsanitized
@pytest.mark.parametrize("name", ["resident", "streamed", "megatrain_released"])
def test_torchs_allocator_takes_what_is_predicted_and_gives_it_back(name: str) -> None:
    model = dataclasses.replace(small(blocks=4), hidden_size=512, intermediate_size=2048, head_dim=128)
    workload = dataclasses.replace(LONG, seq_len=4096, precision="bf16")
    schedule = policies.build(name, model, workload, MEMORY)
    torch._C._cuda_clearCublasWorkspaces()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with trainer(schedule, CudaBackend()) as run:
        run.run(3)
    predicted = predict(schedule, hardware.load("h100")).peak_bytes[Tier.DEVICE]
    taken = torch.cuda.max_memory_allocated() - held
    assert predicted < taken < 1.02 * predicted + WORKSPACES
    del run
    assert torch.cuda.memory_allocated() - held < 1 << 20


def peak_bytes(work: Callable[[], object]) -> int:
    gc.collect()  # what another test has left would be freed meanwhile
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    return torch.cuda.max_memory_allocated() - held


def first_block(
    model: ModelSpec, workload: Workload, pointwise: Pointwise
) -> tuple[Block, dict[str, torch.Tensor], torch.Tensor, torch.Tensor, dict[str, Sink]]:
    """The first of the largest, its parameters, an input, its output's gradient, and where those of parameters go."""
    i = model.largest_block
    found = templates(
        model,
        seq_len=workload.seq_len,
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        pointwise=pointwise,
        pointwise_again=workload.recompute != "none",
        mlp_chunk=MLP_CHUNK_TOKENS if workload.recompute == "mlp" else None,
        matmul=workload.matmul,
    )
    params = {name: bf16(*shape) for name, shape in model.parameter_shapes(i).items()}
    x, dy = (bf16(workload.micro_batch_size, workload.seq_len, model.hidden_size) for _ in range(2))
    sinks = {name: Sink(torch.zeros_like(p), False) for name, p in params.items()}
    return found.blocks[model.layer_kind(i)], params, x, dy, sinks


@unsanitized
@pytest.mark.parametrize("pointwise", [PLAIN, compiled()], ids=["plain", "compiled"])
@pytest.mark.parametrize(
    ("name", "recompute", "batch"),
    [
        ("llama-3.1-8b", "none", 4),
        ("llama-3.1-8b", "pointwise", 4),
        ("llama-3.1-8b", "mlp", 4),
        ("llama-3.1-8b", "mlp", 16),  # attention takes more than chunks of the MLP
        ("gpt-oss-20b", "none", 4),
        ("gpt-oss-20b", "pointwise", 4),
        ("gpt-oss-120b", "none", 4),
        ("glm-4.5-air", "none", 4),
        ("glm-4.5-air", "pointwise", 4),
        ("deepseek-v2-lite", "none", 4),
        ("deepseek-v2-lite", "pointwise", 4),
        ("glm-4.7-flash", "none", 4),
        ("olmo-2-32b", "none", 4),
        ("olmo-2-32b", "mlp", 4),
        ("gemma-3-27b", "none", 4),
        ("gemma-3-27b", "pointwise", 4),
        ("gemma-3-27b", "mlp", 4),
        ("phi-4", "none", 4),
        ("granite-3.3-8b", "none", 4),
        ("granite-3.3-8b", "mlp", 4),
        ("glm-4-32b-0414", "none", 4),
        ("qwen3.5-9b", "none", 4),
        ("qwen3.5-9b", "none", 1),
        ("qwen3.5-9b", "pointwise", 4),
        ("qwen3.5-9b", "mlp", 4),
        ("kimi-linear-48b-a3b 0", "none", 4),
        ("kimi-linear-48b-a3b 0", "none", 1),
        ("kimi-linear-48b-a3b 0", "pointwise", 4),
        ("kimi-linear-48b-a3b 3 few", "none", 4),
        ("granite-4.0-h-micro", "none", 4),
        ("granite-4.0-h-micro", "none", 1),
        ("granite-4.0-h-micro", "mlp", 4),
        ("granite-4.0-h-tiny", "pointwise", 4),
        ("qwen3.5-9b 3", "none", 4),
        ("qwen3.5-9b 3", "pointwise", 4),
        ("qwen3.5-9b 3", "mlp", 16),
        ("llama-3.1-8b documents", "none", 4),
        ("gpt-oss-20b documents", "none", 4),
        ("deepseek-v2-lite documents", "none", 4),
        ("gemma-3-27b documents", "mlp", 4),
        ("gemma-4-31b", "none", 4),
        ("gemma-4-31b", "pointwise", 4),
        ("gemma-4-31b", "mlp", 4),
        ("gemma-4-31b 0", "none", 4),
        ("gemma-4-31b 0", "mlp", 4),
        ("gemma-4-26b-a4b", "none", 4),
        ("gemma-4-26b-a4b 0", "pointwise", 4),
        ("nemotron-nano-9b-v2 0", "none", 4),
        ("nemotron-nano-9b-v2 3", "none", 4),
        ("nemotron-nano-9b-v2 8", "none", 4),
        ("nemotron-3-nano-30b-a3b 3", "pointwise", 4),
        ("nemotron-3-super-120b-a12b 0 few", "none", 4),
        ("nemotron-3-super-120b-a12b 0 few", "pointwise", 4),
    ],
)
def test_ops_of_a_large_block_take_no_more_than_is_counted(
    name: str, recompute: str, batch: int, pointwise: Pointwise
) -> None:
    preset, *which = name.split()
    model, workload = presets.load(preset), Workload(micro_batch_size=batch, seq_len=4096, recompute=recompute)
    if blocks := [int(word) for word in which if word.isdigit()]:  # not the first of the largest
        model = model.of_blocks(blocks)
    if "few" in which:  # experts, of which all would take more memory than is needed to see what they take
        model = dataclasses.replace(model, num_experts=64)
    block, params, x, dy, sinks = first_block(model, workload, pointwise)
    if "documents" in which:
        tokens = torch.arange(4096).remainder(1000).expand(batch, -1)
        block = block.within(documents_of(tokens, 999, x.device))

    def alone() -> None:
        with torch.no_grad():
            block.forward(params, x)

    def again() -> None:
        autograd.forward(block, params, x, output=False)

    alone()  # cuBLAS takes its workspaces
    i = model.largest_block
    counted = {phase: workspace_bytes(model, i, phase, workload) for phase in (Phase.FORWARD, Phase.BACKWARD)}
    # of many experts a token, eager kernels take a third more than compiled ones, except in gpt-oss' layout; and where
    # no MLP takes more, norms that are not compiled do
    spread = not model.has_mlp(i) or (model.num_experts_per_tok >= 4 and not model.expert_bias)
    least = (0.65, 0.6) if spread else (0.8, 0.65)
    gated = model.heads(i).gate_width and model.recurrence(i) is None
    if gated and recompute == "mlp":  # as norms of queries do, where the MLP is not the larger
        least = 0.7, 0.65
    assert least[0] < peak_bytes(alone) / counted[Phase.FORWARD] < 1.03
    _, saved = autograd.forward(block, params, x)
    assert saved.nbytes == saved_bytes(model, i, workload)  # to the byte; what ops take for a while is an estimate
    assert peak_bytes(again) - saved.nbytes < counted[Phase.BACKWARD]  # which is to come
    taken = peak_bytes(lambda: autograd.backward(saved, params, x, dy, sinks))
    assert least[1] < taken / counted[Phase.BACKWARD] < 1


@unsanitized
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(
    "name", ["llama-3.1-8b", "gpt-oss-20b", "deepseek-v2-lite", "qwen3-30b-a3b", "granite-4.0-h-micro"]
)
def test_ops_that_make_matrices_whole_take_no_more_than_is_counted(
    name: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nf4, "CHUNK", {"cuda": 1 << 20})  # where a GPU has a kernel
    model = presets.load(name)
    workload = Workload(micro_batch_size=batch, seq_len=4096, lora_rank=16, quantised="nf4")
    i, rows = model.largest_block, workload.tokens_per_microbatch * model.num_experts_per_tok
    # a GPU without numbers has no routes either
    monkeypatch.setattr(experts, "_bounds", lambda ends: [rows * e // len(ends) for e in range(len(ends) + 1)])
    block, params, x, dy, _ = first_block(model, workload, compiled())
    del params
    slab = torch.empty(quantised_bytes(model, i, workload), dtype=torch.uint8, device="cuda")
    packed = nf4.packed(slab, model.parameter_shapes(i), torch.bfloat16)
    adapters = {name: bf16(*shape) for name, shape in model.adapter_shapes(i, 16).items()}
    sinks = {name: Sink(torch.zeros_like(p), False) for name, p in adapters.items()}

    def alone() -> None:
        with torch.no_grad():
            block.forward(packed | adapters, x)

    alone()
    amounts = Amounts(model, workload)
    forward, backward = (amounts.workspace(i, phase, quantised=True) for phase in (Phase.FORWARD, Phase.BACKWARD))
    assert 0.65 < peak_bytes(alone) / forward < 1.03
    _, saved = autograd.forward(block, packed | adapters, x, trained=adapters)
    assert saved.nbytes == saved_bytes(model, i, workload)
    taken = peak_bytes(lambda: autograd.backward(saved, packed | adapters, x, dy, sinks))
    assert 0.7 < taken / backward < 1


@unsanitized
@pytest.mark.parametrize("pointwise", [PLAIN, compiled()], ids=["plain", "compiled"])
@pytest.mark.parametrize("recompute", RECOMPUTED)
@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize(
    ("name", "least"), [("llama-3.1-8b", 0.98), ("qwen2.5-7b", 0.85), ("gemma-3-27b", 0.7), ("olmo-2-32b", 0.7)]
)
def test_products_in_fp8_hold_one_weight_and_its_operands_at_a_time(
    name: str, least: float, batch: int, recompute: str, pointwise: Pointwise
) -> None:
    model = presets.load(name)
    workload = Workload(micro_batch_size=batch, seq_len=1024, recompute=recompute, matmul="fp8")
    block, params, x, dy, sinks = first_block(model, workload, pointwise)

    def alone() -> None:
        with torch.no_grad():
            block.forward(params, x)

    def back() -> None:
        autograd.backward(autograd.forward(block, params, x)[1], params, x, dy, sinks)

    back()  # cuBLAS takes its workspaces, one for this thread, one for autograd's
    counted = {phase: workspace_bytes(model, 0, phase, workload) for phase in (Phase.FORWARD, Phase.BACKWARD)}
    assert least < peak_bytes(alone) / counted[Phase.FORWARD] < 1.01
    _, saved = autograd.forward(block, params, x)
    assert saved.nbytes == saved_bytes(model, 0, dataclasses.replace(workload, matmul=None))
    taken = peak_bytes(lambda: autograd.backward(saved, params, x, dy, sinks))
    assert least < taken / counted[Phase.BACKWARD] < 1.01


@unsanitized
@pytest.mark.parametrize("tokens", [16384, 65536])  # all columns at once, or a quarter of them
def test_the_embeddings_backward_takes_no_more_than_is_counted(tokens: int) -> None:
    model, workload = presets.load("llama-3.1-8b"), Workload(micro_batch_size=1, seq_len=tokens)
    sink = Sink(bf16(model.vocab_size, model.hidden_size), True)
    labels, dy = int64(1, tokens), bf16(1, tokens, model.hidden_size)
    taken = peak_bytes(lambda: Embed().backward(labels, dy, sink))
    assert 0.8 < taken / workspace_bytes(model, model.embed, Phase.BACKWARD, workload) < 1


@unsanitized
@pytest.mark.parametrize("precision", ["bf16", "bf16_16bit", "bf16_split"])
@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-30b-a3b"])  # of one matrix at a time, of many experts
def test_muons_step_takes_no_more_than_is_counted(name: str, precision: str) -> None:
    model, workload = presets.load(name), Workload(micro_batch_size=1, seq_len=1, precision=precision, optimizer="muon")
    n, hyper = model.params(0), Adam(lr=1e-3)
    state = torch.zeros(state_bytes(model, workload, 0, n), device="cuda", dtype=torch.uint8)
    weights, grad, of = bf16(n), bf16(n), matrices(model, workload, 0)

    def step() -> None:
        muon.step(weights, grad, state, hyper, 1, matrices=of, precision=precision)

    step()  # cuBLAS takes its workspaces
    assert 0.7 < peak_bytes(step) / workspace_bytes(model, 0, Phase.ADAM, workload) < 1.01


TOKENS, WIDTH, VOCAB = 16384, 4096, 128_256


@unsanitized
@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("rms_forward", lambda: (bf16(TOKENS, WIDTH), bf16(WIDTH), 1e-5)),
        ("rms_forward", lambda: (bf16(TOKENS, WIDTH), bf16(WIDTH), 1e-5, 1.0)),
        ("rms_backward", lambda: (bf16(TOKENS, WIDTH), bf16(TOKENS, WIDTH), fp32(TOKENS, 1), bf16(WIDTH))),
        (
            "rms_backward",
            lambda: (*(bf16(TOKENS, WIDTH) for _ in range(2)), fp32(TOKENS, 1), bf16(WIDTH), bf16(TOKENS, WIDTH)),
        ),
        ("swiglu_forward", lambda: (bf16(TOKENS, WIDTH), bf16(TOKENS, WIDTH))),
        ("swiglu_backward", lambda: tuple(bf16(TOKENS, WIDTH) for _ in range(3))),
        ("geglu_forward", lambda: (bf16(TOKENS, WIDTH), bf16(TOKENS, WIDTH))),
        ("geglu_backward", lambda: tuple(bf16(TOKENS, WIDTH) for _ in range(3))),
        ("squared_forward", lambda: (bf16(TOKENS, WIDTH),)),
        ("squared_backward", lambda: (bf16(TOKENS, WIDTH), bf16(TOKENS, WIDTH))),
        ("halves_forward", lambda: (bf16(TOKENS, 2 * WIDTH),)),
        ("halves_backward", lambda: (bf16(TOKENS, WIDTH), bf16(TOKENS, 2 * WIDTH))),
        ("clamped_forward", lambda: (bf16(TOKENS, 2 * WIDTH),)),
        ("clamped_backward", lambda: (bf16(TOKENS, WIDTH), bf16(TOKENS, 2 * WIDTH))),
        ("weighted_sum", lambda: (bf16(4 * TOKENS, WIDTH), int64(TOKENS, 4), fp32(TOKENS, 4))),
        ("summed_backward", lambda: (bf16(TOKENS, WIDTH), int64(4 * TOKENS), fp32(TOKENS, 4))),
        ("weights_backward", lambda: (bf16(4 * TOKENS, WIDTH), int64(TOKENS, 4), bf16(TOKENS, WIDTH))),
        ("rotation", lambda: (bf16(2, TOKENS // 2, 32, 128), bf16(TOKENS // 2, 1, 64), bf16(TOKENS // 2, 1, 64))),
        ("gated_norm_forward", lambda: (*(bf16(2, TOKENS // 2, 32, 128) for _ in range(2)), bf16(128), 1e-6)),
        (
            "gated_norm_backward",
            lambda: (*(bf16(2, TOKENS // 2, 32, 128) for _ in range(3)), bf16(128), fp32(2, TOKENS // 2, 32, 1)),
        ),
        ("opened_forward", lambda: (bf16(TOKENS, WIDTH), bf16(TOKENS, WIDTH))),
        ("opened_backward", lambda: tuple(bf16(TOKENS, WIDTH) for _ in range(3))),
        ("norm_of_gated_forward", lambda: (*(bf16(2, TOKENS // 2, 8, 512) for _ in range(2)), bf16(8, 512), 1e-6)),
        (
            "mamba_keys",
            lambda: (bf16(2, 4096, 3328)[..., 3072:3200].unflatten(-1, (1, 128)), bf16(1, 128, 4), bf16(1, 128)),
        ),
        ("mamba_decayed", lambda: (fp32(64, 2, 64, 64), fp32(64, 96, 64), fp32(64, 96, 64))),
        ("mamba_through", lambda: (fp32(64, 2, 128, 3072), fp32(64, 2, 128, 3072), 48)),
        ("delta_chunked", lambda: (bf16(2, 4096, 32, 128), torch.float32)),
        ("delta_decayed", lambda: (*(fp32(64, 64, 64, 64) for _ in range(2)), fp32(64, 64, 64, 1), fp32(64, 64, 64))),
        ("delta_carried", lambda: (fp32(64, 64, 128, 128), fp32(64, 64, 128, 128), 1)),
        ("delta_carried", lambda: (fp32(64, 64, 128, 128), fp32(64, 64, 128, 128), 128)),
        (
            "delta_paired_backward",
            lambda: (
                *(fp32(64, 64, 64, 128) for _ in range(3)),
                fp32(64, 64, 64),
                *(fp32(64, 64, 64, 128) for _ in range(2)),
                fp32(64, 64, 64),
            ),
        ),
        ("opened_norm_forward", lambda: (*(bf16(2, TOKENS // 2, 32, 128) for _ in range(2)), bf16(128), 1e-6)),
        (
            "delta_right_backward",
            lambda: (
                *(fp32(64, 64, 64, width) for width in (256, 128, 128)),
                fp32(64, 64, 1),
                *(fp32(64, 64, 64, 128) for _ in range(3)),
                fp32(64, 64, 64, 1),
                fp32(64, 64, 64),
            ),
        ),
        ("fp8_unit", lambda: (bf16(TOKENS, WIDTH), torch.float8_e4m3fn)),
        ("fp8_rows", lambda: (bf16(TOKENS, WIDTH), fp32(1), torch.float8_e4m3fn)),
        ("fp8_columns", lambda: (bf16(TOKENS, WIDTH), fp32(1), torch.float8_e4m3fn)),
        ("fp8_both", lambda: (bf16(TOKENS, WIDTH), fp32(1), torch.float8_e5m2)),
        ("cross_entropy", lambda: (bf16(1024, VOCAB), int64(1024, 1), fp32(1024, 1))),
        ("cross_entropy", lambda: (bf16(1024, VOCAB), int64(1024, 1), fp32(1024, 1), 30.0)),
    ],
)
def test_compiled_functions_move_their_arguments_and_results_once(
    name: str, made: Callable[[], tuple[Any, ...]]
) -> None:
    """By the compiler's count, as schedules count; of fewer tokens it makes another kernel for a norm's weight."""
    arguments = made()
    torch.compiler.reset()
    metrics.reset()
    torch._logging.set_logs(inductor_metrics=True)
    with torch._inductor.config.patch(force_disable_caches=True):
        found = _compiled(getattr(FUSED, name), "inductor")(*arguments)
    tensors = [
        t for t in (*arguments, *(found if isinstance(found, tuple) else [found])) if isinstance(t, torch.Tensor)
    ]
    assert metrics.num_bytes_accessed == pytest.approx(sum(t.nbytes for t in tensors), rel=0.01)


@unsanitized
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("pointwise", [PLAIN, compiled()], ids=["plain", "compiled"])
def test_the_loss_takes_no_more_than_is_counted(pointwise: Pointwise, softcap: float | None) -> None:
    model = dataclasses.replace(presets.load("llama-3.1-8b"), final_logit_softcapping=softcap)
    workload = Workload(micro_batch_size=4, seq_len=4096)
    x, d_hidden, norm, table = bf16(4, 4096, 4096), bf16(4, 4096, 4096), bf16(4096), bf16(model.vocab_size, 4096)
    targets = torch.zeros(4, 4096, dtype=torch.int64, device="cuda")
    shares = torch.full((4, 4096), 1 / 16384, device="cuda")
    sink = Sink(torch.zeros_like(table), False)
    head = Head(eps=model.rms_norm_eps, softcap=softcap, pointwise=pointwise)

    def loss() -> None:
        head.loss_and_grads(norm, table, x, targets, shares, d_hidden=d_hidden, norm_sink=None, table_sink=sink)

    loss()
    least = 0.9 if pointwise is PLAIN else 0.3  # a compiled loss holds no fp32 logits
    assert least < peak_bytes(loss) / workspace_bytes(model, model.head, Phase.LOSS, workload) < 1


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, device="cuda", dtype=torch.bfloat16)


def fp32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, device="cuda")


def int64(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, device="cuda", dtype=torch.int64)


@sanitized
def test_sanitizer_sees_that_a_stream_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda.DeviceEvent, "follow", lambda event, before: CpuEvent.wait(before))
    with trainer(schedule_of("streamed"), CudaBackend()) as run, pytest.raises(OpFailed, match="UnsynchronizedAccess"):
        run.run(3)
