"""The decode step: a prompt or one new token as one call of the compiled CPU kernels, for models whose arithmetic they
know.

`obstacles` says in words why a model, or a generation, takes transformers' own path instead.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fewbit.kernels.decoder import (
    HEAD_MULTIPLE,
    CompiledDecoder,
    KeyValueCache,
    StepBlock,
    StepLayer,
    StepSizes,
)
from fewbit.kernels.native import DTYPES, Absent, extension
from fewbit.methods.linear import QuantizedLinear
from fewbit.models.families import blocks_of, family_of_model
from fewbit.models.layers import head_name

_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm")
_HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_STATIC_ROTATIONS = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose frequencies do not depend on how long the text is."""


def obstacles(model: PreTrainedModel, length: int = 0) -> Iterator[str]:
    """Why the compiled step does not run the model; nothing where it does.

    Args:
        model: loaded, or on meta with its layers not yet replaced, where only its arithmetic is looked at.
        length: positions that the cache will hold.
    """
    family = family_of_model(model)
    found = extension()
    if model.device.type not in ("cpu", "meta"):
        yield f"the model is on {model.device.type}, and the step is compiled for CPUs"
    if isinstance(found, Absent):
        yield found.reason
    if not family.gated:
        yield f"the blocks of {model.config.get_text_config().model_type} are not known to be gated ones"
        return
    yield from _config_obstacles(model, length)
    for name, block in blocks_of(model).items():
        yield from _block_obstacles(name, block)
    head = head_name(model)
    if head is None:
        yield f"{type(model).__name__} has no head"
    else:
        yield from _layer_obstacles(head, model.get_submodule(head), _dtype_of(block))


def _config_obstacles(model: PreTrainedModel, length: int) -> Iterator[str]:
    config = model.config.get_text_config()
    if config.hidden_act != "silu":
        yield f"silu is needed between gate and down, found {config.hidden_act}"
    window, layers = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if window and (layers is None or "sliding_attention" in layers) and length > window:
        yield f"{length} positions are more than the sliding window of {window}"
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind not in _STATIC_ROTATIONS:
        yield f"rotary embeddings of a fixed frequency are needed, found {kind}"
    turned = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0)
    if turned != 1:
        yield f"whole heads must be rotated, found a share of {turned}"
    first = next(iter(blocks_of(model).values()))
    if _dtype_of(first) not in DTYPES:
        yield f"activations in bf16, f16 or f32 are needed, found {_dtype_of(first)}"
    size = first.get_submodule("self_attn").head_dim
    if size % HEAD_MULTIPLE:
        yield f"heads of a multiple of {HEAD_MULTIPLE} features are needed, found {size}"


def _dtype_of(block: nn.Module) -> torch.dtype:
    """The dtype of the activations, which is that of the norms."""
    return block.get_submodule(_NORMS[0]).weight.dtype


def _block_obstacles(name: str, block: nn.Module) -> Iterator[str]:
    modules = dict(block.named_modules())
    for part in (*_ATTENTION, *_MLP):
        if part not in modules:
            yield f"{name} has no {part}"
        else:
            yield from _layer_obstacles(f"{name}.{part}", modules[part], _dtype_of(block))


def _layer_obstacles(name: str, layer: nn.Module, dtype: torch.dtype) -> Iterator[str]:
    if isinstance(layer, QuantizedLinear):
        if layer.choice is None or layer.prepared is None:
            yield f"{name} is not loaded"
        elif reason := layer.choice.kernel.refuse_step(layer.key):
            yield f"{name} {reason}"
    elif type(layer) is not nn.Linear:
        yield f"{name} is a {type(layer).__name__}, no linear layer"
    elif layer.weight.dtype != dtype:
        yield f"{name} is {layer.weight.dtype}, the activations are {dtype}"


class DecodeStep:
    """A loaded model's step, for which `obstacles` found nothing.

    Args:
        model: from `fewbit.load`.
        capacity: positions that its cache has room for, prompt included.
    """

    def __init__(self, model: PreTrainedModel, capacity: int) -> None:
        blocks, family = list(blocks_of(model).values()), family_of_model(model)
        decoder = model.get_submodule(family.blocks.rpartition(".")[0])
        attention = blocks[0].get_submodule("self_attn")
        head = model.get_submodule(head_name(model) or "")
        key, query, gate = (
            blocks[0].get_submodule(path).out_features for path in (_ATTENTION[1], _ATTENTION[0], _MLP[0])
        )
        size = attention.head_dim
        sizes = StepSizes(
            dtype=_dtype_of(blocks[0]),
            hidden=blocks[0].get_submodule(_ATTENTION[0]).in_features,
            intermediate=gate,
            heads=query // size,
            key_heads=key // size,
            head_dim=size,
            vocabulary=head.out_features,
            epsilon=blocks[0].get_submodule(_NORMS[0]).variance_epsilon,
            attention_scale=attention.scaling,
        )
        self._embed = model.get_input_embeddings()
        self._decoder = CompiledDecoder(
            sizes, [_step_block(block) for block in blocks], _weight_of(decoder, "norm"), _step_layer(head, sizes.dtype)
        )
        self.cache = KeyValueCache.empty(len(blocks), sizes, capacity)
        self._cosines, self._sines = _angles(decoder.get_submodule("rotary_emb"), capacity, sizes)

    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits [vocabulary] after some more tokens of the text, int64 [T]: its prompt, or the token chosen last."""
        return self._decoder.step(self._embed(tokens), self._cosines, self._sines, self.cache)


def _step_block(block: nn.Module) -> StepBlock:
    present = dict(block.named_modules())
    attention_norm, mlp_norm = (_weight_of(block, name) for name in _NORMS)
    query_norm, key_norm = (_weight_of(block, name) if name in present else None for name in _HEAD_NORMS)
    layers = tuple(_step_layer(present[name], _dtype_of(block)) for name in (*_ATTENTION, *_MLP))
    return StepBlock(attention_norm, mlp_norm, query_norm, key_norm, layers)


def _weight_of(module: nn.Module, norm: str) -> Tensor:
    return module.get_submodule(norm).weight.detach().contiguous()


def _step_layer(layer: nn.Module, dtype: torch.dtype) -> StepLayer:
    bias = None if layer.bias is None else layer.bias.detach().to(dtype).contiguous()
    if isinstance(layer, QuantizedLinear):
        assert layer.choice is not None and layer.prepared is not None
        return StepLayer(kernel=layer.choice.kernel, prepared=layer.prepared, bias=bias)
    return StepLayer(weight=layer.weight.detach().contiguous(), bias=bias)


def _angles(rotary: nn.Module, capacity: int, sizes: StepSizes) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32 [capacity, head_dim / 2], as the model's own module rounds them.

    Raises:
        RuntimeError: the module turns other features than the two halves of a head.
    """
    half = sizes.head_dim // 2
    like = torch.empty(1, dtype=sizes.dtype)
    tables = [table[0].float() for table in rotary(like, torch.arange(capacity)[None])]
    for table in tables:
        if table.shape[-1] != sizes.head_dim or not torch.equal(table[:, :half], table[:, half:]):
            raise RuntimeError("the rotary embedding does not turn the halves of a head alike")
    cosines, sines = (table[:, :half].contiguous() for table in tables)
    return cosines, sines
