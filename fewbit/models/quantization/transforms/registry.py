"""Every transformation of this folder by name, and the text form in which users name one with its settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import fewbit.models.quantization.transforms
from fewbit.discovery import class_named, implementation_classes
from fewbit.errors import SchemeError
from fewbit.models.quantization.transforms.interface import Transform


@cache
def transforms() -> dict[str, type[Transform]]:
    """The class of every transformation by name."""
    return implementation_classes(fewbit.models.quantization.transforms, Transform)


def transform(name: str, settings: Mapping[str, Any] | None = None) -> Transform:
    """The transformation of that name with its settings.

    Raises:
        SchemeError: there is none, or a setting does not fit.
    """
    return class_named(transforms(), name, "transformation")(settings)


def parse_transform(text: str) -> Transform:
    """Reads `name` or `name:setting=value,setting=value`.

    Raises:
        SchemeError: it is neither, or see `transform`.
    """
    name, _, given = text.partition(":")
    settings = {}
    for part in filter(None, given.split(",")):
        setting, equals, value = part.partition("=")
        if not equals:
            raise SchemeError(f"Cannot read the setting {part!r} of {name}.", "Write name:setting=value,setting=value.")
        settings[setting.strip()] = value.strip()
    return transform(name, settings)


def of_recipe(records: Iterable[Mapping[str, Any]]) -> list[Transform]:
    """The transformations that a recipe lists, in their order."""
    return [transform(record["name"], record.get("settings")) for record in records]
