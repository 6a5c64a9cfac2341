"""A gate on quality: quantize, measure on held-out text, give the layers that cost most more bits, until it holds."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fewbit.algorithms.bit_budget import Frontier
from fewbit.checkpoints.output import require_free
from fewbit.errors import OutputError, SchemeError
from fewbit.evaluation.quality import score
from fewbit.models.load import Progress
from fewbit.models.quantization.budget import LayerChoices, promoted, promotion_choices
from fewbit.models.quantization.calibration import Calibration, load_tokenizer, token_windows
from fewbit.models.quantization.pipeline import quantize_checkpoint
from fewbit.models.quantization.plan import Plan
from fewbit.models.quantization.quantize import QuantizeOptions, prepare, read_calibration
from fewbit.models.quantization.ranks import ALONE, Ranks
from fewbit.models.quantization.texts import read_text
from fewbit.models.report.files import render_again

ROUNDS = 5
HELD_OUT_WINDOWS = 16
MARGIN = 0.9
"""Of the loss that a promotion may still leave: predictions rank layers better than they foretell a sum."""

Stage = Callable[[str, float], AbstractContextManager[Progress]]
"""(what goes on, the amount at its end) -> a context that is told of progress."""

_SILENT: Stage = lambda *_: nullcontext(lambda _: None)  # noqa: E731 - a constant of a callable type


def quantize_within(
    model: str | Path,
    output: str | Path,
    max_kl: float,
    asked: QuantizeOptions | None = None,
    *,
    device: str = "cpu",
    stage: Stage | None = None,
    **how: Any,
) -> dict[str, Any]:
    """Quantizes a model folder so that its mean KL divergence from the model on held-out text is at most `max_kl`.

    The held-out text is what follows the calibration windows in their text, or the built-in prose where nothing does.
    Both models are in memory as a whole, in float32, while they are compared.

    Args:
        model: folder of an unquantized checkpoint.
        output: folder to write; must not exist. It appears only when the gate holds.
        max_kl: nats.
        asked: what to begin with. A bit budget is never exceeded: it is measured, and that is all.
        device: where everything runs.
        stage: see `Stage`.
        **how: the other arguments of `quantize_checkpoint`.

    Returns:
        The report that is also written to `quantization_report.json`.

    Raises:
        SchemeError: the divergence stayed above `max_kl`; the message says how far it got.
        FewbitError: see `quantize`.
    """
    asked = asked or QuantizeOptions()
    if not max_kl > 0:
        raise SchemeError(f"A mean KL divergence of {max_kl:g} cannot be asked for.", "Give more than 0, say 0.02.")
    require_free(Path(output).absolute())
    gate = _Gate(Path(model), Path(output).absolute(), max_kl, asked, device, stage or _SILENT, how)
    return gate.run()


@dataclass
class _Gate:
    """The state of one run; the fields are the arguments of `quantize_within`."""

    model: Path
    output: Path
    max_kl: float
    asked: QuantizeOptions
    device: str
    stage: Stage
    how: dict[str, Any]

    @property
    def ranks(self) -> Ranks:
        """The processes that do this together."""
        found: Ranks = self.how.get("ranks", ALONE)
        return found

    def run(self) -> dict[str, Any]:
        """The report, with the seconds that all rounds took; nothing in processes that do not write."""
        started = time.monotonic()
        with self.stage("Planning", 1) as advance:
            plan, calibration = prepare(self.model, self.asked, self.device, advance, self.ranks)
        windows, text = self._held_out()
        rounds: list[dict[str, float]] = []
        choices: LayerChoices | None = None
        picked: list[int] = []
        for number in range(1, ROUNDS + 1):
            trial = self.output.parent / f".{self.output.name}.round-{number}"
            self._remove(trial)  # of a run that was stopped
            try:
                quality = self._quantized(plan, calibration, trial, windows, text)
                rounds.append({"bits_per_weight": plan.bits_per_weight, "mean_kl": quality["mean_kl"]})
                if quality["mean_kl"] <= self.max_kl:
                    if not self.ranks.writes:
                        return {}
                    report = render_again(trial, quality=quality, gate={"max_kl": self.max_kl, "rounds": rounds})
                    self._publish(trial)
                    return report | {"seconds": round(time.monotonic() - started, 3)}
            finally:
                self._remove(trial)
            if plan.budget is not None or number == ROUNDS:
                break
            if choices is None:
                choices = self._choices(plan, calibration)
                picked = [0] * len(choices.groups)
            following = self._promote(choices, picked, quality["mean_kl"])
            if following is None:
                break
            picked = following
            name = f"{self.asked.scheme}-max-kl-{self.max_kl:g}"
            plan = promoted(self.model, choices, picked, name, self.asked.short_last_group)
        raise self._failed(rounds, plan)

    def _quantized(
        self, plan: Plan, calibration: Calibration | None, trial: Path, windows: Tensor, text: str
    ) -> dict[str, Any]:
        """Writes `trial` and measures it."""
        with self.stage(f"Quantizing to {plan.bits_per_weight:.3f} bits", plan.bytes_before) as advance:
            quantize_checkpoint(
                self.model, trial, plan, calibration=calibration, progress=advance, device=self.device, **self.how
            )
        quality = None
        if self.ranks.writes:
            with self.stage("Scoring", len(windows)) as advance:
                quality = score(trial, self.model, windows, text, device=self.device, on_window=lambda: advance(1))
        found = self.ranks.first(quality)
        assert found is not None
        return found

    def _remove(self, trial: Path) -> None:
        if self.ranks.writes:
            shutil.rmtree(trial, ignore_errors=True)

    def _choices(self, plan: Plan, calibration: Calibration | None) -> LayerChoices:
        seen = calibration or self.ranks.first(read_calibration(self.model, self.asked, self.device))
        with self.stage("Measuring sensitivity", 1) as advance:
            return promotion_choices(
                self.model,
                plan,
                seen.windows,
                short_last_group=self.asked.short_last_group,
                device=self.device,
                progress=advance,
                ranks=self.ranks,
            )

    def _promote(self, choices: LayerChoices, picked: list[int], mean_kl: float) -> list[int] | None:
        """The fewest bits that should hold, judged by what `picked` measured; None where there is no other choice."""
        frontier = Frontier(choices.choices)
        predicted = frontier.loss(picked)
        found = frontier.below(MARGIN * predicted * self.max_kl / mean_kl)
        everything_plain = found is not None and all(
            keys[index] is None for keys, index in zip(choices.keys, found, strict=True)
        )
        return None if found is None or found == picked or everything_plain else found

    def _held_out(self) -> tuple[Tensor, str]:
        """Windows that calibration does not read, and the name of their text."""
        tokenizer = load_tokenizer(self.model)
        length, skipped = self.asked.calibration_length, self.asked.calibration_windows
        for source in dict.fromkeys([self.asked.calibration_text, None]):
            text, name = read_text(source, tokenizer)
            windows = token_windows(tokenizer, text, length, skipped + HELD_OUT_WINDOWS)
            if source != self.asked.calibration_text:
                return windows[-HELD_OUT_WINDOWS:], name
            if len(windows) > skipped:
                return windows[skipped:], f"{name}, after its first {skipped} windows"
        raise SchemeError("No text is left to measure on.", "Calibrate on fewer windows, or on another text.")

    def _publish(self, trial: Path) -> None:
        require_free(self.output)
        try:
            trial.rename(self.output)
        except OSError as error:
            raise OutputError(
                f"{self.output} cannot be written: {error.strerror}.", "Choose another folder."
            ) from error

    def _failed(self, rounds: list[dict[str, float]], plan: Plan) -> SchemeError:
        best = min(rounds, key=lambda one: one["mean_kl"])
        why = "the budget allows no more bits" if plan.budget is not None else f"{len(rounds)} rounds were tried"
        return SchemeError(
            f"Mean KL is {best['mean_kl']:.4f} at {best['bits_per_weight']:.3f} bits per weight, needed at most "
            f"{self.max_kl:g}; {why}. Nothing was written.",
            "Begin with a wider scheme or a better algorithm, say --effort balanced, or allow more.",
        )
