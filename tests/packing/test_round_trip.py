"""Every registered packing against its contract: words and codes are an inverse pair."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fewbit.errors import ShapeError
from fewbit.numerics import code_dtype
from fewbit.packing.interface import Packing
from fewbit.packing.registry import packings
from fewbit.spec import ELEMENTS, PLAIN, Element, Layout

ROOMY = (128, 128)  # a shape that every packing holds in the layouts it has
WORD_BITS = (8, 16, 32, 64)
CODED = [element for element in ELEMENTS.values() if element.bits <= 8]


def _accepts(packing: Packing, shape: tuple[int, ...], layout: Layout) -> bool:
    try:
        packing.packed_shape(shape, layout)
    except ShapeError:
        return False
    return True


def _layouts(name: str) -> list[Layout]:
    """Every layout that the packing has: it refuses the others."""
    candidates = [
        Layout(name, bits, axis, word_bits, offset, transposed)
        for bits, axis, word_bits, transposed in product(range(1, 9), ("N", "K"), WORD_BITS, (False, True))
        for offset in sorted({0, 1 << (bits - 1), -1})
    ]
    return [layout for layout in candidates if _accepts(packings()[name], ROOMY, layout)]


ALL = [(name, layout) for name in packings() for layout in _layouts(name)]
SIZES = st.integers(0, 70) | st.sampled_from([8, 16, 32, 64, 128])
SHAPES = st.builds(lambda lead, *last: (*lead, *last), st.lists(st.integers(0, 3), max_size=2), SIZES, SIZES)


def _elements(layout: Layout) -> list[Element]:
    """The elements whose codes fill the layout's fields; the plain layout holds a code of any element."""
    return [element for element in CODED if layout == PLAIN or element.bits == layout.bits]


def _random_codes(shape: tuple[int, ...], element: Element, seed: int) -> Tensor:
    """Codes of `shape` in which every code of the element occurs, room given."""
    generator = torch.Generator().manual_seed(seed)
    fields = torch.randint(0, 1 << element.bits, shape, generator=generator, dtype=torch.int64)
    every = torch.arange(1 << element.bits)[: fields.numel()]
    fields.view(-1)[: len(every)] = every
    dtype = code_dtype(element)
    if dtype is torch.int8:
        half = 1 << (element.bits - 1)
        return ((fields + half) % (2 * half) - half).to(torch.int8)
    return fields.to(torch.uint8).view(dtype) if dtype.is_floating_point else fields.to(dtype)


def _raw(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8)


@pytest.mark.parametrize("name", packings())
def test_a_packing_has_layouts(name: str) -> None:
    assert packings()[name].name == name
    assert _layouts(name)


@settings(max_examples=200)
@given(
    case=st.sampled_from(ALL),
    shape=SHAPES,
    seed=st.integers(0, 1 << 30),
    data=st.data(),
)
def test_unpack_undoes_pack(case: tuple[str, Layout], shape: tuple[int, ...], seed: int, data: st.DataObject) -> None:
    name, layout = case
    packing = packings()[name]
    elements = _elements(layout)
    assume(elements and _accepts(packing, shape, layout))
    element = data.draw(st.sampled_from(elements))
    codes = _random_codes(shape, element, seed)
    before = codes.clone()
    words = packing.pack(codes, layout)
    assert tuple(words.shape) == packing.packed_shape(shape, layout)
    again = packing.unpack(words, layout, element, shape)
    assert again.dtype == codes.dtype
    assert torch.equal(_raw(again), _raw(codes))
    assert torch.equal(_raw(codes), _raw(before))


@pytest.mark.parametrize("case", ALL, ids=lambda case: str(case[1]))
def test_every_code_of_every_element_survives(case: tuple[str, Layout]) -> None:
    name, layout = case
    for element in _elements(layout):
        codes = _random_codes((2, *ROOMY), element, seed=0)
        words = packings()[name].pack(codes, layout)
        again = packings()[name].unpack(words, layout, element, tuple(codes.shape))
        assert torch.equal(_raw(again), _raw(codes)), element


@pytest.mark.parametrize("case", ALL, ids=lambda case: str(case[1]))
def test_a_stack_is_packed_slice_by_slice(case: tuple[str, Layout]) -> None:
    name, layout = case
    for element in _elements(layout)[:1]:
        codes = _random_codes((3, *ROOMY), element, seed=1)
        slices = torch.stack([packings()[name].pack(piece, layout) for piece in codes])
        assert torch.equal(_raw(packings()[name].pack(codes, layout)), _raw(slices))


@pytest.mark.parametrize("case", ALL, ids=lambda case: str(case[1]))
def test_a_view_packs_like_its_copy(case: tuple[str, Layout]) -> None:
    name, layout = case
    for element in _elements(layout)[:1]:
        codes = _random_codes((ROOMY[1], ROOMY[0]), element, seed=2).T
        assert torch.equal(
            _raw(packings()[name].pack(codes, layout).contiguous()),
            _raw(packings()[name].pack(codes.contiguous(), layout)),
        )
