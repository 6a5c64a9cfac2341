"""The same numbers under another key: what a format that lacks a record's own key may hold instead, bit for bit.

Codes keep their meaning; what surrounds them is written out: a scale in a wider element or repeated over finer groups,
scales of scales and second-level scales multiplied out, zero points of zero, unsigned codes minus half their range. A
format of few widths may besides hold integers as wider ones, their zero points subtracted (`widenings`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

from fewbit.lazy import torch
from fewbit.numerics.blocks import from_blocks, over_blocks, to_blocks
from fewbit.numerics.cast import code_dtype, decode, encode
from fewbit.numerics.quantize import effective_scale
from fewbit.numerics.tensor import QuantizedTensor
from fewbit.spec.element import BF16, E4M3, E8M0, F16, F32, Element, integer
from fewbit.spec.granularity import CHANNEL, TENSOR, Granularity, block, group
from fewbit.spec.key import QuantKey
from fewbit.spec.layout import PLAIN

if TYPE_CHECKING:
    from torch import Tensor

_WIDER = {F16: (F32,), BF16: (F32,), E8M0: (BF16, F32), E4M3: (BF16, F16, F32)}
"""Elements that hold every number of a scale's element."""

_GROUPS = tuple(group(size) for size in (128, 64, 32, 16))
_BLOCKS = (block(128, 128), block(64, 64))


def restatements(record: QuantizedTensor) -> Iterator[QuantKey]:
    """Keys under which the record stands for the same float32 numbers: its own first, then the smallest ones.

    Args:
        record: in the plain layout.
    """
    key = record.key
    yield key
    # An act-order index counts groups as they are.
    granularities = () if "order" in record else _finer(key.granularity)
    symmetries = (True, False) if key.symmetric and _takes_zero_points(record) else (key.symmetric,)
    found = [
        replace(
            key,
            element=element,
            scale=replace(key.scale, element=scale, granularity=granularity),
            global_scale=key.global_scale if scale == key.scale.element else None,
            symmetric=symmetric,
        )
        for element, scale, granularity, symmetric in product(
            _elements(record), _scale_elements(record), (key.granularity, *granularities), symmetries
        )
    ]
    yield from sorted((k for k in dict.fromkeys(found) if k != key), key=lambda k: k.bits_per_weight(record.shape))


def reductions(record: QuantizedTensor) -> Iterator[QuantKey]:
    """Keys that say the same with less, the smallest first: larger rectangles where scales repeat, no zero points where
    all are zero, 16-bit scales that happen to be exact in another 16 bits. They undo `restate`, and hold for this
    record alone: the scales of others under its key may not allow it.

    Args:
        record: in the plain layout.
    """
    parts = [record.tensors[role] for role in ("scale", "zero_point", "minimum") if role in record]
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    if "order" in record or len(tensors) < len(parts):
        return
    key, zero_point = record.key, record.tensors.get("zero_point")
    integral = isinstance(zero_point, torch.Tensor) and key.element.signed and not zero_point.is_floating_point()
    symmetries = (True, False) if integral and not record["zero_point"].any() else (key.symmetric,)
    repeated = [
        larger
        for larger in (TENSOR, CHANNEL, *_BLOCKS, *_GROUPS)
        if key.granularity in _finer(larger) and all(_repeats(one, record, larger) for one in tensors)
    ]
    for granularity, symmetric in product((*repeated, key.granularity), symmetries):
        reduced = replace(key.with_granularity(granularity), symmetric=symmetric)
        if reduced != key:
            yield reduced
    for granularity, symmetric in product((*repeated, key.granularity, *_finer(key.granularity)), symmetries):
        for element in _exact_elements(record):
            yield replace(key.with_granularity(granularity).with_scale_element(element), symmetric=symmetric)


def widenings(record: QuantizedTensor) -> Iterator[QuantKey]:
    """Keys of wider integers without zero points, which hold every code less its zero point; the smallest first.

    Like `reductions` they hold for this record alone, as far as its scales have to be exact in another element.

    Args:
        record: in the plain layout.
    """
    key, zero_point = record.key, record.tensors.get("zero_point")
    floating = isinstance(zero_point, torch.Tensor) and zero_point.is_floating_point()
    beside = {"minimum", "codebook", "order", "global_scale"} & record.tensors.keys()
    if not key.element.is_integer or floating or beside or (key.symmetric and not key.element.signed):
        return
    if isinstance(record.tensors["scale"], QuantizedTensor):
        return
    found = [
        replace(key.with_granularity(granularity).with_scale_element(scale), element=integer(bits), symmetric=True)
        for bits, scale, granularity in product(
            range(key.element.bits + 1, 9),
            (*_scale_elements(record), *_exact_elements(record)),
            (key.granularity, *_finer(key.granularity)),
        )
    ]
    yield from sorted(found, key=lambda k: k.bits_per_weight(record.shape))


def restate(record: QuantizedTensor, key: QuantKey) -> QuantizedTensor:
    """The record under one of its `restatements`, `reductions` or `widenings`.

    Args:
        record: in the plain layout.
        key: from one of these.
    """
    if key == record.key:
        return record
    assert record.layout == PLAIN and record.zero_point_layout == PLAIN, "unpack the record before restating it"
    tensors: dict[str, Tensor] = {role: record[role] for role in record.tensors}
    wider = key.element.bits > record.key.element.bits
    if wider:
        tensors["codes"] = _without_zero_points(record)
    if key.scale.element != record.key.scale.element:
        tensors["scale"] = encode(_multiplied_out(record), key.scale.element)
        tensors.pop("global_scale", None)
    if key.symmetric and not record.key.symmetric:
        tensors.pop("zero_point", None)
    elif key.symmetric != record.key.symmetric:
        tensors["zero_point"] = torch.zeros_like(tensors["scale"], dtype=code_dtype(key.element))
    if key.granularity != record.key.granularity:
        for role in {"scale", "zero_point", "minimum"} & tensors.keys():
            tensors[role] = _spread(tensors[role], record.shape, record.key.granularity, key.granularity)
    if key.element != record.key.element and not wider:
        half = 1 << (key.element.bits - 1)
        for role in ("codes", "zero_point"):
            tensors[role] = (tensors[role].short() - half).to(torch.int8)
    return QuantizedTensor(key, record.shape, tensors)


def _elements(record: QuantizedTensor) -> tuple[Element, ...]:
    """The record's element, and the signed one of its width where codes and zero points may move together."""
    element, zero_point = record.key.element, record.tensors.get("zero_point")
    unsigned = element.is_integer and not element.signed and element.bits > 1
    integral = isinstance(zero_point, torch.Tensor) and not zero_point.is_floating_point()
    return (element, integer(element.bits)) if unsigned and integral else (element,)


def _scale_elements(record: QuantizedTensor) -> tuple[Element, ...]:
    if isinstance(record.tensors["scale"], QuantizedTensor):
        return (F32,)  # a float16 times a code of a few bits: exact
    own = record.key.scale.element
    return (own, F32) if "global_scale" in record else (own, *_WIDER.get(own, ()))


def _exact_elements(record: QuantizedTensor) -> tuple[Element, ...]:
    """Other 16-bit elements in which each of the record's float scales is what it is."""
    own = record.key.scale.element
    floats = [role for role in ("zero_point", "minimum") if role in record and record[role].is_floating_point()]
    if own not in (F16, BF16, F32) or "global_scale" in record or floats:
        return ()
    scale = record["scale"].double()
    narrow = {F16: torch.float16, BF16: torch.bfloat16}
    return tuple(
        element for element, dtype in narrow.items() if element != own and torch.equal(scale.to(dtype).double(), scale)
    )


def _without_zero_points(record: QuantizedTensor) -> Tensor:
    """The record's integers less their zero points, int8 [..., N, K]."""
    numbers = to_blocks(decode(record["codes"], record.key.element), record.key.granularity)
    if "zero_point" in record:
        numbers = numbers - over_blocks(decode(record["zero_point"], record.key.element))
    return from_blocks(numbers, record.shape).to(torch.int8).contiguous()


def _multiplied_out(record: QuantizedTensor) -> Tensor:
    scale = record["scale"]
    return (
        scale if isinstance(record.tensors["scale"], QuantizedTensor) else effective_scale(record).reshape(scale.shape)
    )


def _finer(granularity: Granularity) -> tuple[Granularity, ...]:
    """Granularities whose every rectangle lies within one of `granularity`."""
    if granularity.kind == "tensor":
        return (CHANNEL, _BLOCKS[0], *_GROUPS)
    if granularity == CHANNEL:
        return _GROUPS
    smaller = tuple(g for g in _GROUPS if granularity.columns % g.columns == 0 and g != granularity)
    own_columns = (group(granularity.columns),) if granularity.kind == "block" else ()
    return tuple(dict.fromkeys((*own_columns, *smaller)))


def _takes_zero_points(record: QuantizedTensor) -> bool:
    """Whether zero points of zero may be written beside the codes."""
    key = record.key
    plain = not {"minimum", "codebook"} & record.tensors.keys() and key.global_scale is None
    return key.element.is_integer and key.element.signed and key.element.bias == 0 and plain


def _repeats(values: Tensor, record: QuantizedTensor, larger: Granularity) -> bool:
    """Whether the values of the record's rectangles are the same in each rectangle of a coarser granularity."""
    own = record.key.granularity
    few = _spread(values, record.shape, own, larger)
    return torch.equal(_spread(few, record.shape, larger, own), values)


def _spread(values: Tensor, shape: tuple[int, ...], old: Granularity, new: Granularity) -> Tensor:
    """Values of rectangles [..., R', C'] for those of another granularity, each its first number's."""
    rows, columns = old.extents(shape)
    height, width = new.extents(shape)
    *_, new_rows, new_columns = new.scale_shape(shape)
    row = torch.arange(new_rows, device=values.device) * height // rows
    column = torch.arange(new_columns, device=values.device) * width // columns
    return values[..., row[:, None], column].contiguous()
