"""HTML and SVG as trees, which escape whatever is put into them; and the two plots of a report.

A plot is a handful of shapes that tell their names when pointed at, so it needs no plotting library and no script.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import floor, log10
from xml.etree.ElementTree import Element, SubElement

COLORS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e", "#888888")
_WIDTH, _HEIGHT = 860, 260
_LEFT, _TOP, _BOTTOM = 90, 12, 34
_PLAIN_TEXT = {"fill": "currentColor", "font-size": "11"}
_BAR = 18
_FARTHEST = 1e30


def tag(kind: str, /, *inside: Element | str, **attributes: str) -> Element:
    """An element with what is inside; `class_` stands for `class`."""
    made = Element(kind, {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()})
    for part in inside:
        if isinstance(part, Element):
            made.append(part)
        elif len(made):
            made[-1].tail = (made[-1].tail or "") + part
        else:
            made.text = (made.text or "") + part
    return made


def grid(headings: Sequence[str], rows: Iterable[Sequence[str | Element]], numbers: Sequence[int] = ()) -> Element:
    """A table; `numbers` are the columns that are set to the right."""
    made = tag("table", tag("thead", tag("tr", *(tag("th", heading) for heading in headings))))
    body = SubElement(made, "tbody")
    for row in rows:
        cells = (tag("td", cell, **({"class_": "n"} if i in numbers else {})) for i, cell in enumerate(row))
        body.append(tag("tr", *cells))
    return made


@dataclass(frozen=True)
class Dot:
    """One point of a plot: where, of which series, and what it is called."""

    x: float
    y: float
    series: str
    name: str


def dots(points: Sequence[Dot], x_label: str, y_label: str, logarithmic: bool = False) -> Element:
    """A plot of points with a legend; those beyond every sensible axis, or a logarithmic one, are left out."""
    points = [point for point in points if abs(point.y) < _FARTHEST and (not logarithmic or point.y > 0)]
    made = _canvas(_HEIGHT)
    if not points:
        return tag("p", "Nothing to plot.")
    heights = [log10(point.y) if logarithmic else point.y for point in points]
    low, high = _span(heights, logarithmic)
    left, right = _span([point.x for point in points], whole=True)
    bottom = _HEIGHT - _BOTTOM

    def across(x: float) -> float:
        return _LEFT + (x - left) / (right - left) * (_WIDTH - _LEFT - 14)

    def up(y: float) -> float:
        return bottom - (y - low) / (high - low) * (bottom - _TOP)

    for mark in _marks(low, high):
        _line(made, _LEFT, up(mark), _WIDTH - 8, up(mark))
        _label(made, _LEFT - 6, up(mark) + 4, f"{10**mark:.3g}" if logarithmic else f"{mark:.4g}", "end")
    for mark in _marks(left, right, whole=True):
        _label(made, across(mark), bottom + 15, f"{mark:.4g}", "middle")
    _label(made, (_LEFT + _WIDTH) / 2, _HEIGHT - 4, x_label, "middle")
    title = _label(made, 0, 0, y_label, "middle")
    title.set("transform", f"translate(12 {(_TOP + bottom) / 2:.0f}) rotate(-90)")
    series = list(dict.fromkeys(point.series for point in points))
    for point, height in zip(points, heights, strict=True):
        color = COLORS[series.index(point.series) % len(COLORS)]
        place = {"cx": f"{across(point.x):.1f}", "cy": f"{up(height):.1f}", "r": "3.2", "fill": color}
        circle = SubElement(made, "circle", place | {"fill-opacity": "0.8"})
        SubElement(circle, "title").text = f"{point.name}: {point.y:.4g}"
    return tag("figure", made, _legend(series))


def bars(rows: Sequence[tuple[str, float, str]]) -> Element:
    """Horizontal bars: name, length, and what is written behind it."""
    largest = max((length for _, length, _ in rows), default=0.0) or 1.0
    made = _canvas(_BAR * len(rows) + 4)
    for index, (name, length, told) in enumerate(rows):
        y = 2 + index * _BAR
        width = max(0.5, length / largest * (_WIDTH - 470))
        _label(made, 300, y + 12, name if len(name) < 46 else f"…{name[-44:]}", "end")
        SubElement(
            made,
            "rect",
            {"x": "306", "y": str(y + 2), "width": f"{width:.1f}", "height": str(_BAR - 5), "fill": COLORS[0]},
        )
        _label(made, 312 + width, y + 12, told, "start")
    return tag("figure", made)


def _canvas(height: int) -> Element:
    box = {"viewBox": f"0 0 {_WIDTH} {height}", "width": str(_WIDTH), "height": str(height), "role": "img"}
    return Element("svg", box)


def _span(values: Sequence[float], whole: bool = False) -> tuple[float, float]:
    low, high = min(values), max(values)
    if whole:
        low, high = floor(low), -floor(-high)
    around = max(1.0, abs(low) / 10)
    return (low, high) if high > low else (low - around, high + around)


def _marks(low: float, high: float, whole: bool = False) -> list[float]:
    """At most eight round numbers from `low` to `high`."""
    step = 10.0 ** floor(log10((high - low) / 4))
    step = max(1.0, step) if whole else step
    step = next(step * factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= 7)
    first = -floor(-low / step)
    return [mark * step for mark in range(first, floor(high / step) + 1)]


def _line(canvas: Element, x1: float, y1: float, x2: float, y2: float) -> None:
    place = {"x1": f"{x1:.1f}", "y1": f"{y1:.1f}", "x2": f"{x2:.1f}", "y2": f"{y2:.1f}"}
    SubElement(canvas, "line", place | {"stroke": "currentColor", "stroke-opacity": "0.15"})


def _label(canvas: Element, x: float, y: float, words: str, anchor: str) -> Element:
    made = SubElement(canvas, "text", _PLAIN_TEXT | {"x": f"{x:.1f}", "y": f"{y:.1f}", "text-anchor": anchor})
    made.text = words
    return made


def _legend(series: Sequence[str]) -> Element:
    entries = []
    for index, name in enumerate(series):
        swatch = tag("span", "●", style=f"color:{COLORS[index % len(COLORS)]}")
        entries += [swatch, f" {name}  "]
    return tag("figcaption", *entries)
