"""Where training starts: random parameters, a function of the seed and the layer alone."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from megatrain.checksum import checksum
from schedules.model import ModelSpec
from schedules.parameters import LAYER_SCALAR, OF_EACH_EXPERT, ROUTER_SCALE, is_matrix

STANDARD_DEVIATION = 0.02  # `initializer_range` of Hugging Face's Llama and Qwen configurations
FEW = 1_048_573  # random numbers that are repeated: a prime, so that no two rows of a matrix are alike
# Of linear attention and state spaces.
TAPS, RATE, STEP_BIAS, GATED_NORM = "conv1d.weight", "A_log", "dt_bias", "linear_attn.norm.weight"
SKIP = "mamba.D"
RATES = 0.01, 16.0
PARAMETERS, ADAPTERS = 1, 500_001  # where a seed's streams of random numbers begin, one for each layer


def random_adapters(model: ModelSpec, rank: int, seed: int) -> Callable[[int], Tensor]:
    """Block -> its adapters, fp32, flat: what comes first normal, what comes after zero, so that training begins
    with the model as it is (LoRA, arXiv:2106.09685).
    """

    def adapters(i: int) -> Tensor:
        generator = _generator(seed, ADAPTERS + i)
        parts = []
        for name, shape in model.adapter_shapes(i, rank).items():
            first = torch.randn(shape, generator=generator).div_(shape[1] ** 0.5)
            parts.append((first if "lora_A" in name else torch.zeros(shape)).flatten())
        return torch.cat(parts)

    return adapters


def with_checksums(source: Callable[[int], Tensor], checksums: dict[int, int]) -> Callable[[int], Tensor]:
    """`source`, which leaves the checksum of each layer's parameters in `checksums`."""

    def parameters(i: int) -> Tensor:
        found = source(i)
        checksums[i] = checksum(found)
        return found

    return parameters


def random_parameters(model: ModelSpec, seed: int) -> Callable[[int], Tensor]:
    """Layer -> its parameters, fp32, flat: matrices normal, norms multiply by one, biases zero.

    Of linear attention taps are normal, too, and rates of decay uniform in their logarithm's exponential, as
    transformers has it (modeling_qwen3_5.py).
    """

    def parameters(i: int) -> Tensor:
        generator = _generator(seed, PARAMETERS + i)
        parts = []
        for name, shape in model.parameter_shapes(i).items():
            if is_matrix(name, shape) or name.endswith(TAPS):
                parts.append(torch.randn(shape, generator=generator).mul_(STANDARD_DEVIATION).flatten())
            elif name.endswith(RATE):
                parts.append(torch.empty(math.prod(shape)).uniform_(*RATES, generator=generator).log_())
            else:
                parts.append(torch.full((math.prod(shape),), _unit(model, name)))
        return torch.cat(parts)

    return parameters


def repeated_parameters(model: ModelSpec, seed: int) -> Callable[[int], Tensor]:
    """As `random_parameters`, but few random numbers again and again, and blocks of a kind alike.

    Made in no time, for where only time counts. Not to be written to: blocks share what is returned.
    """
    first = {model.layer_kind(i): i for i in reversed(model.layers)}
    few = torch.randn(FEW, generator=_generator(seed, PARAMETERS)).mul_(STANDARD_DEVIATION)

    @functools.lru_cache(maxsize=1)
    def made(i: int) -> Tensor:
        shapes = model.parameter_shapes(i)
        flat = torch.empty(sum(math.prod(shape) for shape in shapes.values()))
        parts = torch.split(flat, [math.prod(shape) for shape in shapes.values()])
        for (name, shape), part in zip(shapes.items(), parts, strict=True):
            if not (is_matrix(name, shape) or name.endswith(TAPS)):
                part.fill_(_unit(model, name))
                continue
            for piece in torch.split(part, FEW):
                piece.copy_(few[: len(piece)])
        return flat

    return lambda i: made(first[model.layer_kind(i)])


def _unit(model: ModelSpec, name: str) -> float:
    """What a norm, a bias, a rate, or a number that something is multiplied by begins with."""
    if name.endswith((GATED_NORM, STEP_BIAS, SKIP, LAYER_SCALAR, ROUTER_SCALE, OF_EACH_EXPERT)):
        return 1.0
    return 1.0 - model.norm_offset if "norm" in name else 0.0


def _generator(seed: int, stream: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 1_000_003 + stream)
