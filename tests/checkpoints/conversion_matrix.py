"""The table of docs/conversion.md: what every format holds of every other, tried on one layer of each kind.

`python -m tests.checkpoints.conversion_matrix` writes it (`make docs`); a test compares.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from fewbit.checkpoints.interface import StoredLayer
from fewbit.checkpoints.registry import formats, writable
from fewbit.models.conversion.holding import CannotHoldError, Held, hold, hold_as
from fewbit.numerics import QuantizedTensor
from fewbit.spec import LinearKey
from tests.checkpoints.layers import KEYS, layer

DOCUMENT = Path(__file__).parents[2] / "docs" / "conversion.md"
START, END = "<!-- made by `make docs` from the registry -->", "<!-- end -->"
EXACT, RESTATED, ROUNDED, REFUSED = "=", "≡", "≈", "-"

SHAPE = (64, 256)
"""As small as every format takes; two groups of 128."""

SECOND_LEVEL = 1 / 3000.7
"""Neither it nor its reciprocal is a float32, as with second-level scales of real weights."""


@dataclass(frozen=True)
class Sample:
    """A layer of one kind, as it comes out of quantizing or of a file."""

    label: str
    key: LinearKey
    record: QuantizedTensor


@cache
def samples() -> dict[str, Sample]:
    """One layer of each kind of key, and of each thing that a record may have beside what its key says."""
    torch.manual_seed(0)
    found = {}
    for key in KEYS.values():
        record = layer(key, SHAPE)
        changes = {
            role: torch.full_like(record[role], SECOND_LEVEL)
            for role in ("global_scale", "input_global_scale")
            if role in record
        }
        found[str(key)] = Sample(str(key), key, record.with_tensors(**changes))
    int4 = LinearKey.parse("int4:group64:f16")
    order = torch.randperm(SHAPE[1]).int() % (SHAPE[1] // 64)
    for what, changes in (
        ("act-order", {"order": order}),
        ("a factor on each input feature", {"pre_scale": torch.rand(SHAPE[1]) + 0.5}),
    ):
        label = f"{int4} with {what}"
        found[label] = Sample(label, int4, layer(int4, SHAPE).with_tensors(**changes))
    return found | _blocks()


def _blocks() -> dict[str, Sample]:
    """GGUF's block types, where the plugin is installed: random bytes but for the floats in them."""
    gguf = formats().get("gguf")
    if gguf is None:
        return {}
    from fewbit_gguf.blocks import BLOCK_TYPES, put_floats  # installed with the plugin

    found = {}
    for name, one in BLOCK_TYPES.items():
        blocks = torch.randint(0, 256, (SHAPE[0], SHAPE[1] // one.elements, one.nbytes), dtype=torch.uint8)
        shape = blocks.shape[:2]
        narrow = one.scale_element.name == "e8m0"
        scale = torch.randint(100, 150, shape, dtype=torch.uint8) if narrow else (torch.rand(shape) + 0.5).half()
        put_floats(blocks, one.scale, scale)
        if one.minimum is not None:
            put_floats(blocks, one.minimum, torch.rand(shape).half())
        (spec,) = gguf.specs(StoredLayer(one.key, name))
        record = gguf.read(StoredLayer(one.key, name), {spec.name: blocks}, SHAPE)
        found[f"{name} of GGUF"] = Sample(f"{name} of GGUF", one.key, record)
    return found


def targets() -> list[str]:
    """Formats that `convert` writes."""
    return writable()


def sources() -> list[str]:
    """Formats that hold layers of the samples."""
    return [name for name, found in formats().items() if found.writes_layers]


def tried(target: str, record: QuantizedTensor, key: LinearKey) -> Held | None:
    """The record as the format holds it, None where it does not."""
    try:
        return hold(formats()[target], record, key)
    except CannotHoldError:
        return None


@cache
def outcomes(source: str) -> dict[str, tuple[Sample, QuantizedTensor, dict[str, Held | None]]]:
    """Label -> sample, the record as the source gives it back, and what becomes of it in each target."""
    return {
        sample.label: (sample, record, {target: tried(target, record, sample.key) for target in targets()})
        for sample, record in own(source)
    }


def own(source: str) -> Iterator[tuple[Sample, QuantizedTensor]]:
    """Every sample that a format holds under its own key, as the format gives it back."""
    for sample in samples().values():
        try:
            held = hold_as(formats()[source], sample.record, sample.key, "layer")
        except CannotHoldError:
            continue
        yield sample, held.record


def mark(held: Held | None, key: LinearKey) -> str:
    if held is None:
        return REFUSED
    if held.rounded:
        return ROUNDED
    return EXACT if held.key == key else RESTATED


def table() -> str:
    """The two tables as Markdown."""
    names = targets()
    lines = ["| from \\ to | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for source in sources():
        found = outcomes(source).values()
        cells = [_cell([mark(held[name], sample.key) for sample, _, held in found]) for name in names]
        lines.append(f"| **{source}** | " + " | ".join(cells) + " |")
    lines += ["", "| kind of layer | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for sample in samples().values():
        marks = [mark(tried(name, sample.record, sample.key), sample.key) for name in names]
        if {*marks} != {REFUSED}:
            lines.append(f"| `{sample.label}` | " + " | ".join(marks) + " |")
    return "\n".join(lines)


def _cell(marks: list[str]) -> str:
    """How many of the source's kinds of layers the target holds, and how many of them rounded."""
    held, rounded = sum(one != REFUSED for one in marks), marks.count(ROUNDED)
    if not held:
        return REFUSED
    count = "all" if held == len(marks) else f"{held}/{len(marks)}"
    return f"{count} ({rounded}{ROUNDED})" if rounded else count


def with_table(text: str) -> str:
    """The document with its tables made anew."""
    before, _, rest = text.partition(START)
    return f"{before}{START}\n\n{table()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    DOCUMENT.write_text(with_table(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
