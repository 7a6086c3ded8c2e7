"""Plain PyTorch training of the same model: what every schedule must agree with.

Same layers, but one autograd graph over the whole model, torch's own cross-entropy, clipping and optimizer,
and no schedule, buffers or streams. In fp32 on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatrain.adam import Adam
from megatrain.data import TokenSource, inputs_and_targets, shares
from megatrain.layer_parts import rms_norm
from megatrain.nf4 import LEVELS
from megatrain.template import templates, views
from schedules import trained
from schedules.model import ModelSpec
from schedules.parameters import is_matrix
from schedules.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What a training run yields. Flat tensors, fp32, by layer as in the schedule's slabs."""

    losses: list[float]  # per step, the mean over its tokens
    gradients: list[dict[int, Tensor]]  # per step, those that the optimizer applies: clipped
    norms: list[float]  # per step, of these before they are clipped, if that is done
    parameters: dict[int, Tensor]  # after the last step


def in_nf4(initial: Callable[[int], Tensor], model: ModelSpec) -> Callable[[int], Tensor]:
    """These parameters, of blocks' matrices the nearest that NF4 has: by the distance to each of 16 multiples."""

    def nearest(name: str, values: Tensor) -> Tensor:
        if not is_matrix(name, tuple(values.shape)) or name in ("mlp.gate.weight", "mlp.router.weight"):
            return values.flatten()
        found = []
        for some in values.flatten().split(64):
            there = torch.tensor(LEVELS) * some.abs().max()
            found.append(there[(some[:, None] - there).abs().argmin(1)])
        return torch.cat(found)

    def parameters(i: int) -> Tensor:
        shapes = model.parameter_shapes(i)
        if not model.is_block(i):
            return initial(i)
        return torch.cat([nearest(name, values) for name, values in views(initial(i), shapes).items()])

    return parameters


def train(
    model: ModelSpec,
    workload: Workload,
    data: TokenSource,
    hyper: Adam,
    *,
    initial: Callable[[int], Tensor],
    adapters: Callable[[int], Tensor] | None = None,
    steps: int,
    staleness: int = 0,
    fresh: Collection[int] = (),
) -> Reference:
    """Train from the same start on the same data as a Trainer, or evaluate.

    With staleness 1 each step computes with the weights that its predecessor did not yet have updated, but for the
    layers that are `fresh`.
    Raises ValueError unless the precision is fp32, or for another staleness, or where adapters are trained and none
    are given.
    """
    if workload.precision != "fp32":
        raise ValueError(f"the reference trains in fp32, not {workload.precision}")
    if staleness not in (0, 1):
        raise ValueError(f"the reference is 0 or 1 updates behind, not {staleness}")
    base = {i: _parameters(initial(i), model.parameter_shapes(i)) for i in model.layers}
    chosen = trained.layers(model, workload)
    if workload.lora_rank is not None:
        if adapters is None:
            raise ValueError("adapters are trained: say how they begin")
        beside = {i: _parameters(adapters(i), trained.shapes(model, workload, i)) for i in model.blocks}
        updated = {i: beside[i] for i in chosen}
        layers = {i: base[i] | beside.get(i, {}) for i in model.layers}
    else:
        updated = {i: base[i] for i in chosen}
        behind = {i: _parameters(initial(i), model.parameter_shapes(i)) for i in model.layers if i not in fresh}
        layers = base | (behind if staleness else {})
    for i, parameters in base.items():
        for parameter in parameters.values():
            parameter.requires_grad_(i in chosen and workload.lora_rank is None)
    own = templates(model, seq_len=workload.seq_len, device=torch.device("cpu"), dtype=torch.float32)
    pairs = [(updated[i][name], layers[i][name]) for i in chosen for name in updated[i]]
    named = [(i, name, p) for i in chosen for name, p in updated[i].items()]
    matrices = [p for _, name, p in named if is_matrix(name, tuple(p.shape))]
    others = [p for _, name, p in named if not is_matrix(name, tuple(p.shape))]
    by_muon = [p for i, name, p in named if is_matrix(name, tuple(p.shape)) and model.is_block(i)]
    by_muon = by_muon if workload.optimizer == "muon" else []
    by_adamw = [p for p in matrices if not any(p is other for other in by_muon)]
    optimizers: list[torch.optim.Optimizer] = []
    if chosen:
        adamw = torch.optim.AdamW(
            [
                {"params": by_adamw, "weight_decay": hyper.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=hyper.lr,
            betas=hyper.betas,
            eps=hyper.eps,
            fused=True,
        )
        optimizers.append(adamw)
    if by_muon:
        muon = torch.optim.Muon(
            by_muon, lr=hyper.lr, weight_decay=hyper.weight_decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        )
        optimizers.append(muon)

    def hidden(tokens: Tensor) -> Tensor:
        x = own.embed.forward(layers[model.embed]["embed_tokens.weight"], tokens)
        for i in model.blocks:
            x = own.blocks[model.layer_kind(i)].forward(layers[i], x)
        return x

    def loss_of(inputs: Tensor, targets: Tensor, counts: Tensor) -> Tensor:
        embed, head = layers[model.embed], layers[model.head]
        if data.document_end is None:
            x = hidden(inputs)
        else:  # each document by itself
            alone = [hidden(document[None]) for row in inputs for document in _documents(row, data.document_end)]
            x = torch.cat(alone, dim=1).view(*inputs.shape, -1)
        table = embed["embed_tokens.weight"] if model.tie_word_embeddings else head["lm_head.weight"]
        normed = rms_norm(x, head["norm.weight"], model.rms_norm_eps, offset=model.norm_offset)
        logits = normed @ table.t() / model.logits_scaling
        if (cap := model.final_logit_softcapping) is not None:
            logits = cap * torch.tanh(logits / cap)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none") @ counts.flatten()

    losses, gradients, norms = [], [], list[float]()
    for step in range(steps):
        inputs, targets = inputs_and_targets(data.batch(step))
        counts = shares(data, step, workload).float()
        parts = []
        for m in workload.microbatches:
            loss = loss_of(inputs[m], targets[m], counts[m])
            if optimizers:
                loss.backward()  # type: ignore[no-untyped-call]
            parts.append(loss.item())
        losses.append(sum(parts))
        if not optimizers:
            continue
        if staleness:  # the gradient is for the parameters of now, the next step computes with those
            for p, used in pairs:
                if p is not used:
                    p.grad, used.grad = used.grad, None
                    used.data.copy_(p.data)
        if workload.grad_clip is not None:
            norms.append(float(torch.nn.utils.clip_grad_norm_([*matrices, *others], workload.grad_clip)))

        gradients.append({i: _flat({n: _grad(p) for n, p in params.items()}) for i, params in updated.items()})
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    final = {i: _flat({n: p.detach() for n, p in params.items()}) for i, params in updated.items()}
    return Reference(losses=losses, gradients=gradients, norms=norms, parameters=final)


def _documents(row: Tensor, end: int) -> list[Tensor]:
    """A sequence [seq] cut after each token that ends a document."""
    found: list[list[int]] = [[]]
    for token in row.tolist():
        found[-1].append(token)
        if token == end:
            found.append([])
    return [torch.tensor(document) for document in found if document]


def _parameters(flat: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    return {name: part.clone().requires_grad_() for name, part in views(flat, shapes).items()}


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _flat(parts: dict[str, Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in parts.values()]).clone()
