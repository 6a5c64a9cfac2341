"""Norms and gated activations inside the operation that rounds them, where a layer's kernel has one.

A kernel that multiplies 8-bit codes reads its input once to round it; what makes that input, an RMS norm or silu(gate)
times up, is computed in that pass. transformers' own block still runs: the norm's place then hands its input on as it
is, and the joined projection behind it applies the norm; the MLP's place holds one that gives gate and up apart.
"""

from __future__ import annotations

from torch import Tensor, nn
from transformers import PreTrainedModel

from fewbit.kernels.activation.producer import gated, normed
from fewbit.methods.linear import QuantizedLinear
from fewbit.models.families import FAMILIES, blocks_of
from fewbit.models.joint import JoinedProduct, ProjectionPart
from fewbit.models.online_transforms import is_transformed
from fewbit.models.replace import replace_submodule, submodule

_MLP = "mlp"
_NORMS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
"""Norm of a block -> everything that reads it."""


class GatedMlp(nn.Module):
    """down(silu(gate(x)) * up(x)), the product rounded as it is made; stands where a model class has the same.

    Args:
        mlp: what it replaces; its three projections keep their names.
    """

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        down: QuantizedLinear = self.down_proj
        return down.method.apply_produced(down, gate, gated(self.up_proj(x)))


class DeferredNorm(nn.Module):
    """Stands where a model class has an RMS norm that the projection behind it applies: gives its input back."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight, self.epsilon = norm.weight, float(norm.variance_epsilon)

    def forward(self, x: Tensor) -> Tensor:
        return x

    def applied_by(self, layer: QuantizedLinear, x: Tensor) -> Tensor:
        """The layer's product with the normed x."""
        return layer.method.apply_produced(layer, x, normed(self.weight, self.epsilon))


def round_as_made(model: PreTrainedModel) -> int:
    """Puts the two modules above wherever they serve; gives their number.

    Args:
        model: loaded, its layers processed.
    """
    family = FAMILIES.get(model.config.get_text_config().model_type)
    if family is None or not family.gated:
        return 0
    found = 0
    for name, block in blocks_of(model).items():
        mlp = submodule(block, _MLP)
        if mlp is not None and _is_silu(getattr(mlp, "act_fn", None)) and _rounds(submodule(mlp, "down_proj")):
            replace_submodule(model, f"{name}.{_MLP}", GatedMlp(mlp))
            found += 1
        for norm, readers in _NORMS.items():
            product = _product_of([submodule(block, reader) for reader in readers])
            place = submodule(block, norm)
            if product is not None and hasattr(place, "variance_epsilon"):
                product.norm = DeferredNorm(place)
                replace_submodule(model, f"{name}.{norm}", product.norm)
                found += 1
    return found


def _is_silu(module: nn.Module | None) -> bool:
    return isinstance(module, nn.SiLU) or type(module).__name__ == "SiLUActivation"


def _rounds(layer: nn.Module | None) -> bool:
    """Whether the layer's kernel makes and rounds activations at once."""
    if not isinstance(layer, QuantizedLinear) or layer.choice is None or is_transformed(layer):
        return False
    return layer.choice.kernel.rounds_produced


def _product_of(readers: list[nn.Module | None]) -> JoinedProduct | None:
    """The one joined product that all readers are parts of, if its kernel rounds what it is given."""
    products = {reader.product if isinstance(reader, ProjectionPart) else None for reader in readers}
    product = products.pop()
    if products or product is None or not _rounds(submodule(product.owner, product.leaf)):
        return None
    return product
