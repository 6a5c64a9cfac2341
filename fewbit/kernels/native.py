"""The compiled CPU kernels (`csrc/cpu`): finding, loading and calling the library that the package's build made.

It is a shared library with a plain C interface, loaded by ctypes, so that one build serves every torch. It links
nothing: its threads are those of the OpenMP runtime that torch has loaded already.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

VERSION = 4
"""Of the C interface and of the layout of prepared weights."""

PATH = Path(__file__).with_name("_cpu.so")
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_POINTER, _INT, _LONG = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
_OPERANDS = [_POINTER, _LONG, _INT, _INT, _INT]  # y, tokens, dtype, threads, instruction set


@dataclass(frozen=True)
class Extension:
    """The loaded library.

    Attributes:
        instruction_sets: name -> number, best first, of those that this CPU has.
        linear, integer_linear, decode, experts: its functions; see `csrc/cpu/library.cpp`.
        has_threads: whether it found an OpenMP runtime; without one it runs on one thread.
    """

    instruction_sets: dict[str, int]
    linear: Callable[..., int]
    integer_linear: Callable[..., int]
    decode: Callable[..., int]
    experts: Callable[..., int]
    has_threads: bool


@dataclass(frozen=True)
class Absent:
    """Why there are no compiled kernels."""

    reason: str


@cache
def extension() -> Extension | Absent:
    """The compiled kernels, or why there are none."""
    if not PATH.is_file():
        return Absent(
            "fewbit was installed without its compiled CPU kernels; they need x86-64 Linux and a C++ compiler: install "
            "one and fewbit again"
        )
    try:
        library = ctypes.CDLL(str(PATH))
        found = library.fewbit_cpu_version()
    except (OSError, AttributeError) as error:
        return Absent(f"{PATH.name} cannot be loaded: {error}")
    if found != VERSION:
        return Absent(f"{PATH.name} is version {found} and version {VERSION} is needed: install fewbit again")
    sets = _instruction_sets(library)
    if not sets:
        return Absent("the compiled CPU kernels need AVX2, FMA and F16C, which this CPU lacks")
    library.fewbit_cpu_linear.argtypes = [_POINTER] * 8 + _OPERANDS
    library.fewbit_cpu_integer_linear.argtypes = [_POINTER] * 7 + _OPERANDS + [_POINTER, _INT, _INT, _INT]
    library.fewbit_cpu_decode.argtypes = [_POINTER, _POINTER, _INT]
    library.fewbit_cpu_experts.argtypes = [_POINTER] * 4 + [_INT, _LONG, _POINTER, _LONG, _INT, _INT]
    return Extension(
        sets,
        library.fewbit_cpu_linear,
        library.fewbit_cpu_integer_linear,
        library.fewbit_cpu_decode,
        library.fewbit_cpu_experts,
        bool(library.fewbit_cpu_has_threads()),
    )


def _instruction_sets(library: ctypes.CDLL) -> dict[str, int]:
    library.fewbit_cpu_name.restype = ctypes.c_char_p
    present, number = {}, 0
    while name := library.fewbit_cpu_name(number):
        if library.fewbit_cpu_present(number):
            present[name.decode()] = number
        number += 1
    return present


class _Selection:
    """Which instruction set calls use; the best one unless a test or a benchmark forces another."""

    forced: int | None = None


def _loaded() -> Extension:
    found = extension()
    if isinstance(found, Absent):
        raise RuntimeError(found.reason)
    return found


@cache
def _best() -> int:
    return next(iter(_loaded().instruction_sets.values()))


@contextmanager
def forced(name: str) -> Iterator[None]:
    """Runs the kernels with that instruction set, one of `extension().instruction_sets`, for tests and benchmarks.

    Raises:
        KeyError: this CPU does not have it.
    """
    before, _Selection.forced = _Selection.forced, _loaded().instruction_sets[name]
    try:
        yield
    finally:
        _Selection.forced = before


def operands(x: Tensor, y: Tensor, tokens: int) -> tuple[int, int, int, int, int]:
    """The arguments that every function of the library takes: y, tokens, dtype, threads, instruction set."""
    return y.data_ptr(), tokens, DTYPES[x.dtype], torch.get_num_threads(), instruction_set()


def instruction_set() -> int:
    """The number of the instruction set that calls use."""
    chosen = _Selection.forced
    return _best() if chosen is None else chosen


def address(tensor: Tensor | None) -> int | None:
    """Where a tensor's numbers lie, None for none."""
    return None if tensor is None else tensor.data_ptr()


def check(status: int) -> None:
    """Raises what a function of the library reports.

    Raises:
        MemoryError: there was none left for the activations.
    """
    if status:
        raise MemoryError("no memory is left for the activations of a layer")


def call_linear(*arguments: int | None) -> None:
    """`fewbit_cpu_linear`."""
    check(_loaded().linear(*arguments))


def call_integer_linear(*arguments: int | None) -> None:
    """`fewbit_cpu_integer_linear`."""
    check(_loaded().integer_linear(*arguments))


def call_decode(decoder: int, step: int) -> None:
    """`fewbit_cpu_decode`, of the addresses of its two structures."""
    check(_loaded().decode(decoder, step, instruction_set()))


def call_experts(*arguments: int | None) -> None:
    """`fewbit_cpu_experts`."""
    check(_loaded().experts(*arguments))


class LinearLayer(ctypes.Structure):
    """How the library sees a linear layer inside a larger call: `csrc/cpu/prepared.h`."""

    DENSE, WEIGHT_ONLY, INTEGER = 0, 1, 2
    _fields_ = (
        ("arithmetic", _LONG),
        *((name, _POINTER) for name in ("shape", "words", "scale", "zero", "minimum", "features", "bias")),
        ("input_scale", _POINTER),
        *((name, _LONG) for name in ("per_token", "low", "high")),
    )

    @classmethod
    def of(cls, arithmetic: int, tensors: Mapping[str, Tensor], bias: Tensor | None, **numbers: int) -> LinearLayer:
        """A layer of the tensors, by the names of these fields. It keeps their addresses only: hold them."""
        pointers = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        return cls(arithmetic=arithmetic, bias=address(bias), **pointers, **numbers)
