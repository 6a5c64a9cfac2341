"""Every checkpoint format by name, what opens a checkpoint, plugins included, and where it says which format it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import fewbit.checkpoints
from fewbit.checkpoints.files import CheckpointFiles, CheckpointOpener
from fewbit.checkpoints.interface import CheckpointFormat
from fewbit.checkpoints.tensor_files import TensorFolder
from fewbit.discovery import implementations, plugins
from fewbit.errors import CheckpointError, closest

FORMAT_PLUGINS = "fewbit.checkpoint_formats"
"""Entry point group of classes that implement `CheckpointFormat`."""

OPENER_PLUGINS = "fewbit.checkpoint_openers"
"""Entry point group of classes that implement `CheckpointOpener`."""


@dataclass(frozen=True)
class _Place:
    """A place where a quantization configuration may be: a file, the way to it in there, and what wrote such files."""

    file: str
    path: tuple[str, ...] = ()
    quant_method: str = ""

    def __str__(self) -> str:
        return ": ".join([self.file, ".".join(self.path)]) if self.path else self.file


_PLACES = (
    _Place("config.json", ("quantization_config",)),
    _Place("config.json", ("compression_config",), "compressed-tensors"),
    _Place("config.json", ("text_config", "quantization_config")),
    _Place("quantize_config.json", (), "gptq"),
    _Place("quant_config.json", (), "awq"),
    _Place("hf_quant_config.json", (), "modelopt"),
    _Place("quantization_config.json", (), "auto-round"),
)
"""In order of authority."""

_DECISIVE = (
    "quant_method",
    "quant_algo",
    "exclude_modules",
    "quantized_layers",
    "bits",
    "group_size",
    "sym",
    "zero_point",
    "desc_act",
    "checkpoint_format",
    "format",
    "packing_format",
    "lm_head",
    "weight_block_size",
    "activation_scheme",
)
"""What two places must agree on; other keys are notes of their writers."""

_SYNONYMS = {
    "w_bit": "bits",
    "wbits": "bits",
    "q_group_size": "group_size",
    "method": "quant_method",
    "ignore": "exclude_modules",
}


@cache
def formats() -> dict[str, CheckpointFormat]:
    """Every checkpoint format by name."""
    return implementations(fewbit.checkpoints, CheckpointFormat, FORMAT_PLUGINS)  # type: ignore[type-abstract]


@cache
def openers() -> dict[str, CheckpointOpener]:
    """Every kind of file that plugins open, by name."""
    return plugins(OPENER_PLUGINS, CheckpointOpener)  # type: ignore[type-abstract]


def opener_of(path: Path) -> CheckpointOpener | None:
    """The plugin that opens `path`; None for a folder or file of safetensors, and for a path that does not exist."""
    if not path.exists():
        return None
    return next((opener for opener in openers().values() if opener.recognizes(path)), None)


def container_of(checkpoint: CheckpointFormat) -> CheckpointOpener | None:
    """What writes files of a format that is none for a folder of safetensors; None for all other formats."""
    return next((opener for opener in openers().values() if opener.writes == checkpoint.name), None)


def writable() -> list[str]:
    """Formats that linear layers can be written in, into a folder or into a file of their own kind."""
    return [
        name
        for name, found in formats().items()
        if found.writes_layers and (found.in_safetensors or container_of(found) is not None)
    ]


def open_files(path: Path) -> CheckpointFiles:
    """The tensors of a checkpoint, whatever holds them.

    Raises:
        CheckpointError: it is damaged, or a file that nothing here opens.
    """
    opener = opener_of(path)
    if opener is not None:
        return opener.open(path)
    if path.is_file() and path.suffix != ".safetensors":
        known = ", ".join([".safetensors", *openers()])
        raise CheckpointError(
            f"{path} is a file that nothing installed opens; known are {known}.",
            "Give a folder with .safetensors files; for a .gguf file, install fewbit-gguf.",
        )
    return TensorFolder(path)


def find_format(config: Mapping[str, Any] | None) -> CheckpointFormat | None:
    """The format that a `quantization_config` announces, or None where there is no such configuration.

    Raises:
        CheckpointError: its quant_method is missing or belongs to no format.
    """
    if not config:
        return None
    method = config.get("quant_method")
    known = {_folded(alias): found for found in formats().values() for alias in (*found.quant_methods, found.name)}
    if not isinstance(method, str):
        raise CheckpointError(
            f"quantization_config has quant_method {method!r}.", f"Known: {', '.join(sorted(known))}."
        )
    if _folded(method) not in known:
        raise CheckpointError(
            f"Unknown quant_method {method!r}; known are {', '.join(sorted(known))}.", closest(method, known)
        )
    return known[_folded(method)]


def recognize(folder: CheckpointFiles) -> tuple[CheckpointFormat, Mapping[str, Any], str] | None:
    """The checkpoint's format, its configuration as the weight files complete it, and what decided; None if plain.

    Raises:
        CheckpointError: a configuration is malformed, contradicts another, or belongs to no format.
    """
    found = quantization_config(folder)
    checkpoint = find_format(found[0]) if found else None
    if found is not None and checkpoint is not None:
        return checkpoint, checkpoint.completed(found[0], folder) or found[0], found[1]
    for candidate in formats().values():
        config = candidate.completed(None, folder)
        if config is not None:
            return candidate, config, f"the names of {candidate.name}'s tensors"
    return None


def quantization_config(folder: CheckpointFiles) -> tuple[dict[str, Any], str] | None:
    """The checkpoint's quantization configuration and the place that decided, or None where nothing is said.

    A missing quant_method is filled in by the side file that it came from.

    Raises:
        CheckpointError: a file is malformed, or two places say different things.
    """
    if folder.quantization is not None:
        return folder.quantization
    found = [(place, value) for place in _PLACES if (value := _value(folder, place))]
    if not found:
        return None
    first, config = found[0]
    for place, other in found[1:]:
        _refuse_disagreement(folder, (first, config), (place, other))
    if first.quant_method and not config.get("quant_method"):
        config = {**config, "quant_method": config.get("method") or first.quant_method}
    return config, str(first)


def _value(folder: CheckpointFiles, place: _Place) -> dict[str, Any] | None:
    value: Any = folder.json(place.file)
    for step in place.path:
        value = value.get(step) if isinstance(value, dict) else None
    if value is None:
        return None
    if not isinstance(value, dict):
        raise CheckpointError(f"{place} in {folder.path} is {value!r}, needed an object.", "The file is malformed.")
    return value


def _refuse_disagreement(
    folder: CheckpointFiles, first: tuple[_Place, dict[str, Any]], second: tuple[_Place, dict[str, Any]]
) -> None:
    ours, theirs = _decisive(first[1]), _decisive(second[1])
    for name in ours.keys() & theirs.keys():
        if ours[name] != theirs[name]:
            raise CheckpointError(
                f"In {folder.path}, {first[0]} says {name} is {ours[name]!r} and {second[0]} says {theirs[name]!r}.",
                "One of them is left over from another checkpoint; remove it.",
            )


def _decisive(config: Mapping[str, Any]) -> dict[str, Any]:
    """Values that decide how to read, under one spelling; ModelOpt's side file keeps them one level down."""
    inner = config.get("quantization")
    named = {
        _SYNONYMS.get(name, name): value
        for name, value in {**config, **(inner if isinstance(inner, dict) else {})}.items()
    }
    return {name: _folded(named[name]) for name in _DECISIVE if named.get(name) is not None}


def _folded(value: Any) -> Any:
    """A value in which spellings that mean the same are equal: names in any case, lists of names in any order."""
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return sorted(value)
    return value.lower().replace("_", "-") if isinstance(value, str) else value
