"""AWQ: configurations, its rule for excluded modules, and telling the versions of the layout apart."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from fewbit.checkpoints.awq import Awq, matches_awq
from fewbit.checkpoints.interface import StoredLayer, TensorHeader
from fewbit.errors import CheckpointError, OutputError
from fewbit.models.stored import StoredCheckpoint
from fewbit.numerics import quantize
from fewbit.packing.registry import dequantize_record, unpack_record
from fewbit.spec import LinearKey
from tests.checkpoints.layers import SHAPE, headers, layer, same_bits

AWQ = Awq()
SYM, ASYM = LinearKey.parse("int4:group64:f16"), LinearKey.parse("int4:asym:group64:f16")
BASE = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}


# --- configurations --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "key", "variant"),
    [
        (BASE, "int4:asym:group64:f16", "gemm"),
        (BASE | {"version": "GEMM"}, "int4:asym:group64:f16", "gemm"),
        (BASE | {"version": "gemv"}, "int4:asym:group64:f16", "gemv"),
        (BASE | {"version": "gemv_fast"}, "int4:asym:group64:f16", "gemv_fast"),
        (BASE | {"backend": "llm-awq"}, "int4:asym:group64:f16", "gemv_fast"),
        (BASE | {"zero_point": False, "version": "marlin"}, "int4:group64:f16", "marlin"),
        (BASE | {"format": "gemm", "method": "awq", "checkpoint_format": "gemm"}, "int4:asym:group64:f16", "gemm"),
        ({"w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"}, "int4:asym:group128:f16", "gemm"),
        ({"bits": 4, "group_size": -1}, "int4:asym:channel:f16", "gemm"),
        ({"bits": 4, "group_size": 64, "sym": True}, "int4:group64:f16", "gemm"),
        ({"bits": 4, "group_size": 64, "sym": True, "zero_point": False}, "int4:group64:f16", "gemm"),
    ],
)
def test_configurations(config: dict[str, Any], key: str, variant: str) -> None:
    scheme = AWQ.scheme(config)
    assert scheme.variant == variant
    assert str(scheme.key_for("model.layers.0.mlp.up_proj", "Linear", matches_awq)) == key
    assert scheme.key_for("lm_head", "Linear", matches_awq) is None
    with_head = AWQ.scheme(config | {"lm_head": True})
    assert str(with_head.key_for("lm_head", "Linear", matches_awq)) == key


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (BASE | {"bits": 8}, "AWQ weights have 4 bits, the configuration says 8"),
        ({"group_size": 128}, "bits is None"),
        (BASE | {"version": "gemx"}, "version is 'gemx'"),
        (BASE | {"zero_point": 1}, "zero_point is 1"),
        (BASE | {"group_size": [64]}, "group_size is"),
        (BASE | {"modules_to_not_convert": "visual"}, "modules_to_not_convert is 'visual'"),
    ],
)
def test_what_is_not_supported_is_named(config: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        AWQ.scheme(config)


@pytest.mark.parametrize(
    ("module", "quantized"),
    [("a.gate", False), ("a.gate_proj", False), ("visual.blocks.0.fc", False), ("a.up_proj", True)],
)
def test_excluded_modules_by_any_part_of_their_name(module: str, quantized: bool) -> None:
    scheme = AWQ.scheme(BASE | {"modules_to_not_convert": ["gate", "visual"]})
    assert (scheme.key_for(module, "Linear", matches_awq) is not None) is quantized


def test_a_part_of_a_segment_is_a_warning() -> None:
    """B05: AWQ's rule takes gate_proj along with gate; the tensors decide, and the reader is told."""
    scheme = AWQ.scheme(BASE | {"modules_to_not_convert": ["gate", "visual", "mlp.gate."]})
    plain = {"weight": TensorHeader("F16", SHAPE)}
    with pytest.warns(UserWarning, match="names m.gate_proj by 'gate', a part of a name's segment"):
        assert AWQ.describe(scheme, "m.gate_proj", plain) is None
    with pytest.warns(UserWarning, match="m.gate_proj"):
        assert AWQ.describe(scheme, "m.gate_proj", headers(AWQ.write(layer(ASYM), ASYM))) == StoredLayer(ASYM, "gemm")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for module in ("m.gate", "visual.fc", "m.mlp.gate"):
            assert AWQ.describe(scheme, module, plain) is None
        assert AWQ.describe(scheme, "m.gate_norm", {"weight": TensorHeader("F16", (64,))}) is None


def test_quant_config_alone(tmp_path: Path) -> None:
    """B11: the side file of AutoAWQ's own saver, with its own names."""
    record = quantize(torch.randn(SHAPE), ASYM.weight)
    tensors = AWQ.write(record, ASYM)
    save_file({f"m.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    side = {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}
    (tmp_path / "quant_config.json").write_text(json.dumps(side))
    stored = StoredCheckpoint.open(tmp_path)
    assert stored.decided_by == "quant_config.json"
    described = stored.describe("m")
    assert described == StoredLayer(ASYM, "gemm")
    assert torch.equal(dequantize_record(stored.record("m", described, SHAPE)), dequantize_record(record))


# --- layouts ---------------------------------------------------------------------------------------------------------


LAYERS = [
    (key, stored.variant)
    for size in ("group32", "group64", "group128", "group256", "channel")
    for key in (LinearKey.parse(f"int4:{size}:f16"), LinearKey.parse(f"int4:asym:{size}:f16"))
    for stored in AWQ.storages(key)
]


@pytest.mark.parametrize(("key", "variant"), LAYERS, ids=str)
@pytest.mark.parametrize("shape", [(256, 256), (64, 768), (320, 256)])
def test_every_version_of_every_key(key: LinearKey, variant: str, shape: tuple[int, int]) -> None:
    """B26, B34; shapes alone tell the versions apart, in square layers too."""
    record, stored = layer(key, shape), StoredLayer(key, variant)
    tensors = AWQ.write_as(record, stored)
    granularity = key.weight.granularity.columns or -1
    for version in ("gemm", variant):
        config = BASE | {"group_size": granularity, "zero_point": not key.weight.symmetric, "version": version}
        assert AWQ.describe(AWQ.scheme(config), "x", headers(tensors), shape=shape) == stored
        assert AWQ.describe(AWQ.scheme(config), "x", headers(tensors)) == stored
    back = AWQ.read(stored, tensors, shape)
    back.validate()
    plain = unpack_record(back)
    assert plain.tensors.keys() == record.tensors.keys()
    assert all(same_bits(plain[role], record[role]) for role in record.tensors)
    again = AWQ.write_as(back, stored)
    assert all(same_bits(again[name], tensor) for name, tensor in tensors.items())


def test_gemv_has_no_other_group_sizes() -> None:
    assert [stored.variant for stored in AWQ.storages(LinearKey.parse("int4:asym:group16:f16"))] == ["gemm"]


@given(rows=st.integers(1, 3), columns=st.integers(1, 70), size=st.sampled_from([16, 32]))
def test_zero_points_that_differ_in_every_column(rows: int, columns: int, size: int) -> None:
    """B26: against a plain loop over nibbles, with zero points equal to the column modulo 16."""
    key, shape = LinearKey.parse(f"int4:asym:group{size}:f16"), (32 * rows, columns)
    zeros = (torch.arange(32 * rows) % 16 - 8).to(torch.int8)[:, None].expand(-1, -(-columns // size))
    record = layer(key, shape).with_tensors(zero_point=zeros.contiguous())
    tensors = AWQ.write(record, key)
    numbers = torch.empty(shape)
    for n in range(shape[0]):
        shift = 4 * [0, 4, 1, 5, 2, 6, 3, 7][n % 8]
        codes = tensors["qweight"][:, n // 8] >> shift & 15
        zero = (tensors["qzeros"][:, n // 8] >> shift & 15)[torch.arange(columns) // size]
        assert (zero == n % 16).all()
        numbers[n] = (codes - zero) * tensors["scales"][torch.arange(columns) // size, n].float()
    back = AWQ.read(StoredLayer(key, "gemm"), tensors, shape)
    assert torch.equal(dequantize_record(back), numbers)


def test_symmetric_layers_do_not_read_their_zero_points() -> None:
    """B21: in gemm they may be there, may hold anything, and may be missing."""
    tensors = AWQ.write(layer(SYM), SYM)
    scheme = AWQ.scheme(BASE | {"zero_point": False})
    plain = dequantize_record(AWQ.read(StoredLayer(SYM, "gemm"), tensors, SHAPE))
    random = {**tensors, "qzeros": torch.randint(0, 1 << 31, tensors["qzeros"].shape, dtype=torch.int32)}
    without = {name: tensor for name, tensor in tensors.items() if name != "qzeros"}
    for found in (random, without):
        assert AWQ.describe(scheme, "x", headers(found)) == StoredLayer(SYM, "gemm")
        assert torch.equal(dequantize_record(AWQ.read(StoredLayer(SYM, "gemm"), found, SHAPE)), plain)


def test_scaled_zero_points_that_are_no_integers() -> None:
    stored = StoredLayer(ASYM, "gemv_fast")
    tensors = AWQ.write_as(layer(ASYM), stored)
    for wrong in (tensors["qzeros"] + tensors["scales"] / 2, tensors["scales"]):
        with pytest.raises(CheckpointError, match="needed integers of 0 to 15"):
            AWQ.read(stored, {**tensors, "qzeros": wrong}, SHAPE)


@pytest.mark.parametrize(
    ("variant", "axis", "quantum"), [("gemm", "N", 8), ("gemv_fast", "K", 1024), ("gemv", "K", 1024)]
)
def test_where_a_layer_may_be_cut(variant: str, axis: str, quantum: int) -> None:
    specs = AWQ.specs(StoredLayer(ASYM, variant))
    assert max(extent.quantum for spec in specs for extent in spec.shape if extent.axis == axis) == quantum


# --- writing ---------------------------------------------------------------------------------------------------------


def test_one_key_for_the_whole_model() -> None:
    config = AWQ.config({"a.b": ASYM, "a.c": ASYM}, ["lm_head"])
    assert config["modules_to_not_convert"] == ["lm_head"]
    assert config["version"] == "gemm"
    with pytest.raises(OutputError, match="one key for the whole model, found 2"):
        AWQ.config({"a": ASYM, "b": SYM}, [])


def test_an_exclusion_that_would_hit_a_quantized_layer() -> None:
    with pytest.raises(OutputError, match=r"contains 'a.gate', so also a.gate_proj"):
        AWQ.config({"a.gate_proj": ASYM}, ["a.gate"])


@pytest.mark.parametrize(
    ("key", "shape", "words"),
    [
        ("int8:group64:f16", SHAPE, "awq holds int4"),
        ("int4:tensor:f16", SHAPE, "awq holds int4"),
        ("int4:group64:f16 * int8:token:f32:dynamic", SHAPE, "awq holds int4"),
        ("int4:group64:f16", (40, 64), "multiple of 32, found 40"),
    ],
)
def test_refusals(key: str, shape: tuple[int, int], words: str) -> None:
    assert words in (AWQ.refuse(LinearKey.parse(key), shape) or "")


def test_cautions() -> None:
    assert AWQ.caution(ASYM, SHAPE) is None
    assert "do not divide K=96" in (AWQ.caution(ASYM, (32, 96)) or "")
