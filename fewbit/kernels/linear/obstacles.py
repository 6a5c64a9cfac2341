"""What several kernels refuse, as generators of sentences; see `Refusal.first`."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator

from fewbit.kernels.cuda.compiler import PACKAGE
from fewbit.kernels.interface import EXTRAS, LinearRequest, extras_of
from fewbit.numerics import QuantizedTensor
from fewbit.spec.hardware import CPU_EXTENSION, Hardware
from fewbit.spec.key import QuantKey


def x86_obstacles(hardware: Hardware) -> Iterator[str]:
    """Torch's low-bit CPU operations are vectorized for x86; elsewhere they are scalar loops or untested."""
    if hardware.platform != "cpu":
        yield f"runs on a CPU, found {hardware.platform}"
    if not hardware.has("avx2"):
        yield f"needs avx2, found {found_features(hardware)}"


def compiled_obstacles(hardware: Hardware) -> Iterator[str]:
    """What the compiled kernels of `csrc/cpu` need."""
    yield from x86_obstacles(hardware)
    if CPU_EXTENSION not in hardware.software:
        yield "fewbit's compiled CPU kernels are needed, which this installation lacks"


def triton_obstacles(request: LinearRequest, hardware: Hardware) -> Iterator[str]:
    """What Triton programs over 16-bit inputs and outputs need."""
    if hardware.platform != "cuda":
        yield f"runs on CUDA, found {hardware.platform}"
    if not any(package in hardware.software for package in ("triton", "pytorch-triton")):
        yield "triton is not installed"
    if request.dtype not in ("bf16", "f16"):
        yield f"bf16 or f16 activations are needed, found {request.dtype}"
    if request.dtype == "bf16" and not hardware.has("bf16"):
        yield f"bf16 arithmetic is needed, {hardware.name} has none; ask for float16"


def capability_obstacles(hardware: Hardware, needed: int, what: str) -> Iterator[str]:
    """A compute capability below the one, in tenths, that `what` needs."""
    if hardware.capability < needed:
        yield f"{what} needs compute capability {needed / 10}, {hardware.name} has {hardware.capability / 10}"


WGMMA_CAPABILITY = 90


def nvrtc_obstacles(hardware: Hardware) -> Iterator[str]:
    """What kernels in CUDA C++ for Hopper's tensor cores need."""
    if hardware.platform != "cuda":
        yield f"runs on CUDA, found {hardware.platform}"
    if hardware.capability != WGMMA_CAPABILITY:
        yield f"wgmma needs compute capability 9.0 and no other, {hardware.name} has {hardware.capability / 10}"
    if PACKAGE not in hardware.software:
        yield f"{PACKAGE} and an NVRTC that it finds are not installed"


def cublas_obstacles(request: LinearRequest) -> Iterator[str]:
    """What torch's own scaled product on CUDA cannot promise."""
    if request.batch_invariant:
        yield "the same bits at every M are asked for, and cuBLASLt chooses its product by M"


def record_obstacles(request: LinearRequest, supported: Container[str] = ()) -> Iterator[str]:
    """Parts of a record that a kernel would have to apply and does not, `supported` extras aside; empty layers."""
    if request.has_order and "order" not in supported:
        yield "act-order gives each input feature a group of its own, groups of consecutive features are needed"
    for extra in EXTRAS:
        if extra in request.extras and extra not in supported:
            yield f"the weight carries a {extra}, which this kernel does not apply"
    if request.rows < 1 or request.columns < 1:
        yield f"the layer is empty: [{request.rows}, {request.columns}]"


def row_scale_obstacles(request: LinearRequest) -> Iterator[str]:
    """Anything but one symmetric scale for each output feature, or for all."""
    weight, shape = request.key.weight, (request.rows, request.columns)
    if not weight.symmetric:
        yield "zero points are stored, a symmetric weight is needed"
    if weight.granularity.scale_shape(shape)[-1] != 1:
        yield f"one scale for each output feature is needed, found {weight.granularity} over K={request.columns}"


def int8_obstacles(key: QuantKey, name: str) -> Iterator[str]:
    """Elements whose numbers are no int8; `name` says which tensor."""
    element = key.element
    if not element.is_integer:
        yield f"{name} must be integers, found {element}"
    if element.min < -128 or element.max > 127:
        yield f"{name} must fit int8, found {element} up to {element.max:.0f}"


def found_features(hardware: Hardware) -> str:
    """The device and what it has, for the end of a sentence."""
    return f"{hardware.name} with {', '.join(sorted(hardware.features)) or 'none'}"


def require_roles(record: QuantizedTensor, request: LinearRequest, supported: Iterable[str] = ()) -> None:
    """Guards `prepare` against a record that its request does not tell the truth about.

    Raises:
        ValueError: the record carries a role that this kernel would silently leave out.
    """
    found = extras_of(record) | ({"order"} if "order" in record else set())
    unknown = sorted(found - {*supported})
    if unknown:
        raise ValueError(f"the record carries {', '.join(unknown)}, its request says {sorted(request.extras)}")
