"""One panel of a loop over input features: each is rounded, and what rounding did is carried on to those after it.

On CPUs a panel is a call of the compiled library, on GPUs one launch of a Triton program; without them it is the loop
in torch that says what they compute.
"""

from __future__ import annotations

import importlib.util
from functools import cache

import torch
from torch import Tensor

from fewbit.algorithms import native
from fewbit.algorithms.grid import Grid

PANEL = 128
"""Features whose errors are carried on together."""


def solve_panel(
    weight: Tensor, factor: Tensor, grid: Grid, drift: Tensor | None = None, held: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Rounds the features of a panel one after the other.

    With w_i the weight of feature i as it is when its turn comes and m_i what it becomes, the error is
    e_i = (w_i - m_i) / F_ii, and w_j -= F_ij e_i - P_ij w_i for every feature j after it.

    Args:
        weight: float32 [P, N].
        factor: F, upper triangular, float32 [P, P].
        grid: of the transposed weight, [P, N].
        drift: P, strictly upper triangular, float32 [P, P]; None for zeros.
        held: float32 [P, N] in the place of w_i in the error.

    Returns:
        The element's numbers and the errors, float32 [P, N].
    """
    if weight.is_cuda and _has_triton():
        from fewbit.algorithms.programs.panel import solve

        return solve(weight, factor, grid.scale, grid.zero, grid.element, drift, held)
    if native.takes(weight, factor, grid.scale, grid.zero, drift, held):
        return native.panel(weight, factor, grid.scale, grid.zero, grid.element, drift, held)
    return in_torch(weight, factor, grid, drift, held)


def in_torch(
    weight: Tensor, factor: Tensor, grid: Grid, drift: Tensor | None, held: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The same in plain torch."""
    weight = weight.clone()
    values, errors = torch.empty_like(weight), torch.empty_like(weight)
    diagonal = factor.diagonal().tolist()
    for index in range(len(weight)):
        values[index], meaning = grid.row(index).rounded(weight[index])
        source = weight if held is None else held
        error = torch.sub(source[index], meaning, out=errors[index]).div_(diagonal[index])
        if index + 1 == len(weight):
            break
        rest = weight[index + 1 :]
        if drift is not None:
            rest.addr_(drift[index, index + 1 :], weight[index])
        rest.addr_(factor[index, index + 1 :], error, alpha=-1)
    return values, errors


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
