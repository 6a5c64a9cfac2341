"""torchao: the configurations that make the layers fewbit writes, and the texts that describe these in files' headers.

    IntxUnpackedToInt8Tensor   int2 to int8, groups or one scale a row, with or without zero points
    Int8Tensor                 int8 with one float32 scale a row, activations int8 by token
    Float8Tensor               E4M3 with one float32 scale a row

Source: torchao 0.18 (`core/config.py`, `prototype/safetensors`, `quantization/quant_api.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fewbit.checkpoints.interface import TensorHeader
from fewbit.errors import CheckpointError, OutputError
from fewbit.spec.element import BF16, E4M3, F32, Element, integer
from fewbit.spec.granularity import CHANNEL, group
from fewbit.spec.key import LinearKey, QuantKey, ScaleSpec

_BY_TOKEN = QuantKey.parse("int8:token:f32:dynamic")
_ROW = {"_type": "PerRow", "_version": 1, "_data": {"dim": -1}}
_ROW_OF_TENSORS = {"_type": "PerRow", "_data": {"dim": -1}}
_FLOATS = ("f16", "bf16", "f32")
_INTX, _INT8, _FLOAT8 = "IntxWeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "Float8WeightOnlyConfig"


def class_of(key: LinearKey) -> str | None:
    """The tensor class that a key is written as; None where none is."""
    weight = key.weight
    kind = weight.granularity.kind
    if weight.global_scale is not None or (weight.granularity != CHANNEL and kind != "group"):
        return None
    if key.activation is not None:
        int8 = QuantKey(integer(8), ScaleSpec(F32, CHANNEL))
        return "Int8Tensor" if weight == int8 and key.activation == _BY_TOKEN else None
    if weight == QuantKey(E4M3, ScaleSpec(F32, CHANNEL)):
        return "Float8Tensor"
    widths = {integer(bits) for bits in range(2, 9)}
    return "IntxUnpackedToInt8Tensor" if weight.element in widths and weight.scale.element.name in _FLOATS else None


def configuration(layers: Mapping[str, LinearKey]) -> dict[str, Any]:
    """The `quant_type` of layers: one configuration, or one for each name.

    Raises:
        OutputError: a key is not written.
    """
    each = {name: _configuration(key) for name, key in layers.items()}
    if len({json.dumps(one) for one in each.values()}) <= 1:
        return {"default": next(iter(each.values()), _configuration(LinearKey.parse("int8:channel:bf16")))}
    data = {"fqn_to_config": each, "module_fqn_to_config": each}
    return {"default": {"_type": "FqnToConfig", "_version": 1, "_data": data}}


def configured_keys(quant_type: Any) -> dict[str, LinearKey]:
    """Keys by name of a layer, or by the class of all, that a `quant_type` of `configuration` states.

    Raises:
        CheckpointError: it states something else.
    """
    default = quant_type.get("default") if isinstance(quant_type, dict) else None
    data = default.get("_data") if isinstance(default, dict) else None
    if not isinstance(default, dict) or not isinstance(data, dict):
        raise CheckpointError(f"quant_type is {quant_type!r}, needed a default configuration.", "Mend config.json.")
    if default.get("_type") == "FqnToConfig":
        by_name = data.get("fqn_to_config")
        if not isinstance(by_name, dict):
            raise CheckpointError(f"FqnToConfig names {by_name!r}, needed layers.", "Mend config.json.")
        return {name: _key(one) for name, one in by_name.items()}
    return {"Linear": _key(default)}


def descriptions(
    headers: Mapping[str, TensorHeader], layers: Mapping[str, LinearKey], dtype: str, codes: str
) -> dict[str, str]:
    """The metadata of a file: what each weight is, and the names of all.

    Args:
        headers: of the tensors, by name.
        layers: keys of the quantized layers.
        dtype: that the weights had, by torch's name of it.
        codes: name below a layer of its codes.
    """
    texts: dict[str, str] = {}
    for name, header in headers.items():
        module, _, leaf = name.rpartition(".")
        if module not in layers:
            texts[name] = json.dumps({"_type": "Tensor"})
        elif leaf == codes:
            texts[f"{module}.weight"] = json.dumps(_description(layers[module], header.shape[-1], dtype))
        elif not leaf.startswith("_weight_"):
            texts[name] = json.dumps({"_type": "Tensor"})
    return texts | {"tensor_names": json.dumps(list(texts))}


def _description(key: LinearKey, columns: int, dtype: str) -> dict[str, Any]:
    kind = class_of(key)
    data: dict[str, Any] = {
        "block_size": [1, key.weight.granularity.columns or columns],
        "dtype": _wrapped("torch.dtype", dtype),
    }
    if kind == "IntxUnpackedToInt8Tensor":
        data |= {"target_dtype": _wrapped("torch.dtype", key.weight.element.name), "activation_quantization": None}
    elif kind == "Int8Tensor":
        mapping = _wrapped("MappingType", "SYMMETRIC")
        arguments = {"granularity": _ROW_OF_TENSORS, "mapping_type": mapping, "reduce_range": False}
        data |= {"act_quant_kwargs": _wrapped("QuantizeTensorToInt8Kwargs", arguments), "reduce_range": False}
    else:
        preference = _wrapped("KernelPreference", "AUTO")
        data |= {"mm_config": None, "act_quant_kwargs": None, "kernel_preference": preference}
    parts = ["qdata", "scale"] if kind == "Float8Tensor" else ["qdata", "scale", "zero_point"]
    return {"_type": kind, "_data": data, "_tensor_data_names": parts}


def _configuration(key: LinearKey) -> dict[str, Any]:
    weight = key.weight
    match class_of(key):
        case "IntxUnpackedToInt8Tensor":
            size = weight.granularity.columns
            granularity = _version(1, "PerGroup", {"group_size": size}) if size else _version(1, "PerAxis", {"axis": 0})
            data = {
                "weight_dtype": _wrapped("torch.dtype", weight.element.name),
                "granularity": granularity,
                "mapping_type": _wrapped("MappingType", "SYMMETRIC" if weight.symmetric else "ASYMMETRIC"),
                "scale_dtype": None,
                "intx_packing_format": _wrapped("IntxPackingFormat", "UNPACKED_TO_INT8"),
                "intx_choose_qparams_algorithm": _wrapped("IntxChooseQParamsAlgorithm", "AFFINE"),
            }
            return _version(2, _INTX, data)
        case "Int8Tensor":
            data = {"act_mapping_type": _wrapped("MappingType", "SYMMETRIC"), "granularity": _ROW}
            return _version(2, _INT8, data | {"weight_only_decode": False, "reduce_range": False})
        case "Float8Tensor":
            data = {"weight_dtype": _wrapped("torch.dtype", "float8_e4m3fn"), "granularity": _ROW}
            return _version(2, _FLOAT8, data)
    raise OutputError(f"torchao's files are not written with {key}.", "Choose another format.")


def _key(config: Any) -> LinearKey:
    """The inverse of `_configuration`; scales, of which it says nothing, are those that layers have."""
    kind, data = (config.get("_type"), config.get("_data")) if isinstance(config, dict) else (None, None)
    if kind == _INT8:
        return LinearKey(QuantKey(integer(8), ScaleSpec(F32, CHANNEL)), _BY_TOKEN)
    if kind == _FLOAT8:
        return LinearKey(QuantKey(E4M3, ScaleSpec(F32, CHANNEL)))
    if kind != _INTX or not isinstance(data, dict):
        raise CheckpointError(f"torchao's {kind} is not known.", f"Known: {_INTX}, {_INT8}, {_FLOAT8}.")
    name, mapping = (str(_data(data.get(field))) for field in ("weight_dtype", "mapping_type"))
    granularity = _data(data.get("granularity"))
    size = granularity.get("group_size") if isinstance(granularity, dict) else None
    element: Element | None = {f"int{bits}": integer(bits) for bits in range(2, 9)}.get(name)
    if element is None or (size is not None and (type(size) is not int or size < 1)):
        raise CheckpointError(f"{_INTX} has weight_dtype {name} and group_size {size!r}.", "Mend config.json.")
    scale = ScaleSpec(BF16, group(size) if size else CHANNEL)
    return LinearKey(QuantKey(element, scale, symmetric=mapping.startswith("SYMMETRIC")))


def _wrapped(kind: str, data: Any) -> dict[str, Any]:
    return {"_type": kind, "_data": data}


def _data(value: Any) -> Any:
    return value.get("_data") if isinstance(value, dict) else None


def _version(number: int, kind: str, data: Any) -> dict[str, Any]:
    return {"_type": kind, "_version": number, "_data": data}


def quantization_config(layers: Mapping[str, LinearKey], plain: Sequence[str]) -> dict[str, Any]:
    """The `quantization_config` of transformers."""
    return {
        "quant_method": "torchao",
        "quant_type": configuration(layers),
        "modules_to_not_convert": list(plain) or None,
        "include_input_output_embeddings": False,
        "untie_embedding_weights": False,
    }
