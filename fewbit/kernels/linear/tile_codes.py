"""Weight tiles decoded to E4M3 codes, exactly: what many rows of FP8 activations are multiplied with.

A number of a tile is a code times what its row counts in, and times the scale of its group where the scale stays
outside. Integers of magnitude up to 16 are codes as they are. E2M1 under E8M0 takes the scales of groups in: E4M3 holds
it times powers of two down to 2**-11 of the row's largest, which is brought to 2**6; a weight with a row whose scales
lie further apart is not decoded to codes. Other weights that E4M3 holds, with zero points or scales of rows, are not
taken: they have not run on a device.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fewbit.kernels.activation.rounding import covers_rows
from fewbit.kernels.interface import LinearRequest
from fewbit.kernels.linear.product_layout import BLOCK, EXACT_INTEGERS, ProductLayout
from fewbit.kernels.linear.recoded_scales import FOLDED_RANGE, FOLDED_TOP
from fewbit.kernels.linear.vendor_products import vendor_multiplies
from fewbit.kernels.linear.weight_tiles import TileLayout, of_groups, stored_fields
from fewbit.spec.element import E4M3, Element

LEAST_OF_ROWS = 100
"""Binades that a row's largest scale may lie below the tensor's: factors must be float32 numbers."""


def codes_layout(layout: TileLayout) -> ProductLayout:
    """The layout of the codes, as torch's products take them."""
    group = 0 if layout.kind == "e2m1" else layout.group
    return ProductLayout("e4m3", "codes", layout.rows, layout.columns, group, 0, "f32")


def with_codes(layout: TileLayout, request: LinearRequest) -> TileLayout:
    """The layout of a request whose activations are FP8: decoded to codes where these hold every number of it."""
    activation = request.key.activation
    if activation is None or activation.element != E4M3 or not covers_rows(activation):
        return layout
    held = _holds(layout, request.key.weight.element) and vendor_multiplies(codes_layout(layout))
    return replace(layout, decodes_to="e4m3") if held else layout


def _holds(layout: TileLayout, element: Element) -> bool:
    if layout.kind == "integer":
        largest = max(-int(element.min), int(element.max))
        return layout.group == BLOCK and not layout.has_zero and largest <= EXACT_INTEGERS
    return layout.kind == "e2m1" and layout.scale_kind == "e8m0" and layout.scales_operands(torch.bfloat16)


def code_scales(tensors: dict[str, Tensor], layout: TileLayout) -> Tensor | None:
    """What makes numbers of a decoded row codes, and what the row's codes count in, float32 [2, N padded].

    Returns:
        None where scales of a row lie too far apart.
    """
    row_scale = tensors["row_scale"]
    factor = torch.ones_like(row_scale)
    if layout.kind == "e2m1":
        exponents, used = _row_exponents(tensors, layout)
        largest = torch.where(used, exponents, 0).amax(1)
        near = exponents >= (largest - FOLDED_RANGE).clamp(min=layout.largest_exponent - LEAST_OF_ROWS)[:, None]
        if not bool(near[used].all()):
            return None
        shift = torch.where(used.any(1), layout.largest_exponent - largest + FOLDED_TOP, 0)
        factor = torch.ldexp(factor, shift)
    return torch.stack([factor, row_scale / factor])


def _row_exponents(tensors: dict[str, Tensor], layout: TileLayout) -> tuple[Tensor, Tensor]:
    """Codes of E8M0 scales, and whether their groups hold anything but zeros, [N padded, groups padded] both."""
    magnitudes = stored_fields(tensors["tiles"], layout) & 7
    used = magnitudes.ne(0).view(layout.padded_rows, -1, layout.group).any(-1)
    return of_groups(tensors["scale_words"], layout, layout.scale_bits), used
