"""INT8 kernels: whole-number arithmetic that nothing saturates, and the packed weight as a tensor among others."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn

from fewbit.kernels.interface import LinearKernel, LinearRequest
from fewbit.kernels.linear import torch_int8pack
from fewbit.kernels.linear.integer_activations import Rule, integers
from fewbit.kernels.linear.torch_int8pack import FEW_ROWS, TorchInt8Pack, TorchInt8PackW8A8
from fewbit.kernels.linear.torch_onednn_int8 import TorchOneDnnInt8, pack, unpack
from fewbit.kernels.probe import onednn_is_exact, this_machine
from fewbit.numerics import QuantizedTensor, dequantize, quantize
from fewbit.numerics.activations import fake_quantize
from tests.kernels.layers import DTYPES, KEYS, assert_close, expected, inputs, layer

X86 = pytest.mark.skipif(not this_machine("cpu").has("avx2"), reason="This machine's CPU has no AVX2.")
SAFE = 64
"""Products of uint8 and weights up to this magnitude do not saturate in pairs on any CPU."""


def worst_case(rows: int, columns: int, key: str = "W8A8", largest: int = 127) -> QuantizedTensor:
    """Weights of which whole rows are as large as can be."""
    record = layer(KEYS[key], rows, columns)
    codes = record["codes"].clamp(-largest - 1, largest)
    codes[0], codes[1] = largest, -largest - 1
    return record.with_tensors(codes=codes)


def worst_inputs(tokens: int, columns: int, dtype: torch.dtype) -> Tensor:
    x = inputs((tokens, columns), dtype)
    x[0] = 1.0  # the largest code everywhere
    if tokens > 2:
        x[2] = -1.0
    return x


def exact(x: Tensor, record: QuantizedTensor, key: str) -> Tensor:
    """The layer in integers, scaled as the kernels scale: float32 [M, N]."""
    activation = KEYS[key].activation
    stored = record["input_scale"].float() if "input_scale" in record else None
    codes, scale = integers(x, stored, Rule.of(activation))
    sums = codes.long() @ record["codes"].long().T
    return sums.float() * record["scale"].float().reshape(-1) * scale


@X86
@pytest.mark.parametrize("key", ["W8A8", "W8A8 static", "W8A8 f32 scales"])
@pytest.mark.parametrize("columns", [16, 65, 576])
@pytest.mark.parametrize("kernel", [TorchInt8PackW8A8(), TorchOneDnnInt8()], ids=lambda kernel: kernel.name)
def test_float32_layers_are_integer_arithmetic_bit_by_bit(kernel: LinearKernel, columns: int, key: str) -> None:
    everywhere = kernel.name != "torch_onednn_int8" or onednn_is_exact()
    record = worst_case(33, columns, key, 127 if everywhere else SAFE - 1)
    prepared = kernel.prepare(record, LinearRequest.of(record, KEYS[key], "f32"))
    for tokens in (1, 2, 3, 16, 17, 130):
        x = worst_inputs(tokens, columns, torch.float32)
        assert torch.equal(kernel.run(x, prepared, None), exact(x, record, key))


@X86
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("kernel", [TorchInt8PackW8A8(), TorchOneDnnInt8()], ids=lambda kernel: kernel.name)
def test_narrow_layers_lose_nothing_but_the_rounding(kernel: LinearKernel, dtype: str) -> None:
    everywhere = kernel.name != "torch_onednn_int8" or onednn_is_exact()
    record = worst_case(32, 64, "W8A8", 127 if everywhere else SAFE - 1)
    prepared = kernel.prepare(record, LinearRequest.of(record, KEYS["W8A8"], dtype))
    for tokens in (1, 3, FEW_ROWS, FEW_ROWS + 1, 17):
        x = worst_inputs(tokens, 64, DTYPES[dtype])
        assert_close(kernel.run(x, prepared, None), exact(x, record, "W8A8").double(), dtype)


@pytest.mark.parametrize("key", ["W8A8", "W8A8 static", "W8A8 dynamic tensor", "W4A4 channel"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_activation_codes_are_those_of_the_definition(key: str, dtype: str) -> None:
    record, activation = layer(KEYS[key], 8, 64), KEYS[key].activation
    x = inputs((40, 64), DTYPES[dtype])
    codes, scale = integers(x, record["input_scale"].float() if "input_scale" in record else None, Rule.of(activation))
    assert torch.equal(codes * scale, fake_quantize(x, activation, record))
    assert int(codes.max()) == activation.element.max
    if key != "W8A8 dynamic tensor":  # whose one largest number may be positive
        assert int(codes.min()) == activation.element.min


@X86
@pytest.mark.parametrize("rows", [1, 500, 257])
def test_weights_wider_than_a_chunk(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_int8pack, "CHUNK", 100 * 96)
    kernel, key = TorchInt8Pack(), KEYS["W8A16"]
    record = layer(key, rows, 96)
    prepared = kernel.prepare(record, LinearRequest.of(record, key, "f32"))
    for tokens in (1, 20):
        x = inputs((tokens, 96), torch.float32)
        assert_close(kernel.run(x, prepared, None), expected(x, record, key, None, kernel), "f32")


@X86
@pytest.mark.parametrize("key", ["W8A16", "W8A16 biased", "W8A16 tensor"])
def test_weights_of_few_rows_are_rounded_once_where_bf16_holds_the_scales(key: str) -> None:
    kernel, record = TorchInt8Pack(), layer(KEYS[key], 32, 64)
    prepared = kernel.prepare(record, LinearRequest.of(record, KEYS[key]))
    assert ("factor" in prepared.tensors) == (key == "W8A16")
    found = torch.cat([kernel.run(row, prepared, None) for row in torch.eye(64).bfloat16().split(1)]).T
    wanted = dequantize(record)
    assert ((found.float() - wanted).abs() <= wanted.abs() * 2**-8).all()
    if key == "W8A16":
        assert torch.equal(found, wanted.bfloat16())


class Layer(nn.Module):
    """What holds a prepared weight: a module with a buffer that is in no state dict."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight, persistent=False)


@X86
def test_a_packed_weight_is_copied_and_saved_like_any_tensor() -> None:
    codes = torch.randint(-128, 128, (33, 65), dtype=torch.int8)
    held = Layer(pack(codes))
    saved = io.BytesIO()
    torch.save(held, saved)
    saved.seek(0)
    copies = [
        copy.deepcopy(held),
        copy.deepcopy(copy.deepcopy(held)),
        pickle.loads(pickle.dumps(held)),
        torch.load(saved, weights_only=False),
        held.to(torch.bfloat16),
        held.half().float().cpu(),
        copy.copy(held),
    ]
    for copied in copies:
        assert copied.weight.is_mkldnn
        assert torch.equal(unpack(copied.weight), codes)
    assert held.state_dict() == {}
    assert pack(codes).nbytes == codes.nbytes


@X86
def test_one_weight_in_two_places_is_one_copy() -> None:
    both = nn.ModuleList([Layer(pack(torch.ones(16, 16, dtype=torch.int8)))])
    both.append(Layer(both[0].weight))
    copied = copy.deepcopy(both)
    assert copied[0].weight is copied[1].weight
    assert copied[0].weight is not both[0].weight


@X86
def test_a_weight_that_was_not_packed_is_an_error_and_no_crash() -> None:
    kernel, record = TorchOneDnnInt8(), layer(KEYS["W8A8"], 32, 64)
    prepared = kernel.prepare(record, LinearRequest.of(record, KEYS["W8A8"]))
    prepared.tensors["weight"] = record["codes"]
    with pytest.raises(AssertionError, match="packed"):
        kernel.run(torch.randn(2, 64), prepared, None)


@pytest.mark.parametrize("key", ["W8A8", "W8A8 static"])
def test_rows_of_zeros_and_tiny_numbers(key: str) -> None:
    record, activation = layer(KEYS[key], 8, 32), KEYS[key].activation
    x = torch.zeros(3, 32)
    x[1] = 1e-30
    codes, scale = integers(x, record["input_scale"].float() if "input_scale" in record else None, Rule.of(activation))
    assert torch.equal(codes * scale, fake_quantize(x, activation, record))
    assert quantize(x, activation)["codes"].abs().max() == 127
