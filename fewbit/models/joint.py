"""Joined projections: q, k and v, or gate and up, as one matrix.

A model class calls the members of a joined projection one by one, or the joined one; files hold either, whatever the
class does. Two modules make up the difference, so that transformers' own attention and MLP code runs in every case:

    class        files     what runs
    members      joined    the joined layer under its own name, `ProjectionPart` in the place of each member
    joined       members   `SeparateMembers` in the place of the joined layer
    members      members   the members; joined while loading where that is asked (`joining`), as in the first line
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fewbit.models.families import member_rows
from fewbit.models.replace import replace_submodule, submodule
from fewbit.spec.module_names import joined_of, members_of


class LayerNorm(Protocol):
    """A norm that a joined layer applies to what it is given."""

    def applied_by(self, layer: Any, x: Tensor) -> Tensor: ...


class JoinedProduct:
    """The product of a joined layer, computed when the first member is called and handed out member by member.

    The members are called with one tensor, as they read one input; another tensor, or the same member again, has the
    product computed anew. Not for several threads at once.

    Args:
        owner: the module that holds the joined layer.
        leaf: the joined layer's name in it.
        rows: output features of each member.

    Attributes:
        norm: what the layer applies to its input first, where the norm before it only hands that on.
    """

    def __init__(self, owner: nn.Module, leaf: str, rows: Sequence[int]) -> None:
        self.owner, self.leaf, self.rows = owner, leaf, tuple(rows)
        self.norm: LayerNorm | None = None
        self._forget()

    def part(self, x: Tensor, index: int) -> Tensor:
        """Rows of the member at `index`, [..., its output features]."""
        if x is not self._input or index not in self._waiting:
            self._input, self._waiting = x, set(range(len(self.rows)))
            layer = getattr(self.owner, self.leaf)
            product = layer(x) if self.norm is None else self.norm.applied_by(layer, x)
            self._parts = product.split(self.rows, -1)
        self._waiting.discard(index)
        part = self._parts[index]
        if not self._waiting:
            self._forget()
        return part

    def _forget(self) -> None:
        self._input: Tensor | None = None
        self._parts: tuple[Tensor, ...] = ()
        self._waiting: set[int] = set()


class ProjectionPart(nn.Module):
    """Stands where a model class has one member of a projection that is joined."""

    def __init__(self, product: JoinedProduct, index: int, in_features: int) -> None:
        super().__init__()
        self.product, self.index = product, index  # no module itself, so the joined layer is held once
        self.in_features, self.out_features = in_features, product.rows[index]

    def forward(self, x: Tensor) -> Tensor:
        return self.product.part(x, self.index)

    def extra_repr(self) -> str:
        return f"out_features={self.out_features} of {self.product.leaf}"


class SeparateMembers(nn.Module):
    """Stands where a model class has a joined projection whose members are stored apart."""

    def __init__(self, members: dict[str, nn.Module]) -> None:
        super().__init__()
        for name, member in members.items():
            self.add_module(name, member)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([member(x) for member in self.children()], -1)


def fit_joined(model: PreTrainedModel, path: str) -> str:
    """Makes room for a stored projection where the model class has it joined and the files do not, or the reverse.

    Args:
        model: on meta.
        path: what the projection is called, by the class's own renaming rules.

    Returns:
        Its path in the model now.

    Raises:
        ModelError: the class's projection cannot be taken apart.
    """
    if submodule(model, path) is not None:
        return path
    joined = joined_of(path)
    whole = submodule(model, joined) if joined is not None else None
    if joined is not None and isinstance(whole, nn.Linear):
        rows = member_rows(model.config, joined, whole.out_features)
        sizes = zip(members_of(joined), rows, strict=True)
        members = {name.rpartition(".")[2]: _like(whole, count) for name, count in sizes}
        replace_submodule(model, joined, SeparateMembers(members))
        whole = submodule(model, joined)
    if isinstance(whole, SeparateMembers):
        return f"{joined}.{path.rpartition('.')[2]}"
    members_here = [submodule(model, member) for member in members_of(path)]
    linear = [member for member in members_here if isinstance(member, nn.Linear)]
    if linear and len(linear) == len(members_here):
        put_together(model, path, _like(linear[0], sum(member.out_features for member in linear)))
    return path


def put_together(model: nn.Module, path: str, whole: nn.Module) -> None:
    """Puts a joined layer at `path`, and its parts where its members are.

    Args:
        model: has all members, beside the path.
        path: of the joined layer.
        whole: the joined layer.
    """
    owner, _, leaf = path.rpartition(".")
    members = [model.get_submodule(member) for member in members_of(path)]
    product = JoinedProduct(model.get_submodule(owner), leaf, [int(member.out_features) for member in members])
    model.get_submodule(owner).add_module(leaf, whole)
    for index, member in enumerate(members_of(path)):
        replace_submodule(model, member, ProjectionPart(product, index, int(members[index].in_features)))


def _like(linear: nn.Linear, rows: int) -> nn.Linear:
    """A plain layer on meta with other output features."""
    made = nn.Linear(linear.in_features, rows, linear.bias is not None, "meta", linear.weight.dtype)
    return made.requires_grad_(False)
