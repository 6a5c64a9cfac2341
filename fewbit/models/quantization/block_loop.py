"""The one loop that quantizes a checkpoint: block by block, one block's weights in memory, each made durable."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fewbit.algorithms.interface import Algorithm, BlockTask, LayerResult
from fewbit.algorithms.registry import algorithm
from fewbit.algorithms.statistics import InputStatistics
from fewbit.checkpoints.dtypes import nbytes
from fewbit.checkpoints.interface import CheckpointFormat
from fewbit.checkpoints.kv_scales import attention_modules
from fewbit.checkpoints.registry import formats
from fewbit.checkpoints.tensor_files import TensorFolder, by_module
from fewbit.checkpoints.unit_folder import FinishedUnit
from fewbit.checkpoints.work_folder import WorkFolder
from fewbit.errors import CheckpointError, ModelError, OutputError
from fewbit.models.families import blocks_of, joined_members
from fewbit.models.fill import PartialModel
from fewbit.models.kv_cache import CacheWatch
from fewbit.models.load import Progress
from fewbit.models.names import build_on_meta, read_config
from fewbit.models.quantization.block_stream import MOST_HELD, BlockStream, Output, widest_input, windows_at_once
from fewbit.models.quantization.calibration import Calibration
from fewbit.models.quantization.done_unit import DoneUnit, OneBehind
from fewbit.models.quantization.outcome import LayerOutcome, outcome_of
from fewbit.models.quantization.plan import Plan, stated_config
from fewbit.models.quantization.products import calibration_dtype
from fewbit.models.quantization.ranks import ALONE, Ranks
from fewbit.models.quantization.row_shares import put_together
from fewbit.models.quantization.solver import LayerSolver
from fewbit.models.quantization.statistics import BlockStatistics, StatisticsStore
from fewbit.models.quantization.transforms.evidence import KeptEvidence, StreamEvidence
from fewbit.models.quantization.transforms.registry import of_recipe
from fewbit.models.quantization.transforms.transformed import Transformations
from fewbit.models.quantization.written import LayerWriter, WrittenLayer
from fewbit.models.replace import tensor_slot
from fewbit.numerics.activations import needs_calibration
from fewbit.packing.registry import dequantize_record
from fewbit.spec.recipe import Recipe


def plan_needs_calibration(plan: Plan) -> bool:
    """Whether the plan's algorithm, transformations or keys need activations."""
    by_statistics = any(one.needs_statistics for one in of_recipe(plan.recipe.transforms))
    if by_statistics or algorithm(plan.recipe.algorithm, plan.recipe.settings).needs_gram:
        return True
    keys = [plan.recipe.scheme.kv_cache, *(layer.key.activation for layer in plan.quantized if layer.key)]
    return any(needs_calibration(key) for key in keys)


class Run:
    """The state of one pass over a checkpoint.

    Of several processes each carries a share of the calibration windows and solves a share of the layers; the first
    writes.

    Attributes:
        units: stored tensors by the block they belong to, in order; the key of those outside every block is empty.
    """

    def __init__(
        self,
        source: Path,
        plan: Plan,
        calibration: Calibration | None,
        progress: Progress,
        device: torch.device,
        store: StatisticsStore | None = None,
        most_held: int = MOST_HELD,
        ranks: Ranks = ALONE,
    ) -> None:
        self.store, self.most_held, self.ranks = store, most_held, ranks
        self.plan, self.calibration, self.progress, self.device = plan, calibration, progress, device
        self.checkpoint: CheckpointFormat = formats()[plan.recipe.format]
        self.algorithm: Algorithm = algorithm(plan.recipe.algorithm, plan.recipe.settings)
        config = read_config(source)
        keys = {layer.name: layer.key for layer in plan.quantized if layer.key}
        self.transforms = Transformations(plan.recipe, keys, TensorFolder(source), config, device, ranks)
        self.folder = self.transforms.weights
        self.model = build_on_meta(config, calibration_dtype(config, device))
        self.partial = PartialModel(self.model, self.folder, device)
        self.solver = LayerSolver(plan, self.algorithm, self.folder, joined_members(self.model), device)
        self.layers = self.solver.layers
        self.cache_key = plan.recipe.scheme.kv_cache
        self.watch = CacheWatch()
        self.writer = LayerWriter(self.checkpoint, plan)
        self.units = self._units()
        self.apart = self.device.type != "cpu"

    def quantize(self, work: WorkFolder) -> None:
        """Finishes every unit that is not: what is outside the blocks first, then block by block.

        Calibration is carried through the finished blocks once more, with the weights that they were given: a forward
        pass each, which costs less than to keep the states of all windows on disk after every block.
        """
        counts = self.ranks.everyones(work.finished())
        finished = counts[0]
        if any(count != finished for count in counts):
            raise OutputError(f"Not every process sees {work.path}.", "Write to a place that all of them share.")
        stream = self._stream() if finished < len(self.units) else None
        with OneBehind(self.apart) as finishing:
            for number, (block, names) in enumerate(self.units.items()):
                if number >= finished:
                    self._finish(finishing, work, self._unit(stream, block))
                elif stream is not None and block:
                    self.transforms.enter(StreamEvidence(stream, self.ranks), block)
                    stream.replay(block, self._finished_weights(block, work.unit(number)))
                self.progress(sum(nbytes(self.folder.headers[name]) for name in names))

    @staticmethod
    def _finish(finishing: OneBehind, work: WorkFolder, unit: DoneUnit | None) -> None:
        if unit is not None:
            finishing.do(lambda: work.add(unit.on_cpu(), unit.facts()))

    def _unit(self, stream: BlockStream | None, block: str) -> DoneUnit | None:
        """What a unit became; None in processes that do not write."""
        written: Mapping[str, WrittenLayer] = {}
        if block and self.store is not None:
            kept = KeptEvidence(self.store.block(list(self.units).index(block) - 1, self.device))
            transforms = self.transforms.enter(kept, block)
            written = self._by_statistics(kept.statistics)
        else:
            transforms = self.transforms.enter(None if stream is None else StreamEvidence(stream, self.ranks), block)
            written = self._through(stream, block) if block and stream is not None else {}
        if not self.ranks.writes:
            return None
        tensors: dict[str, Tensor] = {}
        made: dict[str, list[str]] = {}
        outcomes: list[LayerOutcome] = []
        put_off: list[Callable[[], LayerOutcome]] = []
        for name in self.units[block]:
            layer = self.layers.get(name.removesuffix(".weight"))
            if layer is None or name != f"{layer.name}.weight":
                if self.folder.is_changed(name):
                    tensors[name], made[name] = self.folder.plain(name), [name]
                continue
            own = written.get(layer.name) or self._written(self.solver.solve([layer.name], None))[layer.name]
            found = {f"{layer.name}.{suffix}": tensor for suffix, tensor in own.stored.items()}
            tensors |= found
            made[name] = list(found)
            outcome = partial(outcome_of, layer, self.folder.later(name), own, self.solver.input_seen(layer))
            if self.apart:
                put_off.append(outcome)
            else:
                outcomes.append(outcome())  # at once: it holds what the layer was and what it became
        scales = dict(self._cache_scales(block)) if block else {}
        return DoneUnit(tensors | scales, made, list(scales), outcomes, put_off, transforms)

    def _finished_weights(self, block: str, unit: FinishedUnit) -> Iterator[tuple[str, Tensor]]:
        """Path in the model and weight of each layer of a finished block that later layers saw quantized."""
        for name, layer in self.layers.items() if self.algorithm.needs_gram else ():
            if layer.block == block:
                stored = {
                    tensor.removeprefix(f"{name}."): unit.tensors.load(tensor)
                    for tensor in unit.facts["made"][f"{name}.weight"]
                }
                record = self.writer.read(layer, stored).to(self.device)
                yield self.partial.destinations.module(name), dequantize_record(record)

    def _written(self, results: Mapping[str, LayerResult]) -> dict[str, WrittenLayer]:
        return {name: self.writer.write(self.layers[name], result) for name, result in results.items()}

    def _units(self) -> dict[str, list[str]]:
        """See the head of the class."""
        units: dict[str, list[str]] = {"": []} | {path: [] for path in blocks_of(self.model)}
        prefixes = {f"{path}.": path for path in units if path}
        for name in sorted(self.folder.headers):
            target = self.partial.destinations.tensor(name)
            units[next((path for prefix, path in prefixes.items() if target.startswith(prefix)), "")].append(name)
        return units

    def _stream(self) -> BlockStream | None:
        if self.calibration is None or self.store is not None or not plan_needs_calibration(self.plan):
            return None
        windows = self.ranks.share(self.calibration.windows).to(self.device)
        tunes = self.algorithm.refines_blocks
        batch = windows_at_once(windows.shape[1], widest_input(self.model), self.device.type == "cpu", tunes)
        compares = self.algorithm.compares_inputs
        how = {"reference": tunes or compares, "compares": compares, "most_held": self.most_held, "ranks": self.ranks}
        keys = [layer.key.activation for layer in self.layers.values() if layer.key]
        partly = self.plan.recipe.activation_percentile < 100 and any(needs_calibration(key) for key in keys)
        how["histograms"] = partly
        return BlockStream(self.model, self.partial.filled, windows, batch, **how)

    def _through(self, stream: BlockStream, block: str) -> dict[str, WrittenLayer]:
        """Carries calibration through a block and quantizes its layers by what it shows.

        An algorithm that works on Gram matrices sees what the quantized layers before each layer put out; for static
        activation scales alone the block runs as it is.
        """
        inside = {
            name: self.partial.destinations.module(name) for name, layer in self.layers.items() if layer.block == block
        }
        written: dict[str, WrittenLayer] = {}
        seen: dict[str, InputStatistics] = {}
        self.solver.seen = seen
        stream.watch = CacheWatch() if self.cache_key is not None and needs_calibration(self.cache_key) else None

        def finish(results: Mapping[str, LayerResult]) -> dict[str, Tensor]:
            found = self._written(results)
            written.update(found)
            return {name: one.weight(self.device) for name, one in found.items()}

        def solve(names: list[str], statistics: InputStatistics) -> dict[str, Tensor]:
            results = self._solve_together(names, statistics)
            seen.update(dict.fromkeys(names, statistics))
            return finish(results)

        def refine(output: Output, target: Callable[[int], Tensor]) -> dict[str, Tensor]:
            tasks = {name: self.solver.task(self.layers[name], statistics) for name, statistics in seen.items()}
            results = {name: one.result for name, one in written.items()}
            batches, dtype = len(stream.states), stream.states[0].dtype
            refined = self.algorithm.refine(
                BlockTask(tasks, results, batches, output, target, dtype, self.ranks.sum_in_place)
            )
            scaled = {name: self.solver.with_input_scale(tasks[name], result) for name, result in refined.items()}
            return finish(self._of_first(scaled))

        if self.algorithm.refines_blocks:
            stream.solve(block, inside, solve, refine)
        elif self.algorithm.needs_gram:
            stream.solve(block, inside, solve)
        else:
            seen.update(stream.gather(block, inside))
            for name, statistics in seen.items() if self.ranks.writes else ():
                written |= self._written(self.solver.solve([name], statistics))
        if stream.watch is not None:
            seen_cached = {side: largest.cpu() for side, largest in stream.watch.largest.items()}
            self.watch = CacheWatch(self.ranks.largest(seen_cached))
        return written

    def _solve_together(self, names: list[str], statistics: InputStatistics) -> dict[str, LayerResult]:
        """Layers that read one input; of several processes each solves some of their rows."""
        if self.ranks.count == 1:
            return self.solver.solve(names, statistics)
        own = self.solver.solve_rows(names, statistics, self.ranks.rank, self.ranks.count)
        shares = self.ranks.everyones(own)
        return {name: self._here(put_together([one[name] for one in shares if name in one])) for name in names}

    def _here(self, result: LayerResult) -> LayerResult:
        return replace(result, record=result.record.to(self.device))

    def _of_first(self, results: Mapping[str, LayerResult]) -> dict[str, LayerResult]:
        """What the first process made of layers that all of them have solved, lest the last digits decide."""
        if self.ranks.count == 1:
            return dict(results)
        found = self.ranks.first({name: replace(one, record=one.record.to("cpu")) for name, one in results.items()})
        return {name: self._here(result) for name, result in found.items()}

    def _by_statistics(self, block: BlockStatistics) -> dict[str, WrittenLayer]:
        """Quantizes the layers of a block by statistics that were kept."""
        written: dict[str, WrittenLayer] = {}
        self.watch = CacheWatch(block.cache)
        self.solver.seen = {name: statistics for name, statistics in block.inputs.items() if name in self.layers}
        for names, statistics in block.groups:
            chosen = [name for name in names if name in self.layers]
            written |= self._written(self.solver.solve(chosen, statistics)) if chosen else {}
        return written

    def _cache_scales(self, block: str) -> Iterator[tuple[str, Tensor]]:
        """The static scales of the block's key-value cache, by their names on disk."""
        if self.cache_key is None or not needs_calibration(self.cache_key):
            return
        place = self.partial.destinations.module
        modules = [name for name in by_module(self.folder.headers) if place(name).startswith(f"{block}.")]
        for attention in attention_modules(modules):
            for side in ("k", "v"):
                try:
                    scale = self.watch.scale(side, self.cache_key)
                except ValueError as error:
                    raise CheckpointError(f"{attention}: {error}.", "Repair the source model.") from error
                if scale is None:
                    raise ModelError(f"{attention} caches nothing that can be seen.", "Leave the KV cache unquantized.")
                yield self.checkpoint.cache_scale(attention, side), scale

    def config(self) -> dict[str, Any]:
        """The `quantization_config` to write."""
        config = stated_config(self.checkpoint, self.layers.values(), self.plan.plain, self.plan.recipe)
        return self.checkpoint.with_kv_cache(config, self.cache_key) if self.cache_key else config

    def recipe(self) -> Recipe:
        """The plan's recipe with what calibration used."""
        used = plan_needs_calibration(self.plan) or self.plan.budget is not None
        record = self.calibration.record() if self.calibration and used else None
        if record is not None:
            record["inputs"] = "as quantized layers put them out" if self.store is None else "of the unquantized model"
            record |= {"processes": self.ranks.count} if self.ranks.count > 1 else {}
        return Recipe(**{**vars(self.plan.recipe), "calibration": record})

    def kept(self) -> list[str]:
        """The tensors that the model class does not build; they are written as they were."""
        place = self.partial.destinations.tensor
        return sorted(name for name in self.folder.headers if tensor_slot(self.model, place(name)) is None)
