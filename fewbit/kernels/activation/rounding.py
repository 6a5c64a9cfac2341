"""How activations become codes: what the Triton programs and 8-bit products need of a key, as plain values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from fewbit.spec.element import E2M1, E4M3, E8M0, F32
from fewbit.spec.granularity import TENSOR, TOKEN
from fewbit.spec.key import QuantKey
from fewbit.spec.recipe import ScaleRules

MAX_COLUMNS = 16384
"""A row under one scale is held in the registers of one program; a longer one would spill."""
GROUPS = (16, 32, 64, 128, 256)
_FLOATS = {E4M3: "e4m3", E2M1: "e2m1"}
_SCALES = {F32: "f32", E8M0: "e8m0", E4M3: "e4m3"}


@dataclass(frozen=True)
class Rounding:
    """A key of activations.

    Attributes:
        kind: `integer`, `e4m3` or `e2m1`.
        low, high: range of the codes' numbers.
        divisor: the number that the largest magnitude under a scale is brought to.
        group: numbers of a row under one scale, 0 where one scale holds for a row or for everything.
        scale_kind: `f32`, `e8m0`, or `e4m3` under a static scale of the tensor.
        largest_exponent: exponent of the largest number, which E8M0 scales count from.
        carry: what rounds a float32's bits to the element's mantissa before its exponent is read (`ScaleRules.mx`).
        dynamic: whether scales come from the numbers.
        symmetric: whether there are no zero points.
    """

    kind: str
    low: float
    high: float
    divisor: float
    group: int
    scale_kind: str
    largest_exponent: int
    carry: int
    dynamic: bool
    symmetric: bool

    @classmethod
    @cache
    def of(cls, text: str) -> Rounding:
        """The rounding of a key in its text form, which is what operations take."""
        key = QuantKey.parse(text)
        element = key.element
        if element.is_integer:
            kind, exponent = "integer", element.bits - 2
            divisor = element.max - element.min if not key.symmetric else (element.max - element.min) / 2
        else:
            kind, exponent, divisor = _FLOATS[element], element.max_exponent, element.max
        return cls(
            kind, element.min, element.max, divisor, key.granularity.columns, _SCALES[key.scale.element], exponent,
            1 << (22 - element.mantissa_bits) if ScaleRules().mx == "even" else 0, key.is_dynamic, key.symmetric,
        )  # fmt: skip

    @property
    def offset(self) -> int:
        """What is taken from codes so that they fit int8."""
        return 128 if self.kind == "integer" and self.high > 127 else 0


def covers_all(key: QuantKey) -> bool:
    """Whether one scale covers every number of the tensor."""
    return (key.granularity.rows, key.granularity.columns) == (TENSOR.rows, TENSOR.columns)


def covers_rows(key: QuantKey) -> bool:
    """Whether one scale covers a token, or every number of the tensor."""
    rectangle = (key.granularity.rows, key.granularity.columns)
    return rectangle in ((TOKEN.rows, TOKEN.columns), (TENSOR.rows, TENSOR.columns))


def rounding_obstacles(key: QuantKey, columns: int, batch_invariant: bool) -> Iterator[str]:
    """What the programs cannot round rows of `columns` numbers to."""
    if not key.element.is_integer and key.element not in _FLOATS:
        yield f"activations of integers, e4m3 or e2m1 are needed, found {key.element}"
    if key.element.is_integer and key.element.bits > 8:
        yield f"activations of at most 8 bits are needed, found {key.element}"
    if key.element.is_integer and key.symmetric and key.element.min >= 0:
        yield f"activations must be signed, found {key.element}"
    if not key.symmetric and not (key.element.is_integer and key.scale.element == F32):
        yield f"zero points go with integers under scales of f32, found {key}"
    if covers_rows(key):
        yield from _row_obstacles(key, columns, batch_invariant)
    elif key.granularity.rows != 1 or key.granularity.columns not in GROUPS:
        yield f"scales of tokens, of all or of groups of {GROUPS} are needed, found {key.granularity}"
    elif not key.is_dynamic:
        yield "static activation scales of groups cannot be stored, a dynamic key is needed"
    elif key.scale.element not in _SCALES:
        yield f"activation scales of f32, e8m0 or e4m3 are needed, found {key.scale.element}"
    elif (key.scale.element == E4M3) != (key.global_scale is not None):
        yield f"scales of e4m3 go with a scale of the tensor and others go without, found {key}"
    elif key.global_scale is not None and key.global_scale.dynamic:
        yield "a dynamic scale of the tensor needs a pass over all tokens first, which this kernel does not make"


def _row_obstacles(key: QuantKey, columns: int, batch_invariant: bool) -> Iterator[str]:
    if key.scale.element != F32 or key.global_scale is not None:
        yield f"one level of activation scales of f32 is needed, found {key}"
    if covers_all(key) and key.is_dynamic:
        if batch_invariant:
            yield "the same bits at every M are asked for, and one dynamic scale for all tokens depends on all of them"
        yield "one dynamic scale for all tokens needs a pass over all of them first, which this kernel does not make"
    if not covers_all(key) and not key.is_dynamic:
        yield "static activation scales per token cannot be stored, a dynamic key is needed"
    if columns > MAX_COLUMNS:
        yield f"a row of x must fit one program, at most {MAX_COLUMNS} features, found K={columns}"
