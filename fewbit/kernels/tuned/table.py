"""Tables of measurements: what they hold, where they lie, which one serves a device.

A table is one JSON file. It names the device, its driver and the software that was measured, and holds four lists:
`costs`, microseconds of every kernel that took a layer, `plans`, the fastest way to cut a product over tiles, `cuts`,
the same over fragments, and `code_cuts`, over 8-bit codes in CUDA C++.
A table serves a device of the same name under the same major and minor versions of torch and Triton.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeVar

from fewbit.errors import CheckpointError
from fewbit.kernels.interface import LinearRequest
from fewbit.spec.hardware import Hardware

SHIPPED = Path(__file__).parent
COMPARED = ("torch", "triton")

Way = TypeVar("Way")


@dataclass(frozen=True)
class Table:
    """Measurements of one device.

    Attributes:
        device: the maker's name, `NVIDIA H200` say.
        driver: its driver's version, or an empty text.
        software: package -> version.
        costs: `{"key", "dtype", "N", "K", "M", "us": {kernel: microseconds}}` each.
        plans: `{"layout": {...}, "M", "plan": {...}, "us"}` each, see `kernels.linear.tile_plans`.
        cuts: `{"layout": {...}, "M", "cut": {...}, "us"}` each, see `kernels.linear.fragment_cuts`.
        code_cuts: `{"layout": {...}, "M", "cut": {...}, "us"}` each, see `kernels.linear.code_cuts`.
        path: the file.
    """

    device: str
    driver: str
    software: Mapping[str, str]
    costs: tuple[Mapping[str, Any], ...] = ()
    plans: tuple[Mapping[str, Any], ...] = ()
    cuts: tuple[Mapping[str, Any], ...] = ()
    code_cuts: tuple[Mapping[str, Any], ...] = ()
    path: Path = field(default=Path(), compare=False)

    def __str__(self) -> str:
        """Where costs come from, for people."""
        software = ", ".join(f"{package} {self.software[package]}" for package in COMPARED if package in self.software)
        return f"measured on {self.device} with {software}, {self.path.name}"

    @classmethod
    def read(cls, path: Path) -> Table:
        """Reads a file.

        Raises:
            CheckpointError: it is no table.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            return cls(
                str(data["device"]), str(data["driver"]), dict(data["software"]), tuple(data["costs"]),
                tuple(data["plans"]), tuple(data.get("cuts", ())), tuple(data.get("code_cuts", ())), path,
            )  # fmt: skip
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{path} is no table of measurements: {error!r}.", "Run fewbit tune again."
            ) from error

    def write(self, path: Path) -> None:
        """Writes the table, under its name only once it is whole."""
        path.parent.mkdir(parents=True, exist_ok=True)
        data = {
            "device": self.device, "driver": self.driver, "software": dict(self.software),
            "costs": list(self.costs), "plans": list(self.plans), "cuts": list(self.cuts),
            "code_cuts": list(self.code_cuts),
        }  # fmt: skip
        lines = json.dumps(data, indent=None).replace('{"key"', '\n{"key"').replace('{"layout"', '\n{"layout"')
        staged = path.with_name(path.name + ".part")
        staged.write_text(lines + "\n", encoding="utf-8")
        staged.replace(path)

    def serves(self, hardware: Hardware) -> bool:
        """Whether the measurements hold for that device and its software."""
        same = all(
            _short(self.software.get(package, "")) == _short(hardware.software.get(package, ""))
            for package in COMPARED
            if package in self.software
        )
        return self.device == name_of(hardware) and same

    @cached_property
    def _by_layer(self) -> dict[tuple[str, str, int, int], dict[int, Mapping[str, float]]]:
        found: dict[tuple[str, str, int, int], dict[int, Mapping[str, float]]] = {}
        for entry in self.costs:
            layer = (entry["key"], entry["dtype"], entry["N"], entry["K"])
            found.setdefault(layer, {})[entry["M"]] = entry["us"]
        return found

    def costs_of(self, request: LinearRequest, mix: Mapping[int, float]) -> dict[str, float]:
        """Kernel -> microseconds of a layer, averaged over a mix of numbers of rows.

        Numbers of rows beyond the largest that was measured are left out of the mix, and so is a kernel that was not
        measured at each of the others (at the next larger M of the table).
        """
        measured = self._by_layer.get((str(request.key), request.dtype, request.rows, request.columns), {})
        rows = {tokens: _ceiling(measured, tokens) for tokens in mix}
        lines = [(measured[row], mix[tokens]) for tokens, row in rows.items() if row is not None]
        if not lines:
            return {}
        kernels = set.intersection(*(set(line) for line, _ in lines))
        total = sum(weight for _, weight in lines)
        return {name: sum(line[name] * weight for line, weight in lines) / total for name in sorted(kernels)}


def merged(old: Sequence[Any], new: Sequence[Any], identity: tuple[str, ...]) -> tuple[Any, ...]:
    """Old and new entries; where two are of the same layer and M, the new one."""
    entries = {str([entry[name] for name in identity]): entry for entry in (*old, *new)}
    return tuple(entries.values())


def with_costs(table: Table, costs: Sequence[Any]) -> Table:
    """The table with costs of another run; a layer at an M is known from one run alone."""
    return replace(table, costs=merged(table.costs, costs, ("key", "dtype", "N", "K", "M")))


def _short(version: str) -> str:
    """Major and minor version."""
    return ".".join(version.split(".")[:2])


def _ceiling(measured: Iterable[int], tokens: int) -> int | None:
    return min((rows for rows in measured if rows >= tokens), default=None)


def at_next_larger(measured: Mapping[int, Way], tokens: int) -> Way | None:
    """What was measured at the next larger number of rows, else at the largest; None where nothing was."""
    rows = _ceiling(measured, tokens)
    return measured[max(measured) if rows is None else rows] if measured else None


def first_measured(device: str, find: Callable[[Table], Way | None]) -> Way | None:
    """What `find` finds in the first of the device's tables that holds it."""
    return next((way for way in map(find, tables_of(device)) if way is not None), None)


def user_folder() -> Path:
    """Where `fewbit tune` keeps tables."""
    return Path.home() / ".cache" / "fewbit" / "tuned"


def file_name(device: str) -> str:
    """`NVIDIA H200` -> `nvidia-h200.json`."""
    return "-".join(device.lower().split()) + ".json"


@cache
def tables_of(device: str) -> tuple[Table, ...]:
    """The tables of a device, the user's own first."""
    paths = (folder / file_name(device) for folder in (user_folder(), SHIPPED))
    return tuple(Table.read(path) for path in paths if device and path.is_file())


def tables_for(hardware: Hardware) -> list[Table]:
    """The tables that serve a device and its software, the user's own before the shipped one."""
    return [table for table in tables_of(name_of(hardware)) if table.serves(hardware)]


def measured_costs(
    request: LinearRequest, hardware: Hardware, mix: Mapping[int, float]
) -> tuple[dict[str, float], str]:
    """See `Table.costs_of`, from the first table that holds the layer; and which table that is, for people."""
    for table in tables_for(hardware):
        costs = table.costs_of(request, mix)
        if costs:
            return costs, str(table)
    return {}, ""


def name_of(hardware: Hardware) -> str:
    """What tables call a device: the maker's name, or the class of CPU."""
    return hardware.model or hardware.name
