"""The one loop that quantizes a checkpoint: block by block, one block's weights and one shard in memory."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fewbit
from fewbit.algorithms.interface import Algorithm, LayerTask
from fewbit.algorithms.registry import algorithm
from fewbit.algorithms.statistics import InputStatistics
from fewbit.checkpoints.dtypes import header_of, nbytes
from fewbit.checkpoints.interface import CheckpointFormat
from fewbit.checkpoints.kv_scales import attention_modules
from fewbit.checkpoints.output import ShardWriter, copy_side_files, staged_folder
from fewbit.checkpoints.registry import formats
from fewbit.checkpoints.tensor_files import TensorFolder, by_module
from fewbit.errors import CheckpointError, ModelError
from fewbit.models.calibration import BlockStream, CacheWatch, Calibration
from fewbit.models.families import blocks_of, joined_members
from fewbit.models.fill import PartialModel
from fewbit.models.load import Progress
from fewbit.models.names import build_on_meta, config_dtype, read_config
from fewbit.models.plan import Plan, PlannedLayer
from fewbit.models.replace import tensor_slot
from fewbit.numerics import QuantizedTensor, clipped_share, dequantize
from fewbit.numerics.activations import needs_calibration, static_input_scales
from fewbit.numerics.ranges import global_scale_of
from fewbit.packing.registry import unpack_record
from fewbit.spec.granularity import HEAD
from fewbit.spec.recipe import Recipe

RECIPE_FILE = "fewbit_recipe.json"
REPORT_FILE = "quantization_report.json"
_EXPERT = re.compile(r"\.experts\.\d+\.")
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
        clipped: share of the weights beyond the last code of their scale; None where groups have no fixed place.
        algorithm: what chose the codes.
        tokens: of the calibration text that reached it; None where nothing was calibrated.
        note: what was done for want of tokens, empty where there were some.
    """

    name: str
    key: str
    shape: tuple[int, int]
    sqnr_db: float | None
    sha256: str
    bytes: int
    clipped: float | None
    algorithm: str
    tokens: int | None = None
    note: str = ""


def plan_needs_calibration(plan: Plan) -> bool:
    """Whether the plan's algorithm or keys need activations."""
    if algorithm(plan.recipe.algorithm).needs_statistics:
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
) -> dict[str, Any]:
    """Quantizes the checkpoint in `source` into a new folder `output`.

    Args:
        source: folder of the unquantized checkpoint that `plan` was made for.
        output: must not exist; it appears complete or not at all.
        plan: from `make_plan`.
        calibration: token windows, needed where `plan_needs_calibration` says so.
        max_shard_bytes: largest size of a weight file.
        progress: called with the bytes of each source tensor dealt with.

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
        run = _Run(source, plan, calibration, progress or (lambda _: None))
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

    def __init__(self, source: Path, plan: Plan, calibration: Calibration | None, progress: Progress) -> None:
        self.plan, self.calibration, self.progress = plan, calibration, progress
        self.folder = TensorFolder(source)
        self.checkpoint: CheckpointFormat = formats()[plan.recipe.format]
        self.algorithm: Algorithm = algorithm(plan.recipe.algorithm)
        self.layers: dict[str, PlannedLayer] = {layer.name: layer for layer in plan.quantized}
        self.outcomes: list[LayerOutcome] = []
        config = read_config(source)
        self.model = build_on_meta(config, config_dtype(config))
        self.partial = PartialModel(self.model, self.folder)
        self.joined = joined_members(self.model)
        self.shared: dict[tuple[str, ...], Tensor] = {}
        self.cache_key = plan.recipe.scheme.kv_cache
        self.watches: dict[str, CacheWatch] = {}
        self.scheme = self.checkpoint.scheme(self.checkpoint.config(self.keys(), plan.plain))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the result: what is outside the blocks first, then block by block."""
        statistics_of = self._statistics()
        for block, names in self._units().items():
            statistics = statistics_of(block) if block else {}
            for name in names:
                yield from self._convert(name, statistics)
                self.progress(nbytes(self.folder.headers[name]))
            yield from self._cache_scales(block)

    def _units(self) -> dict[str, list[str]]:
        """Stored tensors by the block they belong to; the key of those outside every block is empty."""
        units: dict[str, list[str]] = {"": []} | {path: [] for path in blocks_of(self.model)}
        prefixes = {f"{path}.": path for path in units if path}
        for name in sorted(self.folder.headers):
            target = self.partial.destinations.tensor(name)
            units[next((path for prefix, path in prefixes.items() if target.startswith(prefix)), "")].append(name)
        return units

    def _statistics(self) -> Callable[[str], Mapping[str, InputStatistics]]:
        if self.calibration is None or not plan_needs_calibration(self.plan):
            return lambda _: {}
        stream = BlockStream(self.model, self.partial.filled, self.calibration.windows)

        def through(block: str) -> Mapping[str, InputStatistics]:
            inside = [name for name, layer in self.layers.items() if layer.block == block]
            watch = self.watches.setdefault(block, CacheWatch()) if needs_calibration(self.cache_key) else None
            return stream.through(block, {name: self.partial.destinations.module(name) for name in inside}, watch)

        return through

    def _cache_scales(self, block: str) -> Iterator[tuple[str, Tensor]]:
        """The static scales of the block's key-value cache, by their names on disk."""
        if block not in self.watches or self.cache_key is None:
            return
        modules = [name for name in by_module(self.folder.headers) if self._is_in(name, block)]
        for attention in attention_modules(modules):
            for side in ("k", "v"):
                largest = self.watches[block].largest.get(side)
                if largest is None:
                    raise ModelError(
                        f"{attention} caches nothing that fewbit can watch.", "Leave the KV cache unquantized."
                    )
                largest = largest.reshape(-1, 1, 1) if self.cache_key.granularity == HEAD else largest.amax().reshape(1)
                scale = static_input_scales(largest, self.cache_key)["input_scale"]
                yield self.checkpoint.cache_scale(attention, side), scale

    def _is_in(self, module: str, block: str) -> bool:
        return self.partial.destinations.module(module).startswith(f"{block}.")

    def _convert(self, name: str, statistics: Mapping[str, InputStatistics]) -> Iterator[tuple[str, Tensor]]:
        module = name.removesuffix(".weight")
        layer = self.layers.get(module)
        if layer is None or name != f"{module}.weight":
            yield name, self.folder.load(name)
            return
        weight = self.folder.load(name)
        found, note = _input_of(module, statistics)
        record = self._quantize(layer, weight, found)
        assert layer.key is not None
        stored = self.checkpoint.write(record, layer.key)
        self.outcomes.append(self._outcome(layer, weight, stored, found, note))
        for suffix, tensor in stored.items():
            yield f"{module}.{suffix}", tensor

    def _outcome(
        self,
        layer: PlannedLayer,
        weight: Tensor,
        stored: Mapping[str, Tensor],
        statistics: InputStatistics | None,
        note: str,
    ) -> LayerOutcome:
        record = unpack_record(self._reread(layer, stored))
        approximation = dequantize(record)
        return LayerOutcome(
            layer.name,
            str(layer.key),
            (layer.shape[0], layer.shape[1]),
            sqnr_db(weight, approximation),
            weight_hash(approximation),
            sum(tensor.nbytes for tensor in stored.values()),
            None if "order" in record or "minimum" in record else clipped_share(weight, record),
            self.plan.recipe.algorithm,
            None if statistics is None else statistics.tokens,
            note,
        )

    def _reread(self, layer: PlannedLayer, stored: Mapping[str, Tensor]) -> QuantizedTensor:
        """The record as a reader will get it: a format may hold a scale with fewer digits than the hub."""
        shape = (layer.shape[0], layer.shape[1])
        headers = {name: header_of(tensor) for name, tensor in stored.items()}
        described = self.checkpoint.describe(self.scheme, layer.name, headers, layer.class_name, shape)
        assert described is not None, f"{layer.name} was written as a plain layer"
        return self.checkpoint.read(described, stored, shape)

    def _quantize(self, layer: PlannedLayer, weight: Tensor, statistics: InputStatistics | None) -> QuantizedTensor:
        assert layer.key is not None
        recipe = self.plan.recipe
        task = LayerTask(
            layer.name, weight, layer.key, recipe.scale_rules, self._shared_scale(layer), statistics, recipe.settings
        )
        try:
            record = self.algorithm.quantize_layer(task)
        except ValueError as error:
            raise CheckpointError(f"{layer.name}: {error}.", "Repair the source model or ignore this layer.") from error
        if layer.key.activation is not None and needs_calibration(layer.key.activation):
            if statistics is None:
                raise ModelError(
                    f"{layer.name} lies outside the decoder blocks and its activation scale cannot be calibrated.",
                    "Ignore this layer.",
                )
            record = record.with_tensors(**static_input_scales(statistics.largest, layer.key.activation))
        return record

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

    def config(self) -> dict[str, Any]:
        """The `quantization_config` to write."""
        config = self.checkpoint.config(self.keys(), self.plan.plain)
        return self.checkpoint.with_kv_cache(config, self.cache_key) if self.cache_key else config

    def keys(self) -> dict[str, Any]:
        """Layer name -> key, for the configuration."""
        return {name: layer.key for name, layer in self.layers.items()}

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
            "tie_word_embeddings": "untied: the head is quantized apart" if self.plan.unties else "as in the source",
            "layers": [vars(outcome) for outcome in self.outcomes],
            "kept": sorted(name for name in self.folder.headers if not self._has_place(name)),
            "plain": {layer.name: layer.reason for layer in self.plan.layers if layer.key is None},
        }

    def _has_place(self, name: str) -> bool:
        """Whether the model class builds a stored tensor; those that it does not build are written as they were."""
        return tensor_slot(self.model, self.partial.destinations.tensor(name)) is not None


def _input_of(module: str, statistics: Mapping[str, InputStatistics]) -> tuple[InputStatistics | None, str]:
    """What is known of a layer's input, and a note where no token reached it.

    An expert that no token was sent to takes the largest magnitude that any of its siblings saw.
    """
    own = statistics.get(module)
    if own is None or own.tokens:
        return own, ""
    place = _EXPERT.sub(".experts.*.", module)
    shared = InputStatistics.of_siblings(
        other for name, other in statistics.items() if _EXPERT.sub(".experts.*.", name) == place
    )
    source = "the largest of its siblings" if float(shared.largest) > 0 else "nothing, like all its siblings"
    return shared, f"no calibration token reached it; its activation scale is from {source}"


def weight_hash(numbers: Tensor) -> str:
    """SHA-256 of float32 numbers, row-major and little-endian, minus zero written as zero."""
    return hashlib.sha256((numbers.float() + 0.0).contiguous().numpy().tobytes()).hexdigest()


def sqnr_db(numbers: Tensor, approximation: Tensor) -> float | None:
    """Signal to quantization noise in decibels; None where nothing was lost."""
    signal = numbers.double().square().sum()
    noise = (numbers.double() - approximation.double()).square().sum()
    return float(10 * torch.log10(signal / noise)) if noise > 0 else None


def _write_config(source: Path, staging: Path, quantization: dict[str, Any], unties: bool) -> None:
    """The source's config.json with its quantization, and without a tie between ends that differ from now on."""
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = quantization
    if unties:
        config["tie_word_embeddings"] = False
    (staging / "config.json").write_text(json.dumps(config, indent=2) + "\n")
