"""Finding the implementations of a contract in a folder: what makes a new file enough."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from types import ModuleType
from typing import TypeVar

Contract = TypeVar("Contract")


def implementations(package: ModuleType, contract: type[Contract]) -> dict[str, Contract]:
    """One instance of every concrete subclass of `contract` defined in a module of `package`, by its `name`.

    Sub-packages are searched too. Modules are imported in name order, so that the order is the same everywhere.

    Raises:
        RuntimeError: two implementations claim one name.
    """
    found: dict[str, Contract] = {}
    for info in sorted(pkgutil.walk_packages(package.__path__, package.__name__ + "."), key=lambda info: info.name):
        module = importlib.import_module(info.name)
        for _, member in inspect.getmembers(module, inspect.isclass):
            concrete = issubclass(member, contract) and not inspect.isabstract(member)
            if not concrete or member.__module__ != module.__name__ or "name" not in vars(member):
                continue
            name = vars(member)["name"]
            if name in found:
                raise RuntimeError(f"{type(found[name])} and {member} both call themselves {name!r}")
            found[name] = member()
    return found
