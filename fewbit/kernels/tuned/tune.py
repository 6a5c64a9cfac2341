"""Filling a table: plans of the programs first, then the costs of every kernel that takes a layer."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from fewbit.kernels.interface import LinearKernel, LinearRequest, Prepared
from fewbit.kernels.linear.product_layout import ProductLayout, product_layout_of
from fewbit.kernels.linear.tile_codes import with_codes
from fewbit.kernels.linear.tile_plans import Plan, WeightLayout, plan_for
from fewbit.kernels.linear.vendor_products import vendor_multiplies
from fewbit.kernels.linear.weight_tiles import layout_of
from fewbit.kernels.registry import linear_kernels
from fewbit.kernels.tuned.candidates import candidates
from fewbit.kernels.tuned.choice import Chosen, Layout, Way
from fewbit.kernels.tuned.measure import call_time_us, copies_of
from fewbit.numerics import QuantizedTensor, quantize
from fewbit.numerics.activations import needs_calibration, static_input_scales
from fewbit.spec.hardware import Hardware

LADDER = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 4096)
"""Rows of x that are measured."""
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}

Progress = Callable[[str], None]


def random_layer(request: LinearRequest, device: str) -> QuantizedTensor:
    """A layer of random weights with the scales that the key needs."""
    numbers = torch.randn(request.rows, request.columns, device=device) / request.columns**0.5
    if request.key.weight.symmetric and request.key.weight.element.min == 0:
        numbers = numbers.abs()
    record = quantize(numbers, request.key.weight)
    if needs_calibration(request.key.activation):
        assert request.key.activation is not None
        largest = torch.tensor(4.0, device=device)
        record = record.with_tensors(**static_input_scales(largest, request.key.activation))
    return record


def rotated(kernel: LinearKernel, request: LinearRequest, device: str) -> list[Prepared]:
    """Prepared weights of one random layer, so many that the cache does not hold them."""
    return copied(kernel.prepare(random_layer(request, device), request), device)


def copied(first: Prepared, device: str) -> list[Prepared]:
    """A prepared weight on a device and copies of it, so many that the cache does not hold them."""
    placed = {name: tensor.to(device) for name, tensor in first.tensors.items()}
    many = [Prepared(placed, first.constants)]
    for _ in range(copies_of(first.nbytes) - 1):
        many.append(Prepared({name: tensor.clone() for name, tensor in placed.items()}, first.constants))
    return many


def inputs(request: LinearRequest, tokens: int, device: str) -> Tensor:
    """Random inputs [tokens, K]."""
    return torch.randn(tokens, request.columns, device=device, dtype=DTYPES[request.dtype])


PLANNED = {"triton_int8": "int8", "triton_fp8": "e4m3"}
"""Kernels over 8-bit codes -> what their tensor cores multiply."""


def planned(request: LinearRequest, hardware: Hardware) -> list[tuple[LinearKernel, WeightLayout]]:
    """The kernels whose plans are worth measuring for a request, and the layouts they are kept under."""
    kernels, found = linear_kernels(), list[tuple[LinearKernel, WeightLayout]]()
    for name, operand in PLANNED.items():
        layout = product_layout_of(request, operand) if kernels[name].refuse(request, hardware) is None else None
        if layout is not None:
            found.append((kernels[name], layout))
    tiles = layout_of(request)
    if tiles is not None and kernels["triton_tiles_quantized"].refuse(request, hardware) is None:
        of_codes = with_codes(tiles, request)
        if of_codes.decodes_to:
            return [*found, (kernels["triton_tiles_quantized"], of_codes)]
    if tiles is not None and not found and kernels["triton_tiles"].refuse(request, hardware) is None:
        found.append((kernels["triton_tiles"], tiles))
    return found


def tune_plans(
    request: LinearRequest, kernel: LinearKernel, layout: WeightLayout, ladder: Iterable[int], say: Progress
) -> list[dict[str, Any]]:
    """The fastest plan at every M of the ladder, as entries of a table."""
    ways = {tokens: list(candidates(layout, tokens, _multiprocessors())) for tokens in ladder}
    return fastest_ways(request, kernel, layout, plan_for, ways, say, "plan")


def fastest_ways(
    request: LinearRequest, kernel: LinearKernel, layout: Layout, chosen: Chosen[Layout, Way],
    ways: Mapping[int, Sequence[Way]], say: Progress, called: str,
) -> list[dict[str, Any]]:  # fmt: skip
    """The fastest of the ways to run a product of so many rows, at every number of rows, as entries of a table.

    Args:
        layout: what the ways are kept under.
        chosen: where the kernel's operation takes its way from.
        called: what a table calls one.
    """
    weights, found = rotated(kernel, request, "cuda"), []
    for tokens, several in ways.items():
        x, timed = inputs(request, tokens, "cuda"), list[tuple[float, Way]]()
        calls = [partial(kernel.run, x, one, None) for one in weights]
        for way in several:
            with chosen.by(lambda *_, way=way: way):
                if _fits(calls[0]):
                    timed.append((call_time_us(calls, "cuda"), way))
        best_us, best = min(timed, key=lambda pair: pair[0])
        say(f"{request.key} N={request.rows} K={request.columns} M={tokens}: {best_us:.1f} us, {best}")
        found.append({"layout": asdict(layout), "M": tokens, called: asdict(best), "us": round(best_us, 2)})
    return found


def _multiprocessors() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


def _fits(call: Callable[[], Tensor]) -> bool:
    """Whether the device has the shared memory that the plan asks for."""
    from triton.runtime.errors import OutOfResources

    try:
        call()
    except OutOfResources:
        return False
    return True


def compile_candidates(layouts: Iterable[tuple[WeightLayout, str]], ladder: Iterable[int]) -> None:
    """Compiles all plans for layouts and dtypes, in a process to each core, into the cache that this process reads."""
    jobs: dict[Any, tuple[WeightLayout, Plan, int, torch.dtype]] = {}
    for (layout, dtype), tokens in product(layouts, ladder):
        for plan in candidates(layout, tokens, _multiprocessors()):
            target = layout
            if plan.decodes_first and isinstance(layout, ProductLayout):
                target = layout.decoded()
            if not plan.decodes_first or (isinstance(target, ProductLayout) and not vendor_multiplies(target)):
                cut = replace(plan, decodes_first=False)
                kind = (_compiled_for(target), dtype, replace(cut, programs=min(1, cut.programs)))
                jobs.setdefault(kind, (target, cut, tokens, DTYPES[dtype]))
    count = min(len(os.sched_getaffinity(0)), len(jobs))
    if count:
        from fewbit.kernels.programs.ahead import compile_ahead  # imports Triton

        parts = [list(jobs.values())[index::count] for index in range(count)]
        with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as pool:
            list(pool.map(compile_ahead, parts))


def _compiled_for(layout: WeightLayout) -> object:
    """What of a layout is compiled into a program."""
    if isinstance(layout, ProductLayout):
        return replace(layout, rows=layout.rows % 16, columns=layout.columns % layout.unit)
    return replace(layout, rows=0, columns=layout.columns % layout.unit), layout.units_per_group


def tune_costs(
    request: LinearRequest, hardware: Hardware, ladder: Iterable[int], say: Progress
) -> list[dict[str, Any]]:
    """Microseconds of every kernel that takes the request, the reference aside, at every M of the ladder."""
    device = "cuda" if hardware.platform == "cuda" else "cpu"
    takers = [
        kernel
        for kernel in linear_kernels().values()
        if not kernel.reference and kernel.refuse(request, hardware) is None
    ]
    measured: dict[int, dict[str, float]] = {tokens: {} for tokens in ladder}
    for kernel in takers:
        weights = rotated(kernel, request, device)
        for tokens, line in measured.items():
            x = inputs(request, tokens, device)
            line[kernel.name] = round(call_time_us([partial(kernel.run, x, one, None) for one in weights], device), 2)
    for tokens, line in measured.items():
        say(f"{request.key} N={request.rows} K={request.columns} M={tokens}: {line}")
    layer = {"key": str(request.key), "dtype": request.dtype, "N": request.rows, "K": request.columns}
    return [{**layer, "M": tokens, "us": line} for tokens, line in measured.items()]
