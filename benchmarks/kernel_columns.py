"""One column of the table of kernels: a kernel or a rival at every number of rows, checked, in the process of the GPU.

A figure is device time inside a CUDA graph that walks over enough copies of the weights to defeat the L2 cache: the
median of the replays, divided by the copies. Every kernel of fewbit is compared with the reference on the inputs that
it is timed with. Activation quantization is inside, but for figures named `_product`, which start from codes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from rivals import Rivals

from fewbit.kernels.interface import LinearKernel, LinearRequest
from fewbit.kernels.registry import linear_kernels
from fewbit.kernels.tuned.choice import Chosen
from fewbit.kernels.tuned.measure import FEWEST_COPIES, Call, call_time_us, copies_of
from fewbit.kernels.tuned.tune import copied, inputs, random_layer
from fewbit.spec.key import LinearKey
from fewbit.spec.presets import PRESETS

BF16, HUMMING = "bf16", "humming"
MANY_ROWS = 1024
SETTLED_S = 0.25
"""After which the clock is up again that a column of many rows took down."""
PRODUCT_ALONE = ("FP8_DYNAMIC", "W8A8")
"""Schemes whose rivals multiply codes that another kernel made."""
TOLERANCE = {"keeps": 0.02, "drops": 0.01}
"""Relative error against the reference: bf16 outputs, and products of quantized activations where they are kept."""

Figures = dict[int, dict[str, float]]
"""Rows of x -> figure -> microseconds, or the error."""


@dataclass(frozen=True)
class Layer:
    """A layer to time.

    Attributes:
        scheme: the name of a preset, or a key.
        rows, columns: N and K.
        device: `cuda`, or `cpu`, where calls are timed by the clock.
    """

    scheme: str
    rows: int
    columns: int
    device: str = "cuda"

    @property
    def key(self) -> LinearKey:
        preset = PRESETS.get(self.scheme)
        return LinearKey.parse(self.scheme) if preset is None else preset.rules[0].key

    @property
    def request(self) -> LinearRequest:
        return LinearRequest(self.key, self.rows, self.columns)

    @property
    def copies(self) -> int:
        """Of a weight, as many as defeat the cache."""
        shape = (self.rows, self.columns)
        return copies_of(int(self.key.weight.bits_per_weight(shape) * self.rows * self.columns / 8))

    def __str__(self) -> str:
        return f"{self.scheme} K={self.columns} N={self.rows}"


def _time_us(layer: Layer, tokens: int, calls: Sequence[Call]) -> float:
    """Median microseconds of a call; of long ones few are enough, whose results fill the cache as well."""
    if tokens >= MANY_ROWS:
        time.sleep(SETTLED_S)
    many = len(calls) if tokens < MANY_ROWS else FEWEST_COPIES
    return call_time_us(calls[:many], layer.device)


def bf16_column(layer: Layer, ladder: Sequence[int]) -> Figures:
    """`F.linear` in bf16."""
    shape = (layer.rows, layer.columns)
    copies = copies_of(2 * layer.rows * layer.columns)
    weights = [
        torch.randn(shape, device=layer.device, dtype=torch.bfloat16) / layer.columns**0.5 for _ in range(copies)
    ]
    found: Figures = {}
    for tokens in ladder:
        x = inputs(layer.request, tokens, layer.device)
        us = _time_us(layer, tokens, [partial(torch.nn.functional.linear, x, weight) for weight in weights])
        found[tokens] = {f"{BF16}_us": us}
    return found


def rival_column(layer: Layer, ladder: Sequence[int], name: str, folder: Path | None) -> Figures:
    """A library's kernel over random operands; figures of its product alone where it makes codes apart."""
    figures = _rivals(folder).layer(name, layer.scheme, layer.columns, layer.rows, layer.copies)
    found: Figures = {tokens: {} for tokens in ladder}
    for figure, calls in figures.items():
        for tokens in ladder:
            found[tokens][f"{figure}_us"] = _time_us(layer, tokens, calls(inputs(layer.request, tokens, layer.device)))
    return found


@cache
def _rivals(folder: Path | None) -> Rivals:
    return Rivals(folder)


def kernel_column(layer: Layer, ladder: Sequence[int], name: str, whole: Sequence[int]) -> Figures:
    """A kernel of fewbit.

    Args:
        whole: all numbers of rows, of which the ladder may be a part.

    Raises:
        AssertionError: it is wrong.
    """
    kernel, request = linear_kernels()[name], layer.request
    record = random_layer(request, layer.device)
    weights = copied(kernel.prepare(record, request), layer.device)
    reference = linear_kernels()["reference"]
    same = LinearKey(request.key.weight) if kernel.weight_only else request.key
    defined = reference.prepare(record, LinearRequest.of(record, same, request.dtype))
    found: Figures = {}
    for tokens in ladder:
        x = inputs(request, tokens, layer.device)
        calls = [partial(kernel.run, x, one, None) for one in weights]
        expected = reference.run(x, defined, None).float()
        error = ((calls[0]().float() - expected).norm() / expected.norm()).item()
        limit = TOLERANCE["drops" if kernel.weight_only else "keeps"]
        assert error < limit, f"{name} is off by {error:.4f} at {layer} M={tokens}"
        found[tokens] = {f"{name}_us": _time_us(layer, tokens, calls), f"{name}_error": error}
        if layer.scheme in PRODUCT_ALONE and layer.device == "cuda" and name != HUMMING:
            with rounded_before():
                found[tokens][f"{name}_product_us"] = _time_us(layer, tokens, calls)
        others = [_time_us(layer, tokens, calls) for _ in other_ways(kernel, calls, whole, tokens)]
        if others:
            found[tokens][f"{name}_other_ways_us"] = min(others)
    return found


def run_once(layer: Layer, ladder: Sequence[int], name: str, is_rival: bool) -> None:
    """Runs a kernel at every number of rows, in every way that it is timed in, so that its programs are compiled."""
    if is_rival:
        for calls in Rivals(None).layer(name, layer.scheme, layer.columns, layer.rows, 1).values():
            for tokens in ladder:
                calls(inputs(layer.request, tokens, layer.device))[0]()
        return
    kernel, request = linear_kernels()[name], layer.request
    weight = kernel.prepare(random_layer(request, layer.device), request)
    for tokens in ladder:
        x = inputs(request, tokens, layer.device)
        calls = [partial(kernel.run, x, weight, None)]
        calls[0]()
        for _ in other_ways(kernel, calls, ladder, tokens):
            calls[0]()
    if layer.device == "cuda":
        torch.cuda.synchronize()


def other_ways(kernel: LinearKernel, calls: Any, ladder: Sequence[int], tokens: int) -> Iterator[int]:
    """Meanwhile the kernel runs as at each of the next two larger numbers of rows, where that is another way.

    A way for more rows serves fewer as well; one for fewer need not have room for more.
    """
    place = list(ladder).index(tokens)
    for other in ladder[place + 1 : place + 3]:
        if kernel.name != HUMMING and _ways(calls[0], tokens) != _ways(calls[0], other):
            with _as_at(other, []):
                yield other


def _ways(call: Any, tokens: int) -> list[object]:
    """The ways that a call takes as at so many rows."""
    noted: list[object] = []
    with _as_at(tokens, noted):
        call()
    return noted


@contextmanager
def _as_at(tokens: int, noted: list[object]) -> Iterator[None]:
    """Meanwhile products run as at so many rows, and the ways are noted."""

    def choose(layout: Any, _tokens: int, device: str, usual: Any) -> Any:
        noted.append(usual(layout, tokens, device))
        return noted[-1]

    with ExitStack() as stack:
        for chosen in Chosen.every:
            stack.enter_context(chosen.by(partial(choose, usual=chosen.usual)))
        yield


@contextmanager
def rounded_before() -> Iterator[None]:
    """Meanwhile activations are rounded once, before the first product that reads them."""
    from fewbit.kernels.programs import activations  # imports Triton

    before: Any = activations.quantized
    made: Mapping[tuple[int, ...], Any] = {}

    def known(x: torch.Tensor, *rest: Any) -> Any:
        nonlocal made
        place = (x.data_ptr(), *x.shape)
        if place not in made:
            made = {place: before(x, *rest)}
        return made[place]

    setattr(activations, before.__name__, known)
    try:
        yield
    finally:
        setattr(activations, before.__name__, before)
