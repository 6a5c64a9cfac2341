"""How an operation finds the way to run a product, and how measurements and tests put another way in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Generic, TypeVar

Layout = TypeVar("Layout")
Way = TypeVar("Way")


class Chosen(Generic[Layout, Way]):
    """Layout, rows of x, device's name -> the way to run that product.

    The schema of an operation holds tensors and a layout and nothing else, so what is tried meanwhile comes from here.

    Args:
        by: chooses where nothing is tried.
    """

    every: ClassVar[list[Chosen[Any, Any]]] = []
    """Those of all operations whose modules are imported."""

    def __init__(self, by: Callable[[Layout, int, str], Way]) -> None:
        self._by = self.usual = by
        Chosen.every.append(self)

    def __call__(self, layout: Layout, tokens: int, device: str) -> Way:
        return self._by(layout, tokens, device)

    @contextmanager
    def by(self, choose: Callable[[Layout, int, str], Way]) -> Iterator[None]:
        """Meanwhile `choose` chooses."""
        before, self._by = self._by, choose
        try:
            yield
        finally:
            self._by = before
