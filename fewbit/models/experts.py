"""Experts as separate linear layers: what a checkpoint with one layer for each expert runs on.

transformers holds the experts of a block as stacked parameters. A checkpoint that stores each expert's projections on
their own may quantize each as it likes, so the stack is replaced by one linear layer for each. `HeldExperts` waits for
all of them; where they are alike and a fused kernel takes them, one module replaces them all, else each gets the kernel
its key asks for.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fewbit.errors import ModelError
from fewbit.methods.base import Placement, StoredWeights
from fewbit.methods.experts import FusedExperts, fuse_experts
from fewbit.methods.linear import HeldMethod, QuantizedLinear
from fewbit.models.names import Merge
from fewbit.models.replace import replace_submodule
from fewbit.numerics import QuantizedTensor
from fewbit.spec.key import LinearKey


class UnfusedExperts(nn.Module):
    """Gated experts, `down(activation(gate(x)) * up(x))`, weighted by the router and summed.

    Takes the place of transformers' modules of that arithmetic (Qwen3-MoE, Mixtral and their like).

    Attributes:
        gate, up: lists of E linear layers [I, H].
        down: list of E linear layers [H, I].
    """

    def __init__(self, experts: int, hidden: int, intermediate: int, activation: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        kind = {"bias": False, "device": "meta", "dtype": dtype}
        self.gate = nn.ModuleList(nn.Linear(hidden, intermediate, **kind) for _ in range(experts))
        self.up = nn.ModuleList(nn.Linear(hidden, intermediate, **kind) for _ in range(experts))
        self.down = nn.ModuleList(nn.Linear(intermediate, hidden, **kind) for _ in range(experts))
        self.activation = activation

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden [T, H], top_k_index and top_k_weights [T, k] -> [T, H]."""
        total = torch.zeros_like(hidden)
        for expert in top_k_index.unique().tolist():
            if expert >= len(self.gate):  # a router may send a token to no expert
                continue
            tokens, position = (top_k_index == expert).nonzero(as_tuple=True)
            state = hidden[tokens]
            state = self.down[expert](self.activation(self.gate[expert](state)) * self.up[expert](state))
            total.index_add_(0, tokens, (state * top_k_weights[tokens, position, None]).to(total.dtype))
        return total


class HeldExperts:
    """The records of one `UnfusedExperts` while they are read.

    Args:
        model: holds the experts.
        path: of the experts.
        placement: where they run.
    """

    def __init__(self, model: PreTrainedModel, path: str, placement: Placement) -> None:
        self._model, self._path, self._placement = model, path, placement
        experts = model.get_submodule(path)
        assert isinstance(experts, UnfusedExperts)
        self._size = 3 * len(experts.gate)
        self._records: dict[QuantizedLinear, QuantizedTensor] = {}

    def method(self, key: LinearKey, stored: StoredWeights) -> HeldMethod:
        """The method of one of their layers."""
        return HeldMethod(key, self._placement, stored, self._take)

    def _take(self, layer: QuantizedLinear, record: QuantizedTensor) -> None:
        self._records[layer] = record
        if len(self._records) == self._size:
            fused = self._fused()
            if fused is not None:
                replace_submodule(self._model, self._path, fused)
                self._records.clear()
            self.finish()

    def _fused(self) -> FusedExperts | None:
        experts = self._model.get_submodule(self._path)
        layers = {name: list(getattr(experts, name)) for name in ("gate", "up", "down")}
        keys = {layer.key for members in layers.values() for layer in members}
        if len(keys) > 1:
            return None
        records = {name: [self._records[layer] for layer in members] for name, members in layers.items()}
        return fuse_experts(records, keys.pop(), self._model.config.get_text_config().hidden_act, self._placement)

    def finish(self) -> None:
        """Prepares, as layers of their own, those that are still held."""
        for layer, record in self._records.items():
            layer.method.prepare_alone(layer, record)
        self._records.clear()


_BY_NAME = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj")
_PROJECTIONS = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
_STACK = ("MergeModulelist", 0)
_JOIN_ROWS = ("Concatenate", 1)


def unfuse(experts: nn.Module, name: str) -> UnfusedExperts:
    """The replacement of one of transformers' experts modules, its layers on meta.

    Raises:
        ModelError: the module's arithmetic is not the one of `UnfusedExperts`.
    """
    gate_up, activation = getattr(experts, "gate_up_proj", None), getattr(experts, "act_fn", None)
    has_bias = any(leaf.endswith("bias") for leaf, _ in experts.named_parameters())
    if not isinstance(gate_up, Tensor) or gate_up.dim() != 3 or activation is None or has_bias:
        raise ModelError(
            f"{name} ({type(experts).__name__}) merges separate experts in a way that is not supported.",
            "Leave the experts of this model unquantized.",
        )
    count, doubled, hidden = gate_up.shape
    return UnfusedExperts(count, hidden, doubled // 2, activation, gate_up.dtype)


def expert_by_name(path: str) -> tuple[str, str] | None:
    """(experts module, linear layer in its `UnfusedExperts`) of a layer named `<experts>.3.gate_proj`; else None.

    Tools that take stacked experts apart before they quantize (GPTQModel) write such names for families whose own names
    are others, and transformers has no rule for them.
    """
    found = _BY_NAME.fullmatch(path)
    return (found[1], f"{found[1]}.{found[3]}.{found[2]}") if found else None


def layer_of_expert(parameter: str, index: int, merge: Merge) -> str:
    """Name of the linear layer, below the model, that holds one operand of a merge.

    Args:
        parameter: the merged parameter, `model.layers.0.mlp.experts.gate_up_proj`.
        index: the expert's.
        merge: the rule, whose operand it is.

    Raises:
        ModelError: the rule is no stacking of experts.
    """
    experts, _, leaf = parameter.rpartition(".")
    projections = _PROJECTIONS.get(leaf, ())
    expected = (_STACK, _JOIN_ROWS)[: len(projections)]
    if len(projections) != len(merge.sources) or merge.operations != expected:
        raise ModelError(
            f"{parameter} is merged from {', '.join(merge.sources)} in a way that is not supported.",
            "Leave these layers unquantized.",
        )
    return f"{experts}.{projections[merge.sources.index(merge.source)]}.{index}"
