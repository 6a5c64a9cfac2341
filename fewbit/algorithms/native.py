"""The compiled inner loops of the solvers (`csrc/cpu/solve.cpp`), for CPUs with AVX2.

A shared library, made by the package's build and loaded by ctypes; without it the loops run in torch,
with the same results but for the order of sums.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from fewbit.spec.element import Element

VERSION = 1
PATH = Path(__file__).parent / "programs" / "_solve.so"
MOST_FEATURES = 256
"""Of a panel, and of a group whose whole block of H is used."""

_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


class _Element(ctypes.Structure):
    _fields_ = (
        ("is_integer", _INT),
        ("mantissa_bits", _INT),
        ("min_exponent", _INT),
        ("low", _FLOAT),
        ("high", _FLOAT),
    )


class _Panel(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("weight", "factor", "drift", "held", "scale", "zero", "values", "errors")),
        ("features", _LONG),
        ("rows", _LONG),
    )


class _Search(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("weight", "scale", "zero", "blocks", "errors")),
        *((name, _LONG) for name in ("candidates", "groups", "width", "rows")),
        ("diagonal", _INT),
    )


@cache
def _library() -> ctypes.CDLL | None:
    """The library; None where it is missing, of another version, or made for other CPUs."""
    if not PATH.is_file():
        return None
    try:
        library = ctypes.CDLL(str(PATH))
    except OSError:
        return None
    usable = library.fewbit_solve_version() == VERSION and library.fewbit_solve_present()
    return library if usable else None


def takes(*tensors: Tensor | None) -> bool:
    """Whether the library is here and these are float32 tensors of the CPU."""
    present = [tensor for tensor in tensors if tensor is not None]
    return _library() is not None and all(one.is_cpu and one.dtype == torch.float32 for one in present)


def panel(
    weight: Tensor,
    factor: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    element: Element,
    drift: Tensor | None = None,
    held: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `fewbit.algorithms.panels.solve_panel`; at most `MOST_FEATURES` features."""
    inputs = {"weight": weight, "factor": factor, "scale": scale, "zero": zero, "drift": drift, "held": held}
    kept = {name: None if tensor is None else tensor.contiguous() for name, tensor in inputs.items()}
    values, errors = torch.empty(weight.shape), torch.empty(weight.shape)
    pointers = {name: _address(tensor) for name, tensor in kept.items()}
    task = _Panel(**pointers, values=_address(values), errors=_address(errors), features=len(weight))
    task.rows = weight.shape[1]
    _call("fewbit_solve_compensate", task, element)
    return values, errors


def group_errors(weight: Tensor, scale: Tensor, zero: Tensor | None, element: Element, blocks: Tensor | None) -> Tensor:
    """The error of each group under each of C candidates, float32 [C, G, N]; see `fewbit.algorithms.scale_search`.

    Args:
        weight: float32 [G, g, N].
        scale, zero: float32 [C, G, N].
        element: whose numbers are chosen.
        blocks: of H, float32 [G, g, g] with g at most `MOST_FEATURES`, or their diagonals [G, g]; None for ones.
    """
    groups, width, rows = weight.shape
    inputs = {"weight": weight, "scale": scale, "zero": zero, "blocks": blocks}
    kept = {name: None if tensor is None else tensor.contiguous() for name, tensor in inputs.items()}
    errors = torch.empty_like(scale, memory_format=torch.contiguous_format)
    pointers = {name: _address(tensor) for name, tensor in kept.items()}
    task = _Search(**pointers, errors=_address(errors), candidates=len(scale), groups=groups)
    task.width, task.rows = width, rows
    task.diagonal = int(blocks is not None and blocks.dim() == 2)
    _call("fewbit_solve_errors", task, element)
    return errors


def _call(function: str, task: ctypes.Structure, element: Element) -> None:
    floats = () if element.is_integer else (element.mantissa_bits, element.min_exponent)
    described = _Element(int(element.is_integer), *(floats or (0, 0)), element.min, element.max)
    getattr(_library(), function)(ctypes.byref(task), ctypes.byref(described), _INT(torch.get_num_threads()))


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
