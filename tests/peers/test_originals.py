"""The originals' own code reads the layers that fewbit writes. `make test-originals` installs them beside fewbit.

Each project is asked for the numbers of a layer: GPTQModel's linear layer, AutoAWQ's unpacking, HQQ's and bitsandbytes'
layers and transformers' MXFP4 loader. They ask for one another's dependencies, some of them for GPUs, so they are
installed without them, and a project that does not install or import is named in its skip.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from fewbit.checkpoints.registry import formats
from fewbit.evaluation.layer_error import decoded_layers
from fewbit.kernels.select import Preference
from fewbit.models.conversion.convert import convert
from fewbit.models.load import load
from fewbit.models.quantization.quantize import quantize
from fewbit.models.stored import StoredCheckpoint
from fewbit.numerics import QuantizedTensor
from fewbit.numerics import quantize as quantize_numbers
from fewbit.packing.registry import dequantize_record
from fewbit.spec import LinearKey
from tests.checkpoints.layers import layer
from tests.tiny_models import VOCABULARY, save_tiny_model

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore")]

SHAPE = (128, 256)
NF4 = LinearKey.parse("uint4:group64:f32")


def original(module: str) -> Any:
    """A module of another project.

    Whatever keeps it from being imported, its dependencies' versions for one, is the reason to skip.
    """
    try:
        return importlib.import_module(module)
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"
        pytest.skip(
            f"{module.partition('.')[0]} cannot be imported here ({reason}); `make test-originals` installs it."
        )


def written(name: str, text: str, shape: tuple[int, int] = SHAPE) -> tuple[QuantizedTensor, dict[str, Tensor]]:
    """A random layer and the tensors that the format stores it in."""
    key = LinearKey.parse(text)
    record = layer(key, shape)
    return record, formats()[name].write(record, key)


GPTQ_KEYS = [
    *((f"int{bits}:group32:f16", 32, True) for bits in range(2, 9)),
    *((f"int{bits}:asym:group64:f16", 64, False) for bits in range(2, 9)),
    ("int4:channel:f16", -1, True),
]
"""Text, group size, and whether it is symmetric."""


@pytest.mark.parametrize(("text", "size", "symmetric"), GPTQ_KEYS)
def test_gptqmodel_reads_gptq(text: str, size: int, symmetric: bool) -> None:
    linear = original("gptqmodel.nn_modules.qlinear.torch").TorchLinear
    convert = original("gptqmodel.utils.model").convert_gptq_v1_to_v2_format_module
    versions = original("gptqmodel.quantization.config").FORMAT
    record, tensors = written("gptq", text)
    bits, version = record.key.element.bits, formats()["gptq"].written_as(LinearKey(record.key)).variant
    theirs = linear(bits, size, symmetric, False, SHAPE[1], SHAPE[0], format=versions(version))
    for name, tensor in tensors.items():
        assert getattr(theirs, name).shape == tensor.shape, name
        getattr(theirs, name).copy_(tensor)
    if version == "gptq":
        convert(theirs, bits=bits, pack_dtype=torch.int32)
    found = theirs.eval().dequantize_weight().T.float()
    assert torch.equal(found, dequantize_record(record).half().float())


@pytest.mark.parametrize(("text", "size"), [("int4:asym:group64:f16", 64), ("int4:group32:f16", 32)])
def test_autoawq_reads_awq(text: str, size: int) -> None:
    unpacking = original("awq.utils.packing_utils")
    record, tensors = written("awq", text)
    found = unpacking.dequantize_gemm(tensors["qweight"], tensors["qzeros"], tensors["scales"], 4, size).T.float()
    assert torch.equal(found, dequantize_record(record).half().float())


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_hqq_reads_hqq(bits: int) -> None:
    linear = original("hqq.core.quantize").HQQLinear
    record, tensors = written("hqq", f"uint{bits}:asym:group64:bf16")
    theirs = linear(None, None, compute_dtype=torch.bfloat16, device="cpu", initialize=False)
    theirs.load_state_dict(dict(tensors))
    steps = record["codes"].float() - record["zero_point"].float().repeat_interleave(64, 1)
    exact = steps.bfloat16() * record["scale"].repeat_interleave(64, 1)  # it computes in the scales' dtype
    assert torch.equal(theirs.dequantize(), exact)


def test_bitsandbytes_reads_4_bit_layers() -> None:
    functional = original("bitsandbytes.functional")
    record, tensors = written("bitsandbytes", "uint4:group64:f32")
    state = functional.QuantState.from_dict(
        {name.removeprefix("weight."): tensor for name, tensor in tensors.items() if name != "weight"},
        device=torch.device("cpu"),
    )
    state.dtype = torch.float32
    found = functional.dequantize_4bit(tensors["weight"], state)
    torch.testing.assert_close(found, dequantize_record(record), rtol=1e-6, atol=0)


def test_bitsandbytes_chooses_the_same_codes() -> None:
    functional = original("bitsandbytes.functional")
    weight = torch.randn(SHAPE)
    packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    tensors = formats()["bitsandbytes"].write(quantize_numbers(weight, NF4.weight), NF4)
    assert torch.equal(tensors["weight"], packed.reshape(-1, 1))
    assert torch.equal(tensors["weight.absmax"], state.absmax)


@pytest.mark.parametrize("scheme", ["NF4", "W8A16"])
def test_transformers_reads_bitsandbytes_folders(scheme: str, tmp_path: Path) -> None:
    functional = original("bitsandbytes.functional")
    quantize(save_tiny_model(tmp_path / "model"), tmp_path / "q", scheme, format="bitsandbytes", effort="fast")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.bfloat16, device_map="cpu")
    for one in decoded_layers(StoredCheckpoint.open(tmp_path / "q")):
        module = theirs.get_submodule(one.name)
        if scheme == "NF4":
            found = functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
        else:
            found = functional.int8_vectorwise_dequant(module.weight.data, module.weight.SCB)
        torch.testing.assert_close(found.float().reshape(one.numbers.shape), one.numbers, rtol=2**-7, atol=0)


def test_bitsandbytes_reads_8_bit_layers() -> None:
    functional = original("bitsandbytes.functional")
    key = LinearKey.parse("int8:channel:f32/tensor:f32")
    record = layer(key, SHAPE).with_tensors(global_scale=torch.full((1, 1), 1 / 127, dtype=torch.float64))
    tensors = formats()["bitsandbytes"].write(record, key)
    found = functional.int8_vectorwise_dequant(tensors["weight"], tensors["SCB"])
    torch.testing.assert_close(found, dequantize_record(record), rtol=1e-6, atol=0)


@pytest.mark.parametrize("scheme", ["W4A16", "W3A16_ASYM", "W8A16", "W8A8", "FP8_DYNAMIC"])
def test_transformers_reads_torchao_folders(scheme: str, tmp_path: Path) -> None:
    """By torchao's own tensor classes, in a folder of several files; activations of FP8 need a GPU there."""
    original("torchao.prototype.safetensors.safetensors_support")
    size = 32 if scheme.startswith(("W4", "W3")) else None
    quantize(save_tiny_model(tmp_path / "model"), tmp_path / "q", scheme, group_size=size, effort="fast")
    options = {"drop_activations": scheme == "FP8_DYNAMIC", "max_shard_bytes": 60_000}
    convert(tmp_path / "q", tmp_path / "ao", "torchao", **options)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "ao", dtype=torch.bfloat16)
    layers = list(decoded_layers(StoredCheckpoint.open(tmp_path / "q")))
    assert len(layers) == 14
    for one in layers:
        weight = theirs.get_submodule(one.name).weight
        assert type(weight).__module__.startswith("torchao"), one.name
        torch.testing.assert_close(weight.dequantize().float(), one.numbers, rtol=2**-7, atol=0)  # in bfloat16
    ids = torch.arange(24)[None] * 7 % VOCABULARY
    with torch.no_grad():
        ours = load(tmp_path / "ao", device="cpu", preference=Preference("reference"))(input_ids=ids).logits
        found = theirs(input_ids=ids).logits
    assert torch.nn.functional.cosine_similarity(ours.float(), found.float(), dim=-1).min() > 0.999


def test_transformers_reads_gpt_oss_stacks() -> None:
    loader = original("transformers.integrations.mxfp4")
    key = LinearKey.parse("e2m1:group32:e8m0")
    experts = [layer(key, SHAPE) for _ in range(3)]
    stacked = {role: torch.stack([one[role] for one in experts]) for role in ("codes", "scale")}
    stack = QuantizedTensor(key.weight, (3, *SHAPE), stacked)
    tensors = formats()["mxfp4"].write(stack, key)
    found = loader.convert_moe_packed_tensors(tensors["blocks"], tensors["scales"], dtype=torch.float32)
    assert torch.equal(found.cpu(), dequantize_record(stack).transpose(-1, -2))
