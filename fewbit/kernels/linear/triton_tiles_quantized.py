"""FP8 and INT8 activations over weight tiles: the numbers that codes stand for, multiplied on 16-bit tensor cores.

Codes of E4M3 and of integers of up to 8 bits are exact in bf16 and f16, and so are decoded weights; products are summed
in float32 and scaled after the sum. That is the arithmetic of an FP8 or INT8 product at half its peak rate, which a few
rows do not need: there bytes count, and the tiles are read as fast as by `triton_tiles`. Torch's row-wise FP8 product
takes 1.5 to 2.5 times as long at M = 1 on an H200; from some hundred rows on it is faster, and the oracle's measured
costs decide by the mix that the user names. It runs on devices without FP8 arithmetic, too.

Activations are quantized by one program a row, so K ends where a row no longer fits one program.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from fewbit.kernels.activation.fp8 import MAX_COLUMNS
from fewbit.kernels.interface import LinearKernel, LinearRequest, Prepared, Refusal
from fewbit.kernels.linear.integer_activations import covers_all, dynamic_scale, scale_obstacles, static_scale
from fewbit.kernels.linear.obstacles import int8_obstacles, require_roles
from fewbit.kernels.linear.triton_tiles import COUNTERS, multiply, tile_obstacles
from fewbit.kernels.linear.weight_tiles import TileLayout, layout_of, tile_tensors
from fewbit.kernels.operations import define
from fewbit.kernels.probe import interprets_triton
from fewbit.numerics import QuantizedTensor, round_to
from fewbit.packing.registry import unpack_record
from fewbit.spec.element import E4M3
from fewbit.spec.hardware import Hardware
from fewbit.spec.key import QuantKey


class TritonTilesQuantized(LinearKernel):
    """See the head of this file."""

    name: ClassVar[str] = "triton_tiles_quantized"
    backend: ClassVar[str] = "triton"

    def refuse(self, request: LinearRequest, hardware: Hardware) -> Refusal | None:
        return Refusal.first(_obstacles(request, hardware))

    def prepare(self, record: QuantizedTensor, request: LinearRequest) -> Prepared:
        """See the contract.

        Raises:
            CheckpointError: a code lies outside the element's range.
        """
        require_roles(record, request)
        layout, activation = layout_of(request), request.key.activation
        assert layout is not None and activation is not None, "the request was refused"
        tensors = tile_tensors(unpack_record(record), layout)
        counters = torch.zeros(COUNTERS, dtype=torch.int32, device=tensors["tiles"].device)
        stored = static_scale(record, activation)
        tensors = {**tensors, "counters": counters} | ({} if stored is None else {"input_scale": stored})
        element = activation.element
        low, high = element.min, element.max
        divisor = element.max if element == E4M3 else (high - low) / 2
        constants = {"layout": str(layout), "divisor": divisor, "low": low, "high": high, "is_float": element == E4M3}
        return Prepared(tensors, constants)

    def run(self, x: Tensor, prepared: Prepared, bias: Tensor | None) -> Tensor:
        tensors, constants = prepared.tensors, prepared.constants
        return _operation(
            x, tensors["tiles"], tensors["scale_words"], tensors["zero_words"], tensors["row_scale"],
            tensors["counters"], tensors.get("input_scale"), bias, constants["layout"], constants["divisor"],
            constants["low"], constants["high"], constants["is_float"],
        )  # fmt: skip

    def prepared_bytes(self, request: LinearRequest) -> int:
        layout = layout_of(request)
        return 0 if layout is None else layout.nbytes + 4 * COUNTERS


def _obstacles(request: LinearRequest, hardware: Hardware) -> Iterator[str]:
    activation = request.key.activation
    if activation is None:
        yield "no activation key: FP8 or integer activations are needed"
        return
    yield from tile_obstacles(request, hardware)
    yield from _activation_obstacles(activation, request)
    if request.columns > MAX_COLUMNS:
        yield f"a row of x must fit one program, at most {MAX_COLUMNS} features, found K={request.columns}"


def _activation_obstacles(activation: QuantKey, request: LinearRequest) -> Iterator[str]:
    if activation.element != E4M3:
        yield from int8_obstacles(activation, "activations")
        if activation.element.min >= 0:
            yield f"activations must be signed, found {activation.element}"
    yield from scale_obstacles(activation, request.batch_invariant)
    if activation.is_dynamic and covers_all(activation):
        yield "one dynamic scale for all tokens needs a pass over all of them first, which this kernel does not make"


def _linear(
    x: Tensor, tiles: Tensor, scale_words: Tensor, zero_words: Tensor, row_scale: Tensor, counters: Tensor,
    input_scale: Tensor | None, bias: Tensor | None, layout: str, divisor: float, low: float, high: float,
    is_float: bool,
) -> Tensor:  # fmt: skip
    parsed = TileLayout.parse(layout)
    tensors = {"tiles": tiles, "scale_words": scale_words, "zero_words": zero_words, "row_scale": row_scale}
    flat = x.reshape(-1, parsed.columns).contiguous()
    scale = input_scale
    if flat.numel() and (flat.is_cuda or interprets_triton()):
        from fewbit.kernels.programs.activations import quantized_numbers  # imports Triton

        flat, scale = quantized_numbers(flat, input_scale, divisor, low, high, is_float)
    elif flat.numel():
        numbers = flat.float()
        scale = dynamic_scale(numbers, divisor, True) if input_scale is None else input_scale
        quotient = (numbers / scale).clamp_(low, high)
        flat = (round_to(quotient, E4M3) if is_float else quotient.round_()).to(x.dtype)
        scale = scale.reshape(-1) if input_scale is None else scale
    return multiply(flat, scale, tensors, counters, bias, parsed).view(*x.shape[:-1], parsed.rows)


def _fake(x: Tensor, *rest: Tensor | str | float | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], TileLayout.parse(str(rest[7])).rows)


_operation = define(
    "linear_tiles_quantized(Tensor x, Tensor tiles, Tensor scale_words, Tensor zero_words, Tensor row_scale, "
    "Tensor counters, Tensor? input_scale, Tensor? bias, str layout, float divisor, float low, float high, "
    "bool is_float) -> Tensor",
    _linear,
    _fake,
)
