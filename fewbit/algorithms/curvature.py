"""What the Gram matrix of a layer's input says about rounding: damped, factored, with a chain of fallbacks.

The error of a layer's output for a change D of its weight [N, K] is trace(D H D^T), H being the mean outer product of
the input (Frantar et al., GPTQ, arXiv 2210.17323). GPTQ needs the upper triangular U with H^-1 = U^T U.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST_DAMPING = 0.5
SHRINKAGES = (0.1, 0.3, 0.6)


@dataclass(frozen=True)
class Curvature:
    """A damped Gram matrix and its factor.

    Attributes:
        matrix: H, float32 [K, K], features that were never active having the mean of the diagonal there.
        factor: upper triangular U with H^-1 = U^T U, float32 [K, K]; None where no factor could be computed.
        note: how H had to be changed beyond the damping asked for; empty where it was not.
    """

    matrix: Tensor
    factor: Tensor | None
    note: str = ""


def curvature(gram: Tensor, damping: float) -> Curvature:
    """Damps and factors a Gram matrix.

    Tried in turn: the damping asked for, doubled up to 0.5, then in float64, then with what lies off the diagonal
    shrunk.

    Args:
        gram: float32 [K, K], symmetric.
        damping: what is added to the diagonal, as a fraction of its mean.
    """
    diagonal = gram.diagonal()
    mean = diagonal.mean()
    if not bool(gram.isfinite().all() & (mean > 0)):
        return Curvature(torch.eye(len(gram), device=gram.device), None, "the Gram matrix is not finite or zero")
    gram = gram + torch.diag(torch.where(diagonal > 0, 0.0, mean))
    tried = damping
    while True:
        matrix = _damped(gram, tried * mean)
        factor = _factor(matrix)
        if factor is not None:
            return Curvature(matrix, factor, "" if tried == damping else f"damping {tried:g}")
        if tried >= LARGEST_DAMPING:
            break
        tried = min(2 * tried, LARGEST_DAMPING)
    factor = _factor(matrix.double())
    if factor is not None:
        return Curvature(matrix, factor.float(), f"damping {tried:g} in float64")
    for shrinkage in SHRINKAGES:
        shrunk = matrix * (1 - shrinkage) + torch.diag(matrix.diagonal() * shrinkage)
        factor = _factor(shrunk.double())
        if factor is not None:
            return Curvature(shrunk, factor.float(), f"damping {tried:g}, off-diagonal shrunk by {shrinkage:g}")
    return Curvature(matrix, None, "the Gram matrix could not be factored")


def _damped(gram: Tensor, amount: Tensor) -> Tensor:
    matrix = gram.clone()
    matrix.diagonal().add_(amount)
    return matrix


def _factor(matrix: Tensor) -> Tensor | None:
    """U with matrix^-1 = U^T U, or None where the matrix is not positive definite.

    One Cholesky factorization of the matrix with its indices reversed gives an upper triangular R with matrix = R R^T,
    and U = R^-1: better conditioned than factoring the inverse.
    """
    lower, failed = torch.linalg.cholesky_ex(matrix.flip(0, 1))
    upper = lower.flip(0, 1)
    factor = torch.linalg.solve_triangular(
        upper, torch.eye(len(upper), dtype=upper.dtype, device=upper.device), upper=True
    )
    return factor if bool((failed == 0) & factor.isfinite().all()) else None


def output_loss(difference: Tensor, gram: Tensor) -> Tensor:
    """Mean squared error of each output for a change of the weight: diag(D H D^T), float32 [N]."""
    return ((difference @ gram) * difference).sum(dim=1)
