"""Loading a checkpoint: a model on meta, tensors by name from the shards, each one and each parameter accounted for."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from fewbit.checkpoints.interface import StoredLayer
from fewbit.checkpoints.kv_scales import cache_scale_name
from fewbit.errors import CheckpointError
from fewbit.kernels.probe import default_device, this_machine
from fewbit.kernels.select import Preference
from fewbit.methods.base import Placement, StoredWeights
from fewbit.methods.embedding import EmbeddingMethod, QuantizedEmbedding, embedding_of
from fewbit.methods.linear import LinearMethod, linear_of
from fewbit.models.destinations import Destinations
from fewbit.models.experts import HeldExperts, UnfusedExperts
from fewbit.models.joining import Joining, JoinOutcome
from fewbit.models.joint import ProjectionPart
from fewbit.models.kv_cache import KvCacheReport, kv_cache_report
from fewbit.models.names import build_on_meta, config_dtype, read_config, tied_names
from fewbit.models.online_transforms import AppliedTransforms, apply_transforms
from fewbit.models.produced import round_as_made
from fewbit.models.replace import matrix_shape, replace_submodule, set_tensor, submodule, tensor_slot
from fewbit.models.stacked_experts import replace_stack, stack_shape
from fewbit.models.stored import StoredCheckpoint

_SCALE = re.compile(r"(?:^|_)(?:scales?|scale_inv|scale_2|zero_point|zeros)$")
"""Ends of names of tensors without which a weight is not what it is."""

Progress = Callable[[int], None]
"""Called with the number of bytes just dealt with."""


@dataclass
class LoadReport:
    """What became of a checkpoint's tensors.

    Attributes:
        format: name of the checkpoint format, empty for a plain checkpoint.
        layers: module name on disk -> what is stored, for every quantized layer.
        carried: tensors that the model class has no place for (draft heads, KV-cache scales), not used.
        kv_cache: what is known of a quantized KV cache; None where nothing speaks of one.
        joined: what became of each matrix whose members were to be joined; empty where nobody asked.
        transforms: what is done about each transform that the configuration names.
        contradictions: layers whose tensors are not what the configuration says, and its entries that match nothing.
    """

    format: str = ""
    layers: dict[str, StoredLayer] = field(default_factory=dict)
    carried: list[str] = field(default_factory=list)
    kv_cache: KvCacheReport | None = None
    joined: list[JoinOutcome] = field(default_factory=list)
    transforms: tuple[str, ...] = ()
    contradictions: list[str] = field(default_factory=list)


def load(
    path: str | Path,
    *,
    device: str = "auto",
    dtype: torch.dtype | None = None,
    preference: Preference = Preference(),
    strict: bool = False,
    join_members: bool = False,
    progress: Progress | None = None,
) -> PreTrainedModel:
    """Loads a plain or quantized checkpoint as a transformers model whose quantized layers run on chosen kernels.

    Args:
        path: the checkpoint's folder.
        device: `auto` (an accelerator if there is one), `cpu`, `cuda`, ...
        dtype: dtype of activations and of plain parameters; None for the checkpoint's own.
        preference: what to ask of the kernel choice.
        strict: whether tensors that contradict the configuration are an error rather than a line of the report.
        join_members: whether q, k and v, and gate and up, become one matrix each, in families that say that they read
            one input; the report says what had to be restated and what it cost (`joining`).
        progress: called with bytes read.

    Returns:
        The model in evaluation mode; `model.fewbit_report` is its `LoadReport`.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged.
        ModelError: transformers has no model for its configuration.
    """
    path = Path(path)
    stored = StoredCheckpoint.open(path)
    config = read_config(path)
    device = default_device() if device == "auto" else device
    dtype = dtype or config_dtype(config)
    model = build_on_meta(config, dtype)
    loader = _Loader(model, stored, Placement(this_machine(device), torch.device(device), dtype, preference))
    loader.replace_quantized_modules()
    if strict and loader.report.contradictions:
        raise CheckpointError("; ".join(loader.report.contradictions) + ".", "Load it without strict to accept this.")
    loader.fill(progress, Joining(model, loader.placement) if join_members else None)
    loader.finish()
    round_as_made(model)
    if (path / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
    model.fewbit_report = loader.report
    return model


class _Loader:
    """The state of one load: which stored module goes where, and what is still to come."""

    def __init__(self, model: PreTrainedModel, stored: StoredCheckpoint, placement: Placement) -> None:
        self.model, self.placement = model, placement
        self.tied = tied_names(model)
        self.destinations = Destinations(model, stored.modules, stored.split)
        self.stored = stored.renamed(self.destinations.renamed)
        self.report = LoadReport(format=stored.format.name if stored.format else "")
        self.targets: dict[str, str] = {}  # tensor of a quantized module on disk -> parameter of the model
        self.experts: dict[str, HeldExperts] = {}
        self.pending: dict[str, set[str]] = {}  # quantized module of the model -> its parameters still to come
        self.joining: Joining | None = None
        self.applied = AppliedTransforms()

    def replace_quantized_modules(self) -> None:
        """Puts a quantized module wherever the checkpoint's tensors say that the layer is quantized."""
        classes: list[tuple[str, str]] = []
        for module in self.stored.modules:
            path = self.destinations.module(module)
            plain = submodule(self.model, path)
            class_name = type(plain).__name__ if plain is not None else ""
            classes.append((module, class_name))
            stack = stack_shape(self.model, path)
            shape = stack[1:] if stack is not None else matrix_shape(plain)
            described = self.stored.describe(module, class_name or "Linear", shape)
            self._compare_with_scheme(module, class_name, described)
            if described is not None and (plain is not None or stack is not None):
                self._replace(module, path, plain, described)
        self.applied = apply_transforms(self.stored, self.model, self.destinations.module)
        self.report.transforms = self.applied.lines
        if self.stored.scheme and self.stored.format:
            # Modules that tensors do not show, a tied head for one, are what an entry may mean as well.
            classes += [(name, type(module).__name__) for name, module in self.model.named_modules()]
            for pattern in self.stored.scheme.unmatched(classes, self.stored.format.matcher):
                self.report.contradictions.append(f"the configuration's entry {pattern!r} matches no module")

    def _compare_with_scheme(self, module: str, class_name: str, described: StoredLayer | None) -> None:
        if self.stored.scheme is None or self.stored.format is None:
            return
        says = self.stored.scheme.key_for(module, class_name, self.stored.format.matcher)
        if says is None and described is not None:
            self.report.contradictions.append(
                f"{module} is stored as {described.key}, the configuration leaves it plain"
            )
        if says is not None and described is None and class_name == "Linear":
            self.report.contradictions.append(f"{module} is stored plain, the configuration says {says}")

    def _replace(self, module: str, path: str, plain: nn.Module | None, described: StoredLayer) -> None:
        assert self.stored.format is not None
        weights = StoredWeights(module, self.stored.format, described, self.stored.modules[module])
        replacement: nn.Module
        if plain is None:
            replacement = replace_stack(self.model, path, self.placement, weights)
        elif isinstance(plain, nn.Linear):
            replacement = linear_of(plain, self._linear_method(path, described, weights))
        elif isinstance(plain, nn.Embedding):
            replacement = embedding_of(plain, EmbeddingMethod(self.placement, weights))
        else:
            raise CheckpointError(
                f"{module} is stored as {described.key}, but {type(plain).__name__} has no quantized form.",
                "Leave this module unquantized.",
            )
        replacement.method.create_weights(replacement)
        if plain is not None:
            replace_submodule(self.model, path, replacement)
        join, leaf = self.stored.format.join, weights.parameter
        parameters = {join(module, tensor): f"{path}.{leaf(tensor)}" for tensor in weights.headers}
        self.targets |= parameters
        self.pending[path] = set(parameters.values())
        self.report.layers[module] = described

    def _linear_method(self, path: str, described: StoredLayer, weights: StoredWeights) -> LinearMethod:
        owner = path.rsplit(".", 2)[0]
        if not isinstance(submodule(self.model, owner), UnfusedExperts):
            return LinearMethod(described.key, self.placement, weights)
        if owner not in self.experts:
            self.experts[owner] = HeldExperts(self.model, owner, self.placement)
        return self.experts[owner].method(described.key, weights)

    def fill(self, progress: Progress | None, joining: Joining | None = None) -> None:
        """Reads every tensor once, file by file, and processes each quantized module as soon as it is complete."""
        self.joining, folder = joining, self.stored.folder
        for name in sorted(folder.headers, key=lambda name: (folder.file_of[name], name)):
            if name in self.applied.tensors:
                continue
            target = self.targets.get(name) or self.destinations.tensor(name)
            if tensor_slot(self.model, target) is None:
                self._carry(name)
                continue
            value = folder.load(name)
            self._set(target, value, keep_dtype=name in self.targets)
            self._process_if_complete(target)
            if progress is not None:
                progress(value.nbytes)
        scales = {name: folder.load(name) for name in self.report.carried if cache_scale_name(name)}
        key = self.stored.scheme.kv_cache if self.stored.scheme else None
        self.report.kv_cache = kv_cache_report(key, self.stored.modules, scales)

    def _carry(self, name: str) -> None:
        """Notes a tensor that has no place in the model.

        Raises:
            CheckpointError: it is a scale of a module that the model has, whose weight would be read without it; or
                belongs to a member of a projection that is stored joined as well.
        """
        module, leaf = self.stored.split(name)
        place = submodule(self.model, self.destinations.module(module))
        if isinstance(place, ProjectionPart):
            raise CheckpointError(
                f"{name} is stored, and so is {place.product.leaf}, which holds its rows.", "Remove one of them."
            )
        built = place is not None
        if built and _SCALE.search(leaf) and cache_scale_name(name) is None:
            described = self.report.layers.get(module)
            raise CheckpointError(
                f"{name} belongs to a layer that is {described.key if described else 'plain'}, and nothing uses it.",
                "Check that the configuration is the checkpoint's own; a scale that is left out changes every number.",
            )
        self.report.carried.append(name)

    def _process_if_complete(self, target: str) -> None:
        path = target.rpartition(".")[0]
        if target not in self.pending.get(path, ()):
            return
        self.pending[path].discard(target)
        if self.pending[path]:
            return
        if self.joining is not None and self.joining.takes(path):
            self.joining.take(path)
            return
        module = self.model.get_submodule(path)
        module.method.process_weights_after_loading(module)

    def _set(self, target: str, value: Tensor, keep_dtype: bool) -> None:
        slot = tensor_slot(self.model, target)
        assert slot is not None
        if slot.shape != value.shape:
            raise CheckpointError(
                f"{target} has shape {tuple(value.shape)} in the file, the model needs {tuple(slot.shape)}.",
                "Check that config.json belongs to these weights.",
            )
        if not keep_dtype and value.is_floating_point() != slot.is_floating_point():
            raise CheckpointError(
                f"{target} is {value.dtype} in the file, the model needs {slot.dtype}.",
                "Check that the configuration names the checkpoint's quantization.",
            )
        set_tensor(self.model, target, value.to(self.placement.device, value.dtype if keep_dtype else slot.dtype))

    def finish(self) -> None:
        """Prepares what is still held, ties what is tied, moves buffers, and checks that nothing is left on meta."""
        for held in self.experts.values():
            held.finish()
        for name, owner in self.tied.items():
            self._tie(name, owner)
        missing = sorted(name for name, parameter in self.model.named_parameters() if parameter.is_meta)
        if missing:
            shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise CheckpointError(f"The checkpoint lacks {shown}.", "Get the whole folder.")
        if self.joining is not None:
            self.joining.finish()
            self.report.joined = self.joining.outcomes
        for name, buffer in list(self.model.named_buffers()):
            if buffer.device != self.placement.device and not name.rpartition(".")[2].startswith("prepared_"):
                owner, _, leaf = name.rpartition(".")
                module = self.model.get_submodule(owner)
                persistent = leaf not in module._non_persistent_buffers_set
                module.register_buffer(leaf, buffer.to(self.placement.device), persistent=persistent)

    def _tie(self, name: str, owner: str) -> None:
        """Gives the tied parameter `name` what `owner` holds, or the reverse where only `name` was in the file."""
        first, second = tensor_slot(self.model, owner), tensor_slot(self.model, name)
        if first is not None and second is not None:
            if first.is_meta:
                set_tied(self.model, owner, second)
            elif second.is_meta:
                set_tied(self.model, name, first)
            return
        embedding = submodule(self.model, owner.removesuffix(".weight"))
        head_path = name.removesuffix(".weight")
        head = submodule(self.model, head_path)
        if isinstance(embedding, QuantizedEmbedding) and isinstance(head, nn.Linear) and head.weight.is_meta:
            assert embedding.record is not None
            tied = linear_of(head, LinearMethod(embedding.method.stored.stored.key, self.placement))
            tied.method.use_record(tied, embedding.record)
            replace_submodule(self.model, head_path, tied)


def set_tied(model: nn.Module, name: str, parameter: Tensor) -> None:
    """Makes the parameter of that name the same object as `parameter`."""
    owner, _, leaf = name.rpartition(".")
    model.get_submodule(owner).register_parameter(leaf, parameter)
