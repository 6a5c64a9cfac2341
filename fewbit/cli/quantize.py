"""`fewbit quantize`: a model folder in, a quantized folder out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fewbit.cli import options
from fewbit.cli.choices import quantize_options
from fewbit.cli.output import console, print_json, progress, quiet_libraries, size, table

if TYPE_CHECKING:
    from fewbit.models.quantization.quantize import QuantizeOptions


def quantize(
    model: options.ModelFolder,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write; must not exist.")],
    scheme: options.Scheme = "W4A16",
    group_size: options.GroupSize = None,
    ignore: options.Ignore = None,
    format: options.Format = "compressed-tensors",  # noqa: A002 - the flag people know
    effort: options.Effort = "balanced",
    algorithm: options.Algorithm = None,
    settings: options.Settings = None,
    short_last_group: options.ShortLastGroup = False,
    mx_scale_rule: options.MxRule = "even",
    integer_scale_rule: options.IntegerRule = "full",
    calibration_text: options.CalibrationText = None,
    calibration_windows: options.CalibrationWindows = 32,
    calibration_length: options.CalibrationLength = 512,
    self_samples: options.SelfSamples = None,
    embeddings: options.Embeddings = None,
    kv_cache: options.KvCache = None,
    transforms: options.Transforms = None,
    activation_percentile: options.ActivationPercentile = 100.0,
    bits_per_weight: options.BitsPerWeight = None,
    fit: options.Fit = None,
    context: options.Context = 0,
    candidates: options.Candidates = None,
    max_kl: options.MaxKl = None,
    device: options.QuantizeDevice = "cpu",
    max_shard_size: options.ShardSize = "5GB",
    restart: options.Restart = False,
    keep_statistics: options.KeepStatistics = None,
    calibration_memory: options.CalibrationMemory = "16GB",
    json: options.Json = False,
) -> None:
    """Quantize MODEL into a new folder that stock transformers and vLLM load."""
    quiet_libraries()
    asked = quantize_options(locals())
    from fewbit.checkpoints.output import parse_size
    from fewbit.models.quantization.ranks import joined

    sizes = {"max_shard_bytes": parse_size(max_shard_size), "calibration_memory": parse_size(calibration_memory)}
    with joined(device) as ranks:
        how = {"restart": restart, "keep_statistics": keep_statistics, "device": ranks.device, "ranks": ranks}
        _carry_out(model, output, asked, max_kl, json, **how, **sizes)


def _carry_out(model: Path, output: Path, asked: QuantizeOptions, max_kl: float | None, json: bool, **how: Any) -> None:
    """Plans, quantizes and says what came of it; `how` goes to `quantize_checkpoint`."""
    writes = how["ranks"].writes
    quiet = json or not writes
    if max_kl is None:
        report = _run(model, output, asked, quiet, **how)
    else:
        report = _gated(model, output, asked, max_kl, quiet, **how)
    if not writes:
        return
    if json:
        print_json(report | {"output": str(output)})
        return
    _print_transforms(report["transforms"])
    _print_outcome(report)
    for caution in report["cautions"]:
        console.print(f"[yellow]Note:[/] {caution}")
    console.print(f"Next: fewbit verify {output} --against {model}")


def _run(model: Path, output: Path, asked: QuantizeOptions, quiet: bool, **how: Any) -> dict[str, Any]:
    """The report, with progress on the screen."""
    from fewbit.checkpoints.work_folder import WorkFolder
    from fewbit.models.quantization.pipeline import check_shared, quantize_checkpoint
    from fewbit.models.quantization.quantize import prepare

    WorkFolder(output).require_unwritten()
    check_shared(how["keep_statistics"], how["ranks"])
    if asked.budget() is None:
        made, calibration = prepare(model, asked, how["device"], ranks=how["ranks"])
    else:
        with progress("Measuring sensitivity", 1, quiet) as advance:
            made, calibration = prepare(model, asked, how["device"], advance, how["ranks"])
        if not quiet:
            print_budget(made.budget or {})
    with progress(f"Quantizing to {made.recipe.scheme.name}", made.bytes_before, quiet) as advance:
        return quantize_checkpoint(model, output, made, calibration=calibration, progress=advance, **how)


def _gated(model: Path, output: Path, asked: QuantizeOptions, max_kl: float, quiet: bool, **how: Any) -> dict[str, Any]:
    """The report of a run that had to stay within a divergence."""
    from fewbit.evaluation.gate import quantize_within

    def stage(label: str, total: float) -> AbstractContextManager[Callable[[float], None]]:
        return progress(label, total, quiet)

    report = quantize_within(model, output, max_kl, asked, stage=stage, **how)
    if not quiet:
        reached = report["gate"]["rounds"]
        steps = ", ".join(f"{one['mean_kl']:.4f} at {one['bits_per_weight']:.3f} bits" for one in reached)
        console.print(f"Mean KL on {report['quality']['text']}: {steps}.")
    return report


def print_budget(budget: Mapping[str, Any]) -> None:
    """The frontier that a bit budget saw, and what it chose."""
    rows = [[f"{one['bits_per_weight']:.3f}", f"{one['predicted_kl']:.5f}"] for one in budget["frontier"]]
    console.print(table("Frontier", dict.fromkeys(("bits per weight", "least predicted KL"), "right"), rows))
    chosen = ", ".join(f"{key} {share:.1%}" for key, share in budget["keys"].items())
    console.print(
        f"{budget['asked']} Chosen: {budget['bits_per_weight']:.3f} bits per weight, predicted KL "
        f"{budget['predicted_kl']:.5f} nats; {chosen}."
    )


def _print_transforms(entries: list[dict[str, Any]]) -> None:
    for name in dict.fromkeys(entry["transform"] for entry in entries):
        own = [entry for entry in entries if entry["transform"] == name]
        scaled = [entry for entry in own if "loss_before" in entry and entry["choice"] != "none"]
        tried = sum("choice" in entry and "block" in entry for entry in own)
        if tried:
            console.print(f"{name}: {len(scaled)} of {tried} mappings scaled.")
        for entry in own:
            if "block" not in entry:
                console.print(f"{name}: {entry['what']} rotated ({entry['choice']}).")


def _print_outcome(report: dict[str, Any]) -> None:
    lossy = [layer for layer in report["layers"] if layer["sqnr_db"] is not None]
    worst = min(lossy, key=lambda layer: layer["sqnr_db"], default=None)
    quality = "Nothing was lost."
    if worst is not None:
        mean = sum(layer["sqnr_db"] for layer in lossy) / len(lossy)
        quality = f"Mean SQNR {mean:.1f} dB, lowest {worst['sqnr_db']:.1f} dB in {worst['name']}."
    console.print(
        f"{len(report['layers'])} layers quantized by {report['algorithm']} to "
        f"{report['bits_per_weight']:.3f} bits per weight ({report['whole_bits_per_weight']:.3f} over the whole model) "
        f"in {report['seconds']:.1f} s: "
        f"{size(report['bytes_before'])} became {size(report['bytes_after'])}. "
        f"{quality}"
    )
    lost = [layer for layer in report["layers"] if layer["loss"] is not None]
    if lost:
        worst = max(lost, key=lambda layer: layer["loss"])
        console.print(f"Largest relative error of an output: {100 * worst['loss']:.2g}% in {worst['name']}.")
    unreached = [layer["name"] for layer in report["layers"] if layer["tokens"] == 0]
    if unreached:
        console.print(f"[yellow]Note:[/] no calibration token reached {len(unreached)} layers, {unreached[0]} for one.")
    for method in sorted({layer["method"] for layer in report["layers"]} - {report["algorithm"]}):
        names = [layer["name"] for layer in report["layers"] if layer["method"] == method]
        console.print(f"[yellow]Note:[/] {len(names)} layers got their codes by {method}, the first {names[0]}.")
    told = [layer for layer in report["layers"] if layer["remarks"] and layer["tokens"] != 0]
    if told:
        console.print(f"Remarks on {len(told)} layers; {told[0]['name']}: {'; '.join(told[0]['remarks'])}.")
