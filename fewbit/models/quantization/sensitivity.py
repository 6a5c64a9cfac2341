"""How much the model's output minds each layer's quantization, for every key that a layer might get.

A layer's error E under a key is measured: its weight is quantized. What reaches an output is a constant, E times the
mean of the input, and what varies from token to token, diag(E C E^T) with the covariance C of the input. The constant
counts by the squared sum of the gradients of a window, since the same error at every token adds up (attention averages
over tokens: this is what makes v_proj delicate); what varies counts by the sum of the squared gradients. Half of that
is the KL divergence in nats per token that this layer alone would cause, to second order (see `gradient_stream`). Sums
over layers take the errors to be independent.

Where transformations come before, all of this is of the weights as these leave them: scales chosen by data are chosen
for the keys that layers are planned with, and inputs, outputs and gradients are divided and multiplied by them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from fewbit.algorithms.curvature import output_loss
from fewbit.algorithms.interface import Algorithm, LayerTask
from fewbit.algorithms.registry import algorithm
from fewbit.algorithms.statistics import InputStatistics
from fewbit.checkpoints.tensor_files import TensorFolder, by_module
from fewbit.errors import CheckpointError
from fewbit.models.families import blocks_of
from fewbit.models.fill import PartialModel
from fewbit.models.names import build_on_meta, read_config
from fewbit.models.quantization.gradient_stream import CacheEvidence, GradientStream, LayerEvidence
from fewbit.models.quantization.plan import PlannedLayer
from fewbit.models.quantization.products import calibration_dtype
from fewbit.models.quantization.ranks import ALONE, Ranks
from fewbit.models.quantization.statistics import BlockStatistics
from fewbit.models.quantization.transforms.evidence import KeptEvidence
from fewbit.models.quantization.transforms.probe import matrices
from fewbit.models.quantization.transforms.transformed import Transformations
from fewbit.numerics import dequantize
from fewbit.spec.key import LinearKey, QuantKey
from fewbit.spec.recipe import Recipe

WEIGHTS_AT_ONCE = 1 << 27
"""Weights that are quantized together, all candidates counted; the solver makes some float32 copies of them."""


@dataclass(frozen=True)
class Sensitivity:
    """Predicted KL divergences in nats per token.

    Attributes:
        layers: layer name -> key -> what quantizing this layer so would cost.
        cache: key of the KV cache -> what quantizing all of it so would cost.
    """

    layers: dict[str, dict[LinearKey, float]] = field(default_factory=dict)
    cache: dict[QuantKey, float] = field(default_factory=dict)


def measure_sensitivity(
    source: str | Path,
    recipe: Recipe,
    layers: Iterable[PlannedLayer],
    candidates: Mapping[str, Sequence[LinearKey]],
    windows: Tensor,
    *,
    cache_keys: Sequence[QuantKey] = (),
    device: str = "cpu",
    on_block: Callable[[], None] | None = None,
    ranks: Ranks = ALONE,
) -> Sensitivity:
    """Carries windows through the unquantized model and gradients back, and quantizes every layer by every candidate.

    Args:
        source: folder of the unquantized model.
        recipe: its algorithm says how codes would be chosen, its transformations what is done to weights before.
        layers: of the blocks; one outside them gets no figures.
        candidates: layer name -> the keys that it might get.
        windows: int64 [count, length].
        cache_keys: keys that the KV cache might get.
        device: where blocks run.
        on_block: called after each block.
        ranks: the processes that do this together: each carries some of the windows and quantizes some of the layers.

    Raises:
        CheckpointError: what calibration shows is not finite.
        ModelError: a transformation does not know this architecture.
    """
    place = torch.device(device)
    config = read_config(Path(source))
    model = build_on_meta(config, calibration_dtype(config, place))
    layers = list(layers)
    keys = {layer.name: layer.key for layer in layers if layer.key}
    transforms = Transformations(recipe, keys, TensorFolder(Path(source)), config, place, ranks)
    partial = PartialModel(model, transforms.weights, place)
    stream = GradientStream(model, partial, ranks.share(windows).to(place))
    evidence = CacheEvidence(cache_keys)
    stream.watch = evidence if cache_keys else None
    by_block: dict[str, list[PlannedLayer]] = {}
    for layer in layers:
        by_block.setdefault(layer.block, []).append(layer)
    found = Sensitivity()
    for path in reversed(blocks_of(model)):
        mine = {layer.name: layer for layer in by_block.get(path, ())}
        seen = _transformed(transforms, path, _of_block(stream, partial, path, mine, ranks))
        seen = {name: one for name, one in seen.items() if name in mine}
        weights = {name: transforms.weights.load(f"{name}.weight").to(place) for name in mine}
        wanted = {name: candidates[name] for name in mine}
        found.layers.update(_divergences(recipe, weights, wanted, seen, windows.numel(), ranks))
        if on_block is not None:
            on_block()
    for key in cache_keys:
        total = sum(one[key] for one in ranks.everyones(evidence.divergence))
        found.cache[key] = total / windows.numel()
    return found


def _divergences(
    recipe: Recipe,
    weights: Mapping[str, Tensor],
    wanted: Mapping[str, Sequence[LinearKey]],
    seen: Mapping[str, LayerEvidence],
    tokens: int,
    ranks: Ranks,
) -> dict[str, dict[LinearKey, float]]:
    """Layer -> key -> what it costs; nothing where no token came by."""
    found = {name: dict.fromkeys(keys, 0.0) for name, keys in wanted.items()}
    errors = _errors(recipe, weights, wanted, seen, ranks)
    own = [(name, key, _divergence(error, seen[name], tokens)) for name, key, error in errors]
    for name, key, divergence in (one for parts in ranks.everyones(own) for one in parts):
        found[name][key] = divergence
    return found


def _of_block(
    stream: GradientStream, partial: PartialModel, path: str, layers: Mapping[str, PlannedLayer], ranks: Ranks
) -> Mapping[str, LayerEvidence]:
    """The evidence of a block's planned layers by stored name, and of what else reads the inputs of some: routers.

    Raises:
        CheckpointError: it is not finite.
    """
    block = partial.model.get_submodule(path)
    own = {f"{path}.{name}": weight for name, weight in matrices(block).items()}
    modules = {name: partial.destinations.module(name) for name in by_module(partial.folder.headers)}
    inside = {name: place for name, place in modules.items() if place in own}
    readers = inside.keys() - layers.keys()
    shapes = {n: (0 if n in readers else own[place].shape[0], own[place].shape[1]) for n, place in inside.items()}
    seen = _of_all(stream.back(path, inside, readers), shapes, ranks)
    for name, one in seen.items():
        try:
            one.statistics.require_finite()
        except ValueError as error:
            raise CheckpointError(f"{name}: {error}.", "Repair the source model.") from error
    return seen


class _ScaledEvidence(KeptEvidence):
    """Evidence of a block's layers, as transformations have left it.

    Args:
        block: its path.
        seen: by the layers' stored names.
    """

    def __init__(self, block: str, seen: Mapping[str, LayerEvidence]) -> None:
        super().__init__(BlockStatistics(block, {name: one.statistics for name, one in seen.items()}, {}))
        self.seen = dict(seen)

    def divide(self, names: Sequence[str], columns: Tensor) -> None:
        names = [name for name in names if name in self.seen]  # no token reached the others
        super().divide(names, columns)
        for name in names:
            self.seen[name] = self.seen[name].scaled(self.statistics.inputs[name], columns, None)

    def divide_outputs(self, name: str, rows: Tensor) -> None:
        if name in self.seen and len(self.seen[name].squares):
            self.seen[name] = self.seen[name].scaled(self.seen[name].statistics, None, rows)


def _transformed(
    transforms: Transformations, block: str, seen: Mapping[str, LayerEvidence]
) -> Mapping[str, LayerEvidence]:
    """The evidence after the block has been transformed."""
    evidence = _ScaledEvidence(block, seen)
    transforms.enter(evidence, block)
    return evidence.seen


def _of_all(
    seen: Mapping[str, LayerEvidence], shapes: Mapping[str, tuple[int, int]], ranks: Ranks
) -> Mapping[str, LayerEvidence]:
    """What all processes saw; layers that read one input share its statistics again.

    Args:
        seen: what this one saw.
        shapes: outputs and input features of every layer.
        ranks: the processes.
    """
    if ranks.count == 1:
        return seen
    first: dict[str, str] = {}  # of the layers that read one input
    for readers in ranks.everyones({name: _readers(seen, one.statistics)[0] for name, one in seen.items()}):
        first = readers | first
    found: dict[str, LayerEvidence] = {}
    shared: dict[str, InputStatistics] = {}
    for name, leader in first.items():
        own, (outputs, features) = seen.get(name), shapes[name]
        if leader not in shared:
            shared[leader] = ranks.total(own.statistics if own else None, features)
        sums = (own.total, own.squares, own.squared_sums) if own else None
        total, squares, squared = sums or (
            torch.zeros(size, device=ranks.device) for size in (features, outputs, outputs)
        )
        found[name] = LayerEvidence(shared[leader], *(ranks.sum_in_place(part) for part in (total, squares, squared)))
    return found


def _readers(seen: Mapping[str, LayerEvidence], statistics: InputStatistics) -> list[str]:
    return [name for name, one in seen.items() if one.statistics is statistics]


def _errors(
    recipe: Recipe,
    weights: Mapping[str, Tensor],
    wanted: Mapping[str, Sequence[LinearKey]],
    seen: Mapping[str, LayerEvidence],
    ranks: Ranks,
) -> Iterator[tuple[str, LinearKey, Tensor]]:
    """(layer, key, what quantizing does to its weight [N, K]); layers that read one input are solved together.

    Of several processes each gets some of the inputs.
    """
    inputs: dict[int, list[str]] = {}
    for name, evidence in seen.items():
        inputs.setdefault(id(evidence.statistics), []).append(name)
    groups = list(inputs.values())
    sizes = [sum(weights[name].numel() for name in names) for names in groups]
    for names in (groups[index] for index in ranks.own(sizes)):
        tasks = [
            LayerTask(name, weights[name], key, recipe.scale_rules, None, seen[name].statistics)
            for name in names
            for key in wanted[name]
        ]
        for part in _parts(tasks):
            results = _estimator(recipe, part[0].key).quantize_layers(part)
            for task, result in zip(part, results, strict=True):
                yield task.name, task.key, dequantize(result.record) - task.weight.float()


def _parts(tasks: Sequence[LayerTask]) -> Iterator[list[LayerTask]]:
    """Tasks of one element each, of so many weights at most that the solver's working copies stay small."""
    by_element: dict[str, list[LayerTask]] = {}
    for task in tasks:
        by_element.setdefault(task.key.weight.element.name, []).append(task)
    for alike in by_element.values():
        part: list[LayerTask] = []
        for task in alike:
            if part and sum(one.weight.numel() for one in part) + task.weight.numel() > WEIGHTS_AT_ONCE:
                yield part
                part = []
            part.append(task)
        yield part


def _estimator(recipe: Recipe, key: LinearKey) -> Algorithm:
    """What stands in for the recipe's algorithm.

    GPTQ alone for those that read data, whose errors rank alike; rounding to nearest from eight bits on, where there is
    little to win.
    """
    chosen = algorithm(recipe.algorithm, recipe.settings)
    if not chosen.needs_gram:
        return chosen
    if key.weight.element.bits >= 8:
        return algorithm("round_to_nearest")
    settings = recipe.settings if chosen.name == "gptq" else {}
    return algorithm("gptq", {**settings, "sweeps": 0})


def _divergence(error: Tensor, evidence: LayerEvidence, tokens: int) -> float:
    """Predicted divergence, nats per token, of a change of a layer's weight [N, K]."""
    # Sums over the tokens that reached the layer, spread over all: an expert that few reach costs little.
    mean = evidence.total / evidence.statistics.tokens
    around = evidence.statistics.gram - torch.outer(mean, mean)
    varying = evidence.squares * output_loss(error, around).clamp(min=0)
    constant = evidence.squared_sums * (error @ mean).square()
    return float((varying + constant).sum() / (2 * tokens))
