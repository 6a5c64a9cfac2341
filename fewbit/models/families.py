"""Model families: where a decoder's blocks are and which of its projections servers join. One row per architecture.

A decoder whose architecture has no row is understood by its structure: the longest list of equal blocks that hold
linear layers. It then has no joined projections.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from fewbit.errors import ModelError
from fewbit.models.replace import submodule
from fewbit.spec.module_names import members_of

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")


@dataclass(frozen=True)
class ModelFamily:
    """What fewbit knows of an architecture.

    Attributes:
        blocks: path of the list of decoder blocks.
        joined: projections of a block, by their name below it, that servers run as one matrix; they read one input and
            must share what a joined matrix has once (a second-level scale).
        gated: whether a block is x += o(attention(norm(x))), then x += down(act(gate(norm(x))) * up(norm(x))), with RMS
            norms, rotary halves and the names of Llama, a bias or a norm on heads where its module has one.
    """

    blocks: str = "model.layers"
    joined: tuple[tuple[str, ...], ...] = (_QKV, _GATE_UP)
    gated: bool = False


FAMILIES: dict[str, ModelFamily] = {
    "llama": ModelFamily(gated=True),
    "mistral": ModelFamily(gated=True),
    "qwen2": ModelFamily(gated=True),
    "qwen3": ModelFamily(gated=True),
    "gemma2": ModelFamily(),
    "gemma3_text": ModelFamily(),
    "phi3": ModelFamily(joined=()),  # its projections are joined on disk already
    "qwen3_moe": ModelFamily(joined=(_QKV,)),
    "mixtral": ModelFamily(joined=(_QKV,)),
}


def family_of_model(model: PreTrainedModel) -> ModelFamily:
    """The model's row, or what its structure says.

    Raises:
        ModelError: the model has no list of decoder blocks with linear layers.
    """
    row = FAMILIES.get(model.config.get_text_config().model_type)
    if row is not None and isinstance(submodule(model, row.blocks), nn.ModuleList):
        return row
    candidates = [(len(module), path) for path, module in model.named_modules() if _is_block_list(module)]
    if not candidates:
        raise ModelError(
            f"{type(model).__name__} has no list of decoder blocks with linear layers.", "Use a decoder model."
        )
    return ModelFamily(blocks=max(candidates)[1], joined=())


def structure_of(module: nn.Module) -> Hashable:
    """Equal for modules that are made alike: names and types of what is inside, and shapes of parameters."""
    types = tuple((name, type(part)) for name, part in module.named_modules())
    return types, tuple((name, tuple(parameter.shape)) for name, parameter in module.named_parameters())


def blocks_of(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The decoder blocks by path, in order."""
    path = family_of_model(model).blocks
    return {f"{path}.{index}": block for index, block in enumerate(model.get_submodule(path))}


def joined_members(model: PreTrainedModel) -> dict[str, tuple[str, ...]]:
    """Name of a linear layer -> all members of the matrix that servers join it into, itself included."""
    groups: dict[str, tuple[str, ...]] = {}
    for block in blocks_of(model):
        for joined in family_of_model(model).joined:
            members = tuple(f"{block}.{name}" for name in joined)
            groups |= dict.fromkeys(members, members)
    return groups


def member_rows(config: PretrainedConfig, joined: str, rows: int) -> tuple[int, ...]:
    """Output features of each member of a joined projection.

    Args:
        config: the model's.
        joined: path of the projection in the model.
        rows: its output features.

    Raises:
        ModelError: the configuration's heads do not make up the rows.
    """
    if len(members_of(joined)) == 2:
        return rows // 2, rows - rows // 2
    text = config.get_text_config()
    heads = text.num_attention_heads
    cached = getattr(text, "num_key_value_heads", None) or heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    found = (heads * size, cached * size, cached * size)
    if sum(found) != rows:
        raise ModelError(
            f"{joined} has {rows} output features, {heads} and twice {cached} heads of {size} make {sum(found)}.",
            "The checkpoint stores its members apart, and the configuration does not say where each begins.",
        )
    return found


def _is_block_list(module: nn.Module) -> bool:
    if not isinstance(module, nn.ModuleList) or len({type(block) for block in module}) != 1:
        return False
    return any(isinstance(inner, nn.Linear) for inner in module[0].modules())
