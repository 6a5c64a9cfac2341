"""Orthogonal matrices for rotations: every order, and Hadamard's wherever one is known."""

from __future__ import annotations

import pytest
import torch

from fewbit.algorithms.hadamard import paley, random_orthogonal


def matrix(order: int, seed: int = 0) -> torch.Tensor:
    made = random_orthogonal(order, torch.Generator().manual_seed(seed))
    return made.apply(torch.eye(order, dtype=torch.float64))


@pytest.mark.parametrize("order", [4, 8, 12, 20, 24, 28, 36, 44, 60, 76, 180])
def test_paley_makes_hadamard_matrices(order: int) -> None:
    found = paley(order)
    assert set(found.unique().tolist()) == {-1.0, 1.0}
    assert torch.equal(found @ found.T, order * torch.eye(order, dtype=torch.float64))


@pytest.mark.parametrize("order", [6, 16, 92])
def test_orders_that_paley_has_no_matrix_for_are_refused(order: int) -> None:
    with pytest.raises(ValueError, match=str(order)):
        paley(order)


@pytest.mark.parametrize("order", [1, 2, 3, 16, 30, 36, 64, 80, 96, 128, 192, 576, 896])
def test_every_order_gets_an_orthogonal_matrix(order: int) -> None:
    found = matrix(order)
    identity = torch.eye(order, dtype=torch.float64)
    torch.testing.assert_close(found @ found.T, identity, rtol=0, atol=1e-12)
    even = order not in (3, 30)
    assert bool(((found.abs() * order**0.5 - 1).abs() < 1e-9).all()) == even


def test_the_seed_decides() -> None:
    assert torch.equal(matrix(96, 1), matrix(96, 1))
    assert not torch.equal(matrix(96, 1), matrix(96, 2))
    assert torch.equal(matrix(30, 1), matrix(30, 1))


def test_rows_of_any_shape_are_rotated() -> None:
    made = random_orthogonal(96, torch.Generator().manual_seed(0))
    x = torch.randn(3, 5, 96)
    torch.testing.assert_close(made.apply(x.double()), x.double() @ matrix(96), rtol=0, atol=1e-12)
    assert torch.equal(made.apply(x), made.apply(x.double()).float())
    assert torch.equal(made.apply(x.bfloat16()), made.apply(x.bfloat16().double()).float())


def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    made = random_orthogonal(96, torch.Generator().manual_seed(0))
    x = torch.randn(37, 96)
    whole = made.apply(x)
    monkeypatch.setattr("fewbit.algorithms.hadamard.CHUNK_NUMBERS", 500)
    torch.testing.assert_close(made.apply(x), whole, rtol=0, atol=1e-6)
