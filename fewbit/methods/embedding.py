"""Quantized embeddings: rows are gathered as codes and only they are dequantized. Reading only.

A tied head is the same record run as a linear layer, so the table is held once.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from fewbit.methods.base import Placement, QuantizeMethodBase, StoredWeights
from fewbit.numerics import QuantizedTensor, dequantize
from fewbit.packing.registry import unpack_record


class QuantizedEmbedding(nn.Module):
    """rows = W[ids] with a quantized W [vocabulary, hidden].

    Attributes:
        scale: factor on the rows that the model's own embedding class applies (Gemma), else 1.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, method: EmbeddingMethod, scale: float = 1.0) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.method, self.scale = num_embeddings, embedding_dim, method, scale
        self.record: QuantizedTensor | None = None

    def forward(self, ids: Tensor) -> Tensor:
        return self.method.apply(self, ids)


class EmbeddingMethod(QuantizeMethodBase):
    """The method of a quantized embedding.

    Args:
        placement: where it runs.
        stored: the checkpoint's tensors.
    """

    def __init__(self, placement: Placement, stored: StoredWeights) -> None:
        self.placement, self.stored = placement, stored

    def create_weights(self, layer: QuantizedEmbedding, **extra_weight_attrs: object) -> None:
        self.stored.create(layer)

    def process_weights_after_loading(self, layer: QuantizedEmbedding) -> None:
        if layer.record is not None:
            return
        shape = (layer.num_embeddings, layer.embedding_dim)
        record = self.stored.checkpoint.read(self.stored.stored, self.stored.take(layer), shape)
        record.validate(self.stored.name)
        plain = unpack_record(record)
        device = self.placement.device
        layer.record = plain.with_tensors(**{role: plain[role].to(device) for role in plain.tensors})

    def apply(self, layer: QuantizedEmbedding, ids: Tensor) -> Tensor:
        assert layer.record is not None, "process_weights_after_loading has not run on this layer"
        rows = gather_rows(layer.record, ids.flatten())
        numbers = dequantize(rows).to(self.placement.dtype) * layer.scale
        return numbers.unflatten(0, ids.shape)


def gather_rows(record: QuantizedTensor, rows: Tensor) -> QuantizedTensor:
    """The record of some rows of a plain record, in the order asked for.

    Args:
        record: plain, of shape [N, K], its scales one or more per row or one for all.
        rows: int64 [R].

    Raises:
        ValueError: a scale covers several rows but not all (blocks), so that rows cannot be taken apart.
    """
    granularity = record.key.granularity
    if granularity.rows > 1:
        raise ValueError(f"rows of {record.key} share scales and cannot be gathered")
    per_row = {"codes", "zero_point", "scale", "minimum"}
    taken = {
        role: record[role][rows] if role in per_row and record[role].shape[0] == record.shape[0] else record[role]
        for role in record.tensors
    }
    return replace(record, shape=(int(rows.numel()), record.shape[1]), tensors=taken)


def embedding_of(module: nn.Embedding, method: EmbeddingMethod) -> QuantizedEmbedding:
    """A quantized embedding with the sizes of a plain one."""
    scale = getattr(module, "embed_scale", 1.0)  # Gemma's embedding multiplies its rows
    factor = scale.item() if isinstance(scale, torch.Tensor) else float(scale)
    return QuantizedEmbedding(module.num_embeddings, module.embedding_dim, method, factor)
