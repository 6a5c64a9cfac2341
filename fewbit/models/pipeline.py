"""The one loop that quantizes a checkpoint: block by block, one block's weights and one shard in memory."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
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
from fewbit.checkpoints.output import ShardWriter, copy_side_files, staged_folder
from fewbit.checkpoints.registry import formats
from fewbit.checkpoints.tensor_files import TensorFolder
from fewbit.errors import CheckpointError, ModelError
from fewbit.models.block_stream import BlockStream, Output
from fewbit.models.calibration import Calibration
from fewbit.models.families import blocks_of, joined_members
from fewbit.models.fill import PartialModel
from fewbit.models.load import Progress
from fewbit.models.names import build_on_meta, config_dtype, read_config
from fewbit.models.plan import Plan, PlannedLayer
from fewbit.numerics import QuantizedTensor
from fewbit.numerics.activations import needs_calibration, static_input_scales
from fewbit.numerics.ranges import global_scale_of
from fewbit.packing.registry import dequantize_record
from fewbit.spec.recipe import Recipe

RECIPE_FILE = "fewbit_recipe.json"
REPORT_FILE = "quantization_report.json"
DEFAULT_SHARD_BYTES = 5 * 10**9
CALIBRATION_WINDOWS = 32
CALIBRATION_LENGTH = 512


@dataclass(frozen=True)
class LayerOutcome:
    """What quantizing did to one layer.

    Attributes:
        sqnr_db: signal to quantization noise of the weight, decibels; None where nothing was lost.
        sha256: of the dequantized weight's float32 bytes, minus zero written as zero.
        bytes: of all the tensors that store it.
        method: what chose its codes.
        loss: see `LayerResult`.
    """

    name: str
    key: str
    shape: tuple[int, int]
    sqnr_db: float | None
    sha256: str
    bytes: int
    method: str
    loss: float | None


def plan_needs_calibration(plan: Plan) -> bool:
    """Whether the plan's algorithm or keys need activations."""
    if algorithm(plan.recipe.algorithm, plan.recipe.settings).needs_gram:
        return True
    return any(layer.key is not None and needs_calibration(layer.key.activation) for layer in plan.layers)


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
        _write_config(source, staging, run.checkpoint.config(run.keys(), run.plain()))
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
        self.folder = TensorFolder(source)
        self.checkpoint: CheckpointFormat = formats()[plan.recipe.format]
        self.algorithm: Algorithm = algorithm(plan.recipe.algorithm, plan.recipe.settings)
        self.layers: dict[str, PlannedLayer] = {layer.name: layer for layer in plan.quantized}
        self.outcomes: list[LayerOutcome] = []
        config = read_config(source)
        # Few CPUs multiply 16-bit floats as fast as float32.
        self.model = build_on_meta(config, torch.float32 if device.type == "cpu" else config_dtype(config))
        self.partial = PartialModel(self.model, self.folder, device)
        self.joined = joined_members(self.model)
        self.shared: dict[tuple[str, ...], Tensor] = {}
        self.scheme = self.checkpoint.scheme(self.checkpoint.config(self.keys(), self.plain()))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the result: what is outside the blocks first, then block by block."""
        stream = self._stream()
        for block, names in self._units().items():
            results = self._through(stream, block) if stream is not None and block else {}
            for name in names:
                yield from self._convert(name, results)
                self.progress(nbytes(self.folder.headers[name]))

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
        seen: dict[str, InputStatistics] = {}

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
            for name, statistics in stream.gather(block, inside).items():
                results |= self._quantize([name], statistics)
        return results

    def _convert(self, name: str, results: Mapping[str, LayerResult]) -> Iterator[tuple[str, Tensor]]:
        module = name.removesuffix(".weight")
        layer = self.layers.get(module)
        if layer is None or name != f"{module}.weight":
            yield name, self.folder.load(name)
            return
        result = results[module] if module in results else self._quantize([module], None)[module]
        assert layer.key is not None
        stored = self.checkpoint.write(result.record.to("cpu"), layer.key)
        reread = self._reread(layer, stored)
        self.outcomes.append(_outcome(layer, self.folder.load(name), reread, stored, result))
        for suffix, tensor in stored.items():
            yield f"{module}.{suffix}", tensor

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
        if task.statistics is None or task.statistics.tokens == 0:
            raise ModelError(
                f"No calibration token reached {task.name}, and its activation scale cannot be known.",
                "Ignore this layer, or choose a scheme with dynamic activation scales.",
            )
        scales = static_input_scales(task.statistics.largest, task.key.activation)
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

    def plain(self) -> list[str]:
        """Names of the layers with a matrix of weights that stay as they are, embeddings excepted.

        A tied head is not on disk, but readers build it and must be told.
        """
        named = [layer.name for layer in self.plan.layers if layer.key is None and layer.reason != "embedding"]
        head = next((n for n, m in self.model.named_modules() if m is self.model.get_output_embeddings()), None)
        return named if head is None or head in named or head in self.layers else [*named, head]

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
            "layers": [vars(outcome) for outcome in self.outcomes],
            "plain": {layer.name: layer.reason for layer in self.plan.layers if layer.key is None},
        }


def _weights(results: Mapping[str, LayerResult]) -> dict[str, Tensor]:
    return {name: dequantize_record(result.record) for name, result in results.items()}


def weight_hash(numbers: Tensor) -> str:
    """SHA-256 of float32 numbers, row-major and little-endian, minus zero written as zero."""
    return hashlib.sha256((numbers.float() + 0.0).contiguous().numpy().tobytes()).hexdigest()


def sqnr_db(numbers: Tensor, approximation: Tensor) -> float | None:
    """Signal to quantization noise in decibels; None where nothing was lost."""
    signal = numbers.double().square().sum()
    noise = (numbers.double() - approximation.double()).square().sum()
    return float(10 * torch.log10(signal / noise)) if noise > 0 else None


def _outcome(
    layer: PlannedLayer, weight: Tensor, record: QuantizedTensor, stored: Mapping[str, Tensor], result: LayerResult
) -> LayerOutcome:
    approximation = dequantize_record(record)
    return LayerOutcome(
        layer.name,
        str(layer.key),
        (layer.shape[0], layer.shape[1]),
        sqnr_db(weight, approximation),
        weight_hash(approximation),
        sum(tensor.nbytes for tensor in stored.values()),
        result.method,
        result.loss,
    )


def _write_config(source: Path, staging: Path, quantization: dict[str, Any]) -> None:
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = quantization
    (staging / "config.json").write_text(json.dumps(config, indent=2) + "\n")
