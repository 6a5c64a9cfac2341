"""Every algorithm of this folder by name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import fewbit.algorithms
from fewbit.algorithms.interface import Algorithm
from fewbit.discovery import class_named, implementation_classes


@cache
def algorithms() -> dict[str, type[Algorithm]]:
    """The class of every algorithm by name."""
    return implementation_classes(fewbit.algorithms, Algorithm)


def algorithm(name: str, settings: Mapping[str, Any] | None = None) -> Algorithm:
    """The algorithm of that name with its settings.

    Raises:
        SchemeError: there is none, or a setting does not fit.
    """
    return class_named(algorithms(), name, "algorithm")(settings)
