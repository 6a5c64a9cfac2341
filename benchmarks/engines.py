"""One engine of `generation.py` as a process of its own, in its own environment: a prompt's and new tokens' times.

    python benchmarks/engines.py fewbit FOLDER 2

A line of JSON is printed once the engine is ready, and one for each line of JSON that is read.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

Read = Callable[[list[int]], int]
"""Reads a prompt, or one more token, and chooses the next token greedily."""


class Steps:
    """An engine that is driven token by token.

    Args:
        start: makes a fresh text of so many tokens at most.
    """

    def __init__(self, start: Callable[[int], Read]) -> None:
        self.start = start

    def times(self, prompt: list[int], new: int) -> dict[str, Any]:
        read = self.start(len(prompt) + new)
        clocks, token, chosen = [_clocks()], read(prompt), []
        clocks.append(_clocks())
        for _ in range(new):
            chosen.append(token)
            token = read([token])
        clocks.append(_clocks())
        return {
            **_between("prompt", clocks[0], clocks[1]),
            **_between("decode", clocks[1], clocks[2]),
            "tokens": chosen,
        }


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _between(name: str, before: tuple[float, float], after: tuple[float, float]) -> dict[str, float]:
    return {f"{name}_seconds": after[0] - before[0], f"{name}_cpu_seconds": after[1] - before[1]}


def fewbit(folder: str, threads: int) -> tuple[Any, str]:
    """The compiled step."""
    import torch

    from fewbit.models.load import load
    from fewbit.runtime.decode_step import DecodeStep, obstacles

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    model = load(folder, device="cpu")
    for obstacle in obstacles(model):
        raise SystemExit(f"the compiled step does not run {folder}: {obstacle}")

    def start(length: int) -> Read:
        step = DecodeStep(model, length)
        return lambda tokens: int(step(torch.tensor(tokens)).float().argmax())

    return Steps(start), f"fewbit {version('fewbit')}, torch {torch.__version__}"


def fewbit_modules(folder: str, threads: int) -> tuple[Any, str]:
    """The same kernels under transformers' own modules."""
    from fewbit.models.load import load

    return _modules(lambda: load(folder, device="cpu"), threads)


def transformers(folder: str, threads: int) -> tuple[Any, str]:
    """The model as it is stored, in bf16."""
    import torch
    from transformers import AutoModelForCausalLM

    return _modules(lambda: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), threads)


def _modules(load: Callable[[], Any], threads: int) -> tuple[Any, str]:
    import torch

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    model = load()

    def start(_: int) -> Read:
        state: dict[str, Any] = {"past_key_values": None}

        def read(tokens: list[int]) -> int:
            output = model(torch.tensor([tokens]), use_cache=True, logits_to_keep=1, **state)
            state["past_key_values"] = getattr(output, "cache", None) or output.past_key_values
            return int(output.logits[0, -1].float().argmax())

        return read

    return Steps(start), f"transformers {version('transformers')}, torch {torch.__version__}"


def llama_cpp(file: str, threads: int) -> tuple[Any, str]:
    import llama_cpp as library

    model = library.Llama(
        file, n_ctx=4096, n_batch=512, n_ubatch=512, n_threads=threads, n_threads_batch=threads, verbose=False
    )

    def start(_: int) -> Read:
        model.reset()

        def read(tokens: list[int]) -> int:
            model.eval(tokens)
            return int(model.sample(temp=0.0))

        return read

    features = library.llama_print_system_info().decode().strip(" |")
    return Steps(start), f"llama-cpp-python {library.__version__} ({features})"


class Vllm:
    """vLLM answers whole prompts: what it takes for one new token is the prompt's time, the rest is decoding.

    It compiles the model first and reads a batch to see what memory that takes: minutes. Its settings are its defaults
    but for that batch, and its workers get the libraries that its documentation tells to preload, where the environment
    has them in `lib`.

    Args:
        dtype: of weights and activations. A CPU without AVX-512 emulates bf16, and vLLM's own product of 4-bit weights
            needs AVX-512.
    """

    PRELOADED = ("libiomp5.so", "libtcmalloc_minimal.so.4")

    BATCHED_TOKENS = 1024

    def __init__(self, folder: str, threads: int, dtype: str) -> None:
        found = [str(path) for name in self.PRELOADED if (path := Path(sys.prefix, "lib", name)).exists()]
        os.environ.setdefault("LD_PRELOAD", ":".join(found))
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{threads - 1}")
        import psutil
        from vllm import LLM, SamplingParams

        self.engine = LLM(
            folder,
            dtype=dtype,
            max_model_len=4096,
            max_num_batched_tokens=self.BATCHED_TOKENS,
            enable_prefix_caching=False,
        )
        self.settings = SamplingParams
        own = psutil.Process()
        self.processes = [own, *own.children(recursive=True)]

    def times(self, prompt: list[int], new: int) -> dict[str, Any]:
        found = []
        for most in (1, new + 1):
            settings = self.settings(temperature=0.0, max_tokens=most, ignore_eos=True)
            before = self._clocks()
            answer = self.engine.generate({"prompt_token_ids": prompt}, settings, use_tqdm=False)
            found.append(_between("prompt", before, self._clocks()))
        return {
            **found[0],
            **{key.replace("prompt", "decode"): found[1][key] - found[0][key] for key in found[0]},
            "tokens": list(answer[0].outputs[0].token_ids[:new]),
        }

    def _clocks(self) -> tuple[float, float]:
        """As the function, with the processor time of every process of the engine's."""
        times = [process.cpu_times() for process in self.processes]
        return time.perf_counter(), sum(found.user + found.system for found in times)


def vllm(folder: str, threads: int, dtype: str = "bfloat16") -> tuple[Any, str]:
    engine = Vllm(folder, threads, dtype)
    return engine, f"vllm {version('vllm-cpu')}, torch {version('torch')}"


ENGINES = {
    "fewbit": fewbit,
    "fewbit-modules": fewbit_modules,
    "transformers": transformers,
    "llama.cpp": llama_cpp,
    "vllm": vllm,
    "vllm-float32": partial(vllm, dtype="float32"),
}


def serve(name: str, model: str, threads: int) -> None:
    """Answers on the process's own standard output, to which nothing else is printed."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine, versions = ENGINES[name](model, threads)
    print(json.dumps({"versions": versions}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(engine.times(**json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], int(sys.argv[3]))
