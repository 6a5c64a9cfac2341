"""A checkpoint seen through transformations: the tensors that quantizing reads instead of the files'."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from fewbit.checkpoints.dtypes import torch_dtype
from fewbit.checkpoints.tensor_files import TensorFolder
from fewbit.errors import ModelError

Change = Callable[[Tensor], Tensor]
"""A tensor as it is on disk -> what takes its place."""


class TransformedWeights:
    """The tensors of a folder, some of them changed.

    Changes at load are functions of one tensor and hold for the whole run. Those of the block at hand are tensors, and
    are dropped when the next block begins, so that no more than one block of them is in memory.

    Attributes:
        source: the folder.
        headers: tensor name -> header; a tensor that a change adds has its source's header.
    """

    def __init__(self, folder: TensorFolder) -> None:
        self.source = folder
        self.headers = dict(folder.headers)
        self._changes: dict[str, Change] = {}
        self._copies: dict[str, str] = {}
        self._block: dict[str, Tensor] = {}

    def change_at_load(self, changes: Mapping[str, Change], copies: Mapping[str, str]) -> None:
        """Adds changes by stored name, and tensors that are no longer equal to the one they were tied to.

        Args:
            changes: name -> what makes of the stored tensor, or of the copied one, what takes its place.
            copies: name of a tensor that is not on disk -> name of the stored one that it starts from.
        """
        for name, source in copies.items():
            self._copies[name] = source
            self.headers[name] = self.headers[source]
        for name, change in changes.items():
            before = self._changes.get(name)
            self._changes[name] = change if before is None else _chained(before, change)

    def begin_block(self) -> None:
        """Drops the changed tensors of the block before."""
        self._block = {}

    def change_block(self, tensors: Mapping[str, Tensor]) -> None:
        """Puts tensors of the block at hand in the place of those of that name."""
        self._block |= {name: tensor.cpu() for name, tensor in tensors.items()}

    def is_changed(self, name: str) -> bool:
        """Whether the tensor differs from the one on disk."""
        return name in self._block or name in self._changes

    def load(self, name: str) -> Tensor:
        """An owned copy of a tensor: float32 where it was changed, as stored where it was not."""
        if name in self._block:
            return self._block[name].clone()
        tensor = self.source.load(self._copies.get(name, name))
        change = self._changes.get(name)
        return tensor if change is None else change(tensor).float()

    def later(self, name: str) -> Callable[[], Tensor]:
        """What loads the tensor as it is now, also when the next block has begun."""
        own = self._block.get(name)
        return partial(self.load, name) if own is None else own.clone

    def plain(self, name: str) -> Tensor:
        """The tensor in the dtype that it has on disk.

        Raises:
            ModelError: a transformation made a number that this dtype does not hold.
        """
        tensor = self.load(name)
        stored = tensor.to(torch_dtype(self.headers[name].dtype))
        if stored.dtype != tensor.dtype and not bool(stored.isfinite().all()):
            raise ModelError(
                f"A transformation made {name} too large for {self.headers[name].dtype}.",
                "Convert the model to bfloat16, or leave the transformation out.",
            )
        return stored


def _chained(first: Change, second: Change) -> Change:
    return lambda tensor: second(first(tensor))
