"""Every quantized layer of a checkpoint as numbers: decoded, hashed, and compared with the source model's weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from fewbit.errors import CheckpointError
from fewbit.models.destinations import Destinations
from fewbit.models.names import build_on_meta, config_dtype, read_config
from fewbit.models.pipeline import sqnr_db
from fewbit.models.replace import matrix_shape, submodule
from fewbit.models.stored import StoredCheckpoint
from fewbit.numerics import QuantizedTensor
from fewbit.packing.registry import dequantize_record


@dataclass(frozen=True)
class DecodedLayer:
    """A quantized layer as its file holds it.

    Attributes:
        name: on disk.
        record: the hub record.
        numbers: float32 [N, K], what the record stands for.
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
    destinations = Destinations(model, stored.modules)
    for module in stored.modules:
        built = submodule(model, destinations.module(module))
        shape = matrix_shape(built)
        described = stored.describe(module, type(built).__name__ if built is not None else "Linear", shape)
        if described is None:
            continue
        if shape is None:
            raise CheckpointError(
                f"{module} is quantized, but the model class has no such layer.", "Check config.json."
            )
        record = stored.record(module, described, shape)
        yield DecodedLayer(module, record, dequantize_record(record))


def layer_sqnr(checkpoint: str | Path, source: str | Path) -> dict[str, float | None]:
    """Layer name -> signal to quantization noise of its weight against the source model's, decibels."""
    originals = StoredCheckpoint.open(source).folder
    return {
        layer.name: sqnr_db(originals.load(f"{layer.name}.weight"), layer.numbers)
        for layer in decoded_layers(StoredCheckpoint.open(checkpoint))
    }
