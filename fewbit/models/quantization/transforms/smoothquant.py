"""SmoothQuant: outliers of activations are moved into the weights that read them, through the norm before.

The scale of an input feature is max|X|^alpha / max|W|^(1 - alpha). Without a given alpha, each mapping gets the one
with the smallest error of its consumers' outputs, weights and activations both quantized by the layer's key (round to
nearest; dynamic activation scales from the rows themselves, static ones from the largest activation that calibration
saw), measured on a sample of the calibration tokens. No scaling at all is one of the candidates.

Sources: Xiao et al., SmoothQuant (arXiv 2211.10438); `algorithms.md` section 4 of the house's references.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fewbit.errors import SchemeError
from fewbit.models.quantization.transforms.awq import normalized
from fewbit.models.quantization.transforms.interface import Consumer, Scaling, ScalingTask, Transform
from fewbit.models.quantization.transforms.structure import ScaleMapping
from fewbit.numerics import dequantize, quantize
from fewbit.numerics.activations import fake_quantize, needs_calibration, static_input_scales
from fewbit.spec.recipe import ScaleRules

ALPHAS = tuple(0.3 + 0.05 * step for step in range(14))
SMALLEST = 1e-5


@dataclass(frozen=True)
class SmoothQuantSettings:
    """Settings of SmoothQuant.

    Attributes:
        alpha: how much of the activations' range moves into the weights, between 0 and 1; 0 searches it for each
            mapping, none at all being a candidate.
    """

    alpha: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise SchemeError(f"smoothquant: alpha is {self.alpha}.", "Use 0 (search) to 1.")


class SmoothQuant(Transform):
    """See the head of this file."""

    name: ClassVar[str] = "smoothquant"
    Settings: ClassVar[type] = SmoothQuantSettings
    needs_statistics: ClassVar[bool] = True

    def wants(self, mapping: ScaleMapping) -> bool:
        return mapping.norm

    def choose(self, task: ScalingTask) -> Scaling:
        quantized = task.quantized
        x, largest = task.seen.sample, task.tied(task.seen.largest)
        weights = torch.stack([one.weight.abs().amax(dim=0) for one in quantized]).amax(dim=0)
        before = _loss(quantized, x, task.seen.largest, None, task.rules)
        best = Scaling(None, "none", before, before)
        fixed = self.settings.alpha
        for alpha in [fixed] if fixed else ALPHAS:
            spread = largest.clamp(min=SMALLEST) ** alpha / task.tied(weights).clamp(min=SMALLEST) ** (1 - alpha)
            columns = normalized(spread)
            loss = _loss(quantized, x, task.seen.largest, columns, task.rules)
            if fixed or loss < best.loss:
                best = Scaling(columns, f"alpha {alpha:.3g}", loss, before)
        return best


def _loss(
    consumers: Sequence[Consumer], x: Tensor, largest: Tensor, columns: Tensor | None, rules: ScaleRules
) -> float:
    """Relative error of the consumers' outputs on the rows x [S, K], each weighted by its share of the tokens."""
    total = 0.0
    scales = torch.ones_like(largest) if columns is None else columns
    for one in consumers:
        assert one.key is not None
        wanted = x @ one.weight.T
        record = quantize(one.weight * scales, one.key.weight, rules)
        seen, key = x / scales, one.key.activation
        if key is not None:
            static = static_input_scales((largest / scales).amax(), key) if needs_calibration(key) else {}
            seen = fake_quantize(seen, key, record.with_tensors(**static))
        error = seen @ dequantize(record).T - wanted
        energy = wanted.square().sum().clamp(min=torch.finfo(torch.float32).tiny)
        total += one.share * float(error.square().sum() / energy)
    return total
