"""Whether a format holds a layer, and as what: tried by writing it, reading it back and comparing.

A format holds a record if it gives back the same codes and the same numbers. It may hold it under another key that
stands for the same numbers (`numerics.restate`). One thing may be lost: a second-level scale that is a divisor in one
format and a multiplier in the other is rounded to float32 once, and the outcome says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fewbit.checkpoints.dtypes import header_of
from fewbit.checkpoints.interface import CheckpointFormat
from fewbit.errors import FewbitError, OutputError
from fewbit.numerics import QuantizedTensor
from fewbit.numerics.restate import reductions, restate, restatements, widenings
from fewbit.packing.registry import unpack_record
from fewbit.spec.key import LinearKey, QuantKey
from fewbit.spec.scheme import Scheme

ONE_ROUNDING = 2.0**-23
"""How far a float32 may be from the number it was rounded from, relatively, with room for a reciprocal's rounding."""


@dataclass(frozen=True)
class Held:
    """A layer as a format holds it.

    Attributes:
        key: the layer's own key, or a restatement of it.
        tensors: what is stored, by name below the layer's.
        record: what a reader gets.
        rounded: roles whose numbers were rounded to float32, empty where every number is the same.
    """

    key: LinearKey
    tensors: Mapping[str, Tensor]
    record: QuantizedTensor
    rounded: tuple[str, ...] = ()


class CannotHoldError(OutputError):
    """A format has no place for a layer."""


def equivalents(target: CheckpointFormat, record: QuantizedTensor) -> Iterator[QuantKey]:
    """Keys under which a plain record stands for the same numbers, its own first, as far as `target` uses them."""
    yield from restatements(record)
    yield from reductions(record)
    if target.widens:
        yield from widenings(record)


def depends_on_scales(record: QuantizedTensor, key: QuantKey) -> bool:
    """Whether an equivalent key is one that other records under the same key may not have."""
    return key not in restatements(record)


def hold(
    target: CheckpointFormat,
    record: QuantizedTensor,
    key: LinearKey,
    name: str = "layer",
    class_name: str = "Linear",
    zero_points: bool = False,
) -> Held:
    """A record as `target` holds it: under its own key if it can, else under the first of its equivalents that it can.

    Args:
        target: the format.
        record: the layer's, in any layout.
        key: its weight key is the record's.
        name, class_name: of the layer, for the configuration.
        zero_points: whether integers must have zero points, if only zeros.

    Raises:
        CannotHoldError: there is no such key; the message says why the first one is refused.
    """
    if len(record.shape) > 2:
        raise CannotHoldError(f"{target.name} is written for single layers, found a stack of {record.shape[0]} experts")
    shape, reason, plain = (record.shape[-2], record.shape[-1]), "", unpack_record(record)
    for weight in equivalents(target, plain):
        if zero_points and weight.symmetric and weight.element.is_integer:
            continue
        candidate = replace(key, weight=weight)
        refusal = target.refuse(candidate, shape)  # most are refused, and are then not worth restating
        if refusal:
            reason = reason or refusal
            continue
        try:
            return hold_as(target, restate(plain, weight), candidate, name, class_name)
        except CannotHoldError as error:
            reason = reason or error.message
    raise CannotHoldError("; ".join([*_obstacles(target, key, plain), reason]))


def without_activations(record: QuantizedTensor) -> QuantizedTensor:
    """The record without what belongs to quantized activations."""
    kept = {role: tensor for role, tensor in record.tensors.items() if not role.startswith("input_")}
    return replace(record, tensors=kept)


def _obstacles(target: CheckpointFormat, key: LinearKey, record: QuantizedTensor) -> list[str]:
    """What the format would have to have, where taking one thing away makes it hold the layer."""
    found, shape = [], (record.shape[-2], record.shape[-1])
    weight = key.weight
    if not weight.symmetric and not target.refuse(replace(key, weight=replace(weight, symmetric=True)), shape):
        found.append(f"{weight} has zero points, {target.name} has none for such weights")
    weights = (replace(key, weight=one, activation=None) for one in equivalents(target, record))
    if key.activation and any(not target.refuse(one, shape) for one in weights):
        found.append(
            f"activations are quantized to {key.activation}, for which {target.name} has no place beside such weights "
            "(--drop-activations leaves them unquantized)"
        )
    in_order = replace(record, tensors={role: one for role, one in record.tensors.items() if role != "order"})
    if "order" in record and any(
        not target.refuse(replace(key, weight=one), shape) for one in equivalents(target, in_order)
    ):
        found.append(f"the input features are in act-order, for which {target.name} has no place")
    return found


def hold_as(
    target: CheckpointFormat,
    record: QuantizedTensor,
    key: LinearKey,
    name: str,
    class_name: str = "Linear",
    scheme: Scheme | None = None,
) -> Held:
    """A record as `target` holds it under exactly that key.

    Args:
        target, record, key, name, class_name: as for `hold`.
        scheme: what the whole checkpoint's configuration says, None to have one made for this layer alone.

    Raises:
        CannotHoldError: it does not.
    """
    shape = (record.shape[-2], record.shape[-1])
    reason = target.refuse(key, shape)
    if reason:
        raise CannotHoldError(reason)
    try:
        tensors = target.write(record, key)
        if scheme is None:
            scheme = target.scheme(target.config_of_roles({name: key}, [], frozenset(record.tensors)))
        headers = {tensor: header_of(value) for tensor, value in tensors.items()}
        described = target.describe(scheme, name, headers, class_name, shape)
        if described is None or described.key != key:
            read_as = "a plain layer" if described is None else described.key
            raise CannotHoldError(f"{target.name} would be read as {read_as}, needed {key}")
        reread = target.read(described, tensors, shape)
    except CannotHoldError:
        raise
    except FewbitError as error:
        raise CannotHoldError(error.message.rstrip(".")) from error
    return Held(key, tensors, reread, _rounded(target, record, reread))


def _rounded(target: CheckpointFormat, record: QuantizedTensor, reread: QuantizedTensor) -> tuple[str, ...]:
    """Roles that came back rounded to float32.

    Raises:
        CannotHoldError: a role came back different in any other way.
    """
    before, after = unpack_record(record), unpack_record(reread)
    if before.tensors.keys() != after.tensors.keys():
        lost = ", ".join(sorted(before.tensors.keys() ^ after.tensors.keys()))
        raise CannotHoldError(f"{target.name} does not give the {lost} of {record.key} back")
    rounded = []
    for role in before.tensors:
        if before[role].shape != after[role].shape:
            raise CannotHoldError(f"{target.name} gives the {role} of {record.key} back in another shape")
        old, new = _numbers(before[role]), _numbers(after[role])
        if torch.equal(old, new):
            continue
        if "global" not in role or bool(((old - new).abs() > ONE_ROUNDING * old.abs()).any()):
            raise CannotHoldError(f"{target.name} gives the {role} of {record.key} back changed")
        rounded.append(role)
    return tuple(rounded)


def _numbers(tensor: Tensor) -> Tensor:
    """float64 of a tensor of codes or floats; codes that torch holds as narrow floats keep their bits."""
    return (tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor).double()
