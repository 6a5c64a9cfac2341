"""Kernels that people ask for by name and that fewbit does not have, as data, so that `fewbit explain` answers them.

Each is a candidate like any other that refuses: first because the layer or the device is none of its own, otherwise
with the sentence why it is not here and what runs instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from fewbit.errors import KernelError
from fewbit.kernels.interface import LinearKernel, LinearRequest, Prepared, Refusal
from fewbit.numerics import QuantizedTensor
from fewbit.spec.hardware import Hardware, Platform


@dataclass(frozen=True)
class Named:
    """A kernel of another project.

    Attributes:
        name: what it is called.
        platform: where it runs.
        lowest, highest: compute capabilities times ten that it runs on, where the platform has them.
        weights: names of weight elements that it multiplies, biased integers under the signed one's name.
        activations: names of activation elements, `none` for activations as they are.
        reason: why it is not here and what is.
        backend: what it belongs to, where that is not its name.
    """

    name: str
    platform: Platform
    lowest: int
    highest: int
    weights: frozenset[str]
    activations: frozenset[str]
    reason: str
    backend: str


def _named(
    name: str, platform: Platform, lowest: int, highest: int, weights: str, activations: str, reason: str,
    backend: str = "",
) -> Named:  # fmt: skip
    sides = frozenset(weights.split()), frozenset(activations.split())
    return Named(name, platform, lowest, highest, *sides, reason, backend or name)


ANY = 1 << 30
NAMED = (
    _named("marlin", "cuda", 75, ANY, "int4 int8 e4m3 e2m1", "none",
           "it is compiled into vLLM against one torch, so fewbit cannot bring it; triton_tiles runs such layers"),
    _named("machete", "cuda", 90, 90, "int4 int8", "none",
           "it is compiled into vLLM against one torch, so fewbit cannot bring it; triton_tiles runs such layers"),
    _named("cutlass", "cuda", 75, ANY, "int8 int4 e4m3 e2m1", "int8 e4m3 e2m1",
           "its instances are compiled into vLLM against one torch, so fewbit cannot bring them; triton_int8 and "
           "triton_fp8, which also calls torch's product, run 8-bit activations"),
    _named("b12x", "cuda", 120, 121, "e4m3 e2m1", "none e4m3 e2m1",
           "it was neither built nor tested here for want of such a device; torch_scaled_mm_groups takes FP4 there, "
           "and flashinfer_b12x asks FlashInfer for it"),
    _named("deep_gemm", "cuda", 90, 109, "e4m3", "e4m3",
           "it compiles itself with a CUDA toolkit at run time and is in no registry; triton_fp8 multiplies blocks"),
    _named("flashinfer_trtllm", "cuda", 100, 109, "e4m3 e2m1", "e4m3 e2m1",
           "its products want rows of weights in an order of their own, which could not be checked for want of such a "
           "device; flashinfer's other products are there", "flashinfer"),
    _named("aiter", "rocm", 0, ANY, "int8 e4m3 e4m3fnuz e2m1", "int8 e4m3 e4m3fnuz e2m1",
           "nothing of fewbit has been run on an AMD GPU, so no kernel is offered there but the reference"),
    _named("xpu", "xpu", 0, ANY, "int4 int8 e4m3 e5m2 e2m1", "none int8 e4m3 e5m2",
           "nothing of fewbit has been run on an Intel GPU, so no kernel is offered there but the reference"),
)  # fmt: skip


class NotBuilt(LinearKernel):
    """A candidate that always refuses; see the head of this file."""

    def __init__(self, named: Named) -> None:
        self.named = named
        self.name = named.name  # type: ignore[misc] - one class for all rows of the table
        self.backend = named.backend  # type: ignore[misc] - the same
        self.weight_only = named.activations == {"none"}  # type: ignore[misc]

    def refuse(self, request: LinearRequest, hardware: Hardware) -> Refusal:
        return Refusal(next(self._obstacles(request, hardware)))

    def _obstacles(self, request: LinearRequest, hardware: Hardware) -> Iterator[str]:
        named, key = self.named, request.key
        if hardware.platform != named.platform:
            yield f"runs on {named.platform}, found {hardware.platform}"
        if not named.lowest <= hardware.capability <= named.highest:
            top = f"to {named.highest / 10}" if named.highest < ANY else "on"
            found = f"{hardware.name} has {hardware.capability / 10}"
            yield f"runs from compute capability {named.lowest / 10} {top}, {found}"
        weight = f"int{key.weight.element.bits}" if key.weight.element.is_integer else key.weight.element.name
        if weight not in named.weights:
            yield f"multiplies weights of {', '.join(sorted(named.weights))}, found {key.weight.element}"
        activation = "none" if key.activation is None else key.activation.element.name
        if activation not in named.activations and not self.weight_only:
            yield f"takes activations of {', '.join(sorted(named.activations))}, found {activation}"
        yield f"not part of fewbit: {named.reason}"

    def prepare(self, record: QuantizedTensor, request: LinearRequest) -> Prepared:
        """Never: the request was refused.

        Raises:
            KernelError: always.
        """
        raise KernelError(f"{self.name} is not part of fewbit: {self.named.reason}.", "Ask for another backend.")

    def run(self, x: Tensor, prepared: Prepared, bias: Tensor | None) -> Tensor:
        """Never: there is nothing prepared.

        Raises:
            KernelError: always.
        """
        raise KernelError(f"{self.name} is not part of fewbit: {self.named.reason}.", "Ask for another backend.")


def not_built() -> dict[str, LinearKernel]:
    """A candidate for each row of the table, by name."""
    return {named.name: NotBuilt(named) for named in NAMED}
