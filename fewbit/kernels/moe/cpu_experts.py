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
from fewbit.kernels.native import DTYPES, LinearLayer, call_experts
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
        rounding = [1, 0, 0, 0] if rule is None else [2, int(rule.per_token), rule.low, rule.high]
        return Prepared(tensors, {"intermediate": request.intermediate} | dict(zip(_ROUNDING, rounding, strict=True)))

    def run(self, x: Tensor, prepared: Prepared, chosen: Tensor, weights: Tensor) -> Tensor:
        layers = ([prepared.tensors.get(f"{name}_{role}") for role in _ROLES] for name in _LAYERS)
        rounding = [prepared.constants[name] for name in _ROUNDING]
        return _operation(x, chosen, weights, *layers, prepared.constants["intermediate"], rounding)


_ROUNDING = ("arithmetic", "per_token", "low", "high")


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


class _Routing(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "y", "chosen", "weights")),
        *((name, ctypes.c_int64) for name in ("tokens", "per_token", "threads")),
    )


def _experts(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate: list[Tensor | None],
    up: list[Tensor | None],
    down: list[Tensor | None],
    intermediate: int,
    rounding: list[int],
) -> Tensor:
    hidden, shape = x.shape[-1], gate[0]
    assert shape is not None
    if x.dim() != 2 or hidden != int(shape[0, 1]) or chosen.shape != weights.shape or len(chosen) != len(x):
        raise RuntimeError(
            f"tokens [T, {int(shape[0, 1])}] and experts and weights [T, k] are needed, found {list(x.shape)}, "
            f"{list(chosen.shape)} and {list(weights.shape)}"
        )
    x, chosen, weights = x.contiguous(), chosen.long().contiguous(), weights.float().contiguous()
    y = torch.empty_like(x)
    numbers = dict(zip(_ROUNDING, rounding, strict=True))
    arithmetic = numbers.pop("arithmetic")
    layers = [
        LinearLayer.of(arithmetic, {r: t for r, t in zip(_ROLES, own, strict=True) if t is not None}, None, **numbers)
        for own in (gate, up, down)
    ]
    experts = _Experts(DTYPES[x.dtype], len(shape), hidden, intermediate, *layers)
    pointers = (tensor.data_ptr() for tensor in (x, y, chosen, weights))
    routing = _Routing(*pointers, len(x), chosen.shape[-1], torch.get_num_threads())
    if len(x):
        call_experts(ctypes.addressof(experts), ctypes.addressof(routing))
    return y


_operation = define(
    "experts_cpu(Tensor x, Tensor chosen, Tensor weights, Tensor?[] gate, Tensor?[] up, Tensor?[] down, "
    "int intermediate, int[] rounding) -> Tensor",
    _experts,
    fake_output,
)
