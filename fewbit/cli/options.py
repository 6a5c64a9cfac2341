"""Options that several commands share, with the names people know."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ModelFolder = Annotated[
    Path, typer.Argument(metavar="MODEL", help="Folder of a model, as save_pretrained writes it, or a .gguf file.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON value and nothing else.")]
Scheme = Annotated[
    str, typer.Option("--scheme", "-s", help="Preset: W4A16, W8A8, FP8_DYNAMIC, NVFP4A16, MXFP4A16, ...")
]
GroupSize = Annotated[
    int | None, typer.Option("--group-size", "-g", help="Numbers of a row under one scale; -1: one per channel.")
]
Ignore = Annotated[
    list[str] | None,
    typer.Option("--ignore", help="Leave layers as they are: a name, whole segments of one, a glob, or re:REGEX."),
]
Format = Annotated[
    str, typer.Option("--format", help="Checkpoint format to write: compressed-tensors, fp8, gptq, awq, modelopt, ...")
]
ShortLastGroup = Annotated[
    bool, typer.Option("--short-last-group", help="Allow a group size that does not divide the input features.")
]
MxRule = Annotated[str, typer.Option("--mx-scale-rule", help="How MX exponents are chosen: floor, even or ceil.")]
IntegerRule = Annotated[
    str, typer.Option("--integer-scale-rule", help="Divisor of symmetric integer scales: full or restricted.")
]
Embeddings = Annotated[
    str | None,
    typer.Option("--embeddings", help="Quantize the input embedding, and a head tied to it, by a preset, say W8A16."),
]
KvCache = Annotated[
    str | None, typer.Option("--kv-cache", help="Quantize the KV cache: fp8 (one scale a layer) or fp8_head.")
]
CalibrationText = Annotated[
    str | None,
    typer.Option(
        "--calibration-text",
        help="Text for calibration: .txt, .jsonl, .parquet, or hub:NAME[:CONFIG[:SPLIT]]; built-in prose by default.",
    ),
]
SelfSamples = Annotated[
    int | None,
    typer.Option(
        "--self-samples", min=0, help="Calibration windows that the model writes itself; some where no text is given."
    ),
]
CalibrationWindows = Annotated[
    int, typer.Option("--calibration-windows", min=1, help="Windows of tokens that calibration reads.")
]
CalibrationLength = Annotated[int, typer.Option("--calibration-length", min=2, help="Tokens in each window.")]
BitsPerWeight = Annotated[
    float | None,
    typer.Option("--bits-per-weight", help="Choose a key for each layer: at most this many bits, 4.25 say."),
]
Fit = Annotated[
    str | None, typer.Option("--fit", help="Choose keys so that weights and KV cache fit into a size, say 24GB.")
]
Context = Annotated[int, typer.Option("--context", min=0, help="With --fit: tokens that the KV cache must hold.")]
Candidates = Annotated[
    list[str] | None,
    typer.Option("--candidate", help="What a bit budget may choose, say int4:group64:bf16; may be repeated."),
]
MaxKl = Annotated[
    float | None,
    typer.Option("--max-kl", help="Mean KL on held-out text that must hold, 0.02 say; worst layers get more bits."),
]
EvaluationText = Annotated[Path | None, typer.Option("--text", help="Text to score; built-in prose by default.")]
EvaluationWindows = Annotated[int, typer.Option("--windows", min=1, help="How many windows to score.")]
EvaluationWindowLength = Annotated[int, typer.Option("--window-length", min=2, help="Tokens of a window.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="A setting of the algorithm, say damping=0.05; may be repeated.")
]
Transforms = Annotated[
    list[str] | None,
    typer.Option(
        "--transform",
        help="Change the weights first so that they lose less: awq, smoothquant or rotation, "
        "or NAME:SETTING=VALUE,...; may be repeated.",
    ),
]
ActivationPercentile = Annotated[
    float,
    typer.Option(
        "--activation-percentile", help="Per cent of an input's magnitudes that its static scale reaches; 100: all."
    ),
]
Effort = Annotated[str, typer.Option("--effort", help="fast (reads no data), balanced or best.")]
Algorithm = Annotated[
    str | None, typer.Option("--algorithm", help="What chooses the codes, instead of --effort: gptq, ...")
]
QuantizeDevice = Annotated[str, typer.Option("--device", help="Where codes are chosen: cpu or cuda.")]
ShardSize = Annotated[str, typer.Option("--max-shard-size", help="Largest weight file, say 5GB or 500MiB.")]
CalibrationMemory = Annotated[
    str,
    typer.Option(
        "--calibration-memory", help="Activations that calibration may hold; beyond, they are computed again."
    ),
]
Restart = Annotated[
    bool, typer.Option("--restart", help="Throw away what an earlier, stopped run has finished in OUTPUT.partial.")
]
KeepStatistics = Annotated[
    Path | None,
    typer.Option(
        "--keep-statistics",
        help="Folder for what calibration shows of the unquantized model; found there, no forward pass is needed.",
    ),
]
Device = Annotated[
    str,
    typer.Option("--device", help="auto, cpu, cuda; for explain and plan also a device's name, say sm90 or x86-avx2."),
]
Dtype = Annotated[str, typer.Option("--dtype", help="auto, bfloat16, float16 or float32.")]
Backend = Annotated[str | None, typer.Option("--linear-backend", help="Use this kernel or backend and no other.")]
KeyBackends = Annotated[
    list[str] | None,
    typer.Option("--backend", help="KEY=NAME: this kernel or backend for a family, preset or key: nvfp4=emulation."),
]
BatchInvariant = Annotated[
    bool, typer.Option("--batch-invariant", help="Give a row the same bits whatever rows are beside it.")
]
DisableKernel = Annotated[list[str] | None, typer.Option("--disable-kernel", help="Never use this kernel.")]
Strict = Annotated[
    bool, typer.Option("--strict", help="Refuse what would change numbers or contradicts the configuration.")
]
JoinMembers = Annotated[
    bool,
    typer.Option(
        "--join-members/--no-join-members",
        help="Run quantized q, k and v, and gate and up, as one matrix each, and say what had to be restated for it.",
    ),
]
Mix = Annotated[
    list[str] | None,
    typer.Option(
        "--mix", help="Rows of inputs that kernels are chosen for, ROWS or ROWS:WEIGHT; 1:1 4096:0.01 by default."
    ),
]
