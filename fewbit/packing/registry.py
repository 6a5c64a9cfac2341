"""Every packing of this folder by name, and what they do to whole records."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import fewbit.packing
from fewbit.discovery import implementations
from fewbit.numerics import QuantizedTensor, dequantize
from fewbit.packing.interface import Packing
from fewbit.spec.layout import PLAIN, Layout

if TYPE_CHECKING:
    from torch import Tensor


@cache
def packings() -> dict[str, Packing]:
    """Every packing by name."""
    return implementations(fewbit.packing, Packing)


def pack_record(record: QuantizedTensor, layout: Layout, zero_point_layout: Layout = PLAIN) -> QuantizedTensor:
    """The same record with its codes and zero points in other layouts."""
    plain = unpack_record(record)
    changes = {"codes": packings()[layout.packing].pack(plain["codes"], layout)}
    if "zero_point" in plain:
        changes["zero_point"] = packings()[zero_point_layout.packing].pack(plain["zero_point"], zero_point_layout)
    return replace(plain.with_tensors(**changes), layout=layout, zero_point_layout=zero_point_layout)


def unpack_record(record: QuantizedTensor) -> QuantizedTensor:
    """The same record in the plain layout."""
    if record.layout == PLAIN and record.zero_point_layout == PLAIN:
        return record
    element, scale_shape = record.key.element, record.key.granularity.scale_shape(record.shape)
    codes = packings()[record.layout.packing].unpack(record["codes"], record.layout, element, record.shape)
    changes = {"codes": codes}
    if "zero_point" in record:
        layout = record.zero_point_layout
        changes["zero_point"] = packings()[layout.packing].unpack(record["zero_point"], layout, element, scale_shape)
    return replace(record.with_tensors(**changes), layout=PLAIN, zero_point_layout=PLAIN)


def dequantize_record(record: QuantizedTensor) -> Tensor:
    """The numbers a record in any layout stands for, float32 of its logical shape."""
    return dequantize(unpack_record(record))
