"""`fewbit`: the table of commands, and how errors reach a person."""

from __future__ import annotations

import json
import sys

import typer

from fewbit.cli.convert import convert
from fewbit.cli.demo import demo
from fewbit.cli.evaluate import evaluate
from fewbit.cli.explain import explain
from fewbit.cli.inspect import inspect
from fewbit.cli.output import errors
from fewbit.cli.plan import plan
from fewbit.cli.quantize import quantize
from fewbit.cli.report import report
from fewbit.cli.run import run
from fewbit.cli.tune import tune
from fewbit.cli.verify import verify
from fewbit.errors import FewbitError

# `--max_new_tokens` and `--max-new-tokens` are one option.
SETTINGS = {"token_normalize_func": lambda token: token.replace("_", "-"), "help_option_names": ["-h", "--help"]}

app = typer.Typer(
    name="fewbit",
    help="Quantize language models, prove what was written, run it, and say which kernel runs and why.",
    no_args_is_help=True,
    add_completion=False,
    context_settings=SETTINGS,
    pretty_exceptions_enable=False,
)
COMMANDS = {
    "plan": plan,
    "quantize": quantize,
    "convert": convert,
    "verify": verify,
    "report": report,
    "inspect": inspect,
    "explain": explain,
    "eval": evaluate,
    "run": run,
    "tune": tune,
    "demo": demo,
}
for _name, _command in COMMANDS.items():
    app.command(_name, context_settings=SETTINGS)(_command)


def main() -> None:
    """Runs the command line; a user's mistake prints one sentence and a suggestion and exits with 2."""
    try:
        app()
    except FewbitError as error:
        if "--json" in sys.argv:
            print(json.dumps({"error": error.message, "hint": error.hint, "kind": type(error).__name__}))
        else:
            errors.print(f"[bold red]Error:[/] {_escaped(error.message)} [bold]{_escaped(error.hint)}[/]")
        sys.exit(2)
    except KeyboardInterrupt:
        errors.print("Stopped.")
        sys.exit(130)


def _escaped(text: str) -> str:
    return text.replace("[", r"\[")


if __name__ == "__main__":
    main()
