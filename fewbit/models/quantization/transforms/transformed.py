"""The transformations of one run: installed once, then asked block by block, their work checked on every block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from fewbit.algorithms.registry import algorithm
from fewbit.checkpoints.dtypes import torch_dtype
from fewbit.checkpoints.tensor_files import TensorFolder
from fewbit.errors import ModelError
from fewbit.models.families import structure_of
from fewbit.models.quantization.ranks import ALONE, Ranks
from fewbit.models.quantization.transforms.evidence import Evidence
from fewbit.models.quantization.transforms.interface import Consumer, Observation, Scaling, ScalingTask, Transform
from fewbit.models.quantization.transforms.probe import BlockProbe, deviation
from fewbit.models.quantization.transforms.registry import of_recipe
from fewbit.models.quantization.transforms.structure import ScaleMapping, scale_mappings
from fewbit.models.quantization.transforms.weights import TransformedWeights
from fewbit.spec.key import LinearKey
from fewbit.spec.recipe import Recipe

LARGEST_DEVIATION = 0.02
"""Relative deviation of a scaled block's output that is let pass: biases that stay in 16 bits are rounded anew."""


class Transformations:
    """What a recipe's transformations make of a checkpoint.

    Args:
        recipe: lists them.
        keys: stored name of a layer -> how it will be quantized.
        folder: the unquantized checkpoint.
        config: transformers' configuration of it.
        device: where scales are chosen.
        ranks: the processes that carry the other windows; the first chooses by what all of them see.

    Attributes:
        weights: the tensors to quantize from.
        installed: what was done whatever the data are, for the report.

    Raises:
        ModelError: a transformation does not know this architecture.
    """

    def __init__(
        self,
        recipe: Recipe,
        keys: Mapping[str, LinearKey],
        folder: TensorFolder,
        config: PretrainedConfig,
        device: torch.device,
        ranks: Ranks = ALONE,
    ) -> None:
        self._ranks = ranks
        self.weights = TransformedWeights(folder)
        self.installed: list[dict[str, Any]] = []
        self._rules, self._keys, self._device = recipe.scale_rules, keys, device
        self._algorithm = algorithm(recipe.algorithm, recipe.settings)
        self._mappings: dict[Any, tuple[ScaleMapping, ...]] = {}
        self._chosen = of_recipe(recipe.transforms)
        self._probe = BlockProbe(folder, config, device) if self._chosen else None
        for one in self._chosen:
            assert self._probe is not None
            self.installed += one.install(self._probe, self.weights)

    def enter(self, evidence: Evidence | None, block: str) -> list[dict[str, Any]]:
        """Transforms the block at path `block` by what calibration shows of it.

        Args:
            evidence: of the block; None where nothing is calibrated.
            block: empty for what is outside the blocks.

        Returns:
            What was done, for the report.

        Raises:
            ModelError: the transformed block does not compute what it did.
            CheckpointError: what calibration shows is not finite.
        """
        self.weights.begin_block()
        if not block:
            return self.installed
        entries: list[dict[str, Any]] = []
        for one in self._chosen:
            if one.needs_statistics and evidence is not None:
                entries += self._scale(one, evidence, block)
        return entries

    def _scale(self, one: Transform, evidence: Evidence, block: str) -> list[dict[str, Any]]:
        probe = self._probe
        assert probe is not None
        before = probe.parameters(block, self.weights.load)
        mappings = [found for found in self._mappings_of(block, before) if one.wants(found)]
        mappings = [found for found in mappings if any(self._key(block, name) for name in found.consumers)]
        if not mappings:
            return [{"transform": one.name, "block": block, "what": "no mapping found", "choice": "none"}]
        stored = {name: self._stored_module(block, name) for found in mappings for name in found.consumers}
        seen, entries = evidence.observe(block, mappings, stored), []
        for mapping in mappings:
            task = self._task(block, mapping, seen[mapping.producer])
            entry: dict[str, Any] = {"transform": one.name, "block": block, "what": str(mapping)}
            if task is None:
                entries.append(entry | {"choice": "none: no calibration token reached it"})
                continue
            found = self._ranks.first(one.choose(task).on_cpu() if self._ranks.writes else None)
            assert found is not None
            entries.append(entry | {"choice": found.choice, "loss": found.loss, "loss_before": found.loss_before})
            scale = self._fold(block, mapping, found)
            if scale is not None:
                columns = scale[mapping.rows.to(scale.device)]
                evidence.divide([stored[name] for name in mapping.consumers], columns)
                if not mapping.norm:
                    evidence.divide_outputs(self._stored_module(block, mapping.producer), scale)
        after = probe.parameters(block, self.weights.load)
        error = deviation(probe.output(block, after), probe.output(block, before))
        if not error <= LARGEST_DEVIATION:
            raise ModelError(
                f"{one.name} changed what {block} computes by {error:.1%}.", "Leave it out for this model."
            )
        return [*entries, {"transform": one.name, "block": block, "what": "deviation of the block", "loss": error}]

    def _mappings_of(self, block: str, parameters: Mapping[str, Tensor]) -> tuple[ScaleMapping, ...]:
        """The block's mappings; blocks of one structure have the same."""
        assert self._probe is not None
        kind = structure_of(self._probe.model.get_submodule(block))
        if kind not in self._mappings:
            self._mappings[kind] = scale_mappings(self._probe, block, parameters)
        return self._mappings[kind]

    def _task(self, block: str, mapping: ScaleMapping, seen: Observation) -> ScalingTask | None:
        """What the mapping's scales are chosen by; None where nothing was seen."""
        total = seen.statistics.tokens
        consumers = [
            Consumer(self._load(block, f"{name}.weight"), self._key(block, name), seen.tokens[name] / max(1, total))
            for name in mapping.consumers
            if seen.tokens.get(name)
        ]
        if not total or not any(one.key for one in consumers):
            return None
        return ScalingTask(mapping, consumers, seen, self._algorithm, self._rules)

    def _fold(self, block: str, mapping: ScaleMapping, found: Scaling) -> Tensor | None:
        """Divides what the producer puts out, and multiplies its consumers' weights.

        Returns:
            What the producer's output features are divided by, float32 [N]; None where they stay.
        """
        if found.columns is None:
            return None
        rows = mapping.rows.to(self._device)
        scale = torch.ones(mapping.features, device=self._device)
        scale[rows] = found.columns.to(self._device)
        weight = self._load(block, f"{mapping.producer}.weight")
        fresh: dict[str, Tensor] = {}
        if mapping.norm:
            dtype = torch_dtype(self.weights.headers[self._stored(block, f"{mapping.producer}.weight")].dtype)
            gain = weight + mapping.offset
            fresh["weight"] = (gain / scale - mapping.offset).to(dtype).float()
            # What the consumers make good is the division as it is stored.
            kept = fresh["weight"] + mapping.offset
            scale = torch.where((kept != 0) & (gain != 0), gain / kept, scale)
        else:
            fresh["weight"] = weight / scale[:, None]
        if self._has(block, f"{mapping.producer}.bias"):
            fresh["bias"] = self._load(block, f"{mapping.producer}.bias") / scale
        changed = {self._stored(block, f"{mapping.producer}.{leaf}"): tensor for leaf, tensor in fresh.items()}
        self.weights.change_block(changed)
        for name in mapping.consumers:
            weight = self._load(block, f"{name}.weight")
            self.weights.change_block({self._stored(block, f"{name}.weight"): weight * scale[rows]})
        return scale

    def _has(self, block: str, leaf: str) -> bool:
        assert self._probe is not None
        module = self._probe.model.get_submodule(block)
        return any(name == leaf for name, _ in module.named_parameters())

    def _stored(self, block: str, leaf: str) -> str:
        assert self._probe is not None
        return self._probe.partial.source(f"{block}.{leaf}")

    def _load(self, block: str, leaf: str) -> Tensor:
        return self.weights.load(self._stored(block, leaf)).to(self._device).float()

    def _key(self, block: str, module: str) -> LinearKey | None:
        return self._keys.get(self._stored_module(block, module))

    def _stored_module(self, block: str, module: str) -> str:
        return self._stored(block, f"{module}.weight").removesuffix(".weight")
