"""Whole tokens on a CPU: reading a prompt and decoding, by fewbit and by other engines, interleaved in one run.

    python benchmarks/generation.py --engine fewbit:W4A16=quantized --engine llama.cpp:Q4_1=model.gguf \\
        --engine vllm:bf16=model --python vllm=/path/to/vllm/bin/python --threads 2 --output results.json

Each engine is a process that waits while the others run (`engines.py`); `--python` names the interpreter of one that
lives in another environment. In each round every engine reads the same random prompt and decodes greedily; figures are
medians over the rounds, ratios medians of the rounds' own ratios. Rates of CPU time count what the engine's process ran
itself: on a busy machine they say more than those of wall time, and a thread that spins counts.
"""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

ENGINES = Path(__file__).with_name("engines.py")
PAUSE_SECONDS = 0.5
"""Before each engine's turn: threads of the one before may spin for a while after their work."""

VOCABULARY = 10_000
"""Tokens of the prompt are below this, which every tokenizer has."""


class Process:
    """An engine that runs."""

    def __init__(self, engine: str, model: str, python: str, threads: int) -> None:
        self.child = subprocess.Popen(
            [python, "-P", str(ENGINES), engine, model, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )
        self.name = engine

    def answer(self, question: dict[str, Any] | None = None) -> dict[str, Any]:
        """What it says next.

        Raises:
            SystemExit: it has ended.
        """
        assert self.child.stdin is not None and self.child.stdout is not None
        if question is not None:
            self.child.stdin.write(json.dumps(question) + "\n")
            self.child.stdin.flush()
        line = self.child.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with status {self.child.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def end(self) -> None:
        """Closes its input, after which it ends."""
        assert self.child.stdin is not None
        self.child.stdin.close()
        self.child.wait()


def rates(times: dict[str, Any], prompt: int, new: int) -> dict[str, float]:
    """Tokens a second of each part that was timed."""
    counts = {"prompt": prompt, "decode": new}
    return {
        key.replace("_seconds", ""): counts[key.split("_")[0]] / value
        for key, value in times.items()
        if key.endswith("_seconds") and value > 0
    }


def summary(rounds: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """A line for each engine: its median rates, and its ratios to every other."""
    lines: list[dict[str, Any]] = []
    for name, found in rounds.items():
        line: dict[str, Any] = {"engine": name}
        line |= {key: round(statistics.median(each[key] for each in found), 1) for key in found[0]}
        for other, theirs in rounds.items():
            if other != name:
                line[f"over {other}"] = {
                    key: round(statistics.median(a[key] / b[key] for a, b in zip(found, theirs, strict=True)), 2)
                    for key in found[0]
                    if key in theirs[0]
                }
        lines.append(line)
    return lines


def machine(threads: int) -> dict[str, Any]:
    """Where the run took place, and how busy it was."""
    cpuinfo = Path("/proc/cpuinfo")
    names = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return {
        "cpu": next((line.split(":")[1].strip() for line in names if "model name" in line), platform.processor()),
        "cores": os.cpu_count(),
        "threads": threads,
        "load": [round(load, 1) for load in os.getloadavg()],
        "python": platform.python_version(),
    }


def main(
    engine: Annotated[list[str], typer.Option(help="ENGINE:LABEL=MODEL; engines are those of engines.py.")],
    python: Annotated[list[str] | None, typer.Option(help="ENGINE=INTERPRETER, where it is not this one.")] = None,
    threads: Annotated[int, typer.Option(help="Threads of each engine.")] = 2,
    prompt: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 512,
    new: Annotated[int, typer.Option(help="Tokens to decode after it.")] = 32,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds, after one that warms up.")] = 7,
    output: Annotated[Path | None, typer.Option(help="Write everything as JSON here.")] = None,
) -> None:
    """Times engines against one another."""
    interpreters = dict(item.split("=", 1) for item in python or [])
    before, processes, versions = machine(threads), {}, {}
    for item in engine:
        (name, _, _), model = item.split("=", 1)[0].partition(":"), item.split("=", 1)[1]
        label = item.split("=", 1)[0].replace(":", " ")
        processes[label] = Process(name, model, interpreters.get(name, sys.executable), threads)
        versions[label] = processes[label].answer()["versions"]
    found: dict[str, list[dict[str, float]]] = {label: [] for label in processes}
    source = random.Random(0)
    for number in range(rounds + 1):
        tokens = [source.randrange(VOCABULARY) for _ in range(prompt)]
        for label, process in processes.items():
            time.sleep(PAUSE_SECONDS)
            times = process.answer({"prompt": tokens, "new": new})
            if number:
                found[label].append(rates(times, prompt, new))
    for process in processes.values():
        process.end()
    lines = summary(found)
    for line in lines:
        print(json.dumps(line))
    result = {
        "machine": {**before, "load_after": [round(load, 1) for load in os.getloadavg()]},
        "versions": versions,
        "prompt": prompt,
        "new": new,
        "rounds": rounds,
        "lines": lines,
    }
    print(json.dumps(result["machine"]))
    if output:
        output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
