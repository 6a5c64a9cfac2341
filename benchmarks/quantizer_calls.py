"""One quantizer called once, in an interpreter of its own. `quantizers.py` runs it:

    python -P benchmarks/quantizer_calls.py request.json

The request names the tool, the model, the scheme, the calibration windows and where results go. What is timed, each
part apart: `load`, reading the model folder; `quantize`, the tool's own call; `save`, writing the checkpoint. Imports,
the start of CUDA and the tokenizing of the text lie outside, but fewbit's call does all of its work by itself, reading
and tokenizing and writing too. Rivals run by their defaults, but for the windows that they read at a time where the
request says how many.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

DEFAULT_BATCH = {"llm-compressor": 1, "GPTQModel": 1, "AutoRound": 8}
"""Windows that each reads at a time by its defaults."""

MODULES = {
    "fewbit": ("fewbit.models.quantization.quantize",),
    "llm-compressor": ("datasets", "llmcompressor", "llmcompressor.modifiers.quantization"),
    "GPTQModel": ("gptqmodel",),
    "AutoRound": ("auto_round",),
}
"""What each tool's call imports, before the clock runs."""

PACKAGES = {"fewbit": "fewbit", "llm-compressor": "llmcompressor", "GPTQModel": "gptqmodel", "AutoRound": "auto-round"}


class Clock:
    """Seconds of the parts of a call by name, and processor seconds of all threads, which others' work hardly touches.

    A part ends when the device has done its work.
    """

    def __init__(self, device: str) -> None:
        self.device, self.seconds, self.processor_seconds = device, dict[str, float](), dict[str, float]()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._wait()
        started, worked = time.monotonic(), time.process_time()
        yield
        self._wait()
        self.seconds[name] = round(time.monotonic() - started, 2)
        self.processor_seconds[name] = round(time.process_time() - worked, 2)

    def _wait(self) -> None:
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()


def batch_of(request: dict[str, Any]) -> int:
    """Windows at a time."""
    return request["batch"] or DEFAULT_BATCH[request["tool"]]


def windows_of(request: dict[str, Any]) -> torch.Tensor:
    """int64 [count, length]."""
    return torch.load(request["windows"], weights_only=True)


def plain_model(request: dict[str, Any]) -> Any:
    """The unquantized model in its own dtype, on the CPU, as these tools' documents load it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(request["model"], dtype="auto", local_files_only=True)


def tokenizer_of(request: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(request["model"], local_files_only=True)


def fewbit(request: dict[str, Any], clock: Clock) -> None:
    from fewbit.models.quantization.quantize import quantize

    count, length = windows_of(request).shape
    settings = {"iterations": request["iterations"]} if request["effort"] == "best" and request["iterations"] else {}
    plain_model(request), tokenizer_of(request)  # imports the model's modules: rivals are handed a model, theirs are
    with clock.part("quantize"):
        quantize(
            request["model"],
            request["output"],
            "W{bits}A16".format(**request) + ("" if request["symmetric"] else "_ASYM"),
            group_size=request["group_size"],
            calibration_text=request["calibration_text"],
            calibration_windows=count,
            calibration_length=length,
            device=request["device"],
            effort=request["effort"],
            settings=settings,
        )


def llm_compressor(request: dict[str, Any], clock: Clock) -> None:
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier

    windows = windows_of(request)
    rows = {"input_ids": windows.tolist(), "attention_mask": torch.ones_like(windows).tolist()}
    weights = {
        "num_bits": request["bits"], "type": "int", "strategy": "group", "group_size": request["group_size"],
        "symmetric": request["symmetric"],
    }  # fmt: skip
    modifier = GPTQModifier(ignore=["lm_head"], config_groups={"group_0": {"targets": ["Linear"], "weights": weights}})
    with clock.part("load"):
        model, tokenizer = plain_model(request), tokenizer_of(request)
    with clock.part("quantize"):
        oneshot(
            model=model,
            processor=tokenizer,
            dataset=Dataset.from_dict(rows),
            recipe=[modifier],
            max_seq_length=windows.shape[1],
            num_calibration_samples=len(windows),
            shuffle_calibration_samples=False,
            batch_size=batch_of(request),
        )
    with clock.part("save"):
        model.save_pretrained(request["output"], save_compressed=True)


def gptqmodel(request: dict[str, Any], clock: Clock) -> None:
    from gptqmodel import GPTQModel, QuantizeConfig

    rows = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in windows_of(request)]
    if (os.cpu_count() or 1) < 3:  # its own default, one worker, is less than its loader asks for
        os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
    config = QuantizeConfig(bits=request["bits"], group_size=request["group_size"], sym=request["symmetric"])
    with clock.part("load"):
        model = GPTQModel.load(request["model"], config, device=request["device"])
    with clock.part("quantize"):
        model.quantize(rows, batch_size=batch_of(request))
    with clock.part("save"):
        model.save(request["output"])


def auto_round(request: dict[str, Any], clock: Clock) -> None:
    from auto_round import AutoRound

    windows = windows_of(request)
    rows = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in windows]
    with clock.part("load"):
        model, tokenizer = plain_model(request), tokenizer_of(request)
    with clock.part("quantize"):
        tool = AutoRound(
            model,
            tokenizer,
            bits=request["bits"],
            group_size=request["group_size"],
            sym=request["symmetric"],
            iters=request["iterations"],  # None for its default
            dataset=torch.utils.data.DataLoader(rows, batch_size=batch_of(request)),
            nsamples=len(windows),
            seqlen=windows.shape[1],
            batch_size=batch_of(request),
            device_map=request["device"],
        )
        tool.quantize()
    with clock.part("save"):
        tool.save_quantized(request["output"], format="auto_round")


CALLS: dict[str, Callable[[dict[str, Any], Clock], None]] = {
    "fewbit": fewbit, "llm-compressor": llm_compressor, "GPTQModel": gptqmodel, "AutoRound": auto_round
}  # fmt: skip


def versions(tool: str) -> dict[str, str]:
    """Of the tool and of what its numbers depend on; packages that are not there are left out."""
    found = {"python": platform.python_version()}
    if tool == "fewbit":
        found["fewbit"] = import_module("fewbit").__version__  # run from a source tree, it is no installed package
    for package in (PACKAGES[tool], "compressed-tensors", "torch", "triton", "transformers", "accelerate"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def main(path: str) -> None:
    request = json.loads(Path(path).read_text(encoding="utf-8"))
    try:
        for module in MODULES[request["tool"]]:
            import_module(module)
    except ImportError as error:
        answer: dict[str, Any] = {"absent": f"{type(error).__name__}: {error}"}
    else:
        clock = Clock(request["device"])
        torch.zeros(1, device=request["device"])
        CALLS[request["tool"]](request, clock)
        answer = {
            "seconds": clock.seconds, "processor_seconds": clock.processor_seconds,
            "threads": torch.get_num_threads(), "versions": versions(request["tool"]),
        }  # fmt: skip
    Path(request["answer"]).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
