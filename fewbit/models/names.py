"""transformers' own renaming and merging rules, and everything else of transformers that is not public.

transformers keeps, for each architecture, rules that rename the tensors of a checkpoint and merge some of them (experts
stacked, projections joined) into the parameters of its model classes. fewbit applies the same rules to the names of
stored *layers*, and the merges to hub records. Nothing outside this file imports a private name of transformers.

Works with transformers 5.17 to 5.24, which keep these rules in `conversion_mapping` and `core_model_loading`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from fewbit.checkpoints.registry import opener_of
from fewbit.errors import ModelError


@dataclass(frozen=True)
class Merge:
    """Several stored layers become one parameter.

    Attributes:
        source: the rule's pattern that the stored name matched, `mlp.experts.*.gate_proj.weight`.
        sources: all of the rule's patterns, in the order in which their results are joined.
        operations: names of transformers' operations with their axis, in order: (`MergeModulelist`, 0), ...
    """

    source: str
    sources: tuple[str, ...]
    operations: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Target:
    """Where a stored tensor goes in the model: a parameter's name, and the merge it takes part in, if any."""

    name: str
    merge: Merge | None = None


class Names:
    """Names of a model's parameters for the names of a checkpoint's tensors.

    Args:
        model: the model, its parameters possibly on meta.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        rules = get_model_conversion_mapping(model)
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._prefix = model.base_model_prefix
        self._state = model.state_dict()

    def target(self, stored: str) -> Target:
        """Where the tensor `stored` goes."""
        name, pattern = rename_source_key(stored, self._renamings, self._converters, self._prefix, self._state)
        if pattern is None:
            return Target(name)
        converter = next(rule for rule in self._converters if pattern in rule.source_patterns)
        operations = tuple((type(step).__name__, getattr(step, "dim", 0)) for step in converter.operations)
        return Target(name, Merge(pattern, tuple(converter.source_patterns), operations))


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Every parameter registered meanwhile lands on meta; buffers are real, so that rotary tables are computed."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def read_config(folder: Path) -> PretrainedConfig:
    """transformers' configuration of a model folder, or of a file that a plugin reads, without its quantization.

    Raises:
        ModelError: the folder has no configuration that transformers knows.
    """
    opener = opener_of(folder)
    if opener is not None:
        opened: PretrainedConfig = opener.model_config(folder)
        return opened
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json.", "Give a folder as save_pretrained writes it.")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(
            f"transformers cannot read {folder / 'config.json'}: {reason}", "Check `model_type`."
        ) from error
    for part in (config, config.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    return config


def build_on_meta(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The causal language model of a configuration, its parameters on meta and its buffers computed.

    Raises:
        ModelError: transformers has no causal language model for it.
    """
    try:
        with _parameters_on_meta():
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    except ValueError as error:
        reason = str(error).splitlines()[0]
        raise ModelError(
            f"transformers builds no causal language model here: {reason}", "Use a decoder model."
        ) from error
    return model.eval()


def tied_names(model: nn.Module) -> dict[str, str]:
    """Parameter name -> the first name of the same parameter, for every parameter that has several names."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = first.setdefault(id(parameter), name)
        if owner != name:
            tied[name] = owner
    return tied


def config_dtype(config: PretrainedConfig) -> torch.dtype:
    """The dtype a configuration declares; bfloat16 where it declares none."""
    declared: Any = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    if isinstance(declared, str):
        declared = getattr(torch, declared, None)
    return declared if isinstance(declared, torch.dtype) else torch.bfloat16
