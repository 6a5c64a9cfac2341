"""Tables of numbers that codes of four bits are indices into: NF4 and FP4 as bitsandbytes has them.

Source: bitsandbytes 0.50.2 (`functional.py`: create_normal_map, get_4bit_type).
"""

from __future__ import annotations

from fewbit.spec.element import ELEMENTS, F32
from fewbit.spec.key import QuantKey

CODEBOOKS = {
    # Quantiles of the normal distribution, scaled to [-1, 1] with an exact zero.
    "nf4": (
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ),
    # Three bits of magnitude out of order, in twelfths of one (and a 192nd), and a sign.
    "fp4": tuple(sign * part / 192 for sign in (1, -1) for part in (0, 1, 128, 192, 64, 96, 32, 48)),
}
"""Type -> the number that each code stands for, before scaling; what the files hold as float32."""


def codebook_of(key: QuantKey) -> tuple[float, ...] | None:
    """The table that numbers are quantized to under a key, None where codes are numbers themselves.

    A key does not name a table. Four unsigned bits without zero points, in groups under float32 scales, are what
    bitsandbytes stores and nothing else does; they are quantized to NF4.
    """
    unsigned = key.element == ELEMENTS["uint4"] and key.symmetric and key.global_scale is None
    grouped = key.granularity.kind == "group" and key.scale.element == F32
    return CODEBOOKS["nf4"] if unsigned and grouped else None
