"""Finding and replacing modules and tensors of a model by name."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def submodule(model: nn.Module, path: str) -> nn.Module | None:
    """The module at a dotted path, or None where there is none."""
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def matrix_shape(module: nn.Module | None) -> tuple[int, int] | None:
    """[N, K] of a linear layer's weight, or [vocabulary, hidden] of an embedding's; None for anything else."""
    if isinstance(module, nn.Linear):
        return module.out_features, module.in_features
    if isinstance(module, nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    return None


def replace_submodule(model: nn.Module, path: str, replacement: nn.Module) -> None:
    """Puts `replacement` where the module at `path` is."""
    parent, _, leaf = path.rpartition(".")
    setattr(model.get_submodule(parent), leaf, replacement)


def tensor_slot(model: nn.Module, name: str) -> Tensor | None:
    """The parameter or buffer of that name, or None where the model has none."""
    owner, _, leaf = name.rpartition(".")
    module = submodule(model, owner)
    found = getattr(module, leaf, None) if module is not None else None
    return found if isinstance(found, Tensor) else None


def set_tensor(model: nn.Module, name: str, value: Tensor) -> None:
    """Makes `value` the parameter or buffer of that name, which must exist."""
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    if isinstance(getattr(module, leaf), nn.Parameter):
        module.register_parameter(leaf, nn.Parameter(value, requires_grad=False))
    else:
        module.register_buffer(leaf, value)


def to_meta(module: nn.Module) -> None:
    """Sends the parameters of a module back to meta; its buffers stay."""
    for owner in module.modules():
        for leaf, parameter in list(owner.named_parameters(recurse=False)):
            owner.register_parameter(
                leaf, nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
            )
