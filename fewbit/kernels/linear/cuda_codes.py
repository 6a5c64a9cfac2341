"""What products of 8-bit codes in CUDA C++ have in common: the layout and the operation of the Triton programs.

Both sides are read by the copy engine as they are stored and multiplied out of shared memory (`wgmma`), over the whole
of K. A layer is cut into blocks of as many output features as give every multiprocessor one, or into equal ranges of
the work over all of them; weights are on their way before the activations are rounded. Where `code_cuts` finds the
product of the Triton programs' plans faster, or torch's, that one runs.

Kernels are compiled by NVRTC when a cut is first needed, within seconds, and kept on disk.
"""

from __future__ import annotations

from collections.abc import Iterator

from fewbit.kernels.interface import LinearRequest
from fewbit.kernels.linear.obstacles import nvrtc_obstacles
from fewbit.kernels.linear.product_layout import ProductLayout, product_layout_of
from fewbit.spec.hardware import Hardware


def code_obstacles(request: LinearRequest, hardware: Hardware, operand: str) -> Iterator[str]:
    """What keeps a product of codes from CUDA C++, beside what keeps it from the Triton program.

    Args:
        operand: `int8` or `e4m3`.
    """
    yield from nvrtc_obstacles(hardware)
    if not is_compiled(product_layout_of(request, operand)):
        key = request.key
        yield (
            f"8-bit codes under one scale for each output feature and one for each token, or for all, are needed, "
            f"found {key.weight} under {key.activation}"
        )
    if request.batch_invariant:
        yield "the same bits at every M are asked for, and this kernel splits its sums by M"


def is_compiled(layout: ProductLayout | None) -> bool:
    """Whether the kernel multiplies such codes."""
    return layout is not None and layout.is_described
