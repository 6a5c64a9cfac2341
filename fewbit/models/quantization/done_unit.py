"""What is left to do for a block whose layers are quantized: to compare it with what it was, and to make it durable.

None of it is for a GPU, so where blocks run on one it is done on the CPU while the next block is under way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from fewbit.models.quantization.outcome import LayerOutcome


@dataclass(frozen=True)
class DoneUnit:
    """A block, or what is outside of them, as it will be written.

    Attributes:
        tensors: those that differ from the source's, by their names on disk; on any device.
        made: tensor of the source -> tensors that take its place.
        added: tensors that take the place of none.
        outcomes: of its layers, those that are known.
        put_off: makes the others.
        transforms: what transformations did.
    """

    tensors: Mapping[str, Tensor]
    made: Mapping[str, list[str]]
    added: list[str]
    outcomes: Sequence[LayerOutcome]
    put_off: Sequence[Callable[[], LayerOutcome]]
    transforms: list[dict[str, Any]]

    def on_cpu(self) -> dict[str, Tensor]:
        """The tensors, ready to be written; waits for the device to make them."""
        return {name: tensor.cpu() for name, tensor in self.tensors.items()}

    def facts(self) -> dict[str, Any]:
        """What is kept beside the tensors."""
        outcomes = [*self.outcomes, *(outcome() for outcome in self.put_off)]
        found = [vars(outcome) for outcome in outcomes]
        return {"made": self.made, "added": self.added, "outcomes": found, "transforms": self.transforms}


class OneBehind:
    """Does one job after the other, each at once, or while the caller goes on to the next one.

    A context manager: at its end all jobs are done, and what one raised is raised.

    Args:
        apart: whether a thread of its own does them. No more than one job waits: the next one waits for it.
    """

    def __init__(self, apart: bool) -> None:
        self._pool = ThreadPoolExecutor(1) if apart else None
        self._last: Future[object] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True)
        if kind is None:
            self._wait()

    def do(self, job: Callable[[], object]) -> None:
        """Does a job.

        Raises:
            BaseException: what it raised, or what the one before raised in its thread.
        """
        self._wait()
        if self._pool is None:
            job()
        else:
            self._last = self._pool.submit(job)

    def _wait(self) -> None:
        if self._last is not None:
            self._last.result()
