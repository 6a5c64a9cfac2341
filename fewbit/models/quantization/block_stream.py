"""Hidden states of calibration windows, carried from block to block."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fewbit.algorithms.statistics import InputStatistics
from fewbit.errors import ModelError
from fewbit.models.families import blocks_of, family_of_model, structure_of
from fewbit.models.kv_cache import CacheWatch
from fewbit.models.quantization.hooks import hooked
from fewbit.models.quantization.passes import HeldPasses, LiveBytes, Passes, Reference, RepeatedPasses
from fewbit.models.quantization.products import calibration_products
from fewbit.models.quantization.ranks import ALONE, Ranks

Solve = Callable[[list[str], InputStatistics], Mapping[str, Tensor]]
"""Names of layers that read one input, and its statistics -> what their weights have become, [N, K] each."""

Output = Callable[[Mapping[str, Tensor], int], Tensor]
"""(layer name -> weight, index of a batch) -> the output of the block at hand."""

Refine = Callable[[Output, Callable[[int], Tensor]], Mapping[str, Tensor]]
"""Output, and index of a batch -> output of the unquantized model -> what the weights of all layers have become."""

StandInForward = Callable[[str, Tensor, dict[str, Any]], Tensor]
"""Path of a block, the state and the arguments that it gets -> the state that stands in for its output."""

BATCH = 4
TOKENS_AT_ONCE = 1 << 13
NUMBERS_AT_ONCE = 1 << 27
"""Tokens that pass together on a GPU, and more of them where what a layer reads of these are fewer numbers than this:
a GPU takes as long to be told what to do as to do it."""

MOST_HELD = 16 * 10**9
_CACHE_ARGUMENTS = ("cache", "past_key_values")  # since transformers 5.24, and before


def windows_at_once(length: int, widest: int, on_cpu: bool, tunes: bool = False) -> int:
    """How many windows of `length` tokens pass together.

    Where blocks are tuned on them (`tunes`) they are few: a step that reads two batches from different places of the
    text does better than one that reads a single one of twice the size.

    Args:
        length: tokens of a window.
        widest: most features that a layer of a block reads.
        on_cpu: whether blocks run on a CPU.
        tunes: see above.
    """
    return BATCH if on_cpu or tunes else max(BATCH, max(TOKENS_AT_ONCE, NUMBERS_AT_ONCE // widest) // length)


def widest_input(model: PreTrainedModel) -> int:
    """Most features that a linear layer of the model's blocks reads."""
    blocks = blocks_of(model).values()
    read = (one.in_features for block in blocks for one in block.modules() if isinstance(one, nn.Linear))
    return max(read, default=NUMBERS_AT_ONCE)


class BlockStream:
    """Hidden states of calibration windows, carried through the blocks one at a time.

    Only the block at hand has its weights; the states of all windows are kept in the model's dtype.

    Args:
        model: on meta, with real buffers.
        filled: context manager that fills a submodule's parameters from the checkpoint and sends them back to meta.
        windows: int64 [count, length], on the device of what `filled` fills.
        batch: windows that pass together.
        reference: whether the states of the unquantized model are carried beside those of the quantized one.
        compares: whether `solve` gets statistics of how inputs differ between the two; needs `reference`.
        most_held: bytes that the passes of all batches may hold while they wait at a layer, beside the states.
        ranks: the processes that carry the other windows.
        histograms: whether statistics count magnitudes, for percentiles.

    Attributes:
        watch: sees what the block at hand would cache, while it is set.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        filled: Callable[[str], Any],
        windows: Tensor,
        batch: int = BATCH,
        reference: bool = False,
        most_held: int = MOST_HELD,
        ranks: Ranks = ALONE,
        compares: bool = False,
        histograms: bool = True,
    ) -> None:
        self.compares, self.histograms = compares, histograms
        self.model, self.filled, self.most_held, self.ranks = model, filled, most_held, ranks
        self.watch: CacheWatch | None = None
        self.device, self.states = windows.device, list[Tensor]()
        self._met: dict[Hashable, tuple[list[list[str]], int]] = {}
        self.arguments: dict[str, list[dict[str, Any]]] = {path: [] for path in blocks_of(model)}
        with filled(_embedding_path(model)), torch.no_grad(), _recording(model, self._record) as run:
            for window in windows.split(batch):
                run(window)
        self.reference = list(self.states) if reference else []

    def _record(self, path: str, state: Tensor, arguments: dict[str, Any]) -> None:
        if path == next(iter(self.arguments)):
            self.states.append(state)
        self.arguments[path].append(arguments)

    def gather(
        self, path: str, layers: Mapping[str, str], grams: bool = False, sample: int = 0
    ) -> dict[str, InputStatistics]:
        """Carries the states through the block at `path` as it is and gathers the inputs of its linear layers.

        Args:
            path: the block's, in the model.
            layers: name of a layer, whatever the caller calls it -> its path in the model.
            grams: whether Gram matrices, and mean and largest magnitudes of features, are gathered too.
            sample: rows of each batch that are kept.

        Returns:
            Layer name -> statistics of its input; layers that read one input share one object.
        """
        found: dict[str, InputStatistics] = {}
        met: list[tuple[Tensor, str, bool]] = []  # of the batch at hand: an input, its first reader, whether it is new

        def meet(name: str, x: Tensor) -> None:
            first = next((one for one in met if one[0] is x), None)
            if first is not None and name not in found and first[2]:
                found[name] = found[first[1]]
            elif first is None or found.get(name) is not found[first[1]]:
                met.append((x, name, name not in found))
                found.setdefault(name, self._begin(x, grams)).add(x, sample)

        with self.filled(path), torch.no_grad(), calibration_products(self.device):
            block = self.model.get_submodule(path)
            with self._before_each(layers, meet):
                for index in range(len(self.states)):
                    self.states[index] = self._forward(block, path, index)
                    met.clear()
        return self.ranks.totals({name: found.get(name) or InputStatistics.empty() for name in layers})

    def _begin(self, x: Tensor, grams: bool = True) -> InputStatistics:
        """Statistics that have seen nothing yet, of an input like x."""
        return InputStatistics.empty(x.shape[-1] if grams else None, x.device, self.histograms)

    def replay(self, path: str, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Carries the states through a block whose new weights are known.

        Args:
            path: the block's, in the model.
            weights: path in the model and weight [N, K] of each layer that later ones see changed.
        """
        with self.filled(path), torch.no_grad(), calibration_products(self.device):
            block = self.model.get_submodule(path)
            for index in range(len(self.reference)):
                self.reference[index] = self._forward_reference(block, path, index)
            for location, weight in weights:
                self.model.get_submodule(location).weight.copy_(weight)
            for index in range(len(self.states)):
                self.states[index] = self._forward(block, path, index)

    def observe(self, path: str, layers: Mapping[str, str], see: Callable[[str, Tensor], None]) -> None:
        """Runs the block at `path` as it is on all states, which stay where they are.

        Args:
            path: the block's, in the model.
            layers: name of a module, whatever the caller calls it -> its path in the model.
            see: gets the name and the input of each of them before it runs.
        """
        products = calibration_products(self.device)
        with self.filled(path), torch.no_grad(), products, self._before_each(layers, see):
            block = self.model.get_submodule(path)
            for index in range(len(self.states)):
                self._forward(block, path, index)

    def solve(self, path: str, layers: Mapping[str, str], solve: Solve, refine: Refine | None = None) -> None:
        """Carries the states through the block at `path`, replacing each layer's weight before its output is used.

        Every batch is a forward pass that stops at each layer whose weight is not final yet. When all that will come
        by have stopped there, `solve` gets the statistics of what they brought, and they go on with the new weight. So
        a layer sees what the quantized layers before it, in this block too, really put out, and a block costs one
        forward pass. Where what all of them hold while they stand would be more than `most_held` bytes, each is let go
        of and begins anew for the next layer: the same operations on the same numbers, several times.

        Args:
            path: the block's, in the model.
            layers: name of a layer, whatever the caller calls it -> its path in the model.
            solve: see `Solve`.
            refine: called when all layers are solved; needs a stream with `reference`.
        """
        with self.filled(path), torch.no_grad():
            block = self.model.get_submodule(path)
            groups, held = self._shared_inputs(block, path, layers)
            groups = self.ranks.first(groups)
            beside = 2 if self.compares else 1
            kind = RepeatedPasses if beside * held * len(self.states) > self.most_held else HeldPasses
            reference = self._unquantized(block, path, kind is RepeatedPasses) if self.compares else None
            with calibration_products(self.device):
                for index in range(len(self.reference)) if reference is None else ():
                    self.reference[index] = self._forward_reference(block, path, index)
            count = len(self.states)
            passes = kind(lambda index: self._forward(block, path, index), count, groups, reference, self._begin)
            with self._before_each(layers, passes.stop):
                while (group := self.ranks.earliest(self._waiting(passes))) is not None:
                    features = self.model.get_submodule(layers[groups[group][0]]).in_features
                    with calibration_products(self.device):
                        statistics = passes.statistics(group)
                    statistics = self.ranks.total(statistics, features)
                    for name, weight in solve(groups[group], statistics).items():
                        self.model.get_submodule(layers[name]).weight.copy_(weight)
                    passes.final.update(groups[group])
            self.reference = passes.reference_outputs or self.reference
            if refine is None:
                self.states = passes.outputs
                return
            for name, weight in refine(self._output(block, path, layers), self.reference.__getitem__).items():
                self.model.get_submodule(layers[name]).weight.copy_(weight)
            with calibration_products(self.device):
                for index in range(len(self.states)):
                    self.states[index] = self._forward(block, path, index)

    def _waiting(self, passes: Passes) -> int | None:
        with calibration_products(self.device):
            return passes.waiting()

    def _unquantized(self, block: nn.Module, path: str, repeated: bool) -> Reference:
        """The unquantized model's passes; with a copy of its weights where they begin anew when these are replaced."""
        tokens = [state.shape[:-1].numel() for state in self.reference]
        if not repeated:
            return Reference(lambda index: self._forward_reference(block, path, index), tokens)
        weights = {name: parameter.clone() for name, parameter in block.named_parameters()}

        def forward(index: int) -> Tensor:
            arguments = self.arguments[path][index]
            return _state_of(torch.func.functional_call(block, weights, (self.reference[index],), arguments))

        return Reference(forward, tokens)

    def _output(self, block: nn.Module, path: str, layers: Mapping[str, str]) -> Output:
        def output(weights: Mapping[str, Tensor], index: int) -> Tensor:
            dtype = self.states[index].dtype
            replaced = {
                f"{layers[name].removeprefix(f'{path}.')}.weight": weight.to(dtype) for name, weight in weights.items()
            }
            arguments = self.arguments[path][index]
            return _state_of(torch.func.functional_call(block, replaced, (self.states[index],), arguments))

        return output

    def _forward(self, block: nn.Module, path: str, index: int, state: Tensor | None = None) -> Tensor:
        arguments = self.arguments[path][index]
        if self.watch is not None:
            arguments = arguments | {name: self.watch for name in _CACHE_ARGUMENTS if name in arguments}
        return _state_of(block(self.states[index] if state is None else state, **arguments))

    def _forward_reference(self, block: nn.Module, path: str, index: int) -> Tensor:
        """What the block makes of the unquantized model's state; nobody watches what it would cache."""
        return _state_of(block(self.reference[index], **self.arguments[path][index]))

    def _before_each(
        self, layers: Mapping[str, str], call: Callable[[str, Tensor], None]
    ) -> AbstractContextManager[None]:
        """Meanwhile `call` gets the name and the input of each of `layers` before it runs."""
        return hooked(self.model, {location: functools.partial(call, name) for name, location in layers.items()})

    def _shared_inputs(self, block: nn.Module, path: str, layers: Mapping[str, str]) -> tuple[list[list[str]], int]:
        """What one batch shows of the block, or has shown of one of the same structure, if it came to every layer.

        Returns:
            Layers by the input they read, in the order in which the batch comes to them, then those it never meets; and
            the largest number of bytes that the pass held when it came to a layer.
        """
        inside = {location.removeprefix(f"{path}."): name for name, location in layers.items()}
        kind = (structure_of(block), tuple(inside))
        if kind not in self._met:
            groups, held = self._seen_inputs(block, path, inside)
            if sum(map(len, groups)) < len(inside):
                met = {place for places in groups for place in places}
                groups += [[place] for place in inside if place not in met]
                return [[inside[place] for place in places] for places in groups], held
            self._met[kind] = groups, held
        groups, held = self._met[kind]
        return [[inside[place] for place in places] for places in groups], held

    def _seen_inputs(self, block: nn.Module, path: str, inside: Iterable[str]) -> tuple[list[list[str]], int]:
        """What one batch comes to, as paths below the block, and the bytes; see `_shared_inputs`."""
        alive, held = LiveBytes(), 0
        met: list[tuple[weakref.ref[Tensor], list[str]]] = []

        def meet(name: str, x: Tensor) -> None:
            nonlocal held
            for seen, names in met:
                if seen() is x:
                    names.append(name)
                    return
            held = max(held, alive.live)
            met.append((weakref.ref(x), [name]))

        watch, self.watch = self.watch, None  # the weights are not what caches will see
        hooks = hooked(block, {place: functools.partial(meet, place) for place in inside})
        with hooks, calibration_products(self.device), alive:
            self._forward(block, path, 0)
        self.watch = watch
        return [names for _, names in met], held


def _state_of(output: Any) -> Tensor:
    """The hidden state of what a block returns: some return it with attention weights or caches."""
    state: Tensor = output[0] if isinstance(output, tuple) else output
    return state


class _LastBlockReached(Exception):  # noqa: N818 - not an error, it ends a forward pass early
    pass


class _StandIn(nn.Module):
    """Stands in for a block: computes something else, and has the block's attributes."""

    def __init__(self, block: nn.Module, path: str, forward: StandInForward) -> None:
        super().__init__()
        # In a list, so that the block is no submodule of its stand-in.
        self._block, self._path, self._forward = [block], path, forward

    def forward(self, state: Tensor, *positional: Any, **arguments: Any) -> Tensor:
        if positional:
            raise ModelError(f"{self._path} is called with positional arguments.", "Calibrate a listed architecture.")
        return self._forward(self._path, state, arguments)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_block"][0], name)


@contextmanager
def replaced_blocks(model: PreTrainedModel, forward: StandInForward) -> Iterator[None]:
    """Meanwhile every block hands what it gets to `forward` and returns what that returns."""
    blocks = blocks_of(model)
    container = model.get_submodule(family_of_model(model).blocks)
    for index, (path, block) in enumerate(blocks.items()):
        container[index] = _StandIn(block, path, forward)
    try:
        yield
    finally:
        for index, block in enumerate(blocks.values()):
            container[index] = block


@contextmanager
def _recording(model: PreTrainedModel, record: Callable[..., None]) -> Iterator[Callable[[Tensor], None]]:
    """Yields a function that runs the model on token ids, telling `record` what each block is given."""
    last = next(reversed(blocks_of(model)))

    def forward(path: str, state: Tensor, arguments: dict[str, Any]) -> Tensor:
        record(path, state, arguments)
        if path == last:
            raise _LastBlockReached
        return state

    def run(ids: Tensor) -> None:
        try:
            model(input_ids=ids, use_cache=False)
        except _LastBlockReached:
            return

    with replaced_blocks(model, forward):
        yield run


def _embedding_path(model: PreTrainedModel) -> str:
    embedding = model.get_input_embeddings()
    return next(name for name, module in model.named_modules() if module is embedding)
