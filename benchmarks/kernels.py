"""Linear kernels on a GPU against bf16: device time inside a CUDA graph, over rotating weights, correctness asserted.

    python benchmarks/kernels.py --scheme FP8_DYNAMIC --output results.json

A graph walks over enough copies of the weights (about 400 MB in bf16) to defeat the L2 cache; the figure is the median
of 20 replays, divided by the copies. Every kernel that takes the layer is timed beside `F.linear` in bf16, in the same
run, after its result was compared with the reference on fresh random inputs.
"""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from fewbit.kernels.interface import LinearKernel, LinearRequest, Prepared
from fewbit.kernels.probe import installed, this_machine
from fewbit.kernels.registry import linear_kernels
from fewbit.numerics import quantize
from fewbit.spec.presets import preset

LLAMA_3_8B = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))  # K, N of qkv, o, gate_up, down
ROWS = (1, 4, 16, 64, 256, 1024, 4096)
ROTATING_BYTES = 400_000_000
REPLAYS = 20
TOLERANCE = 0.02
"""Relative error against the reference: bf16 outputs of sums over thousands of products of quantized activations."""


def graph_time_us(calls: list[Callable[[], Tensor]]) -> float:
    """Median device time of one call in microseconds, the calls captured one after another in a graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(REPLAYS + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(times[3:])


def on_gpu(prepared: Prepared) -> Prepared:
    return Prepared({name: tensor.cuda() for name, tensor in prepared.tensors.items()}, prepared.constants)


def measure(scheme: str, columns: int, rows: int, kernels: list[LinearKernel]) -> list[dict[str, Any]]:
    """One line for each M of a layer [rows, columns]."""
    key = preset(scheme).rules[0].key
    request = LinearRequest(key, rows, columns, "bf16")
    copies = max(2, ROTATING_BYTES // (2 * rows * columns))
    dense = [torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) / columns**0.5 for _ in range(copies)]
    records = [quantize(weight, key.weight) for weight in dense]
    if not key.activation or not key.activation.is_dynamic:
        records = [
            r.with_tensors(input_scale=torch.tensor(4 / 448, device="cuda")) if key.activation else r for r in records
        ]
    reference = linear_kernels()["reference"]
    lines = []
    for batch in ROWS:
        x = torch.randn(batch, columns, device="cuda", dtype=torch.bfloat16)
        line = {"scheme": scheme, "K": columns, "N": rows, "M": batch}
        line["bf16_us"] = graph_time_us([partial(torch.nn.functional.linear, x, w) for w in dense])
        expected = reference.run(x, on_gpu(reference.prepare(records[0], request)), None).float()
        for kernel in kernels:
            prepared = [on_gpu(kernel.prepare(record, request)) for record in records]
            error = (kernel.run(x, prepared[0], None).float() - expected).norm() / expected.norm()
            assert error < TOLERANCE, f"{kernel.name} is off by {error:.4f} at {line}"
            line[f"{kernel.name}_us"] = graph_time_us([partial(kernel.run, x, p, None) for p in prepared])
            line[f"{kernel.name}_error"] = error.item()
            del prepared
        lines.append(line)
    return lines


def main(
    scheme: Annotated[list[str] | None, typer.Option(help="Presets to time.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write the lines as JSON here.")] = None,
) -> None:
    """Times every kernel that takes each preset on this GPU."""
    machine = {"gpu": torch.cuda.get_device_name(), "python": platform.python_version(), **installed()}
    print(json.dumps(machine))
    lines = []
    for name in scheme or ["FP8_DYNAMIC", "FP8"]:
        for columns, rows in LLAMA_3_8B:
            request = LinearRequest(preset(name).rules[0].key, rows, columns, "bf16", has_input_scale=name == "FP8")
            hardware = this_machine("cuda")
            takers = [k for k in linear_kernels().values() if not k.reference and k.refuse(request, hardware) is None]
            for line in measure(name, columns, rows, takers):
                lines.append(line)
                times = ", ".join(f"{key[:-3]} {value:.1f}" for key, value in line.items() if key.endswith("_us"))
                print(f"{name} K={columns} N={rows} M={line['M']}: {times}", flush=True)
            if output:
                output.write_text(json.dumps({"machine": machine, "lines": lines}, indent=2))


if __name__ == "__main__":
    typer.run(main)
