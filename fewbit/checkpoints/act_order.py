"""Act-order on disk: the group of each input feature, where a file states it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fewbit.errors import CheckpointError
from fewbit.lazy import torch
from fewbit.spec.key import QuantKey

if TYPE_CHECKING:
    from torch import Tensor


def stated_order(name: str, order: Tensor, weight: QuantKey) -> Tensor | None:
    """The group of each input feature, or None where the index says nothing.

    It says nothing when it was never set (all 0 or all -1), or gives the groups in their order, possibly from the
    middle, as one rank's share does.

    Args:
        name: the index's name on disk, for messages.
        order: int32 [K].
        weight: gives the size of a group.

    Raises:
        CheckpointError: it names a group that the layer does not have.
    """
    size = weight.granularity.columns or order.numel()
    in_order = order[:1] + trivial_order(order.numel(), weight).to(order.device)
    if (order == -1).all() or (order == 0).all() or torch.equal(order, in_order):
        return None
    groups = -(-order.numel() // size)
    if order.min() < 0 or order.max() >= groups:
        raise CheckpointError(
            f"{name} names group {int(order.max())}, but the layer has {groups} groups.",
            "An act-order layer cannot be split along K; otherwise the file is damaged.",
        )
    return order


def trivial_order(columns: int, weight: QuantKey) -> Tensor:
    """The index of a layer without act-order, int32 [K]."""
    return torch.arange(columns, dtype=torch.int32) // (weight.granularity.columns or max(1, columns))
