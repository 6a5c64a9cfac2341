"""transformers' configuration as GGUF metadata: the inverse of `fewbit_gguf.config`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gguf

from fewbit.errors import OutputError
from fewbit_gguf.config import LLAMA3, llama3_factors
from fewbit_gguf.names import ARCHITECTURES, Architecture

if TYPE_CHECKING:
    from torch import Tensor

_DEFAULTS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": None},
    "yarn": {"factor": None, "original_max_position_embeddings": None, "beta_fast": 32, "beta_slow": 1},
    "llama3": {"factor": None, **LLAMA3},
}
"""What rotary embeddings of each type may say; a value where llama.cpp's files take no other one for granted."""


def architecture_for(config: Any) -> tuple[str, Architecture]:
    """llama.cpp's architecture of a model, by name.

    Raises:
        OutputError: there is none of its family here, or the model has a property that the files cannot state.
    """
    family = config.model_type
    found = next(((name, one) for name, one in ARCHITECTURES.items() if family in one.model_types), None)
    if found is None:
        known = ", ".join(kind for one in ARCHITECTURES.values() for kind in one.model_types)
        raise OutputError(f"fewbit writes no GGUF file of a {family} model.", f"Written: {known}.")
    needed = {"hidden_act": "silu", "partial_rotary_factor": 1.0}
    for name, value in needed.items():
        if getattr(config, name, value) not in (value, None):
            raise OutputError(
                f"The model has {name} {getattr(config, name)!r}, and llama.cpp's {found[0]} computes with {value!r}.",
                "Choose another format.",
            )
    window = getattr(config, "sliding_window", None)
    if window is not None and window < config.max_position_embeddings:
        raise OutputError(
            f"The model attends to {window} tokens at most, and llama.cpp's {found[0]} attends to all.",
            f"Set max_position_embeddings of config.json to {window}, up to which both are the same.",
        )
    return found


def add_metadata(writer: gguf.GGUFWriter, config: Any) -> Tensor | None:
    """States the model's sizes.

    Returns:
        What rotary frequencies are divided by, float32 [head_dim / 2], where a tensor says so; else None.

    Raises:
        OutputError: the rotary embedding is of a kind that the files cannot state.
    """
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_type("model")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(getattr(config, "num_key_value_heads", None) or heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(head_dim)
    if head_dim * heads != config.hidden_size or config.model_type == "qwen3":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    return _add_rope(writer, dict(config.rope_parameters), head_dim)


def _add_rope(writer: gguf.GGUFWriter, parameters: dict[str, Any], head_dim: int) -> Tensor | None:
    kind, theta = parameters.get("rope_type", "default"), float(parameters["rope_theta"])
    said = {name: value for name, value in parameters.items() if name not in ("rope_type", "rope_theta")}
    allowed = _DEFAULTS.get(kind)
    strange = [
        name
        for name, value in said.items()
        if value is not None and (allowed is None or name not in allowed or allowed[name] not in (None, value))
    ]
    if allowed is None or strange:
        raise OutputError(
            f"The rotary embedding is {kind!r} with {said}, which a GGUF file cannot state.",
            f"Stated: {', '.join(_DEFAULTS)}, with their usual parameters.",
        )
    writer.add_rope_freq_base(theta)
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(float(said["factor"]))
        if said.get("original_max_position_embeddings"):
            writer.add_rope_scaling_orig_ctx_len(said["original_max_position_embeddings"])
    return llama3_factors(float(said["factor"]), theta, head_dim // 2) if kind == "llama3" else None
