"""Rotary position embedding: by how much each pair of a head's dimensions turns per position, and its tables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from schedules.model import ModelError, ModelSpec
from schedules.model_checks import LATE_QUERIES, ORIGINAL, PARTIAL


@dataclass(frozen=True, kw_only=True, eq=False)
class Turns:
    """Tables of cos and sin, [seq, 1, rotary_dim / 2], for keys and for queries, in the type that is computed with.

    late: what queries are multiplied by, [seq, 1, 1], if not by 1; theirs have it already.
    """

    of_keys: tuple[Tensor, Tensor]
    of_queries: tuple[Tensor, Tensor]
    late: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them."""
        return *self.of_keys, *self.of_queries, *(() if self.late is None else (self.late,))

    def first(self, seq: int) -> Turns:
        """Those of the first so many positions."""
        cos, sin, of_cos, of_sin, *late = (t[:seq] for t in self.tensors)
        return Turns(of_keys=(cos, sin), of_queries=(of_cos, of_sin), late=late[0] if late else None)


def turns(
    model: ModelSpec, seq_len: int, device: torch.device, dtype: torch.dtype, *, theta: float | None = None
) -> Turns:
    """Of sequences of that length; see `rotary_tables`."""
    late, tables = late_queries(model, seq_len), rotary_tables(model, seq_len, device, dtype, theta=theta)
    if late is None:
        return Turns(of_keys=tables, of_queries=tables)
    of_queries = rotary_tables(model, seq_len, device, dtype, theta=theta, times=late)
    return Turns(of_keys=tables, of_queries=of_queries, late=late.to(device, dtype))


def rotary_tables(
    model: ModelSpec,
    seq_len: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    theta: float | None = None,
    times: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """cos and sin of every position's angles, [seq_len, 1, rotary_dim / 2] each, computed in fp32.

    With `theta` plain, of that base. What is turned by them is multiplied by `times`, fp32 [seq_len, 1, 1], too.
    Raises ModelError for a rope_scaling that is not known.
    """
    frequencies = rotary_frequencies(model, seq_len) if theta is None else _plain(model.local_rotary_dim, theta)
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float32), frequencies)[:, None, :]
    scale: Tensor | float = _scale(model) if theta is None else 1.0
    if times is not None:
        scale = scale * times
    return (angles.cos() * scale).to(device, dtype), (angles.sin() * scale).to(device, dtype)


def late_queries(model: ModelSpec, seq_len: int) -> Tensor | None:
    """What queries are multiplied by, fp32 [seq_len, 1, 1]; None where that is 1 in sequences of that length.

    They grow with the logarithm of how many times the original length has passed (transformers,
    modeling_ministral3.py).
    """
    scaling = dict(model.rope_scaling)
    beta = float(scaling.get(LATE_QUERIES) or 0.0) if model.family.late_queries else 0.0
    if not beta or seq_len <= scaling[ORIGINAL]:
        return None
    passed = torch.arange(seq_len).div(scaling[ORIGINAL], rounding_mode="floor")
    return 1 + beta * torch.log1p(passed.float())[:, None, None]


def unrotated_queries(model: ModelSpec, seq_len: int, device: torch.device, dtype: torch.dtype) -> Tensor | None:
    """What queries without rotary embedding are multiplied by, [seq_len, 1, 1]; None where that is 1 in sequences of
    that length (transformers, modeling_llama4.py)."""
    if not model.floor_scale or seq_len < model.floor_scale:
        return None
    passed = torch.arange(1, seq_len + 1).div(model.floor_scale, rounding_mode="floor")
    return (1 + model.attn_scale * torch.log1p(passed.float()))[:, None, None].to(device, dtype)


def depends_on_length(model: ModelSpec, seq_len: int) -> bool:
    """Whether in sequences of that length tokens are embedded otherwise than in short ones."""
    scaling = dict(model.rope_scaling)
    longer = scaling.get("rope_type") == "longrope" and seq_len > scaling[ORIGINAL]
    unrotated = model.floor_scale > 0 and seq_len >= model.floor_scale
    return longer or unrotated or late_queries(model, seq_len) is not None


def rotary_frequencies(model: ModelSpec, seq_len: int) -> Tensor:
    """Radians per position of each pair of dimensions that turns, fp32 [rotary_dim / 2], in sequences of that length.

    Plain (Su et al., arXiv:2104.09864), "linear" (all slowed by `factor`), or "llama3": wavelengths longer
    than original / low_freq_factor positions are slowed by `factor`, those shorter than
    original / high_freq_factor are kept, and between the two the change is gradual (Llama 3.1's
    rope_scaling in config.json); or "yarn" (Peng et al., arXiv:2309.00071), as gpt-oss has it: pairs that turn
    less than beta_slow times in the original length are slowed, those that turn more than beta_fast times kept,
    and between the two, by the pair's number, the change is gradual; or "longrope" (Ding et al., arXiv:2402.13753):
    each pair is slowed by a factor of its own, one for sequences up to the original length and one for longer ones;
    or "proportional": a `partial_rotary_factor` of the pairs turn, the first, and others stand still.
    Raises ModelError for another kind.
    """
    plain = _plain(model.rotary_dim, model.rope_theta)
    scaling = dict(model.rope_scaling)
    kind = scaling.get("rope_type", "default")
    if kind == "default":
        return plain
    if kind == "linear":
        return plain / float(scaling["factor"])
    if kind == "yarn":
        return _yarn(plain, scaling, model)
    if kind == "proportional":
        some = int(scaling[PARTIAL] * len(plain))
        return torch.cat((plain[:some], torch.zeros(len(plain) - some))) / float(scaling.get("factor") or 1)
    if kind == "llama3":
        low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
        turns = float(scaling["original_max_position_embeddings"]) * plain / (2 * math.pi)
        keep = ((turns - low) / max(high - low, 1e-6)).clamp(0, 1)  # Llama 4's are the same
        return plain * (keep + (1 - keep) / float(scaling["factor"]))
    if kind == "longrope":
        long = seq_len > scaling["original_max_position_embeddings"]
        return plain / torch.tensor(scaling["long_factor" if long else "short_factor"], dtype=torch.float32)
    raise ModelError(f"{model.name}: rope_scaling of type {kind!r} has no template")


def _plain(dim: int, theta: float) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def _yarn(plain: Tensor, scaling: Mapping[str, Any], model: ModelSpec) -> Tensor:
    original = float(scaling["original_max_position_embeddings"])

    def pair(turns: float) -> float:
        """The number of the pair of dimensions, as a fraction, that turns so often in the original length."""
        return model.rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(model.rope_theta))

    first, last = pair(float(scaling.get("beta_fast") or 32)), pair(float(scaling.get("beta_slow") or 1))
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, model.rotary_dim - 1)
    numbers = torch.arange(len(plain), dtype=torch.float32)
    slowed = ((numbers - first) / max(last - first, 1e-3)).clamp(0, 1)
    return plain * (1 - slowed) + plain / float(scaling["factor"]) * slowed


def _scale(model: ModelSpec) -> float:
    """What the tables are multiplied by: 1, but for "yarn" and "longrope", which make attention sharper the further it
    reaches.
    """
    scaling = dict(model.rope_scaling)
    if (kind := scaling.get("rope_type")) not in ("yarn", "longrope"):
        return 1.0
    if stated := scaling.get("attention_factor"):
        return float(stated)
    original = float(scaling["original_max_position_embeddings"])
    # of "longrope" transformers takes what stands beside the lists (modeling_rope_utils.py)
    factor = max(float(scaling.get("factor") or model.max_position_embeddings / original), 1.0)
    if kind == "yarn":
        of_tables, of_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
        return _sharper(factor, of_tables) / _sharper(factor, of_all) if of_tables and of_all else _sharper(factor)
    return math.sqrt(1 + math.log(factor) / math.log(original))


def _sharper(factor: float, mscale: float = 1.0) -> float:
    return 0.1 * mscale * math.log(max(factor, 1.0)) + 1.0


def sharper_products(model: ModelSpec) -> float:
    """What products of queries and keys are multiplied by beside 1 / sqrt(head_dim): 1, but with "mscale_all_dim".

    Then also what is not turned counts as if both were that much longer (transformers, modeling_deepseek_v3.py).
    """
    scaling = dict(model.rope_scaling)
    of_all = scaling.get("mscale_all_dim")
    return _sharper(float(scaling["factor"]), of_all) ** 2 if of_all else 1.0
