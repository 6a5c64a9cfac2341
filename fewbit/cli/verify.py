"""`fewbit verify`: reopen a checkpoint and prove it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fewbit.cli import options
from fewbit.cli.output import console, print_json, quiet_libraries


def verify(
    model: options.ModelFolder,
    against: Annotated[Path | None, typer.Option("--against", help="The unquantized model to compare with.")] = None,
    json: options.Json = False,
) -> None:
    """Check every file, tensor and byte, each decoded weight, and a forward pass. Exit code 1 if a check fails."""
    quiet_libraries()
    from fewbit.evaluation.verify import verify as verify_checkpoint

    with console.status("Verifying") if not json and console.is_terminal else _nothing():
        result = verify_checkpoint(model, against)
    if json:
        print_json({"passed": result.passed, "checks": [vars(check) for check in result.checks]})
    else:
        for check in result.checks:
            mark = "[green]ok[/]  " if check.passed else "[bold red]FAIL[/]"
            console.print(f"{mark} {check.name}: {check.detail.replace('[', chr(92) + '[')}")
    if not result.passed:
        raise typer.Exit(1)


def _nothing():
    from contextlib import nullcontext

    return nullcontext()
