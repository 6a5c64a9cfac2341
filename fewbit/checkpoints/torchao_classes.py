"""torchao: from the JSON that describes a tensor subclass to the key of a layer.

Source: torchao 0.18 (`quantize_/workflows`, `prototype/mx_formats`, `quantization/quant_api.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fewbit.checkpoints.dtypes import SCALE_ELEMENTS
from fewbit.errors import CheckpointError
from fewbit.spec.element import E2M1, E4M3, E5M2, E8M0, F32, Element, integer
from fewbit.spec.granularity import CHANNEL, TENSOR, TOKEN, Granularity, block, group
from fewbit.spec.key import LinearKey, QuantKey, ScaleSpec

CLASSES = (
    "Int8Tensor",
    "IntxUnpackedToInt8Tensor",
    "Float8Tensor",
    "Int4Tensor",
    "MXTensor",
    "NVFP4Tensor",
)
"""The subclasses that fewbit reads."""

_FLOAT8 = {"F8_E4M3": E4M3, "F8_E5M2": E5M2}
_FLOAT_NAMES = {"float8_e4m3fn": E4M3, "float8_e5m2": E5M2, "float4_e2m1fn_x2": E2M1}


def layer_key(module: str, layer: Mapping[str, Any], quant_type: Any) -> LinearKey:
    """The key of a layer.

    Args:
        module: its name.
        layer: the parsed description, and `headers`: part -> [dtype, *shape].
        quant_type: of the configuration, which alone says whether integer zero points mean anything.

    Raises:
        CheckpointError: an attribute has a value that is not supported.
    """
    attributes, headers = layer["_data"], layer["headers"]
    for part in ("qdata", "scale"):
        if part not in headers:
            raise CheckpointError(
                f"{module} is a torchao {layer['_type']}, but its {part} is missing.", "Get it again."
            )
    dtype, *packed = headers["qdata"]
    scale = SCALE_ELEMENTS.get(headers["scale"][0])
    if scale is None or len(packed) != 2:
        raise CheckpointError(
            f"{module} has {headers['scale'][0]} scales and codes of shape {packed}, needed floats and a matrix.",
            "Stacked experts of torchao are not supported.",
        )
    if attributes.get("is_swizzled_scales"):
        raise CheckpointError(
            f"{module} has scales in the order of one GPU's tensor cores (is_swizzled_scales).",
            "Save the model with is_swizzled_scales=False.",
        )
    build = {
        "Int8Tensor": _int8,
        "IntxUnpackedToInt8Tensor": _intx,
        "Float8Tensor": _float8,
        "Int4Tensor": _int4,
        "MXTensor": _mx,
        "NVFP4Tensor": _nvfp4,
    }[layer["_type"]]
    return build(_Layer(module, attributes, headers, dtype, (packed[0], packed[1]), scale, quant_type))


class _Layer:
    """The parts of a description that keys follow from."""

    def __init__(
        self,
        module: str,
        attributes: Mapping[str, Any],
        headers: Mapping[str, Any],
        dtype: str,
        stored_shape: tuple[int, int],
        scale: Element,
        quant_type: Any,
    ) -> None:
        self.module, self.attributes, self.headers = module, attributes, headers
        self.dtype, self.stored_shape, self.scale, self.quant_type = dtype, stored_shape, scale, quant_type

    def unsupported(self, name: str, value: Any, known: str) -> CheckpointError:
        return CheckpointError(f"{self.module}: {name} is {value!r}, which is not supported.", f"Known: {known}.")

    def scales(self) -> ScaleSpec:
        """The scale's granularity from `block_size`, [rows, columns] of a block; empty means the whole tensor."""
        size = self.attributes.get("block_size")
        if size in (None, []):
            return ScaleSpec(self.scale, TENSOR)
        if not (
            isinstance(size, list) and len(size) == 2 and all(type(extent) is int and extent > 0 for extent in size)
        ):
            raise self.unsupported("block_size", size, "[rows, columns]")
        return ScaleSpec(self.scale, _granularity(size[0], size[1], self.stored_shape))


def _granularity(rows: int, columns: int, shape: tuple[int, int]) -> Granularity:
    if columns >= shape[1] and rows == 1:
        return CHANNEL
    if columns >= shape[1] and rows >= shape[0]:
        return TENSOR
    return group(columns) if rows == 1 else block(rows, columns)


def _int8(layer: _Layer) -> LinearKey:
    return LinearKey(QuantKey(integer(8), layer.scales()), _activation(layer))


def _intx(layer: _Layer) -> LinearKey:
    target = _data(layer.attributes.get("target_dtype"))
    if target not in {f"int{bits}" for bits in range(2, 9)}:
        raise layer.unsupported("target_dtype", target, "int2 to int8")
    zero_point = layer.headers.get("zero_point", ["I8"])[0]
    if zero_point != "I8":
        raise layer.unsupported("the zero points' dtype", zero_point, "I8")
    activation = _data(layer.attributes.get("activation_quantization"))
    if activation not in (None, "INT8_ASYM_PER_TOKEN", "int8_asym_per_token"):
        raise layer.unsupported("activation_quantization", activation, "INT8_ASYM_PER_TOKEN")
    key = QuantKey(integer(int(target.removeprefix("int"))), layer.scales(), symmetric=_is_symmetric(layer))
    per_token = QuantKey(integer(8), ScaleSpec(F32, TOKEN, dynamic=True), symmetric=False)
    return LinearKey(key, per_token if activation else None)


def _float8(layer: _Layer) -> LinearKey:
    if layer.dtype not in _FLOAT8:
        raise layer.unsupported("the codes' dtype", layer.dtype, ", ".join(_FLOAT8))
    return LinearKey(QuantKey(_FLOAT8[layer.dtype], layer.scales()), _activation(layer))


def _int4(layer: _Layer) -> LinearKey:
    size = layer.attributes.get("block_size") or [0, 0]
    if len(size) != 2 or size[0] != 1 or type(size[1]) is not int or size[1] < 1:
        raise layer.unsupported("block_size", size, "[1, columns]")
    # Asymmetric, but by float minima rather than by zero points. Activations that the layer may quantize at run time
    # (activation_dtype) are the library's choice of a kernel.
    return LinearKey(QuantKey(integer(4), ScaleSpec(layer.scale, group(size[1]))))


def _mx(layer: _Layer) -> LinearKey:
    name = _data(layer.attributes.get("elem_dtype"))
    if name not in _FLOAT_NAMES or layer.scale != E8M0:
        raise layer.unsupported("elem_dtype", name, ", ".join(_FLOAT_NAMES))
    key = QuantKey(_FLOAT_NAMES[name], ScaleSpec(E8M0, group(int(layer.attributes.get("block_size", 32)))))
    dynamic = ScaleSpec(E8M0, key.granularity, dynamic=True)
    quantized = layer.attributes.get("act_quant_kwargs")
    element = _FLOAT_NAMES.get(_data((_data(quantized) or {}).get("elem_dtype")), key.element) if quantized else None
    return LinearKey(key, QuantKey(element, dynamic) if element else None)


def _nvfp4(layer: _Layer) -> LinearKey:
    if layer.scale != E4M3:
        raise layer.unsupported("the scales' dtype", layer.headers["scale"][0], "F8_E4M3")
    groups = group(int(layer.attributes.get("block_size", 16)))
    second = ScaleSpec(F32, TENSOR) if "per_tensor_scale" in layer.headers else None
    key = QuantKey(E2M1, ScaleSpec(E4M3, groups), second)
    if not layer.attributes.get("act_quant_kwargs"):
        return LinearKey(key)
    static = "act_per_tensor_scale" in layer.headers
    activation = QuantKey(E2M1, ScaleSpec(E4M3, groups, dynamic=True), ScaleSpec(F32, TENSOR, dynamic=not static))
    return LinearKey(key, activation)


def _activation(layer: _Layer) -> QuantKey | None:
    """The activation key that `act_quant_kwargs` of 8-bit classes describe."""
    wrapped = layer.attributes.get("act_quant_kwargs")
    if wrapped is None:
        return None
    arguments = _data(wrapped) or {}
    float8 = wrapped.get("_type") == "QuantizeTensorToFloat8Kwargs" if isinstance(wrapped, dict) else False
    element = _FLOAT_NAMES.get(_data(arguments.get("float8_dtype")), E4M3) if float8 else integer(8)
    symmetric = float8 or _data(arguments.get("mapping_type")) in (None, "SYMMETRIC", "SYMMETRIC_NO_CLIPPING_ERR")
    if "act_quant_scale" in layer.headers:
        if not symmetric:
            raise layer.unsupported("mapping_type of static activations", "ASYMMETRIC", "SYMMETRIC")
        return QuantKey(element, ScaleSpec(F32, TENSOR))
    granularity = arguments.get("granularity")
    kind = granularity.get("_type") if isinstance(granularity, dict) else None
    match kind:
        case "PerRow" | "PerToken" | None:
            return QuantKey(element, ScaleSpec(F32, TOKEN, dynamic=True), symmetric=symmetric)
        case "PerTensor":
            return QuantKey(element, ScaleSpec(F32, TENSOR, dynamic=True), symmetric=symmetric)
        case "PerBlock":
            columns = (_data(granularity) or {}).get("block_size", [1, 128])[-1]
            return QuantKey(element, ScaleSpec(F32, group(int(columns)), dynamic=True))
    raise layer.unsupported("the activations' granularity", kind, "PerRow, PerTensor, PerBlock")


def _is_symmetric(layer: _Layer) -> bool:
    """Whether the configuration that quantized the layer was symmetric; zero points are read where it does not say."""
    mapping = _mapping_type(layer.quant_type, layer.module)
    return mapping is not None and str(mapping).startswith("SYMMETRIC")


def _mapping_type(quant_type: Any, module: str) -> Any:
    """The weight's mapping type in the configuration of `module`, possibly one of several by name."""
    config = quant_type.get("default", quant_type) if isinstance(quant_type, dict) else None
    data = _data(config)
    if not isinstance(data, dict):
        return None
    for names in ("fqn_to_config", "module_fqn_to_config"):
        if isinstance(data.get(names), dict):
            by_name = data[names]
            exact = by_name.get(module, by_name.get(f"{module}.weight"))
            # Expressions may name the module, too; with several configurations only an exact name is sure.
            return _mapping_type(exact, module) if exact is not None else None
    return _data(data.get("weight_mapping_type", data.get("mapping_type")))


def _data(value: Any) -> Any:
    """What torchao wraps as {"_type": ..., "_data": value}."""
    return value["_data"] if isinstance(value, dict) and "_data" in value else value
