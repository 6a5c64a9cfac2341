"""Products of block-scaled floats: the layout and the operands by their description, since no device here has them."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fewbit.errors import KernelError
from fewbit.kernels.interface import LinearKernel, LinearRequest
from fewbit.kernels.linear.block_scaled import from_blocks, in_blocks
from fewbit.kernels.linear.flashinfer import PACKAGE, multiplied
from fewbit.kernels.registry import choose_kernel, linear_kernels
from fewbit.kernels.select import Preference
from fewbit.numerics import decode
from fewbit.numerics.activations import quantize_activations
from fewbit.spec import DEVICES
from fewbit.spec.element import E2M1, E4M3, E8M0
from tests.kernels.layers import DTYPES, KEYS, assert_close, expected, inputs, layer

TAKEN = {
    "torch_scaled_mm_groups": ("NVFP4", "MXFP8"),
    "flashinfer": ("NVFP4", "MXFP4", "MXFP8"),
    "flashinfer_cutlass": ("NVFP4", "MXFP8"),
    "flashinfer_cudnn": ("NVFP4", "MXFP4", "MXFP8"),
    "flashinfer_cutedsl": ("NVFP4", "MXFP8"),
    "flashinfer_b12x": ("NVFP4", "MXFP8"),
}
PAIRS = [(linear_kernels()[name], key) for name, keys in TAKEN.items() for key in keys]
DATACENTER, CONSUMER = {"sm100", "sm103"}, {"sm120", "sm121"}
WHERE = {"flashinfer_cutedsl": DATACENTER, "flashinfer_b12x": CONSUMER}


@given(st.integers(1, 300), st.integers(1, 20))
def test_scales_lie_where_the_description_says(rows: int, groups: int) -> None:
    scale = torch.randint(1, 256, (rows, groups), dtype=torch.uint8)
    ordered = in_blocks(scale)
    padded = -(-groups // 4)
    assert ordered.numel() == -(-rows // 128) * 128 * padded * 4
    for row, group in {(0, 0), (rows - 1, groups - 1), (rows // 2, groups // 2), (rows // 3, groups - 1)}:
        block = (row // 128) * padded + group // 4
        place = block * 512 + row % 32 * 16 + row % 128 // 32 * 4 + group % 4
        assert ordered[place] == scale[row, group]
    assert torch.equal(from_blocks(ordered, rows, groups), scale)
    assert int(ordered.count_nonzero()) == scale.numel(), "padding is zero"


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize(("kernel", "key"), PAIRS)
def test_prepared_tensors_stand_for_the_layer(kernel: LinearKernel, key: str, dtype: str) -> None:
    record = layer(KEYS[key], 48, 160)
    request = LinearRequest.of(record, KEYS[key], dtype)
    prepared = kernel.prepare(record, request)
    assert prepared.tensors["weight"].nbytes + prepared.tensors["scale"].nbytes == kernel.prepared_bytes(request)
    for tokens in ((0,), (1,), (3, 7)):
        x = inputs((*tokens, 160), DTYPES[dtype])
        for bias in (None, torch.randn(48).to(DTYPES[dtype])):
            y = kernel.run(x, prepared, bias)
            assert (y.shape, y.dtype) == ((*tokens, 48), DTYPES[dtype])
            assert_close(y, expected(x, record, KEYS[key], bias, kernel), dtype)


def described(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, size: int, is_e4m3: bool) -> Tensor:
    """Numbers of operands as FlashInfer 0.7 describes them, multiplied in float32."""

    def numbers(codes: Tensor, scale: Tensor) -> Tensor:
        plain = codes if codes.dtype == torch.float8_e4m3fn else torch.stack([codes & 15, codes >> 4], 2).flatten(1)
        rows, columns = plain.shape
        factors = decode(from_blocks(scale.reshape(-1), rows, columns // size), E4M3 if is_e4m3 else E8M0)
        return decode(plain, E4M3 if codes.dtype == torch.float8_e4m3fn else E2M1) * factors.repeat_interleave(size, 1)

    assert b.stride(0) == 1, "column-major"
    return numbers(a, a_scale) @ numbers(b.t(), b_scale).t()


class Described(ModuleType):
    """FlashInfer by its documentation."""

    def mm_fp4(
        self, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, alpha: Tensor | None, dtype: torch.dtype, *,
        block_size: int, backend: str, use_nvfp4: bool,
    ) -> Tensor:  # fmt: skip
        assert a.dtype == b.dtype == a_scale.dtype == b_scale.dtype == torch.uint8
        assert block_size == (16 if use_nvfp4 else 32) and backend in ("auto", "cutlass", "cudnn", "cute-dsl", "b12x")
        assert use_nvfp4 or backend in ("auto", "cudnn")
        groups = -(-a.shape[1] * 2 // block_size // 4) * 4
        assert a_scale.shape == (-(-a.shape[0] // 128) * 128, groups)
        assert b_scale.shape == (groups, -(-b.shape[1] // 128) * 128)
        product = described(a, b, a_scale, b_scale.t(), block_size, use_nvfp4)
        assert (alpha is not None) == use_nvfp4
        return (product if alpha is None else product * alpha).to(dtype)

    def mm_mxfp8(
        self, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, *, out_dtype: torch.dtype, backend: str
    ) -> Tensor:
        assert a_scale.dtype == b_scale.dtype == torch.uint8 and a_scale.dim() == b_scale.dim() == 1
        return described(a, b, a_scale, b_scale, 32, False).to(out_dtype)


@pytest.mark.parametrize("key", TAKEN["flashinfer"])
def test_operands_are_those_that_flashinfer_describes(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", Described("flashinfer"))
    record = layer(KEYS[key], 192, 256)
    kernel = linear_kernels()["flashinfer"]
    tensors = kernel.prepare(record, LinearRequest.of(record, KEYS[key])).tensors
    x, activation = inputs((5, 256), torch.bfloat16), KEYS[key].activation
    assert activation is not None
    static = {name: tensor for name, tensor in tensors.items() if name.startswith("input")}
    rounded = quantize_activations(x, activation, static)
    codes = rounded["codes"]
    if activation.element == E2M1:
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    y = multiplied(
        codes, tensors["weight"], in_blocks(rounded["scale"].view(torch.uint8)), tensors["scale"],
        tensors["global_scale"], tensors.get("input_global_scale"), torch.bfloat16, "auto",
    )  # fmt: skip
    assert_close(y, expected(x, record, KEYS[key], None, kernel), "bf16")


@pytest.mark.parametrize("device", sorted(DATACENTER | CONSUMER))
@pytest.mark.parametrize(("kernel", "key"), PAIRS)
def test_blackwell_takes_them(kernel: LinearKernel, key: str, device: str) -> None:
    hardware = DEVICES[device].with_software(PACKAGE)
    found = kernel.refuse(LinearRequest(KEYS[key], 128, 256), hardware)
    assert (found is None) == (device in WHERE.get(kernel.name, {device})), found
    assert kernel.untested


@pytest.mark.parametrize(
    ("name", "key", "rows", "columns", "words"),
    [
        ("torch_scaled_mm_groups", "MXFP4", 64, 256, "NVFP4 or MXFP8"),
        ("torch_scaled_mm_groups", "NVFP4A16", 64, 256, "no activation key"),
        ("torch_scaled_mm_groups", "NVFP4", 33, 256, "N must be a multiple of 16, found 33"),
        ("torch_scaled_mm_groups", "NVFP4", 64, 272, "K must be a multiple of 32, found 272"),
        ("flashinfer", "FP8_DYNAMIC", 128, 256, "NVFP4 or MXFP4 or MXFP8"),
        ("flashinfer", "NVFP4", 64, 256, "N must be at least 128, found 64"),
        ("flashinfer", "NVFP4", 128, 192, "K must be a multiple of 128, found 192"),
        ("flashinfer_cutlass", "MXFP4", 128, 256, "NVFP4 or MXFP8"),
        ("flashinfer_b12x", "NVFP4", 128, 256, "12.0 to 12.1, sm100 has 10.0"),
    ],
)
def test_what_they_do_not_take(name: str, key: str, rows: int, columns: int, words: str) -> None:
    hardware = DEVICES["sm100"].with_software(PACKAGE)
    refusal = linear_kernels()[name].refuse(LinearRequest(KEYS[key], rows, columns), hardware)
    assert refusal is not None
    assert words in refusal.reason


def test_flashinfer_is_chosen_for_what_torch_does_not_multiply_and_on_request() -> None:
    hardware = DEVICES["sm100"].with_software(PACKAGE)

    def chosen(key: str, wanted: Preference = Preference()) -> str:
        return choose_kernel(LinearRequest(KEYS[key], 128, 256), hardware, wanted).kernel.name

    assert (chosen("MXFP4"), chosen("NVFP4")) == ("flashinfer", "torch_scaled_mm_groups")
    assert chosen("NVFP4", Preference(backends={"nvfp4": "flashinfer_cutlass"})) == "flashinfer_cutlass"
    assert chosen("MXFP8", Preference("flashinfer")) == "flashinfer"
    with pytest.raises(KernelError, match="flashinfer-python is not installed"):
        choose_kernel(LinearRequest(KEYS["NVFP4"], 128, 256), DEVICES["sm100"], Preference("flashinfer"))
