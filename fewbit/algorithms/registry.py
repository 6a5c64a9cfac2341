"""Every algorithm of this folder by name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import fewbit.algorithms
from fewbit.algorithms.interface import Algorithm
from fewbit.discovery import implementation_classes
from fewbit.errors import SchemeError, closest


@cache
def algorithms() -> dict[str, type[Algorithm]]:
    """The class of every algorithm by name."""
    return implementation_classes(fewbit.algorithms, Algorithm)


def algorithm(name: str, settings: Mapping[str, Any] | None = None) -> Algorithm:
    """The algorithm of that name with its settings.

    Raises:
        SchemeError: there is none, or a setting does not fit.
    """
    found = algorithms().get(name.strip().lower().replace("-", "_"))
    if found is None:
        raise SchemeError(f"Unknown algorithm {name!r}.", closest(name, algorithms()))
    return found(settings)
