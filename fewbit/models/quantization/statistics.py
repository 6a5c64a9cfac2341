"""Statistics of the inputs of a model's layers: gathered block by block in one pass, and kept on disk for later runs.

They come from the unquantized model: a layer's input is what the layers before it put out as they are. A run that
quantizes while it carries calibration on ("true sequential") shows each layer what the quantized ones before it put
out, which is better by a little and good for that run only; one pass over the unquantized model serves every algorithm
but those that tune blocks, transformations that choose by data, and every width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fewbit.algorithms.statistics import InputStatistics
from fewbit.checkpoints.output import make_parents
from fewbit.checkpoints.tensor_files import TensorFolder, by_module
from fewbit.checkpoints.unit_folder import UnitFolder, locked
from fewbit.models.families import blocks_of
from fewbit.models.fill import PartialModel
from fewbit.models.kv_cache import CacheWatch
from fewbit.models.names import build_on_meta, read_config
from fewbit.models.quantization.block_stream import BlockStream, widest_input, windows_at_once
from fewbit.models.quantization.calibration import Calibration
from fewbit.models.quantization.fingerprint import fingerprint_of
from fewbit.models.quantization.products import calibration_dtype
from fewbit.models.quantization.transforms.probe import matrices
from fewbit.models.quantization.transforms.weights import TransformedWeights

SAMPLE_ROWS = 512
"""Rows of each input that are kept as they are, spread over all calibration windows."""


def rows_of_each(batches: int) -> int:
    """How many rows of each batch are kept."""
    return -(-SAMPLE_ROWS // max(1, batches))


@dataclass(frozen=True)
class BlockStatistics:
    """What calibration shows of one block of the unquantized model.

    Attributes:
        block: its path.
        inputs: stored name of a linear layer or a router -> statistics of its input with their Gram matrix; layers that
            read one input share one object.
        cache: `k` and `v` -> largest magnitude of each head that the block would cache, float32 [heads].
    """

    block: str
    inputs: Mapping[str, InputStatistics]
    cache: Mapping[str, Tensor]

    def divided(self, names: Sequence[str], columns: Tensor) -> BlockStatistics:
        """The same with the inputs of layers divided by `columns`, float32 [K]."""
        fresh: dict[int, InputStatistics] = {}
        for name in names:
            known = self.inputs[name]
            if known.tokens and id(known) not in fresh:
                fresh[id(known)] = known.divided(columns)
        return replace(self, inputs={name: fresh.get(id(known), known) for name, known in self.inputs.items()})

    @property
    def groups(self) -> list[tuple[list[str], InputStatistics]]:
        """Each distinct input with the layers that read it."""
        found: dict[int, tuple[list[str], InputStatistics]] = {}
        for name, statistics in self.inputs.items():
            found.setdefault(id(statistics), ([], statistics))[0].append(name)
        return list(found.values())


def gather_statistics(
    source: str | Path,
    calibration: Calibration,
    device: str | torch.device = "cpu",
    first: int = 0,
    weights: TransformedWeights | None = None,
) -> Iterator[BlockStatistics]:
    """Statistics of every matrix of the decoder blocks, block by block; one block of them is in memory.

    Args:
        source: folder of an unquantized checkpoint.
        calibration: token windows.
        device: where blocks run.
        first: how many blocks are only passed through.
        weights: what transformations that need no data make of the checkpoint; None for the checkpoint as it is.

    Raises:
        ModelError: transformers has no model for it, or it cannot be run block by block.
        CheckpointError: the checkpoint cannot be read.
    """
    folder, device = weights or TensorFolder(source), torch.device(device)
    config = read_config(Path(source))
    model = build_on_meta(config, calibration_dtype(config, device))
    partial = PartialModel(model, folder, device)
    batch = windows_at_once(calibration.windows.shape[1], widest_input(model), device.type == "cpu")
    stream = BlockStream(model, partial.filled, calibration.windows.to(device), batch)
    places = {module: partial.destinations.module(module) for module in by_module(folder.headers)}
    for number, block in enumerate(blocks_of(model)):
        if number < first:
            stream.replay(block, ())
            continue
        own = {f"{block}.{name}" for name in matrices(model.get_submodule(block))}
        inside = {module: place for module, place in places.items() if place in own}
        stream.watch = CacheWatch()
        found = stream.gather(block, inside, grams=True, sample=rows_of_each(len(stream.states)))
        yield BlockStatistics(block, found, stream.watch.largest)


class StatisticsStore:
    """The statistics of a model on a calibration text, in a folder.

    Of each Gram matrix the upper triangle is kept, row by row. The mean of the squares of each feature is its diagonal.
    Some rows of each input are kept as they are, for what rounding does to activations.

    Args:
        folder: is created where it does not exist.
    """

    def __init__(self, folder: str | Path) -> None:
        self._units = UnitFolder(folder)

    def complete(
        self,
        source: str | Path,
        calibration: Calibration,
        device: str | torch.device = "cpu",
        weights: TransformedWeights | None = None,
        transforms: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Gathers what is not there yet; a run that was stopped goes on with the next block.

        Args:
            source, calibration, device, weights: see `gather_statistics`.
            transforms: what made the weights, as a recipe lists it.

        Raises:
            OutputError: the folder holds statistics of another model or text, or another run is writing it.
            ModelError, CheckpointError: see `gather_statistics`.
        """
        make_parents(self._units.path.parent)
        with locked(self._units.path):
            folder = TensorFolder(source)
            fingerprint = fingerprint_of(folder, torch.device(device))
            fingerprint |= {"calibration": calibration.record(), "inputs": "of the unquantized model"}
            fingerprint["transforms"] = [dict(one) for one in transforms]
            self._units.begin(fingerprint, "Give another folder, or remove this one.")
            blocks = len(blocks_of(build_on_meta(read_config(folder.path), torch.float32)))
            if self._units.finished() == blocks:
                return
            for found in gather_statistics(source, calibration, device, self._units.finished(), weights):
                self._units.add(*_as_unit(found))

    def block(self, number: int, device: str | torch.device = "cpu") -> BlockStatistics:
        """What is kept of a block, by its number."""
        unit = self._units.unit(number)
        inputs: dict[str, InputStatistics] = {}
        for index, facts in enumerate(unit.facts["inputs"]):
            parts: dict[str, Any] = {
                part: unit.tensors.load(f"{index}.{part}").to(device) for part in facts["tensors"] if part != "products"
            }
            if "products" in facts["tensors"]:
                packed = unit.tensors.load(f"{index}.products").to(device)
                parts["products"] = _from_triangle(packed, facts["features"])
            statistics = InputStatistics(tokens=facts["tokens"], **parts)
            inputs |= dict.fromkeys(facts["layers"], statistics)
        cache = {side: unit.tensors.load(f"cache.{side}") for side in unit.facts["cache"]}
        return BlockStatistics(unit.facts["block"], inputs, cache)


def _as_unit(found: BlockStatistics) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors: dict[str, Tensor] = {f"cache.{side}": largest for side, largest in found.cache.items()}
    inputs = []
    for index, (names, statistics) in enumerate(found.groups):
        present = [field.name for field in fields(statistics) if isinstance(getattr(statistics, field.name), Tensor)]
        for part in present:
            tensor: Tensor = getattr(statistics, part)
            tensors[f"{index}.{part}"] = _triangle(tensor) if part == "products" else tensor
        features = 0 if statistics.products is None else len(statistics.products)
        inputs.append({"layers": names, "tokens": statistics.tokens, "features": features, "tensors": present})
    return tensors, {"block": found.block, "inputs": inputs, "cache": list(found.cache)}


def _triangle(matrix: Tensor) -> Tensor:
    """[K, K] -> [K * (K + 1) / 2], the upper triangle row by row."""
    return torch.cat([matrix[row, row:] for row in range(len(matrix))])


def _from_triangle(packed: Tensor, features: int) -> Tensor:
    """The inverse, with zeros below the diagonal."""
    matrix, start = torch.zeros(features, features, device=packed.device), 0
    for row in range(features):
        matrix[row, row:] = packed[start : start + features - row]
        start += features - row
    return matrix
