"""Linear kernels on a GPU beside their rivals: device time inside a CUDA graph, over rotating weights, results checked.

    python benchmarks/kernels.py --rivals DIR --output results.json
    python benchmarks/kernels.py --read results.json --markdown
    python benchmarks/kernels.py --read results.json --costs fewbit/kernels/tuned/nvidia-h200.json

Times `F.linear` in bf16, every kernel of fewbit that takes a layer and the libraries of `rivals.py`, all in one run,
see `kernel_columns.py`. Programs are compiled beforehand, on all cores. What fails or hangs is named and left out.
Results are written after every layer, and the run ends by itself within `--seconds`. At its end it prints what the
costs of the run choose, see `kernel_summary.py`; `--markdown` prints the tables of docs/performance.md, `--costs` keeps
the run's costs in a table that choices are made from.
"""

from __future__ import annotations

import json
import platform
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from kernel_columns import BF16, HUMMING, MANY_ROWS, Figures, Layer, bf16_column, kernel_column, rival_column, run_once
from kernel_summary import Results, costs_of, summary
from kernel_tables import tables
from kernel_worker import Failed, Worker, ahead
from rivals import names_at_hand

from fewbit.kernels.probe import default_device, installed, this_machine
from fewbit.kernels.registry import choose_kernel
from fewbit.kernels.tuned.table import Table, name_of, with_costs
from fewbit.kernels.tuned.tune import LADDER

LLAMA_3_8B = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))
"""K and N of a layer's joined projections of queries, keys and values, of outputs, of gate and up, and of down."""
W4A8 = tuple(f"{weight} * e4m3:token:f32:dynamic" for weight in ("int4:group128:bf16", "e2m1:group32:e8m0"))
SCHEMES = ("W4A16", *W4A8, "FP8_DYNAMIC", "W8A8", "NVFP4A16", "MXFP4A16", "FP8_BLOCK", "FP8")
COLUMN_LIMIT_S = 60.0
"""After which a column hangs."""
AHEAD_SHARE = 0.4
"""Of the time of a run, what compiling may take."""


@dataclass
class Run:
    """What was measured so far, and where it is written.

    Attributes:
        figures: layer and rows of x -> its line of the table.
        not_run: what time ran out on before it was timed once.
        left_out: columns of schemes that failed.
    """

    machine: dict[str, Any]
    ladder: list[int]
    folder: Path | None
    output: Path | None
    end: float
    figures: dict[tuple[Layer, int], dict[str, Any]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)
    left_out: set[tuple[str, str]] = field(default_factory=set)
    longest_s: dict[bool, float] = field(default_factory=dict)
    rounds: int = 0

    @property
    def seconds_left(self) -> float:
        return self.end - time.monotonic()

    @property
    def results(self) -> Results:
        told = {"failed": self.failed, "not_run": self.not_run, "whole_rounds": self.rounds}
        return {"machine": self.machine, **told, "lines": list(self.figures.values())}

    def compile_ahead(self, layers: list[Layer]) -> None:
        """Compiles what the layers need; one shape after the other, so that what they share is there already."""
        begin, shapes = time.monotonic(), list(dict.fromkeys((layer.columns, layer.rows) for layer in layers))
        by_shape = sorted(layers, key=lambda layer: shapes.index((layer.columns, layer.rows)))
        jobs = [(layer, tuple(self.ladder), name, False) for layer in by_shape for name in takers(layer)]
        jobs += [(layer, tuple(self.ladder), name, True) for layer in by_shape for name in self.rivals(layer)]
        jobs = [job for job in jobs if job[2] == HUMMING or not job[3]]  # the others are compiled already
        jobs.sort(key=lambda job: job[2] != HUMMING)  # what takes longest first
        failures = ahead(run_once, jobs, self.seconds_left * AHEAD_SHARE)
        print(f"{len(jobs)} kernels of layers compiled in {time.monotonic() - begin:.0f} s", flush=True)
        for (layer, _, name, _), failure in failures.items():
            print(f"  not {name} of {layer}: {failure.reason}", flush=True)

    def measure(self, layers: list[Layer], rounds: int) -> None:
        """Times all layers, round after round, while there is time.

        Few rows first, of all layers, then many: after seconds of large products the clock is low for a while.
        """
        worker = Worker()
        for turn in range(rounds):
            for are_many in (False, True):
                ladder = [tokens for tokens in self.ladder if (tokens >= MANY_ROWS) == are_many]
                for layer in layers if ladder else ():
                    begin = time.monotonic()
                    enough = self.seconds_left > self.longest_s.get(are_many, 0)
                    if not (enough and self._layer(worker, layer, ladder)):
                        self.not_run += [] if turn else [f"{layer} M={ladder[0]} to {ladder[-1]}"]
                        continue
                    took = time.monotonic() - begin
                    self.longest_s[are_many] = max(self.longest_s.get(are_many, 0), took)
                    self.write()
            self.rounds += int(self.seconds_left > 0)
        worker.stop()
        self.write()

    def _layer(self, worker: Worker, layer: Layer, ladder: list[int]) -> bool:
        """Times every column; whether there was time for all."""
        kernels, took, lines = takers(layer), list[str](), dict[int, dict[str, float]]()
        for name in (BF16, *kernels, *self.rivals(layer)):
            if (layer.scheme, name) in self.left_out:
                continue
            function: Any = bf16_column if name == BF16 else kernel_column if name in kernels else rival_column
            rest = () if name == BF16 else (name, self.ladder) if name in kernels else (name, self.folder)
            begin = time.monotonic()
            limit = min(COLUMN_LIMIT_S, self.seconds_left)
            found: Figures | Failed = worker(limit, function, layer, ladder, *rest)
            took.append(f"{name} {time.monotonic() - begin:.1f}")
            if isinstance(found, Failed) and self.seconds_left < 1:
                return False
            if isinstance(found, Failed):
                self.left_out.add((layer.scheme, name))
                self.failed.append(f"{name} of {layer}: {found.reason}")
                print(f"FAILED and left out of {layer.scheme}: {self.failed[-1]}", flush=True)
                continue
            for tokens, figures in found.items():
                lines.setdefault(tokens, {}).update(figures)
        for tokens, figures in lines.items():
            print(f"{layer} M={tokens}: {_told(self._kept(layer, tokens, figures))}", flush=True)
        print(f"{layer} took seconds: {', '.join(took)}", flush=True)
        return True

    def _kept(self, layer: Layer, tokens: int, figures: dict[str, float]) -> dict[str, Any]:
        """Adds figures of a round to a line: the shortest time of all rounds, and the largest error."""
        line = self.figures.setdefault((layer, tokens), {})
        if not line:
            chosen = choose_kernel(layer.request, this_machine(layer.device)).kernel.name
            line |= {"scheme": layer.scheme, "K": layer.columns, "N": layer.rows, "M": tokens, "chosen": chosen}
        for figure, value in figures.items():
            better = min if figure.endswith("_us") else max
            line[figure] = float(f"{better(value, line.get(figure, value)):.4g}")
        return line

    def rivals(self, layer: Layer) -> list[str]:
        """Those that are at hand and are no kernels of fewbit's for the layer too."""
        kernels = takers(layer)
        return [name for name in names_at_hand(layer.scheme, self.folder) if name not in kernels]

    def write(self) -> None:
        """Writes what there is, a line to each line."""
        if self.output:
            text = json.dumps(self.results).replace('{"scheme"', '\n{"scheme"')
            self.output.write_text(text + "\n", encoding="utf-8")


def _told(line: dict[str, Any]) -> str:
    return ", ".join(f"{figure[:-3]} {value:.1f}" for figure, value in line.items() if figure.endswith("_us"))


def takers(layer: Layer) -> list[str]:
    """The kernels that take a layer here, of the class of numerics that is chosen from."""
    choice = choose_kernel(layer.request, this_machine(layer.device))
    admitted = [verdict for verdict in choice.verdicts if verdict.refusal is None]
    return [
        verdict.kernel.name
        for verdict in admitted
        if verdict.numerics is choice.numerics and not verdict.kernel.reference
    ]


def measured(
    schemes: list[str], shapes: list[tuple[int, int]], ladder: list[int], rivals: Path | None, seconds: float,
    rounds: int, output: Path | None, device: str,
) -> Results:  # fmt: skip
    """Times every kernel that takes each scheme on this machine."""
    hardware = this_machine(device)
    machine = {
        "device": name_of(hardware), "hardware": hardware.name, "driver": hardware.driver,
        "python": platform.python_version(), "software": installed(),
    }  # fmt: skip
    print(json.dumps(machine), flush=True)
    layers = [Layer(scheme, rows, columns, device) for scheme in schemes for columns, rows in shapes]
    run = Run(machine, ladder, rivals, output, time.monotonic() + seconds)
    run.compile_ahead(layers)
    run.measure(layers, rounds)
    return run.results


def main(
    scheme: Annotated[list[str] | None, typer.Option(help="Presets and keys to time; all of the table.")] = None,
    shape: Annotated[list[str] | None, typer.Option(help="KxN of layers to time; those of Llama-3-8B.")] = None,
    rows: Annotated[list[int] | None, typer.Option(help="Rows of x to time; the ladder of `fewbit tune`.")] = None,
    rivals: Annotated[Path | None, typer.Option(help="Folder of vLLM's compiled kernels, see rivals.py.")] = None,
    seconds: Annotated[float, typer.Option(help="End by then; what was not run is named.")] = 1200,
    rounds: Annotated[int, typer.Option(help="Time everything so many times; the shortest time counts.")] = 2,
    read: Annotated[Path | None, typer.Option(help="Take results from this file instead of measuring.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write results as JSON here.")] = None,
    costs: Annotated[Path | None, typer.Option(help="Put the run's costs into this table.")] = None,
    markdown: Annotated[bool, typer.Option(help="Print tables instead of the summary.")] = False,
) -> None:
    """Times kernels and rivals, or reads what was timed; prints what it says, and keeps costs where asked."""
    if read:
        results: Results = json.loads(read.read_text(encoding="utf-8"))
    else:
        shapes = [tuple(map(int, one.split("x"))) for one in shape or []]
        schemes, ladder = scheme or list(SCHEMES), sorted(rows or LADDER)
        device = default_device()
        results = measured(schemes, shapes or list(LLAMA_3_8B), ladder, rivals, seconds, rounds, output, device)
    for line in tables(results) if markdown else summary(results):
        print(line)
    if costs:
        table = with_costs(Table.read(costs), costs_of(results))
        table.write(costs)
        print(f"{len(table.costs)} costs in {costs}")


if __name__ == "__main__":
    typer.run(main)
