"""Quantizing a model folder: from what a user asks to a recipe, a plan, calibration and the loop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from fewbit.algorithms.effort import means_for
from fewbit.algorithms.registry import algorithm
from fewbit.checkpoints.output import parse_size
from fewbit.checkpoints.work_folder import WorkFolder
from fewbit.errors import ModelError, SchemeError
from fewbit.models.load import Progress
from fewbit.models.quantization.block_loop import plan_needs_calibration
from fewbit.models.quantization.block_stream import MOST_HELD
from fewbit.models.quantization.budget import Budget, plan_within
from fewbit.models.quantization.calibration import Calibration, calibration_windows, load_tokenizer
from fewbit.models.quantization.pipeline import (
    CALIBRATION_LENGTH,
    CALIBRATION_WINDOWS,
    DEFAULT_SHARD_BYTES,
    check_shared,
    quantize_checkpoint,
)
from fewbit.models.quantization.plan import EMBEDDING, Plan, make_plan
from fewbit.models.quantization.ranks import ALONE, Ranks
from fewbit.models.quantization.self_samples import samples_unasked, self_samples
from fewbit.models.quantization.texts import read_text
from fewbit.models.quantization.transforms.possible import allowed
from fewbit.models.quantization.transforms.registry import parse_transform
from fewbit.numerics.activations import needs_calibration
from fewbit.numerics.codebooks import codebook_of
from fewbit.spec.granularity import CHANNEL, group
from fewbit.spec.key import LinearKey
from fewbit.spec.presets import BUDGET_KEYS, kv_cache_preset, preset
from fewbit.spec.recipe import Recipe, ScaleRules
from fewbit.spec.scheme import Rule


@dataclass(frozen=True)
class QuantizeOptions:
    """What a user asks of `fewbit quantize`.

    Attributes:
        scheme: name of a preset.
        group_size: numbers of a row under one scale; -1 for one scale per channel, None for the preset's own.
        ignore: patterns of layers that stay as they are, besides `lm_head`.
        format: checkpoint format to write.
        effort: `fast`, `balanced` or `best`: which algorithm chooses the codes and what is transformed before, where
            none is named.
        algorithm: what chooses the codes, by name.
        settings: the algorithm's own, by name.
        transforms: equivalent transformations before the codes are chosen, in order: `awq`, `smoothquant`, `rotation`,
            each `name` or `name:setting=value,setting=value`.
        activation_percentile: per cent of an input's magnitudes that its static scale reaches; 100 is the largest one.
        short_last_group: whether a group size that does not divide K may leave a shorter last group.
        scale_rules: see `ScaleRules`.
        calibration_text: file of text for calibration, or `hub:NAME`, see `read_text`; None for the built-in prose.
        self_samples: how many of the windows the model itself writes; None for some where no text is given.
        calibration_windows, calibration_length: how many windows of how many tokens are read from it.
        embeddings: name of a preset for the input embedding, whose activations do not count; None to leave it plain.
        kv_cache: name of a key for the KV cache, `fp8` or `fp8_head`; None where it stays as it is.
        bits_per_weight, fit, context, candidates: a bit budget, which chooses each layer's key instead of `scheme`;
            `fit` is a size such as `24GB`, `candidates` are keys in their text form. See `Budget`.
    """

    scheme: str = "W4A16"
    group_size: int | None = None
    ignore: tuple[str, ...] = ()
    format: str = "compressed-tensors"
    effort: str = "balanced"
    algorithm: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    short_last_group: bool = False
    scale_rules: ScaleRules = ScaleRules()
    calibration_text: str | None = None
    calibration_windows: int = CALIBRATION_WINDOWS
    calibration_length: int = CALIBRATION_LENGTH
    self_samples: int | None = None
    embeddings: str | None = None
    kv_cache: str | None = None
    transforms: tuple[str, ...] = ()
    activation_percentile: float = 100.0
    bits_per_weight: float | None = None
    fit: str | None = None
    context: int = 0
    candidates: tuple[str, ...] = ()

    def recipe(self) -> Recipe:
        """The recipe that these options describe.

        Raises:
            SchemeError: the scheme, the effort, the algorithm, a transformation or a setting is unknown, or the scheme
                does not take a group size.
        """
        scheme = preset(self.scheme).ignoring(self.ignore)
        if self.kv_cache is not None:
            scheme = replace(scheme, kv_cache=kv_cache_preset(self.kv_cache))
        if self.group_size is not None:
            if self.group_size == 0 or self.group_size < -1:
                raise SchemeError(f"Group size {self.group_size} does not exist.", "Use a positive size, or -1.")
            scheme = scheme.with_granularity(CHANNEL if self.group_size == -1 else group(self.group_size))
        if self.embeddings is not None:
            table = LinearKey(preset(self.embeddings).keys[0].weight)
            scheme = replace(scheme, rules=(*scheme.rules, Rule((EMBEDDING,), table)))
        tables = any(codebook_of(key.weight) for key in scheme.keys)  # for which there is one algorithm
        means = means_for("fast" if tables else self.effort, scheme)
        own = {} if self.algorithm else means.settings
        chosen = algorithm(self.algorithm or means.algorithm, {**own, **self.settings})
        named = self.transforms or (() if self.algorithm else means.transforms)
        transforms = tuple(parse_transform(text).record for text in named)
        return Recipe(
            scheme,
            self.format,
            chosen.name,
            chosen.settings_by_name,
            self.scale_rules,
            transforms=transforms,
            activation_percentile=self.activation_percentile,
        )

    def budget(self) -> Budget | None:
        """The bit budget that these options describe, if they do.

        Raises:
            SchemeError: it contradicts itself or another option, or a candidate is no key.
            OutputError: `fit` is no size.
        """
        if self.bits_per_weight is None and self.fit is None:
            return None
        if self.group_size is not None:
            raise SchemeError("A bit budget chooses groups itself.", "Leave the group size out, or name candidates.")
        chosen = tuple(_candidate(text) for text in self.candidates) or BUDGET_KEYS
        fit = None if self.fit is None else parse_size(self.fit)
        return Budget(self.bits_per_weight, fit, self.context, chosen)

    def plan(self, source: str | Path) -> Plan:
        """The plan for a model folder; see `make_plan` for the errors."""
        plan = make_plan(source, self.recipe(), self.short_last_group)
        recipe, cautions = self.allowed(source, plan.recipe)
        if not cautions:
            return plan
        plan = make_plan(source, recipe, self.short_last_group)
        return replace(plan, cautions=(*plan.cautions, *cautions))

    def allowed(self, source: str | Path, recipe: Recipe) -> tuple[Recipe, tuple[str, ...]]:
        """The recipe without what the effort asks for where models allow it and this one does not; see `possible`."""
        optional = () if self.algorithm or self.transforms else means_for(self.effort, recipe.scheme).optional
        return allowed(Path(source), recipe, optional)


def _candidate(text: str) -> LinearKey:
    try:
        return LinearKey.parse(text)
    except SchemeError as error:
        raise SchemeError(
            f"Cannot read the candidate {text!r}: {error.message}", "Write int4:group64:bf16, say."
        ) from error


def calibration_for(source: str | Path, plan: Plan, asked: QuantizeOptions, device: str = "cpu") -> Calibration | None:
    """Token windows for a plan that needs them, None for one that does not.

    Raises:
        ModelError: the text or the tokenizer cannot be read, or the text is too short for one window.
    """
    if not plan_needs_calibration(plan):
        return None
    try:
        return read_calibration(source, asked, device)
    except ModelError as error:
        if not any(needs_calibration(layer.key.activation) for layer in plan.quantized if layer.key):
            error.add_hint("Or ask for --effort fast, which reads no data.")
        raise


def read_calibration(source: str | Path, asked: QuantizeOptions, device: str = "cpu") -> Calibration:
    """The token windows that `asked` describes; samples of the model are drawn on `device`.

    Raises:
        ModelError: see `calibration_for`.
    """
    tokenizer = load_tokenizer(source)
    length, count = asked.calibration_length, asked.calibration_windows
    unasked = samples_unasked(source, tokenizer, count) if asked.calibration_text is None else 0
    sampled = unasked if asked.self_samples is None else min(asked.self_samples, count)
    windows, names = [], []
    if sampled < count:
        text, name = read_text(asked.calibration_text, tokenizer)
        windows.append(calibration_windows(tokenizer, text, length, count - sampled))
        names.append(name)
    if sampled:
        windows.append(self_samples(source, tokenizer, length, sampled, device))
        names.append(f"{sampled} windows of the model's own")
    return Calibration(torch.cat(windows), " and ".join(names))


def prepare(
    source: str | Path,
    asked: QuantizeOptions,
    device: str = "cpu",
    progress: Progress | None = None,
    ranks: Ranks = ALONE,
) -> tuple[Plan, Calibration | None]:
    """The plan, and token windows where it needs them; a bit budget measures the model's sensitivity for it.

    Args:
        source: folder of an unquantized model.
        asked: see `QuantizeOptions`.
        device: where sensitivity is measured.
        progress: called with the share of that work which each block is.
        ranks: the processes that do this together; all of them get the same windows.

    Raises:
        FewbitError: anything that a user can mend; see `make_plan`, `plan_within` and `calibration_for`.
    """
    budget = asked.budget()
    if budget is None:
        plan = asked.plan(source)
        # Samples of the model may end differently on each.
        return plan, ranks.first(calibration_for(source, plan, asked, device))
    calibration = ranks.first(read_calibration(source, asked, device))
    recipe, cautions = asked.allowed(source, asked.recipe())
    plan = plan_within(
        Path(source),
        recipe,
        budget,
        calibration.windows,
        short_last_group=asked.short_last_group,
        device=device,
        progress=progress,
        ranks=ranks,
    )
    return replace(plan, cautions=(*plan.cautions, *cautions)), calibration


def quantize(
    model: str | Path,
    output: str | Path,
    scheme: str = "W4A16",
    *,
    group_size: int | None = None,
    ignore: Iterable[str] = (),
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Progress | None = None,
    device: str = "cpu",
    restart: bool = False,
    keep_statistics: str | Path | None = None,
    calibration_memory: int = MOST_HELD,
    ranks: Ranks = ALONE,
    **options: Any,
) -> dict[str, Any]:
    """Quantizes a model folder into a new folder that stock transformers and vLLM load.

    Args:
        model: folder of an unquantized checkpoint.
        output: folder to write; must not exist; see `quantize_checkpoint`.
        scheme: name of a preset, say `W4A16` or `FP8_DYNAMIC`.
        group_size: numbers of a row under one scale; -1 for one scale per channel.
        ignore: patterns of layers that stay as they are, besides `lm_head`.
        max_shard_bytes: largest size of a weight file.
        progress: called with the bytes of each source tensor dealt with.
        device: where blocks run and codes are chosen.
        restart: whether what an earlier run, stopped, has finished is thrown away.
        keep_statistics, calibration_memory, ranks: see `quantize_checkpoint`.
        **options: the other fields of `QuantizeOptions`.

    Returns:
        The report that is also written to `quantization_report.json`.

    Raises:
        FewbitError: anything that a user can mend; see `fewbit.errors`.
    """
    asked = replace(QuantizeOptions(scheme, group_size, tuple(ignore)), **options)
    WorkFolder(output).require_unwritten()
    check_shared(keep_statistics, ranks)
    plan, calibration = prepare(model, asked, device, ranks=ranks)
    return quantize_checkpoint(
        model,
        output,
        plan,
        calibration=calibration,
        max_shard_bytes=max_shard_bytes,
        progress=progress,
        device=device,
        restart=restart,
        keep_statistics=keep_statistics,
        calibration_memory=calibration_memory,
        ranks=ranks,
    )
