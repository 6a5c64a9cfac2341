"""`fewbit plan`: what quantizing would do, before anything heavy."""

from __future__ import annotations

from typing import Any

from fewbit.cli import options
from fewbit.cli.choices import hardware
from fewbit.cli.output import console, print_json, quiet_libraries, size, table


def plan(
    model: options.ModelFolder,
    scheme: options.Scheme = "W4A16",
    group_size: options.GroupSize = None,
    ignore: options.Ignore = None,
    format: options.Format = "compressed-tensors",  # noqa: A002 - the flag people know
    short_last_group: options.ShortLastGroup = False,
    transform: options.Transforms = None,
    max_shard_size: options.ShardSize = "5GB",
    device: options.Device = "auto",
    json: options.Json = False,
) -> None:
    """Print layers, bits per weight, bytes, peak memory and the kernel that would run, without reading a weight."""
    quiet_libraries()
    from fewbit.checkpoints.output import parse_size
    from fewbit.models.quantize import QuantizeOptions

    asked = QuantizeOptions(
        scheme,
        group_size,
        tuple(ignore or ()),
        format,
        short_last_group=short_last_group,
        transforms=tuple(transform or ()),
    )
    made = asked.plan(model)
    summary = summarize(made, hardware(device), parse_size(max_shard_size))
    if json:
        print_json(summary)
        return
    rows = [
        [
            str(row["count"]), row["layers"], row["shape"], row["key"] or "-",
            f"{row['bits_per_weight']:.3f}", row["kernel"] or row["reason"],
        ]
        for row in summary["layers"]
    ]  # fmt: skip
    columns = dict.fromkeys(("", "layers", "shape", "key"), "left") | {"bits": "right", "kernel, or why plain": "left"}
    console.print(table(f"{made.recipe.source} as {made.recipe.scheme.name} ({made.recipe.format})", columns, rows))
    console.print(
        f"{size(summary['bytes_before'])} becomes {size(summary['bytes_after'])}: "
        f"{summary['quantized_share']:.1%} of the bytes are quantized, "
        f"to {summary['bits_per_weight']:.3f} bits per weight. "
        f"Peak memory about {size(summary['peak_bytes'])} beside the interpreter. Kernels for {summary['hardware']}."
    )
    for note in summary["notes"]:
        console.print(f"[yellow]Note:[/] {note}")


def summarize(made: Any, device: Any, max_shard_bytes: int) -> dict[str, Any]:
    """A plan as a JSON object, equal layers of different blocks in one row."""
    from fewbit.spec.element import Element

    choices = made.choices(device, made.dtype)
    width = Element.parse(made.dtype).bits // 8
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for layer in made.layers:
        name = layer.name.replace(layer.block, "*", 1) if layer.block else layer.name
        choice = choices.get(layer.name)
        bits = layer.key.weight.bits_per_weight(layer.shape) if layer.key else 8.0 * width
        row = rows.setdefault(
            (name, layer.shape, str(layer.key), layer.reason),
            {
                "layers": name, "shape": "x".join(map(str, layer.shape)), "key": str(layer.key) if layer.key else None,
                "bits_per_weight": bits, "kernel": choice.kernel.name if choice else None,
                "reason": layer.reason, "count": 0,
            },
        )  # fmt: skip
        row["count"] += 1
    quantized = sum(layer.shape[0] * layer.shape[1] * width for layer in made.quantized)
    return {
        "source": made.recipe.source,
        "scheme": made.recipe.scheme.name,
        "format": made.recipe.format,
        "hardware": device.name,
        "layers": list(rows.values()),
        "bytes_before": made.bytes_before,
        "bytes_after": made.bytes_after,
        "quantized_share": quantized / made.bytes_before,
        "bits_per_weight": made.bits_per_weight,
        "peak_bytes": made.peak_bytes(max_shard_bytes),
        "notes": [*made.cautions, *sorted({choice.note for choice in choices.values() if choice.note})],
    }
