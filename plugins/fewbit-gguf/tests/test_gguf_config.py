"""The configuration and the tokenizer that transformers reads from a file, and what it leaves out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_models import write_model
from transformers import AutoConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fewbit.errors import ModelError
from fewbit.models.names import read_config
from fewbit.models.quantization.calibration import load_tokenizer
from fewbit_gguf.config import llama3_factors
from tests.tiny_models import save_tiny_model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {}), ("llama", {"attention_bias": True, "mlp_bias": True}), ("qwen2", {}), ("qwen3", {"head_dim": 32})],
)
def test_it_is_the_configuration_of_the_source(tmp_path: Path, family: str, changes: dict, tied: bool) -> None:
    source = save_tiny_model(tmp_path / "model", family, dtype=torch.float32, tie_word_embeddings=tied, **changes)
    ours, theirs = read_config(write_model(source, tmp_path / "model.gguf")), AutoConfig.from_pretrained(source)
    for name in (
        "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "max_position_embeddings", "tie_word_embeddings", "rope_parameters", "dtype",
        *(name for name in ("head_dim", "attention_bias", "mlp_bias") if hasattr(theirs, name) and family != "qwen2"),
    ):  # fmt: skip
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.rms_norm_eps == pytest.approx(theirs.rms_norm_eps)


def _llama3(theta: float, head_dim: int, factor: float) -> tuple[np.ndarray, dict]:
    """The factors of a `rope_freqs.weight`, from transformers' own frequencies; and what it was told to make them."""
    told = {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_theta": theta,
    }  # fmt: skip
    config = LlamaConfig(head_dim=head_dim, rope_parameters=told, max_position_embeddings=131072)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    return (plain / frequencies.double()).float().numpy(), told


@pytest.mark.parametrize(("theta", "head_dim", "factor"), [(500000.0, 128, 8.0), (500000.0, 64, 32.0)])
def test_factors_of_llama_3(theta: float, head_dim: int, factor: float) -> None:
    theirs, _ = _llama3(theta, head_dim, factor)
    torch.testing.assert_close(
        llama3_factors(factor, theta, head_dim // 2), torch.from_numpy(theirs), rtol=1e-5, atol=0
    )


def test_factors_of_the_rotary_embedding_are_recognized(tmp_path: Path) -> None:
    factors, told = _llama3(500000.0, 16, 8.0)
    source = save_tiny_model(tmp_path / "model", rope_parameters=told)
    config = read_config(write_model(source, tmp_path / "a.gguf", tensors={"rope_freqs.weight": factors}))
    assert config.rope_parameters == told
    with pytest.warns(UserWarning, match="other factors than those of Llama 3"):
        config = read_config(
            write_model(source, tmp_path / "b.gguf", tensors={"rope_freqs.weight": factors[::-1].copy()})
        )
    assert config.rope_parameters["rope_type"] == "default"


def test_scaled_rotary_embedding(tmp_path: Path) -> None:
    source = save_tiny_model(tmp_path / "model", "qwen2")
    for kind, more in (("linear", {}), ("yarn", {"original_max_position_embeddings": 64})):
        keys = {"type": kind, "factor": 4.0} | ({"original_context_length": 64} if more else {})
        metadata = {f"qwen2.rope.scaling.{key}": value for key, value in keys.items()}
        found = read_config(write_model(source, tmp_path / f"{kind}.gguf", metadata=metadata)).rope_parameters
        assert found == {"rope_theta": found["rope_theta"], "rope_type": kind, "factor": 4.0, **more}
    other = write_model(source, tmp_path / "o.gguf", metadata={"qwen2.rope.scaling.type": "longrope"})
    with pytest.raises(ModelError, match=r"rotary embedding by 'longrope'.*linear, yarn"):
        read_config(other)


def test_the_tokenizer_of_a_file(checkpoint, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(checkpoint("llamacpp-q40-llama-e"))
    assert len(tokenizer) == 256 and tokenizer.eos_token_id == 2
    bare = write_model(save_tiny_model(tmp_path / "model"), tmp_path / "bare.gguf")
    with pytest.raises(ModelError, match=r"tokenizer of .*bare\.gguf"):
        load_tokenizer(bare)
