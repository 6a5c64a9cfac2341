"""Verify: reopen a checkpoint and prove that it is whole, consistent and right."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from fewbit.errors import FewbitError
from fewbit.evaluation.divergence import divergence
from fewbit.evaluation.layer_error import DecodedLayer, decoded_layers, source_weight
from fewbit.models.load import load
from fewbit.models.quantization.calibration import load_tokenizer, token_windows
from fewbit.models.quantization.outcome import sqnr_db, weight_hash
from fewbit.models.quantization.recipe_file import recipe_of
from fewbit.models.quantization.texts import builtin_text
from fewbit.models.report.facts import REPORT_FILE
from fewbit.models.stored import StoredCheckpoint
from fewbit.numerics import decode

WINDOWS = 2
WINDOW_LENGTH = 128
POOR_SQNR_DB = 3.0
"""Below this a weight is more noise than rounding explains, whatever its bits; 2-bit weights reach about 6."""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at: what it is called, whether it holds, and what was seen."""

    name: str
    passed: bool
    detail: str


@dataclass
class Verification:
    """All checks of a checkpoint."""

    checks: list[Check] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def add(self, name: str, passed: bool, detail: str) -> None:
        """Notes one check."""
        self.checks.append(Check(name, passed, detail))


def verify(
    path: str | Path, against: str | Path | None = None, on_layer: Callable[[str], None] | None = None
) -> Verification:
    """Reopens a checkpoint and checks every file, tensor and byte, each decoded weight, and a forward pass.

    A fault of the checkpoint is a failed check, not an exception.

    Weights that were transformed before they were quantized (see `Recipe.transforms`) stand for other numbers than the
    source's, and the whole models are compared instead: each layer's distance from its transformed weight is what the
    report says, and that the layer is the one the report speaks of is checked by its hash.

    Args:
        path: the checkpoint's folder.
        against: folder of the unquantized model to compare weights and logits with.
        on_layer: called with each layer's name.
    """
    result = Verification()
    try:
        stored = StoredCheckpoint.open(path)
        result.add("files", True, f"{len(set(stored.folder.file_of.values()))} weight files, headers consistent")
        _check_layers(result, stored, against, on_layer)
        _check_bytes(result, stored)
        _check_model(result, Path(path), against)
    except FewbitError as error:
        result.add(type(error).__name__, False, str(error))
    return result


def _check_layers(
    result: Verification, stored: StoredCheckpoint, against: str | Path | None, on_layer: Callable[[str], None] | None
) -> None:
    recorded = {layer["name"]: layer for layer in _report(stored).get("layers", [])}
    recipe = recipe_of(stored.folder.path)
    changed = [one["name"] for one in recipe.transforms] if recipe is not None else []
    comparable = against and not stored.transforms and not changed
    originals = StoredCheckpoint.open(against).folder if against and comparable else None
    zero_scales = stored.format is not None and stored.format.zero_scales
    count, different, poor, unsound = 0, [], [], []
    for layer in decoded_layers(stored):
        count += 1
        if fault := _fault(layer, zero_scales):
            unsound.append(f"{layer.name}: {fault}")
        known = recorded.pop(layer.name, None)
        if known and known["sha256"] != weight_hash(layer.numbers):
            different.append(layer.name)
        elif known and changed and known["sqnr_db"] is not None and known["sqnr_db"] < POOR_SQNR_DB:
            poor.append(f"{layer.name} at {known['sqnr_db']:.1f} dB")
        if originals is not None:
            ratio = sqnr_db(source_weight(originals, layer), layer.numbers)
            if ratio is not None and ratio < POOR_SQNR_DB:
                poor.append(f"{layer.name} at {ratio:.1f} dB")
        if on_layer is not None:
            on_layer(layer.name)
    sound = f"{count} quantized layers finite" + ("" if zero_scales else ", no zero scale")
    result.add("scales and codes", not unsound, _outcome(unsound, sound))
    if _report(stored):
        different += [f"{name} (missing)" for name in recorded]
        result.add("decoded weights", not different, _outcome(different, "equal to what was in memory when written"))
    if against and stored.transforms:
        result.add("weights against source", True, f"not compared: weights are transformed ({stored.transforms[0]})")
    above = f"every layer above {POOR_SQNR_DB:g} dB"
    if originals is not None:
        result.add("weights against source", not poor, _outcome(poor, above))
    elif changed and against:
        fine = f"{above} of the source's after {', then '.join(changed)}, as noted when they were written"
        result.add("weights against transformed source", not poor, _outcome(poor, fine))


def _fault(layer: DecodedLayer, zero_scales: bool) -> str:
    if not bool(layer.numbers.isfinite().all()):
        return "decodes to NaN or infinity"
    if zero_scales:
        return ""
    scale = decode(layer.record["scale"], layer.record.key.scale.element)
    return "" if bool((scale != 0).all()) else "has a scale of zero"


def _check_bytes(result: Verification, stored: StoredCheckpoint) -> None:
    held = stored.folder.nbytes
    written = _report(stored).get("bytes_after", held)
    result.add(
        "bytes", held == written, f"{held:,} bytes of tensors" + ("" if held == written else f", not {written:,}")
    )


def _check_model(result: Verification, path: Path, against: str | Path | None) -> None:
    model = load(path, device="cpu", dtype=torch.float32)
    report = model.fewbit_report
    result.add("configuration", not report.contradictions, _outcome(report.contradictions, "agrees with the tensors"))
    carried = f", {len(report.carried)} carried along: {', '.join(report.carried[:3])}" if report.carried else ""
    result.add("tensors", True, f"every tensor has a place in the model{carried}")
    if report.kv_cache is not None:
        result.add("KV cache", True, _outcome(list(report.kv_cache.notes), str(report.kv_cache)))
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.arange(16)[None] % vocabulary
    with torch.no_grad():
        finite = bool(model(input_ids=ids).logits.isfinite().all())
    result.add("forward pass", finite, "finite logits" if finite else "NaN or infinity among the logits")
    if against is None:
        return
    windows = token_windows(load_tokenizer(against), builtin_text(), WINDOW_LENGTH, WINDOWS)
    found = divergence(model, load(against, device="cpu", dtype=torch.float32), windows)
    result.add(
        "logits against source",
        isfinite(found.mean_kl),
        f"KL {found.mean_kl:.4f}, top-1 agreement {found.top1_agreement:.1%}, cosine {found.logit_cosine:.5f}",
    )


def _report(stored: StoredCheckpoint) -> dict[str, Any]:
    file = stored.folder.path / REPORT_FILE
    try:
        return json.loads(file.read_text()) if file.is_file() else {}
    except json.JSONDecodeError:
        return {}


def _outcome(faults: list[str], fine: str) -> str:
    if not faults:
        return fine
    return "; ".join(faults[:3]) + (f" and {len(faults) - 3} more" if len(faults) > 3 else "")
