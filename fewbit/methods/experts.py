"""Experts of a mixture whose matrices are quantized alike: one fused kernel instead of a linear layer for each."""

from __future__ import annotations

from torch import Tensor, nn

from fewbit.kernels.interface import Prepared
from fewbit.kernels.moe.interface import MoeKernel, MoeRequest
from fewbit.kernels.moe.reference import ACTIVATIONS
from fewbit.kernels.registry import choose_moe_kernel, moe_families
from fewbit.kernels.select import Choice
from fewbit.methods.base import Placement
from fewbit.numerics import QuantizedTensor, float_element
from fewbit.numerics.join import join, refuse_join, stack
from fewbit.packing.registry import unpack_record
from fewbit.spec.key import LinearKey


class FusedExperts(nn.Module):
    """y = sum over a token's experts of weight * down(silu(gate(x)) * up(x)), by one kernel.

    Attributes:
        key: weight and activation keys of every matrix.
        choice: the kernel that was chosen.
        prepared: the kernel's own form of all matrices, its tensors buffers of this module.
    """

    def __init__(self, key: LinearKey, choice: Choice[MoeKernel], prepared: Prepared) -> None:
        super().__init__()
        self.key, self.choice = key, choice
        self._hold(prepared)

    def _hold(self, prepared: Prepared) -> None:
        for name, tensor in prepared.tensors.items():
            self.register_buffer(f"prepared_{name}", tensor, persistent=False)
        self.prepared = prepared

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden [T, H], top_k_index and top_k_weights [T, k] -> [T, H]."""
        return self.choice.kernel.run(hidden, self.prepared, top_k_index, top_k_weights)

    def _apply(self, fn, recurse: bool = True) -> FusedExperts:
        """Moves the buffers; codes and scales never change dtype."""
        kept = self.prepared.tensors
        super()._apply(fn, recurse)
        tensors = {name: before.to(getattr(self, f"prepared_{name}").device) for name, before in kept.items()}
        self._hold(Prepared(tensors, self.prepared.constants))
        return self

    def extra_repr(self) -> str:
        return f"key={self.key}, kernel={self.choice.kernel.name}"


def fuse_experts(
    records: dict[str, list[QuantizedTensor]], key: LinearKey, activation: str, placement: Placement
) -> FusedExperts | None:
    """Experts as one fused module, or None where linear layers for each serve better.

    Args:
        records: `gate`, `up` and `down`, each with one record [N, K] for each expert.
        key: of all of them.
        activation: what is applied to gate, by transformers' name.
        placement: where they run. A backend or a kernel that was asked for or disabled by name means linear layers.
    """
    covered = activation in ACTIVATIONS and any(family.covers(key) for family in moe_families())
    if placement.preference.backend or placement.preference.backends or not covered:
        return None
    plain = {name: [unpack_record(record) for record in members] for name, members in records.items()}
    pairs = list(zip(plain["gate"], plain["up"], strict=True))
    if any(refuse_join(pair) for pair in pairs) or not _alike(plain):
        return None
    joined = [join(pair) for pair in pairs]
    if not all(member.is_exact for member in joined) or joined[0].record.key != key.weight:
        return None
    w13, w2 = stack([member.record for member in joined]), stack(plain["down"])
    request = MoeRequest.of(w13, w2, key, float_element(placement.dtype).name, activation)
    if request.has_input_scale:  # stacking keeps the largest only
        return None
    choice = choose_moe_kernel(request, placement.hardware, placement.preference)
    if choice.kernel.reference:
        return None
    prepared = choice.kernel.prepare(w13, w2, request)
    tensors = {name: tensor.to(placement.device) for name, tensor in prepared.tensors.items()}
    return FusedExperts(key, choice, Prepared(tensors, prepared.constants))


def _alike(records: dict[str, list[QuantizedTensor]]) -> bool:
    """Whether every expert's matrix is of one key and has the same roles."""
    return all(
        len({(record.key, record.shape, frozenset(record.tensors)) for record in members}) == 1
        and not any("codebook" in record for record in members)
        for members in records.values()
    )
