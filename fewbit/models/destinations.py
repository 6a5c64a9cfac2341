"""Where each stored tensor goes: names of a checkpoint's tensors to names of a model's parameters.

Where files and the model class differ in what they hold apart, experts or the members of a joined projection, the model
is changed to what the files hold.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from transformers import PreTrainedModel

from fewbit.checkpoints.interface import split_at_last_dot
from fewbit.models.experts import UnfusedExperts, expert_by_name, layer_of_expert, unfuse
from fewbit.models.joint import fit_joined
from fewbit.models.names import Names
from fewbit.models.replace import replace_submodule, submodule


class Destinations:
    """Names in the model for names on disk, after the model was changed to what is stored apart and what joined.

    Args:
        model: on meta; experts that the checkpoint stores one by one are replaced by `UnfusedExperts`, projections as
            `joint.fit_joined` says.
        modules: names of the checkpoint's modules.
        split: how its format takes the names of tensors apart, see `CheckpointFormat.split`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        modules: Iterable[str],
        split: Callable[[str], tuple[str, str]] = split_at_last_dot,
    ) -> None:
        self._names = Names(model)
        self._split = split
        self._modules: dict[str, str] = {}
        self._renamed: dict[str, tuple[str, ...]] = {}
        for module in modules:
            target = self._names.target(f"{module}.weight")
            path = target.name.removesuffix(".weight")
            if target.merge is not None:
                path = layer_of_expert(target.name, _index(module), target.merge)
                _take_apart(model, target.name.rpartition(".")[0])
            elif (named := expert_by_name(path)) and submodule(model, named[0]) and not submodule(model, path):
                experts, path = named
                _take_apart(model, experts)
            else:
                if path != module:
                    self._renamed[module] = (path,)
                path = fit_joined(model, path)
            self._modules[module] = path

    @property
    def renamed(self) -> Mapping[str, tuple[str, ...]]:
        """Module on disk -> transformers' name for it, where that differs: entries of a configuration may use either.

        Names that only fewbit has, of experts taken apart, are not among them.
        """
        return self._renamed

    def module(self, stored: str) -> str:
        """Path in the model of a module on disk."""
        return self._modules[stored]

    def tensor(self, stored: str) -> str:
        """Name in the model of a tensor on disk."""
        module, leaf = self._split(stored)
        path = self._modules.get(module)
        # A name that is not module, dot and leaf belongs to a format that has its own way of joining them.
        if path is not None and (leaf == "weight" or path != module or stored != f"{module}.{leaf}"):
            return f"{path}.{leaf}"
        return self._names.target(stored).name


def _take_apart(model: PreTrainedModel, experts: str) -> None:
    """Puts `UnfusedExperts` at the path where the model has stacked experts, once."""
    holder = submodule(model, experts)
    if holder is not None and not isinstance(holder, UnfusedExperts):
        replace_submodule(model, experts, unfuse(holder, experts))


def _index(module: str) -> int:
    """The last number in a module's name: an expert's."""
    return int(re.findall(r"\.(\d+)\.", f"{module}.")[-1])
