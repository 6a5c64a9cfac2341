"""GPTQ's options: the asymmetric term against its formula in float64, and groups in the order of visits."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from fewbit.algorithms.curvature import curvature
from fewbit.algorithms.descent import compensate
from fewbit.algorithms.gptq import Gptq, drift_of
from fewbit.algorithms.grid import Grid, Scales
from fewbit.algorithms.panels import PANEL
from fewbit.algorithms.statistics import InputStatistics
from fewbit.errors import SchemeError
from fewbit.numerics import dequantize, round_to
from fewbit.spec.recipe import ScaleRules
from tests.algorithms.layers import FEATURES, OUTPUTS, inputs, keys, task, weight

KEYS = keys()


@cache
def unquantized() -> Tensor:
    """[T, K]: what the inputs would have been, had the layers before not been quantized."""
    generator = torch.Generator().manual_seed(9)
    bend = torch.eye(FEATURES) + 0.1 * torch.randn(FEATURES, FEATURES, generator=generator) / FEATURES**0.5
    return inputs() @ bend


def compared(wanted: Tensor | None = None) -> InputStatistics:
    gathered = InputStatistics.empty(FEATURES)
    for x, beside in zip(inputs().chunk(4), (unquantized() if wanted is None else wanted).chunk(4), strict=True):
        gathered.add(x)
        gathered.compare(x, beside)
    return gathered


def missed(found: Tensor, wanted: Tensor | None = None) -> Tensor:
    """Error of each output against that of the unquantized model, float64 [N]."""
    beside = (unquantized() if wanted is None else wanted).double()
    return (inputs().double() @ found.double().T - beside @ weight().double().T).square().mean(dim=0)


def slow_gptaq(numbers: Tensor, matrix: Tensor, shift: Tensor, grid: Grid, strength: float) -> Tensor:
    """Section 2.3 of the references' algorithms (Algorithm 1 of the paper), column by column, in float64."""
    numbers = numbers.double().clone()
    inverse = torch.linalg.cholesky(torch.linalg.inv(matrix.double()), upper=True)
    drift = strength * torch.triu(shift.double() @ inverse.T, diagonal=1) @ inverse
    result = torch.empty_like(numbers)
    for column in range(numbers.shape[1]):
        scale = grid.scale[:, column].double()
        steps = (numbers[:, column] / scale).float()
        result[:, column] = round_to(steps, grid.element).double() * scale
        now = numbers[:, column].clone()
        numbers[:, column:] -= ((now - result[:, column]) / inverse[column, column])[:, None] * inverse[column, column:]
        numbers[:, column + 1 :] += now[:, None] * drift[column, column + 1 :]
    return result


@pytest.mark.parametrize("scheme", ["W4A16", "NVFP4A16"])
@pytest.mark.parametrize("strength", [0.25, 1.0])
def test_the_asymmetric_term_is_its_formula(scheme: str, strength: float) -> None:
    statistics = compared()
    found = curvature(statistics.gram, 0.01)
    shift = statistics.mean_shift
    assert found.factor is not None and shift is not None
    exact = ((unquantized() - inputs()).T.double() @ inputs().double()) / len(inputs())
    assert torch.allclose(shift.double(), exact, atol=1e-4 * exact.abs().max())
    scales = Scales.nearest(weight(), KEYS[scheme].weight, ScaleRules(), None)
    columns = scales.columns((OUTPUTS, FEATURES), torch.arange(FEATURES))
    drift = strength * drift_of(shift, found.factor)
    fast = columns.meaning(compensate(weight().float().T.contiguous(), found.factor, columns, drift)).T
    slow = slow_gptaq(weight(), found.matrix, shift, scales.grid((OUTPUTS, FEATURES)), strength)
    assert (fast.double() - slow).abs().gt(1e-6).float().mean() < 0.02
    assert float(missed(fast).sum()) == pytest.approx(float(missed(slow).sum()), rel=0.01)


@pytest.mark.parametrize("features", [5, PANEL, 2 * PANEL + 7])
def test_the_drift_is_its_formula_however_many_panels(features: int) -> None:
    generator = torch.Generator().manual_seed(features)
    shift, factor = torch.randn(2, features, features, generator=generator, dtype=torch.float64)
    factor = factor.triu()
    torch.testing.assert_close(drift_of(shift, factor), (shift @ factor.T).triu(1) @ factor)


@pytest.mark.parametrize("sweeps", [0, 2])
def test_the_asymmetric_term_is_kept_where_it_brings_outputs_nearer(sweeps: int) -> None:
    layer = task(KEYS["W4A16"], seen=compared())
    plain = Gptq({"sweeps": sweeps}).quantize_layers([layer])[0]
    moved = Gptq({"asymmetric": 1.0, "sweeps": sweeps}).quantize_layers([layer])[0]
    assert (moved.method, plain.method) == ("gptq", "gptq")
    assert "asymmetric term in" in moved.remarks[0] and not plain.remarks
    before, after = missed(dequantize(plain.record)), missed(dequantize(moved.record))
    assert after.sum() < 0.9 * before.sum()
    if not sweeps:
        assert (after <= before * 1.0001).all()


def test_an_asymmetric_term_that_harms_changes_nothing() -> None:
    """Differences that are noise: what they ask for does not bring outputs nearer."""
    layer = task(KEYS["W4A16"], seen=compared(inputs()))
    plain = Gptq().quantize_layers([layer])[0]
    same = Gptq({"asymmetric": 1.0}).quantize_layers([layer])[0]
    assert torch.equal(plain.record["codes"], same.record["codes"])
    assert same.remarks == (f"asymmetric term in 0 of {OUTPUTS} rows",)
    broken = replace(layer, statistics=replace(compared(), shift=torch.full((FEATURES, FEATURES), torch.nan)))
    kept = Gptq({"asymmetric": 1.0}).quantize_layers([broken])[0]
    assert torch.equal(plain.record["codes"], kept.record["codes"])


@pytest.mark.parametrize("scheme", ["W4A16", "W4A16_ASYM"])
@pytest.mark.parametrize("settings", [{}, {"sweeps": 2}, {"search": False}])
def test_groups_in_the_order_of_visits(scheme: str, settings: dict[str, object]) -> None:
    layer = task(KEYS[scheme])
    found = Gptq({"desc_act": True, **settings}).quantize_layers([layer])[0]
    found.record.validate("layer")
    statistics = layer.statistics
    assert statistics is not None
    order = torch.argsort(statistics.gram.diagonal(), descending=True, stable=True)
    width = layer.key.weight.granularity.columns
    assert torch.equal(found.record["order"][order], (torch.arange(FEATURES) // width).int())
    fixed = Gptq(settings).quantize_layers([layer])[0]
    assert found.loss is not None and fixed.loss is not None and found.loss < 1.3 * fixed.loss
    error = dequantize(found.record) - weight().float()
    loss = float(
        (error @ statistics.gram * error).sum() / (weight().float() @ statistics.gram * weight().float()).sum()
    )
    assert loss == pytest.approx(found.loss, rel=1e-3)


@pytest.mark.parametrize("settings", [{"asymmetric": 1.5}, {"asymmetric": -1}, {"sweeps": -1}])
def test_settings_beyond_their_range_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(SchemeError, match="0"):
        Gptq(settings)
