"""Operations in torch's own table, so that kernels compile, are captured and can be exported.

`Library.define` and `impl` cost about half the dispatch of `torch.library.custom_op`; at decode there are two hundred
calls a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_LIBRARY: Any = torch.library.Library("fewbit", "DEF")  # type: ignore[no-untyped-call]


def define(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Tensor]:
    """Registers `torch.ops.fewbit.<name>` and returns its overload, which is the cheapest thing to call.

    Args:
        schema: `name(Tensor x, ...) -> Tensor`; the operation changes no argument and returns fresh tensors.
        implementation: runs on every device that its arguments live on.
        fake: the same signature; gives the shape and dtype of the result without computing it.
    """
    name = _LIBRARY.define(schema)
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fewbit::{name}", fake, lib=_LIBRARY)
    overload: Callable[..., Tensor] = getattr(torch.ops.fewbit, name).default
    return overload
