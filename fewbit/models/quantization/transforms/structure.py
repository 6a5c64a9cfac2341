"""Which output features of a block's modules may be scaled, and which matrices undo it: found by trying.

A producer (a norm, or a linear layer) has its output features divided by powers of two, exact in any float. Each matrix
of the block that then finds its input divided by the same numbers is a consumer, and gets its old input back, so that
nothing behind it changes, the choice of experts included. If any other matrix sees a change, or the block's output
does, the scaling does not commute with what lies between, and there is no mapping. No table of architectures is needed:
fused projections, parallel blocks, shared experts and routers are all seen.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fewbit.models.quantization.hooks import hooked
from fewbit.models.quantization.transforms.probe import SAME, BlockProbe, deviation, matrices

_DIGITS = re.compile(r"\d+")


@dataclass(frozen=True)
class ScaleMapping:
    """Output features that may be scaled, and the matrices that read them.

    Attributes:
        producer: path of a norm or a linear layer below the block.
        consumers: paths of matrices [N, K], in the order in which they are called; the first sees every token.
        rows: int64 [K], the producer's output feature that each input feature of the consumers carries. Several may
            carry the same (grouped-query attention).
        features: output features of the producer.
        norm: whether the producer is a norm.
        offset: a norm multiplies by its weight plus this (1 in Gemma).
    """

    producer: str
    consumers: tuple[str, ...]
    rows: Tensor
    features: int
    norm: bool
    offset: float = 0.0

    def __str__(self) -> str:
        return f"{self.producer} -> {', '.join(self.consumers)}"


@dataclass(frozen=True)
class Heads:
    """Heads of an attention, as a configuration states them."""

    size: int
    queries: int
    keys: int


def heads_of(config: object) -> Heads | None:
    """The attention heads of a text configuration; None where it states none."""
    queries = getattr(config, "num_attention_heads", None)
    if not queries:
        return None
    size = getattr(config, "head_dim", None) or config.hidden_size // queries  # type: ignore[attr-defined]
    return Heads(size, queries, getattr(config, "num_key_value_heads", None) or queries)


def scale_mappings(probe: BlockProbe, path: str, parameters: Mapping[str, Tensor]) -> tuple[ScaleMapping, ...]:
    """All mappings of the block at `path`, norms first.

    Args:
        probe: runs the block.
        path: the block's.
        parameters: its own, by their name below it.
    """
    trials = _Trials(probe, path, parameters)
    found = []
    for name, module in trials.block.named_modules():
        if is_norm(module):
            offset = norm_offset(module, trials.width(name), probe.device)
            rows = torch.arange(trials.width(name))
            found += trials.mappings([name], rows, len(rows), norm=True, offset=offset)
    heads = heads_of(probe.model.config.get_text_config())
    linear = [name for name, module in trials.block.named_modules() if isinstance(module, nn.Linear)]
    for names in _siblings(linear):
        features = len(parameters[f"{names[0]}.weight"])
        for rows in _expansions(features, {found.shape[1] for found in trials.matrices.values()}, heads):
            mappings = trials.mappings(names, rows, features, norm=False)
            found += mappings
            if mappings:
                break
    return tuple(found)


def is_norm(module: nn.Module) -> bool:
    """Whether a module multiplies each feature by a number of its own."""
    own = dict(module.named_parameters(recurse=False))
    return (
        not list(module.children()) and "weight" in own and own["weight"].dim() == 1 and set(own) <= {"weight", "bias"}
    )


def norm_offset(norm: nn.Module, width: int, device: torch.device) -> float:
    """What a norm adds to its weight before it multiplies: 1 for Gemma's, seen by what it makes of a weight of zero."""
    zeros = {name: torch.zeros(width, device=device) for name, _ in norm.named_parameters()}
    x = torch.linspace(-1, 1, width, device=device)[None]
    with torch.no_grad():
        return float(bool(torch.func.functional_call(norm, zeros, (x,)).any()))


def _expansions(features: int, widths: set[int], heads: Heads | None) -> Iterator[Tensor]:
    """Guesses which output feature each input feature carries: the last ones, in order or by the query heads."""
    for width in sorted(widths):
        if width <= features:
            yield torch.arange(features - width, features)
        if heads is not None and width == heads.queries * heads.size and heads.keys < heads.queries:
            kept = heads.keys * heads.size
            if kept <= features:
                own = torch.arange(features - kept, features).view(heads.keys, heads.size)
                yield own.repeat_interleave(heads.queries // heads.keys, dim=0).flatten()


def _siblings(names: Sequence[str]) -> list[list[str]]:
    """Names that differ in numbers only, together: experts."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_DIGITS.sub("*", name), []).append(name)
    return list(groups.values())


class _Trials:
    """One block, its inputs and outputs as they are, and as they become when something is scaled."""

    def __init__(self, probe: BlockProbe, path: str, parameters: Mapping[str, Tensor]) -> None:
        self.probe, self.path, self.parameters = probe, path, parameters
        self.block = probe.model.get_submodule(path)
        self.matrices = matrices(self.block)
        self.inputs: dict[str, Tensor] = {}  # in the order of the calls

        def note(name: str, x: Tensor) -> None:
            self.inputs.setdefault(name, x)

        before = {name: lambda x, name=name: note(name, x) for name in self.matrices}
        with hooked(self.block, before):
            self.output = probe.output(path, parameters)

    def width(self, norm: str) -> int:
        return len(self.parameters[f"{norm}.weight"])

    def mappings(
        self, producers: Sequence[str], rows: Tensor, features: int, norm: bool, offset: float = 0.0
    ) -> list[ScaleMapping]:
        """The mapping of each of the producers, which are siblings; none where scaling them does not commute."""
        read = self._consumers(producers, rows, features)
        if not read:
            return []
        patterns = {_DIGITS.sub("*", name) for name in read}
        everywhere = [*read, *(n for n in self.matrices if _DIGITS.sub("*", n) in patterns and n not in read)]
        if len(producers) == 1:
            return [ScaleMapping(producers[0], tuple(everywhere), rows, features, norm, offset)]
        paired = []
        for producer in producers:
            own = tuple(name for name in everywhere if _DIGITS.findall(name) == _DIGITS.findall(producer))
            paired += [ScaleMapping(producer, own, rows, features, norm, offset)] if own else []
        return paired

    def _consumers(self, producers: Sequence[str], rows: Tensor, features: int) -> list[str]:
        """Matrices that see the producers' scaled features and nothing else changed; empty where anything else is."""
        device = self.output.device
        rows = rows.to(device)
        generator = torch.Generator().manual_seed(1)
        scale = torch.ones(features, device=device)
        used = rows.unique()
        scale[used] = torch.exp2(torch.randint(1, 4, (len(used),), generator=generator).float()).to(device)
        read: list[str] = []
        changed: list[str] = []

        def meet(name: str, x: Tensor) -> Tensor | None:
            known = self.inputs.get(name)
            if known is None or known.shape != x.shape:
                changed.append(name)
                return None
            if deviation(x, known) <= SAME:
                return None
            if x.shape[-1] == len(rows) and deviation(x * scale[rows], known) <= SAME:
                read.append(name)
            else:
                changed.append(name)
                return None
            return known

        before = {name: lambda x, name=name: meet(name, x) for name in self.matrices}
        after = {name: lambda _, out: out / scale for name in producers}
        with hooked(self.block, before, after):
            output = self.probe.output(self.path, self.parameters)
        return [] if changed or deviation(output, self.output) > SAME else read
