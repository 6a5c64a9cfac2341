"""Activations: static scales from calibration, and quantizing and dequantizing by key."""

from __future__ import annotations

import pytest
import torch

from fewbit.numerics import decode, dequantize, quantize, quantize_with
from fewbit.numerics.activations import fake_quantize, needs_calibration, static_input_scales
from fewbit.spec import PRESETS, QuantKey

ACTIVATIONS = sorted(
    {str(rule.key.activation) for scheme in PRESETS.values() for rule in scheme.rules if rule.key.activation}
)
WEIGHT = quantize(torch.ones(4, 96), QuantKey.parse("int8:channel:f32"))


def _layer(key: QuantKey, largest: float) -> object:
    scales = static_input_scales(torch.tensor(largest), key) if needs_calibration(key) else {}
    return WEIGHT.with_tensors(**scales)


@pytest.mark.parametrize(
    ("key", "needed"),
    [
        (None, False),
        ("int8:token:f32:dynamic", False),
        ("e4m3:tensor:f32", True),
        ("e2m1:group16:e4m3:dynamic/tensor:f32", True),  # the block scales are dynamic, the one above them is not
        ("e2m1:group16:e4m3:dynamic/tensor:f32:dynamic", False),
        ("e2m1:group32:e8m0:dynamic", False),
    ],
)
def test_needs_calibration(key: str | None, needed: bool) -> None:
    assert needs_calibration(QuantKey.parse(key) if key else None) is needed


@pytest.mark.parametrize("text", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(5, 96), (1, 96), (2, 3, 96), (96,), (0, 96), (2, 0, 96)], ids=str)
def test_every_presets_activation_stays_close(text: str, shape: tuple[int, ...]) -> None:
    x, key = torch.randn(shape), QuantKey.parse(text)
    back = fake_quantize(x, key, _layer(key, 4.0))
    assert back.shape == shape
    assert back.dtype is torch.float32
    error = (back - x).norm() / x.norm().clamp(min=1e-9)
    assert error < (0.15 if key.element.bits == 4 else 0.04)


@pytest.mark.parametrize("text", [text for text in ACTIVATIONS if "dynamic" in text and "/" not in text])
def test_dynamic_scales_come_from_each_token(text: str) -> None:
    x, key = torch.randn(2, 3, 96), QuantKey.parse(text)
    together = fake_quantize(x, key, WEIGHT)
    alone = torch.stack([fake_quantize(token[None], key, WEIGHT)[0] for token in x.flatten(0, 1)])
    assert torch.equal(together.flatten(0, 1), alone)
    assert torch.equal(together.flatten(0, 1), dequantize(quantize(x.flatten(0, 1), key)))


@pytest.mark.parametrize("text", [text for text in ACTIVATIONS if "dynamic" not in text] + ["int8:tensor:f32"])
def test_a_static_scale_holds_what_calibration_saw_and_saturates_beyond(text: str) -> None:
    key = QuantKey.parse(text)
    scale = static_input_scales(torch.tensor(4.0), key)["input_scale"]
    assert scale.shape == ()
    assert decode(scale, key.scale.element).item() == pytest.approx(4.0 / key.element.max)
    x = torch.tensor([[3.99, 4.0, -4.0, 40.0, 0.0]])
    back = fake_quantize(x, key, WEIGHT.with_tensors(input_scale=scale))
    assert back[0, 1:].tolist() == pytest.approx([4.0, -4.0, 4.0, 0.0], rel=0.01)
    assert torch.equal(back, dequantize(quantize_with(x, key, scale)))


def test_a_static_global_scale_serves_every_token() -> None:
    key = QuantKey.parse("e2m1:group16:e4m3:dynamic/tensor:f32")
    scale = static_input_scales(torch.tensor(4.0), key)["input_global_scale"]
    assert scale.item() == pytest.approx(4.0 / (448 * 6))
    x = torch.randn(5, 96)
    layer = WEIGHT.with_tensors(input_global_scale=scale)
    alone = torch.cat([fake_quantize(x[token : token + 1], key, layer) for token in range(5)])
    assert torch.equal(fake_quantize(x, key, layer), alone)
    assert torch.equal(alone, dequantize(quantize(x, key, global_scale=scale.reshape(1, 1))))


def test_a_static_zero_point_is_used() -> None:
    key = QuantKey.parse("uint8:asym:tensor:f32")
    layer = WEIGHT.with_tensors(input_scale=torch.tensor(0.5), input_zero_point=torch.tensor(10, dtype=torch.uint8))
    assert fake_quantize(torch.tensor([[-5.0, -6.0, 1.2]]), key, layer).tolist() == [[-5.0, -5.0, 1.0]]


@pytest.mark.parametrize("text", ACTIVATIONS)
def test_inputs_of_zeros_stay_zeros(text: str) -> None:
    key = QuantKey.parse(text)
    assert bool((fake_quantize(torch.zeros(3, 96), key, _layer(key, 0.0)) == 0).all())
