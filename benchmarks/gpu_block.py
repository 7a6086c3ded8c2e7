"""One block as every step's row computes it, in bf16, beside the same block in fp32: before anything is timed.

Which kernel computes attention is torch's choice, by GPU and version; the tests on a GPU are in fp32, where it takes
another one. A block runs as launched, with compiled kernels, and replayed as a CUDA graph.
"""

from __future__ import annotations

import gpu_machine
import torch
from gpu_machine import Row
from torch import Tensor

from megatrain.autograd import backward, forward
from megatrain.graphs import Pool
from megatrain.initial import random_parameters
from megatrain.template import sinks, templates, views
from megatrain.way import PLAINLY, Way
from schedules import presets
from schedules.model import ModelSpec
from schedules.workload import Workload

AS_TORCH_CHOOSES, WITHOUT_CUDNN = "attention as torch chooses", "attention without cuDNN"
MODELS = ("llama-3.2-1b", "qwen2.5-7b")  # heads of 64 and of 128, four and seven to a key, without and with biases
SEQUENCES, LENGTH = 2, 1024
LIMIT = 0.05  # of a relative error: bf16's roundings make 0.4 to 1.7 % on a CPU, a wrong kernel much more


def checks(way: Way) -> list[Row]:
    """A row for each model, computed in a way: the largest relative error, of what, and the bytes kept and counted."""
    rows = []
    for name in MODELS:
        model = presets.load(name)
        right, _ = _computed(model, torch.float32, PLAINLY)
        counted = model.saved_bytes(0, Workload(micro_batch_size=SEQUENCES, seq_len=LENGTH))
        found, kept = _computed(model, torch.bfloat16, way)
        errors = {what: _relative(value, right[what]) for what, value in found.items()}
        worst = max(errors, key=lambda what: errors[what])
        rows.append(
            {
                "case": f"{name} {way}",
                "passed": errors[worst] <= LIMIT and kept <= counted,
                "kernel": gpu_machine.attention_kernel(model, LENGTH).name.lower(),
                "worst": worst,
                "off_by": errors[worst],
                "kept_bytes": kept,
                "counted_bytes": counted,
            }
        )
    return rows


def _computed(model: ModelSpec, dtype: torch.dtype, way: Way) -> tuple[dict[str, Tensor], int]:
    """The first block's output and all gradients by name, and the bytes that it keeps between forward and backward.

    Weights, input and the output's gradient are random numbers of bf16 in either type: only what is computed differs.
    """
    device, shapes = gpu_machine.DEVICE, model.parameter_shapes(0)
    of = templates(model, seq_len=LENGTH, device=device, dtype=dtype, pointwise=way.pointwise)
    layer, generator = of.blocks[model.layer_kind(0)], torch.Generator().manual_seed(0)
    weights = random_parameters(model, 0)(0).bfloat16().to(device, dtype)
    size = (SEQUENCES, LENGTH, model.hidden_size)
    x, dy = (torch.randn(size, generator=generator).bfloat16().to(device, dtype) for _ in range(2))
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
    """The size of the difference over that of the right values; infinite where there are NaN."""
    error = float((found.float() - right).norm() / right.norm())
    return error if error == error else float("inf")
