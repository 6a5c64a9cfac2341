"""Forward passes of many batches through one block that stop at each layer whose weight is not final.

Two ways, one result: to let every pass stand where it stopped, with all that it has computed (`HeldPasses`), or to let
go of it and to begin anew (`RepeatedPasses`). The operations and their numbers are the same.

Beside each may run the pass of the unquantized model, for algorithms that ask how inputs differ. Held ones go through a
layer just before its weight is replaced.
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

Begin = Callable[[Tensor], InputStatistics]
"""An input -> statistics that have seen nothing yet."""


@dataclass(frozen=True)
class Reference:
    """The unquantized model's passes through the block.

    Attributes:
        forward: index of a batch -> the block's output; calls `stop` before each layer.
        tokens: of each batch. Inputs of fewer rows are not compared: experts may be sent others.
    """

    forward: Callable[[int], Tensor]
    tokens: Sequence[int]

    def beside(self, index: int, x: Tensor, own: Tensor | None) -> Tensor | None:
        """`own`, the input of the unquantized model's layer, where it can be compared with x, that of batch `index`."""
        whole = x.shape[:-1].numel() == self.tokens[index]
        return own if own is not None and whole and own.shape == x.shape else None


class Passes(ABC):
    """See the head of this file.

    Args:
        forward: index of a batch -> the block's output; calls `stop` before each layer.
        count: batches.
        groups: layers by the input they read, in the order in which their weights become final.
        reference: the passes of the unquantized model; None where its inputs are not asked for.
        begin: see `Begin`; by default all that statistics can tell.

    Attributes:
        final: layers whose weight is final; the caller adds to it.
        outputs: of all batches, when none waits any more.
        reference_outputs: the same for the unquantized model.
    """

    def __init__(
        self,
        forward: Callable[[int], Tensor],
        count: int,
        groups: Sequence[Sequence[str]],
        reference: Reference | None = None,
        begin: Begin | None = None,
    ) -> None:
        self.final: set[str] = set()
        self.outputs: list[Tensor] = []
        self.reference_outputs: list[Tensor] = []
        self._reference = reference
        self._begin = begin or (lambda x: InputStatistics.empty(x.shape[-1], x.device))
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
        """Of what the passes that wait at a group brought; None where none waits there.

        To be called once for a group, before its layers have their new weights.
        """

    def _added(self, statistics: InputStatistics | None, x: Tensor, unquantized: Tensor | None) -> InputStatistics:
        statistics = statistics or self._begin(x)
        statistics.add(x)
        if unquantized is not None:
            statistics.compare(x, unquantized)
        return statistics


class HeldPasses(Passes):
    """One coroutine for each batch, and one more where the unquantized model runs beside it."""

    _begun, _beyond, _in_reference = False, -1, False

    def stop(self, name: str, x: Tensor) -> None:
        """Called in a pass that is about to run a layer on x."""
        if self._group[name] > self._beyond if self._in_reference else name not in self.final:
            self._stop(name, x)

    def _stop(self, name: str, x: Tensor) -> None:
        greenlet.getcurrent().parent.switch((name, x))

    def waiting(self) -> int | None:
        if not self._begun:
            self._passes = self._coroutines(self._forward)
            self._references = self._coroutines(self._reference.forward) if self._reference else []
            self._run_references(-1)
        for one in self._passes:
            if not self._begun or one.layer in self.final:
                one.resume()
        self._begun = True
        found = [self._group[one.layer] for one in self._passes if one.layer is not None]
        if not found:
            self._run_references(len(self._group))
            self.outputs = [one.output for one in self._passes]
            self.reference_outputs = [one.output for one in self._references]
        return min(found, default=None)

    def statistics(self, group: int) -> InputStatistics | None:
        found = None
        for index, one in enumerate(self._passes):
            if one.layer is not None and self._group[one.layer] == group:
                found = self._added(found, one.input, self._beside(index, one.input, group))
        self._run_references(group)
        return found

    def _coroutines(self, forward: Callable[[int], Tensor]) -> list[_Pass]:
        return [_Pass(greenlet(forward), (index,)) for index in range(self._count)]

    def _beside(self, index: int, x: Tensor, group: int) -> Tensor | None:
        """What the unquantized model's pass brought to the group, where it can be compared with x."""
        if self._reference is None:
            return None
        one = self._references[index]
        alike = one.layer is not None and self._group[one.layer] == group
        return self._reference.beside(index, x, one.input if alike else None)

    def _run_references(self, group: int) -> None:
        """Lets the unquantized model's passes run through the groups up to that one."""
        first, self._beyond, self._in_reference = not self._begun and group < 0, group, True
        for one in self._references:
            if first or (one.layer is not None and self._group[one.layer] <= group):
                one.resume()
        self._in_reference = False


class RepeatedPasses(Passes):
    """Every batch from the beginning, once for each group; `reference` keeps to the unquantized weights by itself."""

    def _stop(self, name: str, x: Tensor) -> None:
        raise _Stopped(self._group[name], x)

    def waiting(self) -> int | None:
        self._seen: dict[int, InputStatistics] = {}
        self.outputs = []
        for index in range(self._count):
            try:
                output = self._forward(index)
            except _Stopped as stopped:
                beside = self._beside(index, stopped.input, stopped.group)
                self._seen[stopped.group] = self._added(self._seen.get(stopped.group), stopped.input, beside)
                self.outputs = []
            else:
                self.outputs += [] if self._seen else [output]
        if not self._seen and self._reference is not None:
            self.reference_outputs = [self._reference.forward(index) for index in range(self._count)]
        return min(self._seen, default=None)

    def _beside(self, index: int, x: Tensor, group: int) -> Tensor | None:
        """What the unquantized model's pass brings to the group, where it can be compared with x."""
        if self._reference is None:
            return None
        try:
            self._reference.forward(index)
        except _Stopped as stopped:
            return self._reference.beside(index, x, stopped.input if stopped.group == group else None)
        return None

    def statistics(self, group: int) -> InputStatistics | None:
        return self._seen.get(group)


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
