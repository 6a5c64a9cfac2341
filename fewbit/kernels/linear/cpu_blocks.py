"""The prepared layout of the compiled CPU kernels, the same bytes for every instruction set.

A weight [N, K] is cut into blocks of 16 output features. Each output feature's codes are divided into 32-bit words,
consecutive input features from the lowest bits up; a block holds its words one after another, each for all 16
features: `words` int32 [N / 16, words, 16]. Codes of 2, 4 and 8 bits have fields of their own width; 3 bits take 4, and
5 to 7 take 8, because unpacking fields that straddle would cost more than the bytes. Integers are stored unsigned; what
was added to them goes into the zero point.

Groups are padded to whole words and the activations are put in the same order at each call. So any group size, any K
and any act-order run through one loop: `features` says which input feature each slot takes where they are not in order.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from fewbit.errors import CheckpointError
from fewbit.kernels.interface import LinearRequest, Prepared, extras_of
from fewbit.kernels.native import DTYPES
from fewbit.numerics import FLOAT_ZERO_POINT, QuantizedTensor, decode, effective_scale
from fewbit.spec.element import BF16, E2M1, E2M3, E3M2, E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, F16, Element
from fewbit.spec.granularity import TENSOR

BLOCK_ROWS = 16
WORD_BITS = 32
NARROW_SCALES = {BF16.name: torch.bfloat16, F16.name: torch.float16}


@dataclass(frozen=True)
class Fields:
    """How codes lie in words: the library's number for it, and bits of a field."""

    number: int
    bits: int

    @property
    def slots(self) -> int:
        """Codes to a word."""
        return WORD_BITS // self.bits


INTEGERS = {2: Fields(0, 2), 4: Fields(1, 4), 8: Fields(2, 8)}
FLOATS = {
    E2M1: Fields(3, 4),
    E4M3: Fields(4, 8),
    E4M3FNUZ: Fields(4, 8),
    E5M2: Fields(5, 8),
    E5M2FNUZ: Fields(5, 8),
    E2M3: Fields(6, 8),
    E3M2: Fields(7, 8),
}
SHAPE_BYTES = 9 * 8
SMALL_FLOAT_EXPONENT = 27
"""The library reads an FP8 or FP6 number as 2**(27 - bias) times less than it is; the factor makes up for it."""


def fields_of(element: Element, narrowest: int = 2) -> Fields | None:
    """How the element's codes are stored, None where the library does not read it."""
    if not element.is_integer:
        return FLOATS.get(element)
    return next(fields for bits, fields in INTEGERS.items() if bits >= max(element.bits, narrowest))


def scale_dtype(element: Element) -> torch.dtype:
    """The dtype that scales stored in the element are held in; every number of it is exact."""
    return NARROW_SCALES.get(element.name, torch.float32 if element.bits > 8 else torch.bfloat16)


def blocks_bytes(request: LinearRequest, fields: Fields) -> int:
    """Bytes of the prepared weight, act-order aside."""
    weight, shape = request.key.weight, (request.rows, request.columns)
    width = min(weight.granularity.extents(shape)[1], max(1, request.columns))
    groups, rows = -(-request.columns // width), -(-request.rows // BLOCK_ROWS) * BLOCK_ROWS
    slots = -(-width // fields.slots) * fields.slots
    scale = scale_dtype(weight.scale.element).itemsize
    if weight.global_scale and weight.global_scale.granularity != TENSOR:
        scale = torch.float32.itemsize  # each row's factor is multiplied in
    return rows * groups * (slots * fields.bits // 8 + scale + (not weight.symmetric)) + SHAPE_BYTES


def prepare_blocks(plain: QuantizedTensor, fields: Fields) -> Prepared:
    """The weight in the layout of this file, `shape` describing it to the library.

    Args:
        plain: a record in the plain layout.
        fields: from `fields_of` its element.

    Raises:
        CheckpointError: a code lies outside its element's range, or is NaN or infinite.
    """
    element, (rows, columns) = plain.key.element, plain.shape
    slots = _Slots.of(plain, fields)
    lift = -int(element.min) if element.is_integer and element.min < 0 else 0
    scale, factor = _scales(plain)
    zero, power = (lift, 0) if element.is_integer else _as_read(element)
    factor *= 2.0**power
    tensors = {"words": _words(_unsigned(plain, lift), slots, fields), "scale": _by_block(scale, plain)}
    minimum = plain["minimum"].float() if "minimum" in plain else None
    if FLOAT_ZERO_POINT in extras_of(plain):
        shift = -plain["zero_point"].float() * effective_scale(plain)
        minimum = shift if minimum is None else minimum + shift
    elif "zero_point" in plain:
        zeros = decode(plain["zero_point"], element) + lift
        tensors["zero"] = _by_block(zeros.to(torch.uint8), plain)
    if minimum is not None:
        tensors["minimum"] = _by_block(minimum / factor, plain)
    if slots.features is not None:
        tensors["features"] = slots.features.reshape(-1).int()
    bits = struct.unpack("i", struct.pack("f", factor))[0]
    described = [rows, columns, slots.groups, slots.size, slots.width, fields.number, DTYPES[scale.dtype], zero, bits]
    tensors["shape"] = torch.tensor(described, dtype=torch.int64)
    return Prepared(tensors, {"rows": rows, "columns": columns})


def _as_read(element: Element) -> tuple[int, int]:
    """What the library reads in place of a small float: the zero point and the power of two that it lacks."""
    return (12, -1) if element == E2M1 else (0, SMALL_FLOAT_EXPONENT - element.bias)


@dataclass(frozen=True)
class _Slots:
    """Places for input features: `groups` of `size` slots, of which `width` are taken.

    Attributes:
        features: int64 [groups, size], the input feature of each slot, -1 for none; None where they are in order.
    """

    groups: int
    size: int
    width: int
    features: Tensor | None

    @classmethod
    def of(cls, plain: QuantizedTensor, fields: Fields) -> _Slots:
        columns = plain.shape[-1]
        width = min(plain.key.granularity.extents(plain.shape)[1], columns)
        if "order" not in plain:
            return cls(-(-columns // width), -(-width // fields.slots) * fields.slots, width, None)
        order = plain["order"].long()
        groups = plain["scale"].shape[-1]
        counts = torch.bincount(order, minlength=groups)
        size = -(-int(counts.max()) // fields.slots) * fields.slots
        ranked = torch.argsort(order, stable=True)
        starts = counts.cumsum(0) - counts
        places = torch.arange(columns) - starts[order[ranked]]
        features = torch.full((groups, size), -1)
        features[order[ranked], places] = ranked
        return cls(groups, size, width, features)


def _unsigned(plain: QuantizedTensor, lift: int) -> Tensor:
    """Codes as uint8 [N, K]: an integer's number plus `lift`, a float's bits."""
    element, codes = plain.key.element, plain["codes"]
    if element.is_integer:
        low, high = (int(extreme) - element.bias for extreme in torch.aminmax(codes))
        if low < element.min or high > element.max:
            raise CheckpointError(
                f"Weights from {low} to {high} are stored as {element}, which ends at {element.min:.0f} and "
                f"{element.max:.0f}.",
                "Get the file again.",
            )
        return (codes.view(torch.uint8) + (lift - element.bias)).to(torch.uint8)  # wraps around as it must
    bits = codes.view(torch.uint8)
    table = torch.full((256,), torch.inf)
    table[: 1 << element.bits] = torch.tensor(element.values)
    bad = ~table.isfinite()
    if bool(bad.index_select(0, bits.flatten().int()).any()):
        raise CheckpointError(
            f"Weights stored as {element} hold codes that are no finite number.", "Get the file again."
        )
    return bits


def _words(codes: Tensor, slots: _Slots, fields: Fields) -> Tensor:
    """int32 [N / 16, words, 16] of uint8 codes [N, K]."""
    rows, columns = codes.shape
    padded = -(-rows // BLOCK_ROWS) * BLOCK_ROWS
    total = slots.groups * slots.size
    if slots.features is not None:
        taken = slots.features.reshape(-1) >= 0
        spread = codes.new_zeros(padded, total)
        spread[:rows, taken] = codes[:, slots.features.reshape(-1)[taken]]
    elif (padded, total) == (rows, columns):
        spread = codes
    else:
        whole = codes.new_zeros(padded, slots.groups * slots.width)
        whole[:rows, :columns] = codes
        spread = codes.new_zeros(padded, slots.groups, slots.size)
        spread[..., : slots.width] = whole.view(padded, slots.groups, slots.width)
    parts = spread.reshape(padded // BLOCK_ROWS, BLOCK_ROWS, total // fields.slots, fields.slots)
    words = torch.zeros(parts.shape[:-1], dtype=torch.int32)
    for slot in range(fields.slots):
        words |= parts[..., slot].int() << (slot * fields.bits)
    return words.transpose(1, 2).contiguous()


def _scales(plain: QuantizedTensor) -> tuple[Tensor, float]:
    """Scales [R', G] in the dtype that holds them exactly, and the factor that they lack."""
    stored, factor = plain.key.scale.element, 1.0
    one_global = "global_scale" in plain and plain["global_scale"].numel() == 1
    if one_global:
        factor = float(plain["global_scale"])
    scale = decode(plain["scale"], stored) if one_global else effective_scale(plain)
    narrow = scale.to(scale_dtype(stored))
    return (narrow if torch.equal(narrow.float(), scale) else scale), factor


def _by_block(values: Tensor, plain: QuantizedTensor) -> Tensor:
    """[R', G] -> [N / 16, G, 16], rows beyond N zero."""
    height = plain.key.granularity.extents(plain.shape)[0]
    rows = plain.shape[0]
    padded = -(-rows // BLOCK_ROWS) * BLOCK_ROWS
    tall = values.new_zeros(padded, values.shape[-1])
    tall[:rows] = values.repeat_interleave(height, 0)[:rows]
    return tall.view(padded // BLOCK_ROWS, BLOCK_ROWS, -1).transpose(1, 2).contiguous()
