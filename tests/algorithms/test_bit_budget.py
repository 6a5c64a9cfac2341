"""The knapsack of bit budgets against trying everything."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fewbit.algorithms import bit_budget
from fewbit.algorithms.bit_budget import Choice, Frontier

CHOICES = st.builds(Choice, st.integers(0, 40), st.floats(0, 10))
GROUPS = st.lists(st.lists(CHOICES, min_size=1, max_size=4), min_size=1, max_size=4)


def cost(groups: list[list[Choice]], picked: tuple[int, ...] | list[int]) -> tuple[int, float]:
    chosen = [group[index] for group, index in zip(groups, picked, strict=True)]
    return sum(one.bits for one in chosen), sum(one.loss for one in chosen)


def everything(groups: list[list[Choice]]) -> list[tuple[int, float]]:
    return [cost(groups, picked) for picked in product(*(range(len(group)) for group in groups))]


@given(groups=GROUPS, bits=st.integers(0, 170))
def test_the_least_loss_within_a_budget_is_found(groups: list[list[Choice]], bits: int) -> None:
    within = [loss for spent, loss in everything(groups) if spent <= bits]
    picked = Frontier(groups).within(bits)
    if not within:
        assert picked is None
        return
    assert picked is not None
    spent, loss = cost(groups, picked)
    assert spent <= bits and loss == pytest.approx(min(within))


@given(groups=GROUPS, limit=st.floats(0, 40))
def test_the_fewest_bits_below_a_loss_are_found(groups: list[list[Choice]], limit: float) -> None:
    below = [spent for spent, loss in everything(groups) if loss <= limit]
    picked = Frontier(groups).below(limit)
    if not below:
        assert picked is None or cost(groups, picked)[1] == pytest.approx(limit)  # sums in another order
        return
    assert picked is not None
    spent, loss = cost(groups, picked)
    assert spent <= min(below) and loss <= limit * (1 + 1e-9) + 1e-12


@given(groups=GROUPS, bits=st.integers(0, 170))
def test_coarse_steps_never_spend_too_much(groups: list[list[Choice]], bits: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bit_budget, "LEVELS", 5)
        frontier = Frontier(groups)
        assert len(frontier.lowest) <= 5 + 1 + len(groups)
        picked = frontier.within(bits)
    cheapest = min(spent for spent, _ in everything(groups))
    assert (picked is None) == (bits < cheapest)
    if picked is not None:
        assert cost(groups, picked)[0] <= bits


@given(groups=GROUPS)
def test_the_frontier_falls(groups: list[list[Choice]]) -> None:
    frontier = Frontier(groups)
    points = frontier.points(9, frontier.most)
    assert points[0][0] == frontier.least and all(a[1] >= b[1] for a, b in pairwise(points))
    for bits, loss in points:
        picked = frontier.within(bits)
        assert picked is not None and frontier.loss(picked) == pytest.approx(loss)
