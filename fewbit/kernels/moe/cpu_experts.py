"""Experts on x86, fused over experts: fewbit's compiled kernels (`csrc/cpu/experts.h`).

Each matrix lies in the layout of `linear/cpu_blocks.py`: blocks of 16 output features, four codes (or eight nibbles)
of consecutive input features to a word, codes unsigned. So weights, not activations, are shifted, and what the shift
adds is the zero point times the sum of the activations' codes, exactly, in 32 bits; nothing is stored for it. Gate and
up are kept apart, so that a thread's share of both is the same. Linear layers' own arithmetic serves: rounded
activations where the key has them, else float32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from fewbit.kernels.interface import Prepared, Refusal
from fewbit.kernels.linear.cpu_blocks import fields_of, prepare_blocks
from fewbit.kernels.linear.cpu_int8 import LONGEST_SUM, NARROWEST
from fewbit.kernels.linear.integer_activations import Rule, activation_obstacles
from fewbit.kernels.linear.obstacles import compiled_obstacles, record_obstacles
from fewbit.kernels.moe.interface import MoeKernel, MoeRequest
from fewbit.kernels.moe.reference import fake_output
from fewbit.kernels.native import DTYPES, LinearLayer, address, call_experts, instruction_set
from fewbit.kernels.operations import define
from fewbit.numerics import FLOAT_ZERO_POINT, QuantizedTensor
from fewbit.numerics.join import split, unstack
from fewbit.spec.hardware import Hardware

_LAYERS = ("gate", "up", "down")
_ROLES = ("shape", "words", "scale", "zero", "minimum")


class CpuExperts(MoeKernel):
    """See the head of this file."""

    name: ClassVar[str] = "cpu_experts"
    backend: ClassVar[str] = "cpu"

    def refuse(self, request: MoeRequest, hardware: Hardware) -> Refusal | None:
        return Refusal.first(_obstacles(request, hardware))

    def prepare(self, w13: QuantizedTensor, w2: QuantizedTensor, request: MoeRequest) -> Prepared:
        """See the contract.

        Raises:
            CheckpointError: a code lies outside the element's range.
        """
        halves = (request.intermediate, request.intermediate)
        apart = [(*split(joined, halves), down) for joined, down in zip(unstack(w13), unstack(w2), strict=True)]
        fields = fields_of(request.key.weight.element, 2 if request.key.activation is None else NARROWEST)
        assert fields is not None, "the request was refused"
        tensors = {}
        for name, records in zip(_LAYERS, zip(*apart, strict=True), strict=True):
            blocks = [prepare_blocks(record, fields).tensors for record in records]
            tensors |= {f"{name}_{role}": torch.stack([block[role] for block in blocks]) for role in blocks[0]}
        rule = None if request.key.activation is None else Rule.of(request.key.activation)
        rounding = (LinearLayer.WEIGHT_ONLY, 0, 0, 0)
        if rule is not None:
            rounding = (LinearLayer.INTEGER, int(rule.per_token), rule.low, rule.high)
        numbers = (request.experts, request.hidden, request.intermediate, *rounding)
        return Prepared(tensors, dict(zip(_NUMBERS, numbers, strict=True)))

    def run(self, x: Tensor, prepared: Prepared, chosen: Tensor, weights: Tensor) -> Tensor:
        tensors, constants = prepared.tensors, prepared.constants
        stacks = [tensors.get(name) for name in _TENSORS]
        return _operation(x, chosen, weights, stacks, [constants[name] for name in _NUMBERS])


_TENSORS = tuple(f"{layer}_{role}" for layer in _LAYERS for role in _ROLES)
_NUMBERS = ("count", "hidden", "intermediate", "arithmetic", "per_token", "low", "high")


def _obstacles(request: MoeRequest, hardware: Hardware) -> Iterator[str]:
    yield from compiled_obstacles(hardware)
    weight = request.key.weight
    if request.activation != "silu":
        yield f"silu is needed between gate and down, found {request.activation}"
    if fields_of(weight.element) is None:
        yield f"integers of at most 8 bits or small floats are needed, found {weight.element}"
    if request.has_input_scale:
        yield "one activation scale for all experts is stored, scales that are found at run time are needed"
    yield from record_obstacles(request, ("minimum", FLOAT_ZERO_POINT) if request.key.activation is None else ())
    if weight.granularity.rows > 1 and request.intermediate % weight.granularity.rows:
        yield f"blocks of {weight.granularity.rows} rows must divide the {request.intermediate} rows of gate and up"
    if request.key.activation is None:
        if request.batch_invariant:
            yield "the same bits at every M are asked for, and the order of a sum depends on the tokens of an expert"
        return
    if not weight.element.is_integer:
        yield f"integer weights are needed under integer activations, found {weight.element}"
    yield from activation_obstacles(request.key.activation, request.batch_invariant)
    for shape in ((request.intermediate, request.hidden), (request.hidden, request.intermediate)):
        longest = min(shape[1], weight.granularity.extents(shape)[1])
        if longest > LONGEST_SUM:
            yield f"at most {LONGEST_SUM} input features under one scale are summed exactly, found {longest}"


class _Experts(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("dtype", "count", "hidden", "intermediate")),
        *((name, LinearLayer) for name in _LAYERS),
    )


@lru_cache(maxsize=1024)
def described(dtype: int, numbers: tuple[int, ...], addresses: tuple[int | None, ...]) -> _Experts:
    """The experts as the library takes them: made once for stacks that stay where they are."""
    count, hidden, intermediate, arithmetic, per_token, low, high = numbers
    layers = []
    for first in range(0, len(addresses), len(_ROLES)):
        pointers = dict(zip(_ROLES, addresses[first : first + len(_ROLES)], strict=True))
        layers.append(LinearLayer(arithmetic=arithmetic, per_token=per_token, low=low, high=high, **pointers))
    return _Experts(dtype, count, hidden, intermediate, *layers)


def _experts(x: Tensor, chosen: Tensor, weights: Tensor, stacks: list[Tensor | None], numbers: list[int]) -> Tensor:
    hidden = numbers[1]
    if x.dim() != 2 or x.shape[1] != hidden or chosen.shape != weights.shape or len(chosen) != len(x):
        raise RuntimeError(
            f"tokens [T, {hidden}] and experts and weights [T, k] are needed, found {list(x.shape)}, "
            f"{list(chosen.shape)} and {list(weights.shape)}"
        )
    x, chosen, weights = x.contiguous(), chosen.long().contiguous(), weights.contiguous()
    if weights.dtype not in DTYPES:
        weights = weights.float()
    y = torch.empty_like(x)
    if len(x):
        experts = described(DTYPES[x.dtype], tuple(numbers), tuple(map(address, stacks)))
        call_experts(
            ctypes.addressof(experts),
            x.data_ptr(),
            chosen.data_ptr(),
            weights.data_ptr(),
            DTYPES[weights.dtype],
            chosen.shape[-1],
            y.data_ptr(),
            len(x),
            torch.get_num_threads(),
            instruction_set(),
        )
    return y


_operation = define(
    "experts_cpu(Tensor x, Tensor chosen, Tensor weights, Tensor?[] stacks, int[] numbers) -> Tensor",
    _experts,
    fake_output,
)
