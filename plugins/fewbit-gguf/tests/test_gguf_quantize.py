"""Rounding to block types: golden vectors, gguf-py on random numbers, and llama.cpp's own files byte for byte."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fewbit.errors import CheckpointError, OutputError
from fewbit_gguf.blocks import BLOCK_TYPES
from fewbit_gguf.format import Gguf, tensor_name
from fewbit_gguf.quantize import RULES, quantize, requantize
from fewbit_gguf.tensors import GgufFiles
from tests.golden import floats, golden_vectors


def blocks_of(numbers: Tensor, name: str) -> Tensor:
    return Gguf().write(quantize(numbers, name), BLOCK_TYPES[name].key)[tensor_name(name)]


@pytest.mark.parametrize("name", RULES)
def test_golden_blocks_are_written(name: str) -> None:
    vector = golden_vectors()[f"gguf_{name}"]
    assert bytes(blocks_of(floats(vector["x"])[None], name).flatten().tolist()).hex() == vector["block_hex"]


@pytest.mark.parametrize("name", RULES)
@given(seed=st.integers(0, 1 << 30), magnitude=st.sampled_from([1e-6, 1e-3, 1.0, 1e3]), coarse=st.booleans())
def test_random_numbers_are_rounded_as_by_gguf_py(name: str, seed: int, magnitude: float, coarse: bool) -> None:
    numbers = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed)) * magnitude
    if coarse:  # many ties, and blocks of one number
        numbers = (numbers / magnitude * 2).round() / 8
    numbers[0] = 0
    numbers[1, :32] = 0.5
    theirs = torch.from_numpy(gguf.quants.quantize(numbers.numpy(), gguf.GGMLQuantizationType[name]))
    assert torch.equal(blocks_of(numbers, name).flatten(1), theirs)


@pytest.mark.parametrize(("folder", "name"), [("q40", "Q4_0"), ("q41", "Q4_1"), ("q80", "Q8_0")])
def test_a_file_is_quantized_as_llama_cpp_quantizes_it(checkpoint, folder: str, name: str, tmp_path: Path) -> None:
    requantize(checkpoint("llamacpp-f16-llama-e"), tmp_path / "out.gguf", name)
    ours = gguf.GGUFReader(tmp_path / "out.gguf")
    theirs = gguf.GGUFReader(checkpoint(f"llamacpp-{folder}-llama-e"))
    assert ours.fields["general.file_type"].contents() == theirs.fields["general.file_type"].contents()
    assert {k: v.contents() for k, v in ours.fields.items()} == {k: v.contents() for k, v in theirs.fields.items()}
    written = {tensor.name: tensor for tensor in ours.tensors}
    assert written.keys() == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors:
        if tensor.tensor_type.name == "Q6_K":  # llama.cpp's choice for the embedding; there is no rule for it here
            assert written[tensor.name].tensor_type.name == "Q8_0"
        else:
            assert written[tensor.name].data.tobytes() == tensor.data.tobytes(), tensor.name


@pytest.mark.parametrize("name", RULES)
def test_every_type_makes_a_file_that_is_read(checkpoint, name: str, tmp_path: Path) -> None:
    requantize(checkpoint("llamacpp-f16-llama-e"), tmp_path / "out.gguf", name, tables=name)
    files = GgufFiles(tmp_path / "out.gguf")
    assert files.quantization is not None
    assert {kind: len(modules) for kind, modules in files.quantization[0]["types"].items()} == {name: 8}


def test_what_cannot_be_quantized_is_refused(checkpoint, tmp_path: Path) -> None:
    source, output = checkpoint("llamacpp-q40-llama-e"), tmp_path / "out.gguf"
    with pytest.raises(CheckpointError, match=r"is Q\w+ already.*F16"):
        requantize(source, output, "Q8_0")
    with pytest.raises(OutputError, match="'Q4_K'"):
        requantize(source, output, "Q4_K")
    with pytest.raises(OutputError, match="'Q4_K'"):
        quantize(torch.ones(1, 256), "Q4_K")
    with pytest.raises(CheckpointError, match="NaN"):
        quantize(torch.full((1, 32), torch.nan), "Q4_0")
    assert not [*tmp_path.iterdir()]
    output.write_bytes(b"")
    with pytest.raises(OutputError, match=r"out\.gguf exists"):
        requantize(source, output, "Q8_0")
