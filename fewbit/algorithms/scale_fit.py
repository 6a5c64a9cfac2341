"""Least-squares fit of the scales of each row to its codes, all groups of the row at once, on the whole Gram matrix."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fewbit.algorithms.curvature import output_loss
from fewbit.algorithms.grid import Scales
from fewbit.numerics import decode, encode

RIDGE = 1e-6
"""Added to the diagonal of each row's equations as a fraction of their mean: a group of zeros has none of its own."""

MOST_GROUPS = 256
"""Groups in a row up to which the fit is made; its equations have their square many coefficients."""


def fit_scales(weight: Tensor, values: Tensor, scales: Scales, matrix: Tensor) -> Scales:
    """Scales that minimize the output error for the numbers as they are; rows it does not help keep theirs.

    With q the numbers less their zero points, row n's error is |w - sum_g s_g q_g|^2 in the norm of H, so its scales
    solve the equations (q_g^T H_gh q_h) s = q_g^T H w.

    Args:
        weight: float32 [N, K].
        values: the element's numbers, float32 [N, K].
        scales: as they are now.
        matrix: H, float32 [K, K].

    Returns:
        The fitted scales in their stored element; `scales` itself where it has fewer than 16 bits (fitting and rounding
        to it would lose more than it gains), or the granularity is not one of neighbours within a row.
    """
    key = scales.key
    height, width = key.granularity.extents(tuple(weight.shape))
    groups = scales.scale.shape[1]
    spread = scales.order is not None or height != 1
    if key.scale.element.bits < 16 or spread or groups > MOST_GROUPS or not weight.numel():
        return scales
    steps = values
    if scales.zero_point is not None:
        zero = decode(scales.zero_point, key.element).repeat_interleave(width, dim=1)
        steps = values - zero[:, : values.shape[1]]
    coefficients, goals = _equations(weight, steps, matrix, groups, width)
    mean = coefficients.diagonal(dim1=1, dim2=2).mean(dim=1)
    coefficients.diagonal(dim1=1, dim2=2).add_((RIDGE * mean).clamp(min=torch.finfo(torch.float32).tiny)[:, None])
    fitted, failed = torch.linalg.solve_ex(coefficients, goals)
    stored = key.scale.element
    tiny = torch.finfo(scales.scale.dtype).tiny
    fine = fitted.isfinite().all(dim=1) & (fitted.abs() > tiny).all(dim=1) & (failed == 0)
    fresh = replace(scales, scale=torch.where(fine[:, None], encode(fitted, stored), scales.scale))
    shape = tuple(weight.shape)
    before = output_loss(weight - scales.grid(shape).meaning(values), matrix)
    after = output_loss(weight - fresh.grid(shape).meaning(values), matrix)
    return replace(fresh, scale=torch.where((after < before)[:, None], fresh.scale, scales.scale))


def _equations(weight: Tensor, steps: Tensor, matrix: Tensor, groups: int, width: int) -> tuple[Tensor, Tensor]:
    """Coefficients [N, G, G] and right-hand sides [N, G]."""
    rows, features = weight.shape
    pad = groups * width - features

    def per_group(numbers: Tensor) -> Tensor:
        return F.pad(numbers, (0, pad)).view(rows, groups, width).sum(dim=2)

    coefficients = torch.empty(rows, groups, groups, device=weight.device)
    for index in range(groups):
        inside = slice(index * width, min((index + 1) * width, features))
        coefficients[:, index] = per_group((steps[:, inside] @ matrix[inside]).mul_(steps))
    return coefficients, per_group((weight @ matrix).mul_(steps))
