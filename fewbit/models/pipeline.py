"""Quantizing a checkpoint from a plan: the loop over its blocks, then the export; stopped, it goes on."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

from fewbit.algorithms.registry import algorithm
from fewbit.checkpoints.work_folder import WorkFolder, work_folder
from fewbit.errors import ModelError, SchemeError
from fewbit.models.block_loop import Run, plan_needs_calibration
from fewbit.models.calibration import Calibration
from fewbit.models.export import report_of, write_config, write_output
from fewbit.models.fingerprint import fingerprint_of
from fewbit.models.load import Progress
from fewbit.models.plan import Plan
from fewbit.models.report_facts import RECIPE_FILE, REPORT_FILE
from fewbit.models.report_files import write_report
from fewbit.models.statistics import StatisticsStore

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

    Returns:
        The report, which is also written to the folder (see `write_report`), and the seconds that this call took.

    Raises:
        ModelError: calibration is needed and missing, or the model cannot be run block by block.
        CheckpointError: a weight holds NaN or infinity.
        OutputError: the output exists or cannot be written, or what an earlier run has finished of it was made from
            something else.
    """
    if plan_needs_calibration(plan) and calibration is None:
        raise ModelError(f"{plan.recipe.scheme.name} needs calibration data.", "Give windows of tokens.")
    started, source = time.monotonic(), Path(source)
    earlier, report_file = WorkFolder(output), Path(output) / REPORT_FILE
    if earlier.is_published() and report_file.is_file():  # all that was left to an earlier run was to clear up
        earlier.remove()
        return json.loads(report_file.read_text()) | {"seconds": 0.0}
    with work_folder(output, restart) as work:
        store = _statistics(source, plan, calibration, device, keep_statistics)
        run = Run(source, plan, calibration, progress or (lambda _: None), torch.device(device), store)
        recipe = run.recipe()
        fingerprint = {"recipe": json.loads(recipe.to_json())} | fingerprint_of(run.folder.source, run.device)
        work.begin(fingerprint, "Go on with what it was begun with, start afresh with --restart, or write elsewhere.")
        run.quantize(work)
        with work.staged() as staging:
            units = list(run.units.values())
            written, facts = write_output(run.folder.source, units, work, staging, max_shard_bytes)
            write_config(source, staging, run.config(), plan.unties)
            (staging / RECIPE_FILE).write_text(recipe.to_json())
            report = report_of(plan, recipe, facts, run.kept(), written)
            write_report(staging, report)
    return report | {"seconds": round(time.monotonic() - started, 3)}


def _statistics(
    source: Path, plan: Plan, calibration: Calibration | None, device: str, folder: str | Path | None
) -> StatisticsStore | None:
    """The statistics to quantize by, complete; None where each layer is to see what the quantized ones put out."""
    if folder is None:
        return None
    if calibration is None or not plan_needs_calibration(plan):
        raise SchemeError(f"{plan.recipe.algorithm} reads no statistics here.", "Leave --keep-statistics out.")
    if algorithm(plan.recipe.algorithm, plan.recipe.settings).refines_blocks:
        raise SchemeError(
            f"{plan.recipe.algorithm} tunes blocks on what they put out, which kept statistics do not tell.",
            "Use another algorithm, gptq for one, or leave --keep-statistics out.",
        )
    if plan.recipe.transforms:
        raise SchemeError(
            "Kept statistics are of untransformed weights.", "Leave out --transform or --keep-statistics."
        )
    store = StatisticsStore(folder)
    store.complete(source, calibration, device)
    return store
