"""Linear kernels and fused experts on a CPU against torch: every column in one run, rounds interleaved, correctness
asserted.

    python benchmarks/cpu.py --output results.json
    python benchmarks/cpu.py --experts 8x1024x2048x2 --experts 64x1024x512x8 --output experts.json

Weights rotate over copies that exceed the last-level cache. In each round every column is timed once, one after the
other, so that a machine whose speed changes changes it for all; the figure is the median over the rounds. Other work on
the machine disturbs the times more than the ratios, and a busy second core the two-thread times most.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from mixtures import EXPERT_SCHEMES, Sizes, mixture_columns
from torch import Tensor

from fewbit.kernels import native
from fewbit.kernels.interface import LinearRequest, Prepared
from fewbit.kernels.probe import installed, missing, this_machine
from fewbit.kernels.registry import linear_kernels
from fewbit.numerics import dequantize, quantize
from fewbit.numerics.activations import fake_quantize
from fewbit.spec import ELEMENTS, PRESETS, LinearKey, QuantKey, ScaleSpec
from fewbit.spec.element import BF16
from fewbit.spec.granularity import group

SHAPES = ((4096, 4096), (4096, 14336))  # K, N
TOKENS = (1, 16, 128)
ROTATING_BYTES = 128_000_000
TOLERANCE = 0.02
"""Relative error of a whole output against the definition in float32: bf16 outputs, bf16 scales."""

W4A8 = LinearKey(QuantKey(ELEMENTS["int4"], ScaleSpec(BF16, group(128))), PRESETS["W8A8"].rules[0].key.activation)
SCHEMES = {"W4A8": W4A8} | {
    name: PRESETS[name].rules[0].key
    for name in ("W4A16", "W4A16_ASYM", "W2A16", "W8A16", "W8A8", "FP8_DYNAMIC", "NVFP4A16", "MXFP4A16")
}
Call = Callable[[Tensor], Tensor]


def copies_of(nbytes: int) -> int:
    return max(2, ROTATING_BYTES // nbytes)


def torch_columns(weight: Tensor) -> dict[str, list[Call]]:
    """torch's own products of the dense weight, a call for each rotating copy; what this CPU lacks is left out."""
    functional = torch.nn.functional.linear
    narrow = [weight.bfloat16() for _ in range(copies_of(2 * weight.numel()))]
    columns: dict[str, list[Call]] = {
        "bf16 F.linear": [lambda x, w=w: functional(x, w) for w in narrow],
        "float32 F.linear": [
            lambda x, w=w: functional(x.float(), w).bfloat16()
            for w in [weight.clone() for _ in range(copies_of(4 * weight.numel()))]
        ],
    }
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        packed = [torch.ops.mkldnn._reorder_linear_weight(w, None) for w in narrow]
        pointwise = torch.ops.mkldnn._linear_pointwise
        columns["bf16 prepacked"] = [lambda x, w=w: pointwise(x, w, None, "none", [], "") for w in packed]
    return columns


def kernel_columns(key: LinearKey, weight: Tensor, x: dict[int, Tensor]) -> dict[str, tuple[list[Call], int]]:
    """Kernel -> its calls over copies and its bytes, for each that takes the layer. Asserts its numbers for every M."""
    record = quantize(weight, key.weight)
    request = LinearRequest.of(record, key, "bf16")
    dense = dequantize(record)
    plain = {count: tokens.float() @ dense.T for count, tokens in x.items()}
    rounded = plain
    if key.activation is not None:
        rounded = {count: fake_quantize(tokens, key.activation, record) @ dense.T for count, tokens in x.items()}
    columns = {}
    for kernel in linear_kernels().values():
        if kernel.reference or kernel.refuse(request, this_machine("cpu")) is not None:
            continue
        prepared = kernel.prepare(record, request)
        for count, tokens in x.items():
            wanted = (plain if kernel.weight_only else rounded)[count]
            error = ((kernel.run(tokens, prepared, None).float() - wanted).norm() / wanted.norm()).item()
            assert error < TOLERANCE, f"{kernel.name} of {key} is off by {error:.4f} at M={count}"
        rotating = [prepared, *(copied(prepared) for _ in range(copies_of(prepared.nbytes) - 1))]
        columns[kernel.name] = [lambda t, k=kernel, p=p: k.run(t, p, None) for p in rotating], prepared.nbytes
    return columns


def copied(prepared: Prepared) -> Prepared:
    """The same weight at other addresses; an opaque tensor of oneDNN's is left where it is."""
    tensors = {name: t if t.is_mkldnn else t.clone() for name, t in prepared.tensors.items()}
    return Prepared(tensors, prepared.constants)


def interleaved_us(columns: dict[str, list[Call]], x: Tensor, rounds: int) -> dict[str, float]:
    """Median microseconds of a call of each column."""
    times: dict[str, list[float]] = {name: [] for name in columns}
    turn = 0
    for round_number in range(rounds + 1):
        for name, calls in columns.items():
            repeats = max(1, 8 // len(x))
            started = time.perf_counter()
            for _ in range(repeats):
                turn += 1
                calls[turn % len(calls)](x)
            if round_number:  # the first one warms up
                times[name].append((time.perf_counter() - started) * 1e6 / repeats)
    return {name: statistics.median(found) for name, found in times.items()}


def main(
    threads: Annotated[int, typer.Option(help="Threads; 0 for what torch has.")] = 0,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds.")] = 9,
    shape: Annotated[list[str] | None, typer.Option(help="KxN of layers.")] = None,
    scheme: Annotated[list[str] | None, typer.Option(help="Of SCHEMES; all by default.")] = None,
    tokens: Annotated[list[int] | None, typer.Option(help="Values of M.")] = None,
    instruction_set: Annotated[str | None, typer.Option(help="Force one of the compiled kernels' sets.")] = None,
    experts: Annotated[
        list[str] | None, typer.Option(help="ExHxIxk of mixtures, which are timed instead: experts, sizes, chosen.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the lines as JSON here.")] = None,
) -> None:
    """Times every kernel of every scheme beside torch's products."""
    torch.set_num_threads(threads or torch.get_num_threads())
    found = native.extension()
    sets = [] if isinstance(found, native.Absent) else list(found.instruction_sets)
    machine = {
        "cpu": next(
            (x.split(":")[1].strip() for x in _cpu_lines() if x.startswith("model name")), platform.processor()
        ),
        "hardware": this_machine("cpu").name,
        "instruction_sets": instruction_set or sets,
        "missing": missing(),
        "threads": torch.get_num_threads(),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        **installed(),
    }
    print(json.dumps(machine), flush=True)
    lines: list[dict[str, Any]] = []
    many = tokens or list(TOKENS)
    if experts:
        runs = [partial(measure_experts, Sizes.parse(text), scheme or list(EXPERT_SCHEMES)) for text in experts]
    else:
        shapes = [tuple(map(int, text.split("x"))) for text in shape] if shape else SHAPES
        runs = [partial(measure, columns, rows, scheme or list(SCHEMES)) for columns, rows in shapes]
    for run in runs:
        with torch.inference_mode(), _forced(instruction_set):
            lines += run(many, rounds)
        if output:
            output.write_text(json.dumps({"machine": machine, "lines": lines}, indent=1) + "\n")


def measure_experts(sizes: Sizes, schemes: list[str], many: list[int], rounds: int) -> list[dict[str, Any]]:
    """One line for each M and column of a mixture; M tokens choose experts at random."""
    keys = {name: SCHEMES[name] for name in schemes}
    columns = mixture_columns(sizes, keys, many, copies_of)
    lines = []
    for count in many:
        x = torch.randn(count, sizes.hidden).bfloat16()
        chosen, weights = sizes.routing(count)
        timed = {
            name: [lambda x, c=call, t=chosen, w=weights: c(x, t, w) for call in calls]
            for name, calls in columns.items()
        }
        times = interleaved_us(timed, x, rounds)
        rivals = [name for name in times if name.split()[0] not in schemes]
        for name, microseconds in times.items():
            line = {"experts": str(sizes), "M": count, "column": name, "us": round(microseconds, 1)}
            line["over the best of torch"] = round(min(times[rival] for rival in rivals) / microseconds, 2)
            lines.append(line)
            print(json.dumps(line), flush=True)
    return lines


def measure(columns: int, rows: int, schemes: list[str], many: list[int], rounds: int) -> list[dict[str, Any]]:
    """One line for each M and column of a layer [rows, columns]."""
    weight = torch.randn(rows, columns) / columns**0.5
    inputs = {count: torch.randn(count, columns).bfloat16() for count in many}
    timed, nbytes = torch_columns(weight), {"bf16 F.linear": 2 * weight.numel()}
    for name in schemes:
        for kernel, column in kernel_columns(SCHEMES[name], weight, inputs).items():
            timed[f"{name} {kernel}"], nbytes[f"{name} {kernel}"] = column
    lines = []
    for count, x in inputs.items():
        times = interleaved_us(timed, x, rounds)
        for name, microseconds in times.items():
            line = {"K": columns, "N": rows, "M": count, "column": name, "us": round(microseconds, 1)}
            for base in ("bf16 F.linear", "bf16 prepacked"):
                if base in times:
                    line[f"over {base}"] = round(times[base] / microseconds, 2)
            if count == 1 and name in nbytes:
                line["GB/s"] = round(nbytes[name] / microseconds / 1e3, 1)
            lines.append(line)
            print(json.dumps(line), flush=True)
    return lines


def _cpu_lines() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def _forced(name: str | None) -> Any:
    from contextlib import nullcontext

    return native.forced(name) if name else nullcontext()


if __name__ == "__main__":
    typer.run(main)
