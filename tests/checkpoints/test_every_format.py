"""What holds for every checkpoint format of the folder, whoever wrote it."""

from __future__ import annotations

from functools import cache
from math import lcm

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from fewbit.checkpoints.interface import CheckpointFormat, StoredLayer, TensorHeader
from fewbit.checkpoints.registry import find_format, formats
from fewbit.errors import CheckpointError, OutputError, ShapeError
from fewbit.numerics import QuantizedTensor, dequantize
from fewbit.packing.registry import dequantize_record, unpack_record
from fewbit.spec import CHANNEL, LinearKey, QuantKey, ScaleSpec, Scheme, group, integer
from fewbit.spec.element import BF16
from tests.checkpoints.layers import KEYS, SHAPE, headers, layer, same_bits

MODULE = "model.layers.0.mlp.down_proj"

EVERY_FORMAT = pytest.mark.parametrize("name", formats())
HELD = [(name, key) for name, found in formats().items() for key in KEYS if found.refuse(KEYS[key], SHAPE) is None]
EVERY_HELD_KEY = pytest.mark.parametrize(("name", "key"), HELD)


def written_scheme(found: CheckpointFormat, key: LinearKey) -> Scheme:
    """The scheme that a reader gets from the configuration a writer wrote."""
    config = found.config({MODULE: key}, ["lm_head"])
    assert find_format(config) is found
    return found.scheme(config)


def describe(
    found: CheckpointFormat, key: LinearKey, tensors: dict[str, Tensor], shape: tuple[int, ...] = SHAPE
) -> StoredLayer:
    stored = found.describe(written_scheme(found, key), MODULE, headers(tensors), "Linear", (shape[0], shape[1]))
    assert stored is not None
    return stored


@cache
def written(name: str, key: str) -> tuple[dict[str, Tensor], StoredLayer]:
    """A layer of that key as the format writes it, and what it says it is."""
    tensors = formats()[name].write(layer(KEYS[key]), KEYS[key])
    return tensors, describe(formats()[name], KEYS[key], tensors)


def check_round_trip(found: CheckpointFormat, key: LinearKey, record: QuantizedTensor) -> None:
    tensors = found.write(record, key)
    stored = describe(found, key, tensors, record.shape)
    assert stored.key == key
    back = found.read(stored, tensors, (record.shape[0], record.shape[1]))
    back.validate(MODULE)
    again = found.write(back, key)
    assert again.keys() == tensors.keys()
    assert all(same_bits(again[name], tensors[name]) for name in tensors)
    plain, unpacked = unpack_record(record), unpack_record(back)
    assert unpacked.tensors.keys() == plain.tensors.keys()
    assert all(same_bits(unpacked[role], plain[role]) for role in plain.tensors)
    assert same_bits(dequantize(unpacked), dequantize(plain))


@EVERY_HELD_KEY
def test_what_is_written_reads_back_bit_for_bit(name: str, key: str) -> None:
    check_round_trip(formats()[name], KEYS[key], layer(KEYS[key]))


@EVERY_HELD_KEY
def test_codes_are_packed_where_they_lie(name: str, key: str) -> None:
    """On meta whatever brings them to the CPU, or looks at a number, is an error; a table of codes may be looked at."""
    record = layer(KEYS[key])
    tables = {role: record[role] for role in ("codebook",) if role in record}
    made = formats()[name].write(record.to("meta").with_tensors(**tables), KEYS[key])
    known, _ = written(name, key)
    assert made.keys() == known.keys()
    largest = max(known, key=lambda tensor: known[tensor].nbytes)
    assert made[largest].is_meta
    assert all((one.dtype, one.shape) == (known[tensor].dtype, known[tensor].shape) for tensor, one in made.items())


@EVERY_HELD_KEY
def test_written_tensors_are_those_of_the_specs(name: str, key: str) -> None:
    tensors, stored = written(name, key)
    specs = {spec.name: spec for spec in formats()[name].specs(stored)}
    assert tensors.keys() <= specs.keys()
    assert {spec.name for spec in specs.values() if not spec.optional} <= tensors.keys()
    for tensor_name, tensor in tensors.items():
        assert specs[tensor_name].shape is None or tuple(tensor.shape) == specs[tensor_name].shape_of(*SHAPE)
        assert specs[tensor_name].dtype in (None, str(tensor.dtype).removeprefix("torch."))
        assert tensor.is_contiguous()


@pytest.mark.parametrize("axis", ["N", "K"])
@EVERY_HELD_KEY
def test_sharding_the_file_is_sharding_the_layer(name: str, key: str, axis: str) -> None:
    found, (tensors, stored) = formats()[name], written(name, key)
    position = 0 if axis == "N" else 1
    if any(axis in spec.uncut for spec in found.specs(stored)):
        with pytest.raises(ShapeError, match=f"cannot be split along {axis}"):
            [spec.shard(axis, SHAPE[position], 0, 2) for spec in found.specs(stored)]
        return
    whole = dequantize_record(found.read(stored, tensors, SHAPE))
    half = SHAPE[position] // 2
    shape = (half, SHAPE[1]) if axis == "N" else (SHAPE[0], half)
    for rank in range(2):
        shard = {}
        for spec in found.specs(stored):
            if spec.name in tensors:
                cut = spec.shard(axis, SHAPE[position], rank, 2)
                shard[spec.name] = tensors[spec.name].narrow(*cut) if cut else tensors[spec.name]
        record = found.read(stored, shard, shape)
        assert torch.equal(dequantize_record(record), whole.narrow(position, rank * half, half))


@st.composite
def integer_layers(draw: st.DrawFn, name: str) -> tuple[LinearKey, tuple[int, int]]:
    """Integer keys of any width the format has, groups of any size, shapes that neither words nor groups divide."""
    size = draw(st.sampled_from([0, 4, 8, 24, 32]))
    granularity = group(size) if size else CHANNEL
    held = [b for b in range(2, 9) if not formats()[name].refuse(LinearKey.parse(f"int{b}:channel:bf16"), SHAPE)]
    weight = QuantKey(integer(draw(st.sampled_from(held))), ScaleSpec(BF16, granularity), symmetric=draw(st.booleans()))
    aligned = st.sampled_from([32, 64, 96])  # what some formats insist on
    return LinearKey(weight), (draw(aligned | st.integers(1, 40)), draw(aligned | st.integers(1, 100)))


@pytest.mark.parametrize("name", [name for name, key in HELD if key == "int4:channel:bf16"])
@given(data=st.data())
def test_integers_of_any_shape(name: str, data: st.DataObject) -> None:
    key, shape = data.draw(integer_layers(name))
    assume(formats()[name].refuse(key, shape) is None)
    check_round_trip(formats()[name], key, layer(key, shape))


@given(held=st.sampled_from(HELD), rows=st.integers(1, 140), groups=st.integers(1, 3))
def test_every_key_of_any_shape(held: tuple[str, str], rows: int, groups: int) -> None:
    name, key = held
    parts = [part.granularity for part in (KEYS[key].weight, KEYS[key].activation) if part]
    columns = groups * lcm(*(part.columns for part in parts if part.kind == "group")) * (2 if len(parts) == 1 else 1)
    assume(formats()[name].refuse(KEYS[key], (rows, columns)) is None)
    check_round_trip(formats()[name], KEYS[key], layer(KEYS[key], (rows, columns)))


@EVERY_FORMAT
def test_a_refused_key_is_not_written(name: str) -> None:
    found = formats()[name]
    key = LinearKey.parse("e5m2fnuz:group7:e4m3")
    assert "e5m2fnuz" in (found.refuse(key, SHAPE) or "")
    with pytest.raises(OutputError, match="e5m2fnuz"):
        found.write(layer(key), key)


@pytest.mark.parametrize("name", sorted({name for name, _ in HELD}))
def test_roles_without_a_place_are_not_dropped(name: str) -> None:
    found, key = formats()[name], next(key for held, key in HELD if held == name)
    places = {spec.role for spec in found.specs(written(name, key)[1])}
    role = next(role for role in ("pre_scale", "minimum") if role not in places)
    with pytest.raises(OutputError, match=role):
        found.write(layer(KEYS[key]).with_tensors(**{role: torch.ones(SHAPE[1])}), KEYS[key])


@EVERY_HELD_KEY
def test_plain_weights_are_plain_whatever_the_configuration_says(name: str, key: str) -> None:
    scheme = written_scheme(formats()[name], KEYS[key])
    for dtype in ("BF16", "F16", "F32"):
        plain = {"weight": TensorHeader(dtype, SHAPE), "bias": TensorHeader(dtype, SHAPE[:1])}
        assert formats()[name].describe(scheme, MODULE, plain) is None
    assert formats()[name].describe(scheme, "model.norm", {"weight": TensorHeader("BF16", (4,))}, "RMSNorm") is None


@EVERY_HELD_KEY
def test_scales_without_their_weight_are_refused(name: str, key: str) -> None:
    found, (tensors, stored) = formats()[name], written(name, key)
    codes = next(spec.name for spec in found.specs(stored) if spec.role == "codes")
    orphans = {name: header for name, header in headers(tensors).items() if name != codes}
    with pytest.raises(CheckpointError, match=MODULE):
        found.describe(written_scheme(found, KEYS[key]), MODULE, orphans)


@EVERY_HELD_KEY
def test_every_needed_tensor_is_missed(name: str, key: str) -> None:
    found, (tensors, stored) = formats()[name], written(name, key)
    for spec in found.specs(stored):
        if spec.name in tensors and not spec.optional:
            rest = {name: tensor for name, tensor in tensors.items() if name != spec.name}
            with pytest.raises(CheckpointError, match=f"{spec.name} is missing"):
                found.read(stored, rest, SHAPE)


@EVERY_HELD_KEY
def test_wrong_shapes_and_dtypes_are_refused(name: str, key: str) -> None:
    found, (tensors, stored) = formats()[name], written(name, key)
    for tensor_name in (spec.name for spec in found.specs(stored) if spec.role in ("codes", "scale")):
        for wrong in (torch.cat([tensors[tensor_name]] * 3), tensors[tensor_name].to(torch.float64)):
            with pytest.raises(CheckpointError, match=tensor_name):
                found.read(stored, {**tensors, tensor_name: wrong}, SHAPE)


@EVERY_HELD_KEY
def test_scales_that_are_not_finite_are_refused(name: str, key: str) -> None:
    found, (tensors, stored) = formats()[name], written(name, key)
    for spec in found.specs(stored):
        if spec.role in ("scale", "input_scale"):
            broken = tensors[spec.name].clone()
            if broken.element_size() == 1:
                broken.view(torch.uint8).view(-1)[0] = 255
            else:
                broken.view(-1)[0] = float("nan")
            with pytest.raises(CheckpointError, match=f"{spec.name} .*not finite"):
                found.read(stored, {**tensors, spec.name: broken}, SHAPE)
