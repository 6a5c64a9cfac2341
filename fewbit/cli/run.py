"""`fewbit run`: text from a model."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from fewbit.cli import options
from fewbit.cli.choices import preference, torch_device, torch_dtype
from fewbit.cli.output import errors, print_json, progress, quiet_libraries

if TYPE_CHECKING:
    from fewbit.models.joining import JoinOutcome


def run(
    model: options.ModelFolder,
    prompt: Annotated[str, typer.Argument(help="A question, or a text to continue with --no-chat.")],
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Stop after this many tokens.")] = 64,
    chat: Annotated[bool, typer.Option("--chat/--no-chat", help="Use the tokenizer's chat template.")] = True,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    linear_backend: options.Backend = None,
    backend: options.KeyBackends = None,
    disable_kernel: options.DisableKernel = None,
    strict: options.Strict = False,
    join_members: options.JoinMembers = False,
    batch_invariant: options.BatchInvariant = False,
    compiled_step: Annotated[
        bool,
        typer.Option("--compiled-step/--no-compiled-step", help="Decode by the compiled step where it runs the model."),
    ] = True,
    json: options.Json = False,
) -> None:
    """Load MODEL, plain or quantized, and answer PROMPT greedily."""
    quiet_libraries()
    from fewbit.models.load import load
    from fewbit.models.quantization.calibration import load_tokenizer
    from fewbit.models.stored import StoredCheckpoint
    from fewbit.runtime.generate import generate

    wanted = preference(linear_backend, disable_kernel, strict, None, backend, batch_invariant)
    place, numbers = torch_device(device), torch_dtype(dtype)
    with progress("Loading", StoredCheckpoint.open(model).folder.nbytes, quiet=json) as advance:
        loaded = load(
            model, device=place, dtype=numbers, preference=wanted, strict=strict, join_members=join_members,
            progress=advance,
        )  # fmt: skip
    if join_members and not json:
        _print_joined(loaded.fewbit_report.joined)
    tokenizer = load_tokenizer(model)

    def show(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    answer = generate(
        loaded,
        tokenizer,
        prompt,
        max_new_tokens=max_new_tokens,
        chat=chat,
        compiled_step=compiled_step,
        on_text=None if json else show,
    )
    if json:
        joined = {"joined": [str(one) for one in loaded.fewbit_report.joined]} if join_members else {}
        print_json(vars(answer) | {"tokens_per_second": answer.tokens_per_second} | joined)
        return
    print()
    errors.print(
        f"[dim]{answer.prompt_tokens} prompt tokens in {answer.prefill_seconds:.2f} s, "
        f"{answer.tokens} new ones at {answer.tokens_per_second:.1f} a second, by {answer.decoded_by}[/]"
    )


def _print_joined(outcomes: list[JoinOutcome]) -> None:
    """What became of the members of joined matrices, those of which the same is to be said on one line."""
    if not outcomes:
        errors.print("[dim]No quantized members to join: the model's family joins none, or they are plain.[/]")
    alike: dict[str, list[str]] = {}
    for outcome in outcomes:
        alike.setdefault(outcome.account, []).append(outcome.name)
    for account, names in alike.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        errors.print(f"[dim]{names[0]}{more}: {account}.[/]")
