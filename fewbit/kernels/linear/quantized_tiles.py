"""The operation of quantized activations over weight tiles: the numbers that codes stand for, on 16-bit tensor cores.

Numbers of E4M3, of E2M1 and of integers of up to 8 bits are exact in bf16 and f16, with zero points taken away too, and
so are E2M1 and E4M3 times a block scale of E8M0 or E4M3 in bf16; decoded weights are exact as well. Products are summed
in float32; scales of tokens and of the tensor come after the sum.

Many rows of FP8 activations are multiplied on FP8 tensor cores instead, where codes hold the weight exactly: it is
decoded to them once, and torch has the product (`tile_codes`). So one layout of 4-bit weights serves a decode step at
the rate of its bytes and a prompt at that of FP8.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from fewbit.kernels.activation.rounding import Rounding, rounding_obstacles
from fewbit.kernels.interface import LinearKernel, LinearRequest, Prepared, Refusal
from fewbit.kernels.linear.obstacles import require_roles
from fewbit.kernels.linear.products import static_tensors
from fewbit.kernels.linear.tile_codes import code_scales, codes_layout, with_codes
from fewbit.kernels.linear.tile_plans import plan_for
from fewbit.kernels.linear.triton_tiles import COUNTERS, multiply, tile_obstacles
from fewbit.kernels.linear.vendor_products import vendor_product, vendor_runs
from fewbit.kernels.linear.weight_tiles import TileLayout, layout_of, tile_tensors
from fewbit.kernels.operations import define
from fewbit.kernels.probe import device_name, interprets_triton
from fewbit.numerics import QuantizedTensor, decode, dequantize
from fewbit.numerics.activations import quantize_activations
from fewbit.packing.registry import unpack_record
from fewbit.spec.hardware import Hardware
from fewbit.spec.key import QuantKey


class QuantizedTilesKernel(LinearKernel):
    """A kernel of this operation; which activations it takes is its own.

    Attributes:
        without_activations: what a request whose activations stay as they are is told.
    """

    without_activations: ClassVar[str]

    def refuse(self, request: LinearRequest, hardware: Hardware) -> Refusal | None:
        return Refusal.first(self._obstacles(request, hardware))

    @abstractmethod
    def activation_obstacles(self, activation: QuantKey) -> Iterator[str]:
        """Why it does not take activations, in words."""

    def _obstacles(self, request: LinearRequest, hardware: Hardware) -> Iterator[str]:
        activation = request.key.activation
        if activation is None:
            yield f"no activation key: {self.without_activations}"
            return
        yield from tile_obstacles(request, hardware)
        yield from self.activation_obstacles(activation)
        yield from rounding_obstacles(activation, request.columns, request.batch_invariant)

    def prepare(self, record: QuantizedTensor, request: LinearRequest) -> Prepared:
        """See the contract.

        Raises:
            CheckpointError: a code lies outside the element's range.
        """
        require_roles(record, request)
        return prepare_tiles(record, request)

    def run(self, x: Tensor, prepared: Prepared, bias: Tensor | None) -> Tensor:
        return run_tiles(x, prepared, bias)

    def prepared_bytes(self, request: LinearRequest) -> int:
        layout = layout_of(request)
        return 0 if layout is None else with_codes(layout, request).nbytes + 4 * COUNTERS


def prepare_tiles(record: QuantizedTensor, request: LinearRequest) -> Prepared:
    """The prepared weight, with what is known of its activations.

    Raises:
        CheckpointError: a code lies outside the element's range.
    """
    layout, activation = layout_of(request), request.key.activation
    assert layout is not None and activation is not None, "the request was refused"
    tensors = tile_tensors(unpack_record(record), layout)
    layout = with_codes(layout, request)
    if layout.decodes_to:
        scales = code_scales(tensors, layout)
        if scales is None:
            layout = replace(layout, decodes_to="")
        else:
            tensors["code_scales"] = scales
    tensors["counters"] = torch.zeros(COUNTERS, dtype=torch.int32, device=tensors["tiles"].device)
    return Prepared(
        tensors | static_tensors(record, activation),
        {"layout": str(layout), "activation": str(activation), "same_bits": request.batch_invariant},
    )


def run_tiles(x: Tensor, prepared: Prepared, bias: Tensor | None) -> Tensor:
    """y = x @ W.T + bias."""
    tensors, constants = prepared.tensors, prepared.constants
    return _operation(
        x, tensors["tiles"], tensors["scale_words"], tensors["zero_words"], tensors["row_scale"],
        tensors["counters"], tensors.get("code_scales"), tensors.get("input_scale"), tensors.get("input_zero_point"),
        tensors.get("input_global_scale"), bias, constants["layout"], constants["activation"], constants["same_bits"],
    )  # fmt: skip


def _linear(
    x: Tensor, tiles: Tensor, scale_words: Tensor, zero_words: Tensor, row_scale: Tensor, counters: Tensor,
    code_scales: Tensor | None, input_scale: Tensor | None, input_zero_point: Tensor | None,
    input_global_scale: Tensor | None, bias: Tensor | None, layout: str, activation: str, same_bits: bool,
) -> Tensor:  # fmt: skip
    parsed, rounding = TileLayout.parse(layout), Rounding.of(activation)
    tensors = {"tiles": tiles, "scale_words": scale_words, "zero_words": zero_words, "row_scale": row_scale}
    given = {
        "input_scale": input_scale, "input_zero_point": input_zero_point, "input_global_scale": input_global_scale
    }  # fmt: skip
    static = {name: tensor for name, tensor in given.items() if tensor is not None}
    flat, scale = x.reshape(-1, parsed.columns).contiguous(), None
    if code_scales is not None and not same_bits and decodes_to_codes(parsed, flat):
        product = _by_codes(flat, rounding, static, {**tensors, "code_scales": code_scales}, bias, parsed)
        return product.view(*x.shape[:-1], parsed.rows)
    if flat.numel() and (flat.is_cuda or interprets_triton()):
        from fewbit.kernels.programs.activations import quantized  # imports Triton

        flat, scale, _ = quantized(flat, rounding, static, parsed.columns, True)
    elif flat.numel():
        flat, scale = _defined(flat, QuantKey.parse(activation), rounding, static)
    if rounding.group:  # multiplied in, but for the scale of the tensor
        scale = None if input_global_scale is None else input_global_scale.float()
    product = multiply(flat, scale, tensors, counters, bias, parsed, same_bits)
    return product.view(*x.shape[:-1], parsed.rows)


def decodes_to_codes(layout: TileLayout, flat: Tensor) -> bool:
    """Whether so many rows are multiplied as codes on this device."""
    if not layout.decodes_to or not vendor_runs(codes_layout(layout), flat.device):
        return False
    return plan_for(layout, flat.shape[0], device_name(flat.device)).decodes_first


def _by_codes(
    flat: Tensor, rounding: Rounding, static: dict[str, Tensor], tensors: dict[str, Tensor], bias: Tensor | None,
    layout: TileLayout,
) -> Tensor:  # fmt: skip
    """y [M, N] of both sides as E4M3 codes."""
    from fewbit.kernels.programs import launch  # imports Triton
    from fewbit.kernels.programs.activations import quantized

    codes, x_scale, _ = quantized(flat, rounding, static, layout.columns, False)
    weight, scale = launch.decode_to_codes(tensors, layout)
    row_scale = tensors["code_scales"][1, : layout.rows]
    sides = {"weight": weight, "scale": scale, "row_scale": row_scale}
    return vendor_product(codes, x_scale, sides, bias, codes_layout(layout), flat.dtype)


def _defined(
    flat: Tensor, key: QuantKey, rounding: Rounding, static: dict[str, Tensor]
) -> tuple[Tensor, Tensor | None]:
    """What the program gives, where none runs: numbers in x's dtype, and scales."""
    known = dict(static)
    if "input_zero_point" in known:
        known["input_zero_point"] = (known["input_zero_point"] + rounding.offset).to(torch.int32)
    record = quantize_activations(flat, key, known)
    if rounding.group:
        numbers = dequantize(record) / (1.0 if "global_scale" not in record else record["global_scale"].reshape(()))
        return numbers.to(flat.dtype), None
    numbers = decode(record["codes"], key.element)
    if "zero_point" in record:
        numbers = numbers - decode(record["zero_point"], key.element)
    scale = static["input_scale"] if "input_scale" in static else record["scale"].reshape(-1)
    return numbers.to(flat.dtype), scale


def _fake(x: Tensor, *rest: Tensor | str | bool | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], TileLayout.parse(str(rest[-3])).rows)


_operation = define(
    "linear_tiles_quantized(Tensor x, Tensor tiles, Tensor scale_words, Tensor zero_words, Tensor row_scale, "
    "Tensor counters, Tensor? code_scales, Tensor? input_scale, Tensor? input_zero_point, "
    "Tensor? input_global_scale, Tensor? bias, str layout, str activation, bool same_bits) -> Tensor",
    _linear,
    _fake,
)
