"""Descriptions only: frozen values, standard library, no torch."""

from fewbit.spec.element import ELEMENTS, Element, integer
from fewbit.spec.granularity import CHANNEL, HEAD, TENSOR, TOKEN, Granularity, block, group
from fewbit.spec.hardware import DEVICES, Hardware, device
from fewbit.spec.key import LinearKey, QuantKey, ScaleSpec
from fewbit.spec.layout import PLAIN, Extent, Layout, TensorSpec
from fewbit.spec.presets import PRESETS, preset
from fewbit.spec.recipe import Recipe, ScaleRules
from fewbit.spec.scheme import Rule, Scheme

__all__ = [
    "CHANNEL",
    "DEVICES",
    "ELEMENTS",
    "HEAD",
    "PLAIN",
    "PRESETS",
    "TENSOR",
    "TOKEN",
    "Element",
    "Extent",
    "Granularity",
    "Hardware",
    "Layout",
    "LinearKey",
    "QuantKey",
    "Recipe",
    "Rule",
    "ScaleRules",
    "ScaleSpec",
    "Scheme",
    "TensorSpec",
    "block",
    "device",
    "group",
    "integer",
    "preset",
]
