"""Every quantized layer of a checkpoint as numbers: decoded, hashed, and compared with the source model's weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from fewbit.checkpoints.files import CheckpointFiles
from fewbit.errors import CheckpointError
from fewbit.models.destinations import Destinations
from fewbit.models.names import build_on_meta, config_dtype, read_config
from fewbit.models.quantization.outcome import sqnr_db
from fewbit.models.replace import matrix_shape, submodule
from fewbit.models.stacked_experts import stack_shape
from fewbit.models.stored import StoredCheckpoint
from fewbit.numerics import QuantizedTensor
from fewbit.packing.registry import dequantize_record


@dataclass(frozen=True)
class DecodedLayer:
    """A quantized layer as its file holds it.

    Attributes:
        name: on disk.
        record: the hub record.
        numbers: float32 [N, K], or [E, N, K] of a stack of experts, what the record stands for.
    """

    name: str
    record: QuantizedTensor
    numbers: Tensor


def decoded_layers(stored: StoredCheckpoint) -> Iterator[DecodedLayer]:
    """Every quantized layer of a checkpoint, one in memory at a time.

    Raises:
        CheckpointError: a layer's tensors are damaged or belong to nothing.
    """
    path = stored.folder.path
    config = read_config(path)
    model = build_on_meta(config, config_dtype(config))
    destinations = Destinations(model, stored.modules, stored.split)
    stored = stored.renamed(destinations.renamed)
    for module in stored.modules:
        path = destinations.module(module)
        built = submodule(model, path)
        stack = stack_shape(model, path)
        shape: tuple[int, ...] | None = stack or matrix_shape(built)
        matrix = None if shape is None else (shape[-2], shape[-1])
        described = stored.describe(module, type(built).__name__ if built is not None else "Linear", matrix)
        if described is None:
            continue
        if shape is None:
            raise CheckpointError(
                f"{module} is quantized, but the model class has no such layer.", "Check config.json."
            )
        record = stored.record(module, described, shape)
        yield DecodedLayer(module, record, dequantize_record(record))


def source_weight(source: CheckpointFiles, layer: DecodedLayer) -> Tensor:
    """The unquantized weight of a layer in the source model's folder, in the shape of `layer.numbers`.

    Raises:
        CheckpointError: the folder does not hold it.
    """
    if layer.numbers.dim() == 3:  # a stack of experts, which plain checkpoints hold input-major under its own name
        return source.load(layer.name).transpose(-1, -2)
    return source.load(f"{layer.name}.weight")


def layer_sqnr(checkpoint: str | Path, source: str | Path) -> dict[str, float | None]:
    """Layer name -> signal to quantization noise of its weight against the source model's, decibels."""
    originals = StoredCheckpoint.open(source).folder
    return {
        layer.name: sqnr_db(source_weight(originals, layer), layer.numbers)
        for layer in decoded_layers(StoredCheckpoint.open(checkpoint))
    }
