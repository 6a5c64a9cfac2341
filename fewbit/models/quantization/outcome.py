"""What quantizing did to each layer, measured on what a reader will get back."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fewbit.models.quantization.plan import PlannedLayer
from fewbit.models.quantization.written import WrittenLayer
from fewbit.numerics import clipped_share, dequantize


@dataclass(frozen=True)
class InputSeen:
    """What calibration saw of a layer's input.

    Attributes:
        tokens: of the calibration text that reached it; None where nothing was calibrated.
        remark: what was done for want of tokens, empty where there were some.
    """

    tokens: int | None = None
    remark: str = ""


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
        remarks: see `LayerResult`; and what was done for want of tokens.
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
    remarks: tuple[str, ...] = ()


def outcome_of(layer: PlannedLayer, load: Callable[[], Tensor], written: WrittenLayer, seen: InputSeen) -> LayerOutcome:
    """Compares a layer's weight with what was written.

    Args:
        layer: which one.
        load: gives its weight [N, K] as it was before.
        written: what became of it.
        seen: what calibration saw of its input.
    """
    weight, reread = load(), written.reread.to("cpu")
    approximation = dequantize(reread)
    return LayerOutcome(
        layer.name,
        str(layer.key),
        (layer.shape[0], layer.shape[1]),
        sqnr_db(weight, approximation),
        weight_hash(approximation),
        sum(tensor.nbytes for tensor in written.stored.values()),
        written.result.method,
        written.result.loss,
        None if {"order", "minimum", "codebook"} & reread.tensors.keys() else clipped_share(weight, reread),
        seen.tokens,
        (*written.result.remarks, *filter(None, [seen.remark])),
    )


def weight_hash(numbers: Tensor) -> str:
    """SHA-256 of float32 numbers, row-major and little-endian, minus zero written as zero."""
    return hashlib.sha256((numbers.float() + 0.0).contiguous().numpy().tobytes()).hexdigest()


def sqnr_db(numbers: Tensor, approximation: Tensor) -> float | None:
    """Signal to quantization noise in decibels; None where nothing was lost."""
    signal = numbers.double().square().sum()
    noise = (numbers.double() - approximation.double()).square().sum()
    return float(10 * torch.log10(signal / noise)) if noise > 0 else None
