"""gpt-oss (`mxfp4`): stacks of experts in MXFP4; every other layer is plain.

A stack's tensors are named after it with an underscore, `...mlp.experts.gate_up_proj_blocks`:

    blocks   uint8 [E, N, K/32, 16], 32 codes of E2M1 in 16 bytes, low nibble first
    scales   uint8 [E, N, K/32], E8M0
    bias     bf16 [E, N], which belongs to the model

Rows of `gate_up_proj` alternate between gate and up; that, too, is the model's affair. Sources: transformers 5.24
(`integrations/mxfp4.py`), vLLM 0.33 (`mxfp4.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from fewbit.checkpoints.config_values import names_under
from fewbit.checkpoints.interface import StoredLayer, TensorHeader
from fewbit.checkpoints.linear_format import LinearFormat
from fewbit.errors import OutputError
from fewbit.numerics import QuantizedTensor
from fewbit.spec.key import LinearKey
from fewbit.spec.layout import PLAIN, ROWS, Extent, Layout, TensorSpec
from fewbit.spec.scheme import Rule, Scheme

if TYPE_CHECKING:
    from torch import Tensor

_KEY = LinearKey.parse("e2m1:group32:e8m0")
_GROUP, _BYTES = 32, 16
_STACK = re.compile(r"(.*\.experts\.\w+_proj)_(blocks|scales|bias)")
_NEVER_QUANTIZED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


class Mxfp4(LinearFormat):
    """See the head of this file."""

    name: ClassVar[str] = "mxfp4"
    quant_methods: ClassVar[tuple[str, ...]] = ("mxfp4", "gpt_oss_mxfp4")
    writes_layers: ClassVar[bool] = False
    codes_names: ClassVar[tuple[str, ...]] = ("blocks",)
    scale_names: ClassVar[tuple[str, ...]] = ("scales",)
    companions: ClassVar[frozenset[str]] = frozenset({"scales"})

    def split(self, name: str) -> tuple[str, str]:
        stack = _STACK.fullmatch(name)
        return (stack[1], stack[2]) if stack else super().split(name)

    def join(self, module: str, tensor: str) -> str:
        stack = f"{module}_{tensor}"
        return stack if _STACK.fullmatch(stack) else super().join(module, tensor)

    def scheme(self, config: Mapping[str, Any]) -> Scheme:
        ignore = names_under(config, "modules_to_not_convert")
        return Scheme(self.name, (Rule((r"re:.*\.experts\.\w+_proj",), _KEY),), tuple(ignore))

    def config(self, layers: Mapping[str, LinearKey], plain: Sequence[str]) -> dict[str, Any]:
        other = next((key for key in layers.values() if key != _KEY), None)
        if other is not None:
            raise OutputError(f"mxfp4 holds {_KEY} and nothing else, found {other}.", "Choose another format.")
        return {"quant_method": "mxfp4", "modules_to_not_convert": list(plain) or _NEVER_QUANTIZED}

    def describe(
        self,
        scheme: Scheme,
        module: str,
        headers: Mapping[str, TensorHeader],
        class_name: str = "Linear",
        shape: tuple[int, int] | None = None,
    ) -> StoredLayer | None:
        """See the contract; the described layer's `shape` is [E, N, K]."""
        blocks = headers.get("blocks")
        if blocks is None or len(blocks.shape) != 4:
            return super().describe(scheme, module, headers, class_name, shape)
        experts, rows, groups, _ = blocks.shape
        of_one = {
            name: TensorHeader(header.dtype, header.shape[1:])
            for name, header in headers.items()
            if header.shape[:1] == (experts,)
        }
        described = super().describe(scheme, module, of_one, class_name, shape)
        return None if described is None else replace(described, shape=(experts, rows, groups * _GROUP))

    def storages(self, key: LinearKey) -> tuple[StoredLayer, ...]:
        return (StoredLayer(key),) if key == _KEY else ()

    def layouts(self, stored: StoredLayer) -> tuple[Layout, Layout]:
        return Layout("dense", 4, "K", 8), PLAIN

    def weight_specs(self, stored: StoredLayer) -> tuple[TensorSpec, ...]:
        groups = Extent("K", 1, _GROUP)
        return (
            TensorSpec("codes", "blocks", (ROWS, groups, Extent(None, _BYTES)), "uint8"),
            TensorSpec("scale", "scales", (ROWS, groups), "uint8"),
        )

    def activation_specs(self, stored: StoredLayer) -> tuple[TensorSpec, ...]:
        return ()

    def to_hub(self, stored: StoredLayer, role: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor | None:
        return tensor.flatten(-2) if role == "codes" else super().to_hub(stored, role, tensor, shape)

    def write(self, record: QuantizedTensor, key: LinearKey) -> dict[str, Tensor]:
        reason = self.refuse(key, record.shape)
        if reason:
            raise OutputError(f"{reason}.", "Choose another format.")
        return super().write(record, key)

    def refuse(self, key: LinearKey, shape: tuple[int, ...]) -> str | None:
        if key != _KEY:
            return f"mxfp4 holds {_KEY} and nothing else, found {key}"
        if len(shape) != 3:
            return f"mxfp4 holds stacks of experts [E, N, K] and no single layer, found {list(shape)}"
        if shape[-1] % _GROUP:
            return f"groups of {_GROUP} weights do not divide K={shape[-1]}"
        return None
