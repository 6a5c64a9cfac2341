"""Transforms that activations need at run time: before or after a linear layer, as hooks of the layer.

Queries and keys that are rotated alike need nothing: the rotation cancels in their product, and the runtime keeps
cached keys in the model's dtype. Whatever else asks for queries or keys is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fewbit.checkpoints.interface import CheckpointFormat
from fewbit.errors import CheckpointError
from fewbit.methods.linear import QuantizedLinear
from fewbit.models.replace import submodule
from fewbit.models.stored import StoredCheckpoint
from fewbit.numerics.hadamard import times_hadamard
from fewbit.spec.transform import Transform


class OnlineTransform(nn.Module):
    """x R, R standing on the diagonal as often as it fits.

    Args:
        order: of R.
        dtype: in which it is multiplied; the result has x's dtype.
        matrix: R [order, order] with whatever factor belongs to it, None for Sylvester's over the root of its order.
    """

    def __init__(self, order: int, dtype: torch.dtype, matrix: Tensor | None = None) -> None:
        super().__init__()
        self.order, self.dtype = order, dtype
        self.register_buffer("matrix", matrix, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., K], K a multiple of the order."""
        numbers = x.to(self.dtype)
        if self.matrix is None:
            return times_hadamard(numbers, self.order).to(x.dtype)
        blocks = numbers.unflatten(-1, (-1, self.order)) @ self.matrix.to(self.dtype)
        return blocks.flatten(-2).to(x.dtype)

    def extra_repr(self) -> str:
        return f"order={self.order}, {'hadamard' if self.matrix is None else 'stored matrix'}"


def is_transformed(layer: nn.Module) -> bool:
    """Whether a transform stands before or after the layer."""
    return any(isinstance(child, OnlineTransform) for child in layer.children())


@dataclass(frozen=True)
class AppliedTransforms:
    """What was done about a checkpoint's transforms.

    Attributes:
        lines: a sentence for each.
        tensors: names on disk of matrices and permutations.
    """

    lines: tuple[str, ...] = ()
    tensors: frozenset[str] = frozenset()


def apply_transforms(stored: StoredCheckpoint, model: nn.Module, place: Callable[[str], str]) -> AppliedTransforms:
    """Hooks every online transform of a checkpoint to the layers that it names.

    Args:
        stored: the checkpoint.
        model: its linear layers, plain and quantized, have their places.
        place: name of a module on disk -> its path in the model.

    Raises:
        CheckpointError: one cannot be applied here, or its matrix is missing.
    """
    if not stored.transforms or stored.format is None:
        return AppliedTransforms()
    _require_cancelling(stored.transforms)
    matrices = _Matrices(stored, stored.format)
    lines = []
    for transform in stored.transforms:
        if transform.location not in ("input", "output"):
            alike = ", which cancels: queries and keys are rotated alike" if transform.is_online else ""
            lines.append(f"{transform}{alike}")
            continue
        layers = {
            name: layer for name, layer in _linear_layers(stored, model, place) if _names(stored, transform, name)
        }
        if not layers:
            raise CheckpointError(
                f"The transform {transform} matches no linear layer.", "The configuration belongs to another model."
            )
        for name, layer in layers.items():
            _hook(layer, name, transform, matrices)
        lines.append(f"{transform}: {len(layers)} layers")
    return AppliedTransforms(tuple(lines), frozenset(matrices.names))


def _require_cancelling(transforms: tuple[Transform, ...]) -> None:
    """Raises CheckpointError where queries and keys are not rotated alike."""
    sides: dict[str, set[tuple[object, ...]]] = {"q_attn": set(), "k_cache": set()}
    for one in transforms:
        if one.location in sides:
            sides[one.location].add((one.name, one.kind, one.targets, one.ignore, one.inverse, one.order, one.permuted))
    unpaired = sides["q_attn"] ^ sides["k_cache"]
    random = {one.name for one in transforms if one.location in sides and one.kind == "random-matrix"}
    if unpaired or random:
        name = sorted(random)[0] if random else str(next(iter(unpaired))[0])
        what = next(one for one in transforms if one.name == name and one.location in sides)
        raise CheckpointError(
            f"The transform {what} does not cancel, and fewbit does not transform queries or keys one by one.",
            "Use a checkpoint that rotates q_attn and k_cache alike, or none.",
        )


def _linear_layers(
    stored: StoredCheckpoint, model: nn.Module, place: Callable[[str], str]
) -> Iterator[tuple[str, nn.Linear | QuantizedLinear]]:
    """(name on disk, layer) of every linear layer."""
    for name in stored.modules:
        layer = submodule(model, place(name))
        if isinstance(layer, nn.Linear | QuantizedLinear):
            yield name, layer


def _names(stored: StoredCheckpoint, transform: Transform, name: str) -> bool:
    """Whether the transform means the linear layer of that name on disk."""
    assert stored.format is not None and stored.scheme is not None
    matcher = stored.format.matcher
    called = (name, *stored.scheme.aliases.get(name, ()))

    def meant(patterns: tuple[str, ...]) -> bool:
        return any(matcher(pattern, other, "Linear") for pattern in patterns for other in called)

    return meant(transform.targets) and not meant(transform.ignore)


def _hook(layer: nn.Linear | QuantizedLinear, name: str, transform: Transform, matrices: _Matrices) -> None:
    width = layer.in_features if transform.location == "input" else layer.out_features
    order = transform.order or width
    if width % order or (not transform.is_stored and order & (order - 1)):
        needed = "a divisor" if transform.is_stored else "a power of two that divides it"
        raise CheckpointError(
            f"The transform {transform} has order {order} over the {width} features of {name}, needed {needed}.",
            "The configuration belongs to another model.",
        )
    matrix = matrices.of(name, transform, order) if transform.is_stored else None
    module = OnlineTransform(order, getattr(torch, transform.dtype), matrix)
    layer.add_module(f"{transform.name}_{transform.location}", module)
    if transform.location == "input":
        layer.register_forward_pre_hook(lambda _, inputs: (module(inputs[0]), *inputs[1:]), prepend=True)
    else:
        layer.register_forward_hook(lambda _layer, _inputs, output: module(output))


class _Matrices:
    """The stored matrices of a checkpoint's transforms; modules share what is stored below the first of them.

    Attributes:
        names: on disk, of matrices and permutations, those of queries and keys included.
    """

    def __init__(self, stored: StoredCheckpoint, checkpoint: CheckpointFormat) -> None:
        self.files = stored.folder
        self._below: dict[Transform, list[tuple[str, str]]] = {one: [] for one in stored.transforms if one.is_online}
        self._read: dict[tuple[Transform, int], Tensor] = {}
        modules = {name.rpartition(".")[0] for name in stored.modules}  # a matrix is a module of its own by its name
        for transform, found in self._below.items():
            for module in sorted(modules):
                names = checkpoint.transform_tensors(module, transform)
                if names[0] in self.files.headers:
                    found.append(names)
        self.names = {name for found in self._below.values() for pair in found for name in pair} & {*self.files.headers}

    def of(self, module: str, transform: Transform, order: int) -> Tensor:
        """The matrix of a transform, its factor, permutation and inverse applied.

        Raises:
            CheckpointError: it is missing.
        """
        if (transform, order) not in self._read:
            self._read[transform, order] = self._matrix(module, transform, order)
        return self._read[transform, order]

    def _matrix(self, module: str, transform: Transform, order: int) -> Tensor:
        alike = (
            other
            for other in self._below
            if (other.name, other.kind) == (transform.name, transform.kind)
            and (other.inverse == transform.inverse or transform.kind != "random-matrix")
        )
        stored = [pair for other in (transform, *alike) for pair in self._below[other]]
        for name, permutation in stored:
            if self.files.headers[name].shape != (order, order):
                continue
            matrix = self.files.load(name)
            if transform.kind == "random-matrix":
                return matrix  # the inverse, where it is the inverse that is multiplied
            if transform.permuted:
                matrix = self._permuted(matrix, permutation)
            matrix = matrix.T if transform.inverse else matrix
            return (matrix.double() / order**0.5).to(matrix.dtype).contiguous()
        raise CheckpointError(
            f"The transform {transform} needs its matrix of order {order} for {module}, and no tensor holds it.",
            "Get the whole folder.",
        )

    def _permuted(self, matrix: Tensor, name: str) -> Tensor:
        headers: Mapping[str, object] = self.files.headers
        if name not in headers:
            raise CheckpointError(f"{name} is missing, by which a transform is permuted.", "Get the whole folder.")
        order = self.files.load(name).long()
        if sorted(order.tolist()) != list(range(len(matrix))):
            raise CheckpointError(f"{name} is no permutation of {len(matrix)}.", "The file is damaged.")
        return matrix[order][:, order]
