"""fewbit beside llm-compressor, GPTQModel and AutoRound: one model, one calibration text, one run, one table.

    python benchmarks/quantizers.py --model SmolLM2-135M-Instruct-bf16 --text test.txt --calibration-text valid.txt \\
        --python llm-compressor=env-a/bin/python --python GPTQModel=env-b/bin/python --python AutoRound=env-c/bin/python

Every row is a process of its own, by `quantizer_calls.py`, in the interpreter or with the packages that its tool was
given; all get the same windows of 512 tokens. What they write is loaded by fewbit, looked at (do all layers have the
bits that the row claims?) and scored as `quality.py` scores: float32, windows of 1,024 tokens, each alone. A tool that
cannot be imported is a row that says so.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from checkpoint_claims import Claim, bits_of, calibrated_alike, contradictions
from quality import WINDOW_LENGTH, Bench, scored
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM

from fewbit.cli.demo import machine
from fewbit.cli.output import quiet_libraries, table
from fewbit.errors import FewbitError
from fewbit.models.load import load
from fewbit.models.quantization.calibration import (
    Calibration,
    calibration_windows,
    load_tokenizer,
    token_windows,
)

CALIBRATION_LENGTH = 512
CALLS = Path(__file__).resolve().with_name("quantizer_calls.py")
WARM_UP_WINDOWS, WARM_UP_ITERATIONS = 16, 20


@dataclass(frozen=True)
class Row:
    """A tool and what it is asked for: symmetric or asymmetric integers in groups."""

    tool: str
    bits: int
    group_size: int
    symmetric: bool = True
    effort: str = ""

    @property
    def scheme(self) -> str:
        return f"W{self.bits}A16{'' if self.symmetric else '_ASYM'} g{self.group_size}"

    @property
    def label(self) -> str:
        return " ".join(part for part in (self.scheme, self.tool, self.effort) if part)


ROWS = (
    Row("fewbit", 4, 64, effort="balanced"),
    Row("llm-compressor", 4, 64),
    Row("GPTQModel", 4, 64),
    Row("fewbit", 4, 64, effort="best"),
    Row("AutoRound", 4, 64),
    Row("fewbit", 3, 64, effort="balanced"),
    Row("GPTQModel", 3, 64),
    Row("fewbit", 3, 64, effort="best"),
    Row("AutoRound", 3, 64),
    Row("fewbit", 2, 32, False, effort="balanced"),
    Row("GPTQModel", 2, 32, False),
    Row("fewbit", 2, 32, False, effort="best"),
    Row("AutoRound", 2, 32, False),
)


@dataclass
class Outcome:
    """What became of a row: a call for each round, and the reason where there is no checkpoint to score."""

    row: Row
    calls: list[dict[str, Any]] = field(default_factory=list)
    problem: str = ""
    scores: dict[str, Any] = field(default_factory=dict)

    @property
    def absent(self) -> bool:
        return self.problem.startswith("not installed")

    def seconds(self, *parts: str) -> float:
        """The median over rounds of the sum of these parts of the call, all of them where none is named."""
        return median(
            sum(value for name, value in call["seconds"].items() if not parts or name in parts) for call in self.calls
        )

    def record(self) -> dict[str, Any]:
        """What the JSON file says of it."""
        found: dict[str, Any] = {"row": self.row.label, **asdict(self.row), "problem": self.problem, **self.scores}
        if self.calls:
            found |= {"quantize_seconds": self.seconds("quantize"), "seconds_with_load_and_save": self.seconds()}
        return found | {"calls": self.calls}


@dataclass(frozen=True)
class Tools:
    """How the tools are called.

    Attributes:
        calibration_text: the file that the calibration windows come from.
        device: where the tools run.
        iterations: of the algorithms that tune by gradients; None for each tool's default.
        interpreters: tool -> its Python.
        packages: tool -> what is put on PYTHONPATH for it.
        limit: seconds after which a call is stopped; None for never.
        batch: windows that rivals read at a time; None for each tool's default.
    """

    calibration_text: Path
    device: str
    iterations: int | None
    interpreters: dict[str, str]
    packages: dict[str, str]
    limit: float | None = None
    batch: int | None = None

    def run(self, tool: str, request: Path, log: Path) -> str:
        """A process of the tool's, in a folder of its own, where tools leave logs; returns how it ended."""
        environment = dict(os.environ, HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
        if tool in self.packages:
            environment["PYTHONPATH"] = self.packages[tool]
        elif tool in self.interpreters:
            environment.pop("PYTHONPATH", None)
        elif "PYTHONPATH" in environment:
            environment["PYTHONPATH"] = absolute(environment["PYTHONPATH"])
        # -P: the folder of the script holds modules whose names are other packages' too.
        command = [self.interpreters.get(tool, sys.executable), "-P", str(CALLS), str(request)]
        with log.open("w", encoding="utf-8") as written:
            try:
                ended = subprocess.run(
                    command,
                    stdout=written,
                    stderr=written,
                    env=environment,
                    cwd=log.parent,
                    check=False,
                    timeout=self.limit,
                )
            except subprocess.TimeoutExpired:
                return f"stopped after {self.limit:g} s"
            except OSError as error:
                return f"{command[0]}: {error.strerror}"
        return f"ended with {ended.returncode}"


@dataclass(frozen=True)
class Workshop:
    """What the tools are called on.

    Attributes:
        folder: of the requests, answers, logs and checkpoints.
        model: what they quantize.
        windows: int64 [count, length], the calibration windows.
        tools: how they are called.
    """

    folder: Path
    model: Path
    windows: torch.Tensor
    tools: Tools

    def checkpoint(self, row: Row) -> Path:
        return self.folder / row.label.replace(" ", "-") / "checkpoint"

    def log_end(self, row: Row, lines: int = 20) -> list[str]:
        """The last lines that a row's process wrote."""
        log = self.checkpoint(row).with_name("log")
        return log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-lines:]

    def call(self, outcome: Outcome) -> None:
        """Calls a row's tool once more, unless it had a problem before; the checkpoint of an earlier round goes."""
        if outcome.problem:
            return
        row, checkpoint = outcome.row, self.checkpoint(outcome.row)
        if checkpoint.parent.is_dir():
            shutil.rmtree(checkpoint.parent)
        checkpoint.parent.mkdir(parents=True)
        request, answer, windows = (checkpoint.with_name(name) for name in ("request.json", "answer.json", "windows"))
        torch.save(self.windows, windows)
        asked = asdict(row) | {
            "model": str(self.model), "output": str(checkpoint), "windows": str(windows), "answer": str(answer),
            "calibration_text": str(self.tools.calibration_text), "device": self.tools.device,
            "iterations": self.tools.iterations, "batch": self.tools.batch,
        }  # fmt: skip
        request.write_text(json.dumps(asked), encoding="utf-8")
        ended = self.tools.run(row.tool, request, checkpoint.with_name("log"))
        if not answer.is_file():
            outcome.problem = ": ".join([ended, *self.log_end(row, 1)])
            return
        said = json.loads(answer.read_text(encoding="utf-8"))
        if "absent" in said:
            outcome.problem = f"not installed: {said['absent']}"
            return
        outcome.calls.append(said)


def first_blocks(model: Path, blocks: int, folder: Path) -> Path:
    """A folder with the first `blocks` blocks of a model as a model."""
    config = AutoConfig.from_pretrained(model, local_files_only=True)
    config.num_hidden_layers = blocks
    cut = AutoModelForCausalLM.from_pretrained(model, config=config, dtype="auto", local_files_only=True)
    cut.save_pretrained(folder)
    load_tokenizer(model).save_pretrained(folder)
    return folder


def score(workshop: Workshop, bench: Bench, outcome: Outcome) -> None:
    """Looks at a row's checkpoint and scores it; what is wrong with it becomes the row's problem."""
    row, folder = outcome.row, workshop.checkpoint(outcome.row)
    try:
        loaded, outcome.scores = scored(bench, folder)
    except FewbitError as error:
        outcome.problem = str(error)
        return
    outcome.scores |= bits_of(folder)
    wrong = contradictions(Claim(row.bits, row.group_size, row.symmetric), loaded, bench.reference)
    if row.tool == "fewbit" and not calibrated_alike(folder, workshop.windows):
        wrong.append("it was calibrated on other windows")
    outcome.problem = "; ".join(wrong[:3])


def pairs(texts: list[str] | None) -> dict[str, str]:
    """`TOOL=VALUE` texts as a dictionary."""
    return dict(text.split("=", 1) for text in texts or [])


def absolute(folders: str) -> str:
    """`FOLDER:FOLDER`, each from the root, since the tools run elsewhere."""
    return os.pathsep.join(str(Path(folder).resolve()) for folder in folders.split(os.pathsep) if folder)


def quantized(
    workshop: Workshop, rows: list[Row], rounds: int, together: int, after: Callable[[list[Outcome]], None]
) -> list[Outcome]:
    """Every row called once in each round, in order, `together` at a time; `after` is called after each call."""
    outcomes = [Outcome(row) for row in rows]
    with ThreadPoolExecutor(together) as pool:
        for _ in range(rounds):
            for _ in pool.map(workshop.call, outcomes):
                after(outcomes)
    return outcomes


def compile_kernels(tools: Tools, model: Path, windows: torch.Tensor, rows: list[Row], folder: Path) -> None:
    """Calls every row once on the model's first block, several at a time, not timed.

    Triton's kernels, torch.compile's, and the extension that GPTQModel builds are then where the timed calls find them.
    """
    few = replace(tools, iterations=min(tools.iterations or WARM_UP_ITERATIONS, WARM_UP_ITERATIONS))
    block = first_blocks(model, 1, folder / "block")
    workshop = Workshop(folder / "warm-up", block, windows[:WARM_UP_WINDOWS], few)
    quantized(workshop, rows, 1, max(1, (os.cpu_count() or 1) // 2), lambda _: None)


def write(output: Path | None, about: dict[str, Any], workshop: Workshop, outcomes: list[Outcome]) -> None:
    """Writes what is known by now as JSON, with the end of the log of each row that has a problem."""
    if output is None:
        return
    logs = {one.row.label: workshop.log_end(one.row) for one in outcomes if one.problem and not one.absent}
    found = about | {"rows": [one.record() for one in outcomes], "logs": logs}
    output.write_text(json.dumps(found, indent=2), encoding="utf-8")


def printed(outcomes: list[Outcome], title: str) -> Any:
    """The table."""
    headings = {"scheme": "left", "tool": "left"} | dict.fromkeys(
        ("bits", "perplexity", "mean KL", "top-1", "quantize, s", "all, s"), "right"
    )
    cells = []
    for one in outcomes:
        head, scores = [one.row.scheme, f"{one.row.tool} {one.row.effort}".strip()], one.scores
        if one.problem:
            cells.append([*head, one.problem, "", "", "", "", ""])
            continue
        cells.append([
            *head, f"{scores['bits_per_weight']:.2f}", f"{scores['perplexity']:.2f}", f"{scores['mean_kl']:.4f}",
            f"{scores['top1_agreement']:.1%}", f"{one.seconds('quantize'):.1f}", f"{one.seconds():.1f}",
        ])  # fmt: skip
    return table(title, headings, cells)


def main(
    model: Annotated[Path, typer.Option(help="Folder of the unquantized model.")],
    text: Annotated[Path, typer.Option(help="UTF-8 text that is scored, say WikiText-2's test text.")],
    calibration_text: Annotated[Path, typer.Option(help="UTF-8 text for calibration.")],
    windows: Annotated[int, typer.Option(help="Windows of 1,024 tokens that are scored.")] = 16,
    calibration_count: Annotated[int, typer.Option("--calibration-windows", help="Windows of 512 tokens.")] = 128,
    only: Annotated[list[str] | None, typer.Option(help="Rows whose label contains this.")] = None,
    python: Annotated[list[str] | None, typer.Option(help="TOOL=PATH: the interpreter of a tool.")] = None,
    packages: Annotated[list[str] | None, typer.Option(help="TOOL=FOLDER:FOLDER: PYTHONPATH of a tool.")] = None,
    iterations: Annotated[int | None, typer.Option(help="Of gradient descent; None for each tool's default.")] = None,
    batch: Annotated[int | None, typer.Option(help="Windows that rivals read at a time; None for their own.")] = None,
    blocks: Annotated[int | None, typer.Option(help="Keep the first blocks of the model alone.")] = None,
    rounds: Annotated[int, typer.Option(help="Calls of each row; seconds are medians.")] = 1,
    together: Annotated[int, typer.Option(help="Rows at a time; beyond one, seconds mean little.")] = 1,
    warm_up: Annotated[bool, typer.Option(help="Call each row on one block first, so that kernels compile.")] = False,
    limit: Annotated[float | None, typer.Option(help="Seconds after which a call is stopped.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    keep: Annotated[Path | None, typer.Option(help="Keep logs and checkpoints here.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write the rows as JSON here.")] = None,
) -> None:
    """Prints the table; ends with 1 where a row has a problem other than a tool that is not installed."""
    quiet_libraries()
    tokenizer, prose = load_tokenizer(model), calibration_text.read_text(encoding="utf-8")
    chosen = calibration_windows(tokenizer, prose, CALIBRATION_LENGTH, calibration_count)
    ids = token_windows(tokenizer, text.read_text(encoding="utf-8"), WINDOW_LENGTH, windows)
    about: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]), "machine": machine(),
        "gpu": torch.cuda.get_device_name(device) if device.startswith("cuda") else None,
        "rounds": rounds, "together": together, "warm_up": warm_up, "blocks": blocks, "batch": batch,
        "calibration": Calibration(chosen, calibration_text.name).record(),
    }  # fmt: skip
    on_path = {tool: absolute(folders) for tool, folders in pairs(packages).items()}
    tools = Tools(calibration_text.resolve(), device, iterations, pairs(python), on_path, limit, batch)
    rows = [row for row in ROWS if not only or any(part in row.label for part in only)]
    with nullcontext(keep) if keep else tempfile.TemporaryDirectory() as place:
        folder = Path(place).resolve()
        source = model.resolve() if blocks is None else first_blocks(model, blocks, folder / "model")
        if warm_up:
            compile_kernels(tools, model, chosen, rows, folder)
        workshop = Workshop(folder / "rows", source, chosen, tools)
        keep_what_is_known = partial(write, output, about, workshop)
        outcomes = quantized(workshop, rows, rounds, together, keep_what_is_known)
        reference = load(source, device=device, dtype=torch.float32)
        bench = Bench(source, ids.to(device), reference, device, {}, activations=False)
        for one in outcomes:
            if not one.problem:
                score(workshop, bench, one)
                keep_what_is_known(outcomes)
    base = next((one.scores["reference_perplexity"] for one in outcomes if one.scores), float("nan"))
    shared = f", {together} at a time" if together > 1 else ""
    Console(width=140).print(printed(outcomes, f"{model.name}, perplexity {base:.2f} unquantized{shared}; {machine()}"))
    if any(one.problem and not one.absent for one in outcomes):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
