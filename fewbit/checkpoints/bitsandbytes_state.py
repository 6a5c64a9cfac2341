"""bitsandbytes: the JSON state of a 4-bit layer, its codebooks, and absolute maxima that are quantized themselves.

Source: bitsandbytes 0.50.2 (`functional.py`: QuantState, create_normal_map, get_4bit_type, dequantize_4bit).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fewbit.checkpoints.flat_blocks import block_count, collect_blocks, group_of_blocks, spread_blocks
from fewbit.errors import CheckpointError, OutputError
from fewbit.lazy import torch
from fewbit.numerics import QuantizedTensor
from fewbit.numerics.codebooks import CODEBOOKS
from fewbit.spec.element import ELEMENTS, F32
from fewbit.spec.granularity import group
from fewbit.spec.key import QuantKey, ScaleSpec

if TYPE_CHECKING:
    from torch import Tensor

STATE = "quant_state.bitsandbytes__"
"""What precedes the type in the name of a layer's state."""

NESTED_BLOCK = 256
"""Absolute maxima under one second-level maximum."""


@dataclass(frozen=True)
class QuantState:
    """What the JSON beside a 4-bit weight says.

    Attributes:
        kind: nf4 or fp4.
        block: numbers under one absolute maximum.
        shape: of the weight.
        nested_offset: what was subtracted from the absolute maxima before they were quantized; None if they are not.
    """

    kind: str
    block: int
    shape: tuple[int, int]
    nested_offset: float | None = None

    @classmethod
    def of(cls, text: Tensor, name: str) -> QuantState:
        """The state of a uint8 tensor of JSON.

        Raises:
            CheckpointError: it is no such state.
        """
        try:
            data = json.loads(bytes(text.tolist()))
            rows, columns = (int(extent) for extent in data["shape"])
            offset = data.get("nested_offset")
            state = cls(
                data["quant_type"], int(data["blocksize"]), (rows, columns), None if offset is None else float(offset)
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{name} is no quantization state of a matrix: {error}.", "Get it again.") from error
        second = (data.get("nested_blocksize", NESTED_BLOCK), data.get("nested_dtype", "float32"))
        if second != (NESTED_BLOCK, "float32"):
            raise CheckpointError(
                f"{name} has nested blocks of {second[0]} in {second[1]}, needed {NESTED_BLOCK} in float32.",
                "Save the model again with a present bitsandbytes.",
            )
        return state

    def require(self, kind: str, block: int, nested: bool, shape: tuple[int, int]) -> None:
        """Raises CheckpointError where the tensors are not what the state says; `shape` may be one rank's rows."""
        rows = self.shape[0] if shape[0] and self.shape[0] % shape[0] == 0 else -1
        said = (self.kind, block_count(shape, self.block), self.nested_offset is not None, self.shape)
        # The sizes of the tensors tell block sizes apart only where there is more than one block.
        if said != (kind, block_count(shape, block), nested, (rows, shape[1])):
            raise CheckpointError(
                f"The quantization state says {self.kind} in blocks of {self.block} of {list(self.shape)}"
                f"{', nested' if said[2] else ''}; the tensors are {kind} in blocks of {block} of {list(shape)}"
                f"{', nested' if nested else ''}.",
                "The file is damaged, or config.json belongs to another checkpoint.",
            )

    def tensor(self) -> Tensor:
        """The uint8 tensor of JSON; the dtype it names is that of dequantized weights, which a record does not know."""
        data = {"quant_type": self.kind, "blocksize": self.block, "dtype": "bfloat16", "shape": list(self.shape)}
        if self.nested_offset is not None:
            data |= {
                "nested_blocksize": NESTED_BLOCK,
                "nested_dtype": "float32",
                "nested_offset": self.nested_offset,
            }
        return torch.tensor(list(json.dumps(data).encode()), dtype=torch.uint8)


def book_of(record: QuantizedTensor) -> str:
    """nf4 or fp4, by the record's codebook.

    Raises:
        OutputError: it has none, or another.
    """
    if "codebook" in record:
        for kind, values in CODEBOOKS.items():
            if torch.equal(record["codebook"].cpu(), torch.tensor(values, dtype=torch.float32)):
                return kind
    raise OutputError(
        f"bitsandbytes stores codes into the codebooks {' and '.join(CODEBOOKS)}, found "
        f"{'another codebook' if 'codebook' in record else 'none'}.",
        "Choose another format.",
    )


def read_nested(found: Mapping[str, Tensor], shape: tuple[int, int], block: int, state: QuantState) -> QuantizedTensor:
    """Quantized absolute maxima as a record over the groups of the weight's rows [N, K / group].

    Args:
        found: the layer's tensors by role.
        shape: [N, K] of the weight.
        block: numbers under one absolute maximum.
        state: gives the offset.
    """
    codes = spread_blocks(found["scale"], shape, block)
    groups = (codes.shape[0], codes.shape[1])
    outer = NESTED_BLOCK * (block // group_of_blocks(shape[1], block))  # counted in groups
    scale = spread_blocks(found["nested scale"], groups, outer)
    roles = {
        "codes": codes,
        "scale": scale,
        "codebook": found["nested codebook"],
        "minimum": torch.full_like(scale, state.nested_offset or 0.0),
    }
    key = QuantKey(ELEMENTS["uint8"], ScaleSpec(F32, group(group_of_blocks(groups[1], outer))))
    return QuantizedTensor(key, groups, roles)


def write_nested(scale: QuantizedTensor, shape: tuple[int, int], block: int) -> tuple[dict[str, Tensor], float]:
    """The tensors of quantized absolute maxima by name, and their offset; the inverse of `read_nested`.

    Raises:
        OutputError: the record is not one that `read_nested` makes.
    """
    if not {"codes", "scale", "codebook", "minimum"} == scale.tensors.keys() or scale["codebook"].shape != (
        NESTED_BLOCK,
    ):
        raise OutputError(
            f"bitsandbytes stores scales quantized by a codebook of {NESTED_BLOCK}, with an offset; found {scale.key}.",
            "Dequantize the scales first.",
        )
    offset = scale["minimum"].flatten()[0]
    if not bool((scale["minimum"] == offset).all()):
        raise OutputError("bitsandbytes stores one offset for all scales of a layer.", "Dequantize the scales first.")
    groups = (scale.shape[0], scale.shape[1])
    outer = NESTED_BLOCK * (block // group_of_blocks(shape[1], block))
    tensors = {
        "weight.absmax": collect_blocks(scale["codes"], shape, block),
        "weight.nested_absmax": collect_blocks(scale["scale"], groups, outer),
        "weight.nested_quant_map": scale["codebook"],
    }
    return tensors, float(offset)
