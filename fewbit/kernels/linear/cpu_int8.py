"""Integer weights under integer activations on x86, W8A8 and W4A8: fewbit's compiled kernels (`csrc/cpu`).

Activations are rounded inside the call, by the definition's own steps. Products are summed exactly in 32 bits: with
AMX or VNNI four bytes to a sum at a time; without them bytes as pairs of 16 bits and nibbles as pairs of bytes,
neither of which can saturate. Each group's sum is then scaled in float32. Weights of at most 4 bits take 4, wider
ones 8.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from torch import Tensor

from fewbit.kernels.activation.rounding import covers_all
from fewbit.kernels.interface import LinearKernel, LinearRequest, Prepared, Refusal
from fewbit.kernels.linear.cpu_blocks import blocks_bytes, fields_of, prepare_blocks
from fewbit.kernels.linear.cpu_weight_only import fake_output, operand_pair
from fewbit.kernels.linear.integer_activations import Rule, activation_obstacles, static_scale
from fewbit.kernels.linear.obstacles import compiled_obstacles, record_obstacles, require_roles
from fewbit.kernels.native import LinearLayer, address, call_integer_linear, operands
from fewbit.kernels.operations import define
from fewbit.numerics import QuantizedTensor
from fewbit.packing.registry import unpack_record
from fewbit.spec.hardware import Hardware
from fewbit.spec.key import LinearKey

NARROWEST = 4
LONGEST_SUM = 1 << 16
"""Input features under one scale, so that sums of 255 * 128 stay below 2**31."""


class CpuInt8(LinearKernel):
    """See the head of this file."""

    name: ClassVar[str] = "cpu_int8"
    backend: ClassVar[str] = "cpu"

    def refuse(self, request: LinearRequest, hardware: Hardware) -> Refusal | None:
        return Refusal.first(_obstacles(request, hardware))

    def prepare(self, record: QuantizedTensor, request: LinearRequest) -> Prepared:
        """See the contract.

        Raises:
            CheckpointError: a code lies outside the element's range.
        """
        require_roles(record, request, ("order",) if request.has_order else ())
        fields = fields_of(record.key.element, NARROWEST)
        assert fields is not None and request.key.activation is not None, "the request was refused"
        blocks, rule = prepare_blocks(unpack_record(record), fields), Rule.of(request.key.activation)
        stored = static_scale(record, request.key.activation)
        tensors = blocks.tensors if stored is None else {**blocks.tensors, "input_scale": stored}
        constants = {**blocks.constants, "per_token": rule.per_token, "low": rule.low, "high": rule.high}
        return Prepared(tensors, constants)

    def run(self, x: Tensor, prepared: Prepared, bias: Tensor | None) -> Tensor:
        tensors, constants = prepared.tensors, prepared.constants
        return _operation(
            x,
            tensors["shape"],
            tensors["words"],
            tensors["scale"],
            tensors.get("zero"),
            tensors.get("features"),
            tensors.get("input_scale"),
            bias,
            constants["per_token"],
            constants["low"],
            constants["high"],
            constants["rows"],
            constants["columns"],
        )

    def refuse_step(self, key: LinearKey) -> str | None:
        if key.activation is not None and key.activation.is_dynamic and covers_all(key.activation):
            return "rounds activations under one scale for all tokens, and the compiled step reads a prompt in parts"
        return None

    def compiled_layer(self, prepared: Prepared, bias: Tensor | None) -> LinearLayer:
        rounding = {name: int(prepared.constants[name]) for name in ("per_token", "low", "high")}
        return LinearLayer.of(LinearLayer.INTEGER, prepared.tensors, bias, **rounding)

    def prepared_bytes(self, request: LinearRequest) -> int:
        fields = fields_of(request.key.weight.element, NARROWEST)
        return 0 if fields is None else blocks_bytes(request, fields)


def _obstacles(request: LinearRequest, hardware: Hardware) -> Iterator[str]:
    yield from compiled_obstacles(hardware)
    weight, shape = request.key.weight, (request.rows, request.columns)
    if not weight.element.is_integer:
        yield f"integer weights of at most 8 bits are needed, found {weight.element}"
    yield from activation_obstacles(request.key.activation, request.batch_invariant)
    yield from record_obstacles(request, ("order",))
    longest = min(request.columns, weight.granularity.extents(shape)[1])
    if longest > LONGEST_SUM:
        yield f"at most {LONGEST_SUM} input features under one scale are summed exactly, found {longest}"


def _linear(
    x: Tensor,
    shape: Tensor,
    words: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    features: Tensor | None,
    input_scale: Tensor | None,
    bias: Tensor | None,
    per_token: bool,
    low: int,
    high: int,
    rows: int,
    columns: int,
) -> Tensor:
    x, y, tokens = operand_pair(x, bias, rows, columns)
    if tokens:
        call_integer_linear(
            shape.data_ptr(),
            words.data_ptr(),
            scale.data_ptr(),
            address(zero),
            address(features),
            x.data_ptr(),
            address(bias),
            *operands(x, y, tokens),
            address(input_scale),
            per_token,
            low,
            high,
        )
    return y


_operation = define(
    "linear_cpu_int8(Tensor x, Tensor shape, Tensor words, Tensor scale, Tensor? zero, Tensor? features, "
    "Tensor? input_scale, Tensor? bias, bool per_token, int low, int high, int rows, int columns) -> Tensor",
    _linear,
    fake_output,
)
