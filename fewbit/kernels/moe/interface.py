"""The contract of a kernel for the experts of a mixture: as that of linear kernels, over stacks of matrices.

y[t] = sum over the experts e chosen for token t of weight[t, e] * w2[e] @ (silu(gate) * up), where gate and up are the
halves of w13[e] @ x[t].
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from torch import Tensor

from fewbit.kernels.interface import Kernel, Prepared, Refusal, extras_of
from fewbit.numerics import QuantizedTensor
from fewbit.spec.hardware import Hardware
from fewbit.spec.key import LinearKey


@dataclass(frozen=True)
class MoeRequest:
    """Experts that need a kernel.

    Attributes:
        key: weight and activation keys of w13 [E, 2I, H] and w2 [E, H, I].
        experts, hidden, intermediate: E, H and I.
        dtype: element name of input and output: `bf16`, `f16` or `f32`.
        activation: what is applied to gate, by transformers' name.
        has_order, has_input_scale, batch_invariant, extras: as in `LinearRequest`, of either stack.
    """

    key: LinearKey
    experts: int
    hidden: int
    intermediate: int
    dtype: str = "bf16"
    activation: str = "silu"
    has_order: bool = False
    has_input_scale: bool = False
    batch_invariant: bool = False
    extras: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls, w13: QuantizedTensor, w2: QuantizedTensor, key: LinearKey, dtype: str, activation: str = "silu"
    ) -> MoeRequest:
        """The request of two stacks, every flag taken from them."""
        experts, hidden, intermediate = w2.shape
        stacks = (w13, w2)
        return cls(
            key,
            experts,
            hidden,
            intermediate,
            dtype,
            activation,
            has_order=any("order" in stack for stack in stacks),
            has_input_scale=any("input_scale" in stack or "input_global_scale" in stack for stack in stacks),
            extras=frozenset().union(*map(extras_of, stacks)),
        )

    @property
    def rows(self) -> int:
        """Output features of the first product."""
        return 2 * self.intermediate

    @property
    def columns(self) -> int:
        """Input features of the first product."""
        return self.hidden


class MoeKernel(Kernel):
    """One way to run quantized experts."""

    @abstractmethod
    def refuse(self, request: MoeRequest, hardware: Hardware) -> Refusal | None:
        """Why the kernel will not run the request there; None is consent. Pure; never raises."""

    @abstractmethod
    def prepare(self, w13: QuantizedTensor, w2: QuantizedTensor, request: MoeRequest) -> Prepared:
        """The kernel's own form of both stacks, which are in the plain layout. They may be freed afterwards."""

    @abstractmethod
    def run(self, x: Tensor, prepared: Prepared, chosen: Tensor, weights: Tensor) -> Tensor:
        """The experts' sum.

        Args:
            x: [T, H] in the request's dtype; no tokens at all is legal.
            prepared: from `prepare`.
            chosen: int64 [T, k], the experts of each token; E or more is none.
            weights: [T, k], what the router gives each.

        Returns:
            [T, H] in x's dtype.
        """
