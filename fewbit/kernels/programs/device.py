"""What programs need to know of the device that they run on."""

from __future__ import annotations

from functools import cache

import torch
import triton

INTERPRETED = bool(triton.knobs.runtime.interpret)

HAS_ASSEMBLY = not INTERPRETED and torch.version.hip is None and torch.cuda.is_available()
"""Whether programs may contain NVIDIA's assembly."""


@cache
def chains(device: torch.device) -> bool:
    """Whether a kernel may start before the one before it ends: compute capability 9.0."""
    return not INTERPRETED and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
