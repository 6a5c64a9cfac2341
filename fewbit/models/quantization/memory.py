"""How much memory quantizing with calibration takes, before it begins. All figures are upper bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from fewbit.algorithms.registry import algorithm
from fewbit.models.names import read_config
from fewbit.models.quantization.block_loop import plan_needs_calibration
from fewbit.models.quantization.block_stream import MOST_HELD, windows_at_once
from fewbit.models.quantization.plan import Plan, PlannedLayer
from fewbit.spec.element import Element

GRAM_COPIES = 10
"""float32 [K, K] of an input that GPTQ has at once: sums, means, orders, factors (9 counted, and one more)."""

SHIFT_COPIES = 5
"""The same of how inputs differ from the unquantized model's: sums, mean, order, drift and its scratch."""

LAYER_COPIES = 15
"""float32 copies of the layers that read one input: targets, values, grids and their scratch (15.02 counted)."""

TUNING_COPIES = 12
"""float32 copies of a block's weights that tuning it has: numbers, offsets, gradients, both ends of every step."""


@dataclass(frozen=True)
class Workload:
    """What decides how much memory calibration takes, beside the plan.

    Attributes:
        windows, length: windows of tokens and their length.
        on_cpu: whether blocks run on a CPU, in float32.
        most_held: see `BlockStream`.
    """

    windows: int
    length: int
    on_cpu: bool = True
    most_held: int = MOST_HELD


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes beside the interpreter.

    Attributes:
        shard: of the export, when nothing else is in memory.
        parts: what is in memory at the same time while blocks are quantized -> bytes.
    """

    shard: int
    parts: Mapping[str, int] = field(default_factory=dict)

    @property
    def peak(self) -> int:
        return max(self.shard, sum(self.parts.values()))


def memory_plan(source: Path, plan: Plan, work: Workload, max_shard_bytes: int) -> MemoryPlan:
    """The memory that a plan needs.

    Args:
        source: folder of the unquantized checkpoint.
        plan: for it.
        work: what calibration reads, and where.
        max_shard_bytes: largest size of a weight file.
    """
    if not plan_needs_calibration(plan):
        return MemoryPlan(0, {"block, layer at hand and shard": plan.peak_bytes(max_shard_bytes)})
    chosen = algorithm(plan.recipe.algorithm, plan.recipe.settings)
    stored = Element.parse(plan.dtype).bits // 8
    width = 4 if work.on_cpu else stored
    hidden = int(read_config(source).get_text_config().hidden_size)
    tokens = work.windows * work.length
    blocks: dict[str, list[PlannedLayer]] = {}
    for layer in plan.layers:
        if layer.block:
            blocks.setdefault(layer.block, []).append(layer)
    numbers = max(sum(prod(layer.shape) for layer in layers) for layers in blocks.values())
    of_pass = max(_held(layers, hidden) for layers in blocks.values()) * width
    widest = max(layer.shape[1] for layers in blocks.values() for layer in layers)
    batch = windows_at_once(work.length, widest, work.on_cpu, chosen.refines_blocks)
    one_batch = min(tokens, batch * work.length) * of_pass
    parts = {
        "weights of a block": plan.block_bytes // stored * (width + 4),  # as they run, and as they are written
        "hidden states": tokens * hidden * width * (2 if chosen.refines_blocks or chosen.compares_inputs else 1),
    }
    if chosen.needs_gram:
        beside = 2 if chosen.compares_inputs else 1  # the passes of the unquantized model
        copies = GRAM_COPIES + (SHIFT_COPIES if chosen.compares_inputs else 0)
        parts["activations held"] = max(beside * one_batch, min(beside * tokens * of_pass, work.most_held))
        parts["hidden states of the next block"] = beside * tokens * hidden * width
        parts["layers at hand"] = max(_solving(layers, copies) for layers in blocks.values())
        if chosen.compares_inputs and beside * tokens * of_pass > work.most_held:
            parts["unquantized weights of a block"] = plan.block_bytes // stored * width
    else:
        parts["activations of a batch"] = one_batch
        parts["layers at hand"] = LAYER_COPIES * 4 * max(prod(layer.shape) for layer in plan.layers if layer.block)
    if chosen.refines_blocks:
        parts["tuning"] = TUNING_COPIES * 4 * numbers + 3 * one_batch
    return MemoryPlan(plan.peak_bytes(max_shard_bytes), parts)


def _held(layers: list[PlannedLayer], hidden: int) -> int:
    """Numbers for each token that a pass holds at most while it stands at a layer: the residual, the normed state, and
    of one sub-module what its layers put out, as if none of it were let go, and what the last one reads."""
    modules: dict[str, list[PlannedLayer]] = {}
    for layer in layers:
        modules.setdefault(layer.name.rpartition(".")[0], []).append(layer)
    return 2 * hidden + max(
        sum(layer.shape[0] for layer in inner) + max(layer.shape[1] for layer in inner) for inner in modules.values()
    )


def _solving(layers: list[PlannedLayer], gram_copies: int) -> int:
    """Bytes that quantizing layers that read one input takes: those of one sub-module with equal K, at most."""
    together: dict[tuple[str, int], int] = {}
    for layer in layers:
        if layer.key is not None:
            place = (layer.name.rpartition(".")[0], layer.shape[1])
            together[place] = together.get(place, 0) + layer.shape[0]
    sizes = [4 * (gram_copies * k * k + LAYER_COPIES * n * k) for (_, k), n in together.items()]
    return max(sizes, default=0)
