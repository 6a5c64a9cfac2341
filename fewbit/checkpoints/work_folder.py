"""What a run has finished, kept beside its output until the output is complete.

    OUT.partial/
      fingerprint.json       of everything that the result depends on; a run that goes on must have the same
      units/00003.safetensors, 00003.json    one finished part: its tensors, and the facts about them; the second file
                                             is written when the first is on disk, and says that the part is finished
      output/                the folder that becomes OUT, filled when all parts are there
      published              written before OUT gets its name

Files appear whole: each is written under another name, forced to disk and renamed.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fewbit.checkpoints.output import TensorBuffer, disk_errors, make_parents, publish, require_free, sync
from fewbit.checkpoints.tensor_files import TensorFolder
from fewbit.errors import CheckpointError, FewbitError, OutputError

_FINGERPRINT, _UNITS, _OUTPUT, _PUBLISHED = "fingerprint.json", "units", "output", "published"
_FILES = (f".{_FINGERPRINT}", _FINGERPRINT, f".{_PUBLISHED}", _PUBLISHED)


@dataclass(frozen=True)
class FinishedUnit:
    """One finished part of a run.

    Attributes:
        facts: what was noted beside its tensors.
        tensors: on disk.
    """

    facts: Mapping[str, Any]
    tensors: TensorFolder


class WorkFolder:
    """See the head of this file.

    Attributes:
        path: `OUT.partial`.
        out: the output.
    """

    def __init__(self, out: str | Path) -> None:
        self.out = Path(out).absolute()
        self.path = self.out.with_name(f"{self.out.name}.partial")

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
        _appear(self._file(number, "safetensors"), buffer.save)
        _appear(self._file(number, "json"), _json_writer(facts))

    def unit(self, number: int) -> FinishedUnit:
        """A finished unit.

        Raises:
            CheckpointError: its files have been damaged.
        """
        facts = _read_json(self._file(number, "json"))
        return FinishedUnit(facts, TensorFolder(self._file(number, "safetensors")))

    @contextmanager
    def staged(self) -> Iterator[Path]:
        """An empty folder to fill that becomes `out` when the block ends well."""
        staging = self.path / _OUTPUT
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        yield staging
        _appear(self.path / _PUBLISHED, lambda file: file.touch())
        publish(staging, self.out)

    def begin(self, fingerprint: Mapping[str, Any]) -> None:
        """Makes the folder one of this run.

        Raises:
            OutputError: it holds finished units of a run with another fingerprint.
        """
        file = self.path / _FINGERPRINT
        fingerprint = json.loads(json.dumps(fingerprint))
        if self.finished():
            changed = differences(_read_json(file), fingerprint)
            if changed:
                raise OutputError(
                    f"{self.path} was begun with something else: {'; '.join(changed)}.",
                    "Go on with what it was begun with, start afresh with --restart, or write elsewhere.",
                )
            return
        (self.path / _UNITS).mkdir(exist_ok=True)
        _appear(file, _json_writer(fingerprint))

    def clear(self) -> None:
        """Empties the folder; what says that the output is complete goes last."""
        for name in (_UNITS, _OUTPUT):
            shutil.rmtree(self.path / name, ignore_errors=True)
        for name in _FILES:
            (self.path / name).unlink(missing_ok=True)

    def remove(self) -> None:
        """Removes the folder."""
        self.clear()
        self.path.rmdir()

    def is_published(self) -> bool:
        """Whether the output got its name and only clearing up, which ends with an empty folder, was left to do."""
        left = {entry.name for entry in self.path.iterdir()} if self.path.is_dir() else None
        return self.out.is_dir() and left is not None and (not left or _PUBLISHED in left)

    def _file(self, number: int, extension: str) -> Path:
        return self.path / _UNITS / f"{number:05}.{extension}"


@contextmanager
def work_folder(out: str | Path, restart: bool = False) -> Iterator[WorkFolder]:
    """The work folder of `out`, for this process alone; removed at the end, and after an error if nothing is finished.

    Args:
        out: the output; must not exist.
        restart: whether what an earlier run has finished is thrown away.

    Raises:
        OutputError: `out` exists, another run is writing it, its parent cannot be written, or the disk is full.
    """
    work = WorkFolder(out)
    require_free(work.out)
    made: list[Path] = []
    try:
        with disk_errors(work.out, work.path):
            made = make_parents(work.out.parent)
            with _locked(work):
                _check_ours(work)
                try:
                    if restart:
                        work.clear()
                    yield work
                    work.clear()
                finally:
                    if not work.finished():
                        work.remove()
    except FewbitError as error:
        if work.finished() and "--restart" not in error.hint:
            error.add_hint(f"What is finished is kept in {work.path}, and the same command goes on from there.")
        raise
    finally:
        for folder in reversed(made):
            with suppress(OSError):  # something is in it
                folder.rmdir()


def _check_ours(work: WorkFolder) -> None:
    known = {_UNITS, _OUTPUT, *_FILES}
    foreign = sorted(entry.name for entry in work.path.iterdir() if entry.name not in known)
    if foreign:
        raise OutputError(f"{work.path} is in the way: it holds {foreign[0]}.", "Move it, or write elsewhere.")


@contextmanager
def _locked(work: WorkFolder) -> Iterator[None]:
    """The folder exists and is this process's meanwhile; the lock goes with the process, however it ends."""
    work.path.mkdir(exist_ok=True)
    descriptor = os.open(work.path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OutputError(f"Another run is writing {work.out}.", "Wait for it, or write elsewhere.") from error
        yield
    finally:
        os.close(descriptor)


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


def _appear(file: Path, write: Callable[[Path], Any]) -> None:
    """Writes a file under another name, forces it to disk and renames it."""
    hidden = file.with_name(f".{file.name}")
    hidden.unlink(missing_ok=True)
    write(hidden)
    sync(hidden)
    hidden.rename(file)
    sync(file.parent)


def _json_writer(value: Mapping[str, Any]) -> Callable[[Path], Any]:
    return lambda file: file.write_text(json.dumps(value))


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}.", "Start afresh with --restart.") from error
    return found
