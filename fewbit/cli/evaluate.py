"""`fewbit eval`: perplexity, and divergence from another model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fewbit.cli import options
from fewbit.cli.choices import torch_device, torch_dtype
from fewbit.cli.output import console, print_json, progress, quiet_libraries, table


def evaluate(
    model: options.ModelFolder,
    against: Annotated[Path | None, typer.Option("--against", help="The model to compare with.")] = None,
    text: options.EvaluationText = None,
    windows: options.EvaluationWindows = 16,
    window_length: options.EvaluationWindowLength = 1024,
    device: options.Device = "auto",
    dtype: options.Dtype = "float32",
    join_members: options.JoinMembers = False,
    json: options.Json = False,
) -> None:
    """Perplexity of MODEL over a text; with --against also KL divergence, top-1 agreement and logit cosine."""
    quiet_libraries()
    from fewbit.evaluation.divergence import divergence
    from fewbit.evaluation.perplexity import perplexity
    from fewbit.models.load import load
    from fewbit.models.quantization.calibration import load_tokenizer, token_windows
    from fewbit.models.quantization.texts import read_text

    place, numbers = torch_device(device), torch_dtype(dtype)
    tokenizer = load_tokenizer(against or model)
    content, name = read_text(text, tokenizer)
    ids = token_windows(tokenizer, content, window_length, windows)
    loaded = load(model, device=place, dtype=numbers, join_members=join_members)
    with progress("Scoring", len(ids), quiet=json) as advance:
        if against is None:
            found = {"perplexity": perplexity(loaded, ids, lambda: advance(1))}
        else:
            reference = load(against, device=place, dtype=numbers)
            found = vars(divergence(loaded, reference, ids, lambda: advance(1)))
    if json:
        print_json(found | {"text": name, "windows": len(ids), "window_length": window_length})
        return
    rows = [[measure.replace("_", " "), f"{value:.4f}"] for measure, value in found.items()]
    console.print(table(f"{name}, {len(ids)} windows of {window_length}", {"measure": "left", "value": "right"}, rows))
