"""A checkpoint format that follows from tables: a child says which tensors a key may be stored as, the rest is here.

A child lists, for a key, the ways in which the format stores it (`storages`) and the tensors of each (`weight_specs`,
`activation_specs`). Describing a layer is then a search for the storage that the tensors fit, reading and writing are a
walk over the specs. A format whose hub and disk values differ (a divisor, a transposed scale) overrides `to_hub` and
`to_disk`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from fewbit.checkpoints.dtypes import FLOATS, SCALE_ELEMENTS
from fewbit.checkpoints.interface import CheckpointFormat, StoredLayer, TensorHeader
from fewbit.checkpoints.layer_tensors import misfit, require_finite, require_integer_zero_points, tensors_by_role
from fewbit.errors import CheckpointError, OutputError
from fewbit.lazy import torch
from fewbit.numerics import QuantizedTensor, decode
from fewbit.packing.registry import pack_record
from fewbit.spec.element import integer
from fewbit.spec.granularity import CHANNEL, TENSOR
from fewbit.spec.key import LinearKey
from fewbit.spec.layout import PLAIN, Layout, TensorSpec
from fewbit.spec.scheme import Scheme

if TYPE_CHECKING:
    from torch import Tensor

_SCALES = ("scale", "input_scale")


class LinearFormat(CheckpointFormat):
    """See the head of this file."""

    codes_names: ClassVar[tuple[str, ...]] = ("weight",)
    """Names that the tensor of codes may have."""

    scale_names: ClassVar[tuple[str, ...]] = ("weight_scale",)
    """Names that the tensor of first-level scales may have."""

    unsupported: ClassVar[Mapping[str, tuple[str, str]]] = {}
    """Tensors that change a layer's numbers in a way fewbit cannot run: name -> (what it is, what to do)."""

    companions: ClassVar[frozenset[str]]
    """Names of tensors that mean nothing without a quantized weight, `scale_names` included."""

    @abstractmethod
    def storages(self, key: LinearKey) -> tuple[StoredLayer, ...]:
        """The ways in which the format stores the key, the one it writes first; empty where it cannot."""

    @abstractmethod
    def weight_specs(self, stored: StoredLayer) -> tuple[TensorSpec, ...]:
        """The tensors of the weight."""

    @abstractmethod
    def activation_specs(self, stored: StoredLayer) -> tuple[TensorSpec, ...]:
        """The tensors of static activation quantization; empty where there is none."""

    def refuse_obsolete(self, module: str, key: LinearKey, headers: Mapping[str, TensorHeader]) -> None:
        """Raises CheckpointError for tensors that an obsolete writer gave another meaning under the same names."""

    def variations(self, key: LinearKey, headers: Mapping[str, TensorHeader]) -> Iterator[LinearKey]:
        """Keys one step away from the configured one, which the configuration may have meant."""
        yield from _variations(key)

    def preferred(
        self, storages: list[StoredLayer], scheme: Scheme, headers: Mapping[str, TensorHeader]
    ) -> list[StoredLayer]:
        """Those of several storages which fit alike that the configuration announces; all where it announces none."""
        return [stored for stored in storages if stored.variant == scheme.variant] or storages

    def layouts(self, stored: StoredLayer) -> tuple[Layout, Layout]:
        """Where the bits of codes and of zero points lie on disk."""
        return PLAIN, PLAIN

    def specs(self, stored: StoredLayer) -> tuple[TensorSpec, ...]:
        return (*self.weight_specs(stored), *self.activation_specs(stored))

    def written_as(self, key: LinearKey) -> StoredLayer:
        """How the format writes the key.

        Raises:
            OutputError: it cannot hold it.
        """
        storages = self.storages(key)
        if not storages:
            raise OutputError(f"{self.name} cannot hold {key}.", "Choose another format.")
        return storages[0]

    def describe(
        self,
        scheme: Scheme,
        module: str,
        headers: Mapping[str, TensorHeader],
        class_name: str = "Linear",
        shape: tuple[int, int] | None = None,
    ) -> StoredLayer | None:
        for tensor in self.unsupported.keys() & headers.keys():
            what, hint = self.unsupported[tensor]
            raise CheckpointError(f"{module} stores {tensor}, {what}, which is not supported.", hint)
        if not self._is_quantized(module, headers):
            return None
        configured = scheme.key_for(module, class_name, type(self).matcher)
        as_configured, fitting = self._storages_of_kind(scheme, configured, headers, shape)
        if not as_configured and configured:
            self.refuse_obsolete(module, configured, headers)
        if not fitting:
            raise self._contradiction(module, configured, headers, shape)
        return self._with_activations(module, fitting, headers)

    def _storages_of_kind(
        self,
        scheme: Scheme,
        configured: LinearKey | None,
        headers: Mapping[str, TensorHeader],
        shape: tuple[int, int] | None,
    ) -> tuple[bool, list[StoredLayer]]:
        """Whether a module's tensors fit the configuration, and storages of one key that they fit in any case.

        Found once for all modules with such tensors: a checkpoint has thousands of a few kinds.
        """
        kind = (self.name, id(configured), tuple(headers.items()), shape)  # the scheme holds its keys
        if kind not in scheme.derived:
            # A module that the configuration leaves out, or gives a key that its tensors contradict, may still be
            # stored under a key that the configuration gives to others.
            fitting = self._fitting([*([configured] if configured else []), *scheme.keys], headers, shape)
            as_configured = bool(fitting)
            if not fitting and configured:
                near = self._fitting(self.variations(configured, headers), headers, shape)
                fitting = near if len({stored.key for stored in near}) == 1 else []
            fitting = self.preferred(fitting, scheme, headers) if fitting else []
            scheme.derived[kind] = as_configured, [one for one in fitting if one.key == fitting[0].key]
        found: tuple[bool, list[StoredLayer]] = scheme.derived[kind]
        return found

    def read(self, stored: StoredLayer, tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> QuantizedTensor:
        weight = stored.key.weight
        specs = self.specs(stored)
        found = tensors_by_role(specs, tensors, shape)
        for spec in specs:
            if spec.role in _SCALES and spec.role in found:
                scales = found[spec.role]
                require_finite(spec.name, decode(scales, weight.scale.element) if spec.role == "scale" else scales)
        layout, zero_point_layout = self.layouts(stored)
        hub = {role: self.to_hub(stored, role, tensor, shape) for role, tensor in found.items()}
        kept = {role: tensor for role, tensor in hub.items() if tensor is not None}
        return QuantizedTensor(weight, shape, kept, layout, zero_point_layout)

    def write(self, record: QuantizedTensor, key: LinearKey) -> dict[str, Tensor]:
        return self.write_as(record, self.written_as(key))

    def write_as(self, record: QuantizedTensor, stored: StoredLayer) -> dict[str, Tensor]:
        """The tensors that store a record in that very way, one of `storages`."""
        key, specs = stored.key, self.specs(stored)
        for role in record.tensors:
            if role not in {spec.role for spec in specs}:
                raise OutputError(f"{self.name} has no place for the {role} of {key}.", "Choose another format.")
        require_integer_zero_points(self.name, record, key)
        layouts = self.layouts(stored)
        if (record.layout, record.zero_point_layout) != layouts:
            record = pack_record(record, *layouts)
        written = {}
        for spec in specs:
            tensor = self.to_disk(stored, spec, record)
            if tensor is not None:
                *lead, rows, columns = record.shape
                written[spec.name] = tensor.reshape((*lead, *spec.shape_of(rows, columns))).contiguous()
            elif not spec.optional:
                raise OutputError(f"{spec.name} of {key} is not known.", "Calibrate first: its scales are static.")
        return written

    def to_hub(self, stored: StoredLayer, role: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor | None:
        """The hub's tensor of a role, or None where the hub keeps none; `tensor` has its spec's shape."""
        match role:
            case "scale":
                return tensor.reshape(stored.key.weight.granularity.scale_shape(shape))
            case "zero_point" if self.layouts(stored)[1] == PLAIN:
                return tensor.reshape(stored.key.weight.granularity.scale_shape(shape))
            case "input_scale":
                return tensor.float().reshape(())
            case "input_zero_point":
                return tensor.reshape(())
        return tensor

    def to_disk(self, stored: StoredLayer, spec: TensorSpec, record: QuantizedTensor) -> Tensor | None:
        """What is written for a spec, in the spec's dtype; None where the record has no tensor of its role."""
        if spec.role not in record:
            return None
        tensor = record[spec.role]
        return tensor.view(torch.float8_e8m0fnu) if spec.dtype == "float8_e8m0fnu" else tensor

    def _is_quantized(self, module: str, headers: Mapping[str, TensorHeader]) -> bool:
        if any(name in headers and headers[name].dtype not in FLOATS for name in self.codes_names):
            return True
        orphans = sorted(self.companions & headers.keys())
        if orphans:
            weight = f"its weight is plain {headers['weight'].dtype}" if "weight" in headers else "it has no weight"
            raise CheckpointError(
                f"{module} stores {', '.join(orphans)}, but {weight}.",
                "The checkpoint is incomplete, or was saved before its weights were compressed.",
            )
        return False

    def _fitting(
        self, keys: Iterable[LinearKey], headers: Mapping[str, TensorHeader], shape: tuple[int, int] | None
    ) -> list[StoredLayer]:
        """Storages of `keys`, their scales in the element that is stored, whose weight tensors are these."""
        return [
            stored
            for stored in self._stored_as(keys, headers)
            if misfit(self.weight_specs(stored), headers, shape) is None
        ]

    def _stored_as(self, keys: Iterable[LinearKey], headers: Mapping[str, TensorHeader]) -> Iterator[StoredLayer]:
        scale = next((headers[name] for name in self.scale_names if name in headers), None)
        element = SCALE_ELEMENTS.get(scale.dtype) if scale else None
        for key in keys:
            yield from self.storages(replace(key, weight=key.weight.with_scale_element(element)) if element else key)

    def _with_activations(
        self, module: str, storages: list[StoredLayer], headers: Mapping[str, TensorHeader]
    ) -> StoredLayer:
        """The first of `storages` whose static activation scales are there too."""
        reasons = [misfit(self.activation_specs(stored), headers) for stored in storages]
        if None in reasons:
            return storages[reasons.index(None)]
        raise CheckpointError(
            f"{module} has static activation scales ({storages[0].key.activation}), but {reasons[0]}.",
            "Quantize again with calibration data that reaches this layer.",
        )

    def _contradiction(
        self,
        module: str,
        configured: LinearKey | None,
        headers: Mapping[str, TensorHeader],
        shape: tuple[int, int] | None,
    ) -> CheckpointError:
        ours = {*self.codes_names, *self.companions}
        held = ", ".join(
            f"{name} {headers[name].dtype}{list(headers[name].shape)}" for name in sorted(ours & {*headers})
        )
        if configured is None:
            return CheckpointError(
                f"{module} is stored quantized ({held}), but the configuration leaves it out and no key of it fits.",
                "Remove the module from the ignore list, or add the group that describes it.",
            )
        storages = self._stored_as([configured], headers)
        reasons = [misfit(self.weight_specs(stored), headers, shape) for stored in storages]
        reason = reasons[0] if reasons else f"{self.name} stores no such key with scales of that dtype"
        return CheckpointError(
            f"{module} should be {configured}, but {reason} (it holds {held}).",
            "The configuration belongs to another checkpoint, or the file is damaged.",
        )


def _variations(key: LinearKey) -> Iterator[LinearKey]:
    """Another width, or one scale per row or tensor."""
    weight = key.weight
    if weight.element.is_integer:
        yield from (replace(key, weight=replace(weight, element=integer(bits))) for bits in range(2, 9))
    yield from (replace(key, weight=weight.with_granularity(granularity)) for granularity in (CHANNEL, TENSOR))
