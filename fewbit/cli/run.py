"""`fewbit run`: text from a model."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from fewbit.cli import options
from fewbit.cli.choices import preference, torch_device, torch_dtype
from fewbit.cli.output import errors, print_json, progress, quiet_libraries


def run(
    model: options.ModelFolder,
    prompt: Annotated[str, typer.Argument(help="A question, or a text to continue with --no-chat.")],
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Stop after this many tokens.")] = 64,
    chat: Annotated[bool, typer.Option("--chat/--no-chat", help="Use the tokenizer's chat template.")] = True,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    linear_backend: options.Backend = None,
    disable_kernel: options.DisableKernel = None,
    strict: options.Strict = False,
    compiled_step: Annotated[
        bool,
        typer.Option("--compiled-step/--no-compiled-step", help="Decode by the compiled step where it runs the model."),
    ] = True,
    json: options.Json = False,
) -> None:
    """Load MODEL, plain or quantized, and answer PROMPT greedily."""
    quiet_libraries()
    from fewbit.models.calibration import load_tokenizer
    from fewbit.models.load import load
    from fewbit.models.stored import StoredCheckpoint
    from fewbit.runtime.generate import generate

    wanted = preference(linear_backend, disable_kernel, strict)
    place, numbers = torch_device(device), torch_dtype(dtype)
    with progress("Loading", StoredCheckpoint.open(model).folder.nbytes, quiet=json) as advance:
        loaded = load(model, device=place, dtype=numbers, preference=wanted, strict=strict, progress=advance)
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
        print_json(vars(answer) | {"tokens_per_second": answer.tokens_per_second})
        return
    print()
    errors.print(
        f"[dim]{answer.prompt_tokens} prompt tokens in {answer.prefill_seconds:.2f} s, "
        f"{answer.tokens} new ones at {answer.tokens_per_second:.1f} a second, by {answer.decoded_by}[/]"
    )
