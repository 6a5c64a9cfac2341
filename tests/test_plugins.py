"""Plugins: classes that other packages announce in entry points are found, checked, and used like fewbit's own.

The fake package is a real one as far as Python can tell: a module and a .dist-info folder on the import path.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fewbit.checkpoints.interface import CheckpointFormat
from fewbit.checkpoints.registry import (
    FORMAT_PLUGINS,
    OPENER_PLUGINS,
    find_format,
    formats,
    open_files,
    opener_of,
    openers,
)
from fewbit.discovery import plugins
from fewbit.errors import CheckpointError, SchemeError
from fewbit.models.inspect import inspect_checkpoint
from fewbit.models.load import load
from fewbit.models.names import read_config
from fewbit.models.quantization.calibration import load_tokenizer
from fewbit.models.quantization.plan import make_plan
from fewbit.models.stored import StoredCheckpoint
from fewbit.spec import Recipe, preset
from tests.tiny_models import save_tiny_model

SOURCE = '''
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from fewbit.checkpoints.dtypes import header_of
from fewbit.checkpoints.files import CheckpointFiles, CheckpointOpener
from fewbit.checkpoints.fp8 import Fp8


class Mine(Fp8):
    """fp8 under another name, in a file of its own."""

    name = "mine"
    quant_methods = ("mine",)
    in_safetensors = False


class Files(CheckpointFiles):
    """A file that holds the path of a model folder, whose weights are quantized per tensor as they are opened."""

    def __init__(self, path):
        self.path, self.tensors = path, {}
        for name, tensor in load_file(Path(path.read_text()) / "model.safetensors").items():
            if name.endswith("down_proj.weight"):
                self.tensors[name] = tensor.to(torch.float8_e4m3fn)
                self.tensors[name + "_scale"] = torch.ones((), dtype=torch.float32)
            else:
                self.tensors[name] = tensor
        self.headers = {name: header_of(tensor) for name, tensor in self.tensors.items()}
        self.file_of = dict.fromkeys(self.headers, path.name)

    @property
    def quantization(self):
        plain = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up")]
        config = {"quant_method": "mine", "activation_scheme": "dynamic", "modules_to_not_convert": [*plain, "lm_head"]}
        return config, "the file itself"

    def load(self, name):
        return self.tensors[name].clone()


class Opener(CheckpointOpener):
    name = ".mine"

    def recognizes(self, path):
        return path.suffix == ".mine"

    def open(self, path):
        return Files(path)

    def model_config(self, path):
        return AutoConfig.from_pretrained(path.read_text())

    def tokenizer(self, path):
        return "a tokenizer"


NOT_A_CLASS = 1


class Twin(Fp8):
    name = "fp8"
'''


@pytest.fixture
def announce(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Installs the fake package with some entry points, for the time of a test."""
    site = tmp_path / "site"
    info = site / "fake_plugin-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "fake_plugin.py").write_text(SOURCE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-plugin\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(site)

    def install(**groups: str) -> None:
        kinds = {"formats": FORMAT_PLUGINS, "openers": OPENER_PLUGINS}
        lines = [f"[{kinds[kind]}]\nfake = fake_plugin:{member}\n" for kind, member in groups.items()]
        (info / "entry_points.txt").write_text("\n".join(lines))
        formats.cache_clear()
        openers.cache_clear()

    yield install
    formats.cache_clear()
    openers.cache_clear()


@pytest.fixture
def mine(announce: object, tmp_path: Path) -> Path:
    """A file that the fake package opens."""
    announce(formats="Mine", openers="Opener")
    file = tmp_path / "model.mine"
    file.write_text(str(save_tiny_model(tmp_path / "model")))
    return file


def test_a_format_is_found_beside_fewbits_own(announce: object) -> None:
    announce(formats="Mine")
    assert {"mine", "fp8", "compressed-tensors"} <= formats().keys()
    assert find_format({"quant_method": "MINE"}) is formats()["mine"]


def test_a_file_is_opened_described_and_run(mine: Path) -> None:
    assert opener_of(mine) is openers()[".mine"]
    stored = StoredCheckpoint.open(mine)
    assert stored.format is formats()["mine"] and stored.decided_by == "the file itself"
    assert read_config(mine).model_type == "llama" and load_tokenizer(mine) == "a tokenizer"
    found = inspect_checkpoint(mine)
    assert {layer.name.rpartition(".")[2] for layer in found.layers if layer.key} == {"down_proj"}
    model = load(mine, device="cpu", dtype=torch.float32)
    assert model.fewbit_report.format == "mine" and len(model.fewbit_report.layers) == 2
    assert model(input_ids=torch.arange(8)[None]).logits.isfinite().all()


def test_the_commands_take_the_file(mine: Path) -> None:
    from fewbit.cli.main import app

    for command in ("inspect", "verify"):
        result = CliRunner().invoke(app, [command, str(mine)])
        assert result.exit_code == 0, result.output


def test_quantizing_says_that_it_reads_and_writes_folders(mine: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="quantized already"):
        make_plan(mine, Recipe(preset("W4A16")))
    with pytest.raises(SchemeError, match=r"mine is no format for a folder.*fp8"):
        make_plan(tmp_path / "model", Recipe(preset("FP8_DYNAMIC"), "mine"))


def test_a_file_that_nothing_opens_says_what_does(tmp_path: Path) -> None:
    file = tmp_path / "model.other"
    file.write_bytes(b"?")
    with pytest.raises(CheckpointError, match=r"model\.other .*\.safetensors.*fewbit-gguf"):
        open_files(file)
    with pytest.raises(CheckpointError, match="does not exist"):
        open_files(tmp_path / "missing.other")


@pytest.mark.parametrize("member", ["Missing", "nowhere.Mine"])
def test_a_plugin_that_cannot_be_imported_is_left_out_with_a_warning(announce: object, member: str) -> None:
    announce(formats=member)
    with pytest.warns(UserWarning, match=rf"fake_plugin:{member} .*cannot be loaded"):
        assert "fp8" in formats()


@pytest.mark.parametrize("member", ["NOT_A_CLASS", "Opener", "CheckpointOpener"])
def test_a_plugin_that_is_no_such_thing_is_a_defect(announce: object, member: str) -> None:
    announce(formats=member)
    with pytest.raises(RuntimeError, match=rf"fake_plugin:{member}.*CheckpointFormat"):
        plugins(FORMAT_PLUGINS, CheckpointFormat)


def test_a_name_that_is_taken_is_a_defect(announce: object) -> None:
    announce(formats="Twin")
    with pytest.raises(RuntimeError, match="both call themselves 'fp8'"):
        formats()
