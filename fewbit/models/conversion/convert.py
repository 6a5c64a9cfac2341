"""Converting a quantized checkpoint to another format: layer by layer, codes as they are, or not at all.

`ConversionPlan` tries each kind of layer before anything is written. The loop then holds one layer and one shard in
memory. What was written is opened again and the numbers of every layer are compared with what was in memory; only then
does it appear under its name: a folder of safetensors, or one file where the format has its own kind (GGUF).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fewbit
from fewbit.checkpoints.dtypes import nbytes
from fewbit.checkpoints.files import CheckpointOpener, CheckpointWriter, ModelParts
from fewbit.checkpoints.interface import CheckpointFormat, TensorHeader
from fewbit.checkpoints.output import ShardWriter, copy_side_files, staged_file, staged_folder
from fewbit.checkpoints.registry import container_of, formats, opener_of, writable
from fewbit.checkpoints.tensor_files import CONFIG
from fewbit.errors import CheckpointError, ModelError, OutputError, SchemeError, closest
from fewbit.models.conversion.cache import CacheConversion
from fewbit.models.conversion.plan import ConversionPlan, ConvertOptions
from fewbit.models.conversion.treatment import CarriedOver, Dequantized, QuantizedAnew
from fewbit.models.layers import CheckpointLayer, checkpoint_layers
from fewbit.models.load import Progress
from fewbit.models.names import read_config
from fewbit.models.quantization.calibration import load_tokenizer
from fewbit.models.quantization.outcome import LayerOutcome, sqnr_db, weight_hash
from fewbit.models.quantization.pipeline import DEFAULT_SHARD_BYTES
from fewbit.models.quantization.recipe_file import recipe_of
from fewbit.models.report.facts import RECIPE_FILE, REPORT_FILE
from fewbit.models.report.files import write_report
from fewbit.models.stored import StoredCheckpoint
from fewbit.packing.registry import dequantize_record
from fewbit.spec.recipe import Recipe

DENSE: dict[str, torch.dtype] = {
    **dict.fromkeys(("bf16", "bfloat16"), torch.bfloat16),
    **dict.fromkeys(("f16", "fp16", "float16"), torch.float16),
    **dict.fromkeys(("f32", "fp32", "float32"), torch.float32),
}
"""Targets that are no format: a plain checkpoint whose weights are the dequantized numbers in this dtype."""

_QUANTIZATION_FIELDS = ("quantization_config", "compression_config")


def convert(
    source: str | Path,
    output: str | Path,
    to: str,
    *,
    requantize: str | None = None,
    dequantize: Iterable[str] = (),
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Progress | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Writes a quantized checkpoint in another format, its codes carried over bit for bit.

    Args:
        source: a folder, or a file that a plugin reads; a plain one only where `to` has its own kind of file.
        output: folder or file to write; must not exist, and appears complete or not at all.
        to: name of a checkpoint format, or of a float dtype (`bf16`) for a plain checkpoint of dequantized weights.
        requantize: name of a preset for the layers that the format cannot hold; None to refuse them.
        dequantize: patterns of layers to write plain, in the model's dtype.
        max_shard_bytes: largest size of a weight file.
        progress: called with the bytes of each source tensor dealt with.
        **options: the other fields of `ConvertOptions`.

    Returns:
        The report, which is also written to `quantization_report.json` of a folder.

    Raises:
        OutputError: the format cannot hold a layer, or the output cannot be written; nothing is left behind.
        FewbitError: anything else that a user can mend; see `fewbit.errors`.
    """
    started = time.monotonic()
    target, asked = target_of(to), ConvertOptions(requantize, dequantize=tuple(dequantize), **options)
    container = container_of(target) if isinstance(target, CheckpointFormat) else None
    stored = StoredCheckpoint.open(source)
    if stored.format is None and (container is None or requantize):
        raise CheckpointError(f"{source} is not quantized, there is nothing to convert.", "Use fewbit quantize.")
    with staged_folder(output) if container is None else staged_file(output) as place:
        run = _Conversion(Path(source), ConversionPlan(stored, target, asked), container, progress)
        written = run.write(place, max_shard_bytes)
        run.check_written(place)
        report = run.report(written, time.monotonic() - started)
        if isinstance(target, torch.dtype):
            (place / REPORT_FILE).write_text(json.dumps(report, indent=2))
        elif container is None:
            write_report(place, report)
    return report


def target_of(name: str) -> CheckpointFormat | torch.dtype:
    """What a user names: a checkpoint format that can be written, or the dtype of a plain checkpoint.

    Raises:
        SchemeError: there is none of that name.
    """
    if name.lower() in DENSE:
        return DENSE[name.lower()]
    found, known = formats().get(name), writable()
    if found is None:
        raise SchemeError(f"Unknown checkpoint format {name!r}.", closest(name, [*known, "bf16", "f16", "f32"]))
    if name not in known:
        what = "is not written for linear layers" if found.in_safetensors else "is read only"
        raise SchemeError(f"{name} {what}, and convert does not write it.", closest("", known))
    return found


class _Conversion:
    """The state of one conversion."""

    def __init__(
        self, source: Path, plan: ConversionPlan, container: CheckpointOpener | None, progress: Progress | None
    ) -> None:
        self.source, self.plan, self.container, self.stored = source, plan, container, plan.stored
        self.progress = progress or (lambda _: None)
        key = self.stored.scheme.kv_cache if self.stored.scheme else None
        self.cache = CacheConversion.of(key, plan.target, self.stored.folder.headers, carries=container is None)
        self.outcomes: list[LayerOutcome] = []
        self.restated: dict[str, str] = {}
        self.rounded: set[str] = set()
        self.roles: set[str] = set()
        self.left_out: list[str] = []

    def write(self, place: Path, max_shard_bytes: int) -> int:
        """Writes the model to a folder or file that is not there yet; the bytes of its tensors."""
        if self.container is None:
            writer: ShardWriter | CheckpointWriter = ShardWriter(place, max_shard_bytes, self._metadata)
        else:
            recipe = self._recipe(self.plan.target).to_json() if self.stored.format is not None else ""
            parts = ModelParts(read_config(self.source), self._tokenizer(), self.stored.folder, recipe)
            writer = self.container.create(place, parts)
            self.left_out = list(writer.notes)
        for name, tensor in self.tensors():
            writer.add(name, tensor)
        writer.finish()
        if self.container is None:
            self.write_side_files(place)
        return writer.nbytes

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the result, module by module."""
        of_cache, planned = {*self.cache.scales}, self.plan.stated
        join = self.stored.format.join if self.stored.format else "{}.{}".format
        for layer in self.plan.layers:
            headers = self.stored.modules[layer.name]
            owned = self._owned(layer)
            if layer.stored is not None:
                for tensor, value in self._written(layer).items():
                    yield self._written_name(layer, tensor), value
            for tensor, header in headers.items():
                name = join(layer.name, tensor) if layer.name else tensor
                if name in of_cache:
                    yield from self.cache.named(name, self.stored.folder.load(name), planned)
                elif tensor not in owned:
                    yield name, self.stored.folder.load(name)
                self.progress(nbytes(header))

    def write_side_files(self, folder: Path) -> None:
        """Writes config.json with the new quantization, the recipe, and copies what else makes a model complete."""
        if opener_of(self.source) is not None:
            config = read_config(self.source)
            config.architectures = [type(self.plan.model).__name__]
            config.save_pretrained(folder)
            tokenizer = self._tokenizer()
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            else:
                self.left_out.append(f"{self.source.name} has no tokenizer that transformers reads; add one.")
            values = json.loads((folder / CONFIG).read_text())
        else:
            copy_side_files(self.stored.folder.path, folder)
            values = self.stored.folder.json(CONFIG) or {}
        for part in (values, values.get("text_config")):
            for field in _QUANTIZATION_FIELDS if isinstance(part, dict) else ():
                part.pop(field, None)
        if isinstance(self.plan.target, torch.dtype):
            values.pop("torch_dtype", None)
            values["dtype"] = str(self.plan.target).removeprefix("torch.")
        else:
            values["quantization_config"] = self.cache.configured(self.plan.config(frozenset(self.roles)))
            (folder / RECIPE_FILE).write_text(self._recipe(self.plan.target).to_json())
        (folder / CONFIG).write_text(json.dumps(values, indent=2) + "\n")

    def check_written(self, place: Path) -> None:
        """Opens what was written and compares every layer's numbers with what was in memory.

        Raises:
            OutputError: one differs.
        """
        written = StoredCheckpoint.open(place)
        found = {layer.name: layer for layer in checkpoint_layers(written, self.plan.model)}
        sources = {layer.name: layer for layer in self.plan.layers}
        for outcome in self.outcomes:
            layer = sources[outcome.name]
            if isinstance(self.plan.treatments[outcome.name], Dequantized):
                numbers = layer.as_plain(written.folder.load(layer.plain_name)).float()
            else:
                layer = found[outcome.name]
                assert layer.stored is not None
                numbers = dequantize_record(written.record(layer.name, layer.stored, layer.shape))
            if weight_hash(numbers) != outcome.sha256:
                raise OutputError(
                    f"{layer.name} reads back as other numbers than were written.", "This is a defect; report it."
                )

    def report(self, written: int, seconds: float) -> dict[str, Any]:
        """What was done, in numbers that were measured or computed."""
        target = self.plan.target
        plain = {name for name, one in self.plan.treatments.items() if isinstance(one, Dequantized)}
        return {
            "scheme": self.stored.scheme.name if self.stored.scheme else "none",
            "format": target.name if isinstance(target, CheckpointFormat) else str(target).removeprefix("torch."),
            "algorithm": "convert",
            "source": self._source_name(),
            "source_format": self.stored.format.name if self.stored.format else "plain",
            "bytes_before": self.stored.folder.nbytes,
            "bytes_after": written,
            "seconds": round(seconds, 3),
            "versions": {"fewbit": fewbit.__version__, "torch": torch.__version__},
            "layers": [vars(outcome) for outcome in self.outcomes if outcome.name not in plain],
            "dequantized": [vars(outcome) for outcome in self.outcomes if outcome.name in plain],
            "requantized": [name for name, one in self.plan.treatments.items() if isinstance(one, QuantizedAnew)],
            "restated": self.restated,
            "rounded": sorted(self.rounded),
            "not_built": [layer.name for layer in self.plan.layers if not layer.is_built],
            "notes": self._notes(),
        }

    def _owned(self, layer: CheckpointLayer) -> set[str]:
        """Tensors of the module that its record is made of; all others are carried along."""
        if layer.stored is None or self.stored.format is None:
            return set()
        return {spec.name for spec in self.stored.format.specs(layer.stored)}

    def _written_name(self, layer: CheckpointLayer, tensor: str) -> str:
        target = self.plan.target
        plain = isinstance(target, torch.dtype) or isinstance(self.plan.treatments[layer.name], Dequantized)
        return tensor if plain else target.join(layer.name, tensor)

    def _written(self, layer: CheckpointLayer) -> dict[str, Tensor]:
        """What stores the layer now, by name below it; notes the outcome."""
        assert layer.stored is not None
        treatment = self.plan.treatments[layer.name]
        written = treatment.write(layer, self.plan.record(layer), self.plan.scheme)
        self.outcomes.append(
            LayerOutcome(
                layer.name,
                written.key,
                (layer.shape[-2], layer.shape[-1]),
                sqnr_db(written.before, written.after),
                weight_hash(written.after),
                sum(tensor.nbytes for tensor in written.tensors.values()),
                treatment.method,
                loss=None,
                clipped=None,
                tokens=None,
            )
        )
        if isinstance(treatment, CarriedOver) and str(layer.stored.key) != written.key:
            self.restated[str(layer.stored.key)] = written.key
        self.rounded |= set(written.rounded)
        self.roles |= written.roles
        return dict(written.tensors)

    def _recipe(self, target: CheckpointFormat | torch.dtype) -> Recipe:
        assert isinstance(target, CheckpointFormat)
        assert self.plan.scheme is not None and self.stored.format is not None
        settings = {"source_format": self.stored.format.name, **asdict(self.plan.options)}
        own = recipe_of(self.stored.folder.path)
        transforms = own.transforms if own is not None else ()
        return Recipe(
            self.plan.scheme, target.name, "convert", settings, source=self._source_name(), transforms=transforms
        )

    def _metadata(self, headers: Mapping[str, TensorHeader]) -> dict[str, str]:
        target, dtype = self.plan.target, str(self.plan.dtype).removeprefix("torch.")
        return {} if isinstance(target, torch.dtype) else target.file_metadata(headers, self.plan.keys, dtype)

    def _tokenizer(self) -> Any:
        """The source's, None where it has none that transformers reads."""
        try:
            return load_tokenizer(self.source)
        except ModelError:
            return None

    def _source_name(self) -> str:
        return self.source.resolve().name

    def _notes(self) -> list[str]:
        of_cache = self.cache.note(self.plan.stated)
        notes = [of_cache] if of_cache else []
        notes += self.left_out
        keys = [layer.stored.key for layer in self.plan.quantized if layer.stored is not None]
        activations = sorted({str(key.activation) for key in keys if key.activation})
        if activations and not any(key.activation for key in self.plan.keys.values()):
            notes.append(f"Activations are no longer quantized ({'; '.join(activations)}).")
        notes += [f"Each {role} was rounded to float32 once; codes and scales are the same." for role in self.rounded]
        target = self.plan.target
        if not isinstance(target, CheckpointFormat):
            return notes
        kept = [layer for layer in self.plan.quantized if layer.name in self.plan.keys]
        notes += [
            f"{layer.name} stays quantized: fewbit runs it, other readers of {target.name} expect a plain embedding "
            f"(--dequantize {layer.name})."
            for layer in kept
            if layer.embedding and self.container is None
        ]
        cautions = {target.caution(self.plan.keys[layer.name], (layer.shape[-2], layer.shape[-1])) for layer in kept}
        return notes + sorted(caution for caution in cautions if caution)
