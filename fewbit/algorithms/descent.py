"""The two loops over input features: GPTQ's, and coordinate descent from where it ended.

Both work on the transposed weight [K, N], so that a feature is a contiguous row, and in panels, so that most of the
arithmetic is matrix multiplication.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fewbit.algorithms.grid import Grid

PANEL = 128
"""Features whose errors are carried on together."""


def compensate(weight: Tensor, factor: Tensor, grid: Grid) -> Tensor:
    """GPTQ: rounds feature after feature and moves the error onto the features that are still open.

    Args:
        weight: float32 [K, N], in the order in which features are visited; overwritten.
        factor: upper triangular U with H^-1 = U^T U, float32 [K, K].
        grid: of the transposed weight.

    Returns:
        The element's numbers, float32 [K, N].
    """
    values = torch.empty_like(weight)
    diagonal = factor.diagonal().tolist()
    features = len(weight)
    for first in range(0, features, PANEL):
        last = min(first + PANEL, features)
        errors = torch.empty_like(weight[first:last])
        for index in range(first, last):
            value, meaning = grid.row(index).rounded(weight[index])
            values[index] = value
            error = torch.sub(weight[index], meaning, out=errors[index - first]).div_(diagonal[index])
            if index + 1 < last:
                weight[index + 1 : last].addr_(factor[index, index + 1 : last], error, alpha=-1)
        if last < features:
            weight[last:].addmm_(factor[first:last, last:].T, errors, alpha=-1)
    return values


def descend(target: Tensor, values: Tensor, matrix: Tensor, grid: Grid) -> Tensor:
    """One pass of coordinate descent: each feature gets the best numbers given those of all others.

    Args:
        target: the weight, float32 [K, N].
        values: the element's numbers now, float32 [K, N].
        matrix: H, float32 [K, K].
        grid: of the transposed weight.

    Returns:
        The element's numbers, float32 [K, N]; the output error is not larger than before.
    """
    values = values.clone()
    error = target - grid.meaning(values)
    curvatures = matrix.diagonal().tolist()
    for first in range(0, len(target), PANEL):
        last = min(first + PANEL, len(target))
        pull = matrix[first:last] @ error  # the gradient of each feature, kept current inside the panel
        for index in range(first, last):
            goal = pull[index - first] / curvatures[index]
            goal += target[index]
            goal -= error[index]
            value, meaning = grid.row(index).rounded(goal)
            values[index] = value
            fresh = target[index] - meaning
            change = fresh - error[index]
            error[index] = fresh
            if index + 1 < last:
                pull[index + 1 - first :].addr_(matrix[index + 1 : last, index], change)
    return values
