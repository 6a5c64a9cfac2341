"""Scale search: every useful scale of every group is tried, and the one with the smallest error kept.

The error of a group is d^T H d, d being what rounding does to its weights and H the block of the Gram matrix that
belongs to its input features; without a Gram matrix it is the squared error of the weights. Symmetric integers try
scales of both signs: the grid reaches one step further on one side, and a negative scale turns it to the side of the
largest weight (the signed full range of llama.cpp and AutoRound). Scales in E4M3 and E8M0 are searched code by code.

Sources: `algorithms.md` section 1 of the house's references; NeUQI (arXiv 2505.17595) for searching scale and zero
point together; ModelOpt's local Hessian for the block of H.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fewbit.algorithms import native
from fewbit.algorithms.grid import Grid, Scales
from fewbit.algorithms.interface import Algorithm, LayerResult, LayerTask
from fewbit.numerics import decode, encode

WIDEST_BLOCK = native.MOST_FEATURES
"""Input features of a group up to which its whole block of H is used; beyond, the diagonal."""

CHUNK_NUMBERS = 1 << 17
"""Weights handled at a time by torch on a CPU, so that all working copies stay in its caches."""

MOST_NUMBERS = 1 << 24
"""Weights handled at a time otherwise: all candidates for their scales are in memory together."""

INTEGER_RATIOS = tuple(1.1 - 0.05 * step for step in range(15))
FINE_RATIOS = (1.03, 1.015, 0.985, 0.97)
FLOAT_RATIOS = tuple(2.0 ** (-step / 8) for step in range(8))
E4M3_OFFSETS = tuple(range(-8, 4))
E8M0_OFFSETS = (-1, 0, 1)


class ScaleSearch(Algorithm):
    """Round to nearest with searched scales; no data needed."""

    name: ClassVar[str] = "scale_search"

    def quantize_layers(self, tasks: Sequence[LayerTask]) -> list[LayerResult]:
        results = []
        for task in tasks:
            scales = search_scales(task)
            weight = task.weight.float()
            values = scales.grid(tuple(weight.shape)).rounded(weight)[0]
            results.append(LayerResult(scales.record(values), self.name))
        return results


def search_scales(task: LayerTask, gram: Tensor | None = None, ratios: Sequence[float] = ()) -> Scales:
    """The best scales of a layer's weight.

    Args:
        task: the layer.
        gram: float32 [K, K] of its input; without it the squared error of the weights is minimized.
        ratios: of the scales that round to nearest has, to try these alone; empty to try all that is worth it.

    Returns:
        Scales as round to nearest would have them where the granularity is not one of groups within a row (a tensor, a
        block of rows): these leave little to search.

    Raises:
        ValueError: the weight is not finite.
    """
    key = task.key.weight
    start = Scales.nearest(task.weight, key, task.rules, task.global_scale)
    signed = task.key.activation is None  # integer kernels are only promised positive scales
    height, width = key.granularity.extents(tuple(task.weight.shape))
    if height != 1 or not task.weight.numel():
        return start
    groups = -(-task.weight.shape[1] // width)
    blocks = None if gram is None else _gram_blocks(gram, groups, width)
    weight = task.weight.float()
    at_once = CHUNK_NUMBERS if weight.is_cpu and not native.takes(weight, blocks) else MOST_NUMBERS
    rows = max(1, at_once // weight.shape[1])
    parts = [
        _search_rows(weight[first : first + rows], _rows(start, first, first + rows), blocks, width, signed, ratios)
        for first in range(0, len(weight), rows)
    ]
    scale = torch.cat([part.scale for part in parts])
    zeros = [part.zero_point for part in parts if part.zero_point is not None]
    return replace(start, scale=scale, zero_point=torch.cat(zeros) if zeros else None)


def _search_rows(
    weight: Tensor, start: Scales, blocks: Tensor | None, width: int, signed: bool, ratios: Sequence[float]
) -> Scales:
    groups = start.scale.shape[1]
    grouped = F.pad(weight, (0, groups * width - weight.shape[1])).T.contiguous().view(groups, width, len(weight))
    if ratios:
        return _best(_scaled(start, ratios), grouped, blocks)
    best = _best(_together([_scaled(start, (1.0,)), _candidates(grouped, start, signed)]), grouped, blocks)
    if start.key.element.is_integer and start.key.scale.element.bits >= 16:
        best = _best(_scaled(best, (1.0, *FINE_RATIOS)), grouped, blocks)
    return best


def _best(candidates: Scales, grouped: Tensor, blocks: Tensor | None) -> Scales:
    """Of each group the candidate with the smallest error, the first of several."""
    winner = _errors(grouped, candidates, blocks).nan_to_num(nan=torch.inf).argmin(dim=0).T[None]

    def picked(codes: Tensor) -> Tensor:
        bits = codes.view(torch.uint8) if codes.element_size() == 1 else codes  # floats of 8 bits cannot be gathered
        return bits.gather(0, winner)[0].view(codes.dtype)

    zero = None if candidates.zero_point is None else picked(candidates.zero_point)
    return replace(candidates, scale=picked(candidates.scale), zero_point=zero)


def _errors(grouped: Tensor, candidates: Scales, blocks: Tensor | None) -> Tensor:
    """Error of each group under each of C candidates, float32 [C, G, N], for weights [G, g, N]."""
    element, scale, zero = candidates.key.element, candidates.multipliers().transpose(1, 2), None
    if candidates.zero_point is not None:
        zero = decode(candidates.zero_point, element).transpose(1, 2)
    if native.takes(grouped, scale, zero, blocks):
        return native.group_errors(grouped, scale, zero, element, blocks)
    at_once = 1 if grouped.is_cpu else max(1, MOST_NUMBERS // grouped.numel())
    zeros = [None] * len(scale) if zero is None else zero.split(at_once)
    found = []
    for own, own_zero in zip(scale.split(at_once), zeros, strict=False):
        grid = Grid(element, own[:, :, None], None if own_zero is None else own_zero[:, :, None])
        difference = grid.rounded(grouped)[1].sub_(grouped)
        if blocks is None:
            found.append(difference.square_().sum(dim=2))
        elif blocks.dim() == 2:
            found.append(torch.einsum("cgkn,gk->cgn", difference.square_(), blocks))
        else:
            found.append(torch.matmul(blocks, difference).mul_(difference).sum(dim=2))
    return torch.cat(found)


def _candidates(grouped: Tensor, start: Scales, signed: bool) -> Scales:
    """Everything worth trying beside `start`, [C, N, G]."""
    key = start.key
    if key.scale.element.bits == 8:
        return _neighbouring_codes(start)
    if not key.element.is_integer:
        return _scaled(start, FLOAT_RATIOS)
    if not key.symmetric:
        return _zero_points(grouped, start)
    signs = (1, -1) if signed else (1,)
    return _scaled(start, tuple(sign * ratio for ratio in INTEGER_RATIOS for sign in signs))


def _neighbouring_codes(start: Scales) -> Scales:
    """Scales a few codes above and below: positive codes of E4M3 and E8M0 are in the order of their numbers."""
    stored = start.key.scale.element
    offsets = E8M0_OFFSETS if stored.is_exponent_only else E4M3_OFFSETS
    highest = 254 if stored.is_exponent_only else int(encode(torch.tensor(stored.max), stored).view(torch.uint8))
    lowest = 0 if stored.is_exponent_only else 1
    moved = start.scale.view(torch.uint8).int() + _along_candidates(offsets, start.scale.device).int()
    return replace(start, scale=moved.clamp_(lowest, highest).to(torch.uint8).view(start.scale.dtype))


def _zero_points(grouped: Tensor, start: Scales) -> Scales:
    """Scales with the zero points that put the middle of the grid near the middle of the weights."""
    element = start.key.element
    middle = ((grouped.amin(dim=1).clamp(max=0) + grouped.amax(dim=1).clamp(min=0)) / 2).T
    scaled = _scaled(start, tuple(ratio for ratio in INTEGER_RATIOS for _ in range(3)))
    shifts = _along_candidates((-1, 0, 1) * len(INTEGER_RATIOS), middle.device)
    centre = (element.min + element.max) / 2 - middle / scaled.multipliers()
    return replace(scaled, zero_point=encode(torch.round(centre) + shifts, element))


def _scaled(scales: Scales, ratios: Sequence[float]) -> Scales:
    """Scales times each of the ratios, zero points as they are, [C, N, G]."""
    stored = scales.key.scale.element
    scale = decode(scales.scale, stored) * _along_candidates(ratios, scales.scale.device)
    tiny = torch.finfo(scales.scale.dtype).tiny if scales.scale.is_floating_point() else 0.0
    kept = scale.abs() >= tiny  # a scale must not vanish
    zero = scales.zero_point
    return replace(
        scales,
        scale=torch.where(kept, encode(scale, stored), scales.scale),
        zero_point=None if zero is None else zero.expand(len(ratios), *zero.shape),
    )


def _together(parts: list[Scales]) -> Scales:
    zeros = [part.zero_point for part in parts if part.zero_point is not None]
    # Floats of 8 bits cannot be joined.
    scales = [part.scale.view(torch.uint8) if part.scale.element_size() == 1 else part.scale for part in parts]
    scale = torch.cat(scales).view(parts[0].scale.dtype)
    return replace(parts[0], scale=scale, zero_point=torch.cat(zeros) if zeros else None)


def _along_candidates(numbers: Sequence[float], device: torch.device) -> Tensor:
    """[C, 1, 1]."""
    return _sent(tuple(numbers), device)


@cache
def _sent(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    """See `_along_candidates`; sent to a device once, which waits for it."""
    return torch.tensor(numbers, dtype=torch.float32, device=device)[:, None, None]


def _gram_blocks(gram: Tensor, groups: int, width: int) -> Tensor:
    """The block of each group [G, g, g], or the diagonals [G, g] where blocks are wide; edges padded with zeros."""
    pad = groups * width - len(gram)
    if width > WIDEST_BLOCK:
        return F.pad(gram.diagonal(), (0, pad)).view(groups, width)
    padded = F.pad(gram, (0, pad, 0, pad)).view(groups, width, groups, width)
    index = torch.arange(groups, device=gram.device)
    return padded[index, :, index].contiguous()


def _rows(scales: Scales, first: int, last: int) -> Scales:
    zero = None if scales.zero_point is None else scales.zero_point[first:last]
    return replace(scales, scale=scales.scale[first:last], zero_point=zero)
