"""Linear kernels on a GPU beside their rivals: device time inside a CUDA graph, over rotating weights, results checked.

    python benchmarks/kernels.py --scheme W4A16 --rivals DIR --output results.json
    python benchmarks/kernels.py --key "int4:group128:bf16 * e4m3:token:f32:dynamic"

A graph walks over enough copies of the weights to defeat the L2 cache; the figure is the median of the replays,
divided by the copies. Every kernel of fewbit that takes the layer is timed beside `F.linear` in bf16 and beside the
libraries of `benchmarks/rivals.py`, in the same run, after its result was compared with the reference on fresh random
inputs. Activation quantization is inside every figure but CUTLASS's.
"""

from __future__ import annotations

import json
import platform
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rivals import Rivals

from fewbit.kernels.interface import LinearRequest
from fewbit.kernels.probe import installed, this_machine
from fewbit.kernels.registry import choose_kernel, linear_kernels
from fewbit.kernels.tuned.measure import copies_of, graph_time_us
from fewbit.kernels.tuned.tune import inputs, random_layer, rotated
from fewbit.spec.key import LinearKey
from fewbit.spec.presets import preset

LLAMA_3_8B = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))  # K, N of qkv, o, gate_up, down
ROWS = (1, 4, 16, 64, 256, 1024, 4096)
TOLERANCE = {"keeps": 0.02, "drops": 0.01}
"""Relative error against the reference: bf16 outputs, and products of quantized activations where they are kept."""


def errors(request: LinearRequest, name: str, batches: list[int]) -> list[float]:
    """Relative errors of a kernel against the reference on fresh inputs; an activation key that it drops is dropped."""
    kernel, reference = linear_kernels()[name], linear_kernels()["reference"]
    record = random_layer(request, "cuda")
    same = LinearKey(request.key.weight) if kernel.weight_only else request.key
    defined = reference.prepare(record, LinearRequest.of(record, same, request.dtype))
    prepared = kernel.prepare(record, request)
    found = []
    for batch in batches:
        x = inputs(request, batch, "cuda")
        expected = reference.run(x, defined, None).float()
        error = ((kernel.run(x, prepared, None).float() - expected).norm() / expected.norm()).item()
        limit = TOLERANCE["drops" if kernel.weight_only else "keeps"]
        assert error < limit, f"{name} is off by {error:.4f} at {request.key} M={batch}"
        found.append(error)
    return found


def measure(
    scheme: str, key: LinearKey, columns: int, rows: int, rows_of_x: list[int], rivals: Rivals
) -> list[dict[str, Any]]:
    """One line for each M of a layer [rows, columns] under the key, which `scheme` is the name of."""
    static = key.activation is not None and not key.activation.is_dynamic
    request = LinearRequest(key, rows, columns, "bf16", has_input_scale=static)
    hardware = this_machine("cuda")
    takers = [k for k in linear_kernels().values() if not k.reference and k.refuse(request, hardware) is None]
    chosen = choose_kernel(request, hardware).kernel.name
    lines = {m: {"scheme": scheme, "K": columns, "N": rows, "M": m, "chosen": chosen} for m in rows_of_x}
    shape = (rows, columns)
    dense = [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16) / columns**0.5
        for _ in range(copies_of(2 * rows * columns))
    ]
    for batch, line in lines.items():
        x = inputs(request, batch, "cuda")
        line["bf16_us"] = graph_time_us([partial(torch.nn.functional.linear, x, weight) for weight in dense])
    del dense
    for kernel in takers:
        weights = rotated(kernel, request, "cuda")
        for batch, line in lines.items():
            x = inputs(request, batch, "cuda")
            line[f"{kernel.name}_us"] = graph_time_us([partial(kernel.run, x, one, None) for one in weights])
        del weights
        for line, error in zip(lines.values(), errors(request, kernel.name, list(lines)), strict=True):
            line[f"{kernel.name}_error"] = error
    copies = copies_of(int(key.weight.bits_per_weight(shape) * rows * columns / 8))
    for name, calls in rivals.layers(scheme, columns, rows, copies).items():
        for batch, line in lines.items():
            line[f"{name}_us"] = graph_time_us(calls(inputs(request, batch, "cuda")))
    return list(lines.values())


def main(
    scheme: Annotated[list[str] | None, typer.Option(help="Presets to time.")] = None,
    key: Annotated[list[str] | None, typer.Option(help="Keys of layers to time, beside presets.")] = None,
    rows: Annotated[list[int] | None, typer.Option(help="Rows of x to time.")] = None,
    rivals: Annotated[Path | None, typer.Option(help="Folder of vLLM's compiled kernels, see rivals.py.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write the lines as JSON here.")] = None,
) -> None:
    """Times every kernel that takes each preset on this GPU."""
    driver = this_machine("cuda").driver
    machine = {"gpu": torch.cuda.get_device_name(), "driver": driver, "python": platform.python_version()}
    machine |= installed()
    print(json.dumps(machine))
    others, lines = Rivals(rivals), []
    presets = scheme or ([] if key else ["W4A16", "NVFP4A16", "MXFP4A16", "FP8_DYNAMIC", "FP8"])
    asked = {name: preset(name).rules[0].key for name in presets} | {one: LinearKey.parse(one) for one in key or []}
    for name, one in asked.items():
        for columns, out in LLAMA_3_8B:
            for line in measure(name, one, columns, out, list(rows or ROWS), others):
                lines.append(line)
                times = ", ".join(f"{key[:-3]} {value:.1f}" for key, value in line.items() if key.endswith("_us"))
                print(f"{name} K={columns} N={out} M={line['M']}: {times}", flush=True)
            if output:
                output.write_text(json.dumps({"machine": machine, "lines": lines}))


if __name__ == "__main__":
    typer.run(main)
