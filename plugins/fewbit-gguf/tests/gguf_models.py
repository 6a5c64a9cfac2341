"""Tiny models as GGUF files, written with gguf-py from transformers' folders in the way of llama.cpp's converter."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

_CONSTANTS = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}


def write_model(
    folder: Path,
    file: Path,
    kind: str = "F32",
    kinds: Mapping[str, str] | None = None,
    metadata: Mapping[str, int | float | str] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Writes the model of `folder` as `file`.

    Args:
        folder: as `save_pretrained` writes it.
        file: to write.
        kind: type of the matrices: F32, F16, BF16 or a block type.
        kinds: other types, by the last part of GGUF's name of a module (`attn_q`).
        metadata, tensors: what to add.
    """
    config = json.loads((folder / "config.json").read_text())
    family = config["model_type"]
    writer = gguf.GGUFWriter(file, family)
    _add_metadata(writer, family, config)
    for key, value in (metadata or {}).items():
        _add(writer, key, value)
    names = gguf.get_tensor_name_map(_CONSTANTS[family], config["num_hidden_layers"])
    for name, tensor in load_file(folder / "model.safetensors").items():
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, name
        chosen = (kinds or {}).get(theirs.split(".")[-2], kind)
        _add_tensor(writer, theirs, _in_order(family, name, tensor.float().numpy(), config), chosen)
    for name, array in (tensors or {}).items():
        _add_tensor(writer, name, array, "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add(writer: gguf.GGUFWriter, key: str, value: int | float | str) -> None:
    add: Callable[[str, Any], None] = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[
        type(value)
    ]
    add(key, value)


def _add_metadata(writer: gguf.GGUFWriter, family: str, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    if family != "qwen2":
        writer.add_key_length(config["head_dim"])
        writer.add_rope_dimension_count(config["head_dim"])


def _in_order(family: str, name: str, numbers: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """Rows as llama.cpp's converter puts them."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(name.split(".")[-2])
    if family != "llama" or heads is None:
        return numbers
    return numbers.reshape(heads, 2, -1, *numbers.shape[1:]).swapaxes(1, 2).reshape(numbers.shape)


def _add_tensor(writer: gguf.GGUFWriter, name: str, numbers: np.ndarray, kind: str) -> None:
    if numbers.ndim == 1:
        kind = "F32"
    known = gguf.GGMLQuantizationType[kind]
    writer.add_tensor(name, gguf.quants.quantize(numbers, known), raw_dtype=known)
