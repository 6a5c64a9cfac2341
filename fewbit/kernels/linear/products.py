"""The operation of products on 8-bit tensor cores: activations to codes, codes times codes, scales last.

One prepared layout serves every M (`product_layout`); how a product of so many rows is cut, or whether the vendor's
library multiplies instead, `tile_plans` says, and `code_cuts` where the product may run in CUDA C++.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from fewbit.kernels.activation.producer import Producer, producer_of, rows_of
from fewbit.kernels.activation.rounding import Rounding
from fewbit.kernels.interface import LinearKernel, LinearRequest, Prepared, Refusal
from fewbit.kernels.linear.code_cuts import CodeCut, code_cut_for
from fewbit.kernels.linear.obstacles import record_obstacles, require_roles, triton_obstacles
from fewbit.kernels.linear.product_layout import (
    ProductLayout,
    product_layout_of,
    product_numbers,
    product_tensors,
)
from fewbit.kernels.linear.recoded_scales import can_fold
from fewbit.kernels.linear.tile_plans import Plan, fixed_plan, plan_for, rows_at_once
from fewbit.kernels.linear.vendor_products import vendor_multiplies, vendor_product
from fewbit.kernels.operations import define
from fewbit.kernels.probe import device_name, interprets_triton
from fewbit.numerics import QuantizedTensor, decode, dequantize
from fewbit.numerics.activations import quantize_activations
from fewbit.packing.registry import unpack_record
from fewbit.spec.hardware import Hardware
from fewbit.spec.key import QuantKey

COUNTERS = 4096
"""Blocks of outputs that may be split over K at once; each needs a counter, which is zero between calls."""


class ProductKernel(LinearKernel):
    """A kernel of 8-bit products: what it takes is its own, the rest is in this file."""

    backend: ClassVar[str] = "triton"

    rounds_produced: ClassVar[bool] = True

    codes: ClassVar[str]
    """What both sides are multiplied as: `e4m3` or `int8`."""

    weights: ClassVar[str]
    """The weights that it takes, for people."""

    compiled: ClassVar[bool] = False
    """Whether products run in CUDA C++ where `code_cuts` says so."""

    def refuse(self, request: LinearRequest, hardware: Hardware) -> Refusal | None:
        return Refusal.first(self._obstacles(request, hardware))

    def prepare(self, record: QuantizedTensor, request: LinearRequest) -> Prepared:
        """See the contract.

        Raises:
            CheckpointError: a code lies outside the element's range.
        """
        require_roles(record, request)
        layout = self._layout_of(request)
        assert layout is not None, "the request was refused"
        return prepare_product(record, request, layout, self.compiled)

    def run(self, x: Tensor, prepared: Prepared, bias: Tensor | None) -> Tensor:
        return run_product(x, prepared, bias)

    def run_produced(self, x: Tensor, producer: Producer, prepared: Prepared, bias: Tensor | None) -> Tensor:
        return run_product(x, prepared, bias, producer)

    def prepared_bytes(self, request: LinearRequest) -> int:
        return product_bytes(self._layout_of(request))

    @abstractmethod
    def device_obstacles(self, hardware: Hardware) -> Iterator[str]:
        """What a device lacks, beside what every Triton program needs."""

    @abstractmethod
    def key_obstacles(self, request: LinearRequest) -> Iterator[str]:
        """What is wrong with the request's activations, and with weights where the layout does not say it."""

    def _layout_of(self, request: LinearRequest) -> ProductLayout | None:
        return None if any(self.key_obstacles(request)) else product_layout_of(request, self.codes)

    def _obstacles(self, request: LinearRequest, hardware: Hardware) -> Iterator[str]:
        yield from triton_obstacles(request, hardware)
        yield from self.device_obstacles(hardware)
        yield from record_obstacles(request)
        yield from self.key_obstacles(request)
        if product_layout_of(request, self.codes) is None:
            key = request.key
            yield (
                f"{self.weights} without zero points, one scale for at least 64 input features (32 for 4 bits), are "
                f"needed, found {key.weight} under {key.activation} over K={request.columns}"
            )


def prepare_product(
    record: QuantizedTensor, request: LinearRequest, layout: ProductLayout, compiled: bool = False
) -> Prepared:
    """The prepared weight, with what is known of its activations.

    Args:
        compiled: see `ProductKernel`.

    Raises:
        CheckpointError: a code lies outside the element's range.
    """
    activation = request.key.activation
    assert activation is not None, "the request was refused"
    plain = unpack_record(record)
    if layout.folds and not can_fold(plain):
        layout = replace(layout, folds=False)
    tensors = product_tensors(plain, layout, not activation.symmetric)
    tensors["counters"] = torch.zeros(COUNTERS, dtype=torch.int32, device=tensors["weight"].device)
    constants: dict[str, str | bool] = {"layout": str(layout), "activation": str(activation)}
    constants |= {"same_bits": request.batch_invariant, "compiled": compiled}
    return Prepared(tensors | static_tensors(record, activation), constants)


def static_tensors(record: QuantizedTensor, key: QuantKey) -> dict[str, Tensor]:
    """The static activation scales of a record as programs take them; the zero point counts from what codes lose."""
    found = {}
    if "input_global_scale" in record:
        found["input_global_scale"] = record["input_global_scale"].double().reshape(())
    if "input_scale" in record and not key.is_dynamic:
        found["input_scale"] = record["input_scale"].float().reshape(())
        if not key.symmetric:
            zero = torch.zeros_like(found["input_scale"])
            if "input_zero_point" in record:
                zero = decode(record["input_zero_point"], key.element).reshape(())
            found["input_zero_point"] = zero - Rounding.of(str(key)).offset
    return found


def run_product(x: Tensor, prepared: Prepared, bias: Tensor | None, producer: Producer | None = None) -> Tensor:
    """y = x @ W.T + bias, or of what the producer makes of x."""
    tensors, constants = prepared.tensors, prepared.constants
    other, kind, epsilon = (producer.other, producer.kind, producer.epsilon) if producer else (None, "", 0.0)
    return _operation(
        x, tensors["weight"], tensors["scale"], tensors["row_scale"], tensors["weight_sums"], tensors["counters"],
        tensors.get("block_scale"), tensors.get("input_scale"), tensors.get("input_zero_point"), bias,
        constants["layout"], constants["activation"], constants["same_bits"], constants["compiled"], other, kind,
        epsilon,
    )  # fmt: skip


def product_bytes(layout: ProductLayout | None) -> int:
    """Bytes of a prepared weight."""
    return 0 if layout is None else layout.nbytes + 4 * COUNTERS


def _linear(
    x: Tensor, weight: Tensor, scale: Tensor, row_scale: Tensor, weight_sums: Tensor, counters: Tensor,
    block_scale: Tensor | None, input_scale: Tensor | None, input_zero_point: Tensor | None, bias: Tensor | None,
    layout: str, activation: str, same_bits: bool, compiled: bool, other: Tensor | None, kind: str, epsilon: float,
) -> Tensor:  # fmt: skip
    parsed = ProductLayout.parse(layout)
    if x.numel() == 0:
        return x.new_empty(*x.shape[:-1], parsed.rows)
    static = {"input_scale": input_scale, "input_zero_point": input_zero_point}
    known = {name: tensor for name, tensor in static.items() if tensor is not None}
    tensors = {
        "weight": weight, "scale": scale, "row_scale": row_scale, "weight_sums": weight_sums, "counters": counters
    }  # fmt: skip
    if block_scale is not None:
        tensors["block_scale"] = block_scale
    flat, producer = rows_of(x, parsed.columns), producer_of(other, kind, epsilon)
    if not (x.is_cuda or interprets_triton()):
        product = _defined(flat, producer, tensors, known, bias, parsed, activation)
    elif same_bits:
        rows, parts = rows_at_once(parsed, counters.numel()), []
        for start in range(0, flat.shape[0], rows):
            some = None if producer is None else producer.over_rows(start, start + rows)
            plan = fixed_plan(parsed, min(rows, flat.shape[0] - start))
            parts.append(_multiplied(flat[start : start + rows], some, tensors, known, bias, parsed, activation, plan))
        product = parts[0] if len(parts) == 1 else torch.cat(parts)
    else:
        tokens, device = flat.shape[0], device_name(flat.device)
        way: Plan | CodeCut = plan_for(parsed, tokens, device)
        if compiled and x.is_cuda:
            cut = code_cut_for(parsed, tokens, device)
            way = way if cut.elsewhere else cut
        product = _multiplied(flat, producer, tensors, known, bias, parsed, activation, way)
    return product.view(*x.shape[:-1], parsed.rows)


def _multiplied(
    flat: Tensor, producer: Producer | None, tensors: dict[str, Tensor], static: dict[str, Tensor],
    bias: Tensor | None, layout: ProductLayout, activation: str, plan: Plan | CodeCut,
) -> Tensor:  # fmt: skip
    """On the device: codes of activations, then the product by a plan, or by a cut in CUDA C++."""
    from fewbit.kernels.programs import product_launch as launch  # imports Triton
    from fewbit.kernels.programs.activations import quantized

    tokens = flat.shape[0]
    rows = plan.token_rows(tokens) if isinstance(plan, CodeCut) else tokens
    codes, x_scale, x_zero = quantized(flat, Rounding.of(activation), static, layout.width, False, producer, rows)
    if isinstance(plan, CodeCut):
        from fewbit.kernels.cuda import code_products  # loads the driver's library

        with torch.cuda.device(flat.device):  # the driver launches where the current device is
            return code_products.multiply(codes, tokens, x_scale, x_zero, tensors, bias, layout, plan, flat.dtype)
    if plan.decodes_first and layout.kind != "codes":
        tensors = {**tensors, "weight": launch.decode_weight(tensors["weight"], tensors["scale"], layout)}
        layout = layout.decoded()
    if plan.decodes_first and vendor_multiplies(layout):
        return vendor_product(codes, x_scale, tensors, bias, layout, flat.dtype)
    return launch.multiply(codes, x_scale, x_zero, tensors, bias, layout, plan, flat.dtype)


def _defined(
    flat: Tensor, producer: Producer | None, tensors: dict[str, Tensor], static: dict[str, Tensor], bias: Tensor | None,
    layout: ProductLayout, activation: str,
) -> Tensor:  # fmt: skip
    """The product where no Triton program runs: numbers of both sides in float32."""
    key = QuantKey.parse(activation)
    if "input_zero_point" in static:
        offset = Rounding.of(activation).offset
        static = {**static, "input_zero_point": (static["input_zero_point"] + offset).to(torch.int32)}
    made = flat if producer is None else producer(flat)
    numbers = dequantize(quantize_activations(made, key, static))
    product = torch.nn.functional.linear(numbers, product_numbers(tensors, layout))
    return (product if bias is None else product + bias).to(flat.dtype)


def _fake(x: Tensor, *rest: object) -> Tensor:
    return x.new_empty(*x.shape[:-1], ProductLayout.parse(str(rest[9])).rows)


_operation = define(
    "linear_product(Tensor x, Tensor weight, Tensor scale, Tensor row_scale, Tensor weight_sums, Tensor counters, "
    "Tensor? block_scale, Tensor? input_scale, Tensor? input_zero_point, Tensor? bias, str layout, str activation, "
    "bool same_bits, bool compiled, Tensor? other, str producer, float epsilon) -> Tensor",
    _linear,
    _fake,
)
