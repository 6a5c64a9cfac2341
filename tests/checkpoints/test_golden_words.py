"""Golden vectors of GPTQ, AWQ and AutoRound: the original projects' words read to their numbers, and written again."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fewbit.checkpoints.auto_round import AutoRound
from fewbit.checkpoints.awq import Awq
from fewbit.checkpoints.gptq import Gptq
from fewbit.checkpoints.interface import StoredLayer
from fewbit.checkpoints.linear_format import LinearFormat
from fewbit.numerics import QuantizedTensor
from fewbit.packing.registry import dequantize_record
from fewbit.spec import LinearKey, Scheme
from tests.checkpoints.layers import headers, same_bits
from tests.golden import floats, ids, words

GPTQ, AWQ, AUTO_ROUND = Gptq(), Awq(), AutoRound()
DENSE = [name for name in ids("gptq_int") if not name.endswith("_planar")]
PLANAR = [name for name in ids("gptq_int") if name.endswith("_planar")]
VERSIONS = [(name, version) for name in DENSE for version in ("gptq", "gptq_v2")] + [(n, "gptq_p") for n in PLANAR]


def halves(values: Any) -> Tensor:
    return floats(values).half()


def described(found: Any, config: dict[str, Any], tensors: dict[str, Tensor], shape: tuple[int, int]) -> StoredLayer:
    layer = found.describe(found.scheme(config), "layer", headers(tensors), shape=shape)
    assert layer is not None
    return layer


def record_of(vector: dict[str, Any], key: LinearKey, codes: Tensor, zeros: Tensor, scales: Tensor) -> QuantizedTensor:
    """A plain record of unsigned codes [N, K], zero points and scales [N, G]."""
    half = 1 << (vector["bits"] - 1)
    tensors = {"codes": (codes - half).to(torch.int8), "scale": scales.half().contiguous()}
    if not key.weight.symmetric:
        tensors["zero_point"] = (zeros - half).to(torch.int8)
    return QuantizedTensor(key.weight, tuple(codes.shape), tensors)


def assert_written(
    found: LinearFormat, record: QuantizedTensor, stored: StoredLayer, tensors: dict[str, Tensor]
) -> None:
    written = found.write_as(record, stored)
    assert written.keys() == tensors.keys()
    assert [name for name, tensor in tensors.items() if not same_bits(written[name], tensor)] == []


# --- GPTQ ------------------------------------------------------------------------------------------------------------


def gptq_tensors(vector: dict[str, Any], version: str) -> dict[str, Tensor]:
    zeros = vector["qzeros_gptq_v1" if version == "gptq" else "qzeros_gptq_v2"]
    return {
        "qweight": words(vector["qweight"]),
        "qzeros": words(zeros),
        "scales": halves(vector["scales_group_out"]),
        "g_idx": torch.tensor(vector["g_idx"], dtype=torch.int32),
    }


def gptq_config(vector: dict[str, Any], version: str) -> dict[str, Any]:
    return {name: vector[name] for name in ("bits", "group_size", "sym", "desc_act")} | {"checkpoint_format": version}


@pytest.mark.parametrize(("name", "version"), VERSIONS)
def test_gptq_is_read(name: str, version: str, golden: dict[str, Any]) -> None:
    """B18: both versions of one layer give the same numbers."""
    vector, tensors = golden[name], gptq_tensors(golden[name], version)
    shape = (vector["out_features"], vector["in_features"])
    stored = described(GPTQ, gptq_config(vector, version), tensors, shape)
    assert stored.variant == version + ("+desc_act" if vector["desc_act"] else "")
    record = GPTQ.read(stored, tensors, shape)
    record.validate()
    assert ("order" in record) is vector["desc_act"]
    assert torch.equal(dequantize_record(record), floats(vector["dequant_in_out"]).T)


@pytest.mark.parametrize(("name", "version"), VERSIONS)
def test_gptq_is_written(name: str, version: str, golden: dict[str, Any]) -> None:
    vector = golden[name]
    codes, zeros = torch.tensor(vector["codes_in_out"]).T, torch.tensor(vector["zeros_group_out"]).T
    symmetric = "" if vector["sym"] else "asym:"
    key = LinearKey.parse(f"int{vector['bits']}:{symmetric}group{vector['group_size']}:f16")
    record = record_of(vector, key, codes, zeros, floats(vector["scales_group_out"]).T)
    if vector["desc_act"]:
        record = record.with_tensors(order=torch.tensor(vector["g_idx"], dtype=torch.int32))
    assert_written(GPTQ, record, StoredLayer(key, version), gptq_tensors(vector, version))


# --- AWQ -------------------------------------------------------------------------------------------------------------


def awq_layer(golden: dict[str, Any], name: str) -> tuple[dict[str, Any], dict[str, Tensor], QuantizedTensor]:
    """A vector, its tensors, and its layer as a plain record; gemv_fast shares gemv's layer."""
    vector = golden[name]
    source = golden["awq_gemv_int4"] if name == "awq_gemv_fast_int4" else vector
    codes, zeros = torch.tensor(source["codes_in_out"]).T, torch.tensor(source["zeros_group_out"]).T
    key = LinearKey.parse(f"int4:asym:group{vector['group_size']}:f16")
    record = record_of(vector, key, codes, zeros, floats(source["scales_group_out"]).T)
    if name == "awq_gemv_fast_int4":
        shorts = [[int(word, 16) for word in row] for row in vector["qweight_int16"]]
        tensors = {
            "qweight": torch.from_numpy(np.array(shorts, np.uint16).view(np.int16)),
            "qzeros": halves(vector["qzeros_fp16_minus_scale_times_zero"]),
            "scales": halves(vector["scales_on_disk"]),
        }
        return vector, tensors, record
    scales = halves(vector.get("scales_on_disk", vector["scales_group_out"]))
    return vector, {"qweight": words(vector["qweight"]), "qzeros": words(vector["qzeros"]), "scales": scales}, record


AWQ_VECTORS = {"awq_gemm_int4": "gemm", "awq_gemv_int4": "gemv", "awq_gemv_fast_int4": "gemv_fast"}


@pytest.mark.parametrize("name", AWQ_VECTORS)
def test_awq_is_read(name: str, golden: dict[str, Any]) -> None:
    """B26: zero points follow the order of the weights."""
    vector, tensors, expected = awq_layer(golden, name)
    config = {"bits": 4, "group_size": vector["group_size"], "zero_point": True, "version": AWQ_VECTORS[name]}
    shape = (vector["out_features"], vector["in_features"])
    stored = described(AWQ, config, tensors, shape)
    assert stored.variant == AWQ_VECTORS[name]
    record = AWQ.read(stored, tensors, shape)
    record.validate()
    assert torch.equal(dequantize_record(record), dequantize_record(expected))
    if "dequant_in_out" in vector:
        assert torch.equal(dequantize_record(record), floats(vector["dequant_in_out"]).T)


@pytest.mark.parametrize("name", AWQ_VECTORS)
def test_awq_is_written(name: str, golden: dict[str, Any]) -> None:
    _, tensors, record = awq_layer(golden, name)
    assert_written(AWQ, record, StoredLayer(LinearKey(record.key), AWQ_VECTORS[name]), tensors)


def test_awq_in_marlin_tiles(golden: dict[str, Any]) -> None:
    vector = golden["awq_marlin_int4"]
    codes = torch.from_numpy(np.random.default_rng(6).integers(0, 16, (64, 256))).T
    scales = torch.tensor([[(3 * g + n % 5 + 1) / 64 for g in range(2)] for n in range(256)])
    key = LinearKey.parse("int4:group32:f16")
    record = record_of(vector, key, codes, codes, scales)
    stored = StoredLayer(key, "marlin")
    tensors = AWQ.write_as(record, stored)
    assert (
        hashlib.sha256(tensors["qweight"].numpy().tobytes()).hexdigest() == vector["qweight_sha256_little_endian_int32"]
    )
    assert hashlib.sha256(tensors["scales"].numpy().tobytes()).hexdigest() == vector["scales_sha256_fp16"]
    config = {"bits": 4, "group_size": 32, "zero_point": False, "version": "marlin"}
    assert described(AWQ, config, tensors, (256, 64)) == stored
    assert torch.equal(dequantize_record(AWQ.read(stored, tensors, (256, 64))), dequantize_record(record))


def test_awq_becomes_gptq_v1_as_the_original_converts_it(golden: dict[str, Any]) -> None:
    """The original's converter borrows across fields where a zero point is 0; the vector states the right words too."""
    vector, tensors, _ = awq_layer(golden, "awq_gemm_int4")
    config = {"bits": 4, "group_size": vector["group_size"], "zero_point": True}
    record = AWQ.read(described(AWQ, config, tensors, (32, 32)), tensors, (32, 32))
    written = GPTQ.write_as(record, StoredLayer(LinearKey(record.key), "gptq"))
    assert torch.equal(written["qweight"], words(vector["as_gptq_v1"]["qweight"]))
    zeros = torch.tensor(vector["zeros_group_out"])
    stored = (zeros - 1) % 16
    fields = (written["qzeros"].long()[..., None] >> (4 * torch.arange(8))) & 15
    assert torch.equal(fields.flatten(1), stored)


# --- AutoRound -------------------------------------------------------------------------------------------------------

PACKINGS = {"auto_round:auto_gptq": "qzeros_auto_gptq_minus1", "auto_round:gptqmodel": "qzeros_raw"}


def auto_round_tensors(vector: dict[str, Any], packing: str) -> dict[str, Tensor]:
    scales = halves(vector["scales_out_group"]).T.contiguous()
    return {"qweight": words(vector["qweight"]), "qzeros": words(vector[PACKINGS[packing]]), "scales": scales}


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("name", ids("autoround_int"))
def test_auto_round_is_read(name: str, packing: str, golden: dict[str, Any]) -> None:
    vector, tensors = golden[name], auto_round_tensors(golden[name], packing)
    numbers = floats(vector["dequant_out_in"])
    config = {"bits": vector["bits"], "group_size": vector["group_size"], "sym": False, "packing_format": packing}
    stored = described(AUTO_ROUND, config, tensors, (numbers.shape[0], numbers.shape[1]))
    record = AUTO_ROUND.read(stored, tensors, (numbers.shape[0], numbers.shape[1]))
    record.validate()
    assert torch.equal(dequantize_record(record), numbers)


@pytest.mark.parametrize("name", [name for name in ids("autoround_int") if name != "autoround_int4"])
def test_auto_round_is_written(name: str, golden: dict[str, Any]) -> None:
    """Asymmetric 4 bits are written as awq, as AutoRound does."""
    vector, tensors = golden[name], auto_round_tensors(golden[name], "auto_round:gptqmodel")
    key = LinearKey.parse(f"int{vector['bits']}:asym:group{vector['group_size']}:f16")
    codes, zeros = torch.tensor(vector["codes_out_in"]), torch.tensor(vector["zeros_out_group"])
    written = AUTO_ROUND.write(record_of(vector, key, codes, zeros, floats(vector["scales_out_group"])), key)
    assert written.keys() == tensors.keys()
    assert all(same_bits(written[found], tensors[found]) for found in tensors)
    assert AUTO_ROUND.config({"layer": key}, [])["packing_format"] == "auto_round:gptqmodel"


def test_schemes_name_what_shapes_cannot_say() -> None:
    assert isinstance(AUTO_ROUND.scheme({"packing_format": "auto_round"}), Scheme)
    assert AUTO_ROUND.scheme({"packing_format": "auto_round"}).variant == "gptq/gptq_v2"
