"""From the finished units of a run to the folder that people get: shards, configuration, recipe, report."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import fewbit
from fewbit.checkpoints.output import ShardWriter, copy_side_files
from fewbit.checkpoints.registry import formats
from fewbit.checkpoints.tensor_files import TensorFolder
from fewbit.checkpoints.work_folder import WorkFolder
from fewbit.models.quantization.plan import Plan
from fewbit.numerics.cast import code_dtype_name
from fewbit.spec.element import Element
from fewbit.spec.recipe import Recipe


def write_output(
    plan: Plan,
    source: TensorFolder,
    units: Sequence[Sequence[str]],
    work: WorkFolder,
    staging: Path,
    max_shard_bytes: int,
) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """Writes the weights and what the source has beside them.

    Args:
        plan: of the run.
        source: the unquantized checkpoint.
        units: the source's tensors by the unit that dealt with them, in the order of the output.
        work: with all units finished; what one does not mention is in the source as it will be.
        staging: the empty folder to fill.
        max_shard_bytes: largest size of a weight file.

    Returns:
        The bytes of all tensors; `outcomes` of all layers and what `transforms` did.
    """
    dtype, checkpoint = code_dtype_name(Element.parse(plan.dtype)), formats()[plan.recipe.format]
    keys = {layer.name: layer.key for layer in plan.quantized if layer.key}
    writer = ShardWriter(staging, max_shard_bytes, lambda headers: checkpoint.file_metadata(headers, keys, dtype))
    facts: dict[str, list[dict[str, Any]]] = {"outcomes": [], "transforms": []}
    for number, names in enumerate(units):
        unit = work.unit(number)
        made: Mapping[str, list[str]] = unit.facts["made"]
        for name in names:
            if name not in made:
                writer.add(name, source.load(name))
            for other in made.get(name, ()):
                writer.add(other, unit.tensors.load(other))
        for other in unit.facts["added"]:
            writer.add(other, unit.tensors.load(other))
        for kind in facts:
            facts[kind] += unit.facts[kind]
    writer.finish()
    copy_side_files(source.path, staging)
    return writer.nbytes, facts


def write_config(source: Path, staging: Path, quantization: dict[str, Any], unties: bool) -> None:
    """The source's config.json with its quantization, and without a tie between ends that differ from now on."""
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = quantization
    if unties:
        config["tie_word_embeddings"] = False
    (staging / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def report_of(
    plan: Plan, recipe: Recipe, facts: Mapping[str, list[dict[str, Any]]], kept: list[str], written: int
) -> dict[str, Any]:
    """What was done, in numbers that were measured or computed; equal runs give equal reports.

    Args:
        plan: of the run.
        recipe: with what calibration used.
        facts: from `write_output`.
        kept: tensors that the model class does not build, written as they were.
        written: bytes of all tensors.
    """
    return {
        "scheme": recipe.scheme.name,
        "format": recipe.format,
        "algorithm": recipe.algorithm,
        "source": recipe.source,
        "bytes_before": plan.bytes_before,
        "bytes_after": written,
        "bits_per_weight": plan.bits_per_weight,
        "whole_bits_per_weight": plan.whole_bits_per_weight,
        "versions": {"fewbit": fewbit.__version__, "torch": torch.__version__},
        "tie_word_embeddings": "untied: the head has a weight of its own" if plan.unties else "as in the source",
        "transforms": facts["transforms"],
        "layers": facts["outcomes"],
        "kept": kept,
        "plain": {layer.name: layer.reason for layer in plan.layers if layer.key is None},
        "cautions": list(plan.cautions),
        "budget": plan.budget,
    }
