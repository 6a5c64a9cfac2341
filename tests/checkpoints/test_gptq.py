"""GPTQ: configurations, versions of zero points, act-order, and what is not written."""

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
from torch import Tensor

from fewbit.checkpoints.gptq import Gptq, matches_gptq
from fewbit.checkpoints.interface import StoredLayer
from fewbit.errors import CheckpointError, OutputError, SchemeError, ShapeError
from fewbit.models.stored import StoredCheckpoint
from fewbit.numerics import QuantizedTensor, quantize
from fewbit.packing.registry import dequantize_record, unpack_record
from fewbit.spec import LinearKey
from fewbit.spec.scheme import Rule, Scheme
from tests.checkpoints.layers import KEYS, SHAPE, headers, layer, same_bits

GPTQ = Gptq()
SYM, ASYM = LinearKey.parse("int4:group32:f16"), LinearKey.parse("int4:asym:group8:f16")
BASE = {"quant_method": "gptq", "bits": 4, "group_size": 32}
Q_PROJ, HEAD = "model.layers.1.self_attn.q_proj", "lm_head"


def key_of(config: dict[str, Any], module: str = Q_PROJ) -> str:
    return str(GPTQ.scheme(config).key_for(module, "Linear", matches_gptq))


# --- configurations --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (BASE, "int4:group32:f16"),  # sym is true where nothing is said
        (BASE | {"sym": False}, "int4:asym:group32:f16"),
        (BASE | {"zero_point": True}, "int4:asym:group32:f16"),
        ({"wbits": 8, "q_group_size": 128}, "int8:group128:f16"),
        ({"w_bit": 2, "group_size": 64}, "int2:group64:f16"),
    ],
)
def test_settings_under_all_their_names(config: dict[str, Any], key: str) -> None:
    assert key_of(config) == key


@pytest.mark.parametrize("size", [-1, None, 0])
def test_one_group_over_all_input_features(size: int | None) -> None:
    """B32: whatever stands for it."""
    assert key_of(BASE | {"group_size": size}) == "int4:channel:f16"
    record = layer(LinearKey.parse("int4:channel:f16"), (16, 40))
    tensors = GPTQ.write(record, LinearKey.parse("int4:channel:f16"))
    for group_size in (size, 40):
        stored = GPTQ.describe(GPTQ.scheme(BASE | {"group_size": group_size}), "x", headers(tensors))
        assert stored is not None
        assert torch.equal(dequantize_record(GPTQ.read(stored, tensors, (16, 40))), dequantize_record(record))


@pytest.mark.parametrize("key", ["checkpoint_format", "format", "version"])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2", "gptq_p"])
def test_versions(key: str, version: str) -> None:
    assert GPTQ.scheme(BASE | {key: version.upper()}).variant == version


@pytest.mark.parametrize(
    ("more", "variant"),
    [
        ({"checkpoint_format": "gptq_p"}, "gptq_p"),
        ({"meta": {"quantizer": ["gptqmodel:7.7.0"]}}, "gptq_p"),
        ({"meta": {"quantizer": "gptqmodel:5.0.0"}, "format": "gptq"}, "gptq_p"),
        ({"provider": "auto-round"}, "gptq"),
        ({"autoround_version": "0.16.1", "checkpoint_format": "gptq_v2"}, "gptq_v2"),
    ],
)
@pytest.mark.parametrize("bits", [5, 6, 7])
def test_who_wrote_it_decides_whether_words_are_planar(more: dict[str, Any], variant: str, bits: int) -> None:
    assert GPTQ.scheme(BASE | {"bits": bits} | more).variant == variant
    dynamic = {"dynamic": {"+:.*down": {"bits": bits}}}
    assert GPTQ.scheme(BASE | dynamic | more).variant == variant


@pytest.mark.parametrize("bits", [5, 6, 7])
def test_words_that_may_be_planar_or_dense_are_refused(bits: int) -> None:
    with pytest.raises(CheckpointError, match=f"Words of {bits} bits are planar when GPTQModel"):
        GPTQ.scheme(BASE | {"bits": bits})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "has no bits"),
        ({"bits": "4"}, "bits is '4'"),
        ({"bits": 9}, "9 bits"),
        (BASE | {"group_size": "128"}, "group_size of the configuration is '128'"),
        (BASE | {"group_size": -3}, "is -3"),
        (BASE | {"sym": "yes"}, "sym is 'yes'"),
        (BASE | {"checkpoint_format": "marlin"}, "'marlin'"),
        (BASE | {"checkpoint_format": "bitblas"}, "'bitblas'"),
        (BASE | {"is_marlin_format": True}, "'marlin'"),
        (BASE | {"pack_dtype": "int16"}, "pack_dtype is 'int16'"),
        (BASE | {"dynamic": ["a"]}, "dynamic is"),
        (BASE | {"dynamic": {"+:a": 8}}, r"dynamic\['\+:a'\] is 8"),
        (BASE | {"lm_head": "no"}, "lm_head is 'no'"),
        (BASE | {"modules_in_block_to_quantize": "q_proj"}, "modules_in_block_to_quantize is 'q_proj'"),
    ],
)
def test_what_is_not_supported_is_named(config: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        GPTQ.scheme(config)


DYNAMIC = {
    r"-:model\.layers\.0\.": {},
    r"+:.*q_proj": {"bits": 8, "group_size": -1},
    r"-:.*\.layers\.1\.": {},
    r".*down": {"sym": False},
    r"+:.*lm_head": {"bits": 8},
}


@pytest.mark.parametrize(
    ("module", "key"),
    [
        ("model.layers.0.self_attn.q_proj", "None"),  # the first hit decides, for
        ("model.layers.1.self_attn.q_proj", "int8:channel:f16"),  # and against
        ("model.layers.1.self_attn.k_proj", "None"),
        ("model.layers.2.mlp.down_proj", "int4:asym:group32:f16"),  # no prefix is +:, missing keys are the model's
        ("model.layers.2.self_attn.k_proj", "int4:group32:f16"),
        ("model.layers.10.self_attn.k_proj", "int4:group32:f16"),
        ("lm_head", "int8:group32:f16"),
    ],
)
def test_dynamic_rules(module: str, key: str) -> None:
    assert key_of(BASE | {"dynamic": DYNAMIC}, module) == key


def test_dynamic_rules_match_from_the_start_of_the_name() -> None:
    assert key_of(BASE | {"dynamic": {"-:self_attn": {}}}) == "int4:group32:f16"
    assert key_of(BASE | {"dynamic": {"-:model.layers.1": {}}}) == "None"
    with pytest.raises(SchemeError, match="no regular expression"):
        key_of(BASE | {"dynamic": {"-:(": {}}})


@pytest.mark.parametrize(
    ("more", "head", "q_proj", "gate"),
    [
        ({}, "None", "int4:group32:f16", "int4:group32:f16"),
        ({"lm_head": True}, "int4:group32:f16", "int4:group32:f16", "int4:group32:f16"),
        ({"modules_in_block_to_quantize": [["self_attn.q_proj"], ["x"]]}, "None", "int4:group32:f16", "None"),
        ({"modules_in_block_to_quantize": ["q_proj"], "lm_head": True}, "int4:group32:f16", "int4:group32:f16", "None"),
        ({"modules_in_block_to_quantize": []}, "None", "int4:group32:f16", "int4:group32:f16"),
    ],
)
def test_which_modules(more: dict[str, Any], head: str, q_proj: str, gate: str) -> None:
    config = BASE | more
    assert [key_of(config, name) for name in (HEAD, Q_PROJ, "model.layers.1.mlp.gate")] == [head, q_proj, gate]


def test_quantize_config_alone(tmp_path: Path) -> None:
    """B11: nothing in config.json; the side file says that the zero points are those of v2."""
    record = quantize(torch.randn(32, 64), ASYM.weight)
    tensors = GPTQ.write_as(record, StoredLayer(ASYM, "gptq_v2"))
    save_file({f"m.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    side = {"bits": 4, "group_size": 8, "sym": False, "desc_act": False, "checkpoint_format": "gptq_v2"}
    (tmp_path / "quantize_config.json").write_text(json.dumps(side))
    stored = StoredCheckpoint.open(tmp_path)
    assert stored.decided_by == "quantize_config.json"
    described = stored.describe("m")
    assert described == StoredLayer(ASYM, "gptq_v2")
    assert torch.equal(dequantize_record(stored.record("m", described, (32, 64))), dequantize_record(record))


# --- tensors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [text for text, key in KEYS.items() if GPTQ.storages(key)])
def test_every_version_of_every_key(text: str) -> None:
    """B18, B24: 2 to 8 bits, three rules for zero points and two for words, of the same numbers."""
    key, record = KEYS[text], layer(KEYS[text])
    for stored in GPTQ.storages(key):
        tensors = GPTQ.write_as(record, stored)
        scheme = Scheme("", (Rule(("Linear",), key),), (), variant=stored.variant)
        assert GPTQ.describe(scheme, "x", headers(tensors)) == stored
        back = unpack_record(GPTQ.read(stored, tensors, SHAPE))
        assert back.tensors.keys() == record.tensors.keys()
        assert all(same_bits(back[role], record[role]) for role in record.tensors)


@given(bits=st.sampled_from([2, 3, 4, 8]), zero=st.integers(0, 255), symmetric=st.booleans())
def test_zero_points_of_both_versions(bits: int, zero: int, symmetric: bool) -> None:
    """B20: v1 stores zero minus one modulo 2**bits, so that zero 0 is all ones, in its own field alone."""
    half = 1 << (bits - 1)
    zero = half if symmetric else zero % (1 << bits)
    key = LinearKey.parse(f"int{bits}:{'' if symmetric else 'asym:'}channel:f16")
    record = layer(key, (32, 32))
    if not symmetric:
        zeros = torch.full((32, 1), -1, dtype=torch.int8)
        zeros[7] = zero - half
        record = record.with_tensors(zero_point=zeros)
    for version, shift in (("gptq", 1), ("gptq_v2", 0)):
        tensors = GPTQ.write_as(record, StoredLayer(key, version))
        string = sum((word & 0xFFFFFFFF) << (32 * i) for i, word in enumerate(tensors["qzeros"][0].tolist()))
        fields = [string >> (bits * i) & ((1 << bits) - 1) for i in range(32)]
        others = half if symmetric else half - 1
        assert fields == [((zero if i == 7 else others) - shift) % (1 << bits) for i in range(32)]
        assert torch.equal(
            dequantize_record(GPTQ.read(StoredLayer(key, version), tensors, (32, 32))), dequantize_record(record)
        )


def test_asymmetric_layers_are_written_as_v2() -> None:
    """B20: the lowest number of a group of positive weights has zero point 0, which v1 would wrap."""
    key = LinearKey.parse("int4:asym:group16:f16")
    record = quantize(torch.rand(32, 64) + 0.1, key.weight)
    assert record["zero_point"].min() == -8
    tensors = GPTQ.write(record, key)
    config = GPTQ.config({"x": key}, [])
    assert config["checkpoint_format"] == "gptq_v2"
    stored = GPTQ.describe(GPTQ.scheme(config), "x", headers(tensors))
    assert stored == StoredLayer(key, "gptq_v2")
    assert same_bits(dequantize_record(GPTQ.read(stored, tensors, (32, 64))), dequantize_record(record))
    assert GPTQ.config({"x": SYM}, [])["checkpoint_format"] == "gptq"


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_symmetric_layers_do_not_read_their_zero_points(version: str) -> None:
    """B21: the output does not depend on what they hold."""
    tensors = GPTQ.write_as(layer(SYM), StoredLayer(SYM, version))
    stored = GPTQ.describe(GPTQ.scheme(BASE | {"checkpoint_format": version}), "x", headers(tensors))
    assert stored == StoredLayer(SYM, version)
    plain = GPTQ.read(stored, tensors, SHAPE)
    random = torch.randint(-(1 << 31), (1 << 31) - 1, tensors["qzeros"].shape, dtype=torch.int32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        noisy = GPTQ.read(stored, {**tensors, "qzeros": random}, SHAPE)
    assert "zero_point" not in noisy
    assert torch.equal(dequantize_record(noisy), dequantize_record(plain))
    without = {name: tensor for name, tensor in tensors.items() if name not in ("qzeros", "g_idx")}
    assert GPTQ.describe(GPTQ.scheme(BASE | {"checkpoint_format": version}), "x", headers(without)) == stored
    assert torch.equal(dequantize_record(GPTQ.read(stored, without, SHAPE)), dequantize_record(plain))


@pytest.mark.parametrize(
    ("written", "label", "words"), [("gptq_v2", "gptq", "8, needed 7"), ("gptq", "gptq_v2", "7, needed 8")]
)
def test_zero_points_of_the_other_version_are_a_warning(written: str, label: str, words: str) -> None:
    """B18: in a symmetric layer they show that the label is wrong."""
    tensors = GPTQ.write_as(layer(SYM), StoredLayer(SYM, written))
    with pytest.warns(UserWarning, match=f"qzeros hold {words}"):
        GPTQ.read(StoredLayer(SYM, label), tensors, SHAPE)


def test_a_short_last_group() -> None:
    """B31: ceil(K / g) groups."""
    key = LinearKey.parse("int4:asym:group16:f16")
    record = quantize(torch.randn(32, 24), key.weight)
    tensors = GPTQ.write(record, key)
    assert tensors["scales"].shape == (2, 32)
    stored = GPTQ.describe(GPTQ.scheme(GPTQ.config({"x": key}, [])), "x", headers(tensors), shape=(32, 24))
    assert stored is not None
    assert torch.equal(dequantize_record(GPTQ.read(stored, tensors, (32, 24))), dequantize_record(record))
    assert "do not divide K=24" in (GPTQ.caution(key, (32, 24)) or "")


def test_bits_come_from_the_tensors() -> None:
    key = LinearKey.parse("int8:group32:f16")
    tensors = GPTQ.write(layer(key), key)
    stored = GPTQ.describe(GPTQ.scheme(BASE), "x", headers(tensors))
    assert stored == StoredLayer(key, "gptq")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scales_of_any_float(dtype: torch.dtype) -> None:
    tensors = GPTQ.write(layer(SYM), SYM)
    tensors["scales"] = tensors["scales"].to(dtype)
    stored = GPTQ.describe(GPTQ.scheme(BASE), "x", headers(tensors))
    assert stored is not None
    record = GPTQ.read(stored, tensors, SHAPE)
    assert record["scale"].dtype == dtype
    assert same_bits(GPTQ.write(record, stored.key)["scales"], tensors["scales"])


def test_a_quantized_router_is_read() -> None:
    """B54: the tensors say so, whatever the configuration leaves out."""
    tensors = GPTQ.write(layer(SYM), SYM)
    scheme = GPTQ.scheme(BASE | {"dynamic": {r"-:.*\.gate$": {}}})
    assert scheme.key_for("model.layers.0.mlp.gate", "Linear", matches_gptq) is None
    assert GPTQ.describe(scheme, "model.layers.0.mlp.gate", headers(tensors)) == StoredLayer(SYM, "gptq")


def test_planar_words_of_a_shape_they_cannot_have() -> None:
    key = LinearKey.parse("int5:channel:f16")
    assert "multiples of 32" in (GPTQ.refuse(key, (16, 64)) or "")
    dense = GPTQ.write_as(layer(key, (16, 64)), StoredLayer(key, "gptq_v2"))
    with pytest.raises((ShapeError, CheckpointError)):
        GPTQ.read(StoredLayer(key, "gptq_p"), dense, (16, 64))


# --- act-order -------------------------------------------------------------------------------------------------------


def act_order(order: Tensor) -> tuple[QuantizedTensor, dict[str, Tensor]]:
    record = quantize(torch.randn(32, order.numel()), ASYM.weight).with_tensors(order=order.int())
    return record, GPTQ.write(record, ASYM)


def test_act_order_is_read_and_written() -> None:
    record, tensors = act_order(torch.randperm(64) // 8)
    scheme = GPTQ.scheme(GPTQ.config_of_roles({"x": ASYM}, [], frozenset({"order"})))
    stored = GPTQ.describe(scheme, "x", headers(tensors))
    assert stored == StoredLayer(ASYM, "gptq_v2+desc_act")
    back = GPTQ.read(stored, tensors, (32, 64))
    assert torch.equal(back["order"], record["order"])
    assert torch.equal(dequantize_record(back), dequantize_record(record))
    assert torch.equal(GPTQ.write_as(back, stored)["g_idx"], tensors["g_idx"])


@pytest.mark.parametrize("order", [torch.arange(64) // 8, torch.zeros(64)], ids=["in order", "zeros"])
def test_act_order_that_says_nothing_is_dropped(order: Tensor) -> None:
    _, tensors = act_order(torch.arange(64) // 8)
    back = GPTQ.read(StoredLayer(ASYM, "gptq_v2"), {**tensors, "g_idx": order.int()}, (32, 64))
    assert "order" not in back


def test_act_order_is_not_split_along_its_groups() -> None:
    """B22: a rank's input features belong to all groups; along N there is nothing to it."""
    record, tensors = act_order(torch.arange(64).flip(0) // 8)
    stored = StoredLayer(ASYM, "gptq_v2+desc_act")
    specs = {spec.name: spec for spec in GPTQ.specs(stored)}
    with pytest.raises(ShapeError, match="scales cannot be split along K"):
        specs["scales"].shard("K", 64, 0, 2)
    cuts = {name: spec.shard("N", 32, 1, 2) for name, spec in specs.items()}
    half = {name: tensors[name].narrow(*cut) if cut else tensors[name] for name, cut in cuts.items()}
    shard = GPTQ.read(stored, half, (16, 64))
    assert torch.equal(dequantize_record(shard), dequantize_record(record)[16:])


def test_an_index_of_groups_that_are_not_there() -> None:
    _, tensors = act_order(torch.randperm(64) // 8)
    with pytest.raises(CheckpointError, match="g_idx names group 9, but the layer has 8"):
        GPTQ.read(StoredLayer(ASYM, "gptq_v2"), {**tensors, "g_idx": tensors["g_idx"] + 2}, (32, 64))


# --- writing ---------------------------------------------------------------------------------------------------------


def test_keys_that_differ_are_dynamic_rules() -> None:
    eight = LinearKey.parse("int8:channel:f16")
    config = GPTQ.config({"a.0": SYM, "a.1": SYM, "a.10": eight, "lm_head": SYM}, ["gate"])
    scheme = GPTQ.scheme(config)
    assert config["lm_head"] is True
    found = [
        scheme.key_for(name, "Linear", matches_gptq) for name in ("a.0", "a.1", "a.10", "lm_head", "gate", "gate2")
    ]
    assert found == [SYM, SYM, eight, SYM, None, SYM]
    assert GPTQ.config({"a": SYM}, ["lm_head"])["dynamic"] == {}


@pytest.mark.parametrize("other", ["int4:asym:group32:f16", "int5:group32:f16"])
def test_layers_of_two_versions_are_refused(other: str) -> None:
    with pytest.raises(OutputError, match="one checkpoint_format for the whole model"):
        GPTQ.config({"a": SYM, "b": LinearKey.parse(other)}, [])


@pytest.mark.parametrize(
    "key",
    [
        "e4m3:channel:f32",
        "int4:tensor:f16",
        "int4:block16x16:f16",
        "int4:group32:e8m0",
        "uint4:asym:group32:f16",
        "int4:group32:f16 * int8:token:f32:dynamic",
    ],
)
def test_refusals(key: str) -> None:
    assert "gptq holds int2 to int8" in (GPTQ.refuse(LinearKey.parse(key), SHAPE) or "")


def test_cautions() -> None:
    assert GPTQ.caution(SYM, SHAPE) is None
    assert "no int3 like this" in (GPTQ.caution(LinearKey.parse("int3:group32:f16"), SHAPE) or "")
    assert "no int4 like this" in (GPTQ.caution(LinearKey.parse("int4:asym:group32:f16"), SHAPE) or "")
