"""Compiling CUDA C++ by NVRTC through cuda-core, and keeping what was compiled on disk.

An entry is named by the hash of everything that the machine code depends on and holds its own hash, so that a file
that was cut short or changed is compiled again instead of being given to the driver.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from fewbit.errors import KernelError

PACKAGE = "cuda-core"
STANDARD = "c++17"
FOLDER = Path.home() / ".cache" / "fewbit" / "cuda"
_HASH_BYTES = hashlib.sha256().digest_size


def compiled(source: str, macros: Mapping[str, int], architecture: str, folder: Path = FOLDER) -> bytes:
    """Machine code of a source under macros, from the folder if it was compiled before.

    Args:
        architecture: `sm_90a`, say.
        folder: where entries are kept; a folder that cannot be written to is done without.

    Raises:
        KernelError: there is no compiler.
    """
    settings = [nvrtc_version(), STANDARD, architecture, *(f"{name}={value}" for name, value in sorted(macros.items()))]
    path = folder / f"{hashlib.sha256('|'.join([*settings, source]).encode()).hexdigest()}.cubin"
    found = read_entry(path)
    if found is None:
        found = _compile(source, macros, architecture)
        write_entry(path, found)
    return found


def read_entry(path: Path) -> bytes | None:
    """What `write_entry` wrote, or None where there is no such file or it holds something else."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    code = content[_HASH_BYTES:]
    return code if code and content[:_HASH_BYTES] == hashlib.sha256(code).digest() else None


def write_entry(path: Path, code: bytes) -> None:
    """Puts an entry in place at once; several processes may do so. Nothing is kept where the folder is not writable."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
    except OSError:
        return
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(code).digest() + code)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)


@cache
def nvrtc_version() -> str:
    """The version of the compiler that cuda-core finds.

    Raises:
        KernelError: it finds none.
    """
    from cuda.bindings import nvrtc

    try:
        _, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:
        raise KernelError(f"{PACKAGE} finds no NVRTC: {error}", "Install nvidia-cuda-nvrtc.") from error
    return f"{major}.{minor}"


def _compile(source: str, macros: Mapping[str, int], architecture: str) -> bytes:
    from cuda.core import Program, ProgramOptions

    defined = [(name, str(value)) for name, value in macros.items()]
    options = ProgramOptions(arch=architecture, std=STANDARD, define_macro=defined)
    return bytes(Program(source, "c++", options).compile("cubin").code)
