"""The CUDA driver, called directly: loading machine code, describing matrices to the copy engine, launching.

The driver's library is on every machine with an NVIDIA GPU and its interface never breaks, so nothing but the standard
library is needed. Launches go to torch's current stream and are captured by CUDA graphs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from fewbit.errors import KernelError

DYNAMIC_SHARED_MEMORY = 8  # the function attribute that allows a block more than 48 KB
PROGRAMMATIC_SERIALIZATION = 6  # the launch attribute that lets a kernel begin before the one before it ended
MAPS_KEPT = 4096
LINE = 128
_BYTES = dict.fromkeys((torch.uint8, torch.int8, torch.float8_e4m3fn), 0)
_ELEMENTS = {torch.float16: 6, torch.bfloat16: 9, **_BYTES}  # CUtensorMapDataType
_SWIZZLED_128, _PROMOTED_256 = 3, 3  # CUtensorMapSwizzle, CUtensorMapL2promotion


class TensorMap(ctypes.Structure):
    """A matrix as the copy engine knows it; the driver fills it in."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_int * 15))


class _Launch(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("blocks", "blocks_y", "blocks_z", "threads", "threads_y", "threads_z")),
        ("shared_bytes", ctypes.c_uint), ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )  # fmt: skip


_CHAINED = _Attribute(PROGRAMMATIC_SERIALIZATION, 0, 1)


@dataclass(frozen=True)
class Function:
    """A kernel that is loaded on a device, and how it is launched."""

    handle: ctypes.c_void_p
    threads: int
    shared_bytes: int

    def launch(self, blocks: int, arguments: ctypes.Array[Any], stream: int) -> None:
        """Starts the kernel, which may begin while the one before it ends, up to where it waits for that.

        Args:
            blocks: a multiple of the cluster's.
            arguments: addresses of the parameters, from `addresses`.
            stream: torch's handle.

        Raises:
            KernelError: the driver refuses.
        """
        config = _Launch(blocks, 1, 1, self.threads, 1, 1, self.shared_bytes, stream, ctypes.pointer(_CHAINED), 1)
        _call("cuLaunchKernelEx")(ctypes.byref(config), self.handle, arguments, None)


def load(code: bytes, name: str, threads: int, shared_bytes: int) -> Function:
    """Loads machine code on the current device; it stays for the life of the process.

    Raises:
        KernelError: the driver refuses, with its reason.
    """
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _call("cuModuleLoadData")(ctypes.byref(module), code)
    _call("cuModuleGetFunction")(ctypes.byref(function), module, name.encode())
    _call("cuFuncSetAttribute")(function, DYNAMIC_SHARED_MEMORY, shared_bytes)
    return Function(function, threads, shared_bytes)


def addresses(*parameters: Any) -> ctypes.Array[Any]:
    """The parameters of a launch as the driver takes them; the caller keeps them alive until it is launched."""
    return (ctypes.c_void_p * len(parameters))(*(ctypes.addressof(parameter) for parameter in parameters))


def matrix_map(matrix: Tensor, box_rows: int, box_columns: int) -> TensorMap:
    """Boxes of a contiguous matrix, swizzled over 128 bytes, zeros where a box reaches beyond it.

    Raises:
        KernelError: the driver refuses; the address and the bytes of a row must be multiples of 16.
    """
    rows, columns = matrix.shape
    pitch = columns * matrix.element_size()
    return _map(matrix.data_ptr(), matrix.dtype, (columns, rows), (pitch,), (box_columns, box_rows))


def lines_map(matrix: Tensor, box_rows: int, box_lines: int) -> TensorMap:
    """The same of a matrix of bytes whose rows are whole lines of 128: boxes [lines, rows, 128].

    Raises:
        KernelError: the driver refuses; the address must be a multiple of 16.
    """
    rows, columns = matrix.shape
    return _map(
        matrix.data_ptr(), matrix.dtype, (LINE, rows, columns // LINE), (columns, LINE), (LINE, box_rows, box_lines)
    )


@lru_cache(maxsize=MAPS_KEPT)
def _map(
    pointer: int, dtype: torch.dtype, extents: tuple[int, ...], pitches: tuple[int, ...], box: tuple[int, ...]
) -> TensorMap:
    """Of extents and a box in elements, the innermost axis first, and the bytes between neighbours of the others."""
    space = ctypes.create_string_buffer(ctypes.sizeof(TensorMap) + 64)
    found = TensorMap.from_buffer(space, -ctypes.addressof(space) % 64)
    rank = len(extents)
    _call("cuTensorMapEncodeTiled")(
        ctypes.byref(found), _ELEMENTS[dtype], rank, ctypes.c_void_p(pointer), (ctypes.c_uint64 * rank)(*extents),
        (ctypes.c_uint64 * (rank - 1))(*pitches), (ctypes.c_uint32 * rank)(*box), (ctypes.c_uint32 * rank)(*[1] * rank),
        0, _SWIZZLED_128, _PROMOTED_256, 0,
    )  # fmt: skip
    return found


def stream_of(tensor: Tensor) -> int:
    """torch's handle of the current stream of a tensor's device."""
    return int(torch.cuda.current_stream(tensor.device).cuda_stream)


@cache
def multiprocessors(device: int) -> int:
    """How many a device has."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@cache
def _call(name: str) -> Callable[..., None]:
    function = getattr(_library(), name)

    def checked(*arguments: object) -> None:
        code = function(*arguments)
        if code:
            text = ctypes.c_char_p()
            _library().cuGetErrorString(code, ctypes.byref(text))
            reason = (text.value or b"unknown").decode()
            raise KernelError(f"{name} failed with error {code}: {reason}", "See whether the driver fits the device.")

    return checked
