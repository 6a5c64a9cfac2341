"""Keys: how one tensor, or one linear layer, is quantized.

A key is built from parts and has one canonical text form that parses back:

    int4:group64:bf16                      int4, symmetric, one bf16 scale per 64 numbers of a row
    int4:asym:group32:f16                  the same with integer zero points
    e4m3:token:f32:dynamic                 FP8 activations, scale computed per token at run time
    e2m1:group16:e4m3/tensor:f32           NVFP4: E4M3 scales under one float32 scale of the tensor
    e2m1:group32:e8m0                      MXFP4

A layer's key is `weight` or `weight * activation`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fewbit.errors import SchemeError
from fewbit.spec.element import Element
from fewbit.spec.granularity import Granularity


@dataclass(frozen=True)
class ScaleSpec:
    """One level of scales: the element they are stored in, how many numbers share one, when they are known.

    A dynamic scale is computed from the tensor at run time and never stored.
    """

    element: Element
    granularity: Granularity
    dynamic: bool = False

    def __str__(self) -> str:
        return f"{self.granularity}:{self.element}" + (":dynamic" if self.dynamic else "")

    @classmethod
    def parse(cls, text: str) -> ScaleSpec:
        parts = text.split(":")
        dynamic = parts[-1] == "dynamic"
        if dynamic:
            parts.pop()
        if len(parts) != 2:
            raise SchemeError(f"Cannot read the scale {text!r}.", "Write <granularity>:<element>[:dynamic].")
        return cls(Element.parse(parts[1]), Granularity.parse(parts[0]), dynamic)


@dataclass(frozen=True)
class QuantKey:
    """How one tensor is quantized: element, scales, an optional second level of scales, symmetric or not."""

    element: Element
    scale: ScaleSpec
    global_scale: ScaleSpec | None = None
    symmetric: bool = True

    def __str__(self) -> str:
        asymmetric = "" if self.symmetric else "asym:"
        second = f"/{self.global_scale}" if self.global_scale else ""
        return f"{self.element}:{asymmetric}{self.scale}{second}"

    @property
    def is_dynamic(self) -> bool:
        return self.scale.dynamic

    @property
    def granularity(self) -> Granularity:
        return self.scale.granularity

    def bits_per_weight(self, shape: tuple[int, ...]) -> float:
        """Bits stored per number of a tensor of `shape` [..., R, C], scales and zero points counted."""
        numbers = max(1, _product(shape))
        scales = _product(self.granularity.scale_shape(shape))
        total = numbers * self.element.bits + scales * self.scale.element.bits
        if not self.symmetric:
            total += scales * self.element.bits
        if self.global_scale:
            total += _product(self.global_scale.granularity.scale_shape(shape)) * self.global_scale.element.bits
        return total / numbers

    def with_scale_element(self, element: Element) -> QuantKey:
        """The same key with its first-level scales stored in another element."""
        return replace(self, scale=replace(self.scale, element=element))

    def with_granularity(self, granularity: Granularity) -> QuantKey:
        """The same key with another granularity of its first-level scales."""
        return replace(self, scale=replace(self.scale, granularity=granularity))

    @classmethod
    def parse(cls, text: str) -> QuantKey:
        """Reads the canonical text form back.

        Raises:
            SchemeError: the text is no key; the message says which part.
        """
        first, slash, second = text.strip().partition("/")
        element_text, _, scale_text = first.partition(":")
        symmetric = not scale_text.startswith("asym:")
        return cls(
            Element.parse(element_text),
            ScaleSpec.parse(scale_text.removeprefix("asym:")),
            ScaleSpec.parse(second) if slash else None,
            symmetric,
        )


@dataclass(frozen=True)
class LinearKey:
    """What a linear layer asks for: its weight's key and, where activations are quantized too, theirs."""

    weight: QuantKey
    activation: QuantKey | None = None

    def __str__(self) -> str:
        return f"{self.weight} * {self.activation}" if self.activation else str(self.weight)

    @classmethod
    def parse(cls, text: str) -> LinearKey:
        """Reads the canonical text form back.

        Raises:
            SchemeError: the text is no key; the message says which part.
        """
        weight, star, activation = text.partition("*")
        return cls(QuantKey.parse(weight), QuantKey.parse(activation) if star else None)


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for extent in shape:
        total *= extent
    return total
