"""`fewbit convert`: a checkpoint in another format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fewbit.cli import options
from fewbit.cli.output import console, print_json, progress, quiet_libraries, size


def convert(
    model: options.ModelFolder,
    to: Annotated[str, typer.Option("--to", help="Checkpoint format, or bf16, f16, f32 for plain weights.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder to write, or a file for gguf; must not exist.")
    ],
    requantize: Annotated[
        str | None, typer.Option("--requantize", help="Preset for the layers that the format cannot hold.")
    ] = None,
    group_size: options.GroupSize = None,
    dequantize: Annotated[
        list[str] | None, typer.Option("--dequantize", help="Write layers plain: a name, segments of one, a glob.")
    ] = None,
    drop_activations: Annotated[
        bool, typer.Option("--drop-activations", help="Keep the weights; no longer quantize activations.")
    ] = False,
    max_shard_size: options.ShardSize = "5GB",
    json: options.Json = False,
) -> None:
    """Write MODEL in another format, its codes bit for bit, or say what cannot be held and what it would cost."""
    quiet_libraries()
    from fewbit.checkpoints.output import parse_size
    from fewbit.models.conversion.convert import convert as convert_checkpoint
    from fewbit.models.stored import StoredCheckpoint

    total = StoredCheckpoint.open(model).folder.nbytes
    with progress(f"Converting to {to}", total, quiet=json) as advance:
        report = convert_checkpoint(
            model,
            output,
            to,
            requantize=requantize,
            group_size=group_size,
            dequantize=dequantize or (),
            drop_activations=drop_activations,
            max_shard_bytes=parse_size(max_shard_size),
            progress=advance,
        )
    if json:
        print_json(report | {"output": str(output)})
        return
    outcomes = [*report["layers"], *report["dequantized"]]
    changed = [layer for layer in outcomes if layer["sqnr_db"] is not None]
    loss = "all numbers are the same"
    if changed:
        worst = min(changed, key=lambda layer: layer["sqnr_db"])
        loss = (
            f"{len(outcomes) - len(changed)} of them unchanged, "
            f"lowest SQNR {worst['sqnr_db']:.1f} dB in {worst['name']}"
        )
    console.print(
        f"{len(outcomes)} layers from {report['source_format']} to {report['format']} in {report['seconds']:.1f} s, "
        f"{loss}: {size(report['bytes_before'])} became {size(report['bytes_after'])}. Reopened and compared."
    )
    for before, after in report["restated"].items():
        console.print(f"[yellow]Note:[/] {before} is now {after}.")
    for note in report["notes"]:
        console.print(f"[yellow]Note:[/] {note}")
    console.print(f"Next: fewbit verify {output}")
