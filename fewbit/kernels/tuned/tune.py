"""Filling a table: plans of the programs first, then the costs of every kernel that takes a layer."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from fewbit.kernels.interface import LinearKernel, LinearRequest, Prepared
from fewbit.kernels.linear.tile_plans import Plan, is_possible, using_plans
from fewbit.kernels.linear.weight_tiles import TileLayout, layout_of
from fewbit.kernels.registry import linear_kernels
from fewbit.kernels.tuned.measure import call_time_us, copies_of
from fewbit.numerics import QuantizedTensor, quantize
from fewbit.numerics.activations import needs_calibration, static_input_scales
from fewbit.spec.hardware import Hardware

LADDER = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 4096)
"""Rows of x that are measured."""
BLOCKS = {
    8: ((32, 2), (64, 1), (64, 2), (64, 4), (128, 2), (128, 4)),
    16: ((64, 4), (128, 4), (256, 8)),
    32: ((64, 4), (128, 4), (128, 8)),
    64: ((64, 4), (128, 4), (128, 8)),
    128: ((64, 4), (128, 8), (256, 8)),
    256: ((64, 4), (64, 8), (128, 8)),
}
"""Columns of a block -> its rows of the weight, and warps."""
STAGES = {8: (3, 4, 6), 16: (3, 4), 32: (3, 4), 64: (2, 3, 4), 128: (2, 3), 256: (2, 3)}
PER_MULTIPROCESSOR = (1, 2, 3, 4, 6, 8)
"""Programs to a multiprocessor that are tried."""
PARTS = (2, 4, 8)
"""Programs to a block that are tried."""
MOST_PER_MULTIPROCESSOR = 13
DECODES_FIRST_FROM = 128
FUSED_UP_TO = 512

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}

Progress = Callable[[str], None]


def candidates(layout: TileLayout, tokens: int, multiprocessors: int) -> Iterator[Plan]:
    """Plans worth timing for a product of `tokens` rows."""
    if tokens >= DECODES_FIRST_FROM:
        yield Plan(decodes_first=True)
    if tokens > FUSED_UP_TO:
        return
    widths = [width for width in BLOCKS if width >= tokens][:1] or list(BLOCKS)[-1:]
    smaller = [width for width in BLOCKS if 32 <= width < widths[0]][-2:]
    for block_m in [*smaller, *widths]:
        for (block_n, warps), stages in product(BLOCKS[block_m], STAGES[block_m]):
            blocks = layout.padded_rows // block_n * -(-tokens // block_m)
            counts = {0} | {multiprocessors * many for many in PER_MULTIPROCESSOR} | {blocks * many for many in PARTS}
            for programs in sorted(counts):
                fits = programs <= min(blocks * layout.units, multiprocessors * MOST_PER_MULTIPROCESSOR)
                plan = Plan(block_n, block_m, warps, stages, programs)
                if fits and is_possible(plan, layout):
                    yield plan


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
    """One prepared weight and copies of it, so many that the cache does not hold them."""
    first = kernel.prepare(random_layer(request, device), request)
    placed = {name: tensor.to(device) for name, tensor in first.tensors.items()}
    many = [Prepared(placed, first.constants)]
    for _ in range(copies_of(first.nbytes) - 1):
        many.append(Prepared({name: tensor.clone() for name, tensor in placed.items()}, first.constants))
    return many


def inputs(request: LinearRequest, tokens: int, device: str) -> Tensor:
    """Random inputs [tokens, K]."""
    return torch.randn(tokens, request.columns, device=device, dtype=DTYPES[request.dtype])


def tune_plans(request: LinearRequest, ladder: Iterable[int], say: Progress) -> list[dict[str, Any]]:
    """The fastest plan at every M of the ladder, as entries of a table."""
    layout = layout_of(request)
    assert layout is not None, "the request was refused"
    kernel = linear_kernels()["triton_tiles"]
    weights = rotated(kernel, request, "cuda")
    found = []
    for tokens in ladder:
        x = inputs(request, tokens, "cuda")
        timed: list[tuple[float, Plan]] = []
        for plan in candidates(layout, tokens, _multiprocessors()):
            with using_plans(lambda *_, plan=plan: plan):
                calls = [partial(kernel.run, x, one, None) for one in weights]
                if _fits(calls[0]):
                    timed.append((call_time_us(calls, "cuda"), plan))
        best_us, best = min(timed, key=lambda pair: pair[0])
        say(f"{request.key} N={request.rows} K={request.columns} M={tokens}: {best_us:.1f} us, {best}")
        found.append({"layout": asdict(layout), "M": tokens, "plan": asdict(best), "us": round(best_us, 2)})
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


def compile_candidates(requests: Iterable[LinearRequest], ladder: Iterable[int]) -> None:
    """Compiles all plans for the requests, in a process to each core, into the cache that this process reads."""
    jobs = {}
    for request, tokens in product(requests, ladder):
        layout = layout_of(request)
        assert layout is not None, "the request was refused"
        decoding = replace(layout, rows=0, columns=layout.columns % layout.unit), layout.units_per_group
        for plan in candidates(layout, tokens, _multiprocessors()):
            if not plan.decodes_first:
                kind = (decoding, request.dtype, replace(plan, programs=min(1, plan.programs)))
                jobs.setdefault(kind, (layout, plan, tokens, DTYPES[request.dtype]))
    count = min(len(os.sched_getaffinity(0)), len(jobs))
    if count:
        from fewbit.kernels.programs.launch import compile_ahead  # imports Triton

        parts = [list(jobs.values())[index::count] for index in range(count)]
        with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as pool:
            list(pool.map(compile_ahead, parts))


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
