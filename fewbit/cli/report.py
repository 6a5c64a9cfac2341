"""`fewbit report`: the page and the model card of a quantized folder, written anew, with what text says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fewbit.cli import options
from fewbit.cli.choices import torch_device
from fewbit.cli.output import console, print_json, progress, quiet_libraries


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that fewbit quantized.")],
    against: Annotated[Path | None, typer.Option("--against", help="The unquantized model: measure quality.")] = None,
    text: options.EvaluationText = None,
    windows: options.EvaluationWindows = 16,
    window_length: options.EvaluationWindowLength = 1024,
    base_model: Annotated[
        str | None, typer.Option("--base-model", help="The source model's name on a hub, for the card.")
    ] = None,
    device: options.Device = "auto",
    json: options.Json = False,
) -> None:
    """Write DIR's report page and model card again; with --against, measure KL, top-1 and perplexity for them first."""
    quiet_libraries()
    from fewbit.evaluation.quality import measure_quality
    from fewbit.models.report.facts import PAGE_FILE, read_report
    from fewbit.models.report.files import render_again
    from fewbit.models.report.page import quality_of

    changes: dict[str, Any] = {} if base_model is None else {"base_model": base_model}
    read_report(folder)  # before anything long
    if against is not None:
        with progress("Scoring", windows, quiet=json) as advance:
            changes["quality"] = measure_quality(
                folder,
                against,
                text=text,
                windows=windows,
                window_length=window_length,
                device=torch_device(device),
                on_window=lambda: advance(1),
            )
    made = render_again(folder, **changes)
    if json:
        print_json(made)
        return
    for name, value in quality_of(made):
        console.print(f"{name}: {value}".replace("[", r"\["))
    console.print(f"{folder / PAGE_FILE} and the model card are written.")
