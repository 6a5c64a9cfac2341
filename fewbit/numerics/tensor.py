"""The hub record: one quantized tensor, whatever file it came from and whatever kernel will run it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from fewbit.errors import ShapeError
from fewbit.lazy import torch
from fewbit.numerics.cast import code_dtype
from fewbit.spec.key import QuantKey
from fewbit.spec.layout import PLAIN, Layout

if TYPE_CHECKING:
    from torch import Tensor

ROLES = (
    "codes",  # the elements' codes, [..., N, K] in `layout`
    "scale",  # first-level multipliers, [..., R', C'] in the scale element's own dtype
    "zero_point",  # code of zero, [..., R', C'] in `zero_point_layout`; asymmetric integers
    "minimum",  # float added after scaling, [..., R', C']; formats with float minima
    "global_scale",  # second-level multiplier, float64 [..., 1, 1]
    "codebook",  # values of codes, where the element is an index
    "order",  # group of each input feature, int32 [K]; act-order
    "input_scale",  # static activation multiplier, float32 []
    "input_zero_point",  # static activation code of zero, []
    "input_global_scale",  # static second-level activation multiplier, float64 []
    "pre_scale",  # factor on each input feature before the layer, [K]; smoothing
)

FLOAT_ZERO_POINT = "float_zero_point"
"""What a zero point that is a float instead of a code (HQQ) is called, where kernels are asked whether they take it."""


@dataclass(frozen=True)
class QuantizedTensor:
    """A quantized tensor: its tensors by role, its key, its layout, its logical shape. Immutable.

    Scales are multipliers, `number = (code - zero_point) * scale * global_scale`. Any role's tensor may itself be a
    `QuantizedTensor` (scales of scales).

    Attributes:
        key: how it is quantized.
        shape: logical shape [..., N, K].
        tensors: role (one of `ROLES`) -> tensor.
        layout: where the bits of `codes` lie.
        zero_point_layout: where the bits of `zero_point` lie.
    """

    key: QuantKey
    shape: tuple[int, ...]
    tensors: Mapping[str, Tensor | QuantizedTensor]
    layout: Layout = PLAIN
    zero_point_layout: Layout = PLAIN

    def __post_init__(self) -> None:
        unknown = set(self.tensors) - set(ROLES)
        assert not unknown, f"unknown roles {unknown}"

    def __getitem__(self, role: str) -> Tensor:
        """The tensor of `role`, a nested record decoded."""
        value = self.tensors[role]
        if isinstance(value, QuantizedTensor):
            from fewbit.numerics.quantize import dequantize  # scales of scales: the one place where the two meet

            return dequantize(value)
        return value

    def __contains__(self, role: str) -> bool:
        return role in self.tensors

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def bits_per_weight(self) -> float:
        """Bits held per number, everything counted."""
        return 8 * self.nbytes / max(1, prod(self.shape))

    def with_tensors(self, **changes: Tensor | QuantizedTensor) -> QuantizedTensor:
        """The same record with some roles added or replaced."""
        return replace(self, tensors={**self.tensors, **changes})

    def to(self, device: str | torch.device) -> QuantizedTensor:
        """The same record on another device."""
        return replace(self, tensors={role: tensor.to(device) for role, tensor in self.tensors.items()})

    def validate(self, name: str = "tensor") -> None:
        """Checks that the parts fit together.

        Args:
            name: what to call it in the message.

        Raises:
            ShapeError: a role has the wrong shape or a plain code tensor the wrong dtype.
        """
        expected = {"scale": self.key.granularity.scale_shape(self.shape)}
        if self.layout == PLAIN:
            expected["codes"] = self.shape
        if self.zero_point_layout == PLAIN:
            expected["zero_point"] = expected["scale"]
        if self.key.global_scale:
            expected["global_scale"] = self.key.global_scale.granularity.scale_shape(self.shape)
        for role, shape in expected.items():
            if role in self.tensors and tuple(self.tensors[role].shape) != shape:
                found = tuple(self.tensors[role].shape)
                raise ShapeError(f"{name}: {role} has shape {found}, needed {shape} for {self.key} of {self.shape}.")
        codes = self.tensors["codes"]
        if self.layout == PLAIN and isinstance(codes, torch.Tensor) and codes.dtype != code_dtype(self.key.element):
            raise ShapeError(f"{name}: codes are {codes.dtype}, needed {code_dtype(self.key.element)} for {self.key}.")
