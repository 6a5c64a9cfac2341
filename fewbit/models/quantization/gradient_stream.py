"""Gradients carried back through the blocks of a model, one block's weights in memory at a time.

What they tell is how much the model's output minds an error of a layer's output. For labels drawn from the model's own
distribution the mean outer product of the gradients of their log-likelihood is the Fisher information, and half of an
error's square in that metric is the KL divergence it causes, to second order.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fewbit.algorithms.statistics import InputStatistics
from fewbit.models.families import blocks_of
from fewbit.models.fill import PartialModel
from fewbit.models.kv_cache import CacheWatch
from fewbit.models.load import set_tied
from fewbit.models.names import tied_names
from fewbit.models.quantization.block_stream import BlockStream, replaced_blocks
from fewbit.models.quantization.hooks import hooked
from fewbit.models.quantization.statistics import rows_of_each
from fewbit.models.replace import tensor_slot, to_meta
from fewbit.numerics import dequantize, quantize
from fewbit.spec.granularity import CHANNEL, HEAD
from fewbit.spec.key import QuantKey


@dataclass
class LayerEvidence:
    """What one layer's input and the gradient at its output were.

    Attributes:
        statistics: of the input, shared with the layers that read the same one.
        total: sum of the inputs, float32 [K].
        squares: sum over tokens of the squared gradient at each output, float32 [N]; N is 0 where it was not asked for.
        squared_sums: sum over windows of the square of the gradient's sum over the window's tokens, float32 [N].
    """

    statistics: InputStatistics
    total: Tensor
    squares: Tensor
    squared_sums: Tensor

    @classmethod
    def empty(cls, statistics: InputStatistics, features: int, outputs: int, device: torch.device) -> LayerEvidence:
        """Nothing seen yet of a layer with so many input features and outputs."""
        return cls(statistics, *(torch.zeros(size, device=device) for size in (features, outputs, outputs)))

    def scaled(self, statistics: InputStatistics, columns: Tensor | None, rows: Tensor | None) -> LayerEvidence:
        """The same had the input been divided by `columns`, float32 [K], and the output by `rows`, float32 [N].

        Args:
            statistics: of the input that was divided.
            columns, rows: None where nothing was divided.
        """
        total = self.total if columns is None else self.total / columns
        slopes = 1.0 if rows is None else rows.square()
        return LayerEvidence(statistics, total, self.squares * slopes, self.squared_sums * slopes)

    def add(self, gradient: Tensor) -> None:
        """Takes in the gradient at the output, [B, T, N] or [T, N]."""
        slopes = gradient.float()
        self.squares += slopes.square().flatten(0, -2).sum(0)
        self.squared_sums += slopes.sum(-2).square().reshape(-1, slopes.shape[-1]).sum(0)


class CacheEvidence(CacheWatch):
    """Stands in for a key-value cache and adds up what rounding its contents would cost.

    Args:
        keys: candidates for the cache's key.

    Attributes:
        divergence: what each of them costs, summed over tokens, nats.
    """

    def __init__(self, keys: Sequence[QuantKey]) -> None:
        super().__init__()
        self.divergence = dict.fromkeys(keys, 0.0)

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        for states in (keys, values):
            if states.requires_grad:
                states.register_hook(lambda gradient, states=states: self._add(states.detach(), gradient))
        return keys, values

    def _add(self, states: Tensor, gradient: Tensor) -> None:
        rows, slopes = (numbers.transpose(0, 1).flatten(1).float() for numbers in (states, gradient))  # a head each
        for key in self.divergence:
            own = key.with_granularity(CHANNEL) if key.granularity == HEAD else key
            error = dequantize(quantize(rows, own)) - rows
            self.divergence[key] += 0.5 * float((error * slopes).square().sum(dtype=torch.float64))


class GradientStream(BlockStream):
    """Carries windows forward through all blocks, and gradients back.

    Args:
        model: on meta, with real buffers.
        partial: fills its submodules.
        windows: int64 [count, length], on the device of what `partial` fills.
        batch: windows that pass together.
    """

    def __init__(self, model: PreTrainedModel, partial: PartialModel, windows: Tensor, batch: int = 4) -> None:
        # Filling a module and emptying it again unties it; what the checkpoint holds apart is not tied.
        tied = {name: owner for name, owner in tied_names(model).items() if not partial.holds(name)}
        super().__init__(model, partial.filled, windows, batch)
        self.inputs: dict[str, list[Tensor]] = {}
        for path in self.arguments:
            self.inputs[path] = list(self.states)
            self.gather(path, {})
        generator = torch.Generator(windows.device).manual_seed(0)
        with _outside_blocks_filled(model, partial, tied):
            ids = windows.split(batch)
            self.gradients = [self._of_last(i, s, generator) for i, s in zip(ids, self.states, strict=True)]

    def _of_last(self, ids: Tensor, states: Tensor, generator: torch.Generator) -> Tensor:
        """The gradient at the last block's output of the log-likelihood of labels that the model itself draws."""
        gradients = []
        for window, given in zip(ids.split(1), states.split(1), strict=True):  # logits are wide, so one at a time
            state = given.detach().requires_grad_()
            with torch.enable_grad(), replaced_blocks(self.model, lambda *_, state=state: state):
                likelihoods = self.model(input_ids=window, use_cache=False).logits[0].float().log_softmax(-1)
                labels = torch.multinomial(likelihoods.detach().exp(), 1, generator=generator)
                likelihoods.gather(1, labels).sum().backward()
            assert state.grad is not None
            gradients.append(state.grad)
        return torch.cat(gradients)

    def back(self, path: str, layers: Mapping[str, str], readers: Collection[str] = ()) -> dict[str, LayerEvidence]:
        """Carries the gradients back through the block at `path`; blocks are to be visited last to first.

        Args:
            path: the block's, in the model.
            layers: name of a layer, whatever the caller calls it -> its path in the model.
            readers: those of which the input alone is asked for; what they put out need not be one tensor.

        Returns:
            Evidence of the layers that any token reached.
        """
        found: dict[str, LayerEvidence] = {}
        with self.filled(path), torch.enable_grad(), self._observed(layers, readers, found):
            block = self.model.get_submodule(path)
            for index, given in enumerate(self.inputs.pop(path)):
                state = given.detach().requires_grad_()
                torch.autograd.backward(self._forward(block, path, index, state), self.gradients[index])
                assert state.grad is not None
                self.gradients[index] = state.grad
        return found

    @contextmanager
    def _observed(
        self, layers: Mapping[str, str], readers: Collection[str], found: dict[str, LayerEvidence]
    ) -> Iterator[None]:
        """Meanwhile the layers' inputs and the gradients at their outputs are added up."""
        latest: list[tuple[Tensor, InputStatistics]] = []  # the inputs of this pass, so that each counts once
        sample = rows_of_each(len(self.states))

        def see(name: str, x: Tensor, y: Tensor) -> None:
            known = next((own for tensor, own in latest if tensor is x), None)
            features, outputs = x.shape[-1], 0 if name in readers else y.shape[-1]
            if name not in found:
                statistics = known or InputStatistics.empty(features, x.device, histogram=False)
                found[name] = LayerEvidence.empty(statistics, features, outputs, x.device)
            evidence = found[name]
            evidence.total += x.detach().float().flatten(0, -2).sum(0)
            if known is not evidence.statistics:
                evidence.statistics.add(x.detach(), sample)
                latest.append((x, evidence.statistics))
                del latest[:-8]
            if outputs and y.requires_grad and y.numel():
                y.register_hook(evidence.add)

        with hooked(self.model, after={location: functools.partial(see, name) for name, location in layers.items()}):
            yield


@contextmanager
def _outside_blocks_filled(model: PreTrainedModel, partial: PartialModel, tied: Mapping[str, str]) -> Iterator[None]:
    """Everything but the blocks has its parameters meanwhile, ties included."""
    inside = tuple(f"{path}." for path in blocks_of(model))
    names = (name for name, _ in model.named_parameters() if name not in tied and not name.startswith(inside))
    owners = {name.rpartition(".")[0] for name in names}
    with ExitStack() as stack:
        for owner in owners:
            stack.enter_context(partial.filled(owner))
        for name, owner in tied.items():
            slot = tensor_slot(model, owner)
            assert slot is not None
            set_tied(model, name, slot)
            stack.callback(to_meta, model.get_submodule(name.rpartition(".")[0]))
        yield
