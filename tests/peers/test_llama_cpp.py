"""llama.cpp runs the GGUF files that fewbit writes, and goes on as fewbit does.

`make test-originals` installs it beside fewbit, as the package xllamacpp, which brings it compiled. Where weights are
quantized it rounds activations to 8 bits, so that texts part in the end where two tokens are nearly as likely.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fewbit.models.conversion.convert import convert
from fewbit.models.load import load
from fewbit.models.quantization.calibration import load_tokenizer
from fewbit.models.quantization.quantize import quantize
from tests.peers.test_originals import original

pytestmark = [pytest.mark.peer, pytest.mark.model, pytest.mark.filterwarnings("ignore")]

PROMPT = "<|im_start|>user\nWhy is the sea salty?<|im_end|>\n<|im_start|>assistant\n"
TOKENS = 24


def ours(path: Path) -> str:
    """Greedy text after the prompt."""
    model, tokenizer = load(path, device="cpu", dtype=torch.float32), load_tokenizer(path)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    made = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
    return tokenizer.decode(made[0, inputs.input_ids.shape[1] :])


def theirs(path: Path) -> str:
    """llama.cpp's greedy text after the prompt, tokens cut by itself."""
    library = original("xllamacpp")
    asked = library.CommonParams()
    asked.model.path, asked.n_ctx, asked.n_parallel, asked.warmup = str(path), 256, 1, False
    asked.cpuparams.n_threads = 1
    answer = library.Server(asked).handle_completions({"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0})
    return answer["choices"][0]["text"]


@pytest.mark.parametrize(("scheme", "alike"), [("", None), ("W8A16", None), ("W4A16", 4), ("W4A16_ASYM", 4)])
def test_llama_cpp_goes_on_as_fewbit_does(smollm2: Path, tmp_path: Path, scheme: str, alike: int | None) -> None:
    original("xllamacpp")
    pytest.importorskip("fewbit_gguf", reason="fewbit-gguf is not installed: pip install -e plugins/fewbit-gguf")
    source = smollm2
    if scheme:
        source = tmp_path / "q"
        quantize(smollm2, source, scheme, group_size=32, effort="fast")
    convert(source, tmp_path / "model.gguf", "gguf")
    found, expected = theirs(tmp_path / "model.gguf"), ours(source)
    if alike is None:
        assert found == expected
    else:
        assert found.split()[:alike] == expected.split()[:alike]
        assert len(expected.split()) > alike
