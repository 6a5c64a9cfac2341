"""Norms and gated activations inside the operation that rounds them, in a whole model on a GPU.

    python benchmarks/fused_rounding.py --scheme FP8_DYNAMIC --scheme W8A8 --compiled --output fused.json

A small random Llama is quantized and loaded twice, as `load` gives it and without `models.produced`. Their logits are
compared, and one decode step of each is captured in a CUDA graph, as it is and under torch.compile, and timed.
"""

from __future__ import annotations

import json
import platform
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, StaticCache

import fewbit.models.load as loading
from fewbit.kernels.probe import installed, this_machine
from fewbit.models.produced import DeferredNorm, GatedMlp
from fewbit.models.quantization.quantize import quantize

PROMPT, LONGEST, REPLAYS = 20, 256, 20


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
    """Microseconds of one decode step in a CUDA graph, median."""
    cache = StaticCache(config=model.config, max_cache_len=LONGEST)
    arguments = {"past_key_values": cache, "use_cache": True}
    model(input_ids=ids[:1, :PROMPT], cache_position=torch.arange(PROMPT, device="cuda"), **arguments)
    call = torch.compile(model.forward, fullgraph=True, dynamic=False) if compiled else model.forward
    position = torch.tensor([PROMPT], device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call(input_ids=ids[:1, :1], cache_position=position, **arguments)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(input_ids=ids[:1, :1], cache_position=position, **arguments)
    times = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return statistics.median(times)


def measure(folder: Path, compiled: bool) -> dict[str, Any]:
    """Both models of a quantized folder."""
    models = {"fused": loaded(folder, True), "apart": loaded(folder, False)}
    ids = torch.arange(96, device="cuda").reshape(2, 48) * 37 % 500
    kinds = [type(module) for module in models["fused"].modules()]
    with torch.no_grad():
        logits = {name: model(input_ids=ids).logits for name, model in models.items()}
        line: dict[str, Any] = {
            "gated": kinds.count(GatedMlp), "norms": kinds.count(DeferredNorm),
            "same_bits": torch.equal(logits["fused"], logits["apart"]),
        }  # fmt: skip
        for name, model in models.items():
            line[f"{name}_us"] = step_time_us(model, ids, compiled=False)
            if compiled:
                line[f"{name}_compiled_us"] = step_time_us(model, ids, compiled=True)
    return line


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
    lines = []
    with TemporaryDirectory() as folder:
        base = random_model(Path(folder) / "model", layers, hidden)
        for name in scheme:
            quantize(base, Path(folder) / name, name, effort="fast")
            lines.append({"scheme": name, "layers": layers, "hidden": hidden, **measure(Path(folder) / name, compiled)})
            print(json.dumps(lines[-1]), flush=True)
    if output:
        output.write_text(json.dumps({"machine": machine | installed(), "lines": lines}))


if __name__ == "__main__":
    typer.run(main)
