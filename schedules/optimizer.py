"""The optimizers: what each keeps of a layer, and what its step multiplies.

AdamW (Loshchilov and Hutter, arXiv:1711.05101) keeps two moments of every parameter and passes over them once. Muon
(Jordan et al., kellerjordan.github.io/posts/muon, 2024) keeps a momentum of every matrix of a block, and orthogonalises
it by products of matrices: half the moments, and work for a GPU. What is no matrix of a block is AdamW's there too:
norms and biases, the embedding and the head.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from schedules.model import FP32, ModelSpec
from schedules.parameters import is_matrix
from schedules.workload import Workload

ITERATIONS = 5  # of Newton and Schulz, with Jordan's coefficients
GROUP = 1 << 26  # elements: no more of a layer's experts are orthogonalised together
PASS = 1 << 22  # elements that a pass over a matrix works on at a time on a GPU
COPIES = 2  # of these in fp32, to work with; and while a pass lasts, ROUNDING, as large
ROUNDING = 4


@dataclass(frozen=True, slots=True)
class Matrices:
    """Of one parameter, `count` matrices of rows x columns, one after another in the layer's slab from `start` on."""

    start: int
    count: int
    rows: int
    columns: int

    @property
    def size(self) -> int:
        """Elements of all of them."""
        return self.count * self.rows * self.columns

    @property
    def stop(self) -> int:
        return self.start + self.size

    @property
    def together(self) -> int:
        """How many are orthogonalised at once."""
        return max(1, min(self.count, GROUP // (self.rows * self.columns)))


def matrices(model: ModelSpec, workload: Workload, i: int) -> tuple[Matrices, ...]:
    """What Muon's step on layer i orthogonalises, in slab order; nothing with AdamW, nothing of embedding and head."""
    if not workload.multiplies_to_update or not model.is_block(i):
        return ()
    return _matrices(tuple(model.parameter_shapes(i).items()))


@functools.lru_cache(maxsize=16)
def _matrices(shapes: tuple[tuple[str, tuple[int, ...]], ...]) -> tuple[Matrices, ...]:
    found, start = [], 0
    for name, shape in shapes:
        if is_matrix(name, shape):
            found.append(Matrices(start, math.prod(shape[:-2]), *shape[-2:]))
        start += math.prod(shape)
    return tuple(found)


def state_bytes(model: ModelSpec, workload: Workload, i: int, params: int) -> int:
    """Bytes of the optimizer state of `params` of layer i's trained parameters; with Muon, all of a block's.

    Of a matrix Muon keeps one moment in place of two, and what the precision keeps of a master.
    """
    spared = sum(of.size for of in matrices(model, workload, i)) * workload.bytes.moment
    return workload.bytes.state_bytes(params) - spared


def step_flops(model: ModelSpec, workload: Workload, i: int) -> int:
    """FLOPs of the matrix products in the optimizer's step on layer i, a multiply-add being 2.

    An iteration on X, r x c with r <= c, takes XX^T, its square, and that times X.
    """
    per_matrix = ((min(of.rows, of.columns), max(of.rows, of.columns), of.count) for of in matrices(model, workload, i))
    return ITERATIONS * sum(count * (4 * r * r * c + 2 * r**3) for r, c, count in per_matrix)


def step_bytes(model: ModelSpec, workload: Workload, i: int) -> int:
    """Bytes that passes over what is orthogonalised of layer i move, beside the slabs.

    In bf16: it is written, read for its norm, read and written to be scaled by it, and read at last; of a matrix with
    more rows than columns it is transposed there and back. What products move is in their rate.
    """
    return sum(of.size * 2 * (5 + 4 * (of.rows > of.columns)) for of in matrices(model, workload, i))


def step_workspace(model: ModelSpec, workload: Workload, i: int) -> int:
    """Device bytes that the optimizer's step on layer i takes beside the slabs; none with AdamW.

    For one matrix, or some experts', at a time: in bf16 these twice, and three products of their smaller side, or
    copies in a pass.
    """
    found = matrices(model, workload, i)
    most = max((of.together * of.rows * of.columns for of in found), default=0)
    products = max((of.together * min(of.rows, of.columns) ** 2 for of in found), default=0)
    of_pass = FP32 * min(most, PASS)
    return 2 * 2 * most + COPIES * of_pass + max(3 * 2 * products, ROUNDING * of_pass)
