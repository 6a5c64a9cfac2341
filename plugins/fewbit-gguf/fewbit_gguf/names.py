"""Names and orders of rows: where llama.cpp and transformers differ about one and the same tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import gguf
from gguf.constants import MODEL_TENSOR_SKIP

from fewbit.errors import CheckpointError, ModelError
from fewbit.lazy import torch
from fewbit_gguf.header import GgufHeader

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Architecture:
    """What is known of an architecture.

    Attributes:
        known_as: gguf-py's constant.
        model_types: transformers' names of the models that it is written for.
        interleaved: whether query and key rows are in llama.cpp's order, in which the two numbers that rotary position
            embedding turns together are neighbours; transformers keeps them half a head apart.
    """

    known_as: gguf.MODEL_ARCH
    model_types: tuple[str, ...]
    interleaved: bool = False


ARCHITECTURES = {
    "llama": Architecture(gguf.MODEL_ARCH.LLAMA, ("llama", "mistral"), interleaved=True),
    "qwen2": Architecture(gguf.MODEL_ARCH.QWEN2, ("qwen2",)),
    "qwen3": Architecture(gguf.MODEL_ARCH.QWEN3, ("qwen3",)),
}
"""By `general.architecture`. One row and a test are enough for another decoder with the modules below."""

_OUTSIDE = ("model.embed_tokens", "model.norm", "lm_head")
_IN_A_BLOCK = (
    "input_layernorm",
    "post_attention_layernorm",
    *(f"self_attn.{leaf}" for leaf in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    *(f"mlp.{leaf}" for leaf in ("gate_proj", "up_proj", "down_proj")),
)

ROPE_FACTORS = "rope_freqs.weight"
"""What rotary frequencies are divided by (Llama 3.1 and later); the configuration says it in transformers."""


def architecture_of(header: GgufHeader) -> Architecture:
    """The file's architecture.

    Raises:
        ModelError: it is not supported.
    """
    name = header.architecture
    if name not in ARCHITECTURES:
        raise ModelError(
            f"{header.path} holds a model of architecture {name!r}.", f"Supported: {', '.join(ARCHITECTURES)}."
        )
    if header.metadata.get(f"{name}.expert_count", 0) != 0:
        raise ModelError(f"{header.path} holds a {name} model with experts.", "Use a dense one.")
    return ARCHITECTURES[name]


def module_names(header: GgufHeader) -> dict[str, str]:
    """transformers' name of each module by llama.cpp's: `blk.0.attn_q` -> `model.layers.0.self_attn.q_proj`."""
    return names_of(architecture_of(header), _block_count(header))


def names_of(architecture: Architecture, count: int) -> dict[str, str]:
    """As `module_names`, for an architecture and a number of blocks."""
    table = gguf.get_tensor_name_map(architecture.known_as, count)
    inner = (f"model.layers.{index}.{leaf}" for index in range(count) for leaf in _IN_A_BLOCK)
    named = ((table.get_name(module), module) for module in (*_OUTSIDE, *inner))
    return {theirs: module for theirs, module in named if theirs is not None}


def _block_count(header: GgufHeader) -> int:
    count = header.number("block_count")
    if count > len(header.tensors):
        raise CheckpointError(
            f"{header.path} says that it has {count} blocks, but holds {len(header.tensors)} tensors.",
            "Download it again.",
        )
    return count


def is_known_extra(name: str, header: GgufHeader) -> bool:
    """Whether a tensor is one that llama.cpp computes by itself too, so that no module needs it."""
    kinds = (*MODEL_TENSOR_SKIP.get(architecture_of(header).known_as, ()), gguf.MODEL_TENSOR.ROPE_FREQS)
    blocks = range(_block_count(header))
    return any(
        name.rpartition(".")[0] == gguf.TENSOR_NAMES[kind].format(bid=block) for kind in kinds for block in blocks
    )


def head_counts(header: GgufHeader) -> Mapping[str, int]:
    """Heads of the projections whose rows are interleaved, by the last part of transformers' name."""
    architecture = architecture_of(header)
    heads = header.number("attention.head_count")
    return interleaved_heads(architecture, heads, header.number("attention.head_count_kv", heads))


def interleaved_heads(architecture: Architecture, heads: int, key_heads: int) -> Mapping[str, int]:
    """As `head_counts`, for an architecture and its numbers of heads."""
    return {"q_proj": heads, "k_proj": key_heads} if architecture.interleaved else {}


def halves_apart(rows: Tensor, heads: int) -> Tensor:
    """Rows [N, ...] of `heads` heads from llama.cpp's order to transformers'; whole rows move, quantized or not."""
    return rows[_order(rows.shape[0], heads)]


def interleaved(rows: Tensor, heads: int) -> Tensor:
    """The inverse of `halves_apart`."""
    return rows[_order(rows.shape[0], heads).argsort()]


def _order(count: int, heads: int) -> Tensor:
    return torch.arange(count).reshape(heads, -1, 2).transpose(1, 2).reshape(-1)
