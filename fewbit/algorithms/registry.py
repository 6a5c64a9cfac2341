"""Every algorithm of this folder by name."""

from __future__ import annotations

from functools import cache

import fewbit.algorithms
from fewbit.algorithms.interface import Algorithm
from fewbit.discovery import implementations
from fewbit.errors import SchemeError, closest


@cache
def algorithms() -> dict[str, Algorithm]:
    """Every algorithm by name."""
    return implementations(fewbit.algorithms, Algorithm)


def algorithm(name: str) -> Algorithm:
    """The algorithm of that name.

    Raises:
        SchemeError: there is none.
    """
    found = algorithms().get(name.strip().lower().replace("-", "_"))
    if found is None:
        raise SchemeError(f"Unknown algorithm {name!r}.", closest(name, algorithms()))
    return found
