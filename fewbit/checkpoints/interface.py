"""The contract of a checkpoint format: a pure translation between tensors on disk and hub records.

A format describes the tensors it owns and translates; it opens no file, knows no model and no kernel. One file of this
folder holds one format, and the registry finds it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fewbit.errors import OutputError
from fewbit.numerics import QuantizedTensor
from fewbit.spec.element import Element
from fewbit.spec.key import LinearKey, QuantKey
from fewbit.spec.layout import TensorSpec
from fewbit.spec.pattern import Matcher, matches
from fewbit.spec.scheme import Scheme
from fewbit.spec.transform import Transform

if TYPE_CHECKING:
    from torch import Tensor

    from fewbit.checkpoints.files import CheckpointFiles  # which imports this module


@dataclass(frozen=True)
class TensorHeader:
    """What a file's header says of one tensor: safetensors' dtype name (`BF16`, `F8_E4M3`, `I32`, ...) and shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StoredLayer:
    """What a quantized layer of a checkpoint is.

    Attributes:
        key: how it is quantized.
        variant: which of the format's variants stores it.
        shape: its logical shape [..., N, K] where headers alone do not show it (flattened weights) or it has leading
            axes (stacked experts); empty otherwise.
    """

    key: LinearKey
    variant: str = ""
    shape: tuple[int, ...] = ()


def split_at_last_dot(name: str) -> tuple[str, str]:
    """(module, the tensor's name below it), as nearly every checkpoint names them."""
    module, _, tensor = name.rpartition(".")
    return module, tensor


class CheckpointFormat(ABC):
    """One on-disk format.

    The rule of truth: the tensors that are there decide what a layer is; the configuration says how to read them.
    """

    name: ClassVar[str]
    """What `--format` and recipes call it."""

    quant_methods: ClassVar[tuple[str, ...]]
    """Values of `quantization_config.quant_method` that announce it, lower case."""

    matcher: ClassVar[Matcher] = staticmethod(matches)
    """The format's own rule for target and ignore lists."""

    in_safetensors: ClassVar[bool] = True
    """Whether a folder of safetensors holds it; if not, an opener reads it and may write it; `quantize` does not."""

    writes_layers: ClassVar[bool] = True
    """Whether it can be written for linear layers: not where it holds stacks of experts only, or has no writer."""

    describes_embeddings: ClassVar[bool] = False
    """Whether its configuration can say of an embedding that it is quantized."""

    scale_element: ClassVar[Element | None] = None
    """What the 16-bit scales of presets are stored in; None where they may have the model's dtype."""

    widens: ClassVar[bool] = False
    """Whether it has so few kinds of integers that conversions carry others over as wider ones."""

    writes_order: ClassVar[bool] = False
    """Whether it states which group each input feature belongs to (act-order)."""

    zero_scales: ClassVar[bool] = False
    """Whether the format itself gives a block of zeros, or of tiny numbers, a scale of zero."""

    def completed(self, config: Mapping[str, Any] | None, files: CheckpointFiles) -> Mapping[str, Any] | None:
        """The configuration with what only the weight files say; None where nothing announces this format.

        Args:
            config: the `quantization_config` of this format, or None where no file of the checkpoint has one: a format
                whose writers leave none recognizes its tensors.
            files: headers, and small tensors that describe others.
        """
        return config

    def split(self, name: str) -> tuple[str, str]:
        """(module, the tensor's name below it) of a tensor's name on disk."""
        return split_at_last_dot(name)

    def join(self, module: str, tensor: str) -> str:
        """The inverse of `split`."""
        return f"{module}.{tensor}"

    @abstractmethod
    def scheme(self, config: Mapping[str, Any]) -> Scheme:
        """The scheme that a `quantization_config` describes, patterns as written (see `matcher`).

        Raises:
            CheckpointError: the configuration is not one of this format, or asks for what is not supported.
        """

    def transforms(self, config: Mapping[str, Any]) -> tuple[Transform, ...]:
        """Matrices that weights were multiplied with and activations must be.

        Raises:
            CheckpointError: the configuration's account of them is malformed.
        """
        return ()

    def transform_tensors(self, module: str, transform: Transform) -> tuple[str, str]:
        """Names on disk of a transform's matrix and of its permutation, below the module that has them."""
        raise NotImplementedError(f"{self.name} has no transforms")

    @abstractmethod
    def describe(
        self,
        scheme: Scheme,
        module: str,
        headers: Mapping[str, TensorHeader],
        class_name: str = "Linear",
        shape: tuple[int, int] | None = None,
    ) -> StoredLayer | None:
        """What the module's tensors are.

        Args:
            scheme: from `scheme`.
            module: dotted name on disk.
            headers: the module's tensors, by their name below the module's (`weight_packed`, `weight_scale`, ...).
            class_name: the module's class where a model is known.
            shape: the layer's [N, K] where a model is known; settles what headers leave open.

        Returns:
            The stored layer, or None for a plain (unquantized) one.

        Raises:
            CheckpointError: a scale, zero point or index has no weight to belong to, or the tensors contradict one
                another.
        """

    @abstractmethod
    def specs(self, stored: StoredLayer) -> tuple[TensorSpec, ...]:
        """The tensors that such a layer stores, optional ones included."""

    def roles(self, stored: StoredLayer) -> frozenset[str]:
        """Roles that the records of such a layer may have."""
        return frozenset(spec.role for spec in self.specs(stored))

    @abstractmethod
    def read(self, stored: StoredLayer, tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> QuantizedTensor:
        """The hub record of a layer, codes left in the layout they have on disk.

        Args:
            stored: from `describe`.
            tensors: by name below the module's.
            shape: the layer's logical [N, K], or [E, N, K] for a stack of experts.

        Raises:
            CheckpointError: a tensor has the wrong shape or dtype, or a scale is not finite.
        """

    @abstractmethod
    def write(self, record: QuantizedTensor, key: LinearKey) -> dict[str, Tensor]:
        """The tensors that store a record, by name below the module's; the inverse of `read`."""

    @abstractmethod
    def refuse(self, key: LinearKey, shape: tuple[int, int]) -> str | None:
        """Why this format cannot hold a layer of that key and shape, with the numbers; None where it can."""

    def own_key(self, key: LinearKey) -> LinearKey:
        """The key under which the format stores layers that a preset asks to be `key`, where it has its own."""
        return key

    def caution(self, key: LinearKey, shape: tuple[int, int]) -> str | None:
        """What other readers of the format make of a layer that it can hold, where they are known to refuse it."""
        return None

    def with_embeddings(self, config: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
        """`config`, in which the quantized layers of these names are embeddings and no linear layers."""
        return dict(config)

    def with_kv_cache(self, config: Mapping[str, Any], key: QuantKey) -> dict[str, Any]:
        """`config` with the key of a quantized KV cache.

        Raises:
            OutputError: the format cannot describe one.
        """
        raise OutputError(f"{self.name} cannot describe a KV cache of {key}.", "Leave the KV cache unquantized.")

    def cache_scale(self, attention: str, side: str) -> str:
        """Name on disk of the scale of an attention module's cached keys (side `k`) or values (`v`).

        Raises:
            OutputError: the format stores none.
        """
        raise OutputError(f"{self.name} stores no scales of the KV cache.", "Leave the KV cache unquantized.")

    @abstractmethod
    def config(self, layers: Mapping[str, LinearKey], plain: Sequence[str]) -> dict[str, Any]:
        """The `quantization_config` to write.

        Args:
            layers: module name -> key, every quantized layer.
            plain: names of the linear layers that stay as they are.
        """

    def file_metadata(
        self, headers: Mapping[str, TensorHeader], layers: Mapping[str, LinearKey], dtype: str
    ) -> dict[str, str]:
        """Texts that a weight file carries in its header beside the tensors, where readers of the format ask for them.

        Args:
            headers: of all tensors of this file and of those before it.
            layers: module name -> key, every quantized layer.
            dtype: torch's name of the model's dtype.
        """
        return {}

    def config_of_roles(
        self,
        layers: Mapping[str, LinearKey],
        plain: Sequence[str],
        roles: frozenset[str],
    ) -> dict[str, Any]:
        """`config` for layers whose records have `roles`, where a format's configuration has to announce one of them.

        Args:
            layers, plain: as for `config`.
            roles: of all the layers' records together.
        """
        return self.config(layers, plain)
