"""Activations to codes by Triton's programs: bit for bit the definition, on a GPU or in the interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fewbit.kernels.activation.producer import gated, normed
from fewbit.kernels.activation.rounding import GROUPS, MAX_COLUMNS, Rounding, rounding_obstacles
from fewbit.numerics import QuantizedTensor, decode, dequantize
from fewbit.numerics.activations import quantize_activations
from fewbit.spec.key import QuantKey
from tests.kernels.triton_here import DEVICE, needs_triton

ROUNDED = (
    "e4m3:token:f32:dynamic", "int8:token:f32:dynamic", "int4:token:f32:dynamic", "int8:asym:token:f32:dynamic",
    "uint8:asym:token:f32:dynamic", "e4m3:tensor:f32", "int8:tensor:f32", "int8:asym:tensor:f32",
    "e4m3:group128:f32:dynamic", "e4m3:group64:f32:dynamic", "int8:group32:f32:dynamic", "e4m3:group32:e8m0:dynamic",
    "e2m1:group32:e8m0:dynamic", "e2m1:group16:e4m3:dynamic/tensor:f32",
)  # fmt: skip


def static_scales(key: QuantKey) -> dict[str, torch.Tensor]:
    if key.global_scale is not None:
        return {"input_global_scale": torch.tensor(1 / 500.0, dtype=torch.float64, device=DEVICE)}
    if key.is_dynamic:
        return {}
    found = {"input_scale": torch.tensor(0.03, device=DEVICE)}
    return found if key.symmetric else found | {"input_zero_point": torch.tensor(5, dtype=torch.int8, device=DEVICE)}


def rounded(text: str, x: torch.Tensor, width: int, as_numbers: bool) -> tuple[torch.Tensor, torch.Tensor]:
    from fewbit.kernels.programs.activations import quantized

    static = static_scales(QuantKey.parse(text))
    if "input_zero_point" in static:
        static["input_zero_point"] = static["input_zero_point"].float()
    codes, scales, _ = quantized(x, Rounding.of(text), static, width, as_numbers)
    return codes, scales


def bytes_of(record: QuantizedTensor, rounding: Rounding) -> torch.Tensor:
    """Codes as the programs store them."""
    codes = record["codes"].view(torch.uint8)
    if rounding.kind == "e2m1":
        return codes[:, 0::2] | codes[:, 1::2] << 4
    return (codes.int() - rounding.offset).to(torch.int8).view(torch.uint8) if rounding.offset else codes


def inputs(columns: int) -> torch.Tensor:
    """Rows from 1e-5 to 1e5, one of zeros, a zero group, and zeros that are negative."""
    x = torch.randn(7, columns, device=DEVICE) * torch.logspace(-5, 5, 7, device=DEVICE)[:, None]
    x[2], x[3, :16], x[4, ::3] = 0, 0, -0.0
    return x.bfloat16()


@needs_triton
@pytest.mark.parametrize("columns", [32, 160, 1280])
@pytest.mark.parametrize("text", ROUNDED)
def test_codes_and_scales_are_those_of_the_definition(text: str, columns: int) -> None:
    key, x = QuantKey.parse(text), inputs(columns)
    record = quantize_activations(x, key, static_scales(key))
    codes, scales = rounded(text, x, columns, as_numbers=False)
    assert torch.equal(codes.view(torch.uint8), bytes_of(record, Rounding.of(text)))
    expected = decode(record["scale"], key.scale.element)
    if Rounding.of(text).group:
        assert torch.equal(scales.t(), expected)
    elif key.is_dynamic:
        assert torch.equal(scales, expected[:, 0])


@needs_triton
@pytest.mark.parametrize("text", ["e4m3:group32:e8m0:dynamic", "e2m1:group32:e8m0:dynamic", ROUNDED[-1]])
def test_numbers_in_16_bits_are_those_of_the_definition_but_for_the_scale_of_the_tensor(text: str) -> None:
    key, x = QuantKey.parse(text), inputs(160)
    static = static_scales(key)
    numbers, _ = rounded(text, x, 160, as_numbers=True)
    expected = dequantize(quantize_activations(x, key, static)).double()
    factor = static["input_global_scale"].double() if static else 1.0
    torch.testing.assert_close(numbers.double() * factor, expected, rtol=2e-7, atol=0)


@needs_triton
@pytest.mark.parametrize("text", ROUNDED)
def test_a_row_alone_is_rounded_as_among_others(text: str) -> None:
    x = inputs(160)
    codes, scales = rounded(text, x, 160, as_numbers=False)
    for row in (1, 6):
        alone, scale = rounded(text, x[row : row + 1].contiguous(), 160, as_numbers=False)
        assert torch.equal(alone.view(torch.uint8), codes[row : row + 1].view(torch.uint8))
        assert torch.equal(scale.flatten(), (scales[..., row] if scales.dim() else scales).flatten())


@needs_triton
@pytest.mark.parametrize("text", ["e4m3:token:f32:dynamic", "int8:asym:token:f32:dynamic"])
def test_codes_may_have_more_rows_than_the_input(text: str) -> None:
    from fewbit.kernels.programs.activations import quantized

    x = inputs(160)
    codes, scales, _ = quantized(x, Rounding.of(text), {}, 160, False, rows=16)
    wanted, expected, _ = quantized(x, Rounding.of(text), {}, 160, False)
    assert codes.shape == (16, 160)
    assert torch.equal(codes[:7].view(torch.int8), wanted.view(torch.int8))
    assert torch.equal(scales, expected)


@needs_triton
def test_what_lies_beyond_the_input_is_zero() -> None:
    for text in ("e4m3:token:f32:dynamic", "int8:asym:token:f32:dynamic", "e4m3:group64:f32:dynamic"):
        codes, _ = rounded(text, inputs(40), 64, as_numbers=False)
        assert codes.shape == (7, 64)
        assert not codes[:, 40:].view(torch.uint8).any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="This machine has no CUDA device.")
def test_quotients_are_correctly_rounded_at_every_magnitude() -> None:
    for exponent in range(-120, 121, 5):
        x = (torch.randn(16, 4096, device="cuda") * 2.0**exponent).bfloat16()
        for text in ("e4m3:token:f32:dynamic", "int8:token:f32:dynamic"):
            record = quantize_activations(x, QuantKey.parse(text), {})
            codes, scales = rounded(text, x, 4096, as_numbers=False)
            assert torch.equal(codes.view(torch.uint8), record["codes"].view(torch.uint8)), (text, exponent)
            assert torch.equal(scales, record["scale"][:, 0])


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c of float32, rounded once: in float64 but where that falls half-way between two float32."""
    product, c = a.astype(np.float64) * b, c.astype(np.float64)  # exact
    total = product + c
    part = total - c
    error = (product - part) + (c - (total - part))
    halfway = (total.view(np.int64) & ((1 << 29) - 1)) == 1 << 28
    away = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where(halfway & (error != 0), away, total).astype(np.float32)


@pytest.mark.parametrize("bits", [8, 11])
def test_a_product_with_a_reciprocal_corrected_once_is_the_quotient(bits: int) -> None:
    """What the programs rely on where multiply-adds are fused; every significand of a scale was tried once, in C."""
    rng = np.random.default_rng(bits)
    scale = rng.integers(1 << 23, 1 << 24, (4096, 1)).astype(np.float32)
    numbers = rng.integers(1 << (bits - 1), 1 << bits, (1, 64)).astype(np.float32)
    reciprocal = np.float32(1) / scale
    product = numbers * reciprocal
    excess = fused(product, scale, -numbers)
    assert (product != numbers / scale).any()
    assert np.array_equal(fused(excess, -reciprocal, product), numbers / scale)


def test_everything_that_is_rounded_here_is_admitted() -> None:
    for text in ROUNDED:
        assert not list(rounding_obstacles(QuantKey.parse(text), 4096, batch_invariant=True)), text


@pytest.mark.parametrize(
    ("text", "columns", "words"),
    [
        ("e5m2:token:f32:dynamic", 64, "e5m2"),
        ("uint8:token:f32:dynamic", 64, "signed"),
        ("e4m3:token:f32:dynamic", MAX_COLUMNS + 1, str(MAX_COLUMNS)),
        ("e4m3:tensor:f32:dynamic", 64, "pass over all"),
        ("e4m3:token:f32", 64, "static activation scales per token"),
        ("e4m3:group128:f32", 64, "groups cannot be stored"),
        ("e4m3:group48:f32:dynamic", 64, str(GROUPS)),
        ("e2m1:group16:e4m3:dynamic", 64, "tensor"),
        ("e2m1:group16:e4m3:dynamic/tensor:f32:dynamic", 64, "dynamic scale of the tensor"),
    ],
)
def test_what_is_not_rounded_here_says_why(text: str, columns: int, words: str) -> None:
    reasons = list(rounding_obstacles(QuantKey.parse(text), columns, batch_invariant=False))
    assert reasons
    assert words in reasons[0]


PRODUCED = (
    "e4m3:token:f32:dynamic", "int8:token:f32:dynamic", "int8:asym:token:f32:dynamic", "e4m3:tensor:f32",
    "e4m3:group128:f32:dynamic", "e4m3:group32:e8m0:dynamic", "e2m1:group16:e4m3:dynamic/tensor:f32",
)  # fmt: skip


@needs_triton
@pytest.mark.parametrize("kind", ["gated", "normed"])
@pytest.mark.parametrize("text", PRODUCED)
def test_what_a_producer_makes_is_rounded_as_if_it_had_been_made_before(text: str, kind: str) -> None:
    from fewbit.kernels.programs.activations import quantized

    rounding, static = Rounding.of(text), static_scales(QuantKey.parse(text))
    if "input_zero_point" in static:
        static["input_zero_point"] = static["input_zero_point"].float()
    both = (torch.randn(4, 2 * 640, device=DEVICE) * 3).bfloat16()
    x, up = both[:, :640], both[:, 640:]  # as halves of a joined projection lie
    producer = gated(up) if kind == "gated" else normed(torch.rand(640, device=DEVICE).bfloat16() + 0.5, 1e-5)
    numbers, scales, _ = quantized(x, rounding, static, 640, True, producer)
    wanted, defined, _ = quantized(producer(x).contiguous(), rounding, static, 640, True)
    torch.testing.assert_close(scales, defined, rtol=2**-3 if rounding.scale_kind == "e4m3" else 2**-7, atol=0)
    # A number that lies between two codes may fall to either: exponentials and sums end in other bits.
    distance = (numbers.float() - wanted.float()).abs()
    step = 1.01 if rounding.kind == "integer" else 0.13 * wanted.float().abs() + 0.51 * float(rounding.kind == "e2m1")
    assert (distance <= step + 1e-6).all()
    assert (distance == 0).float().mean() > 0.98
