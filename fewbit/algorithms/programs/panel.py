"""One panel of the solvers' loop over input features, as one launch: rows are independent, features follow each other.

A program holds the errors of all features of the panel for some rows in registers, and reads a column of the factor for
each feature.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton import language as tl

from fewbit.algorithms.panels import PANEL
from fewbit.spec.element import Element

ROWS = 16
"""Rows of the weight for each program."""

WARPS = 4


@triton.jit
def _nearest(steps, LOW: tl.constexpr, HIGH: tl.constexpr, BITS: tl.constexpr, LOWEST: tl.constexpr):
    """Integers where BITS is negative, else floats with so many bits of fraction and least exponent LOWEST."""
    steps = tl.minimum(tl.maximum(steps, LOW), HIGH)
    if BITS < 0:
        return (steps + 12582912.0) - 12582912.0  # to an integer, ties to even
    else:
        exponent = (steps.to(tl.int32, bitcast=True) >> 23) & 255
        spacing = (tl.maximum(exponent, LOWEST + 127) - BITS) << 23
        step = spacing.to(tl.float32, bitcast=True)
        return ((steps / step + 12582912.0) - 12582912.0) * step


@triton.jit
def _solve(
    weight, factor, drift, held, scale, zero, values, errors, factor_row, factor_column, drift_row, drift_column,
    features, rows,
    LOW: tl.constexpr, HIGH: tl.constexpr, BITS: tl.constexpr, LOWEST: tl.constexpr,
    PANEL: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    index = tl.arange(0, PANEL)
    done = tl.zeros((PANEL, ROWS), dtype=tl.float32)
    seen = tl.zeros((PANEL, ROWS), dtype=tl.float32)
    for i in range(features):
        at = i * rows + row
        column = tl.load(factor + index * factor_row + i * factor_column, mask=index < i, other=0.0)
        now = tl.load(weight + at, mask=inside, other=0.0) - tl.sum(column[:, None] * done, axis=0)
        if drift is not None:
            column = tl.load(drift + index * drift_row + i * drift_column, mask=index < i, other=0.0)
            now += tl.sum(column[:, None] * seen, axis=0)
            seen = tl.where((index == i)[:, None], now[None, :], seen)
        own_scale = tl.load(scale + at, mask=inside, other=1.0)
        steps = tl.math.div_rn(now, own_scale)
        if zero is not None:
            own_zero = tl.load(zero + at, mask=inside, other=0.0)
            value = _nearest(steps + own_zero, LOW, HIGH, BITS, LOWEST)
            meaning = (value - own_zero) * own_scale
        else:
            value = _nearest(steps, LOW, HIGH, BITS, LOWEST)
            meaning = value * own_scale
        if held is not None:
            now = tl.load(held + at, mask=inside, other=0.0)
        error = tl.math.div_rn(now - meaning, tl.load(factor + i * (factor_row + factor_column)) + tl.zeros_like(now))
        done = tl.where((index == i)[:, None], error[None, :], done)
        tl.store(values + at, value, mask=inside)
        tl.store(errors + at, error, mask=inside)


def solve(
    weight: Tensor,
    factor: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    element: Element,
    drift: Tensor | None,
    held: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """See `fewbit.algorithms.panels.solve_panel`."""
    features, rows = weight.shape
    given = [None if tensor is None else tensor.contiguous() for tensor in (weight, held, scale, zero)]
    values, errors = torch.empty_like(given[0]), torch.empty_like(given[0])
    # Of triangular solves a GPU returns columns that are contiguous, a CPU rows.
    strides = (*factor.stride(), *((0, 0) if drift is None else drift.stride()))
    _solve[(triton.cdiv(rows, ROWS),)](
        given[0], factor, drift, *given[1:], values, errors, *strides, features, rows,
        LOW=element.min, HIGH=element.max, BITS=-1 if element.is_integer else element.mantissa_bits,
        LOWEST=0 if element.is_integer else element.min_exponent,
        # One size for all: every other one would be compiled, and loaded by every process.
        PANEL=max(PANEL, triton.next_power_of_2(features)), ROWS=ROWS, num_warps=WARPS,
    )  # fmt: skip
    return values, errors
