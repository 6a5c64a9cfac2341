"""From flags to the values that the library takes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from fewbit.errors import SchemeError, closest
from fewbit.spec.hardware import Hardware, device

if TYPE_CHECKING:
    import torch

    from fewbit.kernels.select import Preference
    from fewbit.models.quantization.quantize import QuantizeOptions

_DTYPES = ("auto", "bfloat16", "float16", "float32")
_ALIASES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
    "fp32": "float32",
    "f32": "float32",
}


def torch_dtype(name: str) -> torch.dtype | None:
    """The dtype a user names, None for `auto`.

    Raises:
        SchemeError: there is none of that name.
    """
    import torch

    canonical = _ALIASES.get(name.lower(), name.lower())
    if canonical not in _DTYPES:
        raise SchemeError(f"Unknown dtype {name!r}.", closest(name, _DTYPES))
    return None if canonical == "auto" else getattr(torch, canonical)


def quantize_options(given: Mapping[str, Any]) -> QuantizeOptions:
    """The options of quantizing among a command's arguments, which are called as the fields are.

    Raises:
        SchemeError: a setting cannot be read, or a scale rule is unknown.
    """
    from fewbit.models.quantization.quantize import QuantizeOptions
    from fewbit.spec.recipe import ScaleRules

    known = [field.name for field in fields(QuantizeOptions)]
    values = {name: given[name] for name in known if given.get(name) is not None}
    values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    values["settings"] = parse_settings(given.get("settings"))
    if "integer_scale_rule" in given:
        values["scale_rules"] = ScaleRules(given["integer_scale_rule"], given["mx_scale_rule"])
    return QuantizeOptions(**values)


def parse_settings(given: list[str] | None) -> dict[str, str]:
    """`name=value` texts as a mapping.

    Raises:
        SchemeError: a text has no `=`.
    """
    parsed = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not equals:
            raise SchemeError(f"Cannot read the setting {text!r}.", "Write --set name=value.")
        parsed[name.strip()] = value.strip()
    return parsed


def torch_device(name: str) -> str:
    """The torch device a user names, `auto` resolved.

    Raises:
        SchemeError: torch knows no such device here.
    """
    import torch

    from fewbit.kernels.probe import default_device

    if name == "auto":
        return default_device()
    kind, _, index = name.partition(":")
    available = {"cpu"} | ({"cuda"} if torch.cuda.is_available() else set())
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        available.add("xpu")
    if kind not in available or (index and not index.isdigit()):
        raise SchemeError(f"There is no device {name!r} here.", f"Use {' or '.join(sorted(available))}.")
    return name


def hardware(name: str, assumed: list[str] | None = None) -> Hardware:
    """This machine's hardware, or a known device's by name, with software assumed to be installed."""
    if name in ("auto", "cpu") or name.startswith(("cuda", "xpu:")):
        from fewbit.kernels.probe import this_machine

        found = this_machine(torch_device(name))
    else:
        found = device(name)
    return found.with_software(*(assumed or []))


def preference(
    backend: str | None,
    disabled: list[str] | None,
    strict: bool,
    mix: list[str] | None = None,
    by_key: list[str] | None = None,
    batch_invariant: bool = False,
) -> Preference:
    """What the user asked of the kernel choice.

    Raises:
        SchemeError: a kernel to disable or a family does not exist, or a part of the mix cannot be read.
    """
    from fewbit.kernels.registry import linear_kernels
    from fewbit.kernels.select import Preference

    for name in disabled or []:
        if name not in linear_kernels():
            raise SchemeError(f"There is no kernel {name!r} to disable.", closest(name, linear_kernels()))
    asked = Preference(
        backend, _backends(by_key or []), frozenset(disabled or []), strict, batch_invariant=batch_invariant
    )
    return replace(asked, mix=_mix(mix)) if mix else asked


def _backends(parts: list[str]) -> dict[str, str]:
    """`nvfp4=emulation` and `W8A8=triton_int8` -> family or text of a key -> backend or kernel."""
    from fewbit.kernels.registry import families
    from fewbit.spec.key import LinearKey
    from fewbit.spec.presets import preset

    found: dict[str, str] = {}
    for part in parts:
        key, equals, name = part.rpartition("=")
        if not equals or not key or not name:
            raise SchemeError(f"Cannot read the backend {part!r}.", "Write KEY=NAME, say nvfp4=emulation.")
        if key in {family.name for family in families()}:
            found[key] = name
        else:
            found[str(LinearKey.parse(key) if ":" in key else preset(key).rules[0].key)] = name
    return found


def _mix(parts: list[str]) -> dict[int, float]:
    """`1:4` and `1024` -> {1: 4.0, 1024: 1.0}."""
    found: dict[int, float] = {}
    for part in parts:
        match = re.fullmatch(r"([1-9]\d{0,6})(?::(\d{1,6}(?:\.\d{1,6})?))?", part)
        if match is None or (match[2] and not float(match[2])):
            raise SchemeError(f"Cannot read {part!r} of the mix.", "Write ROWS or ROWS:WEIGHT, say 1:4.")
        found[int(match[1])] = float(match[2] or 1)
    return found
