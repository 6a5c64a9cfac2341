"""The sources that NVRTC compiles, and the instruction that is written out for every width."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from fewbit.spec.element import E4M3


@cache
def text(name: str) -> str:
    """A file of this folder."""
    return (files("fewbit.kernels.cuda") / name).read_text(encoding="utf-8")


def product_instruction(width: int, operand: str, in_registers: bool) -> str:
    """C++ for sums [64, width] += a [64, 32 bytes] @ b [width, 32 bytes]^T, whose operands are many.

    Args:
        width: a multiple of 8.
        operand: `bf16`, `f16`, `e4m3` or `int8`.
        in_registers: whether a is a fragment, else both are described in shared memory.
    """
    sums, integer = width // 2, operand == "int8"
    count = 4 if in_registers else 1  # what describes a
    targets = ", ".join(f"%{i}" for i in range(sums))
    fragment = ", ".join(f"%{sums + i}" for i in range(count))
    outputs = ", ".join(f'"+{"r" if integer else "f"}"(sums[{i}])' for i in range(sums))
    inputs = ", ".join(f'"r"(a[{i}])' for i in range(count)) if in_registers else '"l"(a)'
    depth = 32 if integer or operand == E4M3.name else 16
    negated = "" if integer else ", 1, 1"
    transposed = "" if depth == 32 else ", 0"  # 16-bit operands may be
    kind = "s32.s8.s8" if integer else f"f32.{operand}.{operand}"
    return f"""
__device__ __forceinline__ void multiply({"int" if integer else "float"} (&sums)[{sums}],
                                         {"const u32 (&a)[4]" if in_registers else "u64 a"}, u64 b, bool adds) {{
    asm volatile("{{\\n.reg .pred adds;\\nsetp.ne.b32 adds, %{sums + count + 1}, 0;\\n"
                 "wgmma.mma_async.sync.aligned.m64n{width}k{depth}.{kind} {{{targets}}}, "
                 "{f"{{{fragment}}}" if in_registers else fragment}, %{sums + count}, adds{negated}{transposed};\\n}}"
                 : {outputs}
                 : {inputs}, "l"(b), "r"((u32)adds));
}}
"""
