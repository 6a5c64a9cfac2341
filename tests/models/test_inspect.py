"""What inspecting says of a checkpoint, from headers alone, and how long a thousand shards take."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fewbit.checkpoints.tensor_files import INDEX
from fewbit.models.inspect import inspect_checkpoint
from fewbit.models.quantization.quantize import quantize
from tests.tiny_models import save_tiny_model

SHARDS, EXPERTS_IN_SHARD = 1000, 10


@pytest.fixture(scope="module")
def thousand_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts in int4: 1,000 files of 30 tensors each; their data are holes in the files."""
    folder = tmp_path_factory.mktemp("shards")
    weight_map, routers = {}, []
    for number in range(SHARDS):
        block, part = divmod(number, 10)
        entries, end = {}, 0
        for expert in range(part * EXPERTS_IN_SHARD, (part + 1) * EXPERTS_IN_SHARD):
            module = f"model.layers.{block}.mlp.experts.{expert}.up_proj"
            for name, dtype, shape, size in (
                ("weight_packed", "I32", [256, 32], 32768),
                ("weight_scale", "BF16", [256, 2], 1024),
                ("weight_shape", "I64", [2], 16),
            ):
                entries[f"{module}.{name}"] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
                end += size
        header = json.dumps(entries).encode()
        file = folder / f"model-{number + 1:05}-of-{SHARDS:05}.safetensors"
        with file.open("wb") as stream:
            stream.write(len(header).to_bytes(8, "little") + header)
            stream.truncate(8 + len(header) + end)
        weight_map |= dict.fromkeys(entries, file.name)
        routers.append(f"model.layers.{block}.mlp.gate")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head", *dict.fromkeys(routers)],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "quantization_config": quantization}))
    return folder


def test_a_thousand_shards_take_less_than_two_seconds(thousand_shards: Path) -> None:
    seconds = []
    for _ in range(3):  # of this process alone, the best of three: the machine has other work
        started = time.process_time()
        found = inspect_checkpoint(thousand_shards)
        seconds.append(time.process_time() - started)
    assert len(found.layers) == SHARDS * EXPERTS_IN_SHARD and {str(layer.key) for layer in found.layers} == {
        "int4:group128:bf16"
    }
    assert found.quantized_bytes == found.bytes and not found.oddities
    assert min(seconds) < 2, seconds


def test_every_plain_module_has_a_reason(tmp_path: Path) -> None:
    source = save_tiny_model(tmp_path / "model")
    quantize(source, tmp_path / "q", "W4A16", group_size=32, ignore=["model.layers.0.mlp.up_proj"], effort="fast")
    reasons = {layer.name: layer.reason for layer in inspect_checkpoint(tmp_path / "q").layers}
    assert reasons["model.layers.0.mlp.up_proj"] == reasons["lm_head"] == "left out by the configuration"
    assert reasons["model.norm"] == "no matrix"
    assert "embedding" in reasons["model.embed_tokens"]
    assert reasons["model.layers.1.mlp.up_proj"] == ""
    assert {layer.reason for layer in inspect_checkpoint(source).layers} == {""}


def test_the_command_needs_neither_torch_nor_transformers(thousand_shards: Path) -> None:
    """They take seconds to import. The command as a whole, Python's own start counted, has two; cores that are shared
    with other work count double, hence four here."""
    code = (
        "import sys, time; from fewbit.cli.main import app; "
        "app(['inspect', sys.argv[1], '--json'], standalone_mode=False); "
        "print(sorted({'torch', 'transformers'} & sys.modules.keys()), time.process_time(), file=sys.stderr)"
    )
    seconds = []
    for _ in range(3):
        ran = subprocess.run([sys.executable, "-c", code, thousand_shards], capture_output=True, text=True, check=True)
        imported, spent = ran.stderr.strip().splitlines()[-1].rsplit(" ", 1)
        assert imported == "[]"
        assert sum(group["count"] for group in json.loads(ran.stdout)["groups"]) == SHARDS * EXPERTS_IN_SHARD
        seconds.append(float(spent))
    assert min(seconds) < 4, seconds
