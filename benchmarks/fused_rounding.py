"""Norms and gated activations inside the operation that rounds them, in a whole model on a GPU.

    python benchmarks/fused_rounding.py --scheme FP8_DYNAMIC --scheme W8A8 --compiled --output fused.json

A small random Llama is quantized and loaded twice, as `load` gives it and without `models.produced`. Their logits are
compared, and one decode step of each is captured in a CUDA graph, as it is and under torch.compile, and timed.
"""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, StaticCache

import fewbit.models.load as loading
from fewbit.kernels.probe import installed, this_machine
from fewbit.methods.linear import QuantizedLinear
from fewbit.models.produced import DeferredNorm, GatedMlp
from fewbit.models.quantization.quantize import quantize

PROMPT, LONGEST, WARM_UP, REPLAYS = 20, 256, 3, 20


def random_model(folder: Path, layers: int, hidden: int) -> Path:
    """A Llama of random weights."""
    config = AutoConfig.for_model(
        "llama", hidden_size=hidden, intermediate_size=hidden * 11 // 4, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 256, vocab_size=512,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return folder


def loaded(folder: Path, produces: bool) -> PreTrainedModel:
    """The model, norms and gated activations in the rounding or left to transformers."""
    whole = loading.round_as_made
    loading.round_as_made = whole if produces else (lambda _: 0)
    try:
        return loading.load(folder, device="cuda", dtype=torch.bfloat16, join_members=True).eval()
    finally:
        loading.round_as_made = whole


def step_time_us(model: PreTrainedModel, ids: Tensor, compiled: bool) -> float:
    """Microseconds of one decode step in a CUDA graph, median. Each replay is a token more in the cache."""
    assert PROMPT + WARM_UP + REPLAYS < LONGEST
    cache = StaticCache(config=model.config, max_cache_len=LONGEST)
    kept: dict[str, Any] = {"past_key_values": cache, "use_cache": True}
    model(input_ids=ids[:1, :PROMPT], cache_position=torch.arange(PROMPT, device="cuda"), **kept)
    call = torch.compile(model.forward, fullgraph=True, dynamic=False) if compiled else model.forward
    step = kept | {"input_ids": ids[:1, :1].clone(), "cache_position": torch.tensor([PROMPT], device="cuda")}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            call(**step)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(**step)
    times = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return statistics.median(times)


def measure(folder: Path, compiled: bool) -> Iterator[dict[str, Any]]:
    """Both models of a quantized folder: what they are and one step, and then one compiled."""
    models = {"fused": loaded(folder, True), "apart": loaded(folder, False)}
    ids = torch.arange(96, device="cuda").reshape(2, 48) * 37 % 500
    modules = list(models["fused"].modules())
    kernels = {module.choice.kernel.name for module in modules if isinstance(module, QuantizedLinear) and module.choice}
    with torch.no_grad():
        logits = {name: model(input_ids=ids).logits for name, model in models.items()}
        yield {
            "gated": sum(isinstance(module, GatedMlp) for module in modules),
            "norms": sum(isinstance(module, DeferredNorm) for module in modules), "kernels": sorted(kernels),
            "same_bits": torch.equal(logits["fused"], logits["apart"]),
            "largest_difference": (logits["fused"] - logits["apart"]).abs().max().item(),
            "largest_logit": logits["apart"].abs().max().item(),
        }  # fmt: skip
        for is_compiled in (False, True) if compiled else (False,):
            for name, model in models.items():
                yield {f"{name}{'_compiled' * is_compiled}_us": step_time_us(model, ids, is_compiled)}


def main(
    scheme: Annotated[list[str], typer.Option(help="Presets whose kernels round what they are given.")],
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 4,
    hidden: Annotated[int, typer.Option(help="Its hidden size, a multiple of 256.")] = 1024,
    compiled: Annotated[bool, typer.Option("--compiled", help="Also under torch.compile.")] = False,
    output: Annotated[Path | None, typer.Option(help="Write the lines as JSON here.")] = None,
) -> None:
    """Times a decode step with norms and gated activations in the rounding and apart from it."""
    driver = this_machine("cuda").driver
    machine = {"gpu": torch.cuda.get_device_name(), "driver": driver, "python": platform.python_version()}
    machine |= installed()
    lines: list[dict[str, Any]] = []
    with TemporaryDirectory() as folder:
        base = random_model(Path(folder) / "model", layers, hidden)
        for name in scheme:
            quantize(base, Path(folder) / name, name, effort="fast")
            line: dict[str, Any] = {"scheme": name, "layers": layers, "hidden": hidden}
            lines.append(line)
            for found in measure(Path(folder) / name, compiled):
                line |= found
                print(name, json.dumps(found), flush=True)
                if output:  # what was measured stays if a later step fails
                    output.write_text(json.dumps({"machine": machine, "lines": lines}))


if __name__ == "__main__":
    typer.run(main)
