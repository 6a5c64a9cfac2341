"""What transformations choose by: inputs that calibration windows show now, or statistics of them that were kept."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from fewbit.algorithms.statistics import InputStatistics
from fewbit.errors import CheckpointError
from fewbit.models.quantization.block_stream import BlockStream
from fewbit.models.quantization.ranks import ALONE, Ranks
from fewbit.models.quantization.statistics import BlockStatistics, rows_of_each
from fewbit.models.quantization.transforms.interface import Observation
from fewbit.models.quantization.transforms.structure import ScaleMapping


class Evidence(ABC):
    """Shows what the consumers of a block's mappings read."""

    @abstractmethod
    def observe(
        self, block: str, mappings: Sequence[ScaleMapping], stored: Mapping[str, str]
    ) -> dict[str, Observation]:
        """Producer -> what the consumers of its mapping read, as the block is now.

        Args:
            block: its path.
            mappings: whose consumers are asked for.
            stored: consumer -> the name of its module in the checkpoint.

        Raises:
            CheckpointError: it is not finite.
        """

    @abstractmethod
    def divide(self, names: Sequence[str], columns: Tensor) -> None:
        """Takes note that the inputs of layers, by stored name, are divided by `columns`, float32 [K]."""

    @abstractmethod
    def divide_outputs(self, name: str, rows: Tensor) -> None:
        """Takes note that what a linear layer, by stored name, puts out is divided by `rows`, float32 [N]."""


class StreamEvidence(Evidence):
    """Runs the block on the states that a stream has carried to it.

    Args:
        stream: stands before the block.
        ranks: the processes that carry the other windows.
    """

    def __init__(self, stream: BlockStream, ranks: Ranks = ALONE) -> None:
        self._stream, self._ranks = stream, ranks

    def observe(
        self, block: str, mappings: Sequence[ScaleMapping], stored: Mapping[str, str]
    ) -> dict[str, Observation]:
        seen: dict[str, Observation] = {}
        producers: dict[str, list[tuple[ScaleMapping, bool]]] = {}
        for found in mappings:
            for name in found.consumers:
                producers.setdefault(name, []).append((found, name == found.consumers[0]))
        sample = rows_of_each(len(self._stream.states) * self._ranks.count)

        def see(name: str, x: Tensor) -> None:
            for mapping, first in producers[name]:
                own = seen.get(mapping.producer)
                if own is None:
                    own = seen[mapping.producer] = Observation(_nothing(mapping, x))
                own.tokens[name] = own.tokens.get(name, 0) + x.numel() // x.shape[-1]
                if first:
                    own.statistics.add(x, sample)

        self._stream.observe(block, {name: f"{block}.{name}" for name in producers}, see)
        found = {one.producer: self._of_all(one, seen.get(one.producer)) for one in mappings}
        _require_finite(block, found.values())
        return found

    def divide(self, names: Sequence[str], columns: Tensor) -> None:
        """Does nothing: the next pass through the block shows it."""

    def divide_outputs(self, name: str, rows: Tensor) -> None:
        """Does nothing, see `divide`."""

    def _of_all(self, mapping: ScaleMapping, own: Observation | None) -> Observation:
        """What all processes saw of an input."""
        features, tokens = len(mapping.rows), dict[str, int]()
        for other in self._ranks.everyones(own.tokens if own else {}):
            tokens |= {name: tokens.get(name, 0) + count for name, count in other.items()}
        return Observation(self._ranks.total(own.statistics if own else None, features), tokens)


class KeptEvidence(Evidence):
    """Reads statistics of the unquantized model; what is folded into weights divides them exactly.

    Attributes:
        statistics: of the block, as transformations have left it.
    """

    def __init__(self, statistics: BlockStatistics) -> None:
        self.statistics = statistics

    def observe(
        self, block: str, mappings: Sequence[ScaleMapping], stored: Mapping[str, str]
    ) -> dict[str, Observation]:
        inputs, found = self.statistics.inputs, {}
        for mapping in mappings:
            read = {name: inputs[stored[name]] for name in mapping.consumers if stored[name] in inputs}
            first = read.get(mapping.consumers[0]) or InputStatistics.empty()
            tokens = {name: one.tokens for name, one in read.items() if one.tokens}
            found[mapping.producer] = Observation(first, tokens)
        _require_finite(block, found.values())
        return found

    def divide(self, names: Sequence[str], columns: Tensor) -> None:
        self.statistics = self.statistics.divided(names, columns)

    def divide_outputs(self, name: str, rows: Tensor) -> None:
        """Does nothing: of outputs nothing is kept but what a cache would hold, which is refused before."""


def _nothing(mapping: ScaleMapping, x: Tensor) -> InputStatistics:
    return InputStatistics.empty(len(mapping.rows), x.device, histogram=False)


def _require_finite(block: str, seen: Iterable[Observation]) -> None:
    try:
        for one in seen:
            one.statistics.require_finite()
    except ValueError as error:
        raise CheckpointError(f"{block}: {error}.", "Repair the source model.") from error
