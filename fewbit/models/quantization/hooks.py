"""Watching and changing what modules read and put out, for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

Before = Callable[[Tensor], Tensor | None]
"""Input of a module -> what it reads instead; None leaves it."""

After = Callable[[Tensor, Tensor], Tensor | None]
"""Input and output of a module -> what is handed on instead; None leaves it."""


@contextmanager
def hooked(
    root: nn.Module, before: Mapping[str, Before] | None = None, after: Mapping[str, After] | None = None
) -> Iterator[None]:
    """Meanwhile each named module calls `before` before it runs, and `after` when it has run.

    Args:
        root: a module.
        before, after: path of a module below it -> what is called; its first argument counts as its input.
    """
    handles = [
        root.get_submodule(path).register_forward_pre_hook(partial(_before, call))
        for path, call in (before or {}).items()
    ]
    handles += [
        root.get_submodule(path).register_forward_hook(partial(_after, call)) for path, call in (after or {}).items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _before(call: Before, _module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
    fresh = call(inputs[0])
    return None if fresh is None else (fresh, *inputs[1:])


def _after(call: After, _module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
    return call(inputs[0], output)
