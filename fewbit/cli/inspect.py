"""`fewbit inspect`: what is in a checkpoint, layer by layer, from headers alone."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

from fewbit.cli import options
from fewbit.cli.output import console, print_json, size, table


def inspect(model: options.ModelFolder, json: options.Json = False) -> None:
    """Print the format, the scheme by group of modules, bits per weight, bytes and oddities. No weight is read."""
    from fewbit.models.inspect import inspect_checkpoint

    with _uncollected():
        found = inspect_checkpoint(model)
        groups = _groups(found.layers)
    if json:
        print_json(
            {
                "format": found.format, "decided_by": found.decided_by, "bytes": found.bytes,
                "quantized_bytes": found.quantized_bytes, "groups": groups, "oddities": found.oddities,
                "transforms": found.transforms,
            }
        )  # fmt: skip
        return
    rows = [
        [str(group["count"]), group["modules"], group["shape"], group["key"] or ", ".join(group["dtypes"]),
         group["variant"], f"{group['bits_per_weight']:.3f}", size(group["bytes"])]
        for group in groups
    ]  # fmt: skip
    columns = dict.fromkeys(("", "modules", "shape", "key or dtype", "variant"), "left")
    columns |= {"bits": "right", "bytes": "right"}
    console.print(table(f"{model}: {found.format}, says {found.decided_by}", columns, rows))
    console.print(
        f"{size(found.bytes)} of tensors, "
        f"{found.quantized_bytes / max(1, found.bytes):.1%} of them in quantized layers."
    )
    plain: dict[str, int] = {}
    for layer in found.layers:
        if layer.reason:
            plain[layer.reason] = plain.get(layer.reason, 0) + layer.bytes
    for reason, held in sorted(plain.items(), key=lambda item: -item[1]):
        console.print(f"Not quantized: {size(held)}, {reason}.")
    for transform in found.transforms:
        console.print(f"Transform {transform}.")
    for oddity in found.oddities:
        console.print(f"[yellow]Oddity:[/] {oddity}")


@contextmanager
def _uncollected() -> Iterator[None]:
    """No search for cycles meanwhile: of a large checkpoint a million objects are made and kept, none of them garbage,
    and searching them takes as long as making them."""
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.enable()


def _groups(layers: tuple[Any, ...]) -> list[dict[str, Any]]:
    """Modules that differ only in the number of their block, as one entry."""
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for layer in layers:
        name = ".".join("*" if part.isdigit() else part for part in layer.name.split("."))
        entry = groups.setdefault(
            (name, layer.shape, str(layer.key), layer.variant, layer.reason),
            {
                "modules": name, "shape": "x".join(map(str, layer.shape)), "key": str(layer.key) if layer.key else None,
                "variant": layer.variant, "reason": layer.reason,
                "dtypes": layer.dtypes, "count": 0, "bytes": 0, "bits_per_weight": 0.0,
            },
        )  # fmt: skip
        entry["count"] += 1
        entry["bytes"] += layer.bytes
        entry["bits_per_weight"] = 8 * entry["bytes"] / max(1, entry["count"] * prod(layer.shape))
    return list(groups.values())
