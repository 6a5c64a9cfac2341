"""Activations: static scales from calibration, and quantizing and dequantizing by key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fewbit.numerics.quantize import dequantize, quantize, quantize_with
from fewbit.numerics.ranges import divided, global_scale_of, stored_scale
from fewbit.numerics.tensor import QuantizedTensor
from fewbit.spec.key import QuantKey

if TYPE_CHECKING:
    from torch import Tensor


def needs_calibration(key: QuantKey | None) -> bool:
    """Whether an activation key has a scale that must be known before the layer runs."""
    if key is None:
        return False
    return not key.is_dynamic or (key.global_scale is not None and not key.global_scale.dynamic)


def static_input_scales(largest: Tensor, key: QuantKey) -> dict[str, Tensor]:
    """Role -> static scale of a symmetric activation key for inputs of at most `largest` in magnitude, [] each."""
    if key.global_scale is not None:
        return {"input_global_scale": global_scale_of(largest, key)}
    return {"input_scale": stored_scale(divided(largest, key.element.max), key.scale.element)}


def quantize_activations(x: Tensor, key: QuantKey, static: Mapping[str, Tensor | QuantizedTensor]) -> QuantizedTensor:
    """Activations [M, K], M at least 1, as a plain record of their key.

    Args:
        x: [M, K].
        key: the activation key.
        static: role -> tensor; the static activation scales among them are used.
    """
    if "input_global_scale" in static:
        return quantize(x, key, global_scale=static["input_global_scale"].reshape(1, 1))
    if "input_scale" in static and not key.is_dynamic:
        return quantize_with(x, key, static["input_scale"], static.get("input_zero_point"))
    return quantize(x, key)


def fake_quantize(x: Tensor, key: QuantKey, record: QuantizedTensor) -> Tensor:
    """Activations quantized and dequantized by their key, float32 of x's shape.

    Args:
        x: [..., K].
        key: the activation key.
        record: the layer's weight, which carries the static activation scales.
    """
    if x.numel() == 0:
        return x.float()
    flat = x.reshape(-1, x.shape[-1])
    return dequantize(quantize_activations(flat, key, record.tensors)).reshape(x.shape)
