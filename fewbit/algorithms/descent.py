"""The two loops over input features: GPTQ's, and coordinate descent from where it ended.

Both work on the transposed weight [K, N], so that a feature is a contiguous row, and in panels, so that most of the
arithmetic is matrix multiplication.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fewbit.algorithms.grid import Grid
from fewbit.algorithms.panels import PANEL, solve_panel


def compensate(weight: Tensor, factor: Tensor, grid: Grid, drift: Tensor | None = None) -> Tensor:
    """GPTQ: rounds feature after feature and moves the error onto the features that are still open.

    Args:
        weight: float32 [K, N], in the order in which features are visited; overwritten.
        factor: upper triangular U with H^-1 = U^T U, float32 [K, K].
        grid: of the transposed weight.
        drift: strictly upper triangular P, float32 [K, K]: each feature moves those after it by P times its weight
            besides (see `fewbit.algorithms.gptq`).

    Returns:
        The element's numbers, float32 [K, N].
    """
    values = torch.empty_like(weight)
    features = len(weight)
    for first in range(0, features, PANEL):
        last = min(first + PANEL, features)
        inside = slice(first, last)
        own = None if drift is None else drift[inside, inside]
        part = grid.rows(first, last)
        values[inside], errors = solve_panel(weight[inside], factor[inside, inside], part, own)
        if last == features:
            break
        if drift is not None:
            # What each weight was when its turn came: its meaning and the error that was left.
            seen = part.meaning(values[inside]) + errors * factor.diagonal()[inside, None]
            weight[last:].addmm_(drift[inside, last:].T, seen)
        weight[last:].addmm_(factor[inside, last:].T, errors, alpha=-1)
    return values


def descend(target: Tensor, values: Tensor, matrix: Tensor, grid: Grid) -> Tensor:
    """One pass of coordinate descent: each feature gets the best numbers given those of all others.

    With d the error of the weight, feature i goes to the numbers nearest to m_i + (H d)_i / H_ii, m_i being what it is.

    Args:
        target: the weight, float32 [K, N].
        values: the element's numbers now, float32 [K, N].
        matrix: H, float32 [K, K].
        grid: of the transposed weight.

    Returns:
        The element's numbers, float32 [K, N]; the output error is not larger than before.
    """
    values = values.clone()
    held = grid.meaning(values)
    error = target - held
    curvatures = matrix.diagonal()
    # A change c_i of feature i moves the goal of j by -H_ij / H_jj c_i, which is what the panel carries on.
    factor = (-matrix / curvatures).fill_diagonal_(1)
    for first in range(0, len(target), PANEL):
        last = min(first + PANEL, len(target))
        inside = slice(first, last)
        goal = torch.addmm(held[inside], matrix[inside] / curvatures[inside, None], error)
        values[inside], changes = solve_panel(
            goal, factor[inside, inside].triu(), grid.rows(first, last), held=held[inside]
        )
        error[inside] += changes
    return values
