"""One of the processes of a run, told who it is as torchrun tells it. Importing this imports all that a run needs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import torch

import fewbit.algorithms.registry
import fewbit.models.quantization.quantize
import fewbit.runtime.generate
from fewbit.checkpoints.registry import formats
from fewbit.cli.main import main


def quantize_as(rank: int, count: int, port: int, arguments: Sequence[str]) -> None:
    """Runs the command line as process `rank` of `count`, which meet at `port`; exits with what it exits with."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "tests",
    }
    torch.set_num_threads(1)
    sys.argv = ["fewbit", *arguments]
    main()


fewbit.algorithms.registry.algorithms()
formats()
