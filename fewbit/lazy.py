"""torch, imported when it is first used: it takes seconds, and who only looks at headers and configurations needs none.

Modules that describe files and numbers import it from here. Types are imported from torch itself, for type checkers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["functional", "torch"]

if TYPE_CHECKING:
    import torch
    from torch.nn import functional
else:
    from importlib import import_module
    from types import ModuleType

    class _Later(ModuleType):
        """Stands for a module and imports it when an attribute is asked for."""

        def __getattr__(self, name):
            return getattr(import_module(self.__name__), name)

    torch = _Later("torch")
    functional = _Later("torch.nn.functional")
