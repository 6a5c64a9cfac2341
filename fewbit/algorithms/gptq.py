"""GPTQ: codes are chosen one input feature at a time, and what rounding did is made good by the features to come.

Scales are searched first, on the block of the Gram matrix that belongs to each group, and stay where they are (static
groups); the features are visited in the order of their energy (act-order), which then needs no `g_idx` at run time.
Passes of coordinate descent may follow (`sweeps`): each visits every feature again, with all others in place, and
between passes the scales of a row are fitted to its codes. None of them raises the error that GPTQ left; on SmolLM2
they lower KL by 4 %, leave perplexity where it was, and take three times as long as all the rest. Layers that read
one input are solved as one stacked matrix.

Quantized layers before a layer change its input, and what the unquantized model would have put out for its own input is
what is wanted. The asymmetric term of GPTAQ (`asymmetric`) moves the features after each one accordingly; rows whose
output it does not bring nearer to the unquantized model's keep what GPTQ gave.

Sources: Frantar et al., GPTQ (arXiv 2210.17323); Behdin et al., QuantEase (arXiv 2309.01885) for coordinate descent;
Li et al., GPTAQ (arXiv 2504.02692) for the asymmetric term;
`algorithms.md` sections 1 and 2 of the house's references.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch
from torch import Tensor

from fewbit.algorithms.curvature import curvature
from fewbit.algorithms.descent import compensate, descend
from fewbit.algorithms.grid import Grid, Scales, stacked
from fewbit.algorithms.interface import Algorithm, LayerResult, LayerTask, relative_losses
from fewbit.algorithms.panels import PANEL
from fewbit.algorithms.scale_fit import fit_scales
from fewbit.algorithms.scale_search import search_scales
from fewbit.errors import SchemeError


@dataclass(frozen=True)
class GptqSettings:
    """Settings of GPTQ.

    Attributes:
        damping: added to the diagonal of the Gram matrix, as a fraction of its mean.
        act_order: whether features are visited in the order of their energy.
        search: whether scales are searched; otherwise they follow from the extremes.
        compensate: whether GPTQ runs at all; otherwise weights are rounded to nearest on the searched scales.
        sweeps: passes of coordinate descent after GPTQ.
        asymmetric: how much of the asymmetric term is added, 0 to 1; see the head of this file.
        desc_act: whether groups are of features that are visited one after the other instead of neighbours; the file
            then states the group of each feature, which few kernels read.
    """

    damping: float = 0.01
    act_order: bool = True
    search: bool = True
    compensate: bool = True
    sweeps: int = 0
    asymmetric: float = 0.0
    desc_act: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.asymmetric <= 1:
            raise SchemeError(f"asymmetric is {self.asymmetric}.", "Use 0 (none) to 1; 0.25 is usual.")
        if self.sweeps < 0:
            raise SchemeError(f"sweeps is {self.sweeps}.", "Use 0 or more.")


class Gptq(Algorithm):
    """See the head of this file."""

    name: ClassVar[str] = "gptq"
    Settings: ClassVar[type] = GptqSettings
    needs_gram: ClassVar[bool] = True

    def for_trials(self) -> Algorithm:
        own = {field.name: getattr(self.settings, field.name) for field in fields(GptqSettings)}
        return Gptq(own | {"sweeps": 0, "asymmetric": 0.0})

    @property
    def compares_inputs(self) -> bool:
        return self.settings.asymmetric > 0

    @property
    def orders_groups(self) -> bool:
        return self.settings.desc_act

    def quantize_layers(self, tasks: Sequence[LayerTask]) -> list[LayerResult]:
        by_element: dict[str, list[int]] = {}
        for index, task in enumerate(tasks):
            by_element.setdefault(task.key.weight.element.name, []).append(index)
        results: dict[int, LayerResult] = {}
        for indices in by_element.values():
            solved = self._solve([tasks[index] for index in indices])
            results |= dict(zip(indices, solved, strict=True))
        return [results[index] for index in range(len(tasks))]

    def _solve(self, tasks: list[LayerTask]) -> list[LayerResult]:
        """Layers of one element that read the same input."""
        statistics = tasks[0].statistics
        weights = [task.weight.float() for task in tasks]
        if statistics is None or statistics.products is None or statistics.tokens == 0:
            scales = [search_scales(task) for task in tasks]
            values = _grid(scales, weights).rounded(torch.cat(weights))[0]
            return self._results(weights, scales, values, None, "scale_search: no calibration token reached it")
        gram = statistics.gram.to(weights[0].device)
        order = torch.arange(len(gram), device=gram.device)
        if self.settings.act_order or self.settings.desc_act:
            order = torch.argsort(gram.diagonal(), descending=True, stable=True)
        inverse = torch.argsort(order)
        found = curvature(gram[order][:, order], self.settings.damping)
        natural = found.matrix[inverse][:, inverse].contiguous()
        scales = self._scales_of_all(tasks, found.matrix, natural, order)
        columns = _columns(scales, weights, order)
        target, helped = torch.cat(weights).T[order].contiguous(), None
        if found.factor is None or not self.settings.compensate:
            values = columns.rounded(target)[0]
        else:
            values = compensate(target.clone(), found.factor, columns)
            shift = statistics.mean_shift
            if self.settings.asymmetric and shift is not None:
                shift = shift.to(gram.device)[order][:, order]
                values, target, helped = self._shifted(
                    target, values, gram[order][:, order], shift, found.factor, columns
                )
        for _ in range(self.settings.sweeps):
            scales = _fitted(weights, scales, values[inverse].T.contiguous(), natural)
            values = descend(target, values, found.matrix, _columns(scales, weights, order))
        plain = values[inverse].T.contiguous()
        if self.settings.sweeps:
            scales = _fitted(weights, scales, plain, natural)
        method = f"{self.name}: {found.note}" if found.note else self.name
        return self._results(weights, scales, plain, gram, method, helped)

    def _scales_of_all(self, tasks: list[LayerTask], ordered: Tensor, natural: Tensor, order: Tensor) -> list[Scales]:
        """The scales of each layer; layers of one key, each row of which has scales of its own, are searched as one."""
        first = tasks[0]
        height = first.key.weight.granularity.extents(tuple(first.weight.shape))[0]
        kinds = {(one.key, one.rules, one.weight.dtype) for one in tasks}
        if height != 1 or len(kinds) > 1 or first.key.weight.global_scale is not None:
            return [self._scales(task, ordered, natural, order) for task in tasks]
        stack = replace(first, weight=torch.cat([task.weight for task in tasks]))
        whole = self._scales(stack, ordered, natural, order)
        sizes = [len(task.weight) for task in tasks]
        zeros = [None] * len(tasks) if whole.zero_point is None else whole.zero_point.split(sizes)
        return [
            replace(whole, scale=scale, zero_point=zero)
            for scale, zero in zip(whole.scale.split(sizes), zeros, strict=True)
        ]

    def _scales(self, task: LayerTask, ordered: Tensor, natural: Tensor, order: Tensor) -> Scales:
        """The scales of a layer, `ordered` and `natural` being H in the order of visits and in its own."""
        if not self.settings.desc_act:
            if self.settings.search:
                return search_scales(task, natural)
            return Scales.nearest(task.weight, task.key.weight, task.rules, task.global_scale)
        # Groups are of features that are visited together.
        along = replace(task, weight=task.weight[:, order])
        if self.settings.search:
            found = search_scales(along, ordered)
        else:
            found = Scales.nearest(along.weight, task.key.weight, task.rules, task.global_scale)
        width = task.key.weight.granularity.extents(tuple(task.weight.shape))[1]
        return replace(found, order=(torch.argsort(order) // width).int()) if found.scale.shape[1] > 1 else found

    def _shifted(
        self, target: Tensor, values: Tensor, gram: Tensor, shift: Tensor, factor: Tensor, columns: Grid
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`values` [K, N], in rows that the asymmetric term helps those with it; their targets; which rows, bool [N].

        For a change d of a row w its output misses that of the unquantized model on its own input by
        d^T H d - 2 w^T D d and what no change alters, D being the mean of (x' - x) x^T for the inputs x and, of the
        unquantized model, x'.
        """
        drift = drift_of(shift, factor).mul_(self.settings.asymmetric)
        moved = compensate(target.clone(), factor, columns, drift)
        pull = shift.T @ target

        def missed(found: Tensor) -> Tensor:
            change = columns.meaning(found) - target
            return ((gram @ change - 2 * pull) * change).sum(dim=0)

        helps = missed(moved) < missed(values)  # false where it is not finite
        values = torch.where(helps, moved, values)
        if self.settings.sweeps:  # which go on towards it
            wanted = target + self.settings.asymmetric * (factor.T @ (factor @ pull))
            target = torch.where(helps, wanted, target)
        return values, target, helps

    def _results(
        self,
        weights: list[Tensor],
        scales: list[Scales],
        values: Tensor,
        gram: Tensor | None,
        method: str,
        helped: Tensor | None = None,
    ) -> list[LayerResult]:
        """One result for each weight; `helped` are the rows with the asymmetric term, bool [N], where it was asked for.

        What is counted and measured is read from the device at once.
        """
        sizes = [len(weight) for weight in weights]
        parts = values.split(sizes)
        losses: list[float | None] = [None] * len(weights)
        if gram is not None:
            grids = [one.grid(tuple(weight.shape)) for weight, one in zip(weights, scales, strict=True)]
            meanings = [grid.meaning(part) for grid, part in zip(grids, parts, strict=True)]
            losses = relative_losses(weights, meanings, gram)
        records = [one.record(part) for one, part in zip(scales, parts, strict=True)]
        found = zip(records, losses, self._remarks(sizes, helped), strict=True)
        return [LayerResult(record, method, loss, remarks) for record, loss, remarks in found]

    def _remarks(self, sizes: list[int], helped: Tensor | None) -> list[tuple[str, ...]]:
        """What became of the asymmetric term in layers of so many rows, where it was asked for."""
        if helped is not None:
            counts = torch.stack([part.sum() for part in helped.split(sizes)]).tolist()
            return [(f"asymmetric term in {n} of {size} rows",) for n, size in zip(counts, sizes, strict=True)]
        told = ("no asymmetric term: the input was not compared with the unquantized model's",)
        return [told if self.settings.asymmetric else ()] * len(sizes)


def drift_of(shift: Tensor, factor: Tensor) -> Tensor:
    """P = strictly upper part of (D U^T), times U, float32 [K, K]: what is below the diagonal of P is zero.

    Args:
        shift: D, float32 [K, K].
        factor: upper triangular U, float32 [K, K].
    """
    if not factor.is_cpu:
        return (shift @ factor.T).triu(1) @ factor
    # Of both products only what is not known to be zero: a third of the work.
    inner, drift = torch.zeros_like(factor), torch.zeros_like(factor)
    for first in range(0, len(factor), PANEL):
        last = min(first + PANEL, len(factor))
        inner[:last, first:last] = shift[:last, first:] @ factor[first:last, first:].T
    inner.triu_(1)
    for first in range(0, len(factor), PANEL):
        last = min(first + PANEL, len(factor))
        drift[first:last, first:] = inner[first:last, first:] @ factor[first:, first:]
    return drift


def _grid(scales: list[Scales], weights: list[Tensor]) -> Grid:
    """The grid of the stacked weights."""
    return stacked([one.grid(tuple(weight.shape)) for one, weight in zip(scales, weights, strict=True)])


def _columns(scales: list[Scales], weights: list[Tensor], order: Tensor) -> Grid:
    """The grid of the stacked weights, transposed."""
    return stacked([one.columns(tuple(w.shape), order) for one, w in zip(scales, weights, strict=True)], dim=1)


def _fitted(weights: list[Tensor], scales: list[Scales], values: Tensor, matrix: Tensor) -> list[Scales]:
    parts = values.split([len(weight) for weight in weights])
    return [fit_scales(w, part, one, matrix) for w, part, one in zip(weights, parts, scales, strict=True)]
