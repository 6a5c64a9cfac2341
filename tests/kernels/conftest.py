"""One thread for the tests of kernels: their layers are tiny, and a second thread only waits on a busy machine.

Where there is no GPU, Triton's programs run in its interpreter, which must be asked for before they are imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.kernels.triton_here import interpreter_works

if not torch.cuda.is_available() and interpreter_works():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
