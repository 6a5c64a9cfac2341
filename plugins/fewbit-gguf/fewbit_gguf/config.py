"""The model's configuration and tokenizer, read by transformers from the file's metadata.

transformers (5.17 to 5.24) leaves out what its own table of keys does not have: the width of heads, scaled rotary
embedding, biases. These are filled in here.
"""

from __future__ import annotations

import copy
import math
import warnings
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig, AutoTokenizer

from fewbit.checkpoints.dtypes import torch_dtype
from fewbit.errors import ModelError
from fewbit.lazy import torch
from fewbit_gguf.header import GgufHeader
from fewbit_gguf.names import ROPE_FACTORS

if TYPE_CHECKING:
    from torch import Tensor

    from fewbit_gguf.tensors import GgufFiles

_PLAIN = ("F32", "F16", "BF16")
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Of Llama 3.1, 3.2 and 3.3; llama.cpp keeps only the factors that follow from them, a file for each rope factor."""


def read_model_config(files: GgufFiles) -> Any:
    """transformers' configuration of a file's model.

    Raises:
        ModelError: transformers cannot read it, or its rotary embedding is of a kind that is not supported.
    """
    header = files.header
    stat = header.path.stat()
    config = copy.deepcopy(_read_config(header.path, stat.st_mtime_ns, stat.st_size))
    vars(config).pop("_model_name_or_path", None)  # the model's title, which is no place to load from
    if f"{header.architecture}.attention.key_length" in header.metadata:
        config.head_dim = header.number("attention.key_length")
    for attribute, tensor in (("attention_bias", "blk.0.attn_q.bias"), ("mlp_bias", "blk.0.ffn_gate.bias")):
        if hasattr(config, attribute):
            setattr(config, attribute, tensor in header.tensors)
    config.rope_parameters = _rope_parameters(files, config)
    config.dtype = _dtype(header)
    return config


def read_tokenizer(path: Path) -> Any:
    """transformers' tokenizer of a file's model.

    Raises:
        ModelError: the file has none that transformers can read.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # transformers tells which metadata it does not use
            return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    except (ImportError, ValueError, OSError, KeyError, TypeError) as error:
        raise ModelError(
            f"transformers cannot read the tokenizer of {path}: {_reason(error)}", "Get a file with a tokenizer."
        ) from error


@lru_cache(maxsize=4)  # transformers needs seconds for it, and loading and verifying a model both ask
def _read_config(path: Path, _modified: int, _size: int) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    except (ImportError, ValueError, OSError, KeyError, TypeError, IndexError) as error:
        raise ModelError(
            f"transformers cannot read the metadata of {path}: {_reason(error)}", "Get another file."
        ) from error


def _reason(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _dtype(header: GgufHeader) -> torch.dtype:
    """The dtype of the file's unquantized matrices; bfloat16 where all are quantized."""
    plain = [tensor for tensor in header.tensors.values() if tensor.type in _PLAIN and len(tensor.shape) > 1]
    return torch_dtype(max(plain, key=lambda tensor: tensor.nbytes).type) if plain else torch.bfloat16


def _rope_parameters(files: GgufFiles, config: Any) -> dict[str, Any]:
    header, parameters = files.header, dict(config.rope_parameters)
    prefix = f"{header.architecture}.rope.scaling"
    kind, factor = header.metadata.get(f"{prefix}.type", "none"), header.metadata.get(f"{prefix}.factor")
    if kind in ("linear", "yarn"):
        if not isinstance(factor, float) or not factor > 0:
            raise ModelError(f"{header.path} has {prefix}.factor {factor!r}, needed a positive number.", "Mend it.")
        parameters |= {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            original = header.number("rope.scaling.original_context_length", config.max_position_embeddings)
            parameters["original_max_position_embeddings"] = original
    elif kind != "none":
        raise ModelError(f"{header.path} scales its rotary embedding by {kind!r}.", "Supported: linear, yarn.")
    if ROPE_FACTORS in files.headers:
        parameters |= _from_factors(files.load(ROPE_FACTORS).float(), parameters["rope_theta"], header.path)
    return parameters


def _from_factors(factors: Tensor, theta: float, path: Path) -> dict[str, Any]:
    """What transformers is to be told so that it divides rotary frequencies by these factors."""
    largest = float(factors.max())
    if bool((factors == 1).all()):
        return {}
    if not torch.allclose(factors, llama3_factors(largest, theta, factors.numel()), rtol=1e-3):
        warnings.warn(
            f"{path}: {ROPE_FACTORS} holds other factors than those of Llama 3; they are not applied", stacklevel=2
        )
        return {}
    return {"rope_type": "llama3", "factor": largest, **LLAMA3}


def llama3_factors(factor: float, theta: float, count: int) -> Tensor:
    """What Llama 3 divides its rotary frequencies by: 1 for short waves, `factor` for long ones."""
    wavelengths = 2 * math.pi * theta ** (torch.arange(count, dtype=torch.float64) / count)
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    waves = LLAMA3["original_max_position_embeddings"] / wavelengths  # how many fit into the original context
    smooth = ((waves - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).float()
