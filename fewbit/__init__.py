"""fewbit: one quantization system for LLM inference.

The public functions are loaded when they are first used, so that `import fewbit` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "load": "fewbit.models.load",
    "quantize": "fewbit.models.quantization.quantize",
    "quantize_within": "fewbit.evaluation.gate",
    "convert": "fewbit.models.conversion.convert",
    "verify": "fewbit.evaluation.verify",
    "generate": "fewbit.runtime.generate",
    "perplexity": "fewbit.evaluation.perplexity",
    "preset": "fewbit.spec.presets",
}

__all__ = [
    "__version__",
    "convert",
    "generate",
    "load",
    "perplexity",
    "preset",
    "quantize",
    "quantize_within",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'fewbit' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)
