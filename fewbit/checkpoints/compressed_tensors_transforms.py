"""compressed-tensors: `transform_config`, and the tensors that hold matrices of transforms.

A group has a type and is applied at several places of several modules. Sylvester's matrices are known by their order;
the others, and permutations, are stored below the first module that has them, `<module>.<group>_<location>.weight` and
`.perm`; the other modules share that tensor, which is written once. Random and permuted Hadamard matrices are stored
without the factor 1 / sqrt(order).

Source: compressed-tensors 0.20.1 (`transform/`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fewbit.checkpoints.config_values import strings, typed
from fewbit.errors import CheckpointError, closest
from fewbit.spec.transform import HADAMARD, OFFLINE, ONLINE, Transform

_KINDS = (HADAMARD, "random-hadamard", "random-matrix")
_ARGUMENTS = ("type", "apply", "randomize", "requires_grad", "head_dim", "precision")
_PLACE_ARGUMENTS = ("targets", "location", "inverse", "ignore")
_PRECISIONS = ("float16", "bfloat16", "float32", "float64")


def transforms_of(config: Mapping[str, Any]) -> tuple[Transform, ...]:
    """The transforms of a `quantization_config`, in its order.

    Raises:
        CheckpointError: something in its `transform_config` is malformed or not known, which is named.
    """
    transforms = typed(config.get("transform_config") or {}, dict, "transform_config")
    groups = typed(transforms.get("config_groups") or {}, dict, "transform_config.config_groups")
    return tuple(one for name, group in groups.items() for one in _group(name, group))


def matrix_name(module: str, transform: Transform) -> str:
    """Name on disk of the matrix of a transform that is stored below a module."""
    return f"{module}.{transform.name}_{transform.location}.weight"


def permutation_name(module: str, transform: Transform) -> str:
    """Name on disk of its permutation."""
    return f"{module}.{transform.name}_{transform.location}.perm"


def _group(name: str, value: Any) -> Iterator[Transform]:
    where = f"transform_config.config_groups.{name}"
    group = _known(value, _ARGUMENTS, where)
    kind = group.get("type")
    if kind not in _KINDS:
        raise CheckpointError(f"{where}.type is {kind!r}, which is not supported.", closest(str(kind), _KINDS))
    order = group.get("head_dim")
    if order is not None and not (type(order) is int and order > 0):
        raise CheckpointError(f"{where}.head_dim is {order!r}, needed a positive number.", "Mend the configuration.")
    precision = str(group.get("precision") or "float32").removeprefix("torch.")
    if precision not in _PRECISIONS:
        raise CheckpointError(f"{where}.precision is {precision!r}.", closest(precision, _PRECISIONS))
    permuted = typed(group.get("randomize", False), bool, f"{where}.randomize") and kind != "random-matrix"
    for index, one in enumerate(typed(group.get("apply") or [], list, f"{where}.apply")):
        at = f"{where}.apply[{index}]"
        place = _known(one, _PLACE_ARGUMENTS, at)
        location = place.get("location")
        if location not in (*ONLINE, *OFFLINE):
            raise CheckpointError(f"{at}.location is {location!r}.", closest(str(location), (*ONLINE, *OFFLINE)))
        targets, ignore = (_patterns(place.get(key), f"{at}.{key}") for key in ("targets", "ignore"))
        inverse = typed(place.get("inverse", False), bool, f"{at}.inverse")
        yield Transform(name, kind, location, targets, ignore, inverse, order, permuted, precision)


def _patterns(value: Any, where: str) -> tuple[str, ...]:
    return tuple(strings([value] if isinstance(value, str) else value or [], where))


def _known(value: Any, names: tuple[str, ...], where: str) -> dict[str, Any]:
    found: dict[str, Any] = typed(value, dict, where)
    for name in found:
        if name not in names:
            raise CheckpointError(f"{where} has an unknown argument {name!r}.", closest(name, names))
    return found
