"""Blocks of a model in float32, run on a few made-up tokens: what computes what is found out by trying it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from fewbit.checkpoints.tensor_files import TensorFolder
from fewbit.errors import CheckpointError
from fewbit.models.fill import PartialModel
from fewbit.models.names import build_on_meta
from fewbit.models.quantization.block_stream import BlockStream

WINDOWS, LENGTH = 2, 24
SAME = 1e-3
"""Deviation of a float32 result, relative to it, up to which two computations are the same one."""

Load = Callable[[str], Tensor]
"""Name of a stored tensor -> the tensor."""


class BlockProbe:
    """A model on meta, whose blocks run on random states with whatever weights they are given.

    Args:
        folder: the unquantized checkpoint.
        config: transformers' configuration of it.
        device: where blocks run.

    Attributes:
        model: on meta, float32.
        state: float32 [windows, length, H].
    """

    def __init__(self, folder: TensorFolder, config: PretrainedConfig, device: torch.device) -> None:
        self.model = build_on_meta(config, torch.float32)
        self.partial = PartialModel(self.model, folder, device)
        self.device = device
        ids = torch.arange(WINDOWS * LENGTH).reshape(WINDOWS, LENGTH) % config.get_text_config().vocab_size
        stream = BlockStream(self.model, self.partial.filled, ids.to(device), batch=WINDOWS)
        self._arguments: dict[str, dict[str, Any]] = {path: found[0] for path, found in stream.arguments.items()}
        generator = torch.Generator().manual_seed(0)
        self.state = torch.randn(stream.states[0].shape, generator=generator).to(device)

    def parameters(self, path: str, load: Load) -> dict[str, Tensor]:
        """The parameters of the block at `path` by their name below it, float32.

        Raises:
            CheckpointError: one holds NaN or infinity.
        """
        found = {}
        for leaf, _ in self.model.get_submodule(path).named_parameters():
            stored = self.partial.source(f"{path}.{leaf}")
            found[leaf] = load(stored).to(self.device, torch.float32)
            if not bool(found[leaf].isfinite().all()):
                raise CheckpointError(f"{stored} holds NaN or infinity.", "Repair the source model.")
        return found

    def output(self, path: str, parameters: Mapping[str, Tensor], state: Tensor | None = None) -> Tensor:
        """What the block adds to a state, `state` by default."""
        state = self.state if state is None else state
        block = self.model.get_submodule(path)
        with torch.no_grad():
            output = torch.func.functional_call(block, dict(parameters), (state,), self._arguments[path])
        return (output[0] if isinstance(output, tuple) else output) - state


def matrices(block: nn.Module) -> dict[str, Tensor]:
    """The weights [N, K] of a block by the name of their module below it: linear layers, and routers of experts."""
    found = {}
    for name, module in block.named_modules():
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        if weight is not None and weight.dim() == 2 and not isinstance(module, nn.Embedding):
            found[name] = weight
    return found


def deviation(found: Tensor, wanted: Tensor) -> float:
    """Largest over the last axis's features of |found - wanted| / |wanted|, features next to nothing left out."""
    wanted = wanted.reshape(-1, wanted.shape[-1])
    sizes = wanted.norm(dim=0)
    errors = (found.reshape(wanted.shape) - wanted).norm(dim=0)
    floor = 1e-3 * sizes.square().mean().sqrt()
    return float((errors / sizes.clamp(min=torch.finfo(torch.float32).tiny).maximum(floor)).amax())
