"""Bit budgets: which of several choices each group of layers gets, so that the loss is least and the bits suffice.

A multiple-choice knapsack, solved by dynamic programming over bits in steps of their common divisor. Where that would
be more than `LEVELS` steps, costs are rounded up to larger ones, and what is left over goes to the upgrades that gain
most: the bits asked for are never exceeded. One pass gives the answer for every budget, which is the frontier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

LEVELS = 1 << 17


@dataclass(frozen=True)
class Choice:
    """One thing that may be chosen for a group: what it costs in bits, and the loss it brings."""

    bits: int
    loss: float


class Frontier:
    """The best choices for every budget.

    Args:
        groups: the choices of each group; at least one each.

    Attributes:
        least, most: bits of the cheapest and of the dearest choices together.
    """

    def __init__(self, groups: Sequence[Sequence[Choice]]) -> None:
        self.groups = [tuple(choices) for choices in groups]
        bases = [min(choice.bits for choice in choices) for choices in self.groups]
        self.least, self.most = sum(bases), sum(max(choice.bits for choice in choices) for choices in self.groups)
        extra = [[choice.bits - base for choice in c] for c, base in zip(self.groups, bases, strict=True)]
        span = self.most - self.least
        self.unit = max(1, gcd(*(bits for costs in extra for bits in costs)), -(-span // LEVELS))
        self.costs = [[-(-bits // self.unit) for bits in costs] for costs in extra]
        self.lowest, self.picks = self._solve(sum(max(costs, default=0) for costs in self.costs) + 1)

    def _solve(self, levels: int) -> tuple[Tensor, list[Tensor]]:
        """Least loss for each number of steps, float64 [levels], and each group's choice there, [levels] each."""
        lowest, picks = torch.zeros(levels, dtype=torch.float64), []
        for choices, costs in zip(self.groups, self.costs, strict=True):
            best = torch.full_like(lowest, torch.inf)
            pick = torch.zeros(levels, dtype=torch.uint8)
            for index, (choice, cost) in enumerate(zip(choices, costs, strict=True)):
                reached = lowest[: levels - cost] + choice.loss
                better = reached < best[cost:]
                best[cost:][better] = reached[better]
                pick[cost:][better] = index
            lowest = best
            picks.append(pick)
        return lowest, picks

    def within(self, bits: int) -> list[int] | None:
        """The index of each group's choice, at most `bits` in all; None where even the cheapest cost more."""
        if bits < self.least:
            return None
        level = min((bits - self.least) // self.unit, len(self.lowest) - 1)
        picked = []
        for pick, costs in zip(reversed(self.picks), reversed(self.costs), strict=True):
            index = int(pick[level])
            picked.append(index)
            level -= costs[index]
        return self._filled(picked[::-1], bits)

    def below(self, loss: float) -> list[int] | None:
        """The index of each group's choice, the fewest bits whose loss is at most `loss`; None where there are none."""
        reached = torch.nonzero(self.lowest <= loss)
        return self.within(self.least + int(reached[0]) * self.unit) if len(reached) else None

    def points(self, count: int, until: int) -> list[tuple[int, float]]:
        """(bits, least loss) at up to `count` budgets from the least to `until`, evenly apart."""
        last = min(max(0, until - self.least) // self.unit, len(self.lowest) - 1)
        levels = torch.linspace(0, last, count, dtype=torch.float64).long().unique().tolist()
        return [(self.least + level * self.unit, float(self.lowest[level])) for level in levels]

    def bits(self, picked: Sequence[int]) -> int:
        """What choices cost together."""
        return sum(choices[index].bits for choices, index in zip(self.groups, picked, strict=True))

    def loss(self, picked: Sequence[int]) -> float:
        """What choices bring together."""
        return sum(choices[index].loss for choices, index in zip(self.groups, picked, strict=True))

    def _filled(self, picked: list[int], bits: int) -> list[int]:
        """`picked` with the upgrades that rounding left room for, the one that gains most first."""
        room = bits - self.bits(picked)
        while True:
            upgrades = [
                (choices[picked[group]].loss - choice.loss, group, index)
                for group, choices in enumerate(self.groups)
                for index, choice in enumerate(choices)
                if choice.bits - choices[picked[group]].bits <= room and choice.loss < choices[picked[group]].loss
            ]
            if not upgrades:
                return picked
            _, group, index = max(upgrades)
            room -= self.groups[group][index].bits - self.groups[group][picked[group]].bits
            picked[group] = index
