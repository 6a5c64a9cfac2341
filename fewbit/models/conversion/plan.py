"""What a conversion will do to each layer, decided before anything is written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fewbit.checkpoints.interface import CheckpointFormat, StoredLayer
from fewbit.errors import OutputError, SchemeError, closest
from fewbit.models.conversion.holding import CannotHoldError, depends_on_scales, hold, without_activations
from fewbit.models.conversion.requantize import cheapest, requantized_key, requantizing_scheme
from fewbit.models.conversion.treatment import CarriedOver, Dequantized, QuantizedAnew, Treatment, dense
from fewbit.models.families import joined_members
from fewbit.models.inspect import natural_order
from fewbit.models.layers import CheckpointLayer, checkpoint_layers, head_name, model_of
from fewbit.models.names import config_dtype
from fewbit.models.stored import StoredCheckpoint
from fewbit.numerics import QuantizedTensor, float_element
from fewbit.numerics.ranges import global_scale_of
from fewbit.packing.registry import unpack_record
from fewbit.spec.element import Element
from fewbit.spec.key import LinearKey
from fewbit.spec.pattern import matches, unmatched
from fewbit.spec.scheme import Scheme

_Kind = tuple[StoredLayer, tuple[int, ...], str]


@dataclass(frozen=True)
class ConvertOptions:
    """What a user asks of a conversion beside the format.

    Attributes:
        requantize: name of a preset for the layers that the format cannot hold; None to refuse them.
        group_size: of `requantize`; -1 for one scale per channel, None for the preset's own.
        dequantize: patterns of layers to write plain, in the model's dtype.
        drop_activations: whether to keep the weights only, so that activations are no longer quantized.
    """

    requantize: str | None = None
    group_size: int | None = None
    dequantize: tuple[str, ...] = ()
    drop_activations: bool = False


class ConversionPlan:
    """What becomes of each layer of a checkpoint.

    Args:
        stored: the checkpoint.
        target: the format to write, or the dtype of a plain checkpoint.
        options: see `ConvertOptions`.

    Attributes:
        layers: every module, in natural order.
        treatments: layer name -> what becomes of it, for every quantized layer.
        scheme: what the configuration to write says, None for a plain checkpoint.
        stated: that configuration, empty for a plain checkpoint.

    Raises:
        OutputError: the format cannot hold a layer, or not all of them together.
        SchemeError: a preset is unknown, or a pattern names no quantized layer.
        ModelError: transformers has no model for the configuration.
    """

    def __init__(
        self, stored: StoredCheckpoint, target: CheckpointFormat | torch.dtype, options: ConvertOptions
    ) -> None:
        self.stored, self.target, self.options = stored, target, options
        online = next((one for one in stored.transforms if one.is_online), None)
        if online is not None:
            raise OutputError(
                f"The checkpoint has the transform {online}, and a converted one would be read without it.",
                "Convert a checkpoint that was quantized without online transforms.",
            )
        self.model = model_of(stored)
        found = checkpoint_layers(stored, self.model)
        self.layers = sorted(found, key=lambda layer: natural_order(layer.name))
        self.dtype = config_dtype(self.model.config)
        self.scheme: Scheme | None = None
        self.stated: dict[str, Any] = {}
        self._roles: frozenset[str] = frozenset()
        if isinstance(target, torch.dtype):
            if options.requantize:
                raise SchemeError("A plain checkpoint has no layers to requantize.", "Leave --requantize out.")
            self.treatments: dict[str, Treatment] = {layer.name: Dequantized(target) for layer in self.quantized}
            return
        self.treatments = self._treatments(target)
        self.stated = self.config(self._roles)
        self.scheme = target.scheme(self.stated)

    @property
    def quantized(self) -> list[CheckpointLayer]:
        return [layer for layer in self.layers if layer.stored is not None]

    @property
    def keys(self) -> dict[str, LinearKey]:
        """Layer name -> the key it gets, for every layer that stays quantized."""
        kept = ((name, one) for name, one in self.treatments.items() if isinstance(one, CarriedOver | QuantizedAnew))
        return {name: one.key for name, one in kept}

    def record(self, layer: CheckpointLayer) -> QuantizedTensor:
        """A quantized layer, read from its file."""
        assert layer.stored is not None
        return self.stored.record(layer.name, layer.stored, layer.shape)

    def _plain_record(self, layer: CheckpointLayer) -> QuantizedTensor:
        return unpack_record(self.record(layer))

    def config(self, roles: frozenset[str]) -> dict[str, Any]:
        """The `quantization_config` to write, for layers whose records have `roles`.

        Raises:
            OutputError: the format cannot say it of all layers together.
        """
        assert isinstance(self.target, CheckpointFormat)
        embeddings = [layer.name for layer in self.layers if layer.embedding and layer.name in self.keys]
        config = self.target.config_of_roles(self.keys, self._plain(), roles)
        return self.target.with_embeddings(config, embeddings) if embeddings else config

    def _plain(self) -> list[str]:
        """Modules with a matrix of weights that end up plain, embeddings excepted; and the head, even if tied."""
        kept = self.keys
        matrices = [
            layer.name
            for layer in self.layers
            if layer.name not in kept and not layer.embedding and (layer.stored or self._is_matrix(layer.name))
        ]
        head, known = head_name(self.model), {layer.name for layer in self.layers}
        return matrices if head is None or head in known else [*matrices, head]

    def _is_matrix(self, module: str) -> bool:
        header = self.stored.modules[module].get("weight")
        return header is not None and len(header.shape) == 2

    def _treatments(self, target: CheckpointFormat) -> dict[str, Treatment]:
        """What becomes of each quantized layer, tried on one layer of each kind."""
        kinds: dict[_Kind, list[CheckpointLayer]] = {}
        plain = self._to_dequantize()
        for layer in self.quantized:
            if layer.name not in plain:
                assert layer.stored is not None
                kinds.setdefault((layer.stored, layer.shape, layer.class_name), []).append(layer)
        found = self._carried(target, kinds, zero_points=False)
        symmetries = {one.key.weight.symmetric for one in found.values() if isinstance(one, CarriedOver)}
        if len(symmetries) == 2 and self._misses_together(target, found):
            # Some formats describe symmetric and asymmetric layers apart, or one of them for the whole model.
            found = self._carried(target, kinds, zero_points=True)
        return found | dict.fromkeys(plain, Dequantized(self.dtype))

    def _misses_together(self, target: CheckpointFormat, found: dict[str, Treatment]) -> bool:
        """Whether the format can say of each layer what it is, but not of all together."""
        keys = {name: one.key for name, one in found.items() if isinstance(one, CarriedOver | QuantizedAnew)}
        try:
            target.config_of_roles(keys, [], self._roles)
        except OutputError:
            return True
        return False

    def _to_dequantize(self) -> set[str]:
        modules = [(layer.name, layer.class_name) for layer in self.quantized]
        for pattern in unmatched(self.options.dequantize, modules):
            names = [name for name, _ in modules]
            raise SchemeError(f"The pattern {pattern!r} matches no quantized layer.", closest(pattern, names[:400]))
        return {module[0] for module in modules if any(matches(one, *module) for one in self.options.dequantize)}

    def _carried(
        self, target: CheckpointFormat, kinds: dict[_Kind, list[CheckpointLayer]], zero_points: bool
    ) -> dict[str, Treatment]:
        """What becomes of each kind; what the format cannot hold is quantized anew where that was asked."""
        treatments: dict[str, Treatment] = {}
        refused: dict[_Kind, str] = {}
        roles: set[str] = set()
        for kind, members in kinds.items():
            first, record, key = members[0], self.record(members[0]), kind[0].key
            if self.options.drop_activations:
                record, key = without_activations(record), LinearKey(key.weight)
            try:
                held = hold(target, record, key, first.name, first.class_name or "Linear", zero_points)
            except CannotHoldError as refusal:
                refused[kind] = refusal.message
                continue
            carried = CarriedOver(target, held.key)
            # What one layer's scales happen to allow, those of others may not.
            reduced = depends_on_scales(record, held.key.weight)
            unlike = next((one for one in members[1:] if reduced and not carried.holds(self._plain_record(one))), None)
            if unlike is not None:
                refused[kind] = f"{target.name} holds {first.name} as {held.key}, and {unlike.name} is no such layer"
                continue
            roles |= held.record.tensors.keys()
            treatments |= {layer.name: carried for layer in members}
        self._roles = frozenset(roles)
        left = [layer for kind in refused for layer in kinds[kind]]
        if left and (not self.options.requantize or any(layer.is_stack for layer in left)):
            raise self._refusal(target, left, list(dict.fromkeys(refused.values())))
        if not left:
            return treatments
        return treatments | self._anew(target, left, self._scale_element(target, treatments))

    def _scale_element(self, target: CheckpointFormat, treatments: Mapping[str, Treatment]) -> Element:
        """What the 16-bit scales of presets are stored in: like those that layers keep, if all are alike."""
        kept = {one.key.weight.scale.element for one in treatments.values() if isinstance(one, CarriedOver)}
        return target.scale_element or (kept.pop() if len(kept) == 1 else float_element(self.dtype))

    def _anew(self, target: CheckpointFormat, layers: list[CheckpointLayer], scale: Element) -> dict[str, Treatment]:
        """`layers` quantized by the preset, their 16-bit scales in `scale`, which the other layers have."""
        assert self.options.requantize is not None
        scheme = requantizing_scheme(self.options.requantize, self.options.group_size, scale)
        keys = {layer.name: requantized_key(scheme, target, layer.name, _matrix(layer)) for layer in layers}
        scales = self._shared_scales(layers, scheme.keys[0])
        return {name: QuantizedAnew(target, key, scales) for name, key in keys.items()}

    def _shared_scales(self, layers: Iterable[CheckpointLayer], key: LinearKey) -> dict[str, Tensor]:
        """Second-level scales that the members of a joined matrix share; none for keys without a second level."""
        if key.weight.global_scale is None:
            return {}
        by_name, joined = {layer.name: layer for layer in layers}, joined_members(self.model)
        shared: dict[str, Tensor] = {}
        for members in dict.fromkeys(joined[name] for name in by_name if name in joined):
            if all(name in by_name for name in members):
                largest = torch.stack([dense(self.record(by_name[name])).abs().amax() for name in members]).amax()
                shared |= dict.fromkeys(members, global_scale_of(largest.reshape(1, 1), key.weight))
        return shared

    def _refusal(self, target: CheckpointFormat, layers: list[CheckpointLayer], reasons: list[str]) -> OutputError:
        example = layers[0]
        assert example.stored is not None
        more = f" and {len(layers) - 1} other layers" if len(layers) > 1 else ""
        rest = f" ({len(reasons) - 1} more reasons for others.)" if len(reasons) > 1 else ""
        if example.is_stack or all(layer.embedding for layer in layers):
            hint = f"--dequantize {example.name} writes it plain."
        else:
            numbers, bits = dense(self.record(example)), example.stored.key.weight.bits_per_weight(example.shape)
            cost = cheapest(
                target, numbers, bits, {_matrix(layer) for layer in layers}, self._scale_element(target, {})
            )
            hint = f"{cost}, measured on this layer." if cost else "No preset fits this format here."
        return OutputError(
            f"{target.name} cannot hold {example.name}{more} as they are: {reasons[0]}.{rest}"
            if more
            else f"{target.name} cannot hold {example.name} as it is: {reasons[0]}.",
            f"{hint} --to bf16 writes all weights dequantized.",
        )


def _matrix(layer: CheckpointLayer) -> tuple[int, int]:
    return layer.shape[-2], layer.shape[-1]
