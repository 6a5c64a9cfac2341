"""Values of a `quantization_config`: their types, and what several formats mean by the same key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fewbit.errors import CheckpointError, SchemeError
from fewbit.spec.element import Element, integer
from fewbit.spec.granularity import CHANNEL, Granularity, group


def typed(value: Any, kind: type, where: str) -> Any:
    """`value`, which must be a `kind`; a bool is no int.

    Raises:
        CheckpointError: it is something else.
    """
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise CheckpointError(f"{where} is {value!r}, needed a {kind.__name__}.", "The configuration is malformed.")
    return value


def strings(value: Any, where: str) -> list[str]:
    """`value`, which must be a list of strings.

    Raises:
        CheckpointError: it is something else.
    """
    items = typed(value, list, where)
    return [typed(item, str, where) for item in items]


def names_under(config: Mapping[str, Any], name: str, default: Sequence[str] = ()) -> list[str]:
    """The list of strings under `name`; `default` where it is missing or null.

    Raises:
        CheckpointError: it is something else.
    """
    return list(default) if config.get(name) is None else strings(config[name], name)


def first_given(config: Mapping[str, Any], *names: str) -> Any:
    """The value under the first of `names` that has one; writers and versions spell one setting differently."""
    return next((config[name] for name in names if config.get(name) is not None), None)


def integer_of(bits: Any, where: str) -> Element:
    """The signed integer of a width.

    Raises:
        CheckpointError: there is none.
    """
    try:
        return integer(typed(bits, int, where))
    except SchemeError as error:
        raise CheckpointError(f"{where}: {error.message}", error.hint) from error


def granularity_of(group_size: Any, where: str) -> Granularity:
    """Groups of that many input features; null, -1 and 0 stand for one scale per output feature.

    Raises:
        CheckpointError: it is no such number.
    """
    if group_size in (None, -1, 0):
        return CHANNEL
    if typed(group_size, int, where) < 1:
        raise CheckpointError(f"{where} is {group_size}.", "Needed: a number of input features, or -1 for all of them.")
    return group(group_size)
