"""Presets: schemes under the names people know, as one table.

Names are those of llm-compressor and vLLM. W<bits>A16 keeps activations in the model's dtype; W8A8 is INT8; FP8 has
static per-tensor scales on both sides; FP8_DYNAMIC per-channel weights and per-token activations; FP8_BLOCK 128x128
weights and 1x128 activations. MX and NVFP4 names without A16 quantize activations as well.
"""

from __future__ import annotations

from fewbit.errors import SchemeError, closest
from fewbit.spec.element import BF16, E2M1, E4M3, E8M0, F32, integer
from fewbit.spec.granularity import CHANNEL, TENSOR, TOKEN, block, group
from fewbit.spec.key import LinearKey, QuantKey, ScaleSpec
from fewbit.spec.scheme import Rule, Scheme

DEFAULT_GROUP = 128
FP8_BLOCK_SIZE = 128


def _weight_only_integer(bits: int, size: int = DEFAULT_GROUP, symmetric: bool = True) -> LinearKey:
    granularity = group(size) if size else CHANNEL
    return LinearKey(QuantKey(integer(bits), ScaleSpec(BF16, granularity), symmetric=symmetric))


_NVFP4 = QuantKey(E2M1, ScaleSpec(E4M3, group(16)), ScaleSpec(F32, TENSOR))
_NVFP4_ACTIVATION = QuantKey(E2M1, ScaleSpec(E4M3, group(16), dynamic=True), ScaleSpec(F32, TENSOR))
_MXFP4 = QuantKey(E2M1, ScaleSpec(E8M0, group(32)))
_MXFP4_ACTIVATION = QuantKey(E2M1, ScaleSpec(E8M0, group(32), dynamic=True))
_MXFP8 = QuantKey(E4M3, ScaleSpec(E8M0, group(32)))
_MXFP8_ACTIVATION = QuantKey(E4M3, ScaleSpec(E8M0, group(32), dynamic=True))

_KEYS: dict[str, LinearKey] = {
    **{f"W{bits}A16": _weight_only_integer(bits) for bits in range(2, 8)},
    **{f"W{bits}A16_ASYM": _weight_only_integer(bits, symmetric=False) for bits in range(2, 8)},
    "W8A16": _weight_only_integer(8, size=0),
    "W8A16_ASYM": _weight_only_integer(8, size=0, symmetric=False),
    "W8A8": LinearKey(
        QuantKey(integer(8), ScaleSpec(BF16, CHANNEL)), QuantKey(integer(8), ScaleSpec(F32, TOKEN, dynamic=True))
    ),
    "FP8": LinearKey(QuantKey(E4M3, ScaleSpec(BF16, TENSOR)), QuantKey(E4M3, ScaleSpec(F32, TENSOR))),
    "FP8_DYNAMIC": LinearKey(
        QuantKey(E4M3, ScaleSpec(BF16, CHANNEL)), QuantKey(E4M3, ScaleSpec(F32, TOKEN, dynamic=True))
    ),
    "FP8_BLOCK": LinearKey(
        QuantKey(E4M3, ScaleSpec(BF16, block(FP8_BLOCK_SIZE, FP8_BLOCK_SIZE))),
        QuantKey(E4M3, ScaleSpec(F32, group(FP8_BLOCK_SIZE), dynamic=True)),
    ),
    "NVFP4": LinearKey(_NVFP4, _NVFP4_ACTIVATION),
    "NVFP4A16": LinearKey(_NVFP4),
    "MXFP4": LinearKey(_MXFP4, _MXFP4_ACTIVATION),
    "MXFP4A16": LinearKey(_MXFP4),
    "MXFP8": LinearKey(_MXFP8, _MXFP8_ACTIVATION),
}

CODEBOOK_PRESETS: dict[str, Scheme] = {
    "NF4": Scheme("NF4", (Rule(("Linear",), LinearKey.parse("uint4:group64:f32")),)),
}
"""Schemes whose codes are indices into a table, which few formats hold and one algorithm chooses: round to nearest."""

_ALIASES = {"INT8": "W8A8", "FP8_PER_TENSOR": "FP8", "FP8_PER_CHANNEL": "FP8_DYNAMIC", "INT4": "W4A16"}

PRESETS: dict[str, Scheme] = {name: Scheme(name, (Rule(("Linear",), key),)) for name, key in _KEYS.items()}


def preset(name: str) -> Scheme:
    """The scheme people mean by `name`; case, `-` and `_` do not matter.

    Raises:
        SchemeError: there is none of that name; the closest is suggested.
    """
    schemes = PRESETS | CODEBOOK_PRESETS
    known = {_folded(word): word for word in [*schemes, *_ALIASES]}
    canonical = known.get(_folded(name.strip()))
    if canonical is None:
        raise SchemeError(f"Unknown scheme {name!r}.", closest(name, known.values()))
    return schemes[_ALIASES.get(canonical, canonical)]


BUDGET_KEYS: tuple[LinearKey, ...] = tuple(
    LinearKey.parse(text)
    for text in (
        *(f"int{bits}:group{size}:bf16" for bits in (4, 3, 5) for size in (128, 64, 32)),
        *("int2:group32:bf16", "int6:group64:bf16", "int8:channel:bf16"),
        *(str(_NVFP4), str(_MXFP4), "e4m3:channel:bf16"),
    )
)
"""What a bit budget chooses from: weights alone, so that activations stay as they are; symmetric, since transformers
5.24 does not load packed zero points."""

KV_CACHES = {"FP8": QuantKey.parse("e4m3:tensor:f32"), "FP8_HEAD": QuantKey.parse("e4m3:head:f32")}
"""Keys of cached keys and values by the name that people give them."""


def kv_cache_preset(name: str) -> QuantKey:
    """The KV cache's key that people mean by `name`; case, `-` and `_` do not matter.

    Raises:
        SchemeError: there is none of that name; the closest is suggested.
    """
    known = {_folded(word): key for word, key in KV_CACHES.items()}
    if _folded(name.strip()) not in known:
        raise SchemeError(f"Unknown KV cache {name!r}.", closest(name, KV_CACHES))
    return known[_folded(name.strip())]


def _folded(name: str) -> str:
    return name.upper().replace("-", "").replace("_", "")
