"""Weight tiles: the prepared layout of weights that Triton programs decode in registers.

Tiles are 64 output features high and one *unit* of input features wide. A unit is F runs of C input features, F fields
to a 16-bit word: word c of a row holds feature c of every run, so that the fields of one word belong to F different
positions of the tensor cores and no register moves after decoding. Tiles are contiguous: int16 [N/64, K/unit, 64, C],
both axes padded with weights that count nothing.

Fields are 2, 4 or 8 bits wide; widths between take the next one. Integers of 2 and 4 bits are stored with an offset,
int8 in two's complement; `e2m1` is spread over its word as `programs.decode` wants it.

Scales of groups are packed into int32 words [groups or units, N], as many a word as fit, beside int8 zero points in the
same order. A scale of a whole row is applied after the last sum, and so are global scales, one or one a row. Two kinds
of scales are recoded so that decoding can multiply them in, exactly:

* NVFP4's E4M3 scales become five exponent bits over three of mantissa without sign, zero or subnormals: a sign goes
  into the weights' codes, a group under a scale of zero gets codes of zero. The product with an E2M1 number has six
  significant bits, which bf16 and f16 hold.
* E8M0 exponents count from the tensor's largest, which stands where decoded numbers come out as they are; groups whose
  numbers are below 2**-240 of the largest get codes of zero. In bf16 the product is exact; f16 has too few exponents
  and scales sums instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fewbit.kernels.interface import LinearRequest
from fewbit.kernels.linear.operands import integers_in_range, row_scales, spread
from fewbit.kernels.linear.recoded_scales import absorbed, e5m3_bits, e5m3_numbers
from fewbit.kernels.linear.written_layout import WrittenLayout
from fewbit.numerics import QuantizedTensor, decode, effective_scale
from fewbit.spec.element import E2M1, E4M3, E5M2, Element
from fewbit.spec.granularity import CHANNEL, TENSOR
from fewbit.spec.key import QuantKey

TILE_ROWS = 64
GROUPS = (128, 64, 32, 16)  # input features under one scale, the fewest scales first
SCALED_GROUP = 16
SCALED_EXPONENT = 7  # decoding multiplies by 2**-7 as well, which keeps E4M3 scales within f16
FRACTIONS = {"e2m1": (126, 14), "e4m3": (120, 8), "e5m2": (112, 0)}
"""Powers of two by which floats are too small once their bits are in place, in bf16 and in f16."""
_SCALE_BITS = {"bf16": 16, "f16": 16, "f32": 32, "e8m0": 8, "e5m3": 8}
_FLOATS = {E2M1: "e2m1", E4M3: "e4m3", E5M2: "e5m2"}
_E2M1_RUNS = ((0x8, 12), (0x7, 6)), ((0x8, 9), (0x7, 3)), ((0x8, 6), (0x7, 0)), ((0x8, 11), (0x4, 11), (0x3, 10))
"""Field -> (mask of code bits, distance to the left) where they lie in the word."""


@dataclass(frozen=True)
class TileLayout(WrittenLayout):
    """Where the fields, scales and zero points of a weight [rows, columns] lie; see the head of this file.

    Attributes:
        kind: `integer`, `e2m1`, `e4m3` or `e5m2`.
        bits: width of a field.
        run: input features of a run, a power of two from 16.
        group: input features under one scale, 0 where a scale holds for a whole row.
        scale_kind: `bf16`, `f16`, `f32`, `e8m0`, or `e5m3` where decoding multiplies the scales in.
        offset: what is added to an integer before it is stored.
        has_zero: whether zero points are stored.
        decodes_to: what a weight that is decoded first becomes: `e4m3` codes for FP8 tensor cores (`tile_codes`), or,
            where it is empty, numbers of x's dtype.
    """

    kind: str
    bits: int
    rows: int
    columns: int
    run: int
    group: int
    scale_kind: str
    offset: int
    has_zero: bool
    decodes_to: str = ""

    @property
    def fields(self) -> int:
        """Fields of a word, runs of a unit."""
        return 16 // self.bits

    @property
    def unit(self) -> int:
        """Input features of a tile."""
        return self.fields * self.run

    @cached_property
    def units(self) -> int:
        return -(-self.columns // self.unit)

    @cached_property
    def padded_rows(self) -> int:
        return -(-self.rows // TILE_ROWS) * TILE_ROWS

    @property
    def largest_exponent(self) -> int:
        """The code of the largest E8M0 scale."""
        return 127 + FRACTIONS.get(self.kind, (0, 0))[0]

    def scales_operands(self, dtype: torch.dtype) -> bool:
        """Whether decoding to the dtype multiplies the scales in."""
        recoded = self.scale_kind == "e8m0" and self.kind != "integer" and self.group == 32
        return self.scale_kind == "e5m3" or (recoded and dtype == torch.bfloat16)

    def can_fold(self, dtype: torch.dtype) -> bool:
        """Whether scales may multiply decoded numbers of the dtype: they have it, or decoding multiplies them in."""
        same = {"bf16": torch.bfloat16, "f16": torch.float16}.get(self.scale_kind) == dtype
        return same or not self.group or self.scales_operands(dtype)

    @property
    def groups(self) -> int:
        """Groups of a unit, 1 where a group is longer than a unit, 0 where scales hold for rows."""
        return max(1, self.unit // self.group) if self.group else 0

    @property
    def units_per_group(self) -> int:
        return max(1, self.group // self.unit)

    @property
    def scale_bits(self) -> int:
        return _SCALE_BITS[self.scale_kind]

    @property
    def nbytes(self) -> int:
        """Bytes of all prepared tensors, counters aside."""
        words = self._word_rows(self.scale_bits) + (self._word_rows(8) if self.has_zero else 0)
        return self.padded_rows * (self.units * self.run * 2 + words * 4 + (12 if self.decodes_to else 4))

    def _word_rows(self, bits: int) -> int:
        if not self.group:
            return 0
        return -(-self.units // self.units_per_group) * -(-self.groups * bits // 32)


def layout_of(request: LinearRequest) -> TileLayout | None:
    """The layout of a request's weight, or None where it has none."""
    key, rows, columns = request.key.weight, request.rows, request.columns
    kind = _kind(key.element)
    group = group_of(key, rows, columns)
    if kind is None or group is None or rows < 1 or columns < 1:
        return None
    if key.global_scale and key.global_scale.granularity not in (TENSOR, CHANNEL):
        return None
    width = _field_bits(key.element)
    scaled = kind == "e2m1" and group == SCALED_GROUP and key.scale.element == E4M3
    name = key.scale.element.name
    scale_kind = "e5m3" if scaled else "bf16" if key.scale.element == E4M3 else name if name in _SCALE_BITS else "f32"
    scale_kind = scale_kind if group else "f32"
    layout = TileLayout(
        kind, width, rows, columns, 0, group, scale_kind, _offset(key.element, width), not key.symmetric
    )
    longest = 32 if scaled else min(group or 64, 64 if width > 2 else 32)
    runs = [run for run in (64, 32, 16) if run <= longest]
    fitting = (run for run in runs if columns % replace(layout, run=run).unit == 0)
    return replace(layout, run=next(fitting, 16))


def group_of(key: QuantKey, rows: int, columns: int) -> int | None:
    """Input features under one scale as tiles store them: 0 for whole rows, None where no group of theirs fits."""
    width = key.granularity.extents((rows, columns))[1]
    if width >= columns and key.symmetric:
        return 0
    width = min(width, columns)
    return next((size for size in GROUPS if width % size == 0 and columns % size == 0), None)


def _kind(element: Element) -> str | None:
    return "integer" if element.is_integer else _FLOATS.get(element)


def _field_bits(element: Element) -> int:
    return next(bits for bits in (2, 4, 8) if element.bits <= bits)


def _offset(element: Element, width: int) -> int:
    """What makes the element's integers fit the field: plain bits below 8, two's complement in 8."""
    if not element.is_integer:
        return 0
    if width == 8:
        return -128 if element.max > 127 else 0
    return 1 << (width - 1) if element.min < 0 else 0


def tile_tensors(plain: QuantizedTensor, layout: TileLayout) -> dict[str, Tensor]:
    """The prepared tensors of a plain record.

    Returns:
        `tiles` int16, `scale_words` and `zero_words` int32 (empty where there are none), `row_scale` float32 [N].

    Raises:
        CheckpointError: a code lies outside the element's range; packed, it would change its neighbours.
    """
    stored = _stored(plain, layout)
    row_scale = torch.ones(layout.rows, device=stored.device)
    scale_words = zero_words = torch.empty(0, dtype=torch.int32, device=stored.device)
    if not layout.group:
        row_scale = row_scales(plain)
    else:
        row_scale = row_scale * _global_scale(plain, layout)
        bits = _scale_bits(plain, layout)
        if layout.scale_kind == "e5m3":
            stored = absorbed(stored, spread(plain["scale"].float(), plain, layout.group), layout.group)
            row_scale = row_scale * 2.0**SCALED_EXPONENT
        if layout.scale_kind == "e8m0":
            largest = int(bits.max()) if bits.numel() else 0
            row_scale = (row_scale.double() * 2.0 ** (largest - 127)).float()
            bits = bits - largest + layout.largest_exponent
            stored = absorbed(stored, (bits > 0).float(), layout.group)
            bits = bits.clamp(min=1)
        scale_words = _words(bits, layout, layout.scale_bits)
    if layout.has_zero:
        zero = decode(plain["zero_point"], plain.key.element).int() + layout.offset
        zero_words = _words(spread(zero, plain, layout.group) & 0xFF, layout, 8)
    padded = torch.nn.functional.pad(row_scale.float(), (0, layout.padded_rows - layout.rows))
    return {
        "tiles": _tiles(stored, layout),
        "scale_words": scale_words,
        "zero_words": zero_words,
        "row_scale": padded.contiguous(),
    }


def _stored(plain: QuantizedTensor, layout: TileLayout) -> Tensor:
    """int32 fields [N, K]."""
    if layout.kind != "integer":
        return plain["codes"].view(torch.uint8).int()
    fields = integers_in_range(plain) + layout.offset
    return fields & ((1 << layout.bits) - 1)


def _tiles(stored: Tensor, layout: TileLayout) -> Tensor:
    """int32 fields [N, K] -> int16 [N/64, units, 64, run]."""
    width = layout.units * layout.unit - layout.columns
    padded = torch.nn.functional.pad(stored, (0, width, 0, layout.padded_rows - layout.rows))
    runs = padded.view(-1, TILE_ROWS, layout.units, layout.fields, layout.run)
    words = torch.zeros_like(runs[:, :, :, 0])
    for index in range(layout.fields):
        words |= _placed(runs[:, :, :, index], index, layout)
    signed = torch.where(words >= 1 << 15, words - (1 << 16), words)
    return signed.to(torch.int16).transpose(1, 2).contiguous()


def _placed(field: Tensor, index: int, layout: TileLayout) -> Tensor:
    if layout.kind != "e2m1":
        return field << (layout.bits * index)
    placed = torch.zeros_like(field)
    for mask, distance in _E2M1_RUNS[index]:
        placed |= (field & mask) << distance
    return placed


def _global_scale(plain: QuantizedTensor, layout: TileLayout) -> Tensor:
    """What packed scales do not hold: a factor, float32 [1], or one a row, [N], where joined members keep their own."""
    if layout.scale_kind == "f32" or "global_scale" not in plain:
        return torch.ones(1, device=plain["codes"].device)
    return plain["global_scale"].float().reshape(-1)


def _scale_bits(plain: QuantizedTensor, layout: TileLayout) -> Tensor:
    """The scales' bits as int32, [N, K / group]."""
    if layout.scale_kind == "f32":
        return spread(effective_scale(plain), plain, layout.group).view(torch.int32)
    if layout.scale_kind == "e5m3":
        return e5m3_bits(spread(plain["scale"].float(), plain, layout.group))
    if layout.scale_kind == "e8m0":
        return spread(plain["scale"].view(torch.uint8), plain, layout.group).int()
    half = {"bf16": torch.bfloat16, "f16": torch.float16}[layout.scale_kind]
    return spread(plain["scale"].to(half), plain, layout.group).view(torch.int16).int() & 0xFFFF


def _words(values: Tensor, layout: TileLayout, bits: int) -> Tensor:
    """int32 values [N, K / group] -> int32 words [groups or units times words, N padded]."""
    per_word = min(32 // bits, layout.groups)
    missing = -values.shape[1] % layout.groups
    padded = torch.nn.functional.pad(values, (0, missing, 0, layout.padded_rows - layout.rows))
    parts = padded.t().reshape(-1, -(-layout.groups // per_word), per_word, layout.padded_rows)
    words = parts[:, :, 0].clone()
    for position in range(1, per_word):
        words |= parts[:, :, position] << (bits * position)
    return words.reshape(-1, layout.padded_rows).contiguous()


def tile_numbers(tensors: dict[str, Tensor], layout: TileLayout) -> Tensor:
    """The numbers that prepared tensors stand for, float32 [N, K]: the inverse of `tile_tensors`."""
    stored = stored_fields(tensors["tiles"], layout)[: layout.rows, : layout.columns]
    if layout.kind == "integer":
        numbers = (stored - 256 * (stored > 127) if layout.bits == 8 else stored).float()
        zero: Tensor | int = layout.offset
        if layout.has_zero:
            bits = _over_groups(tensors["zero_words"], layout, 8)
            zero = bits - 256 * (bits > 127)
        numbers = numbers - zero
    else:
        element = next(element for element, kind in _FLOATS.items() if kind == layout.kind)
        numbers = decode(stored.to(torch.uint8), element)
    row_scale = tensors["row_scale"][: layout.rows, None]
    if layout.group:
        bits = _over_groups(tensors["scale_words"], layout, layout.scale_bits)
        numbers = numbers * _scale_numbers(bits, layout)
    return numbers * row_scale


def stored_fields(tiles: Tensor, layout: TileLayout) -> Tensor:
    """The fields of tiles with padding, int32 [N padded, K padded]."""
    words = tiles.transpose(1, 2).int() & 0xFFFF
    runs = torch.stack([_taken(words, index, layout) for index in range(layout.fields)], 3)
    return runs.reshape(layout.padded_rows, -1)


def _taken(words: Tensor, index: int, layout: TileLayout) -> Tensor:
    if layout.kind != "e2m1":
        return (words >> (layout.bits * index)) & ((1 << layout.bits) - 1)
    taken = torch.zeros_like(words)
    for mask, distance in _E2M1_RUNS[index]:
        taken |= (words >> distance) & mask
    return taken


def _over_groups(words: Tensor, layout: TileLayout, bits: int) -> Tensor:
    """Words of values -> one value for each number, int32 [N, K]."""
    values = of_groups(words, layout, bits)
    return values.repeat_interleave(layout.group, 1)[: layout.rows, : layout.columns]


def of_groups(words: Tensor, layout: TileLayout, bits: int) -> Tensor:
    """Words of values -> one value for each group, int32 [N padded, groups padded]."""
    per_word = min(32 // bits, layout.groups)
    mask = (1 << bits) - 1 if bits < 32 else -1
    values = torch.stack([(words >> (bits * position)) & mask for position in range(per_word)], 1)
    count = -(-layout.groups // per_word) * per_word
    return values.reshape(-1, count, layout.padded_rows)[:, : layout.groups].reshape(-1, layout.padded_rows).t()


def _scale_numbers(bits: Tensor, layout: TileLayout) -> Tensor:
    if layout.scale_kind == "f32":
        return bits.contiguous().view(torch.float32)
    if layout.scale_kind == "bf16":
        return (bits << 16).contiguous().view(torch.float32)
    if layout.scale_kind == "f16":
        return bits.to(torch.int16).contiguous().view(torch.float16).float()
    if layout.scale_kind == "e8m0":
        return torch.ldexp(torch.ones_like(bits, dtype=torch.float32), bits - layout.largest_exponent)
    return e5m3_numbers(bits) * 2.0**-SCALED_EXPONENT
