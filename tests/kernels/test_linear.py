"""Every linear kernel against the definition in float64, wherever it does not refuse."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fewbit.kernels.interface import LinearKernel, LinearRequest
from fewbit.kernels.probe import this_machine
from fewbit.kernels.registry import linear_kernels
from fewbit.numerics import FLOAT_ZERO_POINT, QuantizedTensor
from fewbit.spec import CHANNEL, ELEMENTS, TENSOR, LinearKey, QuantKey, ScaleSpec, block, group
from fewbit.spec.element import BF16, E4M3, F16, F32, Element
from tests.kernels.layers import (
    DTYPES,
    FP8_SUMS,
    KERNELS,
    KEYS,
    admits,
    assert_close,
    expected,
    inputs,
    layer,
    moved,
    placed,
)

SHAPES = [(16, 32), (32, 16), (48, 96), (33, 65), (17, 128), (64, 256), (16, 576)]
TOKENS = [(0,), (1,), (2,), (3,), (16,), (17,), (130,), (), (2, 3), (0, 2)]


def check(
    kernel: LinearKernel,
    request: LinearRequest,
    record: QuantizedTensor,
    many: list[tuple[int, ...]],
    device: str = "cpu",
) -> None:
    """Calls of many shapes, every second one with a bias, against the definition."""
    dtype, there = DTYPES[request.dtype], moved(record, device)
    activation = None if kernel.weight_only else request.key.activation
    least = FP8_SUMS if device == "cuda" and activation is not None and activation.element == E4M3 else 0.0
    prepared = placed(kernel.prepare(record, request), device)
    for turn, tokens in enumerate(many):
        x = inputs((*tokens, request.columns), dtype).to(device)
        bias = torch.randn(request.rows).to(dtype).to(device) if turn % 2 else None
        y = kernel.run(x, prepared, bias)
        assert y.shape == (*tokens, request.rows)
        assert y.dtype == dtype
        assert y.is_contiguous()
        assert_close(y, expected(x, there, request.key, bias, kernel), request.dtype, least)


def check_shapes(kernel: LinearKernel, key: LinearKey, device: str) -> int:
    """Every shape, dtype and number of tokens that the kernel takes on the device; how many layers it took."""
    ran = 0
    for turn, (rows, columns) in enumerate(SHAPES):
        record = layer(key, rows, columns)
        # The reference takes every shape of every key, and one rule serves them all: a third of the calls each.
        tokens = TOKENS[turn % 3 :: 3] if kernel.reference else TOKENS
        for dtype in DTYPES:
            request = LinearRequest.of(record, key, dtype)
            if admits(kernel, request, device):
                check(kernel, request, record, tokens, device)
                ran += 1
    return ran


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_computes_what_the_key_says(name: str, key: str) -> None:
    ran = check_shapes(linear_kernels()[name], KEYS[key], "cpu")
    assert name != "reference" or ran == len(SHAPES) * len(DTYPES)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="This machine has no CUDA device.")
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_computes_what_the_key_says_on_cuda(name: str, key: str) -> None:
    ran = check_shapes(linear_kernels()[name], KEYS[key], "cuda")
    must_run = name == "torch_scaled_mm" and key in FP8_LAYERS and this_machine("cuda").capability >= 89
    assert ran or not must_run


FP8_LAYERS = ("FP8", "FP8_DYNAMIC", "FP8 channel static", "FP8 tensor per token", "FP8 dynamic tensor")


INTEGERS = [element for element in ELEMENTS.values() if element.is_integer]
GRANULARITIES = st.one_of(
    st.sampled_from([TENSOR, CHANNEL]),
    st.builds(group, st.sampled_from([1, 7, 16, 32, 48, 64, 96, 128, 200, 256, 512])),
    st.builds(block, st.sampled_from([1, 3, 16, 200]), st.sampled_from([5, 32, 64, 1000])),
)


@given(st.data())
def test_random_integer_layers(data: st.DataObject) -> None:
    element = data.draw(st.sampled_from(INTEGERS))
    weight = QuantKey(
        element,
        ScaleSpec(data.draw(st.sampled_from([BF16, F16, F32])), data.draw(GRANULARITIES)),
        symmetric=data.draw(st.booleans()),
    )
    if weight.symmetric and element.min == 0:
        weight = QuantKey(element, weight.scale, symmetric=False)  # random weights have both signs
    activation = data.draw(
        st.none()
        | st.builds(
            QuantKey,
            st.sampled_from([ELEMENTS["int8"], ELEMENTS["int4"], ELEMENTS["uint8b128"]]),
            st.builds(ScaleSpec, st.just(F32), st.sampled_from([CHANNEL, TENSOR]), st.just(True)),
        )
    )
    key = LinearKey(weight, activation)
    rows = data.draw(st.sampled_from([16, 32, 48, 5]))
    columns = data.draw(st.sampled_from([32, 64, 96, 128, 192, 256, 640, 51]))
    record = layer(key, rows, columns)
    tokens = (data.draw(st.integers(1, 20)),)
    for dtype in DTYPES:
        for batch_invariant in (False, True):
            request = LinearRequest.of(record, key, dtype, batch_invariant)
            for kernel in linear_kernels().values():
                if admits(kernel, request, "cpu"):
                    check(kernel, request, record, [tokens, tokens])


@pytest.mark.parametrize("key", ["W4A16 g32", "W8A16", "W8A8", "W8A8 static"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_batch_invariant_kernel_gives_a_row_the_same_bits_at_every_m(key: str, dtype: str) -> None:
    record = layer(KEYS[key], 32, 640)
    request = LinearRequest.of(record, KEYS[key], dtype, batch_invariant=True)
    x = inputs((130, 640), DTYPES[dtype])
    for kernel in linear_kernels().values():
        if kernel.reference or not admits(kernel, request, "cpu"):
            continue
        prepared = kernel.prepare(record, request)
        whole = kernel.run(x, prepared, None)
        for count in (1, 3, 16, 17):
            assert torch.equal(kernel.run(x[:count], prepared, None), whole[:count]), kernel.name


@pytest.mark.parametrize("name", KERNELS)
def test_preparing_leaves_the_record_as_it_was_and_holds_what_was_announced(name: str) -> None:
    kernel = linear_kernels()[name]
    for key in KEYS.values():
        record = layer(key, 64, 256)
        before = {role: record[role].clone() for role in record.tensors}
        request = LinearRequest.of(record, key)
        if not admits(kernel, request, "cpu"):
            continue
        prepared = kernel.prepare(record, request)
        assert {role: str(record[role]) for role in record.tensors} == {role: str(old) for role, old in before.items()}
        held = prepared.nbytes
        assert held <= kernel.prepared_bytes(request) + 64, f"{key}: {held}"
        assert held >= 0.9 * kernel.prepared_bytes(request), f"{key}: {held}"


@pytest.mark.parametrize("name", KERNELS)
def test_inputs_may_be_strided(name: str) -> None:
    kernel = linear_kernels()[name]
    for key in ("W4A16 g32", "W8A16", "W8A8", "FP8"):
        record = layer(KEYS[key], 16, 64)
        request = LinearRequest.of(record, KEYS[key])
        if admits(kernel, request, "cpu"):
            prepared = kernel.prepare(record, request)
            x = inputs((64, 5), torch.bfloat16).t()
            assert torch.equal(kernel.run(x, prepared, None), kernel.run(x.contiguous(), prepared, None))
            sliced = inputs((2, 5, 64), torch.bfloat16)[:, 1:3]
            assert torch.equal(kernel.run(sliced, prepared, None), kernel.run(sliced.contiguous(), prepared, None))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_zero_points_that_are_floats_are_applied_or_refused(name: str, dtype: Element) -> None:
    """HQQ's: a kernel that reads them as codes is off by half a step."""
    kernel = linear_kernels()[name]
    key = LinearKey(QuantKey(ELEMENTS["uint4"], ScaleSpec(F32, group(64)), symmetric=False))
    record = layer(key, 64, 256)
    record = record.with_tensors(zero_point=torch.rand(record["scale"].shape) * 15)
    request = LinearRequest.of(record, key, dtype.name)
    assert request.extras == {FLOAT_ZERO_POINT}
    if kernel.refuse(request, this_machine("cpu")) is None:
        check(kernel, request, record, [(1,), (17,)])
        return
    integers = LinearRequest.of(layer(key, 64, 256), key, dtype.name)
    if kernel.refuse(integers, this_machine("cpu")) is None:
        with pytest.raises(ValueError, match=FLOAT_ZERO_POINT):
            kernel.prepare(record, integers)
