"""The parts that algorithms are made of, against slow float64 transcriptions of their formulas."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fewbit.algorithms import native
from fewbit.algorithms.curvature import curvature, output_loss
from fewbit.algorithms.descent import compensate, descend
from fewbit.algorithms.gptq import Gptq
from fewbit.algorithms.grid import Grid, Scales
from fewbit.algorithms.panels import in_torch, solve_panel
from fewbit.algorithms.scale_fit import fit_scales
from fewbit.algorithms.scale_search import search_scales
from fewbit.algorithms.statistics import InputStatistics
from fewbit.numerics import dequantize, round_to
from fewbit.numerics.cast import nearest
from fewbit.spec.element import ELEMENTS, Element
from fewbit.spec.recipe import ScaleRules
from tests.algorithms.layers import FEATURES, OUTPUTS, inputs, keys, statistics, task, weight

KEYS = keys()
NARROW = [e for e in ELEMENTS.values() if e.bits <= 8 and not e.is_exponent_only and not (e.is_integer and e.bias)]


@pytest.mark.parametrize("element", NARROW, ids=str)
@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-1000, 1000, width=32), min_size=1, max_size=64))
def test_nearest_is_round_to_without_codes(element: Element, numbers: list[float]) -> None:
    values = torch.tensor(numbers + list(element.values[:64])).nan_to_num(0.0, 1e3, -1e3)
    halves = torch.cat([values, values + 0.5, values * 0.5])
    assert torch.equal(nearest(halves.clone(), element) + 0.0, round_to(halves, element) + 0.0)


def plain_scales(scheme: str) -> Scales:
    return Scales.nearest(weight(), KEYS[scheme].weight, ScaleRules(), None)


def slow_gptq(numbers: Tensor, matrix: Tensor, grid: Grid) -> Tensor:
    """Section 2.1 of the references' algorithms, line by line, in float64."""
    numbers = numbers.double().clone()
    inverse = torch.linalg.cholesky(torch.linalg.inv(matrix.double()), upper=True)
    result = torch.empty_like(numbers)
    for column in range(numbers.shape[1]):
        scale = grid.scale[:, column].double()
        zero = 0.0 if grid.zero is None else grid.zero[:, column].double()
        steps = (numbers[:, column] / scale + zero).float()
        result[:, column] = (round_to(steps, grid.element).double() - zero) * scale
        error = (numbers[:, column] - result[:, column]) / inverse[column, column]
        numbers[:, column:] -= error[:, None] * inverse[column, column:]
    return result


@pytest.mark.parametrize("scheme", ["W4A16", "W3A16", "W2A16_ASYM", "W4A16_ASYM", "NVFP4A16", "MXFP4A16", "FP8"])
def test_gptq_is_its_formula(scheme: str) -> None:
    found = curvature(statistics().gram, 0.01)
    assert found.factor is not None and not found.note
    grid = plain_scales(scheme).grid((OUTPUTS, FEATURES))
    columns = plain_scales(scheme).columns((OUTPUTS, FEATURES), torch.arange(FEATURES))
    fast = columns.meaning(compensate(weight().float().T.contiguous(), found.factor, columns)).T
    slow = slow_gptq(weight(), found.matrix, grid)
    assert (fast.double() - slow).abs().gt(1e-6).float().mean() < 0.01
    losses = [output_loss(one.float() - weight().float(), found.matrix).sum().item() for one in (fast, slow)]
    assert losses[0] == pytest.approx(losses[1], rel=0.01)


@pytest.mark.parametrize("element", ["int4", "int2", "e2m1", "e4m3"])
@pytest.mark.parametrize("rows", [5, 16, 43])
@pytest.mark.parametrize("extra", ["", "zero", "drift", "held"])
def test_the_compiled_panel_is_the_loop_in_torch(element: str, rows: int, extra: str) -> None:
    if not native.takes():
        pytest.skip("fewbit was built without its compiled solvers")
    draw = torch.Generator().manual_seed(rows)
    numbers = torch.randn(30, rows, generator=draw)
    square = torch.randn(30, 30, generator=draw).mul_(0.1).triu(1)
    zero = torch.randint(-1, 2, (30, rows), generator=draw).float() if extra == "zero" else None
    grid = Grid(Element.parse(element), torch.rand(30, rows, generator=draw) + 0.1, zero)
    drift = square.flip(0, 1).T.contiguous() if extra == "drift" else None
    held = numbers.roll(1, 0) if extra == "held" else None
    arguments = (numbers, square + torch.eye(30) * 0.7, grid, drift, held)
    compiled, plain = solve_panel(*arguments), in_torch(*arguments)
    assert (compiled[0] == plain[0]).float().mean() > 0.99
    assert torch.allclose(compiled[1], plain[1], atol=1e-4) or (compiled[0] != plain[0]).any()


@pytest.mark.parametrize("scheme", ["W4A16", "W2A16_ASYM", "NVFP4A16", "MXFP4A16", "FP8"])
@pytest.mark.parametrize("weighted", [False, True])
def test_compiled_scale_errors_are_those_in_torch(scheme: str, weighted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native.takes():
        pytest.skip("fewbit was built without its compiled solvers")
    gram = statistics().gram if weighted else None
    compiled = search_scales(task(KEYS[scheme]), gram)
    monkeypatch.setattr(native, "takes", lambda *_: False)
    plain = search_scales(task(KEYS[scheme]), gram)
    same = compiled.scale.view(torch.uint8) == plain.scale.view(torch.uint8)
    assert same.float().mean() > 0.98


@pytest.mark.parametrize("scheme", ["W4A16", "W2A16_ASYM", "NVFP4A16", "FP8"])
def test_coordinate_descent_never_raises_the_error_and_ends(scheme: str) -> None:
    matrix = curvature(statistics().gram, 0.01).matrix
    columns = plain_scales(scheme).columns((OUTPUTS, FEATURES), torch.arange(FEATURES))
    target = weight().float().T.contiguous()
    values = columns.rounded(target)[0]
    losses = []
    for _ in range(40):
        losses.append(output_loss((columns.meaning(values) - target).T, matrix).sum())
        values = descend(target, values, matrix, columns)
    assert all(after <= before * 1.00001 for before, after in pairwise(losses))
    assert losses[-1] < losses[0] * 0.7
    # At the end no single change of any entry helps.
    error = target - columns.meaning(values)
    goal = columns.meaning(values) + (matrix @ error) / matrix.diagonal()[:, None]
    moved = (columns.rounded(goal)[0] != values).float().mean()
    assert moved < 0.01


def test_fitted_scales_solve_the_least_squares_problem() -> None:
    matrix = curvature(statistics().gram, 0.01).matrix
    scales = plain_scales("W4A16")
    grid = scales.grid((OUTPUTS, FEATURES))
    values = grid.rounded(weight().float())[0]
    fitted = fit_scales(weight().float(), values, scales, matrix)
    root = torch.linalg.cholesky(matrix.double(), upper=True)  # |v|_H = |root v|
    for row in range(0, OUTPUTS, 7):
        basis = torch.zeros(FEATURES, 3, dtype=torch.float64)
        for index in range(3):
            inside = slice(index * 32, index * 32 + 32)
            basis[inside, index] = values[row, inside].double()
        best = torch.linalg.lstsq(root @ basis, root @ weight()[row].double()[:, None]).solution[:, 0]
        assert torch.allclose(fitted.scale[row].double(), best, rtol=2**-7)
    before, after = (
        output_loss(weight().float() - s.grid((OUTPUTS, FEATURES)).meaning(values), matrix) for s in (scales, fitted)
    )
    assert (after <= before).all() and after.sum() < before.sum()


@pytest.mark.parametrize("scheme", ["W4A16", "W3A16", "W2A16_ASYM", "W4A16_ASYM", "NVFP4A16", "MXFP4A16"])
@pytest.mark.parametrize("weighted", [False, True])
def test_searched_scales_lower_the_error_they_are_searched_for(scheme: str, weighted: bool) -> None:
    layer = task(KEYS[scheme])
    gram = statistics().gram if weighted else torch.eye(FEATURES)
    width = layer.key.weight.granularity.columns
    mask = torch.block_diag(*[torch.ones(width, width)] * (FEATURES // width))
    shape = (OUTPUTS, FEATURES)

    def error(scales: Scales) -> float:
        meaning = scales.grid(shape).rounded(weight().float())[1]
        return float(output_loss(meaning - weight().float(), gram * mask).sum())

    searched = search_scales(layer, gram if weighted else None)
    plain = Scales.nearest(weight(), layer.key.weight, ScaleRules(), None)
    assert error(searched) < error(plain)
    if scheme == "MXFP4A16":  # all three candidates, so no exponent may beat the one that was found
        for shift in (-1, 1):
            other = Scales(plain.key, (searched.scale.int() + shift).clamp(0, 254).to(torch.uint8))
            rows = [
                output_loss(s.grid(shape).rounded(weight().float())[1] - weight().float(), gram * mask)
                for s in (searched, other)
            ]
            near = (searched.scale.int() + shift - plain.scale.int()).abs() <= 1
            assert (rows[0] <= rows[1] * 1.00001)[near.all(dim=1)].all()


def test_negative_scales_are_for_weight_only_integers() -> None:
    assert (search_scales(task(KEYS["W4A16"])).scale < 0).any()
    assert (search_scales(task(KEYS["W8A8"])).scale > 0).all()


def test_a_gram_matrix_is_the_mean_outer_product_whatever_the_batches() -> None:
    x = inputs()
    gathered = InputStatistics.empty(FEATURES)
    for part in x.reshape(4, -1, FEATURES).split(1):
        gathered.add(part)
    assert gathered.tokens == len(x)
    assert torch.allclose(gathered.gram.double(), x.double().T @ x.double() / len(x), rtol=1e-3, atol=1e-5)
    assert torch.allclose(gathered.mean_magnitude, x.abs().mean(dim=0), rtol=1e-4)
    assert gathered.largest == x.abs().max()
    gathered.require_finite()
    for broken in ("inf", "nan", "-inf"):
        other = InputStatistics.empty(FEATURES)
        other.add(torch.full((1, FEATURES), float(broken)))
        other.add(x)
        with pytest.raises(ValueError, match="NaN or infinity"):
            other.require_finite()


def test_statistics_of_divided_rows_are_those_of_the_rows_divided() -> None:
    x, columns = inputs(), torch.linspace(0.1, 3, FEATURES)
    gathered, wanted = InputStatistics.empty(FEATURES), InputStatistics.empty(FEATURES)
    for part in x.split(100):
        gathered.add(part, 10)
        wanted.add(part / columns, 10)
    found = gathered.divided(columns)
    for part in ("gram", "mean_magnitude", "peaks", "largest", "sample"):
        torch.testing.assert_close(getattr(found, part), getattr(wanted, part), rtol=1e-4, atol=1e-6)
    assert found.tokens == wanted.tokens and found.sample is not None and len(found.sample) == 10 * -(-len(x) // 100)
    assert found.percentile(99) == pytest.approx(float(wanted.percentile(99)), rel=0.25)  # of fewer rows
    assert replace(gathered, sample=None).divided(columns).histogram is None


def test_every_link_of_the_failure_chain() -> None:
    gram = statistics().gram
    assert curvature(gram, 0.01).note == ""
    vector = torch.linspace(1, 2, FEATURES)
    indefinite = torch.outer(vector, vector) - 0.02 * vector.square().mean() * torch.eye(FEATURES)
    assert curvature(indefinite, 0.01).note == "damping 0.04"
    stubborn = torch.outer(vector, vector) - 0.4 * vector.square().mean() * torch.eye(FEATURES)
    assert "off-diagonal shrunk" in curvature(stubborn, 0.01).note
    for hopeless in (torch.zeros(4, 4), torch.full((4, 4), float("nan"))):
        assert curvature(hopeless, 0.01).factor is None
    x = inputs().clone()
    x[:, 3] = 0
    silent = curvature(statistics(x).gram, 0.01)
    assert silent.factor is not None and silent.matrix[3, 3] > 0 and silent.matrix[3].count_nonzero() == 1
    broken = InputStatistics.empty(FEATURES)
    broken.add(torch.zeros(8, FEATURES))
    result = Gptq().quantize_layers([task(KEYS["W4A16"], seen=broken)])[0]
    assert "not finite or zero" in result.method and dequantize(result.record).isfinite().all()
