"""Choosing a layer's codes anew in a conversion, by round to nearest of its dequantized weight, and what that costs."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from torch import Tensor

from fewbit.checkpoints.interface import CheckpointFormat
from fewbit.errors import OutputError, SchemeError
from fewbit.models.quantization.outcome import sqnr_db
from fewbit.models.quantization.quantize import QuantizeOptions
from fewbit.numerics import dequantize, quantize
from fewbit.numerics.activations import needs_calibration
from fewbit.spec.element import Element
from fewbit.spec.key import LinearKey
from fewbit.spec.presets import PRESETS
from fewbit.spec.scheme import Scheme

_GROUP_SIZES = (64, 32, 16, -1)
"""Tried where a preset's own does not divide the layers."""

_SLACK_BITS = 0.5


@dataclass(frozen=True)
class Cost:
    """What requantizing a layer loses.

    Attributes:
        scheme: name of the preset.
        group_size: to give with it, None for its own.
        sqnr_db: signal to quantization noise against the dequantized weight, decibels; None where nothing is lost.
        bits_per_weight: afterwards.
    """

    scheme: str
    group_size: int | None
    sqnr_db: float | None
    bits_per_weight: float

    def __str__(self) -> str:
        lost = "nothing" if self.sqnr_db is None else f"an SQNR of {self.sqnr_db:.1f} dB"
        size = f" --group-size {self.group_size}" if self.group_size is not None else ""
        return f"--requantize {self.scheme}{size} would cost {lost}, at {self.bits_per_weight:.2f} bits per weight"


def requantizing_scheme(name: str, group_size: int | None, scale: Element) -> Scheme:
    """The preset to requantize with, its 16-bit scales in the element `scale`.

    Raises:
        SchemeError: there is none of that name, or it takes no group size.
    """
    options = QuantizeOptions(name, group_size)
    return options.recipe().scheme.with_scale_element(scale)


def requantized_key(scheme: Scheme, target: CheckpointFormat, name: str, shape: tuple[int, int]) -> LinearKey:
    """The key that a layer gets.

    Raises:
        OutputError: the format cannot hold it either, or its activations would need calibration.
    """
    key = scheme.keys[0]
    reason = _unfit(key, target, shape)
    if reason:
        raise OutputError(f"{target.name} cannot hold {name} as {scheme.name}: {reason}.", "Choose another scheme.")
    return key


def cheapest(
    target: CheckpointFormat, numbers: Tensor, bits: float, shapes: set[tuple[int, int]], scale: Element
) -> Cost | None:
    """What requantizing would cost at least: of the presets that the format holds, the one that suits the layer best.

    Presets that need about as many bits as the layer has now come first; of these the one with the least noise.

    Args:
        target: the format.
        numbers: float32 [N, K], a dequantized weight to measure on.
        bits: bits per weight now.
        shapes: of all layers that would be requantized.
        scale: element of 16-bit scales.
    """
    keys = {}
    for name in PRESETS:
        for size in (None, *_GROUP_SIZES):
            try:
                key = requantizing_scheme(name, size, scale).keys[0]
            except SchemeError:  # the preset fixes its own group
                continue
            if not any(_unfit(key, target, shape) for shape in shapes):
                keys[name, size] = key
                break
    widths = {one: key.weight.bits_per_weight(tuple(numbers.shape)) for one, key in keys.items()}
    small = [one for one, width in widths.items() if width <= bits + _SLACK_BITS]
    tried = small or sorted(widths, key=lambda one: widths[one])[:1]
    costs = [
        Cost(*one, sqnr_db(numbers, dequantize(quantize(numbers, keys[one].weight))), widths[one]) for one in tried
    ]
    return max(costs, key=lambda cost: inf if cost.sqnr_db is None else cost.sqnr_db, default=None)


def _unfit(key: LinearKey, target: CheckpointFormat, shape: tuple[int, int]) -> str:
    """Why the format cannot hold a layer of that key made from its dequantized weight alone; empty where it can."""
    if key.activation is not None and needs_calibration(key.activation):
        return f"activations of {key.activation} need calibration data"
    granularity = key.weight.granularity
    if granularity.kind == "group" and shape[1] % granularity.columns:
        return f"groups of {granularity.columns} do not divide K={shape[1]}"
    return target.refuse(key, shape) or ""
