"""Weight fragments: the prepared layout of weights of 4 or 8 bits whose tensor-core operand stays in registers.

A unit is 64 output features by 128 input features: codes, then scales, then zero points, in one run of bytes that the
copy engine moves at once; uint8 [N/64, K/128, bytes]. A thread of a warpgroup finds its share of 64 input features, or
32 where codes have 8 bits, in 16 bytes, a word or two for each 16 (`fragment_words`): in the fragment of `wgmma` a
thread has two output features of its warp's 16 and four input features twice, and since any order of output features
will do, the two are neighbours, which the result is then stored by.

Both axes are padded with weights under scales of zero, or that are zero. Scales of groups longer than 128 features, and
of rows, are repeated for each 128.

Codes of 8 bits are bytes, E4M3's or in two's complement. Where one scale holds for a row it is float32 and multiplies
the result.

E2M1 has scales of a byte, which decoding multiplies in exactly, and float32 scales of output features beside the units:

* NVFP4's E4M3 scales are five bits of exponent over three of mantissa, see `recoded_scales`; numbers are decoded times
  2**-7, which keeps them within f16.
* E8M0's exponents count from the tensor's largest for bf16. For `e4m3` they count in binades down from the row's
  largest, which E4M3 holds together with the number where none that matters lies below 2**-11; a weight with a row
  where they lie further apart has them outside instead, as bf16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fewbit.kernels.interface import LinearRequest
from fewbit.kernels.linear.written_layout import WrittenLayout
from fewbit.spec import granularity
from fewbit.spec.element import E2M1, E4M3, E8M0, Element
from fewbit.spec.key import QuantKey

ROWS, DEPTH = 64, 128
GROUPS = (128, 64, 32)  # input features under one scale of integers, the fewest scales first
FLOAT_GROUPS = {E4M3: 16, E8M0: 32}  # the same of E2M1, by what its scales are
MAGIC = {"bf16": 128, "f16": 1024}
"""What an integer in the low mantissa bits of a float counts from."""
OFFSET = 8  # of signed codes; without zero points the kernel takes it for granted
INTEGERS, INT8 = "integers", "int8"  # of up to 4 bits, and of up to 8
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}


@dataclass(frozen=True)
class Decoding:
    """What a kernel is compiled for: fields of a `FragmentLayout`."""

    group: int
    has_zero: bool
    dtype: str
    operand: str
    element: str = INTEGERS
    folds: bool = False

    @property
    def is_fp8(self) -> bool:
        """Whether tensor cores multiply E4M3."""
        return self.operand == E4M3.name

    @property
    def code_bits(self) -> int:
        """Of a stored code."""
        return 8 if self.element in (INT8, E4M3.name) else 4

    @property
    def scale_width(self) -> int:
        """Bytes of a stored scale."""
        if not self.group:
            return 0
        return 1 if self.folds else 2

    @property
    def row_scaled(self) -> bool:
        """Whether there are scales of output features."""
        return not self.group or self.element == E2M1.name

    @property
    def sums_groups(self) -> bool:
        """Whether sums leave the tensor cores after every group, to be scaled."""
        return self.is_fp8 and not self.folds


@dataclass(frozen=True)
class FragmentLayout(WrittenLayout):
    """Where the codes, scales and zero points of a weight [rows, columns] lie; see the head of this file.

    Attributes:
        group: input features under one stored scale, 0 where there are scales of output features alone.
        dtype: of results, and of scales that are no bytes, `bf16` or `f16`.
        offset: what is added to an integer before it is stored.
        has_zero: whether zero points are stored, as they are for unsigned codes even if they are all zero.
        operand: what tensor cores multiply: the dtype, or `e4m3`.
        element: `integers`, `int8`, `e2m1` or `e4m3`.
        folds: whether scales are bytes that decoding multiplies in, so that all of K is summed in the tensor cores.
    """

    rows: int
    columns: int
    group: int
    dtype: str
    offset: int
    has_zero: bool
    operand: str
    element: str = INTEGERS
    folds: bool = False

    @property
    def decoding(self) -> Decoding:
        return Decoding(self.group, self.has_zero, self.dtype, self.operand, self.element, self.folds)

    @property
    def operand_bytes(self) -> int:
        """Bytes of an input feature of x."""
        return 1 if self.decoding.is_fp8 else 2

    @property
    def units(self) -> int:
        """Units of output features."""
        return -(-self.rows // ROWS)

    @property
    def depths(self) -> int:
        """Units of input features."""
        return -(-self.columns // DEPTH)

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of a unit, or of its zero points."""
        return self.decoding.scale_width * ROWS * (DEPTH // (self.group or DEPTH))

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes of a unit."""
        return ROWS * DEPTH * self.decoding.code_bits // 8

    @property
    def unit_bytes(self) -> int:
        return self.code_bytes + self.scale_bytes * (1 + self.has_zero)

    @property
    def nbytes(self) -> int:
        """Bytes of the prepared weight and its scales of output features."""
        return self.units * (self.depths * self.unit_bytes + 4 * ROWS * self.decoding.row_scaled)


def fragment_layout_of(request: LinearRequest, operand: str | None = None) -> FragmentLayout | None:
    """The layout of a request's weight, or None where it has none.

    Args:
        operand: what tensor cores multiply, `e4m3`, or None for the request's dtype.
    """
    key, shape = request.key.weight, (request.rows, request.columns)
    element = _element(key.element)
    if request.dtype not in DTYPES or element is None:
        return None
    group = _float_group(key, request, operand) if element == E2M1.name else _group(key, request, element)
    taken = operand is None or element == E2M1.name or (element == INTEGERS and key.symmetric and key.element.min < 0)
    if group is None or not taken:
        return None
    signed = element != INTEGERS or key.element.min < 0
    offset = OFFSET if element == INTEGERS and signed and operand is None else 0
    has_zero = not key.symmetric or not signed
    folds = element == E2M1.name
    return FragmentLayout(*shape, group, request.dtype, offset, has_zero, operand or request.dtype, element, folds)


def _element(element: Element) -> str | None:
    """Which kind of codes an element has, see `FragmentLayout`; None where kernels take no such element."""
    if element in (E2M1, E4M3):
        return element.name
    if not element.is_integer:
        return None
    if element.max - element.min <= 15:
        return INTEGERS
    return INT8 if element.min >= -128 and element.max <= 127 else None


def _float_group(key: QuantKey, request: LinearRequest, operand: str | None) -> int | None:
    """Input features under a scale of E2M1, None where it or its scales are none that decoding multiplies in."""
    found = FLOAT_GROUPS.get(key.scale.element)
    if found is None or key.granularity != granularity.group(found) or request.columns % found or not key.symmetric:
        return None
    if key.global_scale is not None and key.global_scale.granularity not in (granularity.TENSOR, granularity.CHANNEL):
        return None
    if key.scale.element == E8M0:
        return found if request.dtype == "bf16" else None
    return found if operand is None else None


def _group(key: QuantKey, request: LinearRequest, element: str) -> int | None:
    """Input features under a stored scale of other elements, None where kernels take no such scales."""
    if key.global_scale is not None or (element != INTEGERS and not key.symmetric):
        return None
    columns = request.columns
    width = min(key.granularity.extents((request.rows, columns))[1], columns)
    if element != INTEGERS and width >= columns:
        return 0
    if element == E4M3.name or key.scale.element.name != request.dtype:
        return None
    return next((size for size in GROUPS if width >= columns or (width % size == 0 and columns % size == 0)), None)
