"""Scale search: every useful scale of every group is tried, and the one with the smallest error kept.

The error of a group is d^T H d, d being what rounding does to its weights and H the block of the Gram matrix that
belongs to its input features; without a Gram matrix it is the squared error of the weights. Symmetric integers try
scales of both signs: the grid reaches one step further on one side, and a negative scale turns it to the side of the
largest weight (the signed full range of llama.cpp and AutoRound). Scales in E4M3 and E8M0 are searched code by code.

Sources: `algorithms.md` section 1 of the house's references; NeUQI (arXiv 2505.17595) for searching scale and zero
point together; ModelOpt's local Hessian for the block of H.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fewbit.algorithms.grid import Grid, Scales
from fewbit.algorithms.interface import Algorithm, LayerResult, LayerTask
from fewbit.numerics import decode, encode

WIDEST_BLOCK = 256
"""Input features of a group up to which its whole block of H is used; beyond, the diagonal."""

CHUNK_NUMBERS = 1 << 17
"""Weights handled at a time on a CPU, so that all working copies stay in its caches."""

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


def search_scales(task: LayerTask, gram: Tensor | None = None) -> Scales:
    """The best scales of a layer's weight.

    Args:
        task: the layer.
        gram: float32 [K, K] of its input; without it the squared error of the weights is minimized.

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
    rows = len(task.weight) if task.weight.is_cuda else max(1, CHUNK_NUMBERS // task.weight.shape[1])
    weight = task.weight.float()
    parts = [
        _search_rows(weight[first : first + rows], _rows(start, first, first + rows), blocks, width, signed)
        for first in range(0, len(weight), rows)
    ]
    scale = torch.cat([part.scale for part in parts])
    zero = None if start.zero_point is None else torch.cat([_present(part.zero_point) for part in parts])
    return replace(start, scale=scale, zero_point=zero)


def _search_rows(weight: Tensor, start: Scales, blocks: Tensor | None, width: int, signed: bool) -> Scales:
    groups = start.scale.shape[1]
    grouped = F.pad(weight, (0, groups * width - weight.shape[1])).view(len(weight), groups, width).transpose(0, 1)
    grouped = grouped.contiguous()  # [G, N, g]
    best, lowest = start, _errors(grouped, start, blocks)
    for candidate in _candidates(grouped, start, signed):
        best, lowest = _better(best, lowest, candidate, _errors(grouped, candidate, blocks))
    if start.key.element.is_integer and start.key.scale.element.bits >= 16:
        found = best
        for ratio in FINE_RATIOS:
            candidate = _scaled(found, ratio)
            best, lowest = _better(best, lowest, candidate, _errors(grouped, candidate, blocks))
    return best


def _errors(grouped: Tensor, scales: Scales, blocks: Tensor | None) -> Tensor:
    """Error of each group, float32 [G, N]."""
    zero = None if scales.zero_point is None else decode(scales.zero_point, scales.key.element).T[..., None]
    grid = Grid(scales.key.element, scales.multipliers().T[..., None], zero)
    difference = grid.rounded(grouped)[1].sub_(grouped)
    if blocks is None:
        return difference.square_().sum(dim=-1)
    if blocks.dim() == 2:
        return torch.einsum("gnk,gk->gn", difference.square_(), blocks)
    return torch.bmm(difference, blocks).mul_(difference).sum(dim=-1)


def _better(best: Scales, lowest: Tensor, candidate: Scales, error: Tensor) -> tuple[Scales, Tensor]:
    wins = error < lowest
    scale = torch.where(wins.T, candidate.scale, best.scale)
    zero = None
    if best.zero_point is not None:
        zero = torch.where(wins.T, _present(candidate.zero_point), best.zero_point)
    return replace(best, scale=scale, zero_point=zero), torch.where(wins, error, lowest)


def _candidates(grouped: Tensor, start: Scales, signed: bool) -> Iterator[Scales]:
    """Everything worth trying beside `start`, for all groups at once."""
    key = start.key
    if key.scale.element.bits == 8:
        yield from _neighbouring_codes(start)
    elif not key.element.is_integer:
        for ratio in FLOAT_RATIOS:
            yield _scaled(start, ratio)
    elif key.symmetric:
        for ratio in INTEGER_RATIOS:
            yield _scaled(start, ratio)
            if signed:
                yield _scaled(start, -ratio)
    else:
        yield from _zero_points(grouped, start)


def _neighbouring_codes(start: Scales) -> Iterator[Scales]:
    """Scales a few codes above and below: positive codes of E4M3 and E8M0 are in the order of their numbers."""
    stored = start.key.scale.element
    offsets = E8M0_OFFSETS if stored.is_exponent_only else E4M3_OFFSETS
    highest = 254 if stored.is_exponent_only else int(encode(torch.tensor(stored.max), stored).view(torch.uint8))
    lowest = 0 if stored.is_exponent_only else 1
    codes = start.scale.view(torch.uint8).int()
    for offset in offsets:
        moved = (codes + offset).clamp(lowest, highest).to(torch.uint8)
        yield replace(start, scale=moved.view(start.scale.dtype))


def _zero_points(grouped: Tensor, start: Scales) -> Iterator[Scales]:
    """Scales with the zero points that put the middle of the grid near the middle of the weights."""
    element = start.key.element
    middle = ((grouped.amin(dim=-1).clamp(max=0) + grouped.amax(dim=-1).clamp(min=0)) / 2).T
    for ratio in INTEGER_RATIOS:
        scaled = _scaled(start, ratio)
        centre = (element.min + element.max) / 2 - middle / scaled.multipliers()
        for shift in (-1, 0, 1):
            yield replace(scaled, zero_point=encode(torch.round(centre) + shift, element))


def _scaled(scales: Scales, ratio: float) -> Scales:
    stored = scales.key.scale.element
    scale = decode(scales.scale, stored) * ratio
    tiny = torch.finfo(scales.scale.dtype).tiny
    kept = scale.abs() >= tiny  # a scale must not vanish
    return replace(scales, scale=torch.where(kept, encode(scale, stored), scales.scale))


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


def _present(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor
