"""The reference of experts: one expert after another, dequantized, in float32. Runs every key anywhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from fewbit.kernels.interface import Prepared, Refusal
from fewbit.kernels.moe.interface import MoeKernel, MoeRequest
from fewbit.kernels.operations import define
from fewbit.numerics import QuantizedTensor, dequantize
from fewbit.numerics.activations import fake_quantize
from fewbit.numerics.join import unstack
from fewbit.spec.hardware import Hardware
from fewbit.spec.key import LinearKey

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
}
"""What may be applied to gate, by transformers' name."""


class MoeReference(MoeKernel):
    """See the head of this file."""

    name: ClassVar[str] = "reference"
    backend: ClassVar[str] = "reference"
    reference: ClassVar[bool] = True

    def refuse(self, request: MoeRequest, hardware: Hardware) -> Refusal | None:
        if request.activation in ACTIVATIONS:
            return None
        return Refusal(f"one of {', '.join(ACTIVATIONS)} is needed, found {request.activation}")

    def prepare(self, w13: QuantizedTensor, w2: QuantizedTensor, request: MoeRequest) -> Prepared:
        stacks = {"w13": w13, "w2": w2}
        tensors = {f"{name}_{role}": stack[role] for name, stack in stacks.items() for role in stack.tensors}
        shapes = {name: [list(stack.shape), list(stack.tensors)] for name, stack in stacks.items()}
        return Prepared(
            tensors,
            {"description": json.dumps({"key": str(request.key), "activation": request.activation, "stacks": shapes})},
        )

    def run(self, x: Tensor, prepared: Prepared, chosen: Tensor, weights: Tensor) -> Tensor:
        return _operation(x, list(prepared.tensors.values()), chosen, weights, prepared.constants["description"])


def _experts(x: Tensor, tensors: list[Tensor], chosen: Tensor, weights: Tensor, description: str) -> Tensor:
    parsed = json.loads(description)
    key, left, stacks = LinearKey.parse(parsed["key"]), iter(tensors), {}
    for name, (shape, roles) in parsed["stacks"].items():
        stacks[name] = unstack(QuantizedTensor(key.weight, tuple(shape), {role: next(left) for role in roles}))
    activation = ACTIVATIONS[parsed["activation"]]
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert, (w13, w2) in enumerate(zip(stacks["w13"], stacks["w2"], strict=True)):
        tokens, position = (chosen == expert).nonzero(as_tuple=True)
        gate, up = _product(x[tokens], w13, key).chunk(2, -1)
        state = _product(activation(gate) * up, w2, key)
        total.index_add_(0, tokens, state.float() * weights[tokens, position, None].float())
    return total.to(x.dtype)


def _product(x: Tensor, record: QuantizedTensor, key: LinearKey) -> Tensor:
    numbers = x * record["pre_scale"].to(x.dtype) if "pre_scale" in record else x
    numbers = fake_quantize(numbers, key.activation, record) if key.activation else numbers.float()
    return functional.linear(numbers, dequantize(record)).to(x.dtype)


def fake_output(x: Tensor, *_arguments: object) -> Tensor:
    """What every kernel's operation returns."""
    return torch.empty_like(x)


_operation = define(
    "experts_reference(Tensor x, Tensor[] tensors, Tensor chosen, Tensor weights, str description) -> Tensor",
    _experts,
    fake_output,
)
