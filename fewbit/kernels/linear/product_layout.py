"""The prepared layout of weights for products on 8-bit tensor cores: codes by rows, or pairs of 4-bit codes in bytes.

Codes are int8 [N, width] or E4M3 [N, width], width being K up to the next unit. Integers of up to 4 bits and E2M1 are
held in pairs, int8 [N, width / 2], a unit of two runs of C features in C bytes, so that no register moves after
decoding (`programs.nibbles`): for int8, byte c holds integer c of the first run in its lower and of the second run in
its upper half; for E4M3, four bytes hold codes 4c to 4c + 3 of both runs, see `_words`. Decoded bytes are the numbers
times a power of two, which `row_scale` takes away.

Scales of groups lie [groups, N] in a 16-bit dtype that holds them exactly, or in float32; a scale of a whole row, and
the second-level one, multiply the last sum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fewbit.kernels.activation.rounding import Rounding
from fewbit.kernels.interface import LinearRequest
from fewbit.kernels.linear.operands import integers_in_range, row_scales, spread
from fewbit.kernels.linear.recoded_scales import FOLDED_GROUP, FOLDED_TOP, folded
from fewbit.kernels.linear.weight_tiles import group_of
from fewbit.kernels.linear.written_layout import WrittenLayout
from fewbit.numerics import QuantizedTensor, decode, effective_scale
from fewbit.spec.element import E2M1, E4M3, E8M0, Element

LONGEST_UNIT = 128
SHORTEST = {"codes": 64, "integer": 32, "e2m1": 32}
"""Kind -> fewest input features under one scale: tensor cores multiply 32 at a time, and so are bytes read."""
BLOCK = 128
BLOCKS_APART = 4
"""Blocks along K come in fours; other numbers of them need padding that was not verified."""
EXACT_INTEGERS = 16
"""Integers up to here have no more bits than E4M3's four."""
_FACTORS = {("integer", "int8"): 2.0**-4, ("e2m1", "e4m3"): 2.0**-FOLDED_TOP}
SCALES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
CODES = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn}


@dataclass(frozen=True)
class ProductLayout(WrittenLayout):
    """Where the codes and scales of a weight [rows, columns] lie; see the head of this file.

    Attributes:
        operand: what the tensor cores multiply, `int8` or `e4m3`.
        kind: `codes` where operands are stored, else what pairs hold: `integer` or `e2m1`.
        group: input features under one weight scale, 0 where one holds for a whole row.
        x_group: the same of the activations.
        scale_dtype: `bf16`, `f16` or `f32`.
        block_rows: output features under one scale.
        folds: whether weights decoded to E4M3 hold their scales of groups: powers of two, none further than 2**-11 from
            the row's largest, which is in `row_scale`. `scale` is int32 then, a byte a group: what decoding takes from
            the exponents of a group's codes, eight times as much; [units or twice as many, N].
    """

    operand: str
    kind: str
    rows: int
    columns: int
    group: int
    x_group: int
    scale_dtype: str
    block_rows: int = 1
    folds: bool = False

    @property
    def bits(self) -> int:
        """Of a stored code."""
        return 8 if self.kind == "codes" else 4

    @property
    def step(self) -> int:
        """Input features that are summed before a scale may change."""
        if self.folds:
            return LONGEST_UNIT
        return min(self.group or LONGEST_UNIT, self.x_group or LONGEST_UNIT, LONGEST_UNIT)

    @property
    def run(self) -> int:
        """Bytes of a row in a unit: whole lines of memory where K allows."""
        if self.kind == "codes":
            return self.step
        runs = (run for run in (self.step, self.step // 2) if self.columns % (2 * run) == 0)
        return max(FOLDED_GROUP, next(runs, FOLDED_GROUP if self.folds else self.step // 2))

    @property
    def unit(self) -> int:
        """Input features that are read at a time."""
        return self.run * 8 // self.bits

    @property
    def units(self) -> int:
        return -(-self.columns // self.unit)

    @property
    def width(self) -> int:
        """Input features with padding."""
        return self.units * self.unit

    @property
    def nbytes(self) -> int:
        """Bytes of all prepared tensors, counters and what activations need aside."""
        groups = -(-self.columns // self.group) if self.group else 0
        size = 4 if self.scale_dtype == "f32" else 2
        blocks = self.rows // BLOCK * groups * 4 if self.in_blocks else 0
        scales = self.units * self.offset_words * 4 if self.folds else groups * size
        return self.rows * (self.units * self.run + scales + 4) + blocks

    @property
    def offset_words(self) -> int:
        """Of a unit, where scales are folded."""
        return -(-self.unit // (4 * FOLDED_GROUP))

    @property
    def is_described(self) -> bool:
        """Whether a program may read both sides through descriptors: codes in whole lines, no scale before the end."""
        return self.kind == "codes" and not (self.group or self.x_group) and self.run == LONGEST_UNIT

    @property
    def in_blocks(self) -> bool:
        """Whether scales lie in blocks of 128x128 on one side and groups of 128 on the other, as torch multiplies."""
        square = (self.group, self.block_rows, self.x_group) == (BLOCK, BLOCK, BLOCK)
        whole = self.rows % BLOCK == 0 and self.columns % (BLOCK * BLOCKS_APART) == 0
        return square and whole and self.kind == "codes" and self.operand == "e4m3"

    def decoded(self) -> ProductLayout:
        """The layout of the same weight as 8-bit codes."""
        return replace(self, kind="codes", group=0 if self.folds else self.group, folds=False)


def product_layout_of(request: LinearRequest, operand: str) -> ProductLayout | None:
    """The layout of a request's weight, or None where the operand cannot hold it or its scales are too close.

    Args:
        request: its activation key can be rounded by the programs.
        operand: `int8` or `e4m3`.
    """
    key, activation = request.key.weight, request.key.activation
    kind = _kind(key.element, operand)
    group = group_of(key, request.rows, request.columns)
    if activation is None or kind is None or group is None or not key.symmetric:
        return None
    if request.rows < 1 or request.columns < 1:
        return None
    name = "bf16" if key.scale.element.bits == 8 else key.scale.element.name
    # A scale of both levels in float32: no 16-bit dtype holds every one of them.
    layout = ProductLayout(
        operand,
        kind,
        request.rows,
        request.columns,
        group,
        Rounding.of(str(activation)).group,
        name if group else "f32",
        key.granularity.rows if group and key.global_scale is None else 1,
        (kind, group, key.scale.element) == ("e2m1", FOLDED_GROUP, E8M0) and not Rounding.of(str(activation)).group,
    )
    return layout if layout.step >= SHORTEST[kind] else None


def _kind(element: Element, operand: str) -> str | None:
    if element.is_integer:
        if element.min >= -8 and element.max <= 7:
            return "integer"
        limit = 127 if operand == "int8" else EXACT_INTEGERS
        return "codes" if -limit - (operand == "int8") <= element.min and element.max <= limit else None
    if operand == "e4m3" and element in (E4M3, E2M1):
        return "codes" if element == E4M3 else "e2m1"
    return None


def product_tensors(plain: QuantizedTensor, layout: ProductLayout, with_sums: bool) -> dict[str, Tensor]:
    """The prepared tensors of a plain record.

    Args:
        plain: the record.
        layout: of its request.
        with_sums: whether activations have zero points, for which sums of rows are needed.

    Returns:
        `weight`, `scale` (empty for scales of rows), `row_scale` float32 [N], `weight_sums` float32 [N] or empty, what
        a row of ones gives before `row_scale` (a whole number where no scale of a group lies between, so that a token
        of zeros gives zeros), and `block_scale` float32 where torch has a product for scales in blocks.

    Raises:
        CheckpointError: a code lies outside the element's range.
    """
    codes = plain["codes"]
    factor = _FACTORS.get((layout.kind, layout.operand), 1.0)
    if layout.group:
        scale = spread(decode(plain["scale"], plain.key.scale.element), plain, layout.group).t().contiguous()
        row_scale = torch.full((layout.rows,), factor, device=codes.device)
        if layout.folds:
            binades, largest = folded(plain)
            scale, row_scale = _offsets(binades.t().contiguous(), layout), largest * factor
        else:
            scale = scale.to(SCALES[layout.scale_dtype])
        if "global_scale" in plain:
            row_scale = row_scale * plain["global_scale"].flatten().float()
    else:
        scale, row_scale = torch.empty(0, device=codes.device), row_scales(plain) * factor
    tensors = {"weight": _stored(plain, layout), "scale": scale, "row_scale": row_scale.contiguous()}
    if layout.in_blocks:
        tensors["block_scale"] = _block_scales(scale, layout)
    sums = torch.empty(0, device=codes.device)
    if with_sums:
        numbers = decode(codes, plain.key.element)
        if layout.group:
            numbers, units = numbers * spread(effective_scale(plain), plain, 1), row_scale.double()
        else:
            units = factor
        sums = (numbers.double().sum(1) / units).float()
    return tensors | {"weight_sums": sums}


def _offsets(binades: Tensor, layout: ProductLayout) -> Tensor:
    """int32 words [units * offset_words, N] of [groups, N]: a byte for each group of a unit."""
    steps = binades * 8
    a_unit = layout.unit // FOLDED_GROUP
    missing = layout.units * a_unit - steps.shape[0]
    padded = torch.nn.functional.pad(steps, (0, 0, 0, missing)).view(layout.units, a_unit, layout.rows)
    padded = torch.nn.functional.pad(padded, (0, 0, 0, -a_unit % 4)).view(-1, 4, layout.rows)
    return padded[:, 0] | padded[:, 1] << 8 | padded[:, 2] << 16 | padded[:, 3] << 24


def _scales_of(words: Tensor, layout: ProductLayout) -> Tensor:
    """float32 scales [groups padded, N]: the inverse of `_offsets`."""
    steps = torch.stack([(words >> (8 * position)) & 0xFF for position in range(4)], 1)
    a_unit = layout.unit // FOLDED_GROUP
    steps = steps.reshape(layout.units, -1, layout.rows)[:, :a_unit].reshape(-1, layout.rows)
    return torch.ldexp(torch.ones_like(steps, dtype=torch.float32), -(steps // 8))


def _block_scales(scale: Tensor, layout: ProductLayout) -> Tensor:
    """float32 [N / 128, groups] of scales [groups, N] that 128 rows have in common."""
    return scale[:, :: layout.block_rows].t().float().contiguous()


def _stored(plain: QuantizedTensor, layout: ProductLayout) -> Tensor:
    codes = plain["codes"]
    missing = layout.width - layout.columns
    if layout.kind == "codes":
        if plain.key.element.is_integer:
            codes = integers_in_range(plain).to(torch.float32 if layout.operand == "e4m3" else torch.int8)
        padded = torch.nn.functional.pad(codes.to(CODES[layout.operand]).view(torch.int8), (0, missing))
        return padded.contiguous().view(CODES[layout.operand])
    fields = integers_in_range(plain) & 15 if layout.kind == "integer" else codes.int()
    padded = torch.nn.functional.pad(fields, (0, missing)).view(layout.rows, layout.units, 2, layout.run)
    if layout.operand == "e4m3":
        return _words(padded).view(torch.int8).reshape(layout.rows, -1).contiguous()
    pairs = padded[:, :, 0] | padded[:, :, 1] << 4
    return pairs.to(torch.uint8).view(torch.int8).reshape(layout.rows, -1).contiguous()


def _words(fields: Tensor) -> Tensor:
    """int32 words [N, units, run / 4] of codes [N, units, 2, run]: four of either run.

    The lower three bits of code i of the first run are at bit 4i and of the second at bit 16 + 4i, where a permutation
    of bytes takes its selectors from; its sign is at bit 8i + 7 in the first run and at bit 8i + 3 in the second.
    """
    fours = fields.reshape(*fields.shape[:3], -1, 4)
    words = torch.zeros_like(fours[:, :, 0, :, 0])
    for (run, place), (lower, sign) in _PLACES.items():
        code = fours[:, :, run, :, place]
        words |= (code & 7) << lower | (code >> 3) << sign
    return words


def _fields(words: Tensor) -> Tensor:
    """The inverse of `_words`, int32 [N, units, 2, run]."""
    runs = []
    for run in (0, 1):
        places = (_PLACES[run, place] for place in range(4))
        fours = [(words >> lower) & 7 | ((words >> sign) & 1) << 3 for lower, sign in places]
        runs.append(torch.stack(fours, -1).flatten(2))
    return torch.stack(runs, 2)


_PLACES = {(run, place): (16 * run + 4 * place, 8 * place + 7 - 4 * run) for run in (0, 1) for place in range(4)}
"""(run, code of four) -> bit of its lower three bits, bit of the sign."""


def product_numbers(tensors: dict[str, Tensor], layout: ProductLayout) -> Tensor:
    """The numbers that prepared tensors stand for, float32 [N, K]: the inverse of `product_tensors`."""
    weight = tensors["weight"]
    if layout.kind != "codes":
        if layout.operand == "e4m3":
            codes = _fields(weight.view(torch.int32).view(layout.rows, layout.units, -1)).reshape(layout.rows, -1)
        else:
            fields = weight.view(torch.uint8).int().view(layout.rows, layout.units, 1, layout.run)
            codes = torch.cat([fields & 15, fields >> 4], 2).reshape(layout.rows, -1)
        numbers = decode(codes.to(torch.uint8), E2M1) if layout.kind == "e2m1" else ((codes ^ 8) - 8).float()
        numbers = numbers / _FACTORS.get((layout.kind, layout.operand), 1.0)
    else:
        numbers = weight.float()
    numbers = numbers[:, : layout.columns] * tensors["row_scale"][:, None]
    if layout.group:
        scale = _scales_of(tensors["scale"], layout) if layout.folds else tensors["scale"].float()
        numbers = numbers * scale.t().repeat_interleave(layout.group, 1)[:, : layout.columns]
    return numbers
