"""Folders of finished units: numbered parts of a long piece of work, each durable as soon as it is there.

    fingerprint.json       of everything that the units depend on; whoever goes on must have the same
    units/00003.safetensors, 00003.json    one unit: its tensors, and the facts about them; the second file is written
                                           when the first is on disk, and says that the unit is finished

Files appear whole: each is written under another name, forced to disk and renamed.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewbit.checkpoints.output import TensorBuffer, sync
from fewbit.checkpoints.tensor_files import TensorFolder
from fewbit.errors import CheckpointError, OutputError

if TYPE_CHECKING:
    from torch import Tensor

FINGERPRINT, UNITS = "fingerprint.json", "units"


@dataclass(frozen=True)
class FinishedUnit:
    """One finished unit.

    Attributes:
        facts: what was noted beside its tensors.
        tensors: on disk.
    """

    facts: Mapping[str, Any]
    tensors: TensorFolder


class UnitFolder:
    """See the head of this file.

    Attributes:
        path: the folder.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()

    def finished(self) -> int:
        """How many units are finished; they are numbered from 0."""
        count = 0
        while self._file(count, "json").is_file():
            count += 1
        return count

    def add(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Makes the next unit durable: when this returns it survives whatever happens to the process or the machine."""
        number, buffer = self.finished(), TensorBuffer()
        for name, tensor in tensors.items():
            buffer.add(name, tensor)
        appear(self._file(number, "safetensors"), buffer.save)
        appear(self._file(number, "json"), _json_writer(facts))

    def unit(self, number: int) -> FinishedUnit:
        """A finished unit.

        Raises:
            CheckpointError: its files have been damaged.
        """
        facts = _read_json(self._file(number, "json"))
        return FinishedUnit(facts, TensorFolder(self._file(number, "safetensors")))

    def begin(self, fingerprint: Mapping[str, Any], otherwise: str) -> None:
        """Makes the folder one of this piece of work.

        Args:
            fingerprint: JSON values by name, nested.
            otherwise: what to do where the folder belongs to another, a sentence.

        Raises:
            OutputError: it holds finished units with another fingerprint.
        """
        file = self.path / FINGERPRINT
        fingerprint = json.loads(json.dumps(fingerprint))
        if self.finished():
            changed = differences(_read_json(file), fingerprint)
            if changed:
                raise OutputError(f"{self.path} was begun with something else: {'; '.join(changed)}.", otherwise)
            return
        (self.path / UNITS).mkdir(exist_ok=True)
        appear(file, _json_writer(fingerprint))

    def _file(self, number: int, extension: str) -> Path:
        return self.path / UNITS / f"{number:05}.{extension}"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """The folder exists and is this process's meanwhile; the lock goes with the process, however it ends.

    Raises:
        OutputError: another process has it.
    """
    folder.mkdir(exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OutputError(f"Another run is writing {folder}.", "Wait for it, or write elsewhere.") from error
        yield
    finally:
        os.close(descriptor)


def appear(file: Path, write: Callable[[Path], Any]) -> None:
    """Writes a file under another name, forces it to disk and renames it."""
    hidden = file.with_name(f".{file.name}")
    hidden.unlink(missing_ok=True)
    write(hidden)
    sync(hidden)
    hidden.rename(file)
    sync(file.parent)


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A clause for each field of two nested mappings that differs, dotted names in front."""
    old, new = _flat(before), _flat(now)
    return [
        f"{name} was {_shown(old.get(name))} and is {_shown(new.get(name))}"
        for name in {**old, **new}
        if old.get(name) != new.get(name)
    ]


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, inner in value.items():
        found |= _flat(inner, f"{prefix}{name}.") if isinstance(inner, Mapping) else {f"{prefix}{name}": inner}
    return found


def _shown(value: Any) -> str:
    text = "absent" if value is None else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _json_writer(value: Mapping[str, Any]) -> Callable[[Path], Any]:
    return lambda file: file.write_text(json.dumps(value))


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}.", "Remove the folder and start afresh.") from error
    return found
