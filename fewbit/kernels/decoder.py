"""A decoder's step for one token or for a prompt as one call of the compiled library: `csrc/cpu/decode_step.h` and
`prompt.h`.

Between linear layers the library rounds to the dtype of the activations where torch's modules do, so its logits are
theirs up to the order of sums. For one token threads wait for one another four times a block; nothing is allocated and
no Python runs between the embedding and the logits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fewbit.kernels.interface import LinearKernel, Prepared
from fewbit.kernels.native import DTYPES, LinearLayer, address, call_decode

HEAD_MULTIPLE = 16
"""Features of a head must fill whole vectors of every instruction set."""


@dataclass(frozen=True)
class StepLayer:
    """A linear layer of the step: a plain weight [N, K], or a prepared one with its kernel.

    Attributes:
        weight: of the dtype of the activations, contiguous; None for a prepared one.
        bias: [N] of the dtype of the activations, or None.
    """

    weight: Tensor | None = None
    kernel: LinearKernel | None = None
    prepared: Prepared | None = None
    bias: Tensor | None = None

    def compiled(self, held: list[Tensor]) -> LinearLayer:
        """As the library takes it; what it points to is added to `held`."""
        held.extend(() if self.bias is None else (self.bias,))
        if self.weight is not None:
            tensors = {"words": self.weight, "shape": torch.tensor(self.weight.shape, dtype=torch.int64)}
            held.extend(tensors.values())
            return LinearLayer.of(LinearLayer.DENSE, tensors, self.bias)
        assert self.kernel is not None and self.prepared is not None
        held.extend(self.prepared.tensors.values())
        return self.kernel.compiled_layer(self.prepared, self.bias)


@dataclass(frozen=True)
class StepBlock:
    """One block: x += output(attention(norm(x))), then x += down(silu(gate(norm(x))) * up(norm(x))).

    Attributes:
        attention_norm, mlp_norm: weights [hidden].
        query_norm, key_norm: weights [head_dim] of norms on heads, or None.
        layers: query, key, value, output, gate, up and down.
    """

    attention_norm: Tensor
    mlp_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    layers: tuple[StepLayer, ...]


@dataclass(frozen=True)
class StepSizes:
    """Numbers of a decoder. `heads` is a multiple of `key_heads`, `head_dim` of `HEAD_MULTIPLE`."""

    dtype: torch.dtype
    hidden: int
    intermediate: int
    heads: int
    key_heads: int
    head_dim: int
    vocabulary: int
    epsilon: float
    attention_scale: float


_LAYERS = ("query", "key", "value", "output", "gate", "up", "down")
_NORMS = ("attention_norm", "mlp_norm", "query_norm", "key_norm")


class _Block(ctypes.Structure):
    _fields_ = (*((name, ctypes.c_void_p) for name in _NORMS), *((name, LinearLayer) for name in _LAYERS))


_SIZES = ("hidden", "intermediate", "heads", "key_heads", "head_dim")


class _Decoder(ctypes.Structure):
    _fields_ = (
        ("dtype", ctypes.c_int64),
        *((name, ctypes.c_int64) for name in _SIZES),
        ("block_count", ctypes.c_int64),
        ("blocks", ctypes.c_void_p),
        ("final_norm", ctypes.c_void_p),
        ("head", LinearLayer),
        ("epsilon", ctypes.c_double),
        ("attention_scale", ctypes.c_double),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "logits", "keys", "values", "cosines", "sines")),
        *((name, ctypes.c_int64) for name in ("capacity", "position", "tokens", "threads")),
    )


@dataclass
class KeyValueCache:
    """Keys, rotated, and values: each [blocks, key heads, capacity, head_dim] in the dtype of the activations.

    Attributes:
        length: positions that are filled.
    """

    keys: Tensor
    values: Tensor
    length: int = 0

    @classmethod
    def empty(cls, blocks: int, sizes: StepSizes, capacity: int) -> KeyValueCache:
        shape = (blocks, sizes.key_heads, capacity, sizes.head_dim)
        return cls(torch.empty(shape, dtype=sizes.dtype), torch.empty(shape, dtype=sizes.dtype))

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]


@dataclass
class CompiledDecoder:
    """The decoder as the library takes it, with what it points to.

    Args:
        sizes: its numbers.
        blocks: in order.
        final_norm: weight [hidden].
        head: what makes logits.
    """

    sizes: StepSizes
    blocks: Sequence[StepBlock]
    final_norm: Tensor
    head: StepLayer
    _held: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._blocks = (_Block * len(self.blocks))(*(self._block(block) for block in self.blocks))
        self._held.append(self.final_norm)
        self._decoder = _Decoder(
            dtype=DTYPES[self.sizes.dtype],
            block_count=len(self.blocks),
            blocks=ctypes.addressof(self._blocks),
            final_norm=self.final_norm.data_ptr(),
            head=self.head.compiled(self._held),
            epsilon=self.sizes.epsilon,
            attention_scale=self.sizes.attention_scale,
            **{name: getattr(self.sizes, name) for name in _SIZES},
        )

    def _block(self, block: StepBlock) -> _Block:
        norms = {name: getattr(block, name) for name in _NORMS}
        self._held.extend(norm for norm in norms.values() if norm is not None)
        layers = {name: layer.compiled(self._held) for name, layer in zip(_LAYERS, block.layers, strict=True)}
        return _Block(**{name: address(norm) for name, norm in norms.items()}, **layers)

    def step(self, x: Tensor, cosines: Tensor, sines: Tensor, cache: KeyValueCache) -> Tensor:
        """Logits [vocabulary] after T more tokens; the cache is as much longer afterwards.

        Args:
            x: [T, hidden], the embeddings of the tokens from position `cache.length` on.
            cosines, sines: float32 [capacity, head_dim / 2], rounded to the dtype of the activations.
            cache: of the positions before.

        Raises:
            RuntimeError: an operand is not what the decoder takes, or the cache has no room.
        """
        table, hidden = (cache.capacity, self.sizes.head_dim // 2), self.sizes.hidden
        if x.dtype != self.sizes.dtype or x.dim() != 2 or x.shape[1] != hidden or not x.is_contiguous() or not len(x):
            raise RuntimeError(
                f"rows [T, {hidden}] of {self.sizes.dtype} are needed, found {list(x.shape)} of {x.dtype}"
            )
        for angles in (cosines, sines):
            if angles.dtype != torch.float32 or angles.shape != table or not angles.is_contiguous():
                raise RuntimeError(f"angles {list(table)} in float32 are needed, found {list(angles.shape)}")
        if cache.length + len(x) > cache.capacity:
            raise RuntimeError(
                f"the cache has room for {cache.capacity} positions, {cache.length} are taken and {len(x)} more asked "
                "for"
            )
        logits = x.new_empty(self.sizes.vocabulary)
        angle = cache.length * cosines.stride(0) * cosines.itemsize
        step = _Step(
            *(tensor.data_ptr() for tensor in (x, logits, cache.keys, cache.values)),
            cosines.data_ptr() + angle,
            sines.data_ptr() + angle,
            cache.capacity,
            cache.length,
            len(x),
            torch.get_num_threads(),
        )
        call_decode(ctypes.addressof(self._decoder), ctypes.addressof(step))
        cache.length += len(x)
        return logits
