"""NVFP4, MXFP4 and MXFP8 on both sides, on CUDA from compute capability 10.0: FlashInfer, an optional backend.

`mm_fp4` and `mm_mxfp8` of `flashinfer-python` 0.7 hold the products of several libraries, compile what they need on the
device, and take scales in the layout of `block_scaled`. One kernel leaves the choice among them to FlashInfer, the
others name one. Activations are rounded here, so that their codes are those of the definition.

**No such device was at hand: the operands are tested against their description, the products have never run.**
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from fewbit.kernels.interface import LinearRequest, Prepared
from fewbit.kernels.linear.block_scaled import (
    GROUPS,
    MXFP4,
    MXFP8,
    NVFP4,
    SCALE_ROWS,
    BlockScaledKernel,
    block_scaled_obstacles,
    fake,
    linear,
    operands,
)
from fewbit.kernels.operations import define
from fewbit.spec.element import Element
from fewbit.spec.hardware import Hardware

PACKAGE = "flashinfer-python"
QUANTA = {"N": 64, "K": 128}  # the most that any of the products asks for
LEAST = 128  # outputs of smaller products of MXFP8 can be wrong, which FlashInfer says and refuses


class _FlashInfer(BlockScaledKernel):
    """What the kernels below share.

    Attributes:
        product: what FlashInfer calls the library.
        kinds: of `block_scaled.GROUPS`, those that it multiplies.
        highest: compute capability times ten up to which it runs.
    """

    backend: ClassVar[str] = "flashinfer"
    product: ClassVar[str]
    kinds: ClassVar[tuple[tuple[Element, Element], ...]] = (NVFP4, MXFP8)
    lowest: ClassVar[int] = 100
    highest: ClassVar[int] = 1 << 30

    def _obstacles(self, request: LinearRequest, hardware: Hardware) -> Iterator[str]:
        yield from block_scaled_obstacles(request, hardware, self.kinds, QUANTA)
        if not self.lowest <= hardware.capability <= self.highest:
            found = f"{hardware.name} has {hardware.capability / 10}"
            yield f"{self.product} takes compute capability {self.lowest / 10} to {self.highest / 10}, {found}"
        for axis, extent in (("N", request.rows), ("K", request.columns)):
            if extent < LEAST:
                yield f"{axis} must be at least {LEAST}, found {extent}"
        if PACKAGE not in hardware.software:
            yield f"{PACKAGE} is not installed"
        if request.batch_invariant:
            yield "the same bits at every M are asked for, and FlashInfer chooses its product by M"

    def run(self, x: Tensor, prepared: Prepared, bias: Tensor | None) -> Tensor:
        return _operation(*operands(x, prepared, bias), self.product)


class FlashInfer(_FlashInfer):
    """The product that FlashInfer chooses by device and versions."""

    name: ClassVar[str] = "flashinfer"
    product: ClassVar[str] = "auto"
    kinds: ClassVar[tuple[tuple[Element, Element], ...]] = (NVFP4, MXFP4, MXFP8)


class FlashInferCutlass(_FlashInfer):
    """CUTLASS."""

    name: ClassVar[str] = "flashinfer_cutlass"
    product: ClassVar[str] = "cutlass"


class FlashInferCudnn(_FlashInfer):
    """cuDNN, for which its frontend must be installed."""

    name: ClassVar[str] = "flashinfer_cudnn"
    product: ClassVar[str] = "cudnn"
    kinds: ClassVar[tuple[tuple[Element, Element], ...]] = (NVFP4, MXFP4, MXFP8)


class FlashInferCuteDsl(_FlashInfer):
    """CuTe DSL, where tensor cores have a memory of their own."""

    name: ClassVar[str] = "flashinfer_cutedsl"
    product: ClassVar[str] = "cute-dsl"
    highest: ClassVar[int] = 119


class FlashInferB12x(_FlashInfer):
    """b12x, for the consumer devices of the same generation."""

    name: ClassVar[str] = "flashinfer_b12x"
    product: ClassVar[str] = "b12x"
    lowest: ClassVar[int] = 120
    highest: ClassVar[int] = 121


def _linear(
    x: Tensor, weight: Tensor, scale: Tensor, global_scale: Tensor, input_global_scale: Tensor | None,
    bias: Tensor | None, activation: str, product: str,
) -> Tensor:  # fmt: skip
    multiply = partial(multiplied, product=product)
    return linear(x, weight, scale, global_scale, input_global_scale, bias, activation, multiply)


def multiplied(
    codes: Tensor, weight: Tensor, x_scale: Tensor, scale: Tensor, global_scale: Tensor,
    input_global_scale: Tensor | None, dtype: torch.dtype, product: str,
) -> Tensor:  # fmt: skip
    """See `block_scaled.Multiply`."""
    import flashinfer

    if weight.dtype == torch.float8_e4m3fn:
        return flashinfer.mm_mxfp8(codes, weight.t(), x_scale, scale, out_dtype=dtype, backend=product)
    kind = MXFP4 if input_global_scale is None else NVFP4
    alpha = None if input_global_scale is None else (global_scale * input_global_scale).float().reshape(1)
    return flashinfer.mm_fp4(
        codes, weight.t(), _rows(x_scale, codes), _rows(scale, weight).t(), alpha, dtype,
        block_size=GROUPS[kind], backend=product, use_nvfp4=kind == NVFP4,
    )  # fmt: skip


def _rows(scale: Tensor, codes: Tensor) -> Tensor:
    """Bytes of scales in blocks as the matrix [padded rows, padded groups] whose shape FlashInfer reads."""
    return scale.view(-(-codes.shape[0] // SCALE_ROWS) * SCALE_ROWS, -1)


_operation = define(
    "linear_flashinfer(Tensor x, Tensor weight, Tensor scale, Tensor global_scale, Tensor? input_global_scale, "
    "Tensor? bias, str activation, str product) -> Tensor",
    _linear,
    fake,
)
