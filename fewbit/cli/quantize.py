"""`fewbit quantize`: a model folder in, a quantized folder out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fewbit.cli import options
from fewbit.cli.output import console, print_json, progress, quiet_libraries, size


def quantize(
    model: options.ModelFolder,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write; must not exist.")],
    scheme: options.Scheme = "W4A16",
    group_size: options.GroupSize = None,
    ignore: options.Ignore = None,
    format: options.Format = "compressed-tensors",  # noqa: A002 - the flag people know
    algorithm: Annotated[str, typer.Option("--algorithm", help="What chooses the codes.")] = "round_to_nearest",
    short_last_group: options.ShortLastGroup = False,
    mx_scale_rule: options.MxRule = "even",
    integer_scale_rule: options.IntegerRule = "full",
    calibration_text: options.CalibrationText = None,
    kv_cache: options.KvCache = None,
    max_shard_size: options.ShardSize = "5GB",
    json: options.Json = False,
) -> None:
    """Quantize MODEL into a new folder that stock transformers and vLLM load."""
    quiet_libraries()
    from fewbit.checkpoints.output import parse_size
    from fewbit.models.pipeline import quantize_checkpoint
    from fewbit.models.quantize import QuantizeOptions, calibration_for
    from fewbit.spec.recipe import ScaleRules

    rules = ScaleRules(integer_scale_rule, mx_scale_rule)  # type: ignore[arg-type] - it checks the words itself
    asked = QuantizeOptions(
        scheme, group_size, tuple(ignore or ()), format, algorithm, short_last_group, rules, calibration_text, kv_cache
    )
    shard_bytes = parse_size(max_shard_size)
    made = asked.plan(model)
    calibration = calibration_for(model, made, asked.calibration_text)
    with progress(f"Quantizing to {made.recipe.scheme.name}", made.bytes_before, quiet=json) as advance:
        report = quantize_checkpoint(
            model, output, made, calibration=calibration, max_shard_bytes=shard_bytes, progress=advance
        )
    if json:
        print_json(report | {"output": str(output)})
        return
    lossy = [layer for layer in report["layers"] if layer["sqnr_db"] is not None]
    worst = min(lossy, key=lambda layer: layer["sqnr_db"], default=None)
    quality = "Nothing was lost."
    if worst is not None:
        mean = sum(layer["sqnr_db"] for layer in lossy) / len(lossy)
        quality = f"Mean SQNR {mean:.1f} dB, lowest {worst['sqnr_db']:.1f} dB in {worst['name']}."
    console.print(
        f"{len(report['layers'])} layers quantized to {report['bits_per_weight']:.3f} bits per weight "
        f"in {report['seconds']:.1f} s: "
        f"{size(report['bytes_before'])} became {size(report['bytes_after'])}. "
        f"{quality}"
    )
    unreached = [layer["name"] for layer in report["layers"] if layer["note"]]
    if unreached:
        console.print(f"[yellow]Note:[/] no calibration token reached {len(unreached)} layers, {unreached[0]} for one.")
    for caution in made.cautions:
        console.print(f"[yellow]Note:[/] {caution}")
    console.print(f"Next: fewbit verify {output} --against {model}")
