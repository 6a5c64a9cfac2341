"""Hadamard rotation: the residual stream and the values of attention heads are rotated, which spreads outliers.

R1 rotates the stream: weights of norms are folded into the matrices that read them, these and the embedding are rotated
on the side of the stream, and so are the rows of all that writes into it. R2 rotates the values of each head, and the
output projection undoes it. Both are done to the weights, in float64, so that the model computes what it did and no
runtime has to know. A head that was tied to the embedding gets a weight of its own, the norm before it folded in.

What reads and what writes the stream is found by trying (`structure`), and every kind of block is run before and after:
a model whose norms subtract the mean, or norm what is written into the stream, is refused.

Sources: Ashkboos et al., QuaRot (arXiv 2404.00456), for R1 and R2 fused into weights; `hadamard` for the matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fewbit.algorithms.hadamard import Orthogonal, random_orthogonal
from fewbit.errors import ModelError, SchemeError
from fewbit.models.families import blocks_of, structure_of
from fewbit.models.layers import head_name
from fewbit.models.quantization.transforms.interface import Transform
from fewbit.models.quantization.transforms.probe import SAME, BlockProbe, deviation, matrices
from fewbit.models.quantization.transforms.structure import ScaleMapping, heads_of, is_norm, norm_offset, scale_mappings
from fewbit.models.quantization.transforms.weights import Change, TransformedWeights


@dataclass(frozen=True)
class RotationSettings:
    """Settings of the rotation.

    Attributes:
        seed: of the random signs, and of the random factor where no Hadamard matrix of the size is known.
        stream: whether the residual stream is rotated (R1).
        values: whether the values of attention heads are (R2).
    """

    seed: int = 0
    stream: bool = True
    values: bool = True

    def __post_init__(self) -> None:
        if not (self.stream or self.values):
            raise SchemeError("rotation: neither the stream nor the values are rotated.", "Leave one of them true.")


class Rotation(Transform):
    """See the head of this file."""

    name: ClassVar[str] = "rotation"
    Settings: ClassVar[type] = RotationSettings

    @property
    def unties(self) -> bool:
        return bool(self.settings.stream)

    def install(self, probe: BlockProbe, weights: TransformedWeights) -> list[dict[str, Any]]:
        config = probe.model.config.get_text_config()
        generator = torch.Generator().manual_seed(self.settings.seed)
        stream = random_orthogonal(config.hidden_size, generator)
        heads = heads_of(config)
        values = random_orthogonal(heads.size, generator) if heads and self.settings.values else None
        entries: list[dict[str, Any]] = []
        changes: dict[str, Change] = {}
        copies: dict[str, str] = {}
        if self.settings.stream:
            changes, copies = _ends(probe, weights.load, stream)
            entries.append({"transform": self.name, "what": "residual stream", "choice": stream.note})
        kinds: dict[Any, _Kind] = {}
        rotated = 0
        for path in blocks_of(probe.model):
            block = probe.model.get_submodule(path)
            structure = structure_of(block)
            kind = kinds.get(structure)
            if kind is None:
                own = probe.parameters(path, weights.load)
                kind = kinds[structure] = _kind_of(probe, path, own, values)
                _check(probe, path, own, kind, stream if self.settings.stream else None, values)
            found = kind.changes(
                lambda leaf, path=path: weights.load(probe.partial.source(f"{path}.{leaf}")),
                [name for name, _ in block.named_parameters()],
                stream if self.settings.stream else None,
                values,
            )
            changes |= {probe.partial.source(f"{path}.{leaf}"): change for leaf, change in found.items()}
            rotated += len(kind.values)
        if values is not None:
            what = f"values of {rotated} attention layers"
            entries.append({"transform": self.name, "what": what, "choice": values.note})
        weights.change_at_load(changes, copies)
        return entries


@dataclass(frozen=True)
class _Kind:
    """What blocks of one kind do with the stream; names are paths below the block.

    Attributes:
        norms: norm -> what it adds to its weight.
        readers: matrix -> the norm whose output it reads.
        writers: matrices that write into the stream.
        values: mappings from what makes the values to the output projection.
    """

    norms: Mapping[str, float]
    readers: Mapping[str, str]
    writers: tuple[str, ...]
    values: tuple[ScaleMapping, ...]

    def changes(
        self, load: Callable[[str], Tensor], leaves: list[str], stream: Orthogonal | None, values: Orthogonal | None
    ) -> dict[str, Change]:
        """Parameter of a block -> its change; `load` gives the parameters as they are."""
        found: dict[str, Change] = {}
        if stream is not None:
            for norm, offset in self.norms.items():
                found[f"{norm}.weight"] = lambda tensor, offset=offset: torch.full_like(tensor, 1 - offset)
            gains = {norm: load(f"{norm}.weight").float() + offset for norm, offset in self.norms.items()}
            for reader, norm in self.readers.items():
                found[f"{reader}.weight"] = lambda tensor, gain=gains[norm]: stream.apply(
                    tensor.float() * gain.to(tensor.device)
                )
            for writer in self.writers:
                found[f"{writer}.weight"] = lambda tensor: stream.apply(tensor.T).T
                if f"{writer}.bias" in leaves:
                    found[f"{writer}.bias"] = stream.apply
        for mapping in self.values if values is not None else ():
            for leaf, change in _value_changes(mapping, values, leaves).items():
                before = found.get(leaf)
                found[leaf] = change if before is None else lambda t, a=before, b=change: b(a(t))
        return found


def _value_changes(mapping: ScaleMapping, values: Orthogonal, leaves: list[str]) -> dict[str, Change]:
    """R2 of one attention: the rows that make the values of each head, and the columns that read them."""
    size = len(values.signs)
    used = mapping.rows.unique()
    first, last = int(used[0]), int(used[-1]) + 1

    def rows(tensor: Tensor) -> Tensor:
        fresh = tensor.float().clone()
        made = fresh[first:last].reshape(last - first, -1).T.reshape(-1, size)
        fresh[first:last] = values.apply(made).reshape(-1, last - first).T.reshape(fresh[first:last].shape)
        return fresh

    def columns(tensor: Tensor) -> Tensor:
        return values.apply(tensor.reshape(len(tensor), -1, size)).reshape(tensor.shape)

    found: dict[str, Change] = {f"{mapping.producer}.weight": rows}
    if f"{mapping.producer}.bias" in leaves:
        found[f"{mapping.producer}.bias"] = rows
    return found | {f"{consumer}.weight": columns for consumer in mapping.consumers}


def _kind_of(probe: BlockProbe, path: str, own: Mapping[str, Tensor], values: Orthogonal | None) -> _Kind:
    """Readers, writers and values of the block at `path`."""
    block = probe.model.get_submodule(path)
    width = probe.state.shape[-1]
    mappings = scale_mappings(probe, path, own)
    norms = {found.producer: found.offset for found in mappings if found.norm and found.features == width}
    readers = {name: found.producer for found in mappings if found.producer in norms for name in found.consumers}
    writers = tuple(name for name, weight in matrices(block).items() if len(weight) == width and name not in readers)
    rotated = []
    for mapping in mappings if values is not None else ():
        if mapping.norm or not _in_heads(mapping, len(values.signs)):
            continue
        trial = _Kind({}, {}, (), (mapping,))
        changed = {leaf: change(own[leaf]) for leaf, change in trial.changes(own.get, list(own), None, values).items()}
        after = probe.output(path, dict(own) | {leaf: tensor.float() for leaf, tensor in changed.items()})
        if deviation(after, probe.output(path, own)) <= SAME:
            rotated.append(mapping)
    return _Kind(norms, readers, writers, tuple(rotated))


def _in_heads(mapping: ScaleMapping, size: int) -> bool:
    """Whether consumers read whole heads of the producer, in order within each."""
    if len(mapping.rows) % size:
        return False
    heads = mapping.rows.view(-1, size)
    used = mapping.rows.unique()
    whole = len(used) % size == 0 and bool((heads[:, 0] - used[0]).remainder(size).eq(0).all())
    return whole and torch.equal(heads, heads[:, :1] + torch.arange(size)) and len(used) == used[-1] - used[0] + 1


def _check(
    probe: BlockProbe,
    path: str,
    own: Mapping[str, Tensor],
    kind: _Kind,
    stream: Orthogonal | None,
    values: Orthogonal | None,
) -> None:
    """Runs the block on a rotated state.

    Raises:
        ModelError: it does not put out the rotation of what it put out.
    """
    if stream is not None:
        for norm in kind.norms:
            _check_norm(probe.model.get_submodule(path).get_submodule(norm), f"{path}.{norm}", stream, probe.device)
    changes = kind.changes(own.__getitem__, list(own), stream, values)
    changed = {leaf: change(own[leaf]).float() for leaf, change in changes.items()}
    state, wanted = probe.state, probe.output(path, own)
    if stream is not None:
        state, wanted = stream.apply(state).float(), stream.apply(wanted).float()
    error = deviation(probe.output(path, dict(own) | changed, state), wanted)
    if not error <= SAME:
        block = probe.model.get_submodule(path)
        others = [name for name, module in block.named_modules() if is_norm(module) and name not in kind.norms]
        seen = f" (its norms {', '.join(others)} do not stand between the stream and a matrix)" if others else ""
        raise ModelError(
            f"{path} ({type(block).__name__}) is not the same when rotated, off by {error:.1%}{seen}.",
            "Leave the rotation out for this model.",
        )


def _check_norm(norm: nn.Module, name: str, stream: Orthogonal, device: torch.device) -> None:
    x = torch.randn(8, len(stream.signs), generator=torch.Generator().manual_seed(0)).to(device)
    weights = {leaf: torch.zeros(x.shape[-1], device=device) for leaf, _ in norm.named_parameters()}
    weights["weight"] += 1 - norm_offset(norm, x.shape[-1], device)
    with torch.no_grad():
        after = torch.func.functional_call(norm, weights, (stream.apply(x).float(),))
        wanted = stream.apply(torch.func.functional_call(norm, weights, (x,))).float()
    if deviation(after, wanted) > SAME or "bias" in weights:
        raise ModelError(
            f"{name} ({type(norm).__name__}) is no RMSNorm: it subtracts the mean or adds a bias, "
            "and the stream cannot be rotated past it.",
            "Leave the rotation out for this model.",
        )


def _ends(
    probe: BlockProbe, load: Callable[[str], Tensor], stream: Orthogonal
) -> tuple[dict[str, Change], dict[str, str]]:
    """Changes of what is outside the blocks, and the head that is copied from the embedding where they were tied.

    Raises:
        ModelError: there is more than an embedding, a norm and a head, or the norm is none that can be rotated past.
    """
    model = probe.model
    embedding = next(name for name, module in model.named_modules() if module is model.get_input_embeddings())
    head = head_name(model)
    blocks = tuple(f"{path}." for path in blocks_of(model))
    names = [name for name, _ in model.named_parameters(remove_duplicate=False) if not name.startswith(blocks)]
    others = {name for name in names if name.rpartition(".")[0] not in (embedding, head)}
    norms = [name for name, module in model.named_modules() if is_norm(module) and f"{name}.weight" in others]
    if head is None or len(norms) != 1 or any(not name.startswith(f"{norms[0]}.") for name in others):
        found = ", ".join(sorted(others)) or "nothing"
        raise ModelError(
            f"Beside its blocks, the embedding and a head, this model has {found}; needed is one norm.",
            "Leave the rotation out for this model.",
        )
    norm = model.get_submodule(norms[0])
    _check_norm(norm, norms[0], stream, probe.device)
    offset = norm_offset(norm, len(stream.signs), probe.device)
    source = probe.partial.source
    factors, looked_up = source(f"{norms[0]}.weight"), source(f"{embedding}.weight")
    gains = load(factors).float() + offset
    tied = not probe.partial.holds(f"{head}.weight")
    read = f"{head}.weight" if tied else source(f"{head}.weight")
    changes: dict[str, Change] = {
        looked_up: stream.apply,
        factors: lambda tensor: torch.full_like(tensor, 1 - offset),
        read: lambda tensor: stream.apply(tensor.float() * gains.to(tensor.device)),
    }
    return changes, {read: looked_up} if tied else {}
