"""Joining records on N (q, k and v; gate and up), stacking them on E (experts), and taking both apart again.

Members of a joined matrix read one input and may be quantized apart. Where their scales cover single rows, joining is
putting rows under one another. Where one scale covers a whole member, members disagree:

    a second-level scale (NVFP4)        the ratio to the largest goes into the member's first-level scales where these
                                        hold the product exactly; else every row keeps its member's factor
    one scale for the member, integers  becomes a scale of each row
    one scale for the member, floats    all members are rounded anew under the largest scale, and the loss is measured
    static activation scales            the largest, since the input is one

Everything but the two last is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fewbit.numerics.cast import decode, encode
from fewbit.numerics.quantize import dequantize, effective_scale, quantize_with
from fewbit.numerics.restate import restate
from fewbit.numerics.tensor import QuantizedTensor
from fewbit.spec.granularity import CHANNEL, TENSOR, group
from fewbit.spec.key import QuantKey
from fewbit.spec.layout import PLAIN

_OF_ROWS = ("codes", "scale", "zero_point", "minimum")
_OF_COLUMNS = ("order", "pre_scale", "codebook")
_OF_THE_INPUT = ("input_scale", "input_global_scale")


@dataclass(frozen=True)
class Joined:
    """Several records as one, and what that did.

    Attributes:
        record: the members' rows in their order.
        rows: how many rows each member has.
        keys: each member's key.
        ratios: each member's own scale over the largest, where a scale covers a whole member; ones elsewhere.
        sqnr_db: signal to quantization noise of each member against what it was, decibels; None where nothing moved.
        input_ratio: the largest static activation scale over the smallest.
    """

    record: QuantizedTensor
    rows: tuple[int, ...]
    keys: tuple[QuantKey, ...]
    ratios: tuple[float, ...]
    sqnr_db: tuple[float | None, ...]
    input_ratio: float = 1.0

    @property
    def is_exact(self) -> bool:
        """Whether every weight is the number that it was."""
        return all(loss is None for loss in self.sqnr_db)


def refuse_join(records: Sequence[QuantizedTensor]) -> str | None:
    """Why records cannot be joined on N, with what differs; None where they can.

    Args:
        records: in the plain layout.
    """
    first = records[0]
    for other in records[1:]:
        if other.shape[-1] != first.shape[-1]:
            return f"members have {first.shape[-1]} and {other.shape[-1]} input features"
        if other.key != first.key:
            return f"members are {first.key} and {other.key}"
        if other.tensors.keys() != first.tensors.keys():
            return f"only some members have {', '.join(sorted(other.tensors.keys() ^ first.tensors.keys()))}"
        for role in (*_OF_COLUMNS, "input_zero_point"):
            if role in first and not torch.equal(first[role], other[role]):
                return f"members have different {role.replace('_', ' ')}s"
    if any(isinstance(record.tensors[role], QuantizedTensor) for record in records for role in record.tensors):
        return "members have scales of scales"
    return None


def join(records: Sequence[QuantizedTensor]) -> Joined:
    """Records as one, their rows under one another; see the head of this file.

    Args:
        records: at least one, in the plain layout, which `refuse_join` accepts.
    """
    refusal = refuse_join(records)
    assert refusal is None, refusal
    assert all(record.layout == PLAIN and record.zero_point_layout == PLAIN for record in records), "unpack them first"
    rows = tuple(record.shape[-2] for record in records)
    keys = tuple(record.key for record in records)
    agreeing, ratios = _agreeing(_by_rows(records))
    tensors = {
        role: torch.cat([record[role] for record in agreeing], dim=-2) for role in _OF_ROWS if role in agreeing[0]
    }
    one_scale = agreeing[0].key.granularity == TENSOR
    if one_scale:
        tensors |= {role: agreeing[0][role] for role in ("scale", "zero_point", "minimum") if role in tensors}
    tensors |= {role: agreeing[0][role] for role in (*_OF_COLUMNS, "input_zero_point") if role in agreeing[0]}
    input_ratio = 1.0
    for role in _OF_THE_INPUT:
        if role in agreeing[0]:
            scales = torch.stack([record[role] for record in agreeing])
            tensors[role] = scales.amax(0)
            input_ratio = max(input_ratio, float(scales.max() / scales.min()))
    if "global_scale" in agreeing[0]:
        own = agreeing[0].key.global_scale.granularity == CHANNEL
        factors = [record["global_scale"] for record in agreeing]
        tensors["global_scale"] = torch.cat(factors, dim=-2) if own else factors[0]
    shape = (*agreeing[0].shape[:-2], sum(rows), agreeing[0].shape[-1])
    losses = tuple(_sqnr_db(old, new) for old, new in zip(records, agreeing, strict=True))
    return Joined(QuantizedTensor(agreeing[0].key, shape, tensors), rows, keys, ratios, losses, input_ratio)


def split(record: QuantizedTensor, rows: Sequence[int], keys: Sequence[QuantKey] = ()) -> list[QuantizedTensor]:
    """The inverse of `join`: the members of a joined record, each standing for the numbers it has in it.

    Args:
        record: in the plain layout.
        rows: how many rows each member has.
        keys: the members' own keys; a member whose rows share one scale gets its key back.
    """
    assert sum(rows) == record.shape[-2], f"{list(rows)} are not the {record.shape[-2]} rows of the record"
    height = record.key.granularity.rows
    members, start = [], 0
    for index, count in enumerate(rows):
        assert height <= 1 or start % height == 0, f"row {start} lies within a block of {height}"
        tensors = dict(record.tensors)
        for role in _OF_ROWS:
            if role in record and (role == "codes" or record.key.granularity != TENSOR):
                step = 1 if role == "codes" else max(1, height)
                tensors[role] = record[role][..., start // step : -(-(start + count) // step), :].contiguous()
        if record.key.global_scale is not None and record.key.global_scale.granularity == CHANNEL:
            tensors["global_scale"] = record["global_scale"][..., start : start + count, :].contiguous()
        shape = (*record.shape[:-2], count, record.shape[-1])
        member = QuantizedTensor(record.key, shape, tensors)
        members.append(_with_key(member, keys[index]) if keys else member)
        start += count
    return members


def stack(records: Sequence[QuantizedTensor]) -> QuantizedTensor:
    """Records of one key and shape as one with a leading axis E. Nothing is lost but the smaller input scales.

    Args:
        records: at least one, all in one layout, with the same roles.
    """
    first = records[0]
    for other in records[1:]:
        assert (other.key, other.shape, other.layout) == (first.key, first.shape, first.layout), "members differ"
        assert other.tensors.keys() == first.tensors.keys(), "members have different roles"
    tensors: dict[str, Tensor] = {role: torch.stack([record[role] for record in records]) for role in first.tensors}
    for role in _OF_THE_INPUT:
        if role in tensors:
            tensors[role] = tensors[role].amax(0)
    if "codebook" in tensors:  # one table, which all codes point into
        assert (tensors["codebook"] == tensors["codebook"][:1]).all(), "members have different codebooks"
        tensors["codebook"] = tensors["codebook"][0]
    return replace(first, shape=(len(records), *first.shape), tensors=tensors)


def unstack(record: QuantizedTensor) -> list[QuantizedTensor]:
    """The inverse of `stack`."""
    shared = {role: record[role] for role in (*_OF_THE_INPUT, "codebook") if role in record}
    return [
        replace(
            record,
            shape=record.shape[1:],
            tensors={role: record[role][index] for role in record.tensors if role not in shared} | shared,
        )
        for index in range(record.shape[0])
    ]


def _by_rows(records: Sequence[QuantizedTensor]) -> list[QuantizedTensor]:
    """Records whose rectangles do not reach over the seams: blocks that a seam would cut are written out as groups."""
    granularity = records[0].key.granularity
    if granularity.rows > 1 and any(record.shape[-2] % granularity.rows for record in records[:-1]):
        columns = granularity.columns or records[0].shape[-1]
        return [restate(record, record.key.with_granularity(group(columns))) for record in records]
    return list(records)


def _agreeing(records: list[QuantizedTensor]) -> tuple[list[QuantizedTensor], tuple[float, ...]]:
    """Records that share whatever covers a whole member, and each one's own scale over the largest."""
    key = records[0].key
    if key.global_scale is not None:
        return _one_second_level(records)
    if key.granularity != TENSOR:
        return records, (1.0,) * len(records)
    scales = [decode(record["scale"], key.scale.element).abs().reshape(()) for record in records]
    largest = torch.stack(scales).amax()
    ratios = tuple(float(scale / largest) for scale in scales)
    same = all(
        torch.equal(record[role], records[0][role])
        for record in records
        for role in ("scale", "zero_point", "minimum")
        if role in record
    )
    if same:
        return records, ratios
    if key.element.is_integer:
        return [restate(record, key.with_granularity(CHANNEL)) for record in records], ratios
    stored = records[int(torch.stack(scales).argmax())]["scale"]
    return [_under(record, stored) for record in records], ratios


def _under(record: QuantizedTensor, scale: Tensor) -> QuantizedTensor:
    """The record rounded anew under another scale of the whole tensor."""
    if torch.equal(record["scale"], scale):
        return record
    again = quantize_with(dequantize(record), record.key, scale)
    return record.with_tensors(codes=again["codes"], scale=scale)


def _one_second_level(records: list[QuantizedTensor]) -> tuple[list[QuantizedTensor], tuple[float, ...]]:
    """Records under one second-level scale, or each with its own factor for all its rows."""
    key = records[0].key
    assert key.global_scale is not None
    if key.global_scale.granularity != TENSOR:
        return records, (1.0,) * len(records)
    factors = [record["global_scale"] for record in records]
    largest = torch.stack(factors).amax(0)
    ratios = tuple(float(factor / largest) for factor in factors)
    folded = [_folded(record, largest) for record in records]
    if all(record is not None for record in folded):
        return [record for record in folded if record is not None], ratios
    spec = replace(key.global_scale, granularity=CHANNEL)
    own = [
        replace(
            record.with_tensors(global_scale=factor.expand(*record.shape[:-1], 1).contiguous()),
            key=replace(key, global_scale=spec),
        )
        for record, factor in zip(records, factors, strict=True)
    ]
    return own, ratios


def _folded(record: QuantizedTensor, factor: Tensor) -> QuantizedTensor | None:
    """The record under another second-level scale, the ratio in its first-level scales; None unless that is exact."""
    if torch.equal(record["global_scale"], factor):
        return record
    element = record.key.scale.element
    scales = decode(record["scale"], element).double() * (record["global_scale"] / factor)
    stored = encode(scales.float(), element)
    made = record.with_tensors(scale=stored, global_scale=factor)
    finite = bool((decode(stored, element) != 0).eq(scales != 0).all())
    return made if finite and torch.equal(effective_scale(made), effective_scale(record)) else None


def _with_key(member: QuantizedTensor, key: QuantKey) -> QuantizedTensor:
    """The member under its own key, where what its rows have apart is the same for all of them."""
    if member.key == key:
        return member
    tensors = dict(member.tensors)
    if member.key.granularity != key.granularity:
        rows, columns = key.granularity.extents(member.shape)
        height, width = member.key.granularity.extents(member.shape)
        for role in ("scale", "zero_point", "minimum"):
            if role in member:
                tensors[role] = member[role][..., :: max(1, rows // height), :: max(1, columns // width)].contiguous()
    if member.key.global_scale != key.global_scale:
        tensors["global_scale"] = member["global_scale"][..., :1, :].contiguous()
    again = QuantizedTensor(key, member.shape, tensors)
    same = key.scale.element == member.key.scale.element and torch.equal(dequantize(again), dequantize(member))
    return again if same else member


def _sqnr_db(before: QuantizedTensor, after: QuantizedTensor) -> float | None:
    if before is after:
        return None
    numbers = dequantize(before).double()
    noise = (numbers - dequantize(after).double()).square().sum()
    return float(10 * torch.log10(numbers.square().sum() / noise)) if noise > 0 else None
