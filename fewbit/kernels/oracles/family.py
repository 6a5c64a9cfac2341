"""What an oracle file declares: a family of keys, the backends that can serve it, and their order on each platform."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from fewbit.spec.hardware import Platform
from fewbit.spec.key import LinearKey


@dataclass(frozen=True)
class Family:
    """A family of linear keys.

    Attributes:
        name: `int_wna16`, `fp8`, ...
        backends: every backend that can serve the family.
        covers: whether a key belongs to the family; exactly one family covers a key.
        priority: platform -> backends, best first *within* a class of numerics (see `select.choose`); the reference is
            always last and need not be listed.
    """

    name: str
    backends: type[StrEnum]
    covers: Callable[[LinearKey], bool]
    priority: Mapping[Platform, tuple[StrEnum, ...]]

    def position(self, backend: str, platform: Platform) -> int:
        """Place of the backend in the platform's order; unlisted ones come after all listed ones."""
        order = [str(listed) for listed in self.priority.get(platform, ())]
        return order.index(backend) if backend in order else len(order)
