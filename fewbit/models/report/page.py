"""The report as one HTML page without scripts, fonts or images from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any
from xml.etree.ElementTree import Element, tostring

from fewbit.models.report.facts import LayerFacts, layers_of, listed, mapped, number, text
from fewbit.models.report.markup import Dot, bars, dots, grid, tag

_STYLE = """
:root { color-scheme: light dark } body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 70em;
padding: 0 1em } table { border-collapse: collapse; margin: .6em 0 } th, td { padding: .15em .7em .15em 0;
text-align: left; vertical-align: top; border-bottom: 1px solid #8884 } td.n { text-align: right;
font-variant-numeric: tabular-nums } td { overflow-wrap: anywhere } figure { margin: .5em 0 } svg { max-width: 100%;
height: auto } pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #8881; padding: .8em } h2 {
margin-top: 1.6em } summary { cursor: pointer }
"""
_MEASURES = {
    "mean_kl": "mean KL divergence, nats",
    "top1_agreement": "top-1 agreement",
    "perplexity": "perplexity",
    "reference_perplexity": "perplexity of the source",
    "logit_cosine": "logit cosine",
}
NOT_MEASURED = "Not measured on text. `fewbit report FOLDER --against SOURCE` measures it and adds it here."


def page_of(report: Mapping[str, Any], recipe: Mapping[str, Any], group_bytes: Mapping[str, int]) -> str:
    """The whole page.

    Args:
        report: see `quantization_report.json`.
        recipe: see `fewbit_recipe.json`.
        group_bytes: bytes of tensors by group of modules, see `bytes_by_group`.
    """
    layers = list(layers_of(report))
    title = f"{text(report.get('source')) or 'A model'} as {text(report.get('scheme'))}"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width"),
        tag("title", title),
        tag("style", _STYLE),
    )
    body = tag("body", tag("h1", title), *_sections(report, recipe, group_bytes, layers))
    # ASCII with references, so that even half of a surrogate pair in a name cannot make the page unwritable.
    return (
        "<!DOCTYPE html>\n" + tostring(tag("html", head, body, lang="en"), encoding="us-ascii", method="html").decode()
    )


def facts_of(report: Mapping[str, Any], recipe: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What was done, as rows of name and value; what the report does not say is left out."""
    before, after = number(report.get("bytes_before")), number(report.get("bytes_after"))
    bits, seconds = number(report.get("bits_per_weight")), number(report.get("seconds"))
    whole = number(report.get("whole_bits_per_weight"))
    calibration = mapped(recipe.get("calibration"))
    versions = ", ".join(f"{name} {value}" for name, value in mapped(report.get("versions")).items())
    rows = [
        ("source", text(report.get("source"))),
        ("scheme", text(report.get("scheme"))),
        ("checkpoint format", text(report.get("format"))),
        ("algorithm", text(report.get("algorithm"))),
        ("bits per quantized weight", "" if bits is None else f"{bits:.3f}, scales and zero points counted"),
        ("bits per weight of the whole model", "" if whole is None else f"{whole:.3f}"),
        ("size", _change(before, after)),
        ("time to quantize", "" if seconds is None else f"{seconds:.1f} s"),
        ("calibration", _calibration(calibration)),
        ("calibration tokens, SHA-256", text(calibration.get("sha256"))),
        ("remarks on layers", _remarks(report)),
        ("tied embeddings", text(report.get("tie_word_embeddings"))),
        ("written by", versions),
    ]
    return [(name, value) for name, value in rows if value]


def quality_of(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What was measured on text, as rows of name and value; empty where nothing was."""
    quality = mapped(report.get("quality"))
    rows = [(label, number(quality.get(name))) for name, label in _MEASURES.items()]
    found = [(label, _measure(label, value)) for label, value in rows if value is not None]
    if not found:
        return []
    windows, length = text(quality.get("windows")), text(quality.get("window_length"))
    return [*found, ("measured on", f"{text(quality.get('text'))}, {windows} windows of {length} tokens")]


def _sections(
    report: Mapping[str, Any], recipe: Mapping[str, Any], group_bytes: Mapping[str, int], layers: list[LayerFacts]
) -> Iterator[Element]:
    yield grid(("", ""), facts_of(report, recipe))
    yield tag("h2", "Quality on text")
    quality = quality_of(report)
    yield grid(("measure", "value"), quality) if quality else tag("p", NOT_MEASURED)
    yield from _choices(report)
    yield from _plots(layers)
    yield tag("h2", "Bytes by group of modules")
    ordered = sorted(group_bytes.items(), key=lambda entry: -entry[1])
    whole = sum(group_bytes.values()) or 1
    yield bars([(name, count, f"{count:,} ({count / whole:.1%})") for name, count in ordered])
    yield from _methods(layers)
    yield from _experts(layers)
    yield from _plain(report)
    yield tag("h2", f"Layers ({len(layers)})")
    yield grid(
        ("layer", "key", "shape", "bits", "SQNR, dB", "relative output loss", "clipped", "tokens", "method", "remarks"),
        [_row(layer) for layer in layers],
        (3, 4, 5, 6, 7),
    )
    yield tag("h2", "Recipe")
    yield tag("pre", json.dumps(recipe, indent=2, sort_keys=True))


def _choices(report: Mapping[str, Any]) -> Iterator[Element]:
    """How a budget or a gate chose the keys, where one did."""
    budget, gate = mapped(report.get("budget")), mapped(report.get("gate"))
    if budget:
        yield tag("h2", "Bit budget")
        yield tag("p", text(budget.get("asked")))
        keys = mapped(budget.get("keys"))
        yield grid(
            ("key", "share of the weights"), [(key, _percent(number(share))) for key, share in keys.items()], (1,)
        )
        frontier = [mapped(one) for one in listed(budget.get("frontier"))]
        points = [(number(one.get("bits_per_weight")), number(one.get("predicted_kl"))) for one in frontier]
        known = [
            Dot(bits, kl, "best choice for so many bits", f"{bits:.3f} bits") for bits, kl in points if bits and kl
        ]
        yield dots(known, "bits per weight", "predicted KL, nats", logarithmic=True)
    if gate:
        yield tag("h2", "Gate")
        yield tag("p", f"Mean KL at most {text(gate.get('max_kl'))}.")
        rounds = [mapped(one) for one in listed(gate.get("rounds"))]
        yield grid(
            ("round", "bits per weight", "mean KL"),
            [(str(n), *(f"{number(one.get(k)) or 0:.4f}" for k in ("bits_per_weight", "mean_kl")))
             for n, one in enumerate(rounds, 1)],
            (1, 2),
        )  # fmt: skip


def _plots(layers: Sequence[LayerFacts]) -> Iterator[Element]:
    yield tag("h2", "Signal to quantization noise of the weights")
    noise = [(layer, -layer.sqnr_db) for layer in layers if layer.sqnr_db is not None]
    yield dots([Dot(x, -y, place, name) for x, y, place, name in _worst(noise)], "block", "SQNR, dB")
    yield tag("h2", "Relative loss of the layers' outputs")
    losses = [(layer, layer.loss) for layer in layers if layer.loss is not None]
    if losses:
        points = [Dot(x, y, place, name) for x, y, place, name in _worst(losses)]
        yield dots(points, "block", "squared error / squared output", logarithmic=True)
    else:
        yield tag("p", "No calibration data were read, so nothing is known of the outputs.")


def _worst(values: Sequence[tuple[LayerFacts, float]]) -> list[tuple[float, float, str, str]]:
    """(block, largest value, place, name) of each place in each block: of many experts, the worst one."""
    found: dict[tuple[int, str], tuple[float, str]] = {}
    for layer, value in values:
        spot = (-1 if layer.block is None else layer.block, layer.place)
        if spot not in found or value > found[spot][0]:
            found[spot] = value, layer.name
    return [(block, value, place, name) for (block, place), (value, name) in found.items()]


def _methods(layers: Sequence[LayerFacts]) -> Iterator[Element]:
    by_method: dict[str, list[str]] = {}
    for layer in layers:
        by_method.setdefault(layer.method, []).append(layer.name)
    yield tag("h2", "What chose the codes")
    yield grid(("method", "layers", "for one"), [(m, str(len(n)), n[0]) for m, n in by_method.items()], (1,))


def _experts(layers: Sequence[LayerFacts]) -> Iterator[Element]:
    """Tokens that reached each expert, one row for each place of each block."""
    places: dict[tuple[int, str], list[tuple[int, int]]] = {}
    for layer in layers:
        if layer.expert is not None and layer.tokens is not None:
            places.setdefault((layer.block or 0, layer.place), []).append((layer.expert, layer.tokens))
    if not places:
        return
    yield tag("h2", "Calibration tokens by expert")
    points = [
        Dot(expert, tokens, f"block {block}", f"{place}, block {block}, expert {expert}")
        for (block, place), seen in places.items()
        for expert, tokens in seen
    ]
    yield dots(points, "expert", "tokens")
    rows = []
    for (block, place), seen in places.items():
        counts = [tokens for _, tokens in seen]
        unseen = ", ".join(str(expert) for expert, tokens in seen if not tokens)
        rows.append(
            (str(block), place, *(str(f) for f in (min(counts), f"{median(counts):g}", max(counts))), unseen or "none")
        )
    headings = ("block", "layers", "fewest", "median", "most", "experts that no token reached")
    yield grid(headings, rows, (2, 3, 4))


def _plain(report: Mapping[str, Any]) -> Iterator[Element]:
    yield tag("h2", "What stayed as it was, and why")
    plain = mapped(report.get("plain"))
    rows = [(name, text(reason)) for name, reason in plain.items()]
    rows += [(text(name), "not built by the model class, carried along") for name in listed(report.get("kept"))]
    yield grid(("module or tensor", "why"), rows) if rows else tag("p", "Nothing with a matrix of weights.")
    for note in (*listed(report.get("cautions")), *listed(report.get("notes"))):
        yield tag("p", f"Note: {text(note).rstrip('.')}.")


def _row(layer: LayerFacts) -> tuple[str, ...]:
    return (
        layer.name,
        layer.key,
        "x".join(map(str, layer.shape)),
        "" if layer.bits is None else f"{layer.bits:.3f}",
        "lossless" if layer.sqnr_db is None else f"{layer.sqnr_db:.1f}",
        "" if layer.loss is None else f"{layer.loss:.3e}",
        _percent(layer.clipped),
        "" if layer.tokens is None else f"{layer.tokens:,}",
        layer.method,
        "; ".join(layer.remarks),
    )


def _measure(label: str, value: float) -> str:
    return f"{value:.2%}" if "agreement" in label else f"{value:.4f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.2%}"


def _change(before: float | None, after: float | None) -> str:
    if before is None or after is None:
        return ""
    share = f" ({after / before:.1%})" if before > 0 else ""
    return f"{before:,.0f} bytes became {after:,.0f}{share}"


def _remarks(report: Mapping[str, Any]) -> str:
    layers = list(layers_of(report))
    told = [layer for layer in layers if layer.remarks]
    if not told:
        return ""
    return f"{len(told)} of {len(layers)} have some; {told[0].name}: {'; '.join(told[0].remarks)}"


def _calibration(record: Mapping[str, Any]) -> str:
    if not record:
        return "none: the algorithm read no data"
    return f"{text(record.get('source'))}, {text(record.get('windows'))} windows of {text(record.get('length'))} tokens"
