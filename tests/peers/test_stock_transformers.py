"""Stock transformers with the compressed-tensors package loads what fewbit writes, and computes the same.

Its FP4 and MX decompression returns bfloat16 whatever dtype is asked, so those are decompressed and widened before the
forward pass (seen in 5.17 and 5.24). It refuses FP8_BLOCK activations unless 128 divides K, so that scheme is compared
on a model whose sizes are multiples of 128, and fewbit alone is held to its definition on others.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from fewbit.kernels.select import Preference
from fewbit.models.conversion.convert import convert
from fewbit.models.load import load
from fewbit.models.quantization.quantize import quantize
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.peer
compressed_tensors = pytest.importorskip("compressed_tensors", reason="the compressed-tensors package is not installed")

IDS = torch.tensor([[1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]])
STEPS = 32
WIDENED = ("NVFP4A16", "MXFP4A16")


def stock(folder: Path, scheme: str) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if scheme in WIDENED:
        model.hf_quantizer.compressor.decompress_model(model)
        torch.nn.Module.float(model)
    return model.eval()


def agree(ours: PreTrainedModel, theirs: PreTrainedModel, ids: torch.Tensor) -> None:
    with torch.no_grad():
        a, b = ours(input_ids=ids).logits[0], theirs(input_ids=ids).logits[0]
    cosine = torch.nn.functional.cosine_similarity(a, b, dim=-1)
    assert cosine.min() > 0.999
    options = {"max_new_tokens": STEPS, "min_new_tokens": STEPS, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(ids)
    tokens = [
        model.generate(ids, attention_mask=mask, **options)[0, ids.shape[1] :].tolist() for model in (ours, theirs)
    ]
    assert tokens[0] == tokens[1]


@pytest.mark.model
@pytest.mark.parametrize("scheme", ["W4A16", "W8A8", "FP8_DYNAMIC", *WIDENED])
def test_real_weights_agree(smollm2_cut: Path, tmp_path: Path, scheme: str) -> None:
    quantize(smollm2_cut, tmp_path / "q", scheme, group_size=64 if scheme == "W4A16" else None, effort="fast")
    ours = load(tmp_path / "q", device="cpu", dtype=torch.float32, preference=Preference("reference"))
    agree(ours, stock(tmp_path / "q", scheme), IDS)


@pytest.mark.parametrize(
    "scheme", ["W4A16", "W3A16", "W2A16", "W8A16", "W8A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16", "MXFP4A16"]
)
def test_sizes_that_are_multiples_of_128_agree(tmp_path: Path, scheme: str) -> None:
    source = save_tiny_model(tmp_path / "model", hidden_size=256, intermediate_size=512, head_dim=64)
    quantize(source, tmp_path / "q", scheme, effort="fast")
    ours = load(tmp_path / "q", device="cpu", dtype=torch.float32, preference=Preference("reference"))
    agree(ours, stock(tmp_path / "q", scheme), IDS % 256)


@pytest.mark.parametrize("scheme", ["W4A16", "NVFP4A16"])
def test_codes_and_scales_that_were_searched_agree(tmp_path: Path, scheme: str) -> None:
    """Scales of either sign among them, which round to nearest does not write."""
    source = save_tiny_model(tmp_path / "model", hidden_size=256, intermediate_size=512, head_dim=64)
    quantize(source, tmp_path / "q", scheme, effort="balanced", calibration_windows=4, calibration_length=64)
    if scheme == "W4A16":
        scales = load_file(tmp_path / "q" / "model.safetensors")["model.layers.0.mlp.up_proj.weight_scale"]
        assert 0 < (scales < 0).float().mean() < 1
    ours = load(tmp_path / "q", device="cpu", dtype=torch.float32, preference=Preference("reference"))
    agree(ours, stock(tmp_path / "q", scheme), IDS % 256)


@pytest.mark.parametrize("sizes", [(576, 1536), (192, 320)], ids=["576", "192"])
def test_blocks_that_do_not_fit_are_right_in_fewbit(tmp_path: Path, sizes: tuple[int, int]) -> None:
    """128x128 blocks with cut edges: each weight within half a step of E4M3 at its own block's scale."""
    from fewbit.checkpoints.tensor_files import TensorFolder
    from fewbit.evaluation.layer_error import decoded_layers
    from fewbit.models.stored import StoredCheckpoint

    hidden, intermediate = sizes
    source = save_tiny_model(
        tmp_path / "model", hidden_size=hidden, intermediate_size=intermediate, head_dim=64, num_attention_heads=3,
        num_key_value_heads=3,
    )  # fmt: skip
    quantize(source, tmp_path / "q", "FP8_BLOCK", effort="fast")
    original = TensorFolder(source)
    layers = list(decoded_layers(StoredCheckpoint.open(tmp_path / "q")))
    assert len(layers) == 14
    for layer in layers:
        weight = original.load(f"{layer.name}.weight").float()
        assert tuple(layer.record["scale"].shape) == tuple(-(-extent // 128) for extent in weight.shape)
        for top in range(0, weight.shape[0], 128):
            for left in range(0, weight.shape[1], 128):
                block = weight[top : top + 128, left : left + 128]
                found = layer.numbers[top : top + 128, left : left + 128]
                smallest_step = block.abs().max() / 448 * 2.0**-9
                assert bool(((found - block).abs() <= block.abs() * 2.0**-4 + smallest_step).all())


def test_native_fp8_blocks_load_in_stock_transformers(tmp_path: Path) -> None:
    """Weights, and logits of what they stand for: on a CPU transformers dequantizes and leaves activations alone."""
    pytest.importorskip("accelerate", reason="transformers needs accelerate to read FP8")
    source = save_tiny_model(tmp_path / "model", hidden_size=256, intermediate_size=512, head_dim=64)
    quantize(source, tmp_path / "q", "FP8_BLOCK", format="fp8", effort="fast")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.float32)
    from fewbit.evaluation.layer_error import decoded_layers
    from fewbit.models.stored import StoredCheckpoint

    for layer in decoded_layers(StoredCheckpoint.open(tmp_path / "q")):
        torch.testing.assert_close(theirs.get_submodule(layer.name).weight.data, layer.numbers, rtol=2e-3, atol=1e-6)
    convert(tmp_path / "q", tmp_path / "plain", "f32")
    agree(load(tmp_path / "plain", device="cpu"), theirs.eval(), IDS % 256)
