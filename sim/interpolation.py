"""What was measured of an op, between the shapes that were measured: a law of few terms, bent to meet every point.

An op's time as a function of its micro-batch b and sequence s is taken as

  t = (a0 + a1 * tokens + a2 * tokens * s) * r(b, s),   tokens = b * s,   a0, a1, a2 >= 0

a0 is what an op takes whatever its size (launch, weights read once), a1 what each token takes (products, pointwise
kernels), a2 attention. The terms are fitted by non-negative least squares of relative errors. The factor r is what
the points deviate from the law, averaged by inverse squared distance in (log tokens, log s): it is exact at every
point and changes nothing where the law holds.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Mapping

import numpy as np

Shape = tuple[int, int]  # micro-batch, sequence
TERMS = 3


def between(points: Mapping[Shape, float], shape: Shape) -> float | None:
    """The value of an op at a shape, in the unit of `points`; None where it would have to be extrapolated.

    A shape is between the points if neither its tokens nor its sequence lie beyond theirs. It takes as many points
    as the law has terms, unless the shape is one of them.
    """
    if shape in points:
        return points[shape]
    from scipy.optimize import nnls

    if len(points) < TERMS or not _inside(points, shape):
        return None
    shapes = list(points)
    times = np.array([points[known] for known in shapes], dtype=float)
    rows = np.array([_terms(known) for known in shapes])
    scale = rows.max(axis=0)  # terms of like size, or the solver loses digits
    factors, _ = nnls(rows / scale / times[:, None], np.ones(len(times)))
    law = rows / scale @ factors
    place = _place(shape)
    weights = np.array([1.0 / math.dist(place, _place(known)) ** 2 for known in shapes])
    bend = float(np.exp(weights @ np.log(times / law) / weights.sum()))
    return float(np.array(_terms(shape)) / scale @ factors) * bend


def largest_of_lines(points: Mapping[Shape, float], shape: Shape) -> float | None:
    """What is the largest of several lines in the tokens, such as an op's workspace, whose peak is now at one place and
    now at another; None where it would have to be extrapolated.

    Between two points it lies on or above the lines through the two points before them and the two after them, and on
    or below the line through both. Where one bend at most lies between, it is the larger of the two lower ones.
    """
    by_tokens: dict[int, float] = {}
    for (batch, seq), value in points.items():
        by_tokens[batch * seq] = max(value, by_tokens.get(batch * seq, 0.0))
    tokens, known = shape[0] * shape[1], sorted(by_tokens)
    if tokens in by_tokens:
        return by_tokens[tokens]
    if not known or not known[0] < tokens < known[-1]:
        return None

    def line(first: int, second: int) -> float:
        slope = (by_tokens[second] - by_tokens[first]) / (second - first)
        return by_tokens[first] + slope * (tokens - first)

    after = bisect(known, tokens)
    above = line(known[after - 1], known[after])
    below = [line(*known[at : at + 2]) for at in (after - 2, after) if at >= 0 and at + 1 < len(known)]
    return min(above, max(below)) if len(below) == 2 else above


def _terms(shape: Shape) -> tuple[float, float, float]:
    tokens = float(shape[0] * shape[1])
    return 1.0, tokens, tokens * shape[1]


def _place(shape: Shape) -> tuple[float, float]:
    return math.log(shape[0] * shape[1]), math.log(shape[1])


def _inside(points: Mapping[Shape, float], shape: Shape) -> bool:
    tokens, sequences = [b * s for b, s in points], [s for _, s in points]
    return min(tokens) <= shape[0] * shape[1] <= max(tokens) and min(sequences) <= shape[1] <= max(sequences)
