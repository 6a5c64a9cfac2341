"""Quality of every preset and of bit budgets on a real model and real text: perplexity, KL, top-1 agreement, time.

    python benchmarks/quality.py --model fewbit-demo/SmolLM2-135M-Instruct-bf16 --text wikitext-2/test.txt

Windows of 1,024 tokens, each scored alone, float32. Activations stay in float32 unless --activations is given, so that
the rows compare weights. Prints a table and writes JSON.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from fewbit.cli.demo import machine
from fewbit.cli.output import quiet_libraries, table
from fewbit.evaluation.divergence import divergence
from fewbit.kernels.select import Preference
from fewbit.methods.linear import QuantizedLinear
from fewbit.models.load import load
from fewbit.models.quantization.calibration import load_tokenizer, token_windows
from fewbit.models.quantization.quantize import quantize
from fewbit.spec.presets import BUDGET_KEYS, PRESETS
from fewbit.spec.recipe import ScaleRules

WINDOW_LENGTH = 1024
BUDGETS = (3.5, 4.25)
"""Bits per weight of the rows in which a bit budget chooses each layer's key."""

ASYMMETRIC = tuple(f"int{bits}:asym:group{size}:bf16" for bits in (3, 4, 5) for size in (128, 64, 32))
"""Candidates of the rows in which a bit budget may choose zero points too."""


@dataclass(frozen=True)
class Row:
    """One line of the table: a preset and what is set beside it."""

    scheme: str
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        rules = self.settings.get("scale_rules")
        extra = [f"g{self.settings['group_size']}"] if "group_size" in self.settings else []
        extra += [f"{rules.mx} rule"] if rules else []
        if "algorithm" in self.settings:
            extra += [self.settings["algorithm"], *(f"{k}={v}" for k, v in self.settings.get("settings", {}).items())]
        extra += ["or asymmetric"] if "candidates" in self.settings else []
        extra += [f"after {name}" for name in self.settings.get("transforms", ())]
        budget = self.settings.get("bits_per_weight")
        return " ".join([f"{budget:g} bits" if budget else self.scheme, *extra])


def all_rows() -> list[Row]:
    """Every preset, groups of 64 where it takes a group size, and the variants that have a published figure."""
    rows = []
    for name, scheme in PRESETS.items():
        takes_group = scheme.rules[0].key.weight.granularity.kind == "group" and "A16" in name and "FP" not in name
        rows.append(Row(name, {"group_size": 64} if takes_group else {}))
    extras = [Row(name, {"group_size": 32}) for name in ("W4A16_ASYM", "W2A16_ASYM")]
    extras.append(Row("MXFP4A16", {"scale_rules": ScaleRules(mx="floor")}))
    both = (*map(str, BUDGET_KEYS), *ASYMMETRIC)
    for bits in BUDGETS:
        extras += [Row("W4A16", {"bits_per_weight": bits}), Row("W4A16", {"bits_per_weight": bits, "candidates": both})]
    return rows + extras


def without_activation_keys(model: torch.nn.Module) -> None:
    """Makes every quantized layer take its input as it is, so that only weights differ from the reference."""
    for module in model.modules():
        if isinstance(module, QuantizedLinear) and module.prepared is not None:
            constants = dict(module.prepared.constants)
            description = json.loads(str(constants["description"]))
            description["key"] = str(replace(module.key, activation=None))
            module.prepared = replace(module.prepared, constants={"description": json.dumps(description)})


def with_algorithms(rows: list[Row], algorithms: list[str]) -> list[Row]:
    """Each row once per algorithm, written `name` or `name:setting=value,setting=value`."""
    if not algorithms:
        return rows
    made = []
    for row in rows:
        for text in algorithms:
            name, _, settings = text.partition(":")
            given = dict(part.split("=", 1) for part in settings.split(",") if part)
            made.append(Row(row.scheme, {**row.settings, "algorithm": name, "settings": given}))
    return made


def with_transforms(rows: list[Row], chains: list[str]) -> list[Row]:
    """Each row once per chain of transformations, `rotation+awq:points=10`; `none` is the empty chain."""
    if not chains:
        return rows
    return [
        Row(row.scheme, {**row.settings, "transforms": () if chain == "none" else tuple(chain.split("+"))})
        for row in rows
        for chain in chains
    ]


@dataclass(frozen=True)
class Bench:
    """What is the same for all rows.

    Attributes:
        model: folder of the unquantized model.
        windows: int64 [count, length] of the text that is scored.
        reference: the model itself, float32.
        device: where everything runs.
        calibration: text file, windows and length as `quantize` takes them.
        activations: whether activations are quantized as the keys say.
    """

    model: Path
    windows: torch.Tensor
    reference: Any
    device: str
    calibration: dict[str, Any]
    activations: bool


def scored(bench: Bench, folder: Path) -> tuple[Any, dict[str, float]]:
    """A checkpoint loaded with its weights dequantized to float32 at each product, and its scores."""
    loaded = load(folder, device=bench.device, dtype=torch.float32, preference=Preference("reference"))
    if not bench.activations:
        without_activation_keys(loaded)
    found = divergence(loaded, bench.reference, bench.windows)
    return loaded, {
        "perplexity": found.perplexity, "mean_kl": found.mean_kl, "top1_agreement": found.top1_agreement,
        "reference_perplexity": found.reference_perplexity,
    }  # fmt: skip


def measure(bench: Bench, row: Row) -> dict[str, Any]:
    """Quantizes to a temporary folder, scores, removes it."""
    folder = Path(tempfile.mkdtemp()) / "quantized"
    try:
        started = time.monotonic()
        settings = {"effort": "fast"} | bench.calibration | row.settings
        report = quantize(bench.model, folder, row.scheme, device=bench.device, **settings)
        seconds = time.monotonic() - started
        scores = scored(bench, folder)[1]
    finally:
        shutil.rmtree(folder.parent)
    return {
        "row": row.label, "bits_per_weight": report["bits_per_weight"], "budget": report["budget"],
        "quantize_seconds": round(seconds, 1), **scores,
    }  # fmt: skip


def main(
    model: Annotated[Path, typer.Option(help="Folder of the unquantized model.")],
    text: Annotated[Path, typer.Option(help="UTF-8 text, say WikiText-2's test text.")],
    windows: Annotated[int, typer.Option(help="Windows of 1,024 tokens.")] = 16,
    only: Annotated[list[str] | None, typer.Option(help="Rows whose label contains this.")] = None,
    activations: Annotated[bool, typer.Option(help="Quantize activations as the keys say.")] = False,
    algorithm: Annotated[list[str] | None, typer.Option(help="round_to_nearest, gptq, gptq:sweeps=1, ...")] = None,
    transform: Annotated[list[str] | None, typer.Option(help="none, awq, rotation, rotation+awq, ...")] = None,
    calibration_text: Annotated[Path | None, typer.Option(help="UTF-8 text for calibration.")] = None,
    calibration_windows: Annotated[int, typer.Option(help="Windows of 512 tokens for calibration.")] = 128,
    self_samples: Annotated[int | None, typer.Option(help="Of them, windows that the model writes itself.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    output: Annotated[Path | None, typer.Option(help="Write the rows as JSON here.")] = None,
) -> None:
    """Prints the table of all presets."""
    quiet_libraries()
    console = Console(width=120)
    ids = token_windows(load_tokenizer(model), text.read_text(encoding="utf-8"), WINDOW_LENGTH, windows)
    calibration = {
        "calibration_text": None if calibration_text is None else str(calibration_text),
        "calibration_windows": calibration_windows,
        "self_samples": self_samples,
    }
    reference = load(model, device=device, dtype=torch.float32)
    bench = Bench(model, ids.to(device), reference, device, calibration, activations)
    rows = []
    for row in with_transforms(with_algorithms(all_rows(), algorithm or []), transform or []):
        if only and not any(part in row.label for part in only):
            continue
        rows.append(measure(bench, row))
        console.print({name: value for name, value in rows[-1].items() if name != "budget"})
        if output:
            output.write_text(json.dumps({"machine": machine(), "activations": activations, "rows": rows}, indent=2))
    cells = [
        [r["row"], f"{r['bits_per_weight']:.3f}", f"{r['perplexity']:.2f}", f"{r['mean_kl']:.4f}",
         f"{r['top1_agreement']:.1%}", f"{r['quantize_seconds']:.1f}"]
        for r in rows
    ]  # fmt: skip
    headings = {"scheme": "left"} | dict.fromkeys(("bits", "perplexity", "mean KL", "top-1", "seconds"), "right")
    base = rows[0]["reference_perplexity"] if rows else float("nan")
    console.print(table(f"{model.name}, reference perplexity {base:.2f}; {machine()}", headings, cells))


if __name__ == "__main__":
    typer.run(main)
