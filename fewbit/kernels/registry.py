"""Every kernel and every family, found by folder."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace
from functools import cache

import fewbit.kernels.linear
import fewbit.kernels.moe
import fewbit.kernels.oracles
from fewbit.discovery import implementations
from fewbit.errors import SchemeError
from fewbit.kernels.interface import LinearKernel, LinearRequest
from fewbit.kernels.moe.interface import MoeKernel, MoeRequest
from fewbit.kernels.not_built import not_built
from fewbit.kernels.oracles.family import Family
from fewbit.kernels.select import Choice, Preference, choose
from fewbit.kernels.tuned.table import measured_costs
from fewbit.spec.hardware import Hardware
from fewbit.spec.key import LinearKey


@cache
def linear_kernels() -> dict[str, LinearKernel]:
    """Every linear kernel by name, those that are named in the field and refuse here among them."""
    built = implementations(fewbit.kernels.linear, LinearKernel)  # type: ignore[type-abstract]
    return built | not_built()


@cache
def moe_kernels() -> dict[str, MoeKernel]:
    """Every kernel of experts by name."""
    return implementations(fewbit.kernels.moe, MoeKernel)  # type: ignore[type-abstract]


def choose_moe_kernel(
    request: MoeRequest, hardware: Hardware, preference: Preference = Preference()
) -> Choice[MoeKernel]:
    """The kernel for experts, by their family's order.

    Raises:
        SchemeError: no family of experts covers the key.
        KernelError: see `select.choose`.
    """
    return choose(request, hardware, moe_kernels().values(), moe_family_of(request.key), preference)


def choose_kernel(
    request: LinearRequest, hardware: Hardware, preference: Preference = Preference()
) -> Choice[LinearKernel]:
    """The kernel for a request, among all of them, by the request's family and by what was measured on the device.

    Raises:
        KernelError: see `select.choose`.
    """
    if not preference.costs and not request.batch_invariant:  # measured by other plans
        costs, source = measured_costs(request, hardware, preference.mix)
        preference = replace(preference, costs=costs, cost_source=source)
    return choose(request, hardware, linear_kernels().values(), family_of(request.key), preference)


@cache
def families() -> tuple[Family, ...]:
    """Every family of keys of linear layers, in the order of their files' names."""
    return _declared("FAMILY")


@cache
def moe_families() -> tuple[Family, ...]:
    """Every family of keys of experts, likewise."""
    return _declared("MOE_FAMILY")


def _declared(name: str) -> tuple[Family, ...]:
    package = fewbit.kernels.oracles
    modules = [
        importlib.import_module(f"{package.__name__}.{info.name}") for info in pkgutil.iter_modules(package.__path__)
    ]
    return tuple(getattr(module, name) for module in modules if hasattr(module, name))


def family_of(key: LinearKey) -> Family:
    """The one family of linear layers that covers the key.

    Raises:
        SchemeError: none does.
    """
    return _covering(families(), key, "kernels")


def moe_family_of(key: LinearKey) -> Family:
    """The one family of experts that covers the key.

    Raises:
        SchemeError: none does.
    """
    return _covering(moe_families(), key, "kernels of experts")


def _covering(declared: tuple[Family, ...], key: LinearKey, what: str) -> Family:
    for family in declared:
        if family.covers(key):
            return family
    raise SchemeError(f"No family of {what} covers {key}.", "Add one to fewbit/kernels/oracles.")
