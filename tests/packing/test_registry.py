"""The registry of packings, what it does to whole records, and how implementations are found."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from fewbit.discovery import implementations
from fewbit.errors import ShapeError
from fewbit.numerics import QuantizedTensor, dequantize, quantize
from fewbit.packing.interface import Packing
from fewbit.packing.registry import dequantize_record, pack_record, packings, unpack_record
from fewbit.spec import PLAIN, Layout, QuantKey

ALONG_N = Layout("dense", 4, "N", 32, 8)
RECORDS = [
    ("int4:group16:f16", Layout("dense", 4, "K", 32, 8), PLAIN),
    ("int4:asym:group16:f16", Layout("dense", 4, "K", 32, 8), ALONG_N),
    ("int4:asym:group16:f16", Layout("dense", 4, "K", 32, 8), PLAIN),
    ("int4:asym:group16:f16", PLAIN, ALONG_N),
    ("uint3:asym:group16:f16", Layout("dense", 3, "N", 32), Layout("dense", 3, "N", 32, -1)),
    ("uint4b8:group16:f16", Layout("dense", 4, "K", 32), PLAIN),
    ("e2m1:group16:e4m3/tensor:f32", Layout("dense", 4, "K", 8), PLAIN),
    ("e2m3:group32:e8m0", Layout("dense", 6, "K", 8), PLAIN),
    ("e4m3:block4x16:f32", Layout("dense", 8, "K", 32), PLAIN),
    ("e4m3:channel:f32", PLAIN, PLAIN),
]


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _assert_same(one: QuantizedTensor, other: QuantizedTensor) -> None:
    assert (one.key, one.shape, one.layout, one.zero_point_layout) == (
        other.key,
        other.shape,
        other.layout,
        other.zero_point_layout,
    )
    assert one.tensors.keys() == other.tensors.keys()
    for role in one.tensors:
        assert _same(one[role], other[role]), role


@pytest.mark.parametrize(("key", "layout", "zero_point_layout"), RECORDS)
@pytest.mark.parametrize("shape", [(8, 64), (5, 50), (3, 5, 50), (0, 32), (8, 0)], ids=str)
def test_packing_a_record_changes_nothing_it_stands_for(
    key: str, layout: Layout, zero_point_layout: Layout, shape: tuple[int, ...]
) -> None:
    plain = quantize(torch.randn(shape), QuantKey.parse(key))
    packed = pack_record(plain, layout, zero_point_layout)
    packed.validate()
    assert (packed.layout, packed.zero_point_layout) == (layout, zero_point_layout)
    assert tuple(packed["codes"].shape) == packings()[layout.packing].packed_shape(shape, layout)
    _assert_same(unpack_record(packed), plain)
    assert torch.equal(dequantize_record(packed), dequantize(plain))
    _assert_same(pack_record(unpack_record(packed), layout, zero_point_layout), packed)


def test_a_record_moves_between_layouts() -> None:
    plain = quantize(torch.randn(16, 64), QuantKey.parse("int4:asym:group16:f16"))
    along_k, along_n = Layout("dense", 4, "K", 32, 8), Layout("dense", 4, "N", 8)
    _assert_same(pack_record(pack_record(plain, along_k, ALONG_N), along_n), pack_record(plain, along_n))


def test_packed_codes_take_their_bits() -> None:
    record = quantize(torch.randn(64, 256), QuantKey.parse("int4:group128:f16"))
    packed = pack_record(record, Layout("dense", 4, "K", 32, 8))
    assert packed.bits_per_weight == record.key.bits_per_weight(record.shape) == 4 + 16 / 128


def test_a_packed_record_is_not_dequantized_by_mistake() -> None:
    record = quantize(torch.randn(8, 64), QuantKey.parse("int4:group16:f16"))
    with pytest.raises(AssertionError, match="unpack"):
        dequantize(pack_record(record, Layout("dense", 4, "K", 32, 8)))


@pytest.mark.parametrize(
    "layout", [Layout("plain", 4), Layout("plain", offset=8), Layout("plain", axis="N"), Layout("plain", word_bits=32)]
)
def test_a_plain_layout_with_bits_or_offsets_is_refused(layout: Layout) -> None:
    assert packings()[PLAIN.packing].packed_shape((2, 3), PLAIN) == (2, 3)
    with pytest.raises(ShapeError, match="plain"):
        packings()["plain"].packed_shape((2, 3), layout)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An importable package `planted` with nothing in it."""
    package = tmp_path / "planted"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "inner" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield package
    for name in [name for name in sys.modules if name.split(".")[0] == "planted"]:
        del sys.modules[name]


def _plant(folder: Path, file: str, name: str, base: str = "Plain") -> ModuleType:
    source = f"from fewbit.packing.plain import Plain\nclass Mine({base}):\n    name = {name!r}\n"
    (folder / file).write_text(source)
    importlib.invalidate_caches()
    return importlib.import_module("planted")


def test_a_new_file_is_enough(folder: Path) -> None:
    _plant(folder, "first.py", "one")
    package = _plant(folder, "inner/second.py", "two")
    assert list(implementations(package, Packing)) == ["one", "two"]


def test_two_files_of_one_name_are_a_defect(folder: Path) -> None:
    _plant(folder, "first.py", "same")
    package = _plant(folder, "second.py", "same")
    with pytest.raises(RuntimeError, match="'same'"):
        implementations(package, Packing)


def test_what_is_imported_or_abstract_is_not_found_again(folder: Path) -> None:
    package = _plant(folder, "first.py", "one")  # it imports `Plain`, which another folder owns
    source = "from fewbit.packing.interface import Packing\nclass Half(Packing):\n    name = 'half'\n"
    (folder / "abstract.py").write_text(source)
    assert list(implementations(package, Packing)) == ["one"]
