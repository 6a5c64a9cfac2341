"""Joining the quantized members of a matrix while a checkpoint is loaded, and what that did to their numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fewbit.kernels.interface import Numerics
from fewbit.methods.base import Placement
from fewbit.methods.linear import LinearMethod, QuantizedLinear
from fewbit.models.families import joined_members
from fewbit.models.joint import SeparateMembers, put_together
from fewbit.models.online_transforms import is_transformed
from fewbit.models.replace import replace_submodule, submodule
from fewbit.numerics import QuantizedTensor
from fewbit.numerics.join import Joined, join, refuse_join
from fewbit.packing.registry import unpack_record
from fewbit.spec.key import LinearKey
from fewbit.spec.module_names import joined_of


@dataclass(frozen=True)
class JoinOutcome:
    """What became of the members of one matrix.

    Attributes:
        name: path of the joined layer in the model.
        members: paths of its members.
        key: of the joined layer, None where the members run apart.
        reason: why they run apart, empty where they do not.
        restated: what had to be said anew to make one matrix of them, empty where their records lie under one another.
        ratios: each member's own scale over the largest, where one scale covers a whole member; ones elsewhere.
        sqnr_db: signal to quantization noise of each member against what it was, None where no number moved.
        input_ratio: the largest static activation scale over the smallest; the largest is used for all members.
    """

    name: str
    members: tuple[str, ...]
    key: LinearKey | None = None
    reason: str = ""
    restated: str = ""
    ratios: tuple[float, ...] = ()
    sqnr_db: tuple[float | None, ...] = ()
    input_ratio: float = 1.0

    @property
    def is_exact(self) -> bool:
        """Whether every weight and every activation scale is what it was."""
        return all(loss is None for loss in self.sqnr_db) and self.input_ratio == 1.0

    def __str__(self) -> str:
        return f"{self.name}: {self.account}"

    @property
    def account(self) -> str:
        """What was done and what it cost, without the name."""
        if self.key is None:
            return f"members run apart, {self.reason}"
        losses = [loss for loss in self.sqnr_db if loss is not None]
        cost = f"SQNR {min(losses):.1f} dB at worst" if losses else "no weight moved"
        if self.input_ratio != 1.0:
            cost += f", activation scales up to {self.input_ratio:.3g} times their own"
        return f"{self.restated or 'rows under one another'}; {cost}"


@dataclass
class _Group:
    """Members of one matrix and what of them has been read."""

    name: str
    members: tuple[str, ...]
    records: dict[str, QuantizedTensor] = field(default_factory=dict)
    whole: QuantizedLinear | None = None


class Joining:
    """The joins of one load: collects the records of members, and puts one layer where all of one matrix have come.

    Args:
        model: its quantized layers have their places.
        placement: of the joined layers.

    Attributes:
        outcomes: one for each matrix that could be joined by the model's family.
    """

    def __init__(self, model: PreTrainedModel, placement: Placement) -> None:
        self.model, self.placement = model, placement
        self.outcomes: list[JoinOutcome] = []
        self._groups: dict[str, _Group] = {}
        for name, members in _matrices(model):
            layers = [submodule(model, member) for member in members]
            kinds = [isinstance(layer, QuantizedLinear) for layer in layers]
            if any(layer is not None and is_transformed(layer) for layer in layers):
                self.outcomes.append(JoinOutcome(name, members, reason="a transform stands before or after a member"))
            elif all(kinds):
                self._groups |= dict.fromkeys(members, _Group(name, members))
            elif any(kinds):
                plain = ", ".join(member for member, one in zip(members, kinds, strict=True) if not one)
                self.outcomes.append(JoinOutcome(name, members, reason=f"{plain} is not quantized"))

    def takes(self, path: str) -> bool:
        """Whether the layer at `path` is a member."""
        return path in self._groups

    def take(self, path: str) -> None:
        """Takes the record of a member whose parameters are filled; the last one of a matrix has it joined.

        Raises:
            CheckpointError: its tensors are damaged.
        """
        group = self._groups[path]
        layer = self._layer(path)
        group.records[path] = unpack_record(layer.method.take_record(layer))
        if len(group.records) == len(group.members):
            records = [group.records[member] for member in group.members]
            group.records.clear()
            self._join(group, records)

    def finish(self) -> None:
        """Puts the joined layers in their places, with the biases of their members, once everything is filled."""
        for group in {id(group): group for group in self._groups.values()}.values():
            if group.whole is None:
                continue
            layers = [self._layer(member) for member in group.members]
            group.whole.bias = _joined_bias(layers)
            if isinstance(submodule(self.model, group.name), SeparateMembers):
                replace_submodule(self.model, group.name, group.whole)
            else:
                put_together(self.model, group.name, group.whole)

    def _layer(self, path: str) -> QuantizedLinear:
        layer = self.model.get_submodule(path)
        assert isinstance(layer, QuantizedLinear)
        return layer

    def _join(self, group: _Group, records: Sequence[QuantizedTensor]) -> None:
        layers = [self._layer(member) for member in group.members]
        reason = _refusal(layers, records)
        joined = None if reason else join(records)
        if joined is not None:
            key = replace(layers[0].key, weight=joined.record.key)
            whole = QuantizedLinear(layers[0].in_features, sum(joined.rows), LinearMethod(key, self.placement))
            reason = self._slower(whole, joined.record, layers, records)
        if joined is None or reason:
            for layer, record in zip(layers, records, strict=True):
                layer.method.use_record(layer, record)
            self.outcomes.append(JoinOutcome(group.name, group.members, reason=reason))
            return
        whole.method.use_record(whole, joined.record)
        group.whole = whole
        self.outcomes.append(
            JoinOutcome(
                group.name, group.members, whole.key, "", _restated(joined), joined.ratios, joined.sqnr_db,
                joined.input_ratio,
            )
        )  # fmt: skip

    def _slower(
        self,
        whole: QuantizedLinear,
        joined: QuantizedTensor,
        layers: Sequence[QuantizedLinear],
        records: Sequence[QuantizedTensor],
    ) -> str:
        """Why the joined matrix would run slower than its members; empty where it would not."""
        if self.placement.choose(whole.method.request(joined)).numerics is not Numerics.REFERENCE:
            return ""
        choices = [
            self.placement.choose(layer.method.request(record)) for layer, record in zip(layers, records, strict=True)
        ]
        fast = {choice.kernel.name for choice in choices if choice.numerics is not Numerics.REFERENCE}
        return f"no kernel here takes {whole.key}, {', '.join(sorted(fast))} takes the members" if fast else ""


def _matrices(model: PreTrainedModel) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(path of the joined layer, paths of its members) of every matrix whose members the model holds apart."""
    for members in dict.fromkeys(joined_members(model).values()):
        name = joined_of(members[0])
        if name is not None and all(submodule(model, member) is not None for member in members):
            yield name, members
    for name, module in model.named_modules():
        if isinstance(module, SeparateMembers):
            yield name, tuple(f"{name}.{member}" for member, _ in module.named_children())


def _refusal(layers: Sequence[QuantizedLinear], records: Sequence[QuantizedTensor]) -> str:
    """Why records cannot be one matrix, empty where they can."""
    activations = {layer.key.activation for layer in layers}
    if len(activations) > 1:
        return f"their activations are {' and '.join(sorted(str(one) for one in activations))}"
    return refuse_join(records) or ""


def _restated(joined: Joined) -> str:
    before, after = joined.keys[0], joined.record.key
    if before != after:
        return f"{before} became {after}"
    if all(ratio == 1.0 for ratio in joined.ratios):
        return ""
    if after.global_scale is not None:
        return "second-level scales folded into the first level"
    return f"rounded anew under the largest scale, {min(joined.ratios):.3g} to 1"


def _joined_bias(layers: Sequence[QuantizedLinear]) -> torch.nn.Parameter | None:
    """The members' biases under one another, zeros for those that have none; None where none has one."""
    given = [layer.bias for layer in layers if layer.bias is not None]
    if not given:
        return None
    parts: list[Tensor] = [
        given[0].new_zeros(layer.out_features) if layer.bias is None else layer.bias for layer in layers
    ]
    return torch.nn.Parameter(torch.cat(parts), requires_grad=False)
