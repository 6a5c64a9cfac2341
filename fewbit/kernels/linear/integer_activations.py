"""Integer activations as kernels compute them: which keys they take, and the codes with their scales."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fewbit.kernels.activation.rounding import covers_all, covers_rows
from fewbit.kernels.linear.obstacles import int8_obstacles
from fewbit.numerics import QuantizedTensor
from fewbit.numerics.ranges import divided
from fewbit.spec.element import F32
from fewbit.spec.key import QuantKey


@dataclass(frozen=True)
class Rule:
    """How activations become integers, as plain values that an operation takes.

    Attributes:
        per_token: one scale for each row, otherwise one for all.
        low, high: the range of the codes.
    """

    per_token: bool
    low: int
    high: int

    @classmethod
    def of(cls, key: QuantKey) -> Rule:
        return cls(not covers_all(key), int(key.element.min), int(key.element.max))


def activation_obstacles(key: QuantKey | None, batch_invariant: bool) -> Iterator[str]:
    """Activations that are not symmetric integers of at most 8 bits under one scale per token or for all."""
    if key is None:
        yield "no activation key: integer activations are needed"
        return
    yield from int8_obstacles(key, "activations")
    yield from scale_obstacles(key, batch_invariant)
    if key.element.min >= 0:
        yield f"activations must be signed, found {key.element}"


def scale_obstacles(key: QuantKey, batch_invariant: bool) -> Iterator[str]:
    """Activation scales other than float32 ones per token, or one for all, without zero points."""
    if not key.symmetric:
        yield "symmetric activations are needed, found zero points"
    if key.global_scale is not None:
        yield f"one level of activation scales is needed, found {key.scale} under {key.global_scale}"
    if not covers_rows(key):
        yield f"one activation scale for each token or for all is needed, found {key.granularity}"
    if key.scale.element != F32:
        yield f"activation scales of f32 are needed, found {key.scale.element}"
    if not key.is_dynamic and not covers_all(key):
        yield "static activation scales per token cannot be stored, a dynamic key is needed"
    if batch_invariant and key.is_dynamic and covers_all(key):
        yield "the same bits at every M are asked for, and one dynamic scale for all tokens depends on all of them"


def static_scale(record: QuantizedTensor, key: QuantKey) -> Tensor | None:
    """The stored activation scale as float32 [], or None where scales are computed at run time."""
    if key.is_dynamic or "input_scale" not in record:
        return None
    return record["input_scale"].float().reshape(())


def dynamic_scale(numbers: Tensor, largest_code: float, per_token: bool) -> Tensor:
    """Scales that bring the largest magnitude to `largest_code`: float32 [M, 1], or [] for all rows.

    Operation by operation what `numerics.quantize` does, so that the codes are the same on every device; only a scale
    of zero becomes the smallest normal number rather than one, which gives the same codes of zero.

    Args:
        numbers: float32 [M, K], not empty.
        largest_code: the code of the largest magnitude.
        per_token: one scale for each row.
    """
    if per_token:
        largest: Tensor = torch.linalg.vector_norm(numbers, float("inf"), -1, True)
    else:
        largest = torch.linalg.vector_norm(numbers, float("inf"))
    return divided(largest, largest_code).clamp_(min=torch.finfo(torch.float32).tiny)


def integers(flat: Tensor, scale: Tensor | None, rule: Rule) -> tuple[Tensor, Tensor]:
    """Codes of activations as whole float32 numbers [M, K], and their scales, float32 [M, 1] or [].

    Args:
        flat: [M, K], not empty.
        scale: the static scale, or None.
        rule: see `Rule`.
    """
    numbers = flat.float()
    if scale is None:
        scale = dynamic_scale(numbers, (rule.high - rule.low) / 2, rule.per_token)
    return (numbers / scale).round_().clamp_(rule.low, rule.high), scale
