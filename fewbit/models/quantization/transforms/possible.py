"""Which transformations a model allows: found by installing them on what is then thrown away."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import torch

from fewbit.checkpoints.tensor_files import TensorFolder
from fewbit.errors import ModelError
from fewbit.models.names import read_config
from fewbit.models.quantization.transforms.probe import BlockProbe
from fewbit.models.quantization.transforms.registry import of_recipe
from fewbit.models.quantization.transforms.weights import TransformedWeights
from fewbit.spec.recipe import Recipe


def allowed(source: Path, recipe: Recipe, optional: Collection[str]) -> tuple[Recipe, tuple[str, ...]]:
    """The recipe without the optional transformations that a model refuses, and a sentence about each of these.

    Args:
        source: folder of the unquantized model.
        recipe: whose transformations are tried.
        optional: names of those that may be left out.

    Raises:
        CheckpointError, ModelError: the model cannot be read.
    """
    if not any(record["name"] in optional for record in recipe.transforms):
        return recipe, ()
    folder = TensorFolder(source)
    probe = BlockProbe(folder, read_config(source), torch.device("cpu"))
    weights = TransformedWeights(folder)
    kept, told = [], []
    for record, one in zip(recipe.transforms, of_recipe(recipe.transforms), strict=True):
        try:
            if one.name in optional:
                one.install(probe, weights)
        except ModelError as error:
            told.append(f"{one.name} is left out: {error.message}")
        else:
            kept.append(record)
    return replace(recipe, transforms=tuple(kept)), tuple(told)
