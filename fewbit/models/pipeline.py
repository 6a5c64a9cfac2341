"""The one loop that quantizes a checkpoint: block by block, one block's weights and one shard in memory."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fewbit
from fewbit.algorithms.interface import Algorithm, BlockTask, LayerResult, LayerTask
from fewbit.algorithms.registry import algorithm
from fewbit.algorithms.statistics import InputStatistics
from fewbit.checkpoints.dtypes import header_of, nbytes
from fewbit.checkpoints.interface import CheckpointFormat
from fewbit.checkpoints.kv_scales import attention_modules
from fewbit.checkpoints.output import ShardWriter, copy_side_files, staged_folder
from fewbit.checkpoints.registry import formats
from fewbit.checkpoints.tensor_files import TensorFolder, by_module
from fewbit.errors import CheckpointError, ModelError
from fewbit.models.block_stream import BlockStream, Output
from fewbit.models.calibration import Calibration
from fewbit.models.families import blocks_of, joined_members
from fewbit.models.fill import PartialModel
from fewbit.models.kv_cache import CacheWatch
from fewbit.models.load import Progress
from fewbit.models.names import build_on_meta, config_dtype, read_config
from fewbit.models.outcome import InputSeen, LayerOutcome, outcome_of
from fewbit.models.plan import Plan, PlannedLayer
from fewbit.models.replace import tensor_slot
from fewbit.models.transforms.registry import of_recipe
from fewbit.models.transforms.transformed import Transformations
from fewbit.numerics import QuantizedTensor
from fewbit.numerics.activations import needs_calibration, static_input_scales
from fewbit.numerics.ranges import global_scale_of
from fewbit.packing.registry import dequantize_record, unpack_record
from fewbit.spec.recipe import Recipe

RECIPE_FILE = "fewbit_recipe.json"
REPORT_FILE = "quantization_report.json"
_EXPERT = re.compile(r"\.experts\.\d+\.")
DEFAULT_SHARD_BYTES = 5 * 10**9
CALIBRATION_WINDOWS = 32
CALIBRATION_LENGTH = 512


def plan_needs_calibration(plan: Plan) -> bool:
    """Whether the plan's algorithm, transformations or keys need activations."""
    if algorithm(plan.recipe.algorithm, plan.recipe.settings).needs_gram:
        return True
    if any(one.needs_statistics for one in of_recipe(plan.recipe.transforms)):
        return True
    keys = [plan.recipe.scheme.kv_cache, *(layer.key.activation for layer in plan.quantized if layer.key)]
    return any(needs_calibration(key) for key in keys)


def quantize_checkpoint(
    source: str | Path,
    output: str | Path,
    plan: Plan,
    *,
    calibration: Calibration | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Progress | None = None,
    device: str = "cpu",
) -> dict[str, Any]:
    """Quantizes the checkpoint in `source` into a new folder `output`.

    Args:
        source: folder of the unquantized checkpoint that `plan` was made for.
        output: must not exist; it appears complete or not at all.
        plan: from `make_plan`.
        calibration: token windows, needed where `plan_needs_calibration` says so.
        max_shard_bytes: largest size of a weight file.
        progress: called with the bytes of each source tensor dealt with.
        device: where blocks run and codes are chosen.

    Returns:
        The report, which is also written to `quantization_report.json`.

    Raises:
        ModelError: calibration is needed and missing, or the model cannot be run block by block.
        CheckpointError: a weight holds NaN or infinity.
        OutputError: the output exists or cannot be written; nothing is left behind.
    """
    if plan_needs_calibration(plan) and calibration is None:
        raise ModelError(f"{plan.recipe.scheme.name} needs calibration data.", "Give windows of tokens.")
    started = time.monotonic()
    source = Path(source)
    with staged_folder(Path(output)) as staging:
        run = _Run(source, plan, calibration, progress or (lambda _: None), torch.device(device))
        writer = ShardWriter(staging, max_shard_bytes)
        for name, tensor in run.tensors():
            writer.add(name, tensor)
        writer.finish()
        copy_side_files(source, staging)
        recipe = run.recipe()
        _write_config(source, staging, run.config(), plan.unties)
        (staging / RECIPE_FILE).write_text(recipe.to_json())
        report = run.report(recipe, writer.nbytes, time.monotonic() - started)
        (staging / REPORT_FILE).write_text(json.dumps(report, indent=2))
    return report


class _Run:
    """The state of one pass over a checkpoint."""

    def __init__(
        self, source: Path, plan: Plan, calibration: Calibration | None, progress: Progress, device: torch.device
    ) -> None:
        self.plan, self.calibration, self.progress, self.device = plan, calibration, progress, device
        self.checkpoint: CheckpointFormat = formats()[plan.recipe.format]
        self.algorithm: Algorithm = algorithm(plan.recipe.algorithm, plan.recipe.settings)
        self.layers: dict[str, PlannedLayer] = {layer.name: layer for layer in plan.quantized}
        self.outcomes: list[LayerOutcome] = []
        config = read_config(source)
        self.transforms = Transformations(plan.recipe, self.keys(), TensorFolder(source), config, device)
        self.folder = self.transforms.weights
        # Few CPUs multiply 16-bit floats as fast as float32.
        self.model = build_on_meta(config, torch.float32 if device.type == "cpu" else config_dtype(config))
        self.partial = PartialModel(self.model, self.folder, device)
        self.joined = joined_members(self.model)
        self.shared: dict[tuple[str, ...], Tensor] = {}
        self.seen: dict[str, InputStatistics] = {}  # inputs of the layers of the block at hand
        self.cache_key = plan.recipe.scheme.kv_cache
        self.watch = CacheWatch()
        self.scheme = self.checkpoint.scheme(self.checkpoint.config(self.keys(), plan.plain))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the result: what is outside the blocks first, then block by block."""
        stream = self._stream()
        for block, names in self._units().items():
            results = self._through(stream, block) if stream is not None and block else {}
            for name in names:
                yield from self._convert(name, results)
                self.progress(nbytes(self.folder.headers[name]))
            if block:
                yield from self._cache_scales(block)

    def _units(self) -> dict[str, list[str]]:
        """Stored tensors by the block they belong to; the key of those outside every block is empty."""
        units: dict[str, list[str]] = {"": []} | {path: [] for path in blocks_of(self.model)}
        prefixes = {f"{path}.": path for path in units if path}
        for name in sorted(self.folder.headers):
            target = self.partial.destinations.tensor(name)
            units[next((path for prefix, path in prefixes.items() if target.startswith(prefix)), "")].append(name)
        return units

    def _stream(self) -> BlockStream | None:
        if self.calibration is None or not plan_needs_calibration(self.plan):
            return None
        windows = self.calibration.windows.to(self.device)
        return BlockStream(self.model, self.partial.filled, windows, reference=self.algorithm.refines_blocks)

    def _through(self, stream: BlockStream, block: str) -> dict[str, LayerResult]:
        """Carries calibration through a block and quantizes its layers by what it shows.

        An algorithm that works on Gram matrices sees what the quantized layers before each layer put out; for static
        activation scales alone the block runs as it is.
        """
        inside = {
            name: self.partial.destinations.module(name) for name, layer in self.layers.items() if layer.block == block
        }
        results: dict[str, LayerResult] = {}
        self.transforms.enter(stream, block)
        self.seen = seen = {}
        stream.watch = self.watch = CacheWatch()

        def solve(names: list[str], statistics: InputStatistics) -> dict[str, Tensor]:
            found = self._quantize(names, statistics)
            results.update(found)
            seen.update(dict.fromkeys(names, statistics))
            return _weights(found)

        def refine(output: Output, target: Callable[[int], Tensor]) -> dict[str, Tensor]:
            tasks = {name: self._task(self.layers[name], statistics) for name, statistics in seen.items()}
            task = BlockTask(tasks, dict(results), len(stream.states), output, target)
            refined = self.algorithm.refine(task)
            results.update({name: self._with_input_scale(tasks[name], result) for name, result in refined.items()})
            return _weights(refined)

        if self.algorithm.refines_blocks:
            stream.solve(block, inside, solve, refine)
        elif self.algorithm.needs_gram:
            stream.solve(block, inside, solve)
        else:
            seen.update(stream.gather(block, inside))
            for name, statistics in seen.items():
                results |= self._quantize([name], statistics)
        return results

    def _cache_scales(self, block: str) -> Iterator[tuple[str, Tensor]]:
        """The static scales of the block's key-value cache, by their names on disk."""
        if self.cache_key is None or not needs_calibration(self.cache_key):
            return
        place = self.partial.destinations.module
        modules = [name for name in by_module(self.folder.headers) if place(name).startswith(f"{block}.")]
        for attention in attention_modules(modules):
            for side in ("k", "v"):
                scale = self.watch.scale(side, self.cache_key)
                if scale is None:
                    raise ModelError(f"{attention} caches nothing that can be seen.", "Leave the KV cache unquantized.")
                yield self.checkpoint.cache_scale(attention, side), scale

    def _convert(self, name: str, results: Mapping[str, LayerResult]) -> Iterator[tuple[str, Tensor]]:
        module = name.removesuffix(".weight")
        layer = self.layers.get(module)
        if layer is None or name != f"{module}.weight":
            yield name, self.folder.plain(name)
            return
        result = results[module] if module in results else self._quantize([module], None)[module]
        assert layer.key is not None
        stored = self.checkpoint.write(result.record.to("cpu"), layer.key)
        reread = self._reread(layer, stored)
        seen = self._input_seen(layer)
        self.outcomes.append(outcome_of(layer, self.folder.load(name), unpack_record(reread), stored, result, seen))
        for suffix, tensor in stored.items():
            yield f"{module}.{suffix}", tensor

    def _input_seen(self, layer: PlannedLayer) -> InputSeen:
        """How many calibration tokens reached a layer, and what was done where none did."""
        if self.calibration is None or not layer.block or not plan_needs_calibration(self.plan):
            return InputSeen()
        own = self.seen.get(layer.name)
        if own is not None and own.tokens:
            return InputSeen(own.tokens)
        note = "no calibration token reached it"
        if layer.key is None or not needs_calibration(layer.key.activation):
            return InputSeen(0, note)
        source = "the largest of its siblings" if self._of_siblings(layer.name).largest > 0 else "nothing"
        return InputSeen(0, f"{note}; its activation scale is from {source}")

    def _of_siblings(self, name: str) -> InputStatistics:
        """What stands in for the input of an expert that no token was sent to: the largest that its siblings saw."""
        place = _EXPERT.sub(".experts.*.", name)
        return InputStatistics.of_siblings(
            other for sibling, other in self.seen.items() if _EXPERT.sub(".experts.*.", sibling) == place
        )

    def _reread(self, layer: PlannedLayer, stored: Mapping[str, Tensor]) -> QuantizedTensor:
        """The record as a reader will get it: a format may hold a scale with fewer digits than the hub."""
        shape = (layer.shape[0], layer.shape[1])
        headers = {name: header_of(tensor) for name, tensor in stored.items()}
        described = self.checkpoint.describe(self.scheme, layer.name, headers, layer.class_name, shape)
        assert described is not None, f"{layer.name} was written as a plain layer"
        return self.checkpoint.read(described, stored, shape)

    def _quantize(self, names: list[str], statistics: InputStatistics | None) -> dict[str, LayerResult]:
        """Layers that read one input, by name."""
        tasks = [self._task(self.layers[name], statistics) for name in names]
        try:
            found = self.algorithm.quantize_layers(tasks)
        except ValueError as error:
            raise CheckpointError(
                f"{', '.join(names)}: {error}.", "Repair the source model or ignore these layers."
            ) from error
        return {task.name: self._with_input_scale(task, result) for task, result in zip(tasks, found, strict=True)}

    def _task(self, layer: PlannedLayer, statistics: InputStatistics | None) -> LayerTask:
        assert layer.key is not None
        weight = self.folder.load(f"{layer.name}.weight").to(self.device)
        shared = self._shared_scale(layer)
        shared = None if shared is None else shared.to(self.device)
        return LayerTask(layer.name, weight, layer.key, self.plan.recipe.scale_rules, shared, statistics)

    def _with_input_scale(self, task: LayerTask, result: LayerResult) -> LayerResult:
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
        scales = static_input_scales(found.largest, task.key.activation)
        return replace(result, record=result.record.with_tensors(**scales))

    def _shared_scale(self, layer: PlannedLayer) -> Tensor | None:
        """The second-level scale that the members of a joined matrix share; None where the layer has its own."""
        assert layer.key is not None
        members = self.joined.get(layer.name, ())
        if layer.key.weight.global_scale is None or not members:
            return None
        if members not in self.shared:
            largest = torch.stack([self.folder.load(f"{name}.weight").abs().amax().float() for name in members]).amax()
            self.shared[members] = global_scale_of(largest.reshape(1, 1), layer.key.weight)
        return self.shared[members]

    def keys(self) -> dict[str, Any]:
        """Layer name -> key, for the configuration."""
        return {name: layer.key for name, layer in self.layers.items()}

    def config(self) -> dict[str, Any]:
        """The `quantization_config` to write."""
        config = self.checkpoint.config(self.keys(), self.plan.plain)
        return self.checkpoint.with_kv_cache(config, self.cache_key) if self.cache_key else config

    def recipe(self) -> Recipe:
        """The plan's recipe with what calibration used."""
        record = self.calibration.record() if self.calibration and plan_needs_calibration(self.plan) else None
        return Recipe(**{**vars(self.plan.recipe), "calibration": record})

    def report(self, recipe: Recipe, written: int, seconds: float) -> dict[str, Any]:
        """What was done, in numbers that were measured or computed."""
        return {
            "scheme": recipe.scheme.name,
            "format": recipe.format,
            "algorithm": recipe.algorithm,
            "source": recipe.source,
            "bytes_before": self.plan.bytes_before,
            "bytes_after": written,
            "bits_per_weight": self.plan.bits_per_weight,
            "seconds": round(seconds, 3),
            "versions": {"fewbit": fewbit.__version__, "torch": torch.__version__},
            "tie_word_embeddings": "untied: the head has a weight of its own"
            if self.plan.unties
            else "as in the source",
            "transforms": self.transforms.entries,
            "layers": [vars(outcome) for outcome in self.outcomes],
            "kept": sorted(name for name in self.folder.headers if not self._has_place(name)),
            "plain": {layer.name: layer.reason for layer in self.plan.layers if layer.key is None},
        }

    def _has_place(self, name: str) -> bool:
        """Whether the model class builds a stored tensor; those that it does not build are written as they were."""
        return tensor_slot(self.model, self.partial.destinations.tensor(name)) is not None


def _weights(results: Mapping[str, LayerResult]) -> dict[str, Tensor]:
    return {name: dequantize_record(result.record) for name, result in results.items()}


def _write_config(source: Path, staging: Path, quantization: dict[str, Any], unties: bool) -> None:
    """The source's config.json with its quantization, and without a tie between ends that differ from now on."""
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = quantization
    if unties:
        config["tie_word_embeddings"] = False
    (staging / "config.json").write_text(json.dumps(config, indent=2) + "\n")
