"""Fixtures that every test may use, and the settings that make two runs of the tests the same."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from fewbit.algorithms import native as solvers
from fewbit.kernels import native
from tests.golden import golden_vectors

pytest_plugins = ["tests.smollm2"]

REPOSITORY = Path(__file__).parents[1]

settings.register_profile(
    "fewbit",
    deadline=None,  # the first call of a torch function takes a hundred times as long as the next
    max_examples=60,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("fewbit")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu-libraries", type=Path, help="Test the compiled libraries in this folder, not the installed ones."
    )


def pytest_configure(config: pytest.Config) -> None:
    folder = config.getoption("--cpu-libraries")
    if folder is not None:
        for loader in (native, solvers):
            loader.PATH = (folder / loader.PATH.name).resolve(strict=True)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # each test process has a core to itself


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def golden() -> dict[str, dict[str, Any]]:
    """Every golden vector by its id; `tests.golden` turns their parts into tensors."""
    return golden_vectors()


@pytest.fixture(scope="session")
def shared_folder() -> Path:
    """The folder of reference material that development checkouts have beside the repository."""
    folder = REPOSITORY.parent / "shared"
    if not folder.is_dir():
        pytest.skip("This test compares with the reference checkpoints, which are not beside this checkout.")
    return folder
