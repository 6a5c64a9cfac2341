"""Orthogonal matrices of any order that spread a number evenly: Hadamard matrices where one is known to us.

A Hadamard matrix of order m over the square root of m is orthogonal with entries of one magnitude. Sylvester's have
orders 2^k, Paley's first kind p + 1 for a prime p = 3 mod 4, his second 2 (p + 1) for p = 1 mod 4; Kronecker products
multiply orders. An order for which these give nothing (its odd factor leads to none) gets the Kronecker product of
Sylvester's matrix for the powers of two and a random orthogonal matrix for the odd rest: still orthogonal, its entries
then differ in magnitude.

Source: Paley, On orthogonal matrices (1933).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

import torch
from torch import Tensor

from fewbit.numerics.hadamard import LARGEST_FACTOR, sylvester

LARGEST_PALEY = 512
"""Order up to which Paley's matrices are looked for: they are multiplied out, Sylvester's are split."""

CHUNK_NUMBERS = 1 << 22
"""Numbers that are rotated at a time: their float64 copies stay small beside an embedding."""


@dataclass(frozen=True)
class Orthogonal:
    """An orthogonal matrix R = diag(signs) (F1 x F2 x ...), a Kronecker product.

    Attributes:
        signs: float64 [order], of plus and minus one.
        factors: float64 orthogonal matrices, the product of whose orders is that of R.
        note: how it was made, for the report.
    """

    signs: Tensor
    factors: tuple[Tensor, ...]
    note: str

    def apply(self, x: Tensor) -> Tensor:
        """x R, computed in float64, for x [..., order]; float32 unless x is float64."""
        rows = x.reshape(-1, x.shape[-1])
        rotated = torch.empty(rows.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        step = max(1, CHUNK_NUMBERS // x.shape[-1])
        for first in range(0, len(rows), step):
            rotated[first : first + step] = self._rotated(rows[first : first + step])
        return rotated.reshape(x.shape)

    def _rotated(self, rows: Tensor) -> Tensor:
        width, done = rows.shape[-1], 1
        rows = rows.double() * self.signs.to(rows.device)
        for factor in self.factors:
            order = len(factor)
            parts = rows.reshape(-1, done, order, width // (done * order))
            rows = torch.einsum("adob,op->adpb", parts, factor.to(rows.device)).reshape(-1, width)
            done *= order
        return rows


def random_orthogonal(order: int, generator: torch.Generator) -> Orthogonal:
    """A randomized orthogonal matrix of an order: random signs, then a Hadamard matrix where one is known.

    Args:
        order: at least 1.
        generator: on the CPU; decides the signs, and the odd factor where no Hadamard matrix is known.
    """
    signs = torch.randint(0, 2, (order,), generator=generator, dtype=torch.int64).double() * 2 - 1
    base = _paley_factor(order)
    if base:
        factors = (*_powers_of_two(order // base), *((_normed(paley(base)),) if base > 1 else ()))
        return Orthogonal(signs, factors, "Hadamard " + " x ".join(str(len(factor)) for factor in factors))
    odd = order
    while odd % 2 == 0:
        odd //= 2
    gaussian = torch.randn(odd, odd, generator=generator, dtype=torch.float64)
    q, r = torch.linalg.qr(gaussian)
    factors = (*_powers_of_two(order // odd), q * r.diagonal().sign())
    return Orthogonal(signs, factors, f"Hadamard {order // odd} x random orthogonal {odd}")


def paley(order: int) -> Tensor:
    """Paley's Hadamard matrix of an order that he has one for, float64 with entries of plus and minus one.

    Raises:
        ValueError: he has none.
    """
    if _is_prime(order - 1) and (order - 1) % 4 == 3:
        skew = _bordered(order - 1, -1)
        return skew + torch.eye(order, dtype=torch.float64)
    prime = order // 2 - 1
    if order % 4 or not _is_prime(prime) or prime % 4 != 1:
        raise ValueError(f"Paley has no Hadamard matrix of order {order}")
    symmetric = _bordered(prime, 1)
    one = torch.eye(len(symmetric), dtype=torch.float64)
    plus = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    minus = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
    return torch.kron(symmetric, plus) + torch.kron(one, minus)


def _bordered(prime: int, sign: int) -> Tensor:
    """Jacobsthal's matrix of quadratic residues with a border: a conference matrix [prime + 1, prime + 1]."""
    residues = {value * value % prime for value in range(1, prime)}
    character = torch.tensor([0.0] + [1.0 if value in residues else -1.0 for value in range(1, prime)]).double()
    index = torch.arange(prime)
    matrix = torch.zeros(prime + 1, prime + 1, dtype=torch.float64)
    matrix[1:, 1:] = character[(index[:, None] - index[None, :]) % prime]
    matrix[0, 1:] = 1
    matrix[1:, 0] = sign
    return matrix


def _paley_factor(order: int) -> int:
    """The smallest base order with order / base a power of two: 1, or one of Paley's; 0 where there is none."""
    base = order
    while base % 2 == 0:
        base //= 2
    if base == 1:
        return 1
    while base <= min(order, LARGEST_PALEY):
        if order % base == 0 and base % 4 == 0:
            first = _is_prime(base - 1)  # base is a multiple of 4, so that base - 1 is 3 mod 4
            if first or (_is_prime(base // 2 - 1) and (base // 2 - 1) % 4 == 1):
                return base
        base *= 2
    return 0


def _powers_of_two(order: int) -> tuple[Tensor, ...]:
    """Orthogonal factors of order 2^k, none of order 1."""
    factors = []
    while order > 1:
        size = min(order, LARGEST_FACTOR)
        factors.append(_normed(sylvester(size).double()))
        order //= size
    return tuple(factors)


def _normed(matrix: Tensor) -> Tensor:
    return matrix / len(matrix) ** 0.5


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, isqrt(number) + 1))
