"""Experts whose checkpoint stores them as quantized stacks: gpt-oss.

transformers keeps the stacks of gpt-oss input-major, [E, K, N], gate and up alternating along N; files hold them
output-major. The module is replaced by one of the same arithmetic over `QuantizedStack`s.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fewbit.errors import ModelError
from fewbit.methods.base import Placement, StoredWeights
from fewbit.methods.expert_stack import QuantizedStack, StackMethod
from fewbit.models.replace import replace_submodule, submodule

STACKS = ("gate_up_proj", "down_proj")


class InterleavedExperts(nn.Module):
    """Experts with biases, gate and up alternating, and a clamped gate: takes the place of transformers' GptOssExperts.

    `down((up + 1) * gate * sigmoid(alpha * gate))`, gate at most `limit`, up within plus and minus `limit`.

    Attributes:
        gate_up_proj: [E, 2I, H].
        down_proj: [E, H, I].
    """

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.alpha, self.limit = float(experts.alpha), float(experts.limit)
        # Parameters on meta until stacks take their place, so that a missing stack is missed.
        self.gate_up_proj, self.down_proj = experts.gate_up_proj, experts.down_proj
        self.biases = {name: getattr(experts, f"{name}_bias") for name in STACKS}

    def forward(self, hidden: Tensor, router_indices: Tensor, routing_weights: Tensor) -> Tensor:
        """hidden [T, H], router_indices and routing_weights [T, k] -> [T, H]."""
        total = torch.zeros_like(hidden)
        for expert in router_indices.unique().tolist():
            if expert >= self.gate_up_proj.shape[0]:  # a router may send a token to no expert
                continue
            tokens, position = (router_indices == expert).nonzero(as_tuple=True)
            joined = self.gate_up_proj(hidden[tokens], expert)
            gate = joined[..., ::2].clamp(max=self.limit)
            up = joined[..., 1::2].clamp(-self.limit, self.limit)
            state = self.down_proj((up + 1) * gate * torch.sigmoid(gate * self.alpha), expert)
            total.index_add_(0, tokens, (state * routing_weights[tokens, position, None]).to(total.dtype))
        return total


def stack_shape(model: nn.Module, path: str) -> tuple[int, int, int] | None:
    """(E, N, K) of the stack of experts at `path`; None where there is none."""
    owner, _, leaf = path.rpartition(".")
    experts = submodule(model, owner)
    if experts is None or leaf not in STACKS:
        return None
    stack = getattr(experts, leaf, None)
    if isinstance(stack, QuantizedStack):
        return stack.shape
    if not isinstance(stack, Tensor) or stack.dim() != 3 or not _is_interleaved(experts):
        return None
    count, columns, rows = stack.shape
    return count, rows, columns


def replace_stack(model: nn.Module, path: str, placement: Placement, weights: StoredWeights) -> QuantizedStack:
    """Puts a quantized stack where `stack_shape` found one.

    Raises:
        ModelError: there is none.
    """
    shape = stack_shape(model, path)
    owner, _, leaf = path.rpartition(".")
    if shape is None:
        raise ModelError(f"{path} is no stack of experts that fewbit can run.", "Leave it unquantized.")
    experts = model.get_submodule(owner)
    if not isinstance(experts, InterleavedExperts):
        experts = InterleavedExperts(experts)
        replace_submodule(model, owner, experts)
    stack = QuantizedStack(shape, StackMethod(placement, weights), experts.biases[leaf])
    delattr(experts, leaf)  # a parameter's name takes no module
    experts.add_module(leaf, stack)
    return stack


def _is_interleaved(experts: nn.Module) -> bool:
    """Whether the module's arithmetic is that of `InterleavedExperts`."""
    return isinstance(experts, InterleavedExperts) or (
        all(hasattr(experts, name) for name in ("alpha", "limit", *(f"{stack}_bias" for stack in STACKS)))
        and getattr(experts, "is_transposed", True)
        and not getattr(experts, "is_concatenated", False)
    )
