"""Whether Triton's programs run on this machine: on a GPU, or in its interpreter."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import pytest
import torch


def interpreter_works() -> bool:
    """Triton is installed and its interpreter takes this numpy: Triton before 3.8 stops at numpy 2.4."""
    try:
        triton, numpy = (tuple(map(int, version(name).split(".")[:2])) for name in ("triton", "numpy"))
    except PackageNotFoundError:
        return False
    return triton >= (3, 8) or numpy < (2, 4)


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

needs_triton = pytest.mark.skipif(
    not torch.cuda.is_available() and not interpreter_works(),
    reason="Triton is not installed, or its interpreter does not take this numpy.",
)
