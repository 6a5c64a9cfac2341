"""The contract of a kernel: it refuses with numbers, prepares a record once, and runs.

A kernel is one file below `kernels/linear` (later `kernels/moe`, ...). It never looks at the machine: `refuse` is a
pure function of a request and a `Hardware`, so that what would run on another device is an ordinary unit test.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, ClassVar, Protocol

from torch import Tensor

from fewbit.kernels.activation.producer import Producer
from fewbit.kernels.native import LinearLayer
from fewbit.numerics import FLOAT_ZERO_POINT, QuantizedTensor
from fewbit.spec.hardware import Hardware
from fewbit.spec.key import LinearKey
from fewbit.spec.layout import PLAIN, Layout


@dataclass(frozen=True)
class LinearRequest:
    """A linear layer that needs a kernel: y[M, N] = x[M, K] @ W[N, K].T (+ bias[N]).

    Attributes:
        key: weight and activation keys.
        rows, columns: N and K.
        dtype: element name of the layer's input and output: `bf16`, `f16` or `f32`.
        layout: layout in which the weight's codes arrive.
        has_order: whether the weight carries an act-order index.
        has_input_scale: whether static activation scales are stored.
        batch_invariant: whether a row's bits may not depend on M.
        extras: what changes the record's numbers and neither the key nor the flags above tell of; any of `EXTRAS`.
    """

    key: LinearKey
    rows: int
    columns: int
    dtype: str = "bf16"
    layout: Layout = PLAIN
    has_order: bool = False
    has_input_scale: bool = False
    batch_invariant: bool = False
    extras: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls, record: QuantizedTensor, key: LinearKey, dtype: str = "bf16", batch_invariant: bool = False
    ) -> LinearRequest:
        """The request of a layer whose weight is `record` [N, K], every flag taken from the record."""
        rows, columns = record.shape
        return cls(
            key,
            rows,
            columns,
            dtype=dtype,
            layout=record.layout,
            has_order="order" in record,
            has_input_scale="input_scale" in record or "input_global_scale" in record,
            batch_invariant=batch_invariant,
            extras=extras_of(record),
        )


EXTRAS = ("minimum", "codebook", "pre_scale", FLOAT_ZERO_POINT)
"""What changes the numbers of a layer beside scales and integer zero points: roles of its record, and zero points that
are floats (HQQ)."""


def extras_of(record: QuantizedTensor) -> frozenset[str]:
    """Those of `EXTRAS` that a record has."""
    found = {role for role in EXTRAS if role in record}
    if "zero_point" in record and record["zero_point"].is_floating_point():
        found.add(FLOAT_ZERO_POINT)
    return frozenset(found)


@dataclass(frozen=True)
class Refusal:
    """Why a kernel will not run a request: one sentence with the value found and the value needed."""

    reason: str

    @classmethod
    def first(cls, obstacles: Iterable[str]) -> Refusal | None:
        """The first of a kernel's obstacles, usually from a generator; None where there is none."""
        reason = next(iter(obstacles), None)
        return None if reason is None else cls(reason)


class Numerics(IntEnum):
    """What a kernel does with the numbers that the key asks for; lower is preferred, always."""

    KEEPS = 0  # weight and activation keys both honoured in the arithmetic
    DROPS_ACTIVATION = 1  # the activation key is ignored: more exact, other numbers than were asked for
    EMULATES = 2  # both honoured by quantizing and dequantizing in software
    REFERENCE = 3  # the definition: accepts everything


@dataclass(frozen=True)
class Prepared:
    """A kernel's own form of a weight: the only copy that a layer keeps.

    Attributes:
        tensors: what the kernel's operation takes, in its order; the layer registers them as buffers.
        constants: numbers and texts the operation takes.
    """

    tensors: Mapping[str, Tensor]
    constants: Mapping[str, int | float | str | bool] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


class KernelRequest(Protocol):
    """What a request of any kind tells: its keys and, for messages, the shape of its (first) matrix."""

    @property
    def key(self) -> LinearKey: ...

    @property
    def rows(self) -> int: ...

    @property
    def columns(self) -> int: ...


class Kernel(ABC):
    """What kernels of linear layers and of experts have in common."""

    name: ClassVar[str]
    """Unique; what `--disable-kernel` and `explain` call it."""

    backend: ClassVar[str]
    """The backend it belongs to, one of those that the oracles of `kernels/oracles` order."""

    weight_only: ClassVar[bool] = False
    """Whether it ignores the activation key."""

    emulates: ClassVar[bool] = False
    """Whether it honours the activation key by quantizing and dequantizing in software."""

    reference: ClassVar[bool] = False
    """Whether it is the definition that accepts everything."""

    untested: ClassVar[str] = ""
    """What to tell people where the kernel never ran on such a device, else an empty text."""

    def numerics(self, request: KernelRequest) -> Numerics:
        """What the kernel does with the request's numbers."""
        if self.reference:
            return Numerics.REFERENCE
        if self.emulates and request.key.activation is not None:
            return Numerics.EMULATES
        if self.weight_only and request.key.activation is not None:
            return Numerics.DROPS_ACTIVATION
        return Numerics.KEEPS

    @abstractmethod
    def refuse(self, request: Any, hardware: Hardware) -> Refusal | None:
        """Why the kernel will not run the request there; None is consent. Pure; never raises."""


class LinearKernel(Kernel):
    """One way to run quantized linear layers."""

    rounds_produced: ClassVar[bool] = False
    """Whether `run_produced` makes and rounds activations at once."""

    @abstractmethod
    def refuse(self, request: LinearRequest, hardware: Hardware) -> Refusal | None:
        """Why the kernel will not run the request there; None is consent. Pure; never raises."""

    @abstractmethod
    def prepare(self, record: QuantizedTensor, request: LinearRequest) -> Prepared:
        """The kernel's own form of the weight. The record may be freed afterwards; it is not changed."""

    @abstractmethod
    def run(self, x: Tensor, prepared: Prepared, bias: Tensor | None) -> Tensor:
        """y = x @ W.T + bias.

        Args:
            x: [..., K] in the request's dtype; no rows at all is legal.
            prepared: from `prepare`, its tensors possibly moved to another device of the same kind.
            bias: [N] or None.

        Returns:
            [..., N] in x's dtype.
        """

    def run_produced(self, x: Tensor, producer: Producer, prepared: Prepared, bias: Tensor | None) -> Tensor:
        """`run` of what the producer makes of x: inside the same operation where the kernel rounds activations."""
        return self.run(producer(x), prepared, bias)

    def refuse_step(self, key: LinearKey) -> str | None:
        """Why the compiled decode step (`kernels/decoder.py`) cannot call it for a layer of the key; None if it can."""
        return f"runs on {self.name}, which the compiled step cannot call"

    def compiled_layer(self, prepared: Prepared, bias: Tensor | None) -> LinearLayer:
        """The layer as the compiled decode step takes it, which `refuse_step` did not refuse."""
        raise NotImplementedError(f"{self.name} is no kernel of the compiled decode step")

    def prepared_bytes(self, request: LinearRequest) -> int:
        """Bytes that `prepare` will hold, for `plan`; the stored size unless the kernel's layout is larger."""
        shape = (request.rows, request.columns)
        return int(request.key.weight.bits_per_weight(shape) * request.rows * request.columns / 8)
