"""Quantizing a checkpoint from a plan: the loop over its blocks, then the export; stopped, it goes on."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fewbit.algorithms.registry import algorithm
from fewbit.checkpoints.tensor_files import TensorFolder
from fewbit.checkpoints.work_folder import WorkFolder, work_folder
from fewbit.errors import ModelError, SchemeError
from fewbit.models.load import Progress
from fewbit.models.names import read_config
from fewbit.models.quantization.block_loop import Run, plan_needs_calibration
from fewbit.models.quantization.block_stream import MOST_HELD
from fewbit.models.quantization.calibration import Calibration
from fewbit.models.quantization.export import report_of, write_config, write_output
from fewbit.models.quantization.fingerprint import fingerprint_of
from fewbit.models.quantization.plan import Plan
from fewbit.models.quantization.ranks import ALONE, Ranks
from fewbit.models.quantization.statistics import StatisticsStore
from fewbit.models.quantization.transforms.registry import of_recipe
from fewbit.models.quantization.transforms.transformed import Transformations
from fewbit.models.report.facts import RECIPE_FILE, REPORT_FILE
from fewbit.models.report.files import write_report
from fewbit.numerics.activations import needs_calibration

DEFAULT_SHARD_BYTES = 5 * 10**9
CALIBRATION_WINDOWS = 32
CALIBRATION_LENGTH = 512


def quantize_checkpoint(
    source: str | Path,
    output: str | Path,
    plan: Plan,
    *,
    calibration: Calibration | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Progress | None = None,
    device: str = "cpu",
    restart: bool = False,
    keep_statistics: str | Path | None = None,
    calibration_memory: int = MOST_HELD,
    ranks: Ranks = ALONE,
) -> dict[str, Any]:
    """Quantizes the checkpoint in `source` into a new folder `output`.

    Args:
        source: folder of the unquantized checkpoint that `plan` was made for.
        output: must not exist; it appears complete or not at all. What is finished of it is kept in `OUTPUT.partial`,
            and a run that was stopped goes on from there when it is called again with the same arguments.
        plan: from `make_plan`.
        calibration: token windows, needed where `plan_needs_calibration` says so.
        max_shard_bytes: largest size of a weight file.
        progress: called with the bytes of each source tensor dealt with.
        device: where blocks run and codes are chosen.
        restart: whether what an earlier run has finished is thrown away.
        keep_statistics: folder for the statistics of the unquantized model's layers, gathered unless they are there;
            layers are then quantized by these, and no hidden states are carried through quantized layers.
        calibration_memory: bytes of activations that may be held between the layers of a block; beyond, they are
            computed again, with the same result.
        ranks: the processes that do this together, from `ranks.joined`; all make this call.

    Returns:
        The report, which is also written to the folder (see `write_report`), and the seconds that this call took;
        nothing in processes that do not write.

    Raises:
        SchemeError: the algorithm cannot do with kept statistics, or with several processes.
        ModelError: calibration is needed and missing, or the model cannot be run block by block.
        CheckpointError: a weight holds NaN or infinity.
        OutputError: the output exists or cannot be written, or what an earlier run has finished of it was made from
            something else.
    """
    if plan_needs_calibration(plan) and calibration is None:
        raise ModelError(f"{plan.recipe.scheme.name} needs calibration data.", "Give windows of tokens.")
    check_shared(keep_statistics, ranks)
    started, source = time.monotonic(), Path(source)
    earlier = ranks.first(_published(output) if ranks.writes else None)
    if earlier is not None:
        return earlier | {"seconds": 0.0}
    made_for = (source, plan, calibration, progress or (lambda _: None), torch.device(device))
    if not ranks.writes:
        ranks.first(None)  # the work folder has been begun
        Run(*made_for, most_held=calibration_memory, ranks=ranks).quantize(WorkFolder(output))
        return {}
    with work_folder(output, restart) as work:
        store = _statistics(source, plan, calibration, device, keep_statistics)
        run = Run(*made_for, store=store, most_held=calibration_memory, ranks=ranks)
        report = _finish(run, work, source, max_shard_bytes)
    return report | {"seconds": round(time.monotonic() - started, 3)}


def _finish(run: Run, work: WorkFolder, source: Path, max_shard_bytes: int) -> dict[str, Any]:
    """Finishes all units and writes the folder that people get; the report."""
    recipe, plan = run.recipe(), run.plan
    fingerprint = {"recipe": json.loads(recipe.to_json()), "processes": run.ranks.count}
    fingerprint |= fingerprint_of(run.folder.source, run.device)
    work.begin(fingerprint, "Go on with what it was begun with, start afresh with --restart, or write elsewhere.")
    run.ranks.first(None)
    run.quantize(work)
    with work.staged() as staging:
        units = list(run.units.values())
        written, facts = write_output(plan, run.folder.source, units, work, staging, max_shard_bytes)
        write_config(source, staging, run.config(), plan.unties)
        (staging / RECIPE_FILE).write_text(recipe.to_json())
        report = report_of(plan, recipe, facts, run.kept(), written)
        write_report(staging, report)
    return report


def _published(output: str | Path) -> dict[str, Any] | None:
    """The report of an earlier run to which all that was left was to clear up; None where there was none."""
    work, report = WorkFolder(output), Path(output) / REPORT_FILE
    if not work.is_published() or not report.is_file():
        return None
    work.remove()
    found: dict[str, Any] = json.loads(report.read_text())
    return found


def check_shared(keep_statistics: str | Path | None, ranks: Ranks) -> None:
    """Refuses what several processes cannot do together.

    Raises:
        SchemeError: statistics are to be kept.
    """
    if ranks.count > 1 and keep_statistics is not None:
        raise SchemeError("Kept statistics are gathered by one process.", "Start it without torchrun.")


def _statistics(
    source: Path, plan: Plan, calibration: Calibration | None, device: str, folder: str | Path | None
) -> StatisticsStore | None:
    """The statistics to quantize by, complete; None where each layer is to see what the quantized ones put out."""
    if folder is None:
        return None
    if calibration is None or not plan_needs_calibration(plan):
        raise SchemeError(f"{plan.recipe.algorithm} reads no statistics here.", "Leave --keep-statistics out.")
    chosen = algorithm(plan.recipe.algorithm, plan.recipe.settings)
    if chosen.refines_blocks:
        raise SchemeError(
            f"{plan.recipe.algorithm} tunes blocks on what they put out, which kept statistics do not tell.",
            "Use another algorithm, gptq for one, or leave --keep-statistics out.",
        )
    cached, transforms = plan.recipe.scheme.kv_cache, of_recipe(plan.recipe.transforms)
    scaling = [one.name for one in transforms if one.scales_values]
    if scaling and cached is not None and needs_calibration(cached):
        raise SchemeError(
            f"Kept statistics hold what a KV cache would before {scaling[0]} scales the values.",
            "Leave --kv-cache, --transform or --keep-statistics out.",
        )
    store, weights = StatisticsStore(folder), None
    # What chooses by data divides inputs afterwards; what does not is in the weights that statistics are gathered with.
    before = tuple(one.record for one in transforms if not one.needs_statistics)
    if before:
        recipe = replace(plan.recipe, transforms=before)
        weights = Transformations(recipe, {}, TensorFolder(source), read_config(source), torch.device(device)).weights
    store.complete(source, calibration, device, weights, before)
    return store
