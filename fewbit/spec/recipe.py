"""Recipes: everything that decided an output, saved beside it.

A recipe is a scheme, an algorithm with its settings, the scale rules and what calibration used. Two runs with equal
recipes on equal inputs write equal bytes.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from fewbit.errors import SchemeError, closest
from fewbit.spec.scheme import Scheme

RECIPE_VERSION = 1


@dataclass(frozen=True)
class ScaleRules:
    """How a scale follows from the extremes of the numbers it covers, where producers differ.

    Attributes:
        integer: `full` divides the largest magnitude by (2**b - 1) / 2, so that the lowest code is reached
            (compressed-tensors, GPTQ); `restricted` divides by 2**(b-1) - 1, so that the grid is symmetric (ModelOpt,
            AutoAWQ).
        mx: how an E8M0 exponent follows from the largest magnitude: `floor` is OCP MX 1.0, `even` rounds the magnitude
            to the element's mantissa first (Quark, and compressed-tensors for FP4), `ceil` never saturates (ModelOpt,
            and vLLM's online path).
    """

    integer: Literal["full", "restricted"] = "full"
    mx: Literal["floor", "even", "ceil"] = "even"

    def __post_init__(self) -> None:
        for name, allowed in (("integer", ("full", "restricted")), ("mx", ("floor", "even", "ceil"))):
            if getattr(self, name) not in allowed:
                raise SchemeError(
                    f"Unknown {name} scale rule {getattr(self, name)!r}.", f"Known: {', '.join(allowed)}."
                )


@dataclass(frozen=True)
class Recipe:
    """What made a quantized checkpoint.

    Attributes:
        scheme: which modules got which key.
        format: name of the checkpoint format that was written.
        algorithm: name of the algorithm that chose the codes.
        settings: the algorithm's settings.
        scale_rules: see `ScaleRules`.
        calibration: what calibration used (source, hash, counts), or None for data-free algorithms.
        source: name of the model that was quantized; its path is not recorded.
        transforms: equivalent transformations of the weights before their codes were chosen, in order, each with its
            `name` and `settings`. What is stored then stands for the transformed weights, not for the source's.
        activation_percentile: per cent of an input's magnitudes that its static scale reaches; 100 is the largest one.
    """

    scheme: Scheme
    format: str = "compressed-tensors"
    algorithm: str = "round_to_nearest"
    settings: dict[str, Any] = field(default_factory=dict)
    scale_rules: ScaleRules = ScaleRules()
    calibration: dict[str, Any] | None = None
    source: str = ""
    transforms: tuple[dict[str, Any], ...] = ()
    activation_percentile: float = 100.0

    def __post_init__(self) -> None:
        percent = self.activation_percentile
        if not isinstance(percent, int | float) or not 50 <= percent <= 100:
            raise SchemeError(f"The activation percentile is {percent!r}.", "Use 50 to 100; 100 is the largest.")

    def to_json(self) -> str:
        """JSON text that `from_json` reads back."""
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        data |= {"scheme": self.scheme.to_json(), "scale_rules": asdict(self.scale_rules), "version": RECIPE_VERSION}
        return json.dumps(data, indent=2, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """Reads `to_json` back.

        Raises:
            SchemeError: the text is no recipe, or one of another version.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise SchemeError(f"The recipe is no JSON: {error}.", "Give a fewbit_recipe.json.") from error
        if not isinstance(data, dict) or data.pop("version", None) != RECIPE_VERSION:
            raise SchemeError(f"The recipe is not of version {RECIPE_VERSION}.", "Write it again with this fewbit.")
        known = {f.name for f in fields(cls)}
        for name in data:
            if name not in known:
                raise SchemeError(f"The recipe has an unknown field {name!r}.", closest(name, known))
        if "scheme" not in data:
            raise SchemeError("The recipe has no scheme.", "Add one.")
        try:
            data["scale_rules"] = ScaleRules(**data.get("scale_rules", {}))
        except TypeError as error:
            raise SchemeError(f"The recipe's scale_rules are wrong: {error}.", "Use `integer` and `mx`.") from error
        transforms = data.get("transforms", [])
        if not isinstance(transforms, list) or not all(isinstance(one, dict) and "name" in one for one in transforms):
            raise SchemeError("The recipe's transforms are wrong.", "Use a list of objects with `name` and `settings`.")
        return cls(**data | {"scheme": Scheme.from_json(data["scheme"]), "transforms": tuple(transforms)})
