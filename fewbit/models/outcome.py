"""What quantizing did to each layer, measured on what a reader will get back."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fewbit.algorithms.interface import LayerResult
from fewbit.models.plan import PlannedLayer
from fewbit.numerics import QuantizedTensor, clipped_share, dequantize


@dataclass(frozen=True)
class InputSeen:
    """What calibration saw of a layer's input.

    Attributes:
        tokens: of the calibration text that reached it; None where nothing was calibrated.
        note: what was done for want of tokens, empty where there were some.
    """

    tokens: int | None = None
    note: str = ""


@dataclass(frozen=True)
class LayerOutcome:
    """What quantizing did to one layer.

    Attributes:
        sqnr_db: signal to quantization noise of the weight, decibels; None where nothing was lost.
        sha256: of the dequantized weight's float32 bytes, minus zero written as zero.
        bytes: of all the tensors that store it.
        method: what chose its codes.
        loss: see `LayerResult`.
        clipped: share of the weights beyond the last code of their scale; None where groups have no fixed place.
        tokens: of the calibration text that reached it; None where nothing was calibrated.
        note: what was done for want of tokens, empty where there were some.
    """

    name: str
    key: str
    shape: tuple[int, int]
    sqnr_db: float | None
    sha256: str
    bytes: int
    method: str
    loss: float | None
    clipped: float | None
    tokens: int | None
    note: str


def outcome_of(
    layer: PlannedLayer,
    weight: Tensor,
    reread: QuantizedTensor,
    stored: Mapping[str, Tensor],
    result: LayerResult,
    seen: InputSeen,
) -> LayerOutcome:
    """Compares a layer's weight with what was written.

    Args:
        layer: which one.
        weight: [N, K] before.
        reread: the plain record that a reader makes of `stored`.
        stored: its tensors on disk.
        result: how its codes were chosen.
        seen: what calibration saw of its input.
    """
    approximation = dequantize(reread)
    return LayerOutcome(
        layer.name,
        str(layer.key),
        (layer.shape[0], layer.shape[1]),
        sqnr_db(weight, approximation),
        weight_hash(approximation),
        sum(tensor.nbytes for tensor in stored.values()),
        result.method,
        result.loss,
        None if "order" in reread or "minimum" in reread else clipped_share(weight, reread),
        seen.tokens,
        seen.note,
    )


def weight_hash(numbers: Tensor) -> str:
    """SHA-256 of float32 numbers, row-major and little-endian, minus zero written as zero."""
    return hashlib.sha256((numbers.float() + 0.0).contiguous().numpy().tobytes()).hexdigest()


def sqnr_db(numbers: Tensor, approximation: Tensor) -> float | None:
    """Signal to quantization noise in decibels; None where nothing was lost."""
    signal = numbers.double().square().sum()
    noise = (numbers.double() - approximation.double()).square().sum()
    return float(10 * torch.log10(signal / noise)) if noise > 0 else None
