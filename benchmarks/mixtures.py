"""Experts of a mixture for `cpu.py`: fewbit's fused kernels, and torch's ways to run the same experts unquantized."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from fewbit.kernels.interface import Prepared
from fewbit.kernels.moe.interface import MoeKernel, MoeRequest
from fewbit.kernels.moe.reference import MoeReference
from fewbit.kernels.probe import this_machine
from fewbit.kernels.registry import moe_kernels
from fewbit.numerics import QuantizedTensor, quantize
from fewbit.numerics.join import stack
from fewbit.spec import LinearKey

EXPERT_SCHEMES = ("W8A8", "W4A16")
IMPLEMENTATIONS = ("eager", "grouped_mm")
"""Of transformers: a loop over experts, and torch's grouped product."""

TOLERANCE = 0.02
"""Relative error of a whole output against its definition in float32: bf16 outputs and intermediates."""

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""x [T, H], chosen and weights [T, k] -> [T, H]."""


@dataclass(frozen=True)
class Sizes:
    """Experts, their input and inner features, and how many a token chooses."""

    experts: int
    hidden: int
    intermediate: int
    per_token: int

    @classmethod
    def parse(cls, text: str) -> Sizes:
        """Of `ExHxIxk`."""
        return cls(*map(int, text.split("x")))

    def __str__(self) -> str:
        return f"{self.experts}x{self.hidden}x{self.intermediate}x{self.per_token}"

    def routing(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Experts and weights as a router with random scores gives them."""
        weights, chosen = torch.randn(tokens, self.experts).softmax(-1).topk(self.per_token, -1)
        return chosen, (weights / weights.sum(-1, keepdim=True)).bfloat16()


def mixture_columns(
    sizes: Sizes, keys: Mapping[str, LinearKey], many: list[int], copies_of: Callable[[int], int]
) -> dict[str, list[Experts]]:
    """Column -> its calls over copies. Asserts the numbers of each for every M in `many`.

    Args:
        copies_of: how many copies of so many bytes the calls rotate over.
    """
    w13 = torch.randn(sizes.experts, 2 * sizes.intermediate, sizes.hidden) / sizes.hidden**0.5
    w2 = torch.randn(sizes.experts, sizes.hidden, sizes.intermediate) / sizes.intermediate**0.5
    inputs = [(torch.randn(count, sizes.hidden).bfloat16(), *sizes.routing(count)) for count in many]
    columns: dict[str, list[Experts]] = {}
    exact = transformers_experts(sizes, w13, w2, "eager")
    for name, made in torch_columns(sizes, w13, w2).items():
        for x, chosen, weights in inputs:
            assert_close(name, made(x, chosen, weights), exact(x.float(), chosen, weights.float()))
        columns[name] = [made]
    nbytes = 2 * (w13.numel() + w2.numel())
    for _ in range(copies_of(nbytes) - 1):
        for name, made in torch_columns(sizes, w13, w2).items():
            columns[name].append(made)
    for name, key in keys.items():
        stacks = [stack([quantize(matrix, key.weight) for matrix in weight]) for weight in (w13, w2)]
        columns |= {f"{name} {kernel}": calls for kernel, calls in kernel_columns(key, *stacks, inputs, copies_of)}
    return columns


def torch_columns(sizes: Sizes, w13: Tensor, w2: Tensor) -> dict[str, Experts]:
    """The unquantized experts, weights of their own. Float32 where bf16 is emulated: it is faster there."""
    narrow = w13.bfloat16(), w2.bfloat16()
    columns = {f"bf16 {how}": transformers_experts(sizes, *narrow, how) for how in IMPLEMENTATIONS}
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return columns | {"bf16 prepacked loop": prepacked_experts(*narrow)}
    wide = transformers_experts(sizes, w13.clone(), w2.clone(), "eager")
    return columns | {"float32 eager": lambda x, chosen, weights: wide(x.float(), chosen, weights.float()).bfloat16()}


def transformers_experts(sizes: Sizes, w13: Tensor, w2: Tensor, implementation: str) -> Experts:
    """The module of Qwen3-MoE by one of transformers' implementations."""
    config = Qwen3MoeConfig(
        num_experts=sizes.experts, hidden_size=sizes.hidden, moe_intermediate_size=sizes.intermediate, hidden_act="silu"
    )
    config._experts_implementation = implementation
    with torch.device("meta"):
        experts = Qwen3MoeExperts(config)
    experts.gate_up_proj = torch.nn.Parameter(w13, requires_grad=False)
    experts.down_proj = torch.nn.Parameter(w2, requires_grad=False)
    return experts


def prepacked_experts(w13: Tensor, w2: Tensor) -> Experts:
    """A loop over the experts that were chosen, each weight in oneDNN's own order."""
    pointwise = torch.ops.mkldnn._linear_pointwise
    packed = [[torch.ops.mkldnn._reorder_linear_weight(matrix, None) for matrix in weight] for weight in (w13, w2)]

    def run(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            tokens, position = (chosen == expert).nonzero(as_tuple=True)
            gate, up = pointwise(x[tokens], packed[0][expert], None, "none", [], "").chunk(2, -1)
            state = pointwise(functional.silu(gate) * up, packed[1][expert], None, "none", [], "")
            total.index_add_(0, tokens, state * weights[tokens, position, None])
        return total

    return run


def kernel_columns(
    key: LinearKey,
    w13: QuantizedTensor,
    w2: QuantizedTensor,
    inputs: list[tuple[Tensor, Tensor, Tensor]],
    copies_of: Callable[[int], int],
) -> Iterator[tuple[str, list[Experts]]]:
    """Each kernel that takes the experts, and its calls over copies. Asserts its numbers."""
    request, reference = MoeRequest.of(w13, w2, key, "bf16"), MoeReference()
    definition = reference.prepare(w13, w2, request)
    for kernel in moe_kernels().values():
        if kernel.reference or kernel.refuse(request, this_machine("cpu")) is not None:
            continue
        copies = [kernel.prepare(w13, w2, request)]
        for x, chosen, weights in inputs:
            wanted = reference.run(x, definition, chosen, weights)
            assert_close(f"{kernel.name} of {key}", kernel.run(x, copies[0], chosen, weights), wanted)
        for _ in range(copies_of(copies[0].nbytes) - 1):
            tensors = {name: tensor.clone() for name, tensor in copies[0].tensors.items()}
            copies.append(Prepared(tensors, copies[0].constants))
        yield kernel.name, [call_of(kernel, prepared) for prepared in copies]


def call_of(kernel: MoeKernel, prepared: Prepared) -> Experts:
    return lambda x, chosen, weights: kernel.run(x, prepared, chosen, weights)


def assert_close(name: str, found: Tensor, wanted: Tensor) -> None:
    error = ((found.float() - wanted.float()).norm() / wanted.float().norm()).item()
    assert error < TOLERANCE, f"{name} is off by {error:.4f} for {len(found)} tokens"
