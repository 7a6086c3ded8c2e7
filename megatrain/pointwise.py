"""The parts of a layer that multiply no matrices, forward and backward, as plain functions of tensors.

On a GPU each line of them is a kernel that reads and writes device memory; `compiled` makes one kernel of each
function. What autograd keeps does not depend on which of the two runs: `megatrain.template` decides that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatrain import delta_parts, mamba_parts, recurrence_parts
from schedules import recurrence
from schedules.families import GPT_OSS_ACTIVATION


def rms_forward(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """RMSNorm over the last dimension in x's type, and 1 / sqrt(mean(x^2) + eps) in at least fp32.

    It multiplies by weight + offset.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    rstd = torch.rsqrt(x.to(wide).square().mean(-1, keepdim=True) + eps)
    return (x * rstd).mul_(_with_offset(weight, offset, wide)).to(x.dtype), rstd


def _with_offset(weight: Tensor, offset: float, wide: torch.dtype) -> Tensor:
    return weight.to(wide) + offset if offset else weight


def rms_backward(
    dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor, beside: Tensor | None = None, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Gradients of x (in x's type) and of weight (in rstd's type, summed over rows).

    `beside` is the gradient that x has from elsewhere, added before what is computed in rstd's type is rounded.
    """
    normed, wide = x * rstd, dy.to(rstd.dtype)
    dweight = (wide * normed).flatten(0, -2).sum(0)
    dnormed = wide * _with_offset(weight, offset, rstd.dtype)
    del wide
    mean = (dnormed * normed).mean(-1, keepdim=True)
    dx = dnormed.sub_(normed.mul_(mean)).mul_(rstd)
    return (dx if beside is None else dx.add_(beside)).to(x.dtype), dweight


def swiglu_forward(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return F.silu(gate).mul_(up)


def swiglu_backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up; silu(gate) is computed again, which is cheaper than keeping it."""
    return torch.ops.aten.silu_backward(dy * up, gate), F.silu(gate).mul_(dy)


def geglu_forward(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up, GELU by tanh."""
    return F.gelu(gate, approximate="tanh").mul_(up)


def geglu_backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up; gelu(gate) is computed again."""
    d_gate = torch.ops.aten.gelu_backward(dy * up, gate, approximate="tanh")
    return d_gate, F.gelu(gate, approximate="tanh").mul_(dy)


def halves_forward(both: Tensor) -> Tensor:
    """SwiGLU of one tensor [..., 2f], gate before up: [..., f]."""
    return swiglu_forward(*both.chunk(2, dim=-1))


def halves_backward(dy: Tensor, both: Tensor) -> Tensor:
    """The gradient of `both`."""
    return torch.cat(swiglu_backward(dy, *both.chunk(2, dim=-1)), dim=-1)


def geglu_halves_forward(both: Tensor) -> Tensor:
    """As `halves_forward` with GELU."""
    return geglu_forward(*both.chunk(2, dim=-1))


def geglu_halves_backward(dy: Tensor, both: Tensor) -> Tensor:
    """The gradient of `both`."""
    return torch.cat(geglu_backward(dy, *both.chunk(2, dim=-1)), dim=-1)


def squared_forward(up: Tensor) -> Tensor:
    """The square of what is positive."""
    return F.relu(up).square_()


def squared_backward(dy: Tensor, up: Tensor) -> Tensor:
    """The gradient of `up`."""
    return F.relu(up).mul_(dy).mul_(2)


CLAMP, SLOPE = GPT_OSS_ACTIVATION["swiglu_limit"], GPT_OSS_ACTIVATION["swiglu_alpha"]


def clamped_forward(both: Tensor) -> Tensor:
    """(up + 1) * gate * sigmoid(SLOPE * gate) of one tensor [..., 2f], where gate and up take turns and are clamped.

    Gate from above, up on both sides; gpt-oss' activation, computed in at least fp32 and rounded once.
    """
    wide = torch.promote_types(both.dtype, torch.float32)
    gate, up = both[..., ::2].to(wide).clamp(max=CLAMP), both[..., 1::2].to(wide).clamp(-CLAMP, CLAMP)
    return (up + 1).mul_(gate).mul_((SLOPE * gate).sigmoid_()).to(both.dtype)


def clamped_backward(dy: Tensor, both: Tensor) -> Tensor:
    """The gradient of `both`, zero where it was clamped."""
    wide = both.to(torch.promote_types(both.dtype, torch.float32))
    raw_gate, raw_up = wide[..., ::2], wide[..., 1::2]
    gate, up, dy = raw_gate.clamp(max=CLAMP), raw_up.clamp(-CLAMP, CLAMP), dy.to(wide.dtype)
    share = torch.sigmoid(SLOPE * gate)
    d_gate = dy * (up + 1) * share * (1 + SLOPE * gate * (1 - share)) * (raw_gate <= CLAMP)
    d_up = dy * gate * share * (raw_up.abs() <= CLAMP)
    return torch.stack((d_gate, d_up), dim=-1).flatten(-2).to(both.dtype)


def weighted_sum(outputs: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """Rows of outputs [T k, h] at places [T, k], times weights [T, k], added up: [T, h] in their type, rounded once."""
    return (outputs[places] * weights[..., None]).sum(1).to(outputs.dtype)


def summed_backward(dy: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """The gradient of outputs, in dy's type; `order` [T k] has the number of the weight of each row of outputs."""
    return dy[order // weights.shape[1]].mul_(weights.flatten()[order][:, None])  # computed in the wider type


def weights_backward(outputs: Tensor, places: Tensor, dy: Tensor) -> Tensor:
    """The gradient of weights [T, k], in at least fp32."""
    wide = torch.promote_types(outputs.dtype, torch.float32)
    return (outputs[places].to(wide) * dy[:, None]).sum(-1)


def rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [batch, seq, heads, head_dim], its first dimensions turned by [seq, 1, some / 2]; with -sin, turned back."""
    half = cos.shape[-1]
    left = x.shape[-1] - 2 * half
    a, b, *rest = torch.split(x, [half, half, left] if left else half, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, *rest), dim=-1)


def neighbours_turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As `rotation`, each pair side by side."""
    some = 2 * cos.shape[-1]
    a, b = x[..., 0:some:2], x[..., 1:some:2]
    turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    return torch.cat((turned, x[..., some:]), dim=-1) if some < x.shape[-1] else turned


def last_turned(x: Tensor, cos: Tensor, sin: Tensor, others_times: Tensor | None = None) -> Tensor:
    """x [batch, seq, heads, head_dim], its last dimensions turned by [seq, 1, some / 2], each pair side by side."""
    left = x.shape[-1] - 2 * cos.shape[-1]
    a, b = x[..., left::2], x[..., left + 1 :: 2]
    turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    others = x[..., :left] if others_times is None else x[..., :left] * others_times
    return torch.cat((others, turned), dim=-1)


def keys_values(both: Tensor, key: Tensor, cos: Tensor | None, sin: Tensor | None, nope: int) -> tuple[Tensor, Tensor]:
    """Keys and values, contiguous, of [batch, seq, heads, nope + value] and a key [batch, seq, 1, rope] for all heads.

    That is turned, if there are tables, and comes last in each key.
    """
    turned = _last_turned_if(key, cos, sin).expand(*both.shape[:-1], key.shape[-1])
    return torch.cat((both[..., :nope], turned), dim=-1), both[..., nope:].contiguous()


def keys_values_backward(
    dk: Tensor, dv: Tensor, cos: Tensor | None, back: Tensor | None, nope: int
) -> tuple[Tensor, Tensor]:
    """The gradients of `both` and of the key for all heads; `back` is -sin."""
    of_key = dk[..., nope:].sum(-2, keepdim=True, dtype=torch.promote_types(dk.dtype, torch.float32))
    return torch.cat((dk[..., :nope], dv), dim=-1), _last_turned_if(of_key, cos, back).to(dk.dtype)


def _last_turned_if(x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    return x if cos is None or sin is None else last_turned(x, cos, sin)


def opened_forward(y: Tensor, gate: Tensor) -> Tensor:
    """y * sigmoid(gate)."""
    return torch.sigmoid(gate).mul_(y)


def opened_backward(dy: Tensor, y: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of y and gate."""
    open_ = torch.sigmoid(gate)
    return dy * open_, torch.ops.aten.sigmoid_backward(dy * y, open_)


def cross_entropy(logits: Tensor, label: Tensor, share: Tensor, cap: float | None = None) -> tuple[Tensor, Tensor]:
    """The loss of logits [tokens, vocab] in at least fp32, each token's times its share, added up; and their gradient.

    label [tokens, 1]; share [tokens, 1] in the type that this is computed in. With a cap logits are cap tanh(logits /
    cap) first.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if cap is not None:
        bent = torch.tanh(wide / cap)
        wide = bent * cap
    log_sum = wide.logsumexp(-1, keepdim=True)
    # compared, not scattered: a compiler would write all of it in fp32 first
    is_label = torch.arange(logits.shape[-1], device=logits.device) == label
    gradient = ((wide - log_sum).exp() - is_label.to(wide.dtype)) * share
    if cap is not None:
        gradient = gradient * (1 - bent.square())
    return ((log_sum - wide.gather(-1, label)) * share).sum(), gradient.to(logits.dtype)


def cross_entropy_in_place(
    logits: Tensor, label: Tensor, share: Tensor, cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """The same with one copy of the logits in at least fp32, or none where they are: these are overwritten. With a cap
    one more.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if cap is not None:
        bent = wide.div_(cap).tanh_()
        wide = bent * cap
    shifted = wide.sub_(wide.amax(-1, keepdim=True))
    of_label = shifted.gather(-1, label)
    softmax = shifted.exp_()
    summed = softmax.sum(-1, keepdim=True)
    gradient = softmax.mul_(share / summed).scatter_add_(-1, label, -share)
    if cap is not None:
        gradient.mul_(bent.square_().neg_().add_(1))
    return ((summed.log() - of_label) * share).sum(), gradient.to(logits.dtype)


def weighed_forward(y: Tensor, share: Tensor) -> Tensor:
    """y [..., hidden] * sigmoid(share [..., 1])."""
    return y * torch.sigmoid(share)


def weighed_backward(dy: Tensor, y: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of y and share; the second is a sum in at least fp32."""
    wide = torch.promote_types(y.dtype, torch.float32)
    of_share = (dy.to(wide) * y).sum(-1, keepdim=True)
    open_ = torch.sigmoid(share.to(wide))
    return dy * torch.sigmoid(share), (of_share * open_ * (1 - open_)).to(share.dtype)


FP8_LEAST = 1e-30  # the least magnitude that a scale is made for: what 1 stands for is then a normal fp32 number


def fp8_unit(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What 1 stands for where x is in 8 bits, fp32 [1]: its largest magnitude over the format's largest number.

    Not [], which would leave the type of what is divided by it as it is.
    """
    largest: Tensor = torch.linalg.vector_norm(x, torch.inf)  # a norm makes no copy of x's magnitudes
    return largest.to(torch.float32).clamp(min=FP8_LEAST).div(torch.finfo(dtype).max).view(1)


def fp8_rows(x: Tensor, unit: Tensor, dtype: torch.dtype) -> Tensor:
    """x [m, k] in 8 bits, contiguous."""
    return (x / unit).to(dtype, memory_format=torch.contiguous_format)


def fp8_columns(x: Tensor, unit: Tensor, dtype: torch.dtype) -> Tensor:
    """x [k, m] in 8 bits, transposed: [m, k], contiguous."""
    return fp8_rows(x.t(), unit, dtype)


def fp8_both(x: Tensor, unit: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [m, k] in 8 bits as it is, and transposed: [k, m]; both contiguous."""
    return fp8_rows(x, unit, dtype), fp8_columns(x, unit, dtype)


def fp8_rows_at_once(x: Tensor, unit: Tensor, dtype: torch.dtype) -> Tensor:
    """As `fp8_rows` by one kernel, which makes no fp32 copy."""
    return torch.div(x, unit, out=x.new_empty(x.shape, dtype=dtype))


def fp8_columns_at_once(x: Tensor, unit: Tensor, dtype: torch.dtype) -> Tensor:
    """As `fp8_columns` by one kernel."""
    return fp8_rows_at_once(x.t(), unit, dtype)


def fp8_both_by_two(x: Tensor, unit: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As `fp8_both`: the second is copied from the first, which has 8 bits already."""
    along = fp8_rows_at_once(x, unit, dtype)
    return along, along.t().contiguous()


@dataclass(frozen=True, kw_only=True, eq=False)
class Pointwise:
    """These functions, as they are to be called."""

    rms_forward: Callable[..., tuple[Tensor, Tensor]] = rms_forward
    rms_backward: Callable[..., tuple[Tensor, Tensor]] = rms_backward
    swiglu_forward: Callable[[Tensor, Tensor], Tensor] = swiglu_forward
    swiglu_backward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = swiglu_backward
    geglu_forward: Callable[[Tensor, Tensor], Tensor] = geglu_forward
    geglu_backward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = geglu_backward
    halves_forward: Callable[[Tensor], Tensor] = halves_forward
    halves_backward: Callable[[Tensor, Tensor], Tensor] = halves_backward
    geglu_halves_forward: Callable[[Tensor], Tensor] = geglu_halves_forward
    geglu_halves_backward: Callable[[Tensor, Tensor], Tensor] = geglu_halves_backward
    squared_forward: Callable[[Tensor], Tensor] = squared_forward
    squared_backward: Callable[[Tensor, Tensor], Tensor] = squared_backward
    clamped_forward: Callable[[Tensor], Tensor] = clamped_forward
    clamped_backward: Callable[[Tensor, Tensor], Tensor] = clamped_backward
    weighted_sum: Callable[[Tensor, Tensor, Tensor], Tensor] = weighted_sum
    summed_backward: Callable[[Tensor, Tensor, Tensor], Tensor] = summed_backward
    weights_backward: Callable[[Tensor, Tensor, Tensor], Tensor] = weights_backward
    rotation: Callable[[Tensor, Tensor, Tensor], Tensor] = rotation
    neighbours_turned: Callable[[Tensor, Tensor, Tensor], Tensor] = neighbours_turned
    last_turned: Callable[..., Tensor] = last_turned
    gated_norm_forward: Callable[..., tuple[Tensor, Tensor]] = delta_parts.gated_norm_forward
    gated_norm_backward: Callable[..., tuple[Tensor, Tensor, Tensor]] = delta_parts.gated_norm_backward
    opened_norm_forward: Callable[..., tuple[Tensor, Tensor]] = delta_parts.opened_norm_forward
    opened_norm_backward: Callable[..., tuple[Tensor, Tensor, Tensor]] = delta_parts.opened_norm_backward
    norm_of_gated_forward: Callable[..., tuple[Tensor, Tensor]] = mamba_parts.norm_of_gated_forward
    norm_of_gated_backward: Callable[..., tuple[Tensor, Tensor, Tensor]] = mamba_parts.norm_of_gated_backward
    opened_forward: Callable[[Tensor, Tensor], Tensor] = opened_forward
    opened_backward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = opened_backward
    weighed_forward: Callable[[Tensor, Tensor], Tensor] = weighed_forward
    weighed_backward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = weighed_backward
    delta_chunked: Callable[[Tensor, torch.dtype], Tensor] = recurrence_parts.chunked_as
    delta_carried: Callable[[Tensor, Tensor, int], Tensor] = delta_parts.carried
    delta_gates: Callable[..., tuple[Tensor, Tensor]] = delta_parts.gates
    delta_gates_backward: Callable[..., tuple[Tensor, ...]] = delta_parts.gates_backward
    delta_inputs: Callable[..., tuple[Tensor, Tensor, Tensor]] = delta_parts.inputs
    delta_input_backward: Callable[..., tuple[Tensor, Tensor]] = delta_parts.input_backward
    delta_decayed: Callable[..., tuple[Tensor, Tensor]] = delta_parts.decayed
    delta_decayed_backward: Callable[..., tuple[Tensor, ...]] = delta_parts.decayed_backward
    delta_halves: Callable[[Tensor, Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]] = delta_parts.halves
    delta_halves_backward: Callable[..., None] = delta_parts.halves_backward
    delta_paired_backward: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] = delta_parts.paired_backward
    delta_right: Callable[..., tuple[Tensor, Tensor]] = delta_parts.right
    delta_right_backward: Callable[..., tuple[Tensor, ...]] = delta_parts.right_backward
    mamba_steps: Callable[..., tuple[Tensor, Tensor]] = mamba_parts.steps
    mamba_steps_backward: Callable[..., tuple[Tensor, Tensor, Tensor]] = mamba_parts.steps_backward
    mamba_keys: Callable[[Tensor, Tensor, Tensor], Tensor] = mamba_parts.keys
    mamba_keys_backward: Callable[..., tuple[Tensor, Tensor, Tensor]] = mamba_parts.keys_backward
    mamba_values: Callable[..., tuple[Tensor, Tensor]] = mamba_parts.values
    mamba_values_backward: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] = mamba_parts.values_backward
    mamba_decayed: Callable[[Tensor, Tensor, Tensor], Tensor] = mamba_parts.decayed
    mamba_decayed_backward: Callable[..., tuple[Tensor, Tensor, Tensor]] = mamba_parts.decayed_backward
    mamba_output: Callable[..., None] = mamba_parts.output
    mamba_arriving: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]] = mamba_parts.arriving
    mamba_through: Callable[[Tensor, Tensor, int], Tensor] = mamba_parts.through
    keys_values: Callable[..., tuple[Tensor, Tensor]] = keys_values
    keys_values_backward: Callable[..., tuple[Tensor, Tensor]] = keys_values_backward
    cross_entropy: Callable[..., tuple[Tensor, Tensor]] = cross_entropy
    fp8_unit: Callable[[Tensor, torch.dtype], Tensor] = fp8_unit
    fp8_rows: Callable[[Tensor, Tensor, torch.dtype], Tensor] = fp8_rows
    fp8_columns: Callable[[Tensor, Tensor, torch.dtype], Tensor] = fp8_columns
    fp8_both: Callable[[Tensor, Tensor, torch.dtype], tuple[Tensor, Tensor]] = fp8_both

    def gate_forward(self, hidden_act: str) -> Callable[[Tensor, Tensor], Tensor]:
        """What is done with gate and up."""
        return self.swiglu_forward if hidden_act == "silu" else self.geglu_forward

    def gate_backward(self, hidden_act: str) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
        """The gradients of gate and up."""
        return self.swiglu_backward if hidden_act == "silu" else self.geglu_backward


def by_rows(function: Callable[..., Tensor], *, read_anywhere: int = 0) -> Callable[..., Tensor]:
    """The same, for ROWS rows of its tensors at a time: it need not hold all of them in fp32 at once.

    So many of its arguments come first that have no such rows.
    """

    @functools.wraps(function)
    def call(*args: Tensor) -> Tensor:
        anywhere, of_rows = args[:read_anywhere], args[read_anywhere:]
        rows = len(of_rows[0])
        y = function(*anywhere, *(t[:ROWS] for t in of_rows))
        if rows <= ROWS:
            return y
        whole = y.new_empty(rows, *y.shape[1:])
        whole[:ROWS] = y
        for start in range(ROWS, rows, ROWS):
            part = slice(start, start + ROWS)
            whole[part] = function(*anywhere, *(t[part] for t in of_rows))
        return whole

    return call


Gradients = tuple[Tensor, Tensor, Tensor]


def by_tokens(function: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """The same gradients of a gated norm, some tokens at a time: those of all at once take gigabytes in fp32."""

    @functools.wraps(function)
    def call(dy: Tensor, o: Tensor, z: Tensor, weight: Tensor, rstd: Tensor) -> Gradients:
        of_tokens = [t.flatten(0, 1) for t in (dy, o, z, rstd)]
        count = max(1, recurrence.AT_ONCE // o[0, 0].numel())
        if len(of_tokens[0]) <= count:
            return function(dy, o, z, weight, rstd)
        do, dz = (t.new_empty(t.flatten(0, 1).shape) for t in (o, z))
        d_weight = torch.zeros_like(weight, dtype=rstd.dtype)
        for start in range(0, len(do), count):
            part = slice(start, start + count)
            dy_, o_, z_, rstd_ = (t[part] for t in of_tokens)
            do[part], dz[part], more = function(dy_, o_, z_, weight, rstd_)
            d_weight += more
        return do.view_as(o), dz.view_as(z), d_weight

    return call


ROWS = 8192
FUSED = Pointwise()  # what a compiler makes kernels of
PLAIN = replace(
    FUSED,
    halves_backward=by_rows(halves_backward),
    geglu_halves_backward=by_rows(geglu_halves_backward),
    gated_norm_backward=by_tokens(delta_parts.gated_norm_backward),
    opened_norm_backward=by_tokens(delta_parts.opened_norm_backward),
    norm_of_gated_backward=by_tokens(mamba_parts.norm_of_gated_backward),
    clamped_forward=by_rows(clamped_forward),
    clamped_backward=by_rows(clamped_backward),
    weighted_sum=by_rows(weighted_sum, read_anywhere=1),
    weights_backward=by_rows(weights_backward, read_anywhere=1),
    cross_entropy=cross_entropy_in_place,
    fp8_rows=fp8_rows_at_once,
    fp8_columns=fp8_columns_at_once,
    fp8_both=fp8_both_by_two,
)
SHAPES = 4096  # that a process may compile a function for


@functools.cache
def compiled(backend: str = "inductor") -> Pointwise:
    """One kernel of each, by torch.compile, when it is first called with a shape; once for all layers alike.

    Where a rounding between two steps falls away the result is closer to exact, so bits differ from PLAIN's.
    """
    names = [function.name for function in fields(Pointwise)]
    return Pointwise(**{name: _compiled(getattr(FUSED, name), backend) for name in names})


def _compiled(function: Callable[..., Any], backend: str | Callable[..., Any]) -> Callable[..., Any]:
    kernel = torch.compile(function, backend=backend, dynamic=False)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        config = torch._dynamo.config
        if config.recompile_limit < SHAPES:  # since torch 2.12 every thread has its own, and streams have threads
            config.recompile_limit = config.accumulated_recompile_limit = SHAPES
        if args[0].is_cuda and torch.get_num_threads() != 1:  # in autograd's own thread: a kernel is for one number
            torch.set_num_threads(1)
        return kernel(*args)

    return call
