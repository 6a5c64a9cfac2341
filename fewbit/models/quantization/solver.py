"""Quantizing layers that read one input: their tasks for the algorithm, and what activations add to the results."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fewbit.algorithms.interface import Algorithm, LayerResult, LayerTask
from fewbit.algorithms.statistics import InputStatistics
from fewbit.errors import CheckpointError, ModelError
from fewbit.models.quantization.outcome import InputSeen
from fewbit.models.quantization.plan import Plan, PlannedLayer
from fewbit.models.quantization.row_shares import RowShare, rows_of, share_of
from fewbit.models.quantization.transforms.weights import TransformedWeights
from fewbit.numerics.activations import needs_calibration, static_input_scales
from fewbit.numerics.ranges import global_scale_of

_EXPERT = re.compile(r"\.experts\.\d+\.")


class LayerSolver:
    """Quantizes the layers of a plan.

    Args:
        plan: what is quantized and how.
        algorithm: what chooses the codes.
        folder: where the weights are read.
        joined: layer -> the members of the matrix that servers join it into.
        device: where codes are chosen.

    Attributes:
        layers: the quantized layers by name.
        seen: inputs of the layers of the block at hand, where calibration shows them; None where nothing is calibrated.
    """

    def __init__(
        self,
        plan: Plan,
        algorithm: Algorithm,
        folder: TransformedWeights,
        joined: Mapping[str, tuple[str, ...]],
        device: torch.device,
    ) -> None:
        self.layers: dict[str, PlannedLayer] = {layer.name: layer for layer in plan.quantized}
        self.seen: dict[str, InputStatistics] | None = None
        self._algorithm, self._rules, self._folder = algorithm, plan.recipe.scale_rules, folder
        self._joined, self._device, self._percentile = joined, device, plan.recipe.activation_percentile
        self._shared: dict[tuple[str, ...], Tensor] = {}

    def solve(self, names: list[str], statistics: InputStatistics | None) -> dict[str, LayerResult]:
        """What the algorithm makes of layers that read one input, by name.

        Raises:
            CheckpointError: a weight holds NaN or infinity.
            ModelError: no token reached a layer whose static activation scale is asked for.
        """
        tasks = [self.task(self.layers[name], statistics) for name in names]
        return {task.name: result for task, result in self._solved(tasks)}

    def solve_rows(self, names: list[str], statistics: InputStatistics, rank: int, count: int) -> dict[str, RowShare]:
        """The same for the rows that process `rank` of `count` takes; see `row_shares`."""
        whole = [self.task(self.layers[name], statistics) for name in names]
        own = [part for turn, task in enumerate(whole) if (part := rows_of(task, rank, count, turn)) is not None]
        return {task.name: share_of(task, result) for task, result in self._solved(own)} if own else {}

    def _solved(self, tasks: list[LayerTask]) -> Iterator[tuple[LayerTask, LayerResult]]:
        try:
            for statistics in {id(task.statistics): task.statistics for task in tasks}.values():
                if statistics is not None:
                    statistics.require_finite()
            found = self._algorithm.quantize_layers(tasks)
        except ValueError as error:
            names = ", ".join(task.name for task in tasks)
            raise CheckpointError(f"{names}: {error}.", "Repair the source model or ignore these layers.") from error
        for task, result in zip(tasks, found, strict=True):
            yield task, self.with_input_scale(task, result)

    def task(self, layer: PlannedLayer, statistics: InputStatistics | None) -> LayerTask:
        """What the algorithm gets of a layer."""
        assert layer.key is not None
        weight = self._folder.load(f"{layer.name}.weight").to(self._device)
        shared = self._shared_scale(layer)
        shared = None if shared is None else shared.to(self._device)
        return LayerTask(layer.name, weight, layer.key, self._rules, shared, statistics)

    def with_input_scale(self, task: LayerTask, result: LayerResult) -> LayerResult:
        """The result with the static scale of its activation, where its key has one."""
        if task.key.activation is None or not needs_calibration(task.key.activation):
            return result
        found = task.statistics
        if (found is None or not found.tokens) and _EXPERT.search(task.name):
            found = self._of_siblings(task.name)
        elif found is None or not found.tokens:
            raise ModelError(
                f"No calibration token reached {task.name}, and its activation scale cannot be known.",
                "Ignore this layer, or choose a scheme with dynamic activation scales.",
            )
        # What stands in for an expert's input knows no more than the largest of its siblings.
        reached = found.percentile(self._percentile) if found.tokens else found.largest
        scales = static_input_scales(reached.cpu(), task.key.activation)
        return replace(result, record=result.record.with_tensors(**scales))

    def input_seen(self, layer: PlannedLayer) -> InputSeen:
        """How many calibration tokens reached a layer, and what was done where none did."""
        if self.seen is None or not layer.block:
            return InputSeen()
        own = self.seen.get(layer.name)
        if own is not None and own.tokens:
            return InputSeen(own.tokens)
        remark = "no calibration token reached it"
        if layer.key is None or not needs_calibration(layer.key.activation):
            return InputSeen(0, remark)
        source = "the largest of its siblings" if self._of_siblings(layer.name).largest > 0 else "nothing"
        return InputSeen(0, f"{remark}; its activation scale is from {source}")

    def _of_siblings(self, name: str) -> InputStatistics:
        """What stands in for the input of an expert that no token was sent to: the largest that its siblings saw."""
        place = _EXPERT.sub(".experts.*.", name)
        return InputStatistics.of_siblings(
            other for sibling, other in (self.seen or {}).items() if _EXPERT.sub(".experts.*.", sibling) == place
        )

    def _shared_scale(self, layer: PlannedLayer) -> Tensor | None:
        """The second-level scale that the members of a joined matrix share; None where the layer has its own."""
        assert layer.key is not None
        members = self._joined.get(layer.name, ())
        if layer.key.weight.global_scale is None or not members:
            return None
        if members not in self._shared:
            largest = torch.stack([self._folder.load(f"{name}.weight").abs().amax().float() for name in members]).amax()
            self._shared[members] = global_scale_of(largest.reshape(1, 1), layer.key.weight)
        return self._shared[members]
