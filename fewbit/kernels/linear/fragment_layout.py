"""Weight fragments: the prepared layout of 4-bit weights whose tensor-core operand stays in registers.

A unit is 64 output features by 128 input features: codes, then scales, then zero points, in one run of bytes that the
copy engine moves at once; uint8 [N/64, K/128, bytes]. A thread of a warpgroup finds its share of 64 input features in
16 bytes, a word for each 16 (`fragment_words`): in the fragment of `wgmma` a thread has two output features of its
warp's 16 and four input features twice, and since any order of output features will do, the two are neighbours, which
the result is then stored by.

Both axes are padded with weights under scales of zero, or that are zero. Scales of groups longer than 128 features, and
of rows, are repeated for each 128.

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
from fewbit.spec.element import E2M1, E4M3, E8M0
from fewbit.spec.key import QuantKey

ROWS, DEPTH = 64, 128
GROUPS = (128, 64, 32)  # input features under one scale of integers, the fewest scales first
FLOAT_GROUPS = {E4M3: 16, E8M0: 32}  # the same of E2M1, by what its scales are
CODE_BYTES = ROWS * DEPTH // 2
MAGIC = {"bf16": 128, "f16": 1024}
"""What an integer in the low mantissa bits of a float counts from."""
OFFSET = 8  # of signed codes; without zero points the kernel takes it for granted
INTEGER = "integers"  # of up to 4 bits
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}


@dataclass(frozen=True)
class Decoding:
    """What a kernel is compiled for: fields of a `FragmentLayout`."""

    group: int
    has_zero: bool
    dtype: str
    operand: str
    element: str = INTEGER
    folds: bool = False

    @property
    def is_fp8(self) -> bool:
        """Whether tensor cores multiply E4M3."""
        return self.operand == E4M3.name

    @property
    def scale_width(self) -> int:
        """Bytes of a stored scale."""
        return 1 if self.folds else 2

    @property
    def row_scaled(self) -> bool:
        """Whether there are scales of output features."""
        return self.element != INTEGER

    @property
    def sums_groups(self) -> bool:
        """Whether sums leave the tensor cores after every group, to be scaled."""
        return self.is_fp8 and not self.folds


@dataclass(frozen=True)
class FragmentLayout(WrittenLayout):
    """Where the codes, scales and zero points of a weight [rows, columns] lie; see the head of this file.

    Attributes:
        group: input features under one stored scale.
        dtype: of results, and of scales that are no bytes, `bf16` or `f16`.
        offset: what is added to an integer before it is stored.
        has_zero: whether zero points are stored, as they are for unsigned codes even if they are all zero.
        operand: what tensor cores multiply: the dtype, or `e4m3`.
        element: `integers` or `e2m1`.
        folds: whether scales are bytes that decoding multiplies in, so that all of K is summed in the tensor cores.
    """

    rows: int
    columns: int
    group: int
    dtype: str
    offset: int
    has_zero: bool
    operand: str
    element: str = INTEGER
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
        return self.decoding.scale_width * ROWS * (DEPTH // self.group)

    @property
    def unit_bytes(self) -> int:
        return CODE_BYTES + self.scale_bytes * (1 + self.has_zero)

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
    if request.dtype not in DTYPES:
        return None
    if key.element == E2M1:
        group = _float_group(key, request, operand)
        return group and FragmentLayout(
            *shape, group, request.dtype, 0, False, operand or request.dtype, E2M1.name, True
        )
    group = _integer_group(key, request)
    if group is None:
        return None
    signed = key.element.min < 0
    has_zero = not key.symmetric or not signed
    if operand is None:
        return FragmentLayout(*shape, group, request.dtype, OFFSET if signed else 0, has_zero, request.dtype)
    return None if has_zero else FragmentLayout(*shape, group, request.dtype, 0, False, operand)


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


def _integer_group(key: QuantKey, request: LinearRequest) -> int | None:
    """Input features under a stored scale of integers, None where they or their scales are not what kernels take."""
    element, columns = key.element, request.columns
    if not element.is_integer or element.max - element.min > 15 or key.global_scale is not None:
        return None
    if key.scale.element.name != request.dtype:
        return None
    width = min(key.granularity.extents((request.rows, columns))[1], columns)
    return next((size for size in GROUPS if width >= columns or (width % size == 0 and columns % size == 0)), None)
