"""`fewbit quantize`: a model folder in, a quantized folder out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fewbit.cli import options
from fewbit.cli.output import console, print_json, progress, quiet_libraries, size

if TYPE_CHECKING:
    from fewbit.models.quantize import QuantizeOptions
    from fewbit.models.ranks import Ranks


def quantize(
    model: options.ModelFolder,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write; must not exist.")],
    scheme: options.Scheme = "W4A16",
    group_size: options.GroupSize = None,
    ignore: options.Ignore = None,
    format: options.Format = "compressed-tensors",  # noqa: A002 - the flag people know
    effort: options.Effort = "fast",
    algorithm: options.Algorithm = None,
    settings: options.Settings = None,
    short_last_group: options.ShortLastGroup = False,
    mx_scale_rule: options.MxRule = "even",
    integer_scale_rule: options.IntegerRule = "full",
    calibration_text: options.CalibrationText = None,
    calibration_windows: options.CalibrationWindows = 32,
    calibration_length: options.CalibrationLength = 512,
    kv_cache: options.KvCache = None,
    device: options.QuantizeDevice = "cpu",
    max_shard_size: options.ShardSize = "5GB",
    restart: options.Restart = False,
    keep_statistics: options.KeepStatistics = None,
    calibration_memory: options.CalibrationMemory = "16GB",
    json: options.Json = False,
) -> None:
    """Quantize MODEL into a new folder that stock transformers and vLLM load."""
    quiet_libraries()
    from fewbit.checkpoints.output import parse_size
    from fewbit.models.quantize import QuantizeOptions
    from fewbit.models.ranks import joined
    from fewbit.spec.recipe import ScaleRules

    rules = ScaleRules(integer_scale_rule, mx_scale_rule)  # type: ignore[arg-type] - it checks the words itself
    asked = QuantizeOptions(
        scheme=scheme,
        group_size=group_size,
        ignore=tuple(ignore or ()),
        format=format,
        effort=effort,
        algorithm=algorithm,
        settings=options.parse_settings(settings),
        short_last_group=short_last_group,
        scale_rules=rules,
        calibration_text=calibration_text,
        calibration_windows=calibration_windows,
        calibration_length=calibration_length,
        kv_cache=kv_cache,
    )
    how = {"restart": restart, "keep_statistics": keep_statistics}
    sizes = {"max_shard_bytes": parse_size(max_shard_size), "calibration_memory": parse_size(calibration_memory)}
    with joined(device) as ranks:
        _carry_out(model, output, asked, ranks, json, **how, **sizes)


def _carry_out(model: Path, output: Path, asked: QuantizeOptions, ranks: Ranks, json: bool, **how: Any) -> None:
    """Plans, quantizes and says what came of it; `how` goes to `quantize_checkpoint`."""
    from fewbit.models.pipeline import quantize_checkpoint
    from fewbit.models.quantize import calibration_for

    made = asked.plan(model)
    how |= {"calibration": calibration_for(model, made, asked), "device": ranks.device, "ranks": ranks}
    quiet = json or not ranks.writes
    with progress(f"Quantizing to {made.recipe.scheme.name}", made.bytes_before, quiet=quiet) as advance:
        report = quantize_checkpoint(model, output, made, progress=advance, **how)
    if not ranks.writes:
        return
    if json:
        print_json(report | {"output": str(output)})
        return
    _print_outcome(report)
    for caution in made.cautions:
        console.print(f"[yellow]Note:[/] {caution}")
    console.print(f"Next: fewbit verify {output} --against {model}")


def _print_outcome(report: dict[str, Any]) -> None:
    lossy = [layer for layer in report["layers"] if layer["sqnr_db"] is not None]
    worst = min(lossy, key=lambda layer: layer["sqnr_db"], default=None)
    quality = "Nothing was lost."
    if worst is not None:
        mean = sum(layer["sqnr_db"] for layer in lossy) / len(lossy)
        quality = f"Mean SQNR {mean:.1f} dB, lowest {worst['sqnr_db']:.1f} dB in {worst['name']}."
    console.print(
        f"{len(report['layers'])} layers quantized by {report['algorithm']} to "
        f"{report['bits_per_weight']:.3f} bits per weight in {report['seconds']:.1f} s: "
        f"{size(report['bytes_before'])} became {size(report['bytes_after'])}. "
        f"{quality}"
    )
    lost = [layer for layer in report["layers"] if layer["loss"] is not None]
    if lost:
        worst = max(lost, key=lambda layer: layer["loss"])
        console.print(f"Largest relative error of an output: {worst['loss']:.2%} in {worst['name']}.")
    unreached = [layer["name"] for layer in report["layers"] if layer["note"]]
    if unreached:
        console.print(f"[yellow]Note:[/] no calibration token reached {len(unreached)} layers, {unreached[0]} for one.")
    for method in sorted({layer["method"] for layer in report["layers"]} - {report["algorithm"]}):
        names = [layer["name"] for layer in report["layers"] if layer["method"] == method]
        console.print(f"[yellow]Note:[/] {len(names)} layers fell back ({method}), the first {names[0]}.")
