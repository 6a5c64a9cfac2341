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
    weight = task.weight.float()
    at_once = CHUNK_NUMBERS if weight.is_cpu and not native.takes(weight, blocks) else MOST_NUMBERS
    rows = max(1, at_once // weight.shape[1])
    parts = [
        _search_rows(weight[first : first + rows], _rows(start, first, first + rows), blocks, width, signed)
        for first in range(0, len(weight), rows)
    ]
    scale = torch.cat([part.scale for part in parts])
    zero = None if start.zero_point is None else torch.cat([_present(part.zero_point) for part in parts])
    return replace(start, scale=scale, zero_point=zero)


def _search_rows(weight: Tensor, start: Scales, blocks: Tensor | None, width: int, signed: bool) -> Scales:
    groups = start.scale.shape[1]
    grouped = F.pad(weight, (0, groups * width - weight.shape[1])).T.contiguous().view(groups, width, len(weight))
    best = _best([start, *_candidates(grouped, start, signed)], grouped, blocks)
    if start.key.element.is_integer and start.key.scale.element.bits >= 16:
        best = _best([best, *(_scaled(best, ratio) for ratio in FINE_RATIOS)], grouped, blocks)
    return best


def _best(candidates: list[Scales], grouped: Tensor, blocks: Tensor | None) -> Scales:
    """Of each group the candidate with the smallest error, the first of several."""
    winner = _errors(grouped, candidates, blocks).nan_to_num(nan=torch.inf).argmin(dim=0).T[None]

    def picked(parts: list[Tensor]) -> Tensor:
        # Floats of 8 bits cannot be gathered.
        bits = [part.view(torch.uint8) if part.element_size() == 1 else part for part in parts]
        return torch.stack(bits).gather(0, winner)[0].view(parts[0].dtype)

    zero = None
    if candidates[0].zero_point is not None:
        zero = picked([_present(one.zero_point) for one in candidates])
    return replace(candidates[0], scale=picked([one.scale for one in candidates]), zero_point=zero)


def _errors(grouped: Tensor, candidates: list[Scales], blocks: Tensor | None) -> Tensor:
    """Error of each group under each of C candidates, float32 [C, G, N], for weights [G, g, N]."""
    element, scale, zero = candidates[0].key.element, torch.stack([one.multipliers().T for one in candidates]), None
    if candidates[0].zero_point is not None:
        zero = torch.stack([decode(_present(one.zero_point), element).T for one in candidates])
    if native.takes(grouped, scale, zero, blocks):
        return native.group_errors(grouped, scale, zero, element, blocks)
    errors = torch.empty_like(scale)
    for index, own in enumerate(scale):
        grid = Grid(element, own[:, None], None if zero is None else zero[index][:, None])
        difference = grid.rounded(grouped)[1].sub_(grouped)
        if blocks is None:
            errors[index] = difference.square_().sum(dim=1)
        elif blocks.dim() == 2:
            errors[index] = torch.einsum("gkn,gk->gn", difference.square_(), blocks)
        else:
            errors[index] = torch.bmm(blocks, difference).mul_(difference).sum(dim=1)
    return errors


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
    middle = ((grouped.amin(dim=1).clamp(max=0) + grouped.amax(dim=1).clamp(min=0)) / 2).T
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
