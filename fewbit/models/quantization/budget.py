"""Bit budgets: a key for each layer, so that the predicted loss is least and the bits, or the bytes, suffice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig

from fewbit.algorithms.bit_budget import Choice, Frontier
from fewbit.checkpoints.interface import CheckpointFormat
from fewbit.errors import OutputError, SchemeError, ShapeError
from fewbit.models.families import joined_members
from fewbit.models.load import Progress
from fewbit.models.names import build_on_meta, config_dtype, read_config
from fewbit.models.quantization.plan import Plan, PlannedLayer, leaves_short_group, make_plan, written_format
from fewbit.models.quantization.ranks import ALONE, Ranks
from fewbit.models.quantization.sensitivity import Sensitivity, measure_sensitivity
from fewbit.spec.element import Element
from fewbit.spec.key import LinearKey, QuantKey
from fewbit.spec.presets import BUDGET_KEYS, KV_CACHES
from fewbit.spec.recipe import Recipe
from fewbit.spec.scheme import Rule, Scheme

SENSITIVITY_WINDOWS = 16
"""Calibration windows that sensitivity is measured on, at most; gradients cost three times what a forward pass does."""

FRONTIER_POINTS = 17
FRONTIER_SPAN = 2.0
"""How far beyond the budget the frontier is reported."""
PLAIN_REASON = "left plain by the bit budget"


@dataclass(frozen=True)
class Budget:
    """What must not be exceeded.

    Attributes:
        bits_per_weight: over the weights that may be quantized, scales and zero points counted; None for `fit`.
        fit: bytes that all weights and the KV cache of one sequence must fit into; None for `bits_per_weight`.
        context: tokens of that sequence.
        candidates: what is chosen from, besides leaving a layer as it is.
    """

    bits_per_weight: float | None = None
    fit: int | None = None
    context: int = 0
    candidates: tuple[LinearKey, ...] = BUDGET_KEYS

    def __post_init__(self) -> None:
        if (self.bits_per_weight is None) == (self.fit is None):
            raise SchemeError("A budget is either bits per weight or a size to fit into.", "Give one of them.")
        if self.bits_per_weight is not None and not 0 < self.bits_per_weight <= 32:
            raise SchemeError(f"{self.bits_per_weight} bits per weight are no budget.", "Give more than 0, say 4.25.")
        if self.fit is not None and self.context < 1:
            raise SchemeError("How many tokens the KV cache must hold is not said.", "Give --context, say 32768.")

    @property
    def name(self) -> str:
        """What the scheme that is chosen is called."""
        return f"mixed-{self.bits_per_weight:g}-bit" if self.fit is None else f"mixed-fit-{self.fit}"

    def __str__(self) -> str:
        if self.fit is None:
            return f"At most {self.bits_per_weight:g} bits per weight that may be quantized."
        return f"Weights and the KV cache of {self.context:,} tokens within {self.fit:,} bytes."


@dataclass(frozen=True)
class LayerChoices:
    """What may be chosen for each group of layers that must be alike, and what is known of it.

    Attributes:
        plan: every layer that may be quantized has a key in it.
        groups: names of layers.
        keys: of each group; None leaves it as it is.
        choices: of each group, in the order of `keys`.
        weights: how many weights all groups have.
    """

    plan: Plan
    groups: list[list[str]]
    keys: list[list[LinearKey | None]]
    choices: list[list[Choice]]
    weights: int

    @property
    def other_bits(self) -> int:
        """Bits of all tensors of no group."""
        return 8 * self.plan.bytes_before - self.weights * Element.parse(self.plan.dtype).bits

    def scheme(self, name: str, picked: Sequence[int], ignore: tuple[str, ...]) -> Scheme:
        """The scheme that gives every group the key picked for it."""
        by_key: dict[LinearKey | None, list[str]] = {}
        for names, keys, index in zip(self.groups, self.keys, picked, strict=True):
            by_key.setdefault(keys[index], []).extend(names)
        # Layers of no group, a head for one, stay as they are.
        inside = {layer for names in self.groups for layer in names}
        by_key.setdefault(None, []).extend(one.name for one in self.plan.quantized if one.name not in inside)
        rules = tuple(Rule(tuple(names), key) for key, names in by_key.items() if names)
        return Scheme(name, rules, ignore, self.plan.recipe.scheme.kv_cache)

    def shares(self, picked: Sequence[int]) -> dict[str, float]:
        """Key -> share of the weights that it is picked for."""
        sizes = {layer.name: prod(layer.shape) for layer in self.plan.quantized}
        found: dict[str, float] = {}
        for names, keys, index in zip(self.groups, self.keys, picked, strict=True):
            key = str(keys[index] or "plain")
            found[key] = found.get(key, 0.0) + sum(sizes[name] for name in names) / self.weights
        return dict(sorted(found.items(), key=lambda entry: -entry[1]))


def plan_within(
    source: Path,
    recipe: Recipe,
    budget: Budget,
    windows: Tensor,
    *,
    short_last_group: bool = False,
    device: str = "cpu",
    progress: Progress | None = None,
    ranks: Ranks = ALONE,
) -> Plan:
    """The plan whose predicted loss is least within a budget.

    Args:
        source: folder of the unquantized model.
        recipe: algorithm, format and exclusions; its scheme's keys do not matter.
        budget: see `Budget`.
        windows: int64 [count, length] of calibration text.
        short_last_group: see `make_plan`.
        device: where sensitivity is measured.
        progress: called with the share of the work that each block is.
        ranks: the processes that measure it together; all of them make this call with the same windows.

    Raises:
        SchemeError: the budget cannot be met.
        OutputError: the format holds one key for the whole model.
        FewbitError: see `make_plan`.
    """
    keys = held_together(written_format(recipe.format), budget.candidates)
    if len(keys) < 2:
        raise OutputError(
            f"{recipe.format} holds one key for the whole model, and a bit budget gives layers different ones.",
            "Write compressed-tensors.",
        )
    base = base_plan(source, recipe, keys, short_last_group)
    wanted = {one.name: fitting(one, keys, base, short_last_group) for one in base.quantized if one.block}
    caches = _cache_choices(source, base, budget)
    _require_reachable(budget, layer_choices(source, base, _nothing_known(wanted)), caches)
    sensitivity = measure_sensitivity(
        source,
        base.recipe,
        base.quantized,
        wanted,
        windows[:SENSITIVITY_WINDOWS],
        cache_keys=[key for key in caches if key is not None],
        device=device,
        on_block=_share(base, progress),
        ranks=ranks,
    )
    choices = layer_choices(source, base, sensitivity)
    cache_choices = [Choice(bits, sensitivity.cache.get(key, 0.0)) for key, bits in caches.items()]  # type: ignore[arg-type]
    frontier = Frontier([*choices.choices, cache_choices])
    picked = frontier.within(_allowed(budget, choices))
    assert picked is not None  # it was seen to be in reach
    *picked, cache = picked
    scheme = replace(choices.scheme(budget.name, picked, recipe.scheme.ignore), kv_cache=list(caches)[cache])
    made = make_plan(source, replace(recipe, scheme=scheme), short_last_group)
    return replace(with_reasons(made), budget=_record(budget, frontier, choices, picked))


def promotion_choices(
    source: Path,
    plan: Plan,
    windows: Tensor,
    *,
    short_last_group: bool = False,
    device: str = "cpu",
    progress: Progress | None = None,
    ranks: Ranks = ALONE,
) -> LayerChoices:
    """What each layer of a plan may become so that less is lost: its own key, wider ones, or as it was.

    Args:
        source: folder of the unquantized model.
        plan: whose layers are to be promoted.
        windows, short_last_group, device, progress, ranks: see `plan_within`.
    """
    keys = held_together(written_format(plan.recipe.format), [*plan.recipe.scheme.keys, *BUDGET_KEYS])
    wanted = {}
    for layer in plan.quantized:
        if layer.block and layer.key is not None:
            wider = (
                key
                for key in fitting(layer, keys, plan, short_last_group)
                if _bits(layer, key) > _bits(layer, layer.key)
            )
            wanted[layer.name] = tuple(dict.fromkeys([layer.key, *wider]))
    sensitivity = measure_sensitivity(
        source,
        plan.recipe,
        plan.quantized,
        wanted,
        windows[:SENSITIVITY_WINDOWS],
        device=device,
        on_block=_share(plan, progress),
        ranks=ranks,
    )
    return layer_choices(source, plan, sensitivity)


def promoted(source: Path, choices: LayerChoices, picked: Sequence[int], name: str, short_last_group: bool) -> Plan:
    """The plan in which every group has the key picked for it, under a scheme of that name."""
    recipe = choices.plan.recipe
    scheme = choices.scheme(name, picked, recipe.scheme.ignore)
    return with_reasons(make_plan(source, replace(recipe, scheme=scheme), short_last_group))


def held_together(checkpoint: CheckpointFormat, candidates: Sequence[LinearKey]) -> tuple[LinearKey, ...]:
    """The candidates that one checkpoint of the format can hold side by side; the first ones decide."""
    kept: dict[str, LinearKey] = {}
    for key in candidates:
        # A shape that every group and block divides: whether a real one fits is asked of each layer.
        if checkpoint.refuse(key, (4096, 4096)) is not None:
            continue
        together = {**kept, f"layer.{len(kept)}": key}
        try:
            checkpoint.config(together, ())
        except OutputError:
            continue
        kept = together
    return tuple(kept.values())


def base_plan(source: Path, recipe: Recipe, keys: Sequence[LinearKey], short_last_group: bool) -> Plan:
    """A plan that quantizes every layer that may be, by the first key that fits all of them."""
    for key in keys:
        scheme = replace(recipe.scheme, rules=(Rule(("Linear",), key),))
        try:
            return make_plan(source, replace(recipe, scheme=scheme), short_last_group)
        except ShapeError as error:
            reason = error
    raise reason


def fitting(
    layer: PlannedLayer, keys: Sequence[LinearKey], plan: Plan, short_last_group: bool
) -> tuple[LinearKey, ...]:
    """The keys that the layer may have, their 16-bit scales in the model's dtype."""
    checkpoint, element = written_format(plan.recipe.format), Element.parse(plan.dtype)
    found = []
    for key in Scheme("", tuple(Rule((), key) for key in keys)).with_scale_element(element).keys:
        own = replace(layer, key=key)
        short = leaves_short_group(own)
        if (short and not short_last_group) or checkpoint.refuse(key, (layer.shape[0], layer.shape[1])):
            continue
        found.append(key)
    return tuple(found)


def layer_choices(source: Path, plan: Plan, sensitivity: Sensitivity) -> LayerChoices:
    """The choices of each group of layers: the members of a joined matrix, and all experts of a block, are alike."""
    config = read_config(source)
    joined = joined_members(build_on_meta(config, config_dtype(config)))
    together: dict[str, list[PlannedLayer]] = {}
    for layer in plan.quantized:
        if not layer.block:
            continue
        experts = ".experts." in layer.name
        name = f"{layer.block}.experts" if experts else "+".join(joined.get(layer.name, (layer.name,)))
        together.setdefault(name, []).append(layer)
    plain_bits = Element.parse(plan.dtype).bits
    groups, keys, choices = [], [], []
    for members in together.values():
        common = [key for key in sensitivity.layers[members[0].name]
                  if all(key in sensitivity.layers[one.name] for one in members)]  # fmt: skip
        groups.append([one.name for one in members])
        keys.append([*common, None])
        costs = [
            Choice(sum(_bits(one, key) for one in members), sum(sensitivity.layers[one.name][key] for one in members))
            for key in common
        ]
        choices.append([*costs, Choice(plain_bits * sum(prod(one.shape) for one in members), 0.0)])
    weights = sum(prod(one.shape) for members in together.values() for one in members)
    return LayerChoices(plan, groups, keys, choices, weights)


def cache_numbers(config: PretrainedConfig) -> int:
    """Numbers that one token adds to the KV cache, every layer keeping all of them."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(2 * text.num_hidden_layers * heads * size)


def _cache_choices(source: Path, base: Plan, budget: Budget) -> dict[QuantKey | None, int]:
    """What the KV cache may be, and the bits it then has. Only a budget of bytes chooses, where the user did not."""
    asked = base.recipe.scheme.kv_cache
    if budget.fit is None:
        return {asked: 0}
    numbers = cache_numbers(read_config(source)) * budget.context
    found: dict[QuantKey | None, int] = {None: numbers * Element.parse(base.dtype).bits}
    if asked is not None:
        return {asked: numbers * asked.element.bits}
    narrow = KV_CACHES["FP8"]
    try:
        written_format(base.recipe.format).with_kv_cache({}, narrow)
    except OutputError:
        return found
    return {**found, narrow: numbers * narrow.element.bits}


def _share(plan: Plan, progress: Progress | None) -> Callable[[], None]:
    """Tells `progress` that one more block is done."""
    blocks = {layer.block for layer in plan.quantized if layer.block}
    return lambda: progress(1 / len(blocks)) if progress else None


def _nothing_known(wanted: Mapping[str, Sequence[LinearKey]]) -> Sensitivity:
    return Sensitivity({name: dict.fromkeys(keys, 0.0) for name, keys in wanted.items()})


def _bits(layer: PlannedLayer, key: LinearKey) -> int:
    return int(key.weight.bits_per_weight(layer.shape) * prod(layer.shape))


def _allowed(budget: Budget, choices: LayerChoices) -> int:
    """Bits that the layers of all groups, and for `fit` the KV cache, may take."""
    if budget.fit is None:
        assert budget.bits_per_weight is not None
        return int(budget.bits_per_weight * choices.weights)
    return 8 * budget.fit - choices.other_bits


def _require_reachable(budget: Budget, choices: LayerChoices, caches: Mapping[QuantKey | None, int]) -> None:
    """Refuses, before anything is measured, what no choice can meet and what needs none."""
    allowed = _allowed(budget, choices)
    least = sum(min(one.bits for one in group) for group in choices.choices) + min(caches.values())
    most = sum(group[-1].bits for group in choices.choices) + max(caches.values())
    if most <= allowed:
        raise SchemeError("The model fits as it is, with nothing quantized.", "Allow less, or use the model itself.")
    if least <= allowed:
        return
    if budget.fit is None:
        raise SchemeError(
            f"{budget.bits_per_weight:g} bits per weight cannot be reached: the narrowest candidates need "
            f"{least / choices.weights:.3f}.",
            "Allow more, or add narrower candidates.",
        )
    raise SchemeError(
        f"{budget.fit:,} bytes cannot hold this model and {budget.context:,} tokens of KV cache: the narrowest choices "
        f"need {(choices.other_bits + least) // 8:,}.",
        "Allow more bytes, or a shorter context.",
    )


def with_reasons(plan: Plan) -> Plan:
    """The plan with what the budget left plain told from what the user excluded."""
    named = {name for rule in plan.recipe.scheme.rules if rule.key is None for name in rule.targets}
    layers = (replace(one, reason=PLAIN_REASON) if one.key is None and one.name in named else one
              for one in plan.layers)  # fmt: skip
    return replace(plan, layers=tuple(layers))


def _record(budget: Budget, frontier: Frontier, choices: LayerChoices, picked: Sequence[int]) -> Mapping[str, Any]:
    """What the report keeps."""
    chosen = list(zip(choices.choices, picked, strict=True))
    spent = sum(group[index].bits for group, index in chosen)
    return {
        "asked": str(budget),
        "bits_per_weight": spent / choices.weights,
        "predicted_kl": sum(group[index].loss for group, index in chosen),
        "keys": choices.shares(picked),
        "frontier": [
            {"bits_per_weight": bits / choices.weights, "predicted_kl": loss}
            for bits, loss in frontier.points(FRONTIER_POINTS, int(FRONTIER_SPAN * spent))
        ],
    }
