"""What was aimed at on an H200, and what a run of `kernels.py` reached."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kernel_columns import BF16
from kernel_summary import WITHIN, Cell, mean_and_total, product_alone

WIDE = (4096, 28672)
"""K and N of the largest layer."""
INT4, MXFP4 = (f"{weight} * e4m3:token:f32:dynamic" for weight in ("int4:group128:bf16", "e2m1:group32:e8m0"))
RIVALS = ("humming", "marlin", "machete")
LIBRARIES = (*RIVALS, "cutlass", BF16)


@dataclass(frozen=True)
class Aim:
    """An aim and what was found.

    Attributes:
        text: what was aimed at.
        found: what was reached, in words.
        met: whether that suffices.
    """

    text: str
    found: str
    met: bool

    def __str__(self) -> str:
        return f"| {self.text} | {self.found} | {'met' if self.met else 'missed'} |"


def aims(alone: Sequence[Cell], joint: Sequence[Cell]) -> Iterator[Aim]:
    """Those that the run has numbers for.

    Args:
        alone, joint: what is chosen without Humming, and where it may be.
    """
    yield from _weight_only(alone, joint)
    yield from _quantized(alone)
    yield from _products_alone(alone)
    yield from _oracle(alone, joint)


def _weight_only(alone: Sequence[Cell], joint: Sequence[Cell]) -> Iterator[Aim]:
    for cell in _at(alone, "W4A16", 1, WIDE):
        yield Aim("W4A16 4096x28672, M = 1: at most 18 us", f"{cell.own:.1f} us", cell.own <= 18)
    few = [cell for cell in alone if cell.scheme == "W4A16" and cell.rows <= 16]
    yield from _beside_best("W4A16, M up to 16, every shape: 1.2 times the best rival", few, 1.2)
    yield from _over_bf16("W4A16", 64, 1.8, alone, WIDE)
    middle = [cell for cell in joint if cell.scheme == "W4A16" and 16 < cell.rows <= 256]
    yield from _beside_best("W4A16, M = 17 to 256, with Humming: never slower than the best rival", middle, 1)
    yield from _over_bf16("W4A16", 1024, 0.8, alone)
    yield from _over_bf16("W4A16", 4096, 0.93, alone)


def _quantized(alone: Sequence[Cell]) -> Iterator[Aim]:
    for scheme, called in ((INT4, "int4 under FP8"), (MXFP4, "MXFP4 under FP8")):
        for rows, wanted in ((64, 2.2), (4096, 1.65)):
            yield from _over_bf16(scheme, rows, wanted, alone, WIDE, called)
    for rows, wanted in ((1, 1.7), (256, 1.5), (4096, 1.75)):
        for scheme in ("FP8", "FP8_DYNAMIC", "FP8_BLOCK"):
            yield from _over_bf16(scheme, rows, wanted, alone)
    yield from _over_bf16("W8A8", 4096, 1.7, alone)


def _products_alone(alone: Sequence[Cell]) -> Iterator[Aim]:
    of = [cell for cell in alone if cell.scheme == "FP8_DYNAMIC"]
    ratios = [best / own for own, best in filter(None, map(product_alone, of))]
    yield from _share("FP8 by rows, product alone: never below the best of torch and CUTLASS", ratios, 1)


def _oracle(alone: Sequence[Cell], joint: Sequence[Cell]) -> Iterator[Aim]:
    ways = [(us, cell.own) for cell in alone if (us := cell.us(f"{cell.kernel}_other_ways")) is not None]
    good = len(alone) - sum(own > WITHIN * us for us, own in ways)
    if alone:
        text = "Each choice within 5 % of the fastest way that reads its layout"
        yield Aim(text, f"{good} of {len(alone)} products", good == len(alone))
    for called, cells in (("alone", alone), ("with Humming", joint)):
        found = {name: mean_and_total(name, cells) for name in LIBRARIES}
        told = {name: figures for name, figures in found.items() if figures is not None}
        if told:
            texts = [f"{name} {mean:.2f} and {total:.2f}" for name, (mean, total) in told.items()]
            met = all(min(figures) > 1 for name, figures in told.items() if name != BF16)
            yield Aim(f"The whole, {called}, beats each library: mean and total", ", ".join(texts), met)


def _at(cells: Sequence[Cell], scheme: str, rows: int, shape: tuple[int, int] | None) -> list[Cell]:
    return [
        cell
        for cell in cells
        if cell.scheme == scheme and cell.rows == rows and shape in (None, (cell.line["K"], cell.line["N"]))
    ]


def _over_bf16(
    scheme: str, rows: int, wanted: float, cells: Sequence[Cell], shape: tuple[int, int] | None = None, called: str = ""
) -> Iterator[Aim]:
    """bf16 over fewbit, on one shape or over the layer."""
    at = _at(cells, scheme, rows, shape)
    bf16 = [us for cell in at if (us := cell.us(BF16)) is not None]
    if at and len(bf16) == len(at):
        found = sum(bf16) / sum(cell.own for cell in at)
        place = "over the layer" if shape is None else "{}x{}".format(*shape)
        yield Aim(f"{called or scheme} {place}, M = {rows}: {wanted} times bf16", f"{found:.2f}", found >= wanted)


def _beside_best(text: str, cells: Sequence[Cell], wanted: float) -> Iterator[Aim]:
    ratios = []
    for cell in cells:
        others = [us for name in RIVALS if (us := cell.us(name)) is not None]
        ratios += [min(others) / cell.own] if others else []
    yield from _share(text, ratios, wanted)


def _share(text: str, ratios: Sequence[float], wanted: float) -> Iterator[Aim]:
    if ratios:
        good = sum(ratio >= wanted for ratio in ratios)
        found = f"{good} of {len(ratios)} products, {min(ratios):.2f} to {max(ratios):.2f}"
        yield Aim(text, found, good == len(ratios))
