"""What a run has finished, kept beside its output until the output is complete.

OUT.partial/
  fingerprint.json, units/    see `unit_folder`
  output/                     the folder that becomes OUT, filled when all units are there
  published                   written before OUT gets its name
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fewbit.checkpoints.output import disk_errors, make_parents, publish, require_free
from fewbit.checkpoints.unit_folder import FINGERPRINT, UNITS, UnitFolder, appear, locked
from fewbit.errors import FewbitError, OutputError

_OUTPUT, _PUBLISHED = "output", "published"
_FILES = (f".{FINGERPRINT}", FINGERPRINT, f".{_PUBLISHED}", _PUBLISHED)


class WorkFolder(UnitFolder):
    """See the head of this file.

    Attributes:
        path: `OUT.partial`.
        out: the output.
    """

    def __init__(self, out: str | Path) -> None:
        self.out = Path(out).absolute()
        super().__init__(self.out.with_name(f"{self.out.name}.partial"))

    @contextmanager
    def staged(self) -> Iterator[Path]:
        """An empty folder to fill that becomes `out` when the block ends well."""
        staging = self.path / _OUTPUT
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        yield staging
        appear(self.path / _PUBLISHED, lambda file: file.touch())
        publish(staging, self.out)

    def clear(self) -> None:
        """Empties the folder; what says that the output is complete goes last."""
        for name in (UNITS, _OUTPUT):
            shutil.rmtree(self.path / name, ignore_errors=True)
        for name in _FILES:
            (self.path / name).unlink(missing_ok=True)

    def remove(self) -> None:
        """Removes the folder."""
        self.clear()
        self.path.rmdir()

    def require_unwritten(self) -> None:
        """Asked before any long work.

        Raises:
            OutputError: the output exists, and is not that of a run with nothing left to do but clear up.
        """
        if not self.is_published():
            require_free(self.out)

    def is_published(self) -> bool:
        """Whether the output got its name and only clearing up, which ends with an empty folder, was left to do."""
        left = {entry.name for entry in self.path.iterdir()} if self.path.is_dir() else None
        return self.out.is_dir() and left is not None and (not left or _PUBLISHED in left)


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
            with locked(work.path):
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
    known = {UNITS, _OUTPUT, *_FILES}
    foreign = sorted(entry.name for entry in work.path.iterdir() if entry.name not in known)
    if foreign:
        raise OutputError(f"{work.path} is in the way: it holds {foreign[0]}.", "Move it, or write elsewhere.")
