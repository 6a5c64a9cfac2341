"""`fewbit plan`: what quantizing would do, before anything heavy."""

from __future__ import annotations

from typing import Any

from fewbit.cli import options
from fewbit.cli.choices import hardware, quantize_options
from fewbit.cli.output import console, print_json, quiet_libraries, size, table


def plan(
    model: options.ModelFolder,
    scheme: options.Scheme = "W4A16",
    group_size: options.GroupSize = None,
    ignore: options.Ignore = None,
    format: options.Format = "compressed-tensors",  # noqa: A002 - the flag people know
    effort: options.Effort = "balanced",
    algorithm: options.Algorithm = None,
    short_last_group: options.ShortLastGroup = False,
    calibration_windows: options.CalibrationWindows = 32,
    calibration_length: options.CalibrationLength = 512,
    embeddings: options.Embeddings = None,
    kv_cache: options.KvCache = None,
    transforms: options.Transforms = None,
    calibration_memory: options.CalibrationMemory = "16GB",
    max_shard_size: options.ShardSize = "5GB",
    device: options.Device = "auto",
    json: options.Json = False,
) -> None:
    """Print layers, bits per weight, bytes, peak memory and the kernel that would run, without reading a weight."""
    quiet_libraries()
    asked = quantize_options(locals())
    from fewbit.checkpoints.output import parse_size
    from fewbit.models.quantization.memory import Workload, memory_plan

    made, machine = asked.plan(model), hardware(device)
    held = parse_size(calibration_memory)
    work = Workload(calibration_windows, calibration_length, machine.platform == "cpu", held)
    memory = memory_plan(model, made, work, parse_size(max_shard_size))
    summary = summarize(made, machine, memory)
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
    if len(memory.parts) > 1:
        parts = ", ".join(f"{size(found)} {what}" for what, found in memory.parts.items())
        console.print(f"While blocks are calibrated, at most: {parts}.")
    for note in summary["notes"]:
        console.print(f"[yellow]Note:[/] {note}")


def summarize(made: Any, device: Any, memory: Any) -> dict[str, Any]:
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
        "peak_bytes": memory.peak,
        "memory": dict(memory.parts),
        "notes": [*made.cautions, *sorted({choice.note for choice in choices.values() if choice.note})],
    }
