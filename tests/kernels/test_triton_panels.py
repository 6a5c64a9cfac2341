"""The program that solves a panel of features against the loop in torch, on a GPU or in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fewbit.algorithms.grid import Grid
from fewbit.algorithms.panels import in_torch
from fewbit.spec.element import Element
from tests.kernels.triton_here import DEVICE, needs_triton

pytestmark = needs_triton
FEATURES = 13


def by_columns(matrix: Tensor) -> Tensor:
    """The same numbers, its columns contiguous, as a GPU's triangular solve returns them."""
    return matrix.t().contiguous().t()


@pytest.mark.parametrize("element", ["int4", "e2m1", "e4m3"])
@pytest.mark.parametrize("extra", ["", "zero", "drift", "held"])
@pytest.mark.parametrize("order", [Tensor.contiguous, by_columns])
def test_a_panel_is_the_loop_in_torch(element: str, extra: str, order: Callable[[Tensor], Tensor]) -> None:
    from fewbit.algorithms.programs.panel import solve

    draw = torch.Generator().manual_seed(0)
    rows = 21
    numbers = torch.randn(FEATURES, rows, generator=draw)
    square = torch.randn(2 * FEATURES, 2 * FEATURES, generator=draw).mul_(0.1).triu(1)
    zero = torch.randint(-1, 2, (FEATURES, rows), generator=draw).float() if extra == "zero" else None
    scale = torch.rand(FEATURES, rows, generator=draw) + 0.1
    whole = order(square + torch.eye(2 * FEATURES) * 0.7)
    factor = whole[FEATURES:, FEATURES:]
    drift = order(square)[:FEATURES, :FEATURES].triu(1) if extra == "drift" else None
    held = numbers.roll(1, 0) if extra == "held" else None
    values, errors = in_torch(numbers, factor, Grid(Element.parse(element), scale, zero), drift, held)
    moved = {name: tensor.to(DEVICE) for name, tensor in (("drift", drift), ("held", held)) if tensor is not None}
    found = solve(
        numbers.to(DEVICE), factor.to(DEVICE), scale.to(DEVICE), None if zero is None else zero.to(DEVICE),
        Element.parse(element), moved.get("drift"), moved.get("held"),
    )  # fmt: skip
    assert torch.equal(found[0].cpu(), values)
    torch.testing.assert_close(found[1].cpu(), errors, atol=1e-5, rtol=1e-5)
