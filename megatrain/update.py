"""The optimizer's step on a layer, by whichever optimizer its workload names."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from megatrain import adam, muon
from megatrain.adam import Adam
from schedules import trained
from schedules.optimizer import matrices
from schedules.schedule import Schedule

# weights, gradient and state as in adam.step, settings, step from 0, and what multiplies the gradient: fp32 [] or None
Update = Callable[[Tensor, Tensor, Tensor, Adam, int, Tensor | None], None]


def update(schedule: Schedule, i: int, of: slice) -> Update:
    """The step on these of layer i's trained parameters, in place; all of them where matrices are updated as wholes."""
    model, workload = schedule.model, schedule.workload
    precision, in_matrices = workload.precision, matrices(model, workload, i)
    decay = adam.within(adam.decayed(trained.shapes(model, workload, i)), of)

    def by_muon(weights: Tensor, grad: Tensor, state: Tensor, hyper: Adam, step: int, factor: Tensor | None) -> None:
        muon.step(
            weights,
            grad,
            state,
            hyper,
            step + 1,
            matrices=in_matrices,
            precision=precision,
            grad_scale=factor,
            layer=i,
        )

    def by_adam(weights: Tensor, grad: Tensor, state: Tensor, hyper: Adam, step: int, factor: Tensor | None) -> None:
        adam.step(
            weights,
            grad,
            state,
            hyper,
            step + 1,
            precision=precision,
            grad_scale=factor,
            decay=decay,
            layer=i,
            start=of.start,
        )

    return by_muon if in_matrices else by_adam


def clipping(squares: Tensor, limit: float) -> Tensor:
    """The factor that clips gradients of which these are the summed squares, fp64 [], to a norm of `limit`: fp32 [].

    The arithmetic of torch.nn.utils.clip_grad_norm_. No thread waits for a number.
    """
    return (limit / (squares.sqrt() + 1e-6)).clamp(max=1.0).float()
