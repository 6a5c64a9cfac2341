"""Finding the implementations of a contract: a new file in a folder is enough, and so is an installed plugin.

A plugin is a package that announces classes in an entry point group, in its own pyproject.toml:

    [project.entry-points."fewbit.checkpoint_formats"]
    mine = "my_package.format:MyFormat"
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import pkgutil
import warnings
from collections.abc import Mapping
from types import ModuleType
from typing import TypeVar

from fewbit.errors import SchemeError, closest

Contract = TypeVar("Contract")


def implementation_classes(package: ModuleType, contract: type[Contract]) -> dict[str, type[Contract]]:
    """Every concrete subclass of `contract` defined in a module of `package`, by its `name`.

    Sub-packages are searched too, but for `programs`, which need Triton. Modules are imported in name order, so that
    the order is the same everywhere.

    Raises:
        RuntimeError: two implementations claim one name.
    """
    found: dict[str, type[Contract]] = {}
    for info in sorted(pkgutil.walk_packages(package.__path__, package.__name__ + "."), key=lambda info: info.name):
        if ".programs" in info.name:
            continue
        module = importlib.import_module(info.name)
        for _, member in inspect.getmembers(module, inspect.isclass):
            concrete = issubclass(member, contract) and not inspect.isabstract(member)
            if not concrete or member.__module__ != module.__name__ or "name" not in vars(member):
                continue
            _add(found, member)
    return found


def class_named(found: Mapping[str, type[Contract]], name: str, kind: str) -> type[Contract]:
    """The implementation of that name, as people write it: capitals and hyphens do not matter.

    Args:
        found: see `implementation_classes`.
        name: whose.
        kind: what it is, for the message.

    Raises:
        SchemeError: there is none.
    """
    chosen = found.get(name.strip().lower().replace("-", "_"))
    if chosen is None:
        raise SchemeError(f"Unknown {kind} {name!r}.", closest(name, found))
    return chosen


def implementations(package: ModuleType, contract: type[Contract], group: str = "") -> dict[str, Contract]:
    """One instance of each of `implementation_classes`, by its `name`.

    Args:
        package: the folder.
        contract: what to look for.
        group: entry point group in which plugins announce more of them; see `plugins`.

    Raises:
        RuntimeError: two implementations claim one name.
    """
    found = {name: member() for name, member in implementation_classes(package, contract).items()}
    return found | plugins(group, contract, found) if group else found


def plugins(group: str, contract: type[Contract], own: dict[str, Contract] | None = None) -> dict[str, Contract]:
    """One instance of every class that installed packages announce in an entry point group, by its `name`.

    A plugin that cannot be imported is left out with a warning: it must not stop work that does not need it.

    Args:
        group: the entry point group.
        contract: what the classes must implement.
        own: what is there already, whose names are taken.

    Raises:
        RuntimeError: an entry point names no concrete subclass of `contract`, or two implementations claim one name.
    """
    found: dict[str, type[Contract]] = {name: type(one) for name, one in (own or {}).items()}
    entries = importlib.metadata.entry_points(group=group)
    for entry in sorted(entries, key=lambda entry: (entry.name, entry.value)):
        try:
            member = entry.load()
        except (ImportError, AttributeError) as error:
            warnings.warn(f"The plugin {entry.value} ({group}) cannot be loaded: {error}", stacklevel=2)
            continue
        if not inspect.isclass(member) or not issubclass(member, contract) or inspect.isabstract(member):
            raise RuntimeError(f"{entry.value} in {group} is no concrete {contract.__name__}, found {member!r}")
        _add(found, member)
    return {name: member() for name, member in found.items() if name not in (own or {})}


def _add(found: dict[str, type[Contract]], member: type[Contract]) -> None:
    name = vars(member)["name"]
    if name in found:
        raise RuntimeError(f"{found[name]} and {member} both call themselves {name!r}")
    found[name] = member
