"""Which format a checkpoint is of, and where it says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fewbit.checkpoints.registry import find_format, formats, quantization_config
from fewbit.checkpoints.tensor_files import TensorFolder
from fewbit.errors import CheckpointError

CT = {"quant_method": "compressed-tensors", "config_groups": {}}
GPTQ = {"bits": 4, "group_size": 128, "desc_act": False}


def folder(path: Path, **files: Any) -> TensorFolder:
    """A folder with JSON files, `config` for config.json."""
    save_file({"norm.weight": torch.ones(2)}, path / "model.safetensors")
    for name, value in files.items():
        (path / f"{name}.json").write_text(json.dumps(value))
    return TensorFolder(path)


# --- the format ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", formats())
def test_every_name_and_alias_in_any_spelling(name: str) -> None:
    found = formats()[name]
    assert found.quant_methods
    for alias in found.quant_methods:
        assert alias == alias.lower()
        for spelling in (alias, alias.upper(), alias.replace("-", "_"), alias.replace("_", "-")):
            assert find_format({"quant_method": spelling}) is found


def test_quant_methods_belong_to_one_format() -> None:
    methods = [method for found in formats().values() for method in found.quant_methods]
    assert len(methods) == len(set(methods))


@pytest.mark.parametrize("config", [None, {}])
def test_no_configuration_is_no_format(config: dict[str, Any] | None) -> None:
    assert find_format(config) is None


def test_an_unknown_quant_method_names_the_closest() -> None:
    with pytest.raises(
        CheckpointError, match=r"'compresed-tensor'.*compressed-tensors.*Did you mean 'compressed-tensors'"
    ):
        find_format({"quant_method": "compresed-tensor"})


@pytest.mark.parametrize("method", [None, 8, ["fp8"]])
def test_a_missing_quant_method(method: Any) -> None:
    with pytest.raises(CheckpointError, match="has quant_method"):
        find_format({"quant_method": method, "bits": 4})


# --- the place -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "place", "method"),
    [
        ({"config": {"quantization_config": CT}}, "config.json: quantization_config", "compressed-tensors"),
        (
            {"config": {"compression_config": {"config_groups": {}}}},
            "config.json: compression_config",
            "compressed-tensors",
        ),
        (
            {"config": {"text_config": {"quantization_config": CT}}},
            "config.json: text_config.quantization_config",
            "compressed-tensors",
        ),
        ({"config": {}, "quantize_config": GPTQ}, "quantize_config.json", "gptq"),
        ({"config": {}, "quantize_config": GPTQ | {"method": "awq"}}, "quantize_config.json", "awq"),
        ({"quant_config": {"w_bit": 4}}, "quant_config.json", "awq"),
        (
            {"config": {}, "hf_quant_config": {"quantization": {"quant_algo": "FP8"}}},
            "hf_quant_config.json",
            "modelopt",
        ),
        ({"config": {}, "quantization_config": {"bits": 4}}, "quantization_config.json", "auto-round"),
    ],
)
def test_where_it_is_found(files: dict[str, Any], place: str, method: str, tmp_path: Path) -> None:
    found = quantization_config(folder(tmp_path, **files))
    assert found is not None
    assert found[1] == place
    assert found[0]["quant_method"] == method


@pytest.mark.parametrize("files", [{}, {"config": {}}, {"config": {"quantization_config": None, "text_config": None}}])
def test_a_plain_checkpoint(files: dict[str, Any], tmp_path: Path) -> None:
    assert quantization_config(folder(tmp_path, **files)) is None


@pytest.mark.parametrize(
    "files",
    [
        {
            "config": {"quantization_config": GPTQ | {"quant_method": "gptq"}},
            "quantize_config": GPTQ | {"model_name": "x"},
        },
        {
            "config": {"quantization_config": GPTQ | {"quant_method": "awq"}},
            "quant_config": {"w_bit": 4, "q_group_size": 128},
        },
        {
            "config": {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
            "hf_quant_config": {"producer": {}, "quantization": {"quant_algo": "nvfp4", "group_size": 16}},
        },
    ],
    ids=["gptq", "awq", "modelopt"],
)
def test_places_that_agree(files: dict[str, Any], tmp_path: Path) -> None:
    found = quantization_config(folder(tmp_path, **files))
    assert found is not None
    assert found == (files["config"]["quantization_config"], "config.json: quantization_config")


@pytest.mark.parametrize(
    ("first", "file", "second", "name"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quantize_config", {"bits": 8}, "bits"),
        ({"quant_method": "awq", "group_size": 128}, "quant_config", {"q_group_size": 64}, "group_size"),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8"},
            "hf_quant_config",
            {"quantization": {"quant_algo": "NVFP4"}},
            "quant_algo",
        ),
        (CT, "quantization_config", {"quant_method": "auto-round"}, "quant_method"),
    ],
)
def test_places_that_disagree(
    first: dict[str, Any], file: str, second: dict[str, Any], name: str, tmp_path: Path
) -> None:
    files = {"config": {"quantization_config": first}, file: second}
    with pytest.raises(CheckpointError, match=rf"config\.json: quantization_config says {name} .*{file}\.json says"):
        quantization_config(folder(tmp_path, **files))


@pytest.mark.parametrize("value", ["fp8", 8, [CT]])
def test_a_malformed_configuration(value: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="needed an object"):
        quantization_config(folder(tmp_path, config={"quantization_config": value}))
