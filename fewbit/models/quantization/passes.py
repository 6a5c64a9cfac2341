"""Forward passes of many batches through one block that stop at each layer whose weight is not final.

Two ways, one result: to let every pass stand where it stopped, with all that it has computed (`HeldPasses`), or to let
go of it and to begin anew (`RepeatedPasses`). The operations and their numbers are the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from greenlet import greenlet
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fewbit.algorithms.statistics import InputStatistics


class Passes(ABC):
    """See the head of this file.

    Args:
        forward: index of a batch -> the block's output; calls `stop` before each layer.
        count: batches.
        groups: layers by the input they read, in the order in which their weights become final.

    Attributes:
        final: layers whose weight is final; the caller adds to it.
        outputs: of all batches, when none waits any more.
    """

    def __init__(self, forward: Callable[[int], Tensor], count: int, groups: Sequence[Sequence[str]]) -> None:
        self.final: set[str] = set()
        self.outputs: list[Tensor] = []
        self._forward, self._count = forward, count
        self._group = {name: index for index, names in enumerate(groups) for name in names}

    def stop(self, name: str, x: Tensor) -> None:
        """Called in a pass that is about to run a layer on x."""
        if name not in self.final:
            self._stop(name, x)

    @abstractmethod
    def _stop(self, name: str, x: Tensor) -> None: ...

    @abstractmethod
    def waiting(self) -> int | None:
        """Lets every pass run as far as it goes; the first group that one waits at, None where all are through."""

    @abstractmethod
    def statistics(self, group: int) -> InputStatistics | None:
        """Of what the passes that wait at a group brought; None where none waits there."""


class HeldPasses(Passes):
    """One coroutine for each batch."""

    def __init__(self, forward: Callable[[int], Tensor], count: int, groups: Sequence[Sequence[str]]) -> None:
        super().__init__(forward, count, groups)
        self._passes = [_Pass(greenlet(forward), (index,)) for index in range(count)]
        self._begun = False

    def _stop(self, name: str, x: Tensor) -> None:
        greenlet.getcurrent().parent.switch((name, x))

    def waiting(self) -> int | None:
        for one in self._passes:
            if not self._begun or one.layer in self.final:
                one.resume()
        self._begun = True
        found = [self._group[one.layer] for one in self._passes if one.layer is not None]
        if not found:
            self.outputs = [one.output for one in self._passes]
        return min(found, default=None)

    def statistics(self, group: int) -> InputStatistics | None:
        found = None
        for one in self._passes:
            if one.layer is not None and self._group[one.layer] == group:
                found = _added(found, one.input)
        return found


class RepeatedPasses(Passes):
    """Every batch from the beginning, once for each group."""

    def _stop(self, name: str, x: Tensor) -> None:
        raise _Stopped(self._group[name], x)

    def waiting(self) -> int | None:
        self._seen: dict[int, InputStatistics] = {}
        self.outputs = []
        for index in range(self._count):
            try:
                output = self._forward(index)
            except _Stopped as stopped:
                self._seen[stopped.group] = _added(self._seen.get(stopped.group), stopped.input)
                self.outputs = []
            else:
                self.outputs += [] if self._seen else [output]
        return min(self._seen, default=None)

    def statistics(self, group: int) -> InputStatistics | None:
        return self._seen.get(group)


def _added(statistics: InputStatistics | None, x: Tensor) -> InputStatistics:
    statistics = statistics or InputStatistics.empty(x.shape[-1], x.device)
    statistics.add(x)
    return statistics


class _Stopped(Exception):  # noqa: N818 - not an error, it ends a forward pass early
    def __init__(self, group: int, x: Tensor) -> None:
        super().__init__(group)
        self.group, self.input = group, x


@dataclass
class _Pass:
    """One batch's forward pass through a block, stopped at a layer or finished.

    Attributes:
        layer: where it stands, None when it is through.
        input: what that layer is about to read.
        output: of the block, when it is through.
    """

    run: greenlet
    arguments: tuple[Any, ...]
    layer: str | None = None
    input: Tensor = field(default_factory=lambda: torch.empty(0))
    output: Tensor = field(default_factory=lambda: torch.empty(0))

    def resume(self) -> None:
        """Runs on to the next layer whose weight is not final, or to the end."""
        result = self.run.switch(*self.arguments)
        self.arguments = ()
        if self.run.dead:
            self.layer, self.input, self.output = None, torch.empty(0), result
        else:
            self.layer, self.input = result


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors made meanwhile that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_address(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and _address(leaf) not in given:
                storage = leaf.untyped_storage()
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    @property
    def live(self) -> int:
        """How many there are now."""
        self._made = {key: found for key, found in self._made.items() if not found[0].expired()}
        return sum(size for _, size in self._made.values())


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
