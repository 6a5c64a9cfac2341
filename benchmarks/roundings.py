"""Rounding activations on a GPU: alone and with what makes them, beside a copy and beside torch's own operations.

    python benchmarks/roundings.py --output roundings.json
    python benchmarks/roundings.py --key e4m3:token:f32:dynamic --rows 4096

Every key is first compared with its definition, bit for bit, on fresh random rows of bf16 and f16. Figures are device
microseconds inside a CUDA graph over rotating inputs; a share is that of the rate at which a bf16 copy of the same
shape moves bytes in the same run. Keys of E2M1 are rounded to the numbers that codes stand for, as emulation does.
"""

from __future__ import annotations

import json
import os
import platform
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product, repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from fewbit.kernels.activation.producer import Producer, gated, normed
from fewbit.kernels.activation.rounding import Rounding
from fewbit.kernels.probe import installed, this_machine
from fewbit.kernels.programs.activations import quantized
from fewbit.kernels.tuned.measure import Call, graph_time_us
from fewbit.numerics import decode
from fewbit.numerics.activations import quantize_activations
from fewbit.spec.key import QuantKey

KEYS = (
    "e4m3:token:f32:dynamic", "int8:token:f32:dynamic", "int8:asym:token:f32:dynamic", "e4m3:group128:f32:dynamic",
    "e4m3:group64:f32:dynamic", "e4m3:group32:e8m0:dynamic", "e2m1:group32:e8m0:dynamic",
    "e2m1:group16:e4m3:dynamic/tensor:f32",
)  # fmt: skip
ROWS = (1, 64, 4096)
COLUMNS = (4096, 14336)
CHECKED = (32, 416, 4096, 14336)
"""Lengths of the rows that are compared with the definition."""
ROTATING_BYTES, FEWEST, MOST = 300_000_000, 2, 24
EPSILON = 1e-5


def statics(key: QuantKey) -> dict[str, Tensor]:
    """The static scale that a key asks for."""
    if key.global_scale is None:
        return {}
    return {"input_global_scale": torch.tensor(1 / 500.0, dtype=torch.float64, device="cuda")}


def as_numbers(text: str) -> bool:
    """Whether a key is timed as the numbers that its codes stand for."""
    return Rounding.of(text).kind == "e2m1"


def hard_rows(columns: int, dtype: torch.dtype) -> Tensor:
    """Rows from the smallest to nearly the largest numbers of the dtype, with zeros of both signs and subnormals."""
    largest = torch.finfo(dtype).max
    low, high = (-7, 3) if dtype == torch.float16 else (-38, 36)
    sizes = torch.logspace(low, high, 20, dtype=torch.float64, device="cuda")
    x = (torch.randn(20, columns, dtype=torch.float64, device="cuda") * sizes[:, None]).clamp(-largest / 2, largest / 2)
    x = x.to(dtype)
    x[3], x[4, ::3], x[5, :16] = 0, -0.0, 0
    x[6] = torch.finfo(dtype).tiny * torch.randn(columns, device="cuda")
    x[7] = torch.randint(-40, 41, (columns,), device="cuda").to(dtype)
    return x


def compare(text: str, x: Tensor) -> None:
    """Codes or numbers, scales and zero points are those of the definition.

    Raises:
        AssertionError: they are not.
    """
    key, rounding, numbers = QuantKey.parse(text), Rounding.of(text), as_numbers(text)
    record = quantize_activations(x, key, statics(key))
    found, scales, zeros = quantized(x, rounding, statics(key), x.shape[1], numbers)
    if numbers:
        blocks = decode(record["scale"], key.scale.element).repeat_interleave(rounding.group, 1)[:, : x.shape[1]]
        expected = (decode(record["codes"], key.element) * blocks).to(x.dtype).view(torch.int16)
        assert torch.equal(found.view(torch.int16), expected), f"{text} differs on {x.dtype} {tuple(x.shape)}"
    else:
        expected = record["codes"].view(torch.uint8) - rounding.offset
        assert torch.equal(found.view(torch.uint8), expected), f"{text} differs on {x.dtype} {tuple(x.shape)}"
    expected = decode(record["scale"], key.scale.element)
    assert torch.equal(scales.t() if rounding.group else scales[:, None], expected), f"{text} has other scales"
    if zeros is not None:
        expected = decode(record["zero_point"], key.element) - rounding.offset
        assert torch.equal(zeros[:, None], expected), f"{text} has other zero points"


def inputs(rows: int, columns: int, copies: int) -> tuple[Tensor, list[Tensor]]:
    """A norm's weight, and rows of gate and up side by side, as a joined projection gives them."""
    both = [torch.randn(rows, 2 * columns, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
    return torch.rand(columns, device="cuda").bfloat16() + 0.5, both


def calls_of(text: str, weight: Tensor, both: list[Tensor]) -> dict[str, list[Call]]:
    """Everything that is timed of a key, over the same inputs."""
    columns = weight.shape[0]
    run = partial(
        quantized, rounding=Rounding.of(text), static=statics(QuantKey.parse(text)), width=columns,
        as_numbers=as_numbers(text),
    )  # fmt: skip
    plain = [x[:, :columns].contiguous() for x in both]
    gates = [(x[:, :columns], gated(x[:, columns:])) for x in both]

    def silu_times(gate: Tensor, made: Producer) -> object:
        return run(made(gate))

    def rms_norm(x: Tensor) -> object:
        return run(torch.nn.functional.rms_norm(x, (columns,), weight, EPSILON))

    return {
        "plain": [partial(run, x) for x in plain],
        "gated": [partial(run, gate, producer=made) for gate, made in gates],
        "normed": [partial(run, x, producer=normed(weight, EPSILON)) for x in plain],
        "silu, times, round": [partial(silu_times, gate, made) for gate, made in gates],
        "norm, round": [partial(rms_norm, x) for x in plain],
    }


def difference(text: str, x: Tensor, producer: Producer) -> float:
    """Share of codes that differ from those of the producer's operations, rounded alone."""
    rounding, static, numbers = Rounding.of(text), statics(QuantKey.parse(text)), as_numbers(text)
    found, _, _ = quantized(x, rounding, static, x.shape[1], numbers, producer)
    apart, _, _ = quantized(producer(x), rounding, static, x.shape[1], numbers)
    return (found.float() != apart.float()).float().mean().item()


def check(text: str, rows: list[int]) -> None:
    """Compares a key with its definition, and compiles what is timed of it into Triton's cache."""
    for columns in CHECKED:
        for dtype in (torch.bfloat16, torch.float16):
            compare(text, hard_rows(columns, dtype))
    for count, columns in product(rows, COLUMNS):
        for calls in calls_of(text, *inputs(count, columns, 1)).values():
            calls[0]()


def time_us(calls: list[Call]) -> float:
    """Device microseconds of a call; what calls return is kept, so that each writes to memory of its own."""
    kept: list[object] = []
    return graph_time_us([lambda call=call: kept.append(call()) for call in calls])


def measure(text: str, rows: int, columns: int, copy_us: float) -> dict[str, Any]:
    """One line of the table."""
    weight, both = inputs(rows, columns, copies_of(rows, columns))
    us = {name: time_us(calls) for name, calls in calls_of(text, weight, both).items()}
    x, up = both[0][:, :columns], both[0][:, columns:]
    out = 2 if as_numbers(text) else 1
    read = {"plain": 2, "gated": 4, "normed": 2}
    return {
        "key": text, "M": rows, "K": columns, "us": {name: round(value, 2) for name, value in us.items()},
        "copy_us": round(copy_us, 2),
        "share_of_copy_rate": {name: round((size + out) / 4 * copy_us / us[name], 3) for name, size in read.items()},
        "difference": [
            round(difference(text, x, gated(up)), 5), round(difference(text, x, normed(weight, EPSILON)), 5)
        ],
    }  # fmt: skip


def copies_of(rows: int, columns: int) -> int:
    """How many inputs defeat the cache."""
    return max(FEWEST, min(MOST, ROTATING_BYTES // (4 * rows * columns)))


def copy_time_us(rows: int, columns: int) -> float:
    """Microseconds of a bf16 copy."""
    _, both = inputs(rows, columns, copies_of(rows, columns))
    plain = [x[:, :columns].contiguous() for x in both]
    return graph_time_us([partial(torch.Tensor.copy_, torch.empty_like(x), x) for x in plain])


def main(
    key: Annotated[list[str] | None, typer.Option(help="Keys of activations, instead of those of the table.")] = None,
    rows: Annotated[list[int] | None, typer.Option(help="Rows of x to time.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write the lines as JSON here.")] = None,
) -> None:
    """Compares every key with its definition on this GPU, in a process each, and times it."""
    driver = this_machine("cuda").driver
    machine = {"gpu": torch.cuda.get_device_name(), "driver": driver, "python": platform.python_version()}
    machine |= installed()
    print(json.dumps(machine))
    keys, counts = list(key or KEYS), list(rows or ROWS)
    with ProcessPoolExecutor(min(len(keys), os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        list(pool.map(check, keys, repeat(counts)))
    print("bit for bit the definition on all", flush=True)
    lines = []
    for count, columns in product(counts, COLUMNS):
        copy_us = copy_time_us(count, columns)
        for text in keys:
            lines.append(measure(text, count, columns, copy_us))
            shares = ", ".join(
                f"{name} {lines[-1]['us'][name]:.2f} us {share:.0%}"
                for name, share in lines[-1]["share_of_copy_rate"].items()
            )
            print(f"{text} {count}x{columns}: {shares}", flush=True)
        if output:
            output.write_text(json.dumps({"machine": machine, "roundings": lines}))


if __name__ == "__main__":
    typer.run(main)
