"""Tiny models with random weights, one for each family, saved as people's models are; and a tokenizer of bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 260
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
_EXPERTS = {"num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 32},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {"sliding_window": 32, "query_pre_attn_scalar": 16},
    "gemma3_text": {"sliding_window": 32, "query_pre_attn_scalar": 16},
    "phi3": {"partial_rotary_factor": 1.0},
    "qwen3_moe": _EXPERTS | {"num_experts": 4, "moe_intermediate_size": 64},
    "mixtral": _EXPERTS | {"num_local_experts": 4},
    # No row in the table of families: understood by structure.
    "gpt_neox": {},
    "olmo2": {},
}


def save_tiny_model(
    folder: Path,
    family: str = "llama",
    dtype: torch.dtype = torch.bfloat16,
    max_shard_size: str = "5GB",
    **changes: Any,
) -> Path:
    """Writes a tiny model and its tokenizer to `folder`."""
    torch.manual_seed(7)
    config = AutoConfig.for_model(family, **(_SIZES | FAMILIES[family] | {"tie_word_embeddings": False} | changes))
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for parameter in model.parameters():  # a trained model's logits differ from token to token; 0.02 would not do that
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    byte_tokenizer().save_pretrained(folder)
    return folder


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, after four special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<s>", "</s>", "<unk>", "<pad>", *alphabet])}
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    )
