"""Weights of 2 to 8 bits under unquantized activations on x86: fewbit's compiled kernels (`csrc/cpu`).

Codes become float32 in registers, products are summed in float32, and the result is rounded once, so the numbers are
the definition's up to the order of the sum. Integers with and without zero points or minima, E2M1, E2M3, E3M2 and the
FP8 elements, scales of any granularity, act-order, any N and K, inputs of bf16, f16 and f32. Activation keys are
dropped. With AMX codes under bf16 inputs are multiplied as bf16, which holds them exactly, and each group's sum is
scaled in float32; inputs below the normal numbers count as zero there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from torch import Tensor

from fewbit.kernels.interface import LinearKernel, LinearRequest, Prepared, Refusal
from fewbit.kernels.linear.cpu_blocks import blocks_bytes, fields_of, prepare_blocks
from fewbit.kernels.linear.obstacles import compiled_obstacles, record_obstacles, require_roles
from fewbit.kernels.native import LinearLayer, address, call_linear, operands
from fewbit.kernels.operations import define
from fewbit.numerics import FLOAT_ZERO_POINT, QuantizedTensor
from fewbit.packing.registry import unpack_record
from fewbit.spec.hardware import Hardware
from fewbit.spec.key import LinearKey

SUPPORTED = ("minimum", FLOAT_ZERO_POINT, "order")


class CpuWeightOnly(LinearKernel):
    """See the head of this file."""

    name: ClassVar[str] = "cpu_weight_only"
    backend: ClassVar[str] = "cpu"
    weight_only: ClassVar[bool] = True

    def refuse(self, request: LinearRequest, hardware: Hardware) -> Refusal | None:
        return Refusal.first(_obstacles(request, hardware))

    def prepare(self, record: QuantizedTensor, request: LinearRequest) -> Prepared:
        """See the contract.

        Raises:
            CheckpointError: a code lies outside the element's range, or is no finite number.
        """
        require_roles(record, request, SUPPORTED if request.has_order else SUPPORTED[:-1])
        fields = fields_of(record.key.element)
        assert fields is not None, "the request was refused"
        return prepare_blocks(unpack_record(record), fields)

    def run(self, x: Tensor, prepared: Prepared, bias: Tensor | None) -> Tensor:
        tensors, constants = prepared.tensors, prepared.constants
        return _operation(
            x,
            tensors["shape"],
            tensors["words"],
            tensors["scale"],
            tensors.get("zero"),
            tensors.get("minimum"),
            tensors.get("features"),
            bias,
            constants["rows"],
            constants["columns"],
        )

    def refuse_step(self, key: LinearKey) -> str | None:
        return None

    def compiled_layer(self, prepared: Prepared, bias: Tensor | None) -> LinearLayer:
        return LinearLayer.of(LinearLayer.WEIGHT_ONLY, prepared.tensors, bias)

    def prepared_bytes(self, request: LinearRequest) -> int:
        fields = fields_of(request.key.weight.element)
        return 0 if fields is None else blocks_bytes(request, fields)


def _obstacles(request: LinearRequest, hardware: Hardware) -> Iterator[str]:
    yield from compiled_obstacles(hardware)
    if fields_of(request.key.weight.element) is None:
        yield f"integers of at most 8 bits or small floats are needed, found {request.key.weight.element}"
    yield from record_obstacles(request, SUPPORTED)
    if request.batch_invariant:
        yield "the same bits at every M are asked for, and the order of the sum depends on how many tokens share a tile"


def _linear(
    x: Tensor,
    shape: Tensor,
    words: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    minimum: Tensor | None,
    features: Tensor | None,
    bias: Tensor | None,
    rows: int,
    columns: int,
) -> Tensor:
    x, y, tokens = operand_pair(x, bias, rows, columns)
    if tokens:
        call_linear(
            shape.data_ptr(),
            words.data_ptr(),
            scale.data_ptr(),
            address(zero),
            address(minimum),
            address(features),
            x.data_ptr(),
            address(bias),
            *operands(x, y, tokens),
        )
    return y


def operand_pair(x: Tensor, bias: Tensor | None, rows: int, columns: int) -> tuple[Tensor, Tensor, int]:
    """x contiguous, y to be filled [..., N], and M; checked, because the library takes addresses.

    Raises:
        RuntimeError: x or the bias is not what the layer takes.
    """
    if x.shape[-1] != columns:
        raise RuntimeError(f"inputs of {columns} features are needed, found {x.shape[-1]}")
    if bias is not None and (bias.dtype != x.dtype or bias.shape != (rows,) or not bias.is_contiguous()):
        raise RuntimeError(f"a bias [{rows}] of {x.dtype} is needed, found {list(bias.shape)} of {bias.dtype}")
    y = x.new_empty(*x.shape[:-1], rows)
    return x if x.is_contiguous() else x.contiguous(), y, x.numel() // columns


def fake_output(x: Tensor, *arguments: object) -> Tensor:
    """What an operation returns whose last two arguments are N and K."""
    return x.new_empty(*x.shape[:-1], arguments[-2])


_operation = define(
    "linear_cpu(Tensor x, Tensor shape, Tensor words, Tensor scale, Tensor? zero, Tensor? minimum, Tensor? features, "
    "Tensor? bias, int rows, int columns) -> Tensor",
    _linear,
    fake_output,
)
