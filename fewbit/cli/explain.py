"""`fewbit explain`: which kernel would run a layer on a device, and why not the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from fewbit.cli import options
from fewbit.cli.choices import hardware, preference
from fewbit.cli.output import console, print_json, quiet_libraries, table


def explain(
    model: Annotated[
        Path | None,
        typer.Argument(metavar="[MODEL]", help="A quantized checkpoint; without one, --scheme and --shape."),
    ] = None,
    scheme: options.Scheme = "W4A16",
    group_size: options.GroupSize = None,
    shape: Annotated[
        str, typer.Option("--shape", help="NxK of the layer to explain where no model is given.")
    ] = "4096x4096",
    device: options.Device = "auto",
    assume: Annotated[
        list[str] | None, typer.Option("--with", help="A package to assume installed on the device.")
    ] = None,
    dtype: options.Dtype = "auto",
    linear_backend: options.Backend = None,
    backend: options.KeyBackends = None,
    disable_kernel: options.DisableKernel = None,
    strict: options.Strict = False,
    batch_invariant: options.BatchInvariant = False,
    mix: options.Mix = None,
    json: options.Json = False,
) -> None:
    """Print every candidate kernel with its verdict. Works for devices that this machine does not have."""
    quiet_libraries()
    target = hardware(device, assume)
    wanted = preference(linear_backend, disable_kernel, strict, mix, backend, batch_invariant)
    element = element_of(dtype)
    requests = (
        stored_requests(model, element) if model else {asked_request(scheme, group_size, shape, element): "layer"}
    )
    explained = [_explain(name, request, target, wanted) for request, name in requests.items()]
    lacking = _lacking(device)
    decoded_by = _decoded_by(model, target, explained) if model else None
    if json:
        print_json({"hardware": target.name, "missing": lacking, "layers": explained, "decoded_by": decoded_by})
        return
    for reason in lacking.values():
        console.print(f"[yellow]Missing here:[/] {reason}")
    for entry in explained:
        rows = [
            [
                verdict["kernel"],
                verdict["numerics"],
                "-" if verdict["cost_us"] is None else f"{verdict['cost_us']:.1f}",
                "chosen" if verdict["chosen"] else verdict["refusal"] or "admissible",
            ]
            for verdict in entry["verdicts"]
        ]
        columns = {"kernel": "left", "numerics": "left", "us": "right", "verdict": "left"}
        console.print(table(f"{entry['layer']}: {entry['key']} {entry['shape']} on {target.name}", columns, rows))
        if entry["cost_source"]:
            console.print(f"Costs: {entry['cost_source']}, for rows {_text_of(wanted.mix)}.")
        if entry["note"]:
            console.print(f"[yellow]Note:[/] {entry['note']}")
    if decoded_by:
        console.print(f"New tokens are decoded by {decoded_by}")


def _decoded_by(model: Path, target: Any, explained: list[dict[str, Any]]) -> str:
    """What makes new tokens of the model on the device, as `Generated.decoded_by` says it."""
    from fewbit.kernels.registry import linear_kernels
    from fewbit.models.layers import model_of
    from fewbit.models.stored import StoredCheckpoint
    from fewbit.runtime.decode_step import obstacles
    from fewbit.runtime.generate import COMPILED_STEP
    from fewbit.spec import LinearKey

    if target.platform != "cpu":
        return f"transformers: the compiled step runs on CPUs, not on {target.name}"
    for entry in explained:
        if refusal := linear_kernels()[entry["kernel"]].refuse_step(LinearKey.parse(entry["key"])):
            return f"transformers: {entry['layer']} {refusal}"
    reason = next(obstacles(model_of(StoredCheckpoint.open(model))), None)
    return COMPILED_STEP if reason is None else f"transformers: {reason}"


def _lacking(device: str) -> dict[str, str]:
    """What this installation lacks -> why, where its own CPU is explained."""
    from fewbit.kernels.probe import default_device, missing

    return missing() if (default_device() if device == "auto" else device) == "cpu" else {}


def _text_of(mix: Any) -> str:
    return ", ".join(f"{rows} x {weight:g}" for rows, weight in mix.items())


def element_of(dtype: str) -> str:
    """Element name of a layer's inputs: what the user says, else bf16, as most models are."""
    from fewbit.cli.choices import torch_dtype
    from fewbit.numerics import float_element

    named = torch_dtype(dtype)
    return "bf16" if named is None else float_element(named).name


def asked_request(scheme: str, group_size: int | None, shape: str, element: str) -> Any:
    """The request of a layer of a scheme and an NxK shape.

    Raises:
        SchemeError: the shape cannot be read.
    """
    from fewbit.errors import SchemeError
    from fewbit.kernels.interface import LinearRequest
    from fewbit.models.quantization.quantize import QuantizeOptions

    parts = shape.lower().split("x")
    if len(parts) != 2 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise SchemeError(f"Cannot read the shape {shape!r}.", "Write NxK, say 4096x14336.")
    recipe = QuantizeOptions(scheme, group_size).recipe()
    return LinearRequest(recipe.scheme.keys[0], int(parts[0]), int(parts[1]), element)


def stored_requests(model: Path, element: str) -> dict[Any, str]:
    """Requests of a checkpoint's quantized layers, one for each distinct kind -> the first layer of the kind."""
    from fewbit.kernels.interface import EXTRAS, LinearRequest
    from fewbit.models.inspect import inspect_checkpoint

    kinds: dict[Any, str] = {}
    for layer in inspect_checkpoint(model).layers:
        if layer.key is not None:
            extras = layer.roles & {*EXTRAS}
            request = LinearRequest(layer.key, *layer.shape[-2:], element, extras=extras)
            kinds.setdefault(request, layer.name)
    return kinds


def _explain(name: str, request: Any, target: Any, wanted: Any) -> dict[str, Any]:
    from fewbit.kernels.registry import choose_kernel

    choice = choose_kernel(replace(request, batch_invariant=wanted.batch_invariant), target, wanted)
    return {
        "layer": name,
        "key": str(request.key),
        "shape": [request.rows, request.columns],
        "dtype": request.dtype,
        "kernel": choice.kernel.name,
        "note": choice.note,
        "cost_source": choice.cost_source,
        "verdicts": [
            {
                "kernel": verdict.kernel.name,
                "backend": verdict.kernel.backend,
                "numerics": verdict.numerics.name.lower(),
                "chosen": verdict.kernel is choice.kernel,
                "refusal": verdict.refusal.reason if verdict.refusal else None,
                "cost_us": verdict.cost_us,
            }
            for verdict in choice.verdicts
        ],
    }
