"""`fewbit tune`: measure the kernels for a model's layers on this device, and keep the table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fewbit.cli import options
from fewbit.cli.choices import hardware, torch_device
from fewbit.cli.output import console, print_json, quiet_libraries


def tune(
    model: Annotated[
        Path | None,
        typer.Argument(metavar="[MODEL]", help="A quantized checkpoint; without one, --scheme and --shape."),
    ] = None,
    scheme: options.Scheme = "W4A16",
    group_size: options.GroupSize = None,
    shape: Annotated[
        list[str] | None, typer.Option("--shape", help="NxK of a layer to measure where no model is given.")
    ] = None,
    rows: Annotated[
        list[int] | None, typer.Option("--rows", help="Rows of inputs to measure; a ladder to 4096.")
    ] = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Where to write the table.")] = None,
    json: options.Json = False,
) -> None:
    """Time every kernel that takes a layer, at a ladder of M, and write the table that choices are made from."""
    quiet_libraries()
    from fewbit.cli.explain import asked_request, element_of, stored_requests
    from fewbit.kernels.tuned.layouts import layout_costs
    from fewbit.kernels.tuned.session import tune_layers
    from fewbit.kernels.tuned.table import file_name, name_of, user_folder

    place = torch_device(device)
    target = hardware(place)
    element = element_of(dtype)
    if model:
        requests = list(stored_requests(model, element))
    else:
        requests = [asked_request(scheme, group_size, one, element) for one in shape or ["4096x4096"]]

    def say(line: str) -> None:
        if not json:
            console.print(line, highlight=False)

    path = output or user_folder() / file_name(name_of(target))
    table = tune_layers(requests, target, rows or None, path, say)
    if json:
        print_json(_summary(table, path))
        return
    console.print(f"{len(table.costs)} costs and {len(table.plans)} plans in {path}.")
    console.print("One layout for every number of rows, against a free choice at each:")
    asked = {*requests}
    for cost in layout_costs(table, target):
        if cost.request in asked:
            console.print(f"  {cost}", highlight=False)


def _summary(table: Any, path: Path) -> dict[str, Any]:
    return {
        "device": table.device, "driver": table.driver, "software": dict(table.software), "path": str(path),
        "costs": list(table.costs), "plans": list(table.plans),
    }  # fmt: skip
