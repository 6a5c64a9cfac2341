"""Compiling programs before they are needed: measuring plans waits for compilers most of the time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fewbit.kernels.linear.product_layout import ProductLayout
from fewbit.kernels.linear.tile_plans import Plan, WeightLayout
from fewbit.kernels.programs import launch, product_launch


def compile_ahead(jobs: Sequence[tuple[WeightLayout, Plan, int, torch.dtype]]) -> None:
    """Compiles what the jobs (layout, plan, rows of x, dtype) need into Triton's cache."""
    for layout, plan, tokens, dtype in jobs:
        if isinstance(layout, ProductLayout):
            product_launch.compile_for(layout, plan, tokens, dtype)
        else:
            launch.compile_for(layout, plan, tokens, dtype, scaled=bool(layout.decodes_to))
