"""How eight codes of 4 bits lie in a 32-bit word of weight fragments, by what decodes them.

Codes come in the order of nibbles: in a word for 16-bit operands nibbles i and i + 4 go to the lower and upper half of
register i, in one for `e4m3` nibbles 2j and 2j + 1 to byte j of the first and of the second output feature.

Integers are these nibbles. E2M1 for 16-bit operands has its sign at bit 15 of a half and its magnitude at bits 6 to 8,
as bf16 has them, once the word is turned to the left and masked: three registers are the word in one turn, the fourth
in two. E2M1 for `e4m3` has the magnitudes of the first output feature in the lower half and of the second in the upper
one, four bits apart, where a permutation of bytes takes its selectors from; signs of the first are the uppermost bits
of bytes, those of the second lie four bits below.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from fewbit.spec.element import E4M3

CODES = 8
_TURNS = ({0x81C0: 0}, {0x81C0: 4}, {0x81C0: 10}, {0x8180: 14, 0x0040: 6})
"""Register -> bits of either half, and how far to the left the word is turned to have them there."""
_WORD = 1 << 32


def words_of(codes: Tensor, element: str, operand: str) -> Tensor:
    """Codes of 4 bits [..., 8] -> int32 [...]; see `FragmentLayout` for element and operand."""
    words = torch.zeros_like(codes[..., 0], dtype=torch.int64)
    for nibble, places in enumerate(_places(element, operand)):
        code = codes[..., nibble].long()
        for mask, distance in places:
            words |= _shifted(code & mask, distance)
    return torch.where(words < _WORD // 2, words, words - _WORD).int()


def codes_of(words: Tensor, element: str, operand: str) -> Tensor:
    """The inverse of `words_of`, int32 [..., 8]."""
    wide, nibbles = words.long() % _WORD, []
    for places in _places(element, operand):
        code = torch.zeros_like(wide)
        for mask, distance in places:
            code |= _shifted(wide, -distance) & mask
        nibbles.append(code)
    return torch.stack(nibbles, -1).int()


def _shifted(values: Tensor, distance: int) -> Tensor:
    return values << distance if distance >= 0 else values >> -distance


@cache
def _places(element: str, operand: str) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Nibble -> bits of its code, and how far to the left they lie in the word."""
    if element != "e2m1":
        return tuple(((15, 4 * nibble),) for nibble in range(CODES))
    if operand == E4M3.name:
        pairs = [divmod(nibble, 2) for nibble in range(CODES)]
        return tuple(((7, 16 * second + 4 * byte), (8, 8 * byte + 4 - 4 * second)) for byte, second in pairs)
    return tuple(_turned(nibble % 4, nibble // 4) for nibble in range(CODES))


def _turned(register: int, half: int) -> tuple[tuple[int, int], ...]:
    found = []
    for bit, place in ((0, 6), (1, 7), (2, 8), (3, 15)):
        turn = next(turn for mask, turn in _TURNS[register].items() if mask >> place & 1)
        found.append((1 << bit, (place + 16 * half - turn) % 32 - bit))
    return tuple(found)
