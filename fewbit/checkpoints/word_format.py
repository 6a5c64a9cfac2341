"""What GPTQ and AWQ have in common: integer codes, zero points and scales in three tensors, input features first.

qweight    words of unsigned codes, the signed code plus 2**(b-1)
qzeros     words of zero points; there even where the layer is symmetric, and then not read
scales     float, [K/g, N]
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar

from fewbit.checkpoints.interface import StoredLayer
from fewbit.checkpoints.linear_format import LinearFormat
from fewbit.lazy import torch
from fewbit.numerics import QuantizedTensor, code_dtype
from fewbit.packing.registry import packings
from fewbit.spec.key import LinearKey, QuantKey
from fewbit.spec.layout import ONE, Extent, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

INTEGERS = frozenset(f"int{bits}" for bits in range(2, 9))
FLOAT_SCALES = frozenset({"f16", "bf16", "f32"})


class WordFormat(LinearFormat):
    """See the head of this file."""

    codes_names: ClassVar[tuple[str, ...]] = ("qweight",)
    scale_names: ClassVar[tuple[str, ...]] = ("scales",)
    companions: ClassVar[frozenset[str]] = frozenset({"qzeros", "scales", "g_idx"})

    def activation_specs(self, stored: StoredLayer) -> tuple[TensorSpec, ...]:
        return ()

    def read(self, stored: StoredLayer, tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> QuantizedTensor:
        record = super().read(stored, tensors, shape)
        packings()[record.layout.packing].packed_shape(
            shape, record.layout
        )  # refuses shapes that its words cannot hold
        return record

    def to_hub(self, stored: StoredLayer, role: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor | None:
        match role:
            case "scale":
                return tensor.T.contiguous()
            case "zero_point" if stored.key.weight.symmetric:
                self.warn_of_shifted_zeros(stored, tensor, shape)
                return None
        return tensor

    def to_disk(self, stored: StoredLayer, spec: TensorSpec, record: QuantizedTensor) -> Tensor | None:
        match spec.role:
            case "scale":
                return record["scale"].T
            case "zero_point" if stored.key.weight.symmetric:
                layout = self.layouts(stored)[1]
                zeros = torch.zeros(record["scale"].shape, dtype=code_dtype(record.key.element))
                return packings()[layout.packing].pack(zeros.to(record["scale"].device), layout)
        return super().to_disk(stored, spec, record)

    def warn_of_shifted_zeros(self, stored: StoredLayer, words: Tensor, shape: tuple[int, ...]) -> None:
        """Warns where the zero points of a symmetric layer, which are not read, are all one beside the middle.

        That is what a file looks like that has one version's zero points under the other version's name. An asymmetric
        layer of such a file is read wrong, and nothing in it tells.
        """
        weight, layout = stored.key.weight, self.layouts(stored)[1]
        scale_shape = weight.granularity.scale_shape(shape)
        zeros = packings()[layout.packing].unpack(words, layout, weight.element, scale_shape)
        shift = int(zeros.flatten()[0]) if zeros.numel() and zeros.min() == zeros.max() else 0
        if abs(shift) == 1:
            warnings.warn(
                f"A symmetric layer's qzeros hold {layout.offset + shift}, needed {layout.offset} in {stored.variant}: "
                "another version's rule wrote them. Symmetric layers do not read them.",
                UserWarning,
                stacklevel=2,
            )


def warn_of_partial_segments(where: str, patterns: Iterable[str], module: str) -> None:
    """Warns where a pattern names the module by a part of a dotted segment: `gate` in `gate_proj`.

    Args:
        where: the entry of the configuration that holds the patterns.
        patterns: of a rule that asks whether they are a part of the name.
        module: whose tensors are described.
    """
    for pattern in patterns:
        if pattern in module and f".{pattern.strip('.')}." not in f".{module}.":
            warnings.warn(
                f"{where} names {module} by {pattern!r}, a part of a name's segment; the format's rule counts that as "
                "a match. The stored tensors decide.",
                UserWarning,
                stacklevel=2,
            )


def holds_words(key: LinearKey) -> bool:
    """Whether a key is that of weights in integers with float scales for each channel or group, and nothing else."""
    weight = key.weight
    return (
        key.activation is None
        and weight.element.name in INTEGERS
        and weight.scale.element.name in FLOAT_SCALES
        and weight.granularity.kind in ("channel", "group")
        and weight.global_scale is None
        and not weight.is_dynamic
    )


def group_extent(weight: QuantKey, multiple: int = 1, divisible: bool = True) -> Extent:
    """The axis of groups: ceil(K / g), rounded up to a multiple; one where a scale covers the whole row."""
    size = weight.granularity.columns
    if not size:
        return Extent(None, multiple) if multiple > 1 else ONE
    return Extent("K", 1, size, multiple, divisible)


def group_size_of(weight: QuantKey) -> int:
    """The group size as configurations say it: -1 for one group over all input features."""
    return weight.granularity.columns or -1
