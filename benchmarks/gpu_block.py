"""One block as every step's row computes it, in bf16, beside the same block in fp32: before anything is timed.

Which kernel computes attention is torch's choice, by GPU and version; the tests on a GPU are in fp32, where it takes
another one, and has none for windows, sinks and experts. A block runs as launched, with compiled kernels, and replayed
as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import gpu_machine
import torch
from gpu_machine import Row
from torch import Tensor

from megatrain import fp8
from megatrain.autograd import backward, forward
from megatrain.experts import waits_for_gpu
from megatrain.graphs import Pool
from megatrain.initial import random_parameters
from megatrain.template import sinks, templates, views
from megatrain.way import PLAINLY, Way
from schedules import presets
from schedules.errors import InputError
from schedules.model import ModelSpec
from schedules.saved import saved_bytes
from schedules.workload import Workload

AS_TORCH_CHOOSES, WITHOUT_CUDNN = "attention as torch chooses", "attention without cuDNN"
# Heads of 64 and of 128, four and seven to a key, without and with biases.
DENSE = tuple(map(presets.load, ("llama-3.2-1b", "qwen2.5-7b")))
_GPT_OSS, _QWEN = (
    replace(presets.load(name), num_experts=8, num_experts_per_tok=2) for name in ("gpt-oss-20b", "qwen3-30b-a3b")
)
_DEEPSEEK = replace(
    presets.load("deepseek-v2-lite"), num_experts=8, num_experts_per_tok=2, first_k_dense_replace=0, q_lora_rank=768
)
_QWEN3_5 = presets.load("qwen3.5-0.8b")
_KIMI = presets.load("kimi-linear-48b-a3b")
_GRANITE4 = presets.load("granite-4.0-h-micro")
_NEMOTRON3 = replace(presets.load("nemotron-3-super-120b-a12b"), num_experts=8, num_experts_per_tok=2)
_QWEN3_5_MOE = replace(presets.load("qwen3.5-35b-a3b"), num_experts=8, num_experts_per_tok=2)
# Both kinds of gpt-oss' blocks, and a window without sinks; experts as both layouts store them, though fewer: eight,
# since a router's bias of other than whole 16 bytes would shift the matrices behind it to where products refuse them;
# latent attention, of queries, too, to values narrower than keys, and experts that are given all tokens; linear
# attention whose heads decay, and whose channels do; a state space; attention whose output is gated, with a gated
# expert that is given all tokens; and a state space of several groups before experts of a latent vector, without a gate
# between their matrices.
UNTIMED = (
    _GPT_OSS,
    replace(_GPT_OSS, name="gpt-oss-20b without a window", sliding_window=None, layer_types=()),
    replace(_QWEN, name="qwen3-30b-a3b with a window", sliding_window=128),
    replace(_DEEPSEEK, name="deepseek-v2-lite with latent queries"),
    replace(_QWEN3_5.of_blocks([0]), name="qwen3.5-0.8b, linear attention"),
    replace(_KIMI.of_blocks([0]), name="kimi-linear-48b-a3b, linear attention by channel"),
    replace(_GRANITE4.of_blocks([0]), name="granite-4.0-h-micro, a state space"),
    replace(_QWEN3_5_MOE.of_blocks([3]), name="qwen3.5-35b-a3b, gated attention and experts"),
    replace(_NEMOTRON3.of_blocks([0]), name="nemotron-3-super-120b-a12b, a state space and latent experts"),
)
WAYS = (PLAINLY, Way(fused=True), Way(graphs=True))
SEQUENCES, LENGTH = 2, 1024
LIMIT = 0.05  # of a relative error: bf16's roundings make 0.4 to 2 % on a CPU, a wrong kernel much more
FP8_LIMIT = 0.2  # of one beside bf16: operands' roundings make 6 to 10 % on a CPU
SINK = 4.0  # sinks' mean: beside 128 keys a sink of 0 would hardly be missed
APART = 4.0  # between the numbers by which a token chooses its experts; attention adds about one to each


def ways_of(model: ModelSpec) -> list[Way]:
    """The ways in which its blocks can be computed on this GPU."""
    waits = model.has_experts(0) and waits_for_gpu(torch.bfloat16)
    return [way for way in WAYS if not (way.graphs and waits)]


def checks(models: Iterable[ModelSpec], ways: Iterable[Way]) -> list[Row]:
    """A row for each model and way: the largest relative error, of what, and the bytes kept and counted."""
    rows = []
    for model in models:
        numbers = _numbers(model)
        # on a GPU these would be computed by other means in fp32, or not at all
        exact = torch.device("cpu") if model.num_experts else gpu_machine.DEVICE
        right, _ = _computed(model, numbers, exact, torch.float32, PLAINLY)
        for way in ways:
            found, kept = _computed(model, numbers, gpu_machine.DEVICE, torch.bfloat16, way)
            rows.append(_row(model, f"{model.name} {way}", found, right, kept, LIMIT))
    return rows


def fp8_checks(models: Iterable[ModelSpec], ways: Iterable[Way]) -> list[Row]:
    """As `checks`, of products in fp8 beside those in bf16; or a row that says why there are none here."""
    try:
        fp8.require(gpu_machine.DEVICE)
    except InputError as error:
        return [{"case": "not computed", "passed": True, "why": str(error)}]
    rows = []
    for model in models:
        numbers = _numbers(model)
        right, _ = _computed(model, numbers, gpu_machine.DEVICE, torch.bfloat16, PLAINLY)
        for way in ways:
            found, kept = _computed(model, numbers, gpu_machine.DEVICE, torch.bfloat16, way, matmul="fp8")
            rows.append(_row(model, f"{model.name} {way}", found, right, kept, FP8_LIMIT))
    return rows


def _row(
    model: ModelSpec, case: str, found: dict[str, Tensor], right: dict[str, Tensor], kept: int, limit: float
) -> Row:
    errors = {what: _relative(value, right[what].to(value.device)) for what, value in found.items()}
    worst = max(errors, key=lambda what: errors[what])
    counted = saved_bytes(model, 0, Workload(micro_batch_size=SEQUENCES, seq_len=LENGTH))
    attends = model.has_attention(0) and model.recurrence(0) is None
    return {
        "case": case,
        "passed": errors[worst] <= limit and kept <= counted,
        "kernel": gpu_machine.attention_kernel(model, LENGTH).name.lower() if attends else "none",
        "worst": worst,
        "off_by": errors[worst],
        "kept_bytes": kept,
        "counted_bytes": counted,
    }


def _numbers(model: ModelSpec) -> tuple[Tensor, Tensor, Tensor]:
    """The first block's weights, its input, and the gradient of its output: random, and of bf16.

    A router's choice is no matter of rounding: it reads numbers of its own in each token, far apart and in random
    order. Nobody chooses the first expert.
    """
    generator = torch.Generator().manual_seed(0)
    weights = random_parameters(model, 0)(0)
    x, dy = (torch.randn(SEQUENCES, LENGTH, model.hidden_size, generator=generator) for _ in range(2))
    params = views(weights, model.parameter_shapes(0))
    for name, p in params.items():
        if name == "self_attn.sinks":
            p.normal_(SINK, generator=generator)
        elif name.endswith("_proj_bias"):  # experts'
            p.normal_(generator=generator)
    if model.has_experts(0):
        router = next(p for name, p in params.items() if name == f"{model.experts.router}.weight")
        router.zero_().fill_diagonal_(0.2)
        order = torch.rand(SEQUENCES, LENGTH, model.num_experts - 1, generator=generator).argsort(-1)
        x[..., 0], x[..., 1 : model.num_experts] = 0.0, APART * (order + 1)
    return weights.bfloat16(), x.bfloat16(), dy.bfloat16()


def _computed(
    model: ModelSpec,
    numbers: tuple[Tensor, Tensor, Tensor],
    device: torch.device,
    dtype: torch.dtype,
    way: Way,
    matmul: str | None = None,
) -> tuple[dict[str, Tensor], int]:
    """The first block's output and all gradients by name, and the bytes that it keeps between forward and backward.

    Of the same numbers in either type: only what is computed differs.
    """
    shapes = model.parameter_shapes(0)
    of = templates(model, seq_len=LENGTH, device=device, dtype=dtype, pointwise=way.pointwise, matmul=matmul)
    layer = of.blocks[model.layer_kind(0)]
    weights, x, dy = (t.to(device, dtype) for t in numbers)
    gradient, found, kept = torch.empty_like(weights), dict[str, Tensor](), 0
    params, places = views(weights, shapes), sinks(gradient, shapes, accumulate=False)

    def run(step: int) -> None:
        nonlocal kept
        found["output"], saved = forward(layer, params, x)
        kept = saved.nbytes
        found["input's gradient"] = backward(saved, params, x, dy, places)

    torch.cuda.synchronize()  # another stream filled these
    with torch.cuda.stream(torch.cuda.Stream()):
        run(0)
        if way.graphs:
            gradient.zero_()  # what replays nothing leaves it so
            Pool().capture(run, 1).replay()
    torch.cuda.synchronize()
    return found | {f"gradient of {name}": value for name, value in views(gradient, shapes).items()}, kept


def _relative(found: Tensor, right: Tensor) -> float:
    """The size of the difference over that of the right values; infinite where there are NaN.

    What is zero on both sides, as the gradient of a router's bias, is right.
    """
    error, size = (float(t.norm()) for t in (found.float() - right.float(), right.float()))
    if error == 0.0:
        return 0.0
    return error / size if size > 0 and error == error else float("inf")
